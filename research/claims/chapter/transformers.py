"""Checks for section 6: attention in Transformers, masks, positions, the block."""

from __future__ import annotations

import torch
from torch import nn

import qkv
from qkv import masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
from qkv.positions import Learned, Rotary, Sinusoidal
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig
from research.claims import Verdict, claim, holds, only_when
from research.claims.chapter.lab_code import LabBlock


@claim(
    "C038", "chapter", "6.1", "In the original Transformer the encoder has self-attention, the decoder that and cross."
)
def c038() -> Verdict:
    def moved(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one - other).abs().max().item()

    torch.manual_seed(0)
    source, target, other = torch.randn(3, 1, 5, 16)
    last = torch.tensor([1.0, 1, 1, 1, 2])[:, None]
    torchs = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    crossed = [moved(x(target, source), x(target, other)) for x in torchs.decoder.layers]
    own = [moved(x(source)[:, 0], x(source * last)[:, 0]) for x in torchs.encoder.layers]
    sizes = {"source_vocab": 9, "target_vocab": 9, "d_model": 16, "heads": 2, "layers": 2, "d_hidden": 32}
    model, ids = EncoderDecoder(EncoderDecoderConfig(**sizes)).eval(), torch.arange(1, 6)[None]
    blocks = [(name[:7], x.cross is not None) for name, x in model.named_modules() if isinstance(x, TransformerBlock)]
    read = moved(model(ids, ids), model(ids.flip(1), ids))
    return holds(
        min(crossed) > 0.01
        and min(own) > 0.01
        and read > 1e-4
        and blocks == [("encoder", False)] * 2 + [("decoder", True)] * 2,
        "In torch's `nn.Transformer` the output of each layer of the decoder depends on the source (another one moves "
        f"it by {min(crossed):.1f} or more), and in each layer of the encoder a token on the other tokens. "
        "`qkv.models.EncoderDecoder` has cross-attention in every layer of the decoder and in none of the encoder.",
    )


@claim("C039", "chapter", "6.1", "Decoder-only models (GPT, LLaMA) have causal self-attention only.")
def c039() -> Verdict:
    found = []
    for config in (DecoderConfig.gpt2, DecoderConfig.llama):
        torch.manual_seed(0)
        model, ids = DecoderLM(config(vocab_size=50, d_model=16, layers=2, heads=2)).eval(), torch.arange(12)[None]
        changed = ids.clone()
        changed[:, 8] = 40
        moved = (model(ids) - model(changed)).abs().amax((0, 2)) > 0
        found.append(all(b.cross is None for b in model.blocks) and moved.tolist() == [False] * 8 + [True] * 4)
    return holds(
        all(found), "No layer has cross-attention; a changed token moves no output before it, and all from it on."
    )


@claim("C040", "chapter", "6.2", "Adding −∞ to the scores of later keys before the softmax removes the future.")
def c040() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(9, 9) + torch.full((9, 9), -torch.inf).triu(1)
    most = s.softmax(-1).triu(1).max().item()
    return holds(most == 0, f"The largest weight above the diagonal of 9 × 9 is {most:g}, exactly.")


@claim("C041", "chapter", "6.2", "Position i, counted from 1, may attend to exactly i positions.")
def c041() -> Verdict:
    seen = masks.Causal().dense(7, 7)[0, 0].sum(-1).tolist()
    return holds(seen == [1, 2, 3, 4, 5, 6, 7], f"Of 7 queries: {seen}.")


@claim(
    "C042", "chapter", "6.3", "Self-attention is permutation equivariant: shuffled inputs give the outputs, shuffled."
)
def c042() -> Verdict:
    torch.manual_seed(0)
    layer, x, order = (
        MultiHeadAttention(16, 2).double(),
        torch.randn(1, 10, 16, dtype=torch.float64),
        torch.randperm(10),
    )
    error = {
        name: (layer(x[:, order], mask=mask) - layer(x, mask=mask)[:, order]).abs().max().item()
        for name, mask in (("none", None), ("causal", masks.Causal()))
    }
    return only_when(
        error["none"] < 1e-14 and error["causal"] > 0.1,
        f"Without a mask it is, to {error['none']:.1g}. A causal mask knows the order: shuffled, outputs differ by "
        f"up to {error['causal']:.1f}.",
    )


@claim("C043", "chapter", "6.3", "Without positions, *dog bites man* and *man bites dog* have the same representation.")
def c043() -> Verdict:
    found = {}
    for name, mask in (("both ways", None), ("causal", masks.Causal())):
        torch.manual_seed(0)
        words, layer = torch.randn(3, 16, dtype=torch.float64), MultiHeadAttention(16, 2).double()
        one, other = (layer(words[list(order)][None], mask=mask)[0] for order in ((0, 1, 2), (2, 1, 0)))
        by_word = (one - other.flip(0)).abs().max().item()
        found[name] = by_word, (one - other).abs().max().item(), (one.mean(0) - other.mean(0)).abs().max().item()
    return only_when(
        max(found["both ways"][::2]) < 1e-14 < found["both ways"][1] and min(found["causal"]) > 0.01,
        "In an encoder, and taken as a set: every word gets the same vector in both (to "
        f"{found['both ways'][0]:.1g}), so their mean is the same, in another order. A causal model tells them apart "
        f"with no positions at all: the vectors of words differ by up to {found['causal'][0]:.1f}.",
    )


@claim(
    "C044", "chapter", "6.3", "Sinusoidal positions: sines at even, cosines at odd dimensions, of pos / 10000^(2i/d)."
)
def c044() -> Verdict:
    d, pos = 16, torch.arange(50, dtype=torch.float64)[:, None]
    angle = pos / 10_000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    error = (Sinusoidal(d)(torch.arange(50)) - table).abs().max().item()
    gram = table @ table.T
    off = max((gram.diagonal(k) - gram[0, k]).abs().max().item() for k in range(50))
    return holds(
        error < 1e-5 and off < 1e-13,
        f"`qkv.positions.Sinusoidal` has that table to {error:.1g} (float32). The product of two positions' vectors "
        f"depends on their distance alone, to {off:.1g}.",
    )


@claim("C045", "chapter", "6.3", "Learned positions are a table of n_max × d_model, with nothing beyond n_max.")
def c045() -> Verdict:
    table, said = Learned(8, 4), ""
    try:
        table(torch.tensor([8]))
    except qkv.InputError as error:
        said = str(error)
    return holds(tuple(table.weight.shape) == (8, 4) and said != "", f"Position 8 of a table of 8: “{said}”.")


@claim("C046", "chapter", "6.3", "RoPE turns queries and keys so that their score depends on relative position.")
def c046() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 1, 40, 16)
    turned_q, turned_k = (Rotary(16)(x, torch.arange(40)) for x in (q, k))
    scores = (turned_q @ turned_k.mT)[0, 0]
    same = max((scores.diagonal(i) - scores.diagonal(i)[0]).abs().max().item() for i in range(-39, 40))
    return holds(
        same < 1e-5 and scores[0].std() > 0.1,
        f"One query and one key at 40 × 40 positions: scores of equal distance agree to {same:.1g}, and of different "
        f"distance they vary with deviation {scores[0].std():.1f}.",
    )


@claim("C047", "chapter", "6.3", "ALiBi adds terms that depend on position to the scores.")
def c047() -> Verdict:
    q = torch.zeros(1, 4, 20, 8)  # scores of 0: what is left is the bias
    _, weights = qkv.attend(q, q, q, mask=masks.Causal(), bias=qkv.biases.ALiBi(), return_weights=True)
    steps = weights[0, :, -1].double().log().diff(dim=-1)
    slopes, said = steps.mean(-1), [2**-i for i in (2, 4, 6, 8)]
    return holds(
        steps.std(-1).max() < 1e-5 and (slopes - torch.tensor(said)).abs().max() < 1e-5,
        f"Each step away lowers the score by the same: with 4 heads by "
        f"{', '.join(f'{x:.3g}' for x in slopes.tolist())}.",
    )


@claim("C049", "chapter", "6.4", "A block is norm, attention, residual, norm, feed-forward, residual; so is the lab's.")
def c049() -> Verdict:
    torch.manual_seed(0)
    lab, x, mask = LabBlock(16, 2, 64).double(), torch.randn(2, 5, 16, dtype=torch.float64), torch.ones(5, 5).tril()
    for norm in (lab.before_attention, lab.before_feed_forward):  # at the start they would all be alike
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    wide, _, narrow = lab.feed_forward
    ours = TransformerBlock(MultiHeadAttention(16, 2, bias=False, fused=False), FeedForward(16, 64, activation="gelu"))
    ours.double().attention.load_state_dict(lab.attention.state_dict())
    pairs = [(ours.feed_forward.up, wide), (ours.feed_forward.down, narrow)]
    pairs += [(ours.attention_norm, lab.before_attention), (ours.feed_forward_norm, lab.before_feed_forward)]
    for own, labs in pairs:
        own.load_state_dict(labs.state_dict())
    expected = lab(x, mask)
    error = (ours(x, mask=masks.Causal()) - expected).abs().max().item()
    middle = lab.before_attention(x + lab.attention(x, mask)[0])
    original = lab.before_feed_forward(middle + lab.feed_forward(middle))
    other = (original - expected).abs().max().item()
    return holds(
        error < 1e-12 and other > 0.1,
        "That is a pre-norm block, x + f(norm(x)) twice. The lab's block, with the same weights, has the output of "
        f"qkv's `TransformerBlock` to {error:.1g}. The original Transformer puts the norm after the sum: with these "
        f"weights its output differs by up to {other:.1f}.",
    )


@claim("C052", "chapter", "6.4", "The feed-forward network widens 512 to 2048 numbers, applies GELU, and comes back.")
def c052() -> Verdict:
    layer = FeedForward(512, 2048, activation="gelu")
    count = sum(p.numel() for p in layer.parameters())
    return holds(
        count == 512 * 2048 + 2048 + 2048 * 512 + 512 and layer(torch.randn(1, 512)).shape == (1, 512),
        f"It has {count:,} parameters, biases included: twice as many as the attention of that width.",
    )

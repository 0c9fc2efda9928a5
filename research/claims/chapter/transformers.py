"""Checks of the chapter: Transformers, and complexity."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
from qkv.positions import Learned, Rotary, Sinusoidal
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig
from research.claims import Verdict, claim, holds, only_when
from research.claims.chapter.labs import LabBlock


@claim("6.1", "In the original Transformer the encoder has self-attention, the decoder that and cross.")
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


@claim("6.1", "Decoder-only models (GPT, LLaMA) have causal self-attention only.")
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


@claim("6.2", "Adding −∞ to the scores of later keys before the softmax removes the future.")
def c040() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(9, 9) + torch.full((9, 9), -torch.inf).triu(1)
    most = s.softmax(-1).triu(1).max().item()
    return holds(most == 0, f"The largest weight above the diagonal of 9 × 9 is {most:g}, exactly.")


@claim("6.2", "Position i, counted from 1, may attend to exactly i positions.")
def c041() -> Verdict:
    seen = masks.Causal().dense(7, 7)[0, 0].sum(-1).tolist()
    return holds(seen == [1, 2, 3, 4, 5, 6, 7], f"Of 7 queries: {seen}.")


@claim("6.3", "Self-attention is permutation equivariant: shuffled inputs give the outputs, shuffled.")
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


@claim("6.3", "Without positions, *dog bites man* and *man bites dog* have the same representation.")
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


@claim("6.3", "Sinusoidal positions: sines at even, cosines at odd dimensions, of pos / 10000^(2i/d).")
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


@claim("6.3", "Learned positions are a table of n_max × d_model, with nothing beyond n_max.")
def c045() -> Verdict:
    table, said = Learned(8, 4), ""
    try:
        table(torch.tensor([8]))
    except qkv.InputError as error:
        said = str(error)
    return holds(tuple(table.weight.shape) == (8, 4) and said != "", f"Position 8 of a table of 8: “{said}”.")


@claim("6.3", "RoPE turns queries and keys so that their score depends on relative position.")
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


@claim("6.3", "ALiBi adds terms that depend on position to the scores.")
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


@claim("6.4", "A block is norm, attention, residual, norm, feed-forward, residual; so is the lab's.")
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


@claim("6.4", "The feed-forward network widens 512 to 2048 numbers, applies GELU, and comes back.")
def c052() -> Verdict:
    layer = FeedForward(512, 2048, activation="gelu")
    count = sum(p.numel() for p in layer.parameters())
    return holds(
        count == 512 * 2048 + 2048 + 2048 * 512 + 512 and layer(torch.randn(1, 512)).shape == (1, 512),
        f"It has {count:,} parameters, biases included: twice as many as the attention of that width.",
    )


@claim("7.1", "QKᵀ takes O(n² d_k) operations, the softmax O(n²), AV O(n² d_v).")
def c053() -> Verdict:
    def products(n: int, d_k: int, d_v: int) -> int:
        q, v, weights = (torch.empty(shape, device="meta") for shape in ((n, d_k), (n, d_v), (n, n)))
        with FlopCounterMode(display=False) as counter:
            _ = q @ q.T, weights @ v
        return counter.get_total_flops()

    wider_keys = products(64, 48, 32) - products(64, 16, 32)  # 2 n² a number of d_k
    wider_values = products(64, 16, 64) - products(64, 16, 32)
    longer = products(128, 16, 32) / products(64, 16, 32)
    return holds(
        (wider_keys, wider_values, longer) == (2 * 64**2 * 32, 2 * 64**2 * 32, 4),
        f"Counted by torch: at 64 tokens 32 more numbers a key, or a value, cost {wider_keys:,} operations, 2 n² each; "
        f"twice the tokens cost {longer:.0f} times as much. The softmax is of n² numbers.",
    )


@claim("7.1", "The time of attention is O(n² d).")
def c054() -> Verdict:
    def share(n: int, d: int = 512) -> float:
        """Of the products' operations, those of the four projections; 8 heads."""
        x, w, q = (torch.empty(shape, device="meta") for shape in ((n, d), (d, 4 * d), (8, n, d // 8)))
        with FlopCounterMode(display=False) as counter:
            _ = x @ w
            projections = counter.get_total_flops()
            _ = q @ q.mT @ q
        return projections / counter.get_total_flops()

    found = {n: share(n) for n in (128, 1024, 8192)}
    return only_when(
        found[128] > 0.8 and found[1024] == 0.5 and found[8192] < 0.2,
        "Without the projections, which take O(n d²). At d = 512 they are "
        + ", ".join(f"{s:.0%} of the work at {n:,} tokens" for n, s in found.items())
        + ": n² d is the larger part from n = 2 d on.",
    )


def estimated(n: int, heads: int, kernel: str) -> tuple[int, int]:
    """Operations and peak memory by `qkv.plan`."""
    q = torch.empty(1, heads, n, 64)
    plan = qkv.plan(q, q, q, kernel=kernel)
    return plan.flops, plan.peak_bytes


@claim("7.1", "The space of attention is O(n²), for the attention matrix.")
def c055() -> Verdict:
    eager, tiled = [estimated(2048, 8, kernel)[1] / estimated(1024, 8, kernel)[1] for kernel in ("eager", "tiled")]
    by_heads = estimated(1024, 8, "eager")[1] / estimated(1024, 1, "eager")[1]
    return only_when(
        3.5 < eager < 4.1 and tiled < 2.1 and 7 < by_heads < 8.1,
        f"If the matrix is formed, and then one for each head: with twice the tokens the estimate of `qkv.plan` is "
        f"{eager:.1f} times as much. A kernel that works through it in tiles, such as FlashAttention, never holds it: "
        f"{tiled:.1f} times.",
    )


@claim("7.1", "FlashAttention is one of the efficient answers to the quadratic cost.")
def c056() -> Verdict:
    small, large = [[estimated(n, 1, kernel) for kernel in ("eager", "tiled")] for n in (1024, 4096)]
    work, memory = [[many[i] / few[i] for few, many in zip(small, large, strict=True)] for i in (0, 1)]
    return only_when(
        work == [16, 16] and memory[0] > 15 and memory[1] < 4.1,
        f"To the quadratic memory: with 4 times the tokens it takes {memory[1]:.1f} times as much, by the estimates of "
        f"`qkv.plan`, the formed matrix {memory[0]:.1f} times (measured: C300). The "
        "work stays quadratic, 16 times for both; Longformer and BigBird, named beside it, "
        "make that linear by looking at fewer pairs.",
        "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)",
    )


@claim("7.2", "Attention routes by content; convolutions and recurrences have a fixed structure.")
def c057() -> Verdict:
    torch.manual_seed(0)
    one, other = torch.randn(2, 1, 6, 8, dtype=torch.float64)
    attention, convolution = MultiHeadAttention(8, 1).double(), nn.Conv1d(8, 8, 3, padding=1).double()

    def route(layer: object, x: torch.Tensor) -> torch.Tensor:
        """Jacobian: how each output depends on each input."""
        return torch.autograd.functional.jacobian(layer, x)[0, :, :, 0]

    def conv(x: torch.Tensor) -> torch.Tensor:
        return convolution(x.mT).mT

    differ = [(route(f, one) - route(f, other)).abs().max().item() for f in (attention, conv)]
    return holds(
        differ[0] > 0.1 and differ[1] == 0,
        f"How outputs depend on inputs changes with the text in attention (by up to {differ[0]:.2f}) and not at all "
        "in a convolution. Of a recurrence it is the path that is fixed, one token after another; what a gated one "
        "lets through depends on content.",
    )


@claim("7.3", "After the first layer each position has direct access to all positions.")
def c058() -> Verdict:
    n = 64
    seen = {name: (mask.dense(n, n)[0, 0] if mask else torch.ones(n, n)).double().mean().item()
            for name, mask in (("no mask", None), ("causal", masks.Causal()), ("window", masks.Window(8)))}  # fmt: skip
    return only_when(
        seen["no mask"] == 1 and seen["causal"] < 0.51 and seen["window"] < 0.15,
        f"Without a mask. Of the pairs of 64 positions a causal mask lets one layer see {seen['causal']:.0%}, "
        f"positions up to the query's own, and a window of 8 {seen['window']:.0%}.",
    )


@claim("7.3", "Mixing, repeated, can hurt: what a position has to say gets diluted.")
def c060() -> Verdict:
    def likeness(residual: bool) -> list[float]:
        """Mean cosine of two tokens' states after 0, 4 and 12 layers of attention with random weights."""
        torch.manual_seed(0)
        x, found = torch.randn(1, 32, 64), []
        for depth in range(13):
            if depth in (0, 4, 12):
                unit = nn.functional.normalize(x[0], dim=-1)
                found.append(((unit @ unit.T).sum() - 32).item() / (32 * 31))
            mixed = MultiHeadAttention(64, 4)(x)
            x = x + mixed if residual else mixed
        return found

    bare, kept = likeness(False), likeness(True)
    return holds(
        abs(bare[0]) < 0.1 and bare[1] > 0.99 and kept[1] < bare[1] and kept[2] < bare[2],
        f"Attention alone makes all tokens alike: with random weights, the mean cosine of two of 32 tokens' states is "
        f"{bare[0]:.2f}, {bare[1]:.3f} and {bare[2]:.3f} after 0, 4 and 12 layers. Residuals slow it down ("
        f"{kept[1]:.2f} after 4, {kept[2]:.2f} after 12).",
        "[Dong et al. 2021](https://arxiv.org/abs/2103.03404)",
    )

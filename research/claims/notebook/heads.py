"""Checks of the notebook: the idea, and heads."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import kernels
from qkv.masks import Causal
from qkv.models import DecoderLM, load
from qkv.nn import MultiHeadAttention
from research.claims import Verdict, claim, false, holds, only_when


@claim("1", "Processing “cat” in “The cat sat on the mat” looks at all other words, later ones too.")
def c143() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 16)
    later = {
        name: qkv.attend(q, k, v, mask=mask, return_weights=True)[1][0, 0, 1, 2:].sum().item()
        for name, mask in (("unmasked", None), ("causal", Causal()))
    }
    return only_when(
        later["unmasked"] > 0.1 and later["causal"] == 0,
        f"Only without a mask, as in BERT: “cat” then puts {later['unmasked']:.2f} of its weight on the four later "
        "words in this random example. Under a causal mask, as in GPT and in the notebook's own later sections, it is "
        "exactly 0.",
    )


@claim("1", "RNNs have limited memory because gradients vanish with distance.")
def c144() -> Verdict:
    def gradients(kind: str, lags: tuple[int, ...]) -> list[float]:
        torch.manual_seed(0)
        x = torch.randn(8, 64, 32, requires_grad=True)
        if kind == "attention":
            last = qkv.nn.MultiHeadAttention(32, 4, attention=qkv.Attention(mask=Causal()))(x)[:, -1]
        else:
            last = {"RNN": nn.RNN, "LSTM": nn.LSTM}[kind](32, 32, batch_first=True)(x)[0][:, -1]
        (grad,) = torch.autograd.grad(last.square().sum(), x)
        return [grad[:, 63 - lag].norm().item() for lag in lags]

    found = {kind: gradients(kind, (1, 60)) for kind in ("RNN", "LSTM", "attention")}
    ratio = {kind: far / near for kind, (near, far) in found.items()}
    return holds(
        ratio["RNN"] < 1e-6 and ratio["LSTM"] < 1e-6 and 0.1 < ratio["attention"] < 10,
        "Untrained, the gradient of the last output with respect to the input 60 tokens back is, over that 1 token "
        f"back: tanh RNN {ratio['RNN']:.0e}, LSTM {ratio['LSTM']:.0e}, attention {ratio['attention']:.1f}. These are "
        "torch's initial weights; larger recurrent weights or an LSTM's forget bias slow the decay.",
        "[Recurrence and attention](../background/recurrence.md)",
        "[`plan.diagram()`: the steps of a call](../mechanisms/index.md)",
    )


@claim("1", "Attention has unlimited memory.")
def c145() -> Verdict:
    import transformers

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    model, read = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=16)), []
    for n in (16, 17):
        try:
            read.append(model(torch.zeros(1, n, dtype=torch.long)).logits.shape[1])
        except IndexError:  # of the table of positions
            read.append(0)
    kept, work, held = {}, {}, {}
    for n in (1_000, 2_000):
        keys = transformers.DynamicCache()
        keys.update(torch.zeros(1, 2, n, 8), torch.zeros(1, 2, n, 8), 0)
        kept[n] = sum(layer.keys.nbytes + layer.values.nbytes for layer in keys.layers)
        x = torch.empty(n, 16, device="meta")
        with FlopCounterMode(display=False) as counter:
            (x @ x.T).softmax(-1) @ x
        work[n] = counter.get_total_flops()
    for n in (10, 1_000, 100_000):
        s = torch.randn(1, 1, 10, n, generator=torch.Generator().manual_seed(0))
        s[..., 0] = 4  # the key that is wanted: four standard deviations above the mean
        q, k = 10**0.5 * torch.eye(10)[None, None], s.mT  # products over √10 are s
        held[n] = qkv.attend(q, k, k, return_weights=True)[1][..., 0].mean().item()
    return false(
        read == [16, 0]
        and kept[2_000] == 2 * kept[1_000]
        and work[2_000] == 4 * work[1_000]
        and held[10] > 0.7
        and held[100_000] < 0.001,
        "It reaches as far as the context, and pays for it. A GPT-2 with a table of 16 positions reads 16 tokens and "
        f"fails with an IndexError on 17; from 1,000 to 2,000 tokens the cache grows {kept[2_000] / kept[1_000]:.0f} "
        f"times and the products of a pass {work[2_000] / work[1_000]:.0f} times. Within the context nothing fades "
        "with distance, which is what is meant, but softmax divides among all: a key whose score is 4 where all others "
        f"have N(0, 1) gets {held[10]:.2f} of the weight among 10 keys and {held[100_000]:.4f} among 100,000.",
    )


@claim("2", "Element (i, j) of $QK^T$ is how much position i attends to position j.")
def c147() -> Verdict:
    q, k = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [2.2, 3.0]])
    scores = q @ k.T
    weights = (scores / 2**0.5).softmax(-1)
    return only_when(
        bool(scores[0, 0] > scores[1, 1]) and bool(weights[0, 0] < weights[1, 1]),
        "It is a raw score, and becomes an amount only after the softmax over its row: here the score "
        f"{scores[0, 0]:.1f} in row 0 gives the weight {weights[0, 0]:.2f}, the smaller score {scores[1, 1]:.1f} in "
        f"row 1 gives {weights[1, 1]:.2f}. Only within one row do scores and weights have the same order.",
    )


@claim("2", "Scaling by $1/\\sqrt{d_k}$ keeps the softmax from saturating.")
def c148() -> Verdict:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for d in (16, 64, 512):
        q, k = torch.randn(2, 2_000, 16, d, generator=generator)
        scores = (q[:, :1] * k).sum(-1)
        found[d] = [(s.std().item(), s.softmax(-1).amax(-1).mean().item()) for s in (scores, scores / d**0.5)]
    text = "; ".join(
        f"{d}: {b[0]:.2f} and {b[1]:.2f} (unscaled {a[0]:.1f} and {a[1]:.2f})" for d, (a, b) in found.items()
    )
    return holds(
        all(abs(b[0] - 1) < 0.05 and b[1] < 0.4 for _, b in found.values()) and found[512][0][1] > 0.9,
        f"Standard deviation of the scores and mean top weight of 16 keys, for unit-variance q and k, by d: {text}.",
    )


CLARK = "[Clark et al. 2019](https://arxiv.org/abs/1906.04341)"
VOITA = "[Voita et al. 2019](https://arxiv.org/abs/1905.09418)"
PROGRAM = """for name in names:
    if name not in seen:
        seen.append(name)
    else:
        raise ValueError("twice: " + name)
return sorted(seen, key=len)
"""


def untrained(seed: int, x: torch.Tensor) -> torch.Tensor:
    """Causal weights (batch, 8, n, n) of an untrained layer with 8 heads of size 16, as in section 6."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(128, 8, attention=qkv.Attention(mask=Causal()))
    with torch.no_grad():
        return layer(x, return_weights=True)[1]


@claim("5", "Heads divide the work: one on syntax, one on semantics, one on long-range dependencies.")
def c159() -> Verdict:
    model = load("qkv-mini")
    torch.manual_seed(0)
    fresh = DecoderLM(model.config)
    trained = qkv.profile("qkv-mini", PROGRAM, probe=False, progress=False)
    ids = torch.randint(model.config.vocab_size, (1, trained.data.sizes["query"]))
    reach, before = (
        trained.heads()["distance"].to_numpy(),
        qkv.profile(fresh, ids, probe=False, progress=False).heads()["distance"],
    )
    kinds = Counter(trained.types()["type"])
    return only_when(
        reach.max() > 5 * reach.min() and before.max() < 1.1 * before.min() and kinds["mixed"] > 0,
        "Only as a picture of what some heads come to do. The heads of `qkv-mini` look "
        f"{before.min():.1f} to {before.max():.1f} tokens back on average with initial weights and {reach.min():.1f} "
        f"to {reach.max():.1f} after training, so there are local and long-range heads. But the kinds "
        f"are not assigned: {kinds['first token']} heads do the same (they rest on the first token), and "
        f"{kinds['mixed']} are of no clear kind. In BERT some heads follow one syntactic "
        "relation, and most heads of a trained translator could be pruned.",
        CLARK,
        VOITA,
    )


@claim("5", "With $d_{model} = 512$ and 8 heads each has 64 dimensions, and the layer returns 512.")
def c160() -> Verdict:
    layer, x = MultiHeadAttention(512, 8), torch.randn(1, 3, 512)
    q, _, _ = layer.in_proj(x).chunk(3, -1)
    heads = q.unflatten(-1, (8, -1)).transpose(1, 2)
    joined = heads.transpose(1, 2).flatten(-2)
    return holds(
        heads.shape == (1, 8, 3, 64) and joined.shape == layer(x).shape == x.shape,
        f"(batch, n, 512) becomes 8 × (batch, n, {heads.shape[-1]}), joined (batch, n, {joined.shape[-1]}), and comes "
        "out as wide.",
    )


@claim("5", "The input is split into 8 parts, one a head.")
def c161() -> Verdict:
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(64, 8), torch.randn(1, 1, 64, requires_grad=True)
    first = layer.in_proj(x)[..., :8]
    (grad,) = torch.autograd.grad(first.sum(), x)
    reached = int((grad != 0).sum())
    return only_when(
        reached == 64,
        "What is split are the queries, keys and values that the projections make of the input: the first head's query "
        f"depends on all {reached} numbers of the input, not on the first 8.",
    )


@claim("6", "The layer prints the size of a head and its scale, for 128 dimensions in 8 heads.")
def c162() -> Verdict:
    layer, seen = MultiHeadAttention(128, 8), []
    with kernels.watching(lambda call, _: seen.append(call.q)):
        out, weights = layer(torch.randn(1, 3, 128), return_weights=True)
    size = tuple(seen[0].shape)[-1]
    unit = torch.zeros(1, 1, 2, size)
    unit[..., 0, 0] = 1  # of two keys, one has a product of 1 with the query: the scale is what it gains in its score
    _, two = qkv.attend(unit[:, :, :1], unit, unit, return_weights=True)
    scale = (two[0, 0, 0, 0] / two[0, 0, 0, 1]).log().item()
    return holds(
        out.shape == (1, 3, 128) and weights.shape[1] * size == 128 and size == 16 and abs(scale - 0.25) < 1e-6,
        f"{size}, and 1/√16 = {scale:.4f}, as computed from two weights. The text shows no number.",
    )


@claim("6", "Multi-head attention keeps the shape (2, 10, 128).")
def c163() -> Verdict:
    out = MultiHeadAttention(128, 8)(torch.randn(2, 10, 128))
    return holds(out.shape == (2, 10, 128), f"The output is {tuple(out.shape)}.")


@claim("6.1", "The weights are (2, 8, 10, 10): batch, heads, queries, keys.")
def c164() -> Verdict:
    weights = untrained(0, torch.randn(2, 10, 128))
    return holds(weights.shape == (2, 8, 10, 10), f"They are {tuple(weights.shape)}.")


@claim("6.1", "A comment: the figure shows the first 4 heads.")
def c165() -> Verdict:
    maps = untrained(0, torch.randn(2, 10, 128))[0].numpy()
    panels = Figure().subplots(2, 4)
    for head in range(8):  # as the code goes over them
        panels[head // 4, head % 4].imshow(maps[head])
    pictures = [panel.images[0].get_array() for panel in panels.flat if panel.images]
    shown = [[h for h, one in enumerate(maps) if np.array_equal(one, picture)] for picture in pictures]
    return false(
        shown == [[head] for head in range(8)],
        f"All {len(pictures)}: the code goes over eight heads and fills the whole grid of 2 × 4, each map once.",
    )


@claim("6.1", "The figure shows that each head learns another pattern.")
def c166() -> Verdict:
    torch.manual_seed(1)
    weights = untrained(0, torch.randn(400, 10, 128)).double()
    even = Causal().dense(10, 10)[0, 0] / torch.arange(1, 11)[:, None]

    def off(maps: torch.Tensor) -> float:
        return ((maps - even).abs().sum(-1)[..., 1:] / 2).mean().item()

    one, mean = off(weights), off(weights.mean(0))
    return only_when(
        one > 5 * mean,
        "Only of a trained layer, and this one has its initial weights: nothing has been learnt. Its maps differ "
        f"because the input is random. One map is {one:.2f} away from even weights (total variation, mean over rows), "
        f"and each head's mean over 400 inputs {mean:.2f}: no head has a pattern of its own.",
    )


@claim("6.1", "All heads respect the causal mask.")
def c167() -> Verdict:
    torch.manual_seed(1)
    weights = untrained(0, torch.randn(2, 10, 128))
    worst = weights.triu(1).max().item()
    return holds(worst == 0, f"The largest weight above the diagonal, over 8 heads, is {worst:.0f}.")


@claim("7", "The causal mask lets a token look only at past tokens.")
def c168() -> Verdict:
    torch.manual_seed(1)
    weights = untrained(0, torch.randn(1, 10, 128))[0]
    own = weights.diagonal(dim1=-2, dim2=-1)
    return only_when(
        weights.triu(1).max() == 0 and bool((own > 0).all()),
        f"At past tokens and at itself: the least weight on the own token is {own.min():.3f}, and the first token, "
        f"which has no past, puts {own[:, 0].min():.0f} on itself.",
    )


@claim("7", "In the heatmap of the sentence each row shows where that token is looking.")
def c169() -> Verdict:
    maps = []
    for seed in range(100):
        torch.manual_seed(seed)
        maps.append(untrained(seed, nn.Embedding(6, 128).weight.detach()[None])[0, 0])
    visible = Causal().dense(6, 6)[0, 0] & (torch.arange(6) > 0)[:, None]
    excess = torch.stack(maps) * torch.arange(1, 7)[:, None] - 1  # 0 where weights are even
    flat = excess[:, visible]
    alike = torch.corrcoef(flat).triu(1).sum() / (100 * 99 / 2)
    return only_when(
        abs(alike) < 0.05,
        "Rows do, but here embeddings and projections are random numbers, so the picture says nothing about the words: "
        f"drawn again with other seeds it is another one (mean correlation of 100 such maps: {alike:.2f}). It takes a "
        "trained model.",
    )

"""Checks of the chapter's labs."""

from __future__ import annotations

import math

import torch
from matplotlib.gridspec import GridSpec
from torch import Tensor, nn
from torch.nn import functional as F

import qkv
from qkv import kernels, masks
from qkv.nn import MultiHeadAttention
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.chapter.sinks import heads_of_mini


class LabAttention(nn.Module):
    """Lab 2's layer of (batch, n, width): all of it projected, split into heads; returns the output and weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        assert width % heads == 0, f"{width} is not divisible by {heads}"
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (into_heads(part(x), self.heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:  # 1 where a query may look
            scores = scores.masked_fill(mask == 0, -torch.inf)
        weights = scores.softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def into_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, n, width) to (batch, heads, n, width // heads), by a view, as lab 2 does it."""
    batch, n, width = x.shape
    return x.view(batch, n, heads, width // heads).transpose(1, 2)


class LabBlock(nn.Module):
    """Lab 5's block, without its dropout: normalise, attend, add; normalise, feed forward, add."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = LabAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.before_attention(x), mask)[0]
        return x + self.feed_forward(self.before_feed_forward(x))


class LabModel(nn.Module):
    """Lab 5's model, without its dropout: tables of tokens and positions, blocks, a norm, logits by the tokens.

    All parameters have torch's initial values, as in the lab: tables from N(0, 1).
    """

    def __init__(self, vocab: int, width: int = 256, heads: int = 4, layers: int = 4, context: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(LabBlock(width, heads, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(n))
        for block in self.blocks:
            x = block(x, torch.ones(n, n).tril())
        return self.norm(x) @ self.tokens.weight.T

    def loss(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy of each token but the first, in nats."""
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def lab_score(weights: Tensor, threshold: float = 0.3) -> float:
    """Lab 4's sink score of (head, n, n) weights: the share of column 0, without its first row, above the threshold."""
    _heads, _queries, _keys = weights.shape
    return (weights[:, 1:, 0] > threshold).double().mean().item()


def sigmoid_experiment(size: int = 64, n: int = 32) -> Tensor:
    """The weights of lab 4's experiment, (1, n, n): no heads, and a first key that is twice the mean query."""
    q, k = torch.randn(2, 1, n, size)
    k[0, 0] = 2 * q.mean((0, 1))
    scores = (q @ k.mT / size**0.5).masked_fill(torch.ones(n, n).tril() == 0, -torch.inf)
    return scores.softmax(-1)


@claim("Lab 1", "The attention function gives output (2, 4, 8), weights (2, 4, 4), and rows that sum to 1.")
def c109() -> Verdict:
    q, k, v = torch.randn(3, 2, 4, 8)
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    shapes = tuple((weights @ v).shape), tuple(weights.shape)
    sums = torch.allclose(weights.sum(-1), torch.ones(2, 4), atol=1e-6)
    return holds(shapes == ((2, 4, 8), (2, 4, 4)) and sums, f"The same steps give {shapes}, and rows that sum to 1.")


@claim("Lab 1", "To hide keys it is enough to fill their scores with −∞ before the softmax.")
def c110() -> Verdict:
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])  # the last sees nothing
    out, slope = {}, {}
    for name in ("filled", "qkv"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 1, 3, 4).requires_grad_() for _ in range(3))
        filled = (q @ k.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        out[name] = filled if name == "filled" else qkv.attend(q, k, v, mask=mask)
        out[name][:, :, :2].sum().backward()  # the loss leaves the last row out
        slope[name] = v.grad
    return only_when(
        bool(out["filled"][..., 2, :].isnan().all() and slope["filled"].isnan().any() and slope["qkv"].isfinite().all())
        and bool((out["qkv"][..., 2, :] == 0).all()),
        "While every query sees a key. A row that sees none becomes NaN, and so do gradients of the values, even "
        "where the loss leaves that row out. `qkv.attend` returns 0 for it, with gradients of 0.",
    )


@claim("Ex 1.1", "Higher entropy means attention more even, lower entropy more focused.")
def c111() -> Verdict:
    s = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([0 * s, s, 4 * s, 1000 * s]).softmax(-1)
    entropy = torch.special.entr(rows).sum(-1).tolist()
    return holds(
        entropy == sorted(entropy, reverse=True) and abs(entropy[0] - math.log(16)) < 1e-12 and entropy[3] < 1e-6,
        f"Scores times 0, 1, 4 and 1000 over 16 keys: {', '.join(f'{x:.2f}' for x in entropy)} nats, from ln 16 to 0.",
    )


@claim("Ex 1.2", "Temperatures of 0.5, 1 and 2 make attention sharper or more even, in order.")
def c112() -> Verdict:
    scores = torch.randn(20_000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [(scores / t).softmax(-1) for t in (0.5, 1.0, 2.0)]
    entropy, top = [torch.special.entr(x).sum(-1).mean().item() for x in rows], [x.amax(-1).mean().item() for x in rows]
    return holds(
        entropy == sorted(entropy) and top == sorted(top, reverse=True),
        f"Of 16 keys with N(0, 1) scores the top weight is {top[0]:.2f}, {top[1]:.2f} and {top[2]:.2f} in the mean, "
        f"the entropy {entropy[0]:.2f}, {entropy[1]:.2f} and {entropy[2]:.2f} nats.",
    )


@claim("Lab 2", "d_model 64 in 4 heads on (2, 8, 64): output (2, 8, 64), weights (2, 4, 8, 8).")
def c113() -> Verdict:
    seen = []
    with kernels.watching(lambda call, _: seen.append((call.q, call.k, call.v))):
        out = MultiHeadAttention(64, 4, bias=False)(torch.randn(2, 8, 64), mask=masks.Causal())
    _, weights = qkv.attend(*seen[0], mask=masks.Causal(), return_weights=True)
    shapes = tuple(out.shape), tuple(weights.shape)
    return holds(shapes == ((2, 8, 64), (2, 4, 8, 8)), f"{shapes[0]} and {shapes[1]}.")


@claim("Lab 2", "The layer is four d × d matrices without biases.")
def c114() -> Verdict:
    torch.manual_seed(0)
    lab, ours = LabAttention(64, 4), MultiHeadAttention(64, 4, bias=False, fused=False)
    matrices = lab.state_dict()
    ours.load_state_dict(matrices)  # there is nothing else in either
    x, mask = torch.randn(2, 8, 64), torch.ones(8, 8).tril()
    error = (lab(x, mask)[0] - ours(x, mask=masks.Causal())).abs().max().item()
    shapes, count = [tuple(m.shape) for m in matrices.values()], sum(p.numel() for p in lab.parameters())
    return holds(
        shapes == [(64, 64)] * 4 and count == 4 * 64**2 and error < 1e-6,
        f"{count:,} parameters at d = 64. With the matrices of the lab's layer, and nothing else, qkv's has the same "
        f"output to {error:.1g}.",
    )


@claim("Lab 2", "d_model must be divisible by the number of heads.")
def c115() -> Verdict:
    x = torch.randn(2, 8, 64)
    found: dict[str, list[int]] = {"lab": [], "views": [], "qkv": []}
    for heads in range(1, 65):
        runs = {
            "lab": lambda h=heads: LabAttention(64, h)(x)[0],
            "views": lambda h=heads: into_heads(x, h),
            "qkv": lambda h=heads: MultiHeadAttention(64, h)(x),
        }
        for name, run in runs.items():
            try:
                run()
            except (AssertionError, RuntimeError, qkv.InputError):
                continue
            found[name].append(heads)
    free = MultiHeadAttention(64, 5, head_dim=12)(x)
    divisors = [h for h in range(1, 65) if 64 % h == 0]
    return holds(
        list(found.values()) == [divisors] * 3 and free.shape == (2, 8, 64),
        f"In the lab: of 1 to 64 heads it takes {', '.join(map(str, divisors))}. Without its assertion the view into "
        "heads would fail at the others. qkv refuses them, too, unless it is told the size of a head: 5 heads of 12 "
        "make 60 numbers, which the output projection takes back to 64.",
    )


@claim("Lab 2", "The causal mask has shape (1, 1, n, n), ones at and below the diagonal, 1 for allowed.")
def c116() -> Verdict:
    mask = torch.ones(5, 5).tril()[None, None]
    ours = masks.Causal().dense(5, 5)
    return holds(
        mask.shape == (1, 1, 5, 5) and torch.equal(mask.bool(), ours.expand(1, 1, 5, 5)),
        "It is `qkv.masks.Causal().dense(5, 5)`: 1 is True is allowed, as here and in torch's SDPA, and the reverse of "
        "torch's `nn.MultiheadAttention`.",
    )


@claim("Lab 2", "The block of code runs as shown.")
def c117() -> Verdict:
    line = "F.softmax(torch.ones(2) / math.sqrt(4), dim=-1)"  # what it uses, and what it imports
    names, said = {"torch": torch, "nn": torch.nn}, ""
    try:
        eval(line, dict(names))
    except NameError as error:
        said = str(error)
    after = eval(line, {**names, "F": F, "math": math})
    return only_when(
        said != "" and after.sum() == 1,
        f"After Lab 1 in the same session, which imports `math` and `F`. Alone: NameError, {said}.",
    )


@claim("Ex 2.1", "Dropout is commonly applied to the attention weights.")
def c118() -> Verdict:
    torch.manual_seed(0)
    weights = torch.randn(200, 20).softmax(-1)
    sums = {mode: F.dropout(weights, 0.1, training=mode).sum(-1) for mode in (True, False)}
    return holds(
        sums[True].std() > 0.01 and torch.allclose(sums[False], torch.ones(200)) and abs(sums[True].mean() - 1) < 0.02,
        f"After the softmax, on the weights, as torch's SDPA does. In training rows then sum to {sums[True].min():.2f}–"
        f"{sums[True].max():.2f}, 1 in the mean; in evaluation to 1.",
    )


@claim("Ex 2.2", "In cross-attention queries come from one sequence, keys and values from another.")
def c119() -> Verdict:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    out, weights = qkv.attend(q, k, v, return_weights=True)
    return holds(
        weights.shape == (1, 2, 3, 7) and out.shape == (1, 2, 3, 8),
        "They need not be equally long: 3 queries and 7 keys have weights 3 × 7.",
    )


@claim("Lab 3", "A pre-trained model returns one tensor (batch, heads, n, n) of weights for each layer.")
def c120() -> Verdict:
    import transformers

    found, sizes = {}, {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    for name in ("eager", "sdpa"):
        config = transformers.GPT2Config(**sizes, attn_implementation=name)
        out = transformers.GPT2LMHeadModel(config)(torch.arange(8)[None], output_attentions=True)
        found[name] = [tuple(x.shape) for x in out.attentions or () if x is not None]
    default = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).config._attn_implementation
    return only_when(
        found == {"eager": [(1, 2, 8, 8)] * 3, "sdpa": []} and default == "sdpa",
        f'When it is loaded with `attn_implementation="eager"`. In transformers {transformers.__version__} the '
        "default is SDPA, which forms no weights: GPT-2 then returns none, with no error. `qkv.profile` reads both.",
    )


@claim("Lab 3", "The grid of plots, 2 × min(6, L // 2), fits models of any number of layers L.")
def c121() -> Verdict:
    def drawn(layers: int) -> int:
        """How many of up to 12 layers find a place in the lab's grid, row by row."""
        grid, places = GridSpec(2, min(6, layers // 2)), []
        for layer in range(min(12, layers)):
            try:
                places.append(grid[layer])
            except IndexError:
                break
        return len(places)

    missing = {layers: min(12, layers) - drawn(layers) for layers in range(2, 49)}
    short = [layers for layers, n in missing.items() if n]
    return false(
        short == [3, 5, 7, 9, 11] and sum(missing.values()) == 5,
        f"With {', '.join(map(str, short))} layers the last one has no place, which is an IndexError. It fits an even "
        "number of layers, or 12 and more (of which it shows the first 12); tried up to 48. One layer asks for a grid "
        "of 2 × 0.",
    )


@claim("Lab 3", "The measure of attention to the first token leaves out the first query.")
def c122() -> Verdict:
    first = heads_of_mini()[3][..., 0]  # (layer, head, query), under a causal mask
    rest, whole = first[..., 1:].mean().item(), first.mean().item()
    return holds(
        bool((first[..., 0] == 1).all()) and whole > rest,
        "It takes column 0 from the second query on. Under a causal mask that is right: the first has no choice, its "
        f"weight is 1 in every head, and with it the mean in qkv-mini would be {whole:.3f} instead of {rest:.3f}.",
    )


@claim("Ex 3.1", "In a text of 100 tokens and more attention to the first token increases (asked, not said).")
def c123() -> Verdict:
    first = heads_of_mini()[3][..., 0]
    mean = {n: first[..., 1:n].mean().item() for n in (16, 32, 64, 96)}
    every = (first[..., 1:48].mean(-1) > first[..., 48:].mean(-1)).double().mean().item()
    return false(
        list(mean.values()) == sorted(mean.values(), reverse=True) and every > 0.5,
        "The exercise asks, and in qkv-mini the answer is no: over all heads the first token's mean weight is "
        + ", ".join(f"{x:.2f} on {n} tokens" for n, x in mean.items())
        + f", and later queries give it less in {every:.0%} of the heads. More keys share the weight; larger models "
        "may differ.",
        "the bundled model `qkv-mini`",
    )

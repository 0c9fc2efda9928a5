"""Checks of the deep dive: complexity, efficient attention, additive attention."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv.features import Favor
from qkv.masks import Causal, Global, Mask, RandomKeys, Strided, Window, bigbird
from qkv.scores import Additive, Dot, General
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.results import benchmark

COMPLEXITY_SECTION = "Complexity"
VASWANI = "[Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)"
GPT2 = (
    "[Radford et al. 2019]"
    "(https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)"
)


def products(n: int, d_model: int, d: int) -> dict[str, int]:
    """Multiplications of one head's matrix products, as torch counts them (a multiplication and an addition are 2)."""
    x, w = torch.zeros(n, d_model, device="meta"), torch.zeros(d_model, d, device="meta")
    y, weights = torch.zeros(n, d, device="meta"), torch.zeros(n, n, device="meta")
    found = {}
    for name, (a, b) in {"projection": (x, w), "scores": (y, y.T), "values": (weights, y)}.items():
        with FlopCounterMode(display=False) as counter:
            a @ b
        found[name] = counter.get_total_flops() // 2
    return found


def formed(n: int, dtype: torch.dtype = torch.float16) -> tuple[int, int]:
    """How many weights a head forms for n tokens, and their bytes (on torch's device without data)."""
    x = torch.empty(n, 64, dtype=dtype, device="meta")
    weights = (x @ x.T).softmax(-1)
    return weights.numel(), weights.nbytes


def path(edges: torch.Tensor, start: int, goal: int) -> int:
    """The number of steps from one position to another; ``edges[i, j]`` means that state i depends on state j."""
    reached = torch.arange(len(edges)) == start
    for steps in range(len(edges)):
        if reached[goal]:
            return steps
        reached = reached | (edges & reached).any(1)
    raise ValueError(f"no path from {start} to {goal}")


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


@claim(COMPLEXITY_SECTION, "Projections cost $n\\,d_{model}\\,d_k$, scores $n^2 d_k$, softmax $n^2$, values $n^2 d_v$.")
def c282() -> Verdict:
    found = products(100, 512, 64)
    return holds(
        found == {"projection": 100 * 512 * 64, "scores": 100**2 * 64, "values": 100**2 * 64},
        "Counted by torch at $n = 100$, $d_{model} = 512$, $d = 64$: "
        + ", ".join(f"{name} {count:,}" for name, count in found.items())
        + " multiplications. Softmax takes an exponential for each of the $n^2$ scores.",
    )


@claim(COMPLEXITY_SECTION, "All in all attention costs $O(n^2 d)$.")
def c283() -> Verdict:
    ratio = {}
    for n in (128, 768, 8192):
        found = products(n, 512, 64)
        ratio[n] = 3 * found["projection"] / (found["scores"] + found["values"])
    text = ", ".join(f"{r:.1f} at n = {n:,}" for n, r in ratio.items())
    return only_when(
        ratio[128] > 1 and ratio[768] == 1 and ratio[8192] < 0.2,
        "For long sequences. The sum drops the first row of its own table: the three projections cost, over scores and "
        f"values, {text} ($d_{{model}} = 512$). They are the smaller part only beyond $n = 1.5\\,d_{{model}}$, "
        "with $W_O$ beyond $2\\,d_{model}$ (C054).",
    )


@claim(COMPLEXITY_SECTION, "2,048 tokens, GPT-2's context, make 4.2 million pairs.")
def c285() -> Verdict:
    import transformers

    read = transformers.GPT2Config().n_positions  # the sizes of the published model are the default
    pairs, said = formed(read)[0], formed(2048)[0]
    return false(
        pairs == 1024**2 and said == 2048**2 and f"{said / 1e6:.1f}" == "4.2",
        f"GPT-2 reads {read:,} tokens, by its configuration in transformers: {pairs / 1e6:.2f} million pairs. 2,048 is "
        f"GPT-3's, and 2,048² is {said / 1e6:.1f} million.",
        GPT2,
        "[Brown et al. 2020](https://arxiv.org/abs/2005.14165)",
    )


@claim(COMPLEXITY_SECTION, "A million tokens make a trillion pairs.")
def c288() -> Verdict:
    pairs, _ = formed(1_000_000)
    return holds(pairs == 10**12, f"10⁶ squared is {pairs:,}: 10¹².")


@claim(COMPLEXITY_SECTION, "The weights of one head at 128,000 tokens take about 32 GB in float16.")
def c289() -> Verdict:
    _, size = formed(128_000)
    return holds(
        abs(size / 32e9 - 1) < 0.03,
        f"{size / 1e9:.1f} GB, or {size / 2**30:.1f} GiB: about 32, and 33 if rounded to a whole GB.",
    )


@claim(
    COMPLEXITY_SECTION,
    "A recurrent network has O(n) steps and path length; attention has O(1) of both, and O(n²) memory.",
)
def c290() -> Verdict:
    lengths = (8, 16, 32)
    chain = [path(torch.ones(n, n).tril().triu(-1).bool(), 0, n - 1) for n in lengths]
    direct = [path(torch.ones(n, n).tril().bool(), 0, n - 1) for n in lengths]
    return holds(
        chain == [n - 1 for n in lengths] and direct == [1, 1, 1],
        f"From the first to the last of {listed(lengths)} positions: {listed(chain)} steps along a chain of states, "
        f"{listed(direct)} in a layer of attention, which forms n² weights (a kernel that never keeps them needs O(n), "
        "see C300). Operations in order are counted at C003.",
        "[Recurrence and attention](../background/recurrence.md)",
        "[`plan.diagram()`: the steps of a call](../mechanisms/index.md)",
    )


@claim("Q3", "512 tokens make 262 thousand pairs; 128,000 make 16 billion for each layer and head, tens of GB.")
def c320() -> Verdict:
    short, (pairs, half), (_, single) = formed(512)[0], formed(128_000), formed(128_000, torch.float32)
    return holds(
        short == 262_144 and round(pairs / 1e9) == 16 and 20e9 < half < single < 100e9,
        f"512² = {short:,}; 128,000² = {pairs / 1e9:.1f} billion, {half / 1e9:.0f} GB in float16 and "
        f"{single / 1e9:.0f} GB in float32.",
    )


FLASH = "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)"
FLASH_2 = "[Dao 2023](https://arxiv.org/abs/2307.08691)"
FLASH_3 = "[Shah et al. 2024](https://arxiv.org/abs/2407.08608)"
BENCHMARKS = "[benchmarks](../benchmarks.md)"


def pairs(mask: Mask, n: int) -> int:
    """The number of visible pairs of a mask."""
    return int(mask.dense(n, n)[0, 0].sum())


def reached(mask: Mask, n: int, layers: int) -> float:
    """The share of causal pairs that a path through at most so many layers connects."""
    step = mask.dense(n, n)[0, 0].double()
    paths = torch.linalg.matrix_power(step, layers) > 0
    return (paths.sum() / pairs(Causal(), n)).item()


def measured(mechanism: str) -> dict[str, dict]:
    """The benchmark of a mechanism, from benchmarks/results."""
    return benchmark("mechanisms/float32-8-forward.json")["mechanisms"][mechanism]


@claim("Sparse", "A window of w keys costs O(n w), g global tokens O(n g), r random keys O(n r).")
def c292() -> Verdict:
    n = 256
    window, both_ways = pairs(Window(16), n), pairs(Global(range(4)), n)
    drawn = pairs(RandomKeys(8), n)
    return holds(
        window == 16 * n - 16 * 15 // 2 and both_ways == 2 * 4 * n - 16 and drawn == 8 * n,
        f"Pairs at n = {n}: a window of 16 has {window:,}, at most 16 n = {16 * n:,}; 4 global tokens have "
        f"{both_ways:,}, nearly 2 · 4 n, as they look at all and are seen by all; 8 random keys have {drawn:,} = 8 n.",
    )


@claim("Sparse", "BigBird combines window, global and random keys, and is O(n).")
def c293() -> Verdict:
    counts = {n: pairs(bigbird(block=8), n) for n in (256, 512, 1024)}
    growth = [counts[512] / counts[256], counts[1024] / counts[512]]
    return holds(
        max(growth) < 2.1,
        "With their sizes fixed. Blocks of 8: "
        + ", ".join(f"{count:,} pairs at n = {n:,}" for n, count in counts.items())
        + f": twice as many for twice the length ({growth[0]:.2f}, {growth[1]:.2f}), where all pairs are four times.",
        "[Zaheer et al. 2020](https://arxiv.org/abs/2007.14062)",
    )


@claim("Sparse", "Sparse attention cannot model arbitrary dependencies over long distances.")
def c294() -> Verdict:
    mask, local = (Window(8) | Strided(8)) & Causal(), Window(8)
    one, two, window = reached(mask, 64, 1), reached(mask, 64, 2), reached(local, 64, 2)
    return only_when(
        one < 0.5 and two == 1 and window < 0.5,
        f"In one layer, or with a window alone. At n = 64 a window of 8 with every eighth position joins {one:.0%} of "
        f"the pairs in one layer and {two:.0%} in two; the window by itself {window:.0%} in two. What a path of two "
        "layers carries is another matter.",
    )


@claim("Linear", "Attention(Q, K, V) ≈ φ(Q) (φ(K)ᵀ V).")
def c295() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    exact = qkv.attend(q, k, v)
    fq, fk = qkv.features.elu_plus_one(q), qkv.features.elu_plus_one(k)
    sums = (fq @ fk.transpose(-1, -2)).sum(-1, keepdim=True)
    without = (fq @ (fk.transpose(-1, -2) @ v) - exact).norm()
    divided = (fq @ (fk.transpose(-1, -2) @ v) / sums - exact).norm()
    return false(
        without > 10 * divided,
        f"It must be divided by $\\phi(q) \\cdot \\sum_j \\phi(k_j)$. Without, the weights of a query here add up to "
        f"{sums.min():.0f}–{sums.max():.0f} instead of 1, and the error is {without / divided:.0f} times as large "
        "(φ = elu + 1).",
        "[Katharopoulos et al. 2020](https://arxiv.org/abs/2006.16236)",
    )


@claim("Linear", "Forming φ(K)ᵀ V first makes it O(n d²).")
def c296() -> Verdict:
    def work(n: int, *, first: bool) -> int:
        q, k, v = torch.zeros(3, n, 64, device="meta")
        with FlopCounterMode(display=False) as counter:
            q @ (k.T @ v) if first else (q @ k.T) @ v
        return counter.get_total_flops()

    growth = {first: work(2048, first=first) / work(1024, first=first) for first in (True, False)}
    return holds(
        growth == {True: 2, False: 4} and work(1024, first=True) == 4 * 1024 * 64**2,
        "2 n d² multiplications: twice the length costs twice as much, with the weights first four times.",
    )


@claim("Linear", "Performer and Linformer both work by kernel functions.")
def c297() -> Verdict:
    """A kernel compares a query with one key at a time: the others decide neither how, nor does a key's place."""
    torch.manual_seed(0)
    q, k, v = 0.5 * torch.randn(3, 1, 1, 10, 4, dtype=torch.float64)
    e, phi, order = torch.randn(10, 3, dtype=torch.float64), Favor(4, n_features=64), torch.randperm(10)
    features = [torch.exp(x @ phi.weight.T / 4**0.25 - (x**2).sum(-1, keepdim=True) / 4) for x in (q, k)]
    by_kernel = features[0] @ features[1].mT
    performer = {"as it is": qkv.linear_attend(q, k, v, features=phi, causal=False)}
    performer["reordered"] = qkv.linear_attend(q, k[:, :, order], v[:, :, order], features=phi, causal=False)
    linformer = {"as it is": qkv.linformer(q, k, v, e)}
    linformer["reordered"] = qkv.linformer(q, k[:, :, order], v[:, :, order], e)
    mixed = torch.softmax(q @ (e.T @ k).mT / 4**0.5, -1) @ (e.T @ v)
    errors = [
        (performer["as it is"] - by_kernel @ v / by_kernel.sum(-1, keepdim=True)).abs().max().item(),
        (linformer["as it is"] - mixed).abs().max().item(),
    ]
    moved = [(x["reordered"] - x["as it is"]).abs().max().item() for x in (performer, linformer)]
    return false(
        max(errors) < 1e-6 and moved[0] < 1e-6 and moved[1] > 0.01,
        "Performer does: its weights are products φ(q) · φ(k), and keys in another order, with their values, give the "
        f"same output (to {moved[0]:.1g}). Linformer mixes keys and values along the *length*, here 10 into 3, and is "
        f"plain softmax attention to these: low rank, no kernel function. The other order changes its output by up to "
        f"{moved[1]:.2f}. Both formulas written out agree with qkv's to {max(errors):.1g}.",
        "[Choromanski et al. 2021](https://arxiv.org/abs/2009.14794)",
        "[Wang et al. 2020](https://arxiv.org/abs/2006.04768)",
    )


@claim("Flash", "FlashAttention has exactly the output of standard attention.")
def c299() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    exact = qkv.attend(q.double(), k.double(), v.double(), mask=Causal(), kernel="eager")
    errors = [
        (qkv.attend(q, k, v, mask=Causal(), kernel=kernel).double() - exact).abs().max().item()
        for kernel in ("tiled", "eager")
    ]
    return holds(
        max(errors) < 2e-6,
        f"To rounding: from float64 the tiled kernel is off by {errors[0]:.1g} at most, forming the weights by "
        f"{errors[1]:.1g}, both in float32.",
    )


@claim("Flash", "FlashAttention needs O(n) memory.")
def c300() -> Verdict:
    found = measured("causal")
    memory = {int(n): size for n, size in found["memory"].items()}
    all_weights = 8 * 16_384**2 * 4
    return holds(
        found["exponent of memory"] < 1.1 and memory[16_384] < all_weights / 100,
        "Measured for torch's CPU kernel with 8 heads: beside the inputs "
        + ", ".join(f"{size / 1e6:.0f} MB at n = {n:,}" for n, size in memory.items())
        + f". All weights of the longest would be {all_weights / 1e9:.1f} GB.",
        BENCHMARKS,
    )


@claim("Flash", "FlashAttention is 2 to 4 times faster.")
def c301() -> Verdict:
    cells = measured("causal")["cells"]
    faster = {int(n): c["seconds"]["eager"] / c["seconds"]["sdpa"] for n, c in cells.items() if "eager" in c["seconds"]}
    text = ", ".join(f"{ratio:.1f} at n = {n:,}" for n, ratio in faster.items())
    return only_when(
        faster[512] < 2 and max(faster.values()) > 4,
        f"It depends on length, machine and rival. The authors say 2 to 4 against optimized baselines on GPUs, which "
        f"was not measured here. On a CPU torch's flash kernel, which also skips what a causal mask hides, over "
        f"forming the weights: {text}.",
        FLASH_2,
        BENCHMARKS,
    )


@claim("Flash", "torch's `scaled_dot_product_attention` can take the place of the hand-written one.")
def c304() -> Verdict:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    hides = torch.ones(5, 5).triu(1).bool()  # its own sense: True hides
    ours = (q @ k.transpose(-1, -2) / 2).masked_fill(hides, -torch.inf).softmax(-1) @ v
    same, inverse, flipped = sdpa(q, k, v, is_causal=True), sdpa(q, k, v, ~hides), sdpa(q, k, v, hides)
    return only_when(
        torch.allclose(same, ours) and torch.allclose(inverse, ours) and not torch.allclose(flipped, ours),
        "With `is_causal=True`, as it shows, yes. A boolean `attn_mask` means the opposite of its own function's "
        "mask: True takes part. Passed on as it is, it shows each query the later keys alone, without an error. Nor "
        "does torch return weights.",
    )


ADDITIVE_SECTION = "Additive vs multiplicative"


@claim(ADDITIVE_SECTION, "The additive score is $v^T \\tanh(W_q q + W_k k)$.")
def c255() -> Verdict:
    torch.manual_seed(0)
    q, k, values = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (3, 5, 5))
    v, w_q, w_k = (torch.randn(*shape, dtype=torch.float64) for shape in ((6,), (6, 4), (6, 4)))
    _, weights = qkv.attend(q, k, values, score=Additive(v, w_q, w_k), return_weights=True)
    rows = [[v @ torch.tanh(w_q @ a + w_k @ b) for b in k[0, 0]] for a in q[0, 0]]
    loops = torch.tensor(rows, dtype=torch.float64).softmax(-1)
    error = (weights[0, 0] - loops).abs().max().item()
    return holds(
        error < 1e-12,
        f"Bahdanau's formula; pair by pair in a loop and all at once it gives the same weights to {error:.1g}.",
        "[Bahdanau et al. 2015](https://arxiv.org/abs/1409.0473)",
    )


@claim(ADDITIVE_SECTION, "tanh bounds the additive score to [−1, 1].")
def c256() -> Verdict:
    torch.manual_seed(0)
    v, hidden = torch.randn(64), torch.tanh(torch.randn(10_000, 64))
    largest, bound = (hidden @ v).abs().max().item(), v.abs().sum().item()
    return false(
        1 < largest <= bound and hidden.abs().max() <= 1,
        f"It bounds the 64 hidden units. The score is bounded by $\\sum_i |v_i|$, {bound:.1f} for a standard normal v, "
        f"and reaches {largest:.1f} in 10,000 draws.",
    )


@claim(ADDITIVE_SECTION, "Additive scores are slower.")
def c258() -> Verdict:
    additive, dot = measured("additive")["cells"], measured("causal")["cells"]
    slower = {int(n): additive[n]["seconds"]["qkv"] / dot[n]["seconds"]["qkv"] for n in ("1024", "4096", "16384")}
    text = ", ".join(f"{ratio:.0f} times (n = {n:,})" for n, ratio in slower.items())
    return holds(
        min(slower.values()) > 2,
        f"Both causal, with 8 heads of 64 on a CPU: an additive score of size 16 takes {text} as long as the product. "
        "It needs a tanh for each pair and hidden unit, and no matrix product serves it.",
        BENCHMARKS,
    )


@claim(ADDITIVE_SECTION, "An additive score is slightly more expressive for each comparison.")
def c259() -> Verdict:
    """Find the equal number: queries and keys are the numbers −3 … 3, in one dimension each."""
    x = np.arange(-3.0, 4.0)
    bump = np.tanh(4 * (x[:, None] - x) + 2) - np.tanh(4 * (x[:, None] - x) - 2)  # W_q, W_k = ±4, v = (1, −1), a bias
    bilinear = [w * np.outer(x, x) for w in (-2.0, 0.5, 2.0)]
    found = (bump.argmax(1) == np.arange(7)).mean()
    best = max((s.argmax(1) == np.arange(7)).mean() for s in bilinear)
    return holds(
        found == 1 and best < 0.5,
        f"For numbers in one dimension two hidden units, with biases, make a score that is largest where key equals "
        f"query, for all 7. $q\\,w\\,k$ is always largest at an end of the line: {best:.0%} right. More dimensions "
        "give the product such relations too.",
    )


@claim(ADDITIVE_SECTION, "Multiplicative scores need no extra parameters.")
def c260() -> Verdict:
    plain, scaled, general = (
        sum(x.numel() for x in vars(score).values() if isinstance(x, torch.Tensor))
        for score in (Dot(scale=1.0), Dot(), General(torch.zeros(64, 64)))
    )
    return only_when(
        plain == scaled == 0 and general == 64**2,
        f"The plain and the scaled dot product have none. The *general* form that it lists with them has a matrix: "
        f"{general:,} numbers at d = 64.",
    )

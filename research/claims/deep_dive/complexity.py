"""Checks on the cost of attention (operations, pairs, memory) compared with recurrence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.flop_counter import FlopCounterMode

from research.claims import Verdict, claim, false, holds, only_when

SECTION = "Complexity"
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


@claim(
    "C282",
    "deep dive",
    SECTION,
    "Projections cost $n\\,d_{model}\\,d_k$, scores $n^2 d_k$, softmax $n^2$, values $n^2 d_v$.",
)
def c282() -> Verdict:
    found = products(100, 512, 64)
    return holds(
        found == {"projection": 100 * 512 * 64, "scores": 100**2 * 64, "values": 100**2 * 64},
        "Counted by torch at $n = 100$, $d_{model} = 512$, $d = 64$: "
        + ", ".join(f"{name} {count:,}" for name, count in found.items())
        + " multiplications. Softmax takes an exponential for each of the $n^2$ scores.",
    )


@claim("C283", "deep dive", SECTION, "All in all attention costs $O(n^2 d)$.")
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


@claim("C285", "deep dive", SECTION, "2,048 tokens, GPT-2's context, make 4.2 million pairs.")
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


@claim("C288", "deep dive", SECTION, "A million tokens make a trillion pairs.")
def c288() -> Verdict:
    pairs, _ = formed(1_000_000)
    return holds(pairs == 10**12, f"10⁶ squared is {pairs:,}: 10¹².")


@claim("C289", "deep dive", SECTION, "The weights of one head at 128,000 tokens take about 32 GB in float16.")
def c289() -> Verdict:
    _, size = formed(128_000)
    return holds(
        abs(size / 32e9 - 1) < 0.03,
        f"{size / 1e9:.1f} GB, or {size / 2**30:.1f} GiB: about 32, and 33 if rounded to a whole GB.",
    )


@claim(
    "C290",
    "deep dive",
    SECTION,
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
    )


@claim(
    "C320",
    "deep dive",
    "Q3",
    "512 tokens make 262 thousand pairs; 128,000 make 16 billion for each layer and head, tens of GB.",
)
def c320() -> Verdict:
    short, (pairs, half), (_, single) = formed(512)[0], formed(128_000), formed(128_000, torch.float32)
    return holds(
        short == 262_144 and round(pairs / 1e9) == 16 and 20e9 < half < single < 100e9,
        f"512² = {short:,}; 128,000² = {pairs / 1e9:.1f} billion, {half / 1e9:.0f} GB in float16 and "
        f"{single / 1e9:.0f} GB in float32.",
    )

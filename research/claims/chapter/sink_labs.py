"""Checks for labs 4 and 5 and appendix A: measuring sinks, a small Transformer."""

from __future__ import annotations

import math

import torch

import qkv
from qkv import kernels, masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import MultiHeadAttention
from qkv.normalizers import EluPlusOne, Sigmoid
from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.chapter.labs import LabModel, lab_score, sigmoid_experiment
from research.claims.results import result


def gu_score(weights: torch.Tensor, threshold: float = 0.3) -> float:
    """Gu et al. 2025, eq. 4: the share of heads whose mean of column 0, over all rows, is above the threshold."""
    return (weights[:, :, 0].mean(1) > threshold).double().mean().item()


@claim("Lab 4", "`compute_sink_metric` follows Gu et al.")
def c125() -> Verdict:
    column = torch.tensor([1, 0.5] + [0.28] * 8, dtype=torch.float64)
    weights = torch.zeros(1, 10, 10, dtype=torch.float64)
    weights[0, :, 0], weights[0, 1:, 1] = column, 1 - column[1:]
    lab, gu = lab_score(weights), gu_score(weights)
    return false(
        gu == 1 and lab < 0.12,
        "Gu et al. average a column over all queries and count the heads whose mean exceeds ε; the lab counts "
        f"single entries. A head with 1, 0.5 and eight times 0.28 on the first key scores {gu:.0f} by theirs and "
        f"{lab:.2f} by the lab's.",
        "[Gu et al. 2025, eq. 4](https://arxiv.org/abs/2410.10781)",
    )


@claim("Lab 4", "A head counts as a sink if many of its queries exceed the threshold.")
def c126() -> Verdict:
    some, all_ = torch.zeros(2, 10, 11, 11)
    some[0, :, 0] = 1  # one head of ten is all sink
    all_[:, 1, 0] = 1  # every head, for one query of ten
    return false(
        lab_score(some) == lab_score(all_) and (gu_score(some), gu_score(all_)) == (0.1, 0),
        "The code classifies no head: it pools all entries. One head of ten that always rests on the first token "
        f"scores {lab_score(some):.1f}, and so do ten heads that do so one time in ten. The definition of Gu et al. "
        f"tells them apart: {gu_score(some):.1f} and {gu_score(all_):.0f}.",
    )


@claim("Lab 4", "Position 0 attends to itself with weight 1 under a causal mask.")
def c127() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 10, 8)
    own = qkv.attend(q, k, k, mask=masks.Causal(), return_weights=True)[1][..., 0, 0]
    sigmoid = qkv.attend(q, k, k, mask=masks.Causal(), normalizer=Sigmoid(0.0), return_weights=True)[1][..., 0, 0]
    return holds(
        bool((own == 1).all()) and sigmoid.max() < 1,
        f"With softmax, exactly, in every head; with the lab's sigmoid it is {sigmoid.min():.2f}–{sigmoid.max():.2f}.",
    )


@claim("Lab 4", "The score runs from 0, no sink, to 1.")
def c128() -> Verdict:
    floor = {}
    for n in (4, 32, 64):
        even = torch.ones(1, n, n, dtype=torch.float64).tril()
        floor[n] = lab_score(even / even.sum(-1, keepdim=True))
    return only_when(
        all(abs(x - 2 / (n - 1)) < 1e-12 for n, x in floor.items()),
        "For long texts. Even rows, which have no sink, score 2 / (n − 1) at a threshold of 0.3, since the second "
        "and third "
        "query have 1/2 and 1/3 for each key: " + ", ".join(f"{x:.3f} at n = {n}" for n, x in floor.items()) + ".",
    )


@claim("Lab 4", "The experiment on sigmoid attention runs.")
def c129() -> Verdict:
    torch.manual_seed(0)
    weights, said = sigmoid_experiment(), ""
    try:
        lab_score(weights[0], 0.2)  # as the lab calls it
    except ValueError as error:
        said = str(error)
    whole = lab_score(weights, 0.2)
    counted = sum(row[0] > 0.2 for row in weights[0].tolist()[1:]) / 31
    return false(
        said != "" and abs(whole - counted) < 1e-9,
        f"It ends in a ValueError ({said}): the metric takes (heads, n, n), and gets the n × n of a batch without "
        f"heads. Passing the batch of one itself would do: the score is then {whole:.2f}.",
    )


@claim("Lab 4", "A first key of twice the mean query attracts all queries, which simulates a sink.")
def c130() -> Verdict:
    generator, n, d = torch.Generator().manual_seed(0), 32, 64
    q, k = torch.randn(2, 200, n, d, generator=generator, dtype=torch.float64)
    aligned = k.clone()
    aligned[:, 0] = 2 * q.mean(1)
    causal = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    scores = [q @ x.mT / math.sqrt(d) for x in (k, aligned)]
    weights = [(s + causal).softmax(-1) for s in scores]
    mean, share = [w[:, 1:, 0].mean().item() for w in weights], [lab_score(w, 0.2) for w in weights]
    at = scores[1][:, :, 0]
    return false(
        mean[1] < 1.5 * mean[0] and share[1] < 1.5 * share[0],
        f"Hardly: over 200 seeds its scores are {at.mean():.2f} ± {at.std():.2f}, beside ± {scores[0].std():.1f} of "
        f"any other key. It gets {mean[1]:.3f} of the weight in the mean, an ordinary first key {mean[0]:.3f}; the "
        f"lab's score at 0.2 is {share[1]:.2f} against {share[0]:.2f}.",
    )


@claim("Lab 4", "In sigmoid attention the first token does not compete with the others.")
def c131() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(10, 10)
    changed = s.clone()
    changed[:, 0] += 5
    others = (changed.sigmoid() - s.sigmoid())[:, 1:].abs().max().item()
    return holds(others == 0, f"Its scores raised by 5, the weights of the others change by {others:g}.")


@claim("Lab 4", "One threshold on the weights can compare softmax with sigmoid attention.")
def c132() -> Verdict:
    s = torch.zeros(1, 64, 64, dtype=torch.float64)  # no key is preferred
    sees, found = torch.ones(64, 64).tril(), {}
    for name, weights in (("sigmoid", s.sigmoid()), ("ELU + 1", EluPlusOne().weight(s))):
        seen = weights * sees
        found[name] = lab_score(seen), lab_score(seen / seen.sum(-1, keepdim=True))
    return only_when(
        all(raw == 1 and divided < 0.04 for raw, divided in found.values()),
        "When rows are divided by their sums first. At scores of 0, where no key is preferred, each sigmoid weight "
        f"is 0.5 and each of ELU + 1 is 1, so that both score {found['sigmoid'][0]:.0f}; divided they score "
        f"{found['sigmoid'][1]:.2f}, as even rows do.",
    )


@claim("Lab 4", "Before a sigmoid −∞ must be replaced, by −100 for instance.")
def c133() -> Verdict:
    s = torch.tensor([-torch.inf, -100.0, 0.0], dtype=torch.float64, requires_grad=True)
    weights = s.sigmoid()
    weights.sum().backward()
    return false(
        weights[0] == 0 and s.grad[0] == 0 and weights[1] > 0,
        f"σ(−∞) is exactly 0, with a gradient of 0; σ(−100), in float64, is {weights[1].item():.1g}.",
    )


@claim("Ex 4.2", "A softmax off by one lowers attention to the first real token.")
def c135() -> Verdict:
    s = torch.randn(1000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    less = (1 / (1 + s.exp().sum(-1))).mean().item()  # exp(s) / (1 + Σ exp(s)) against exp(s) / Σ exp(s)
    runs = result("normalizers")["variants"]
    plain, off = ([max(map(max, r["check"]["sink"])) for r in runs[n]["results"]] for n in ("softmax", "off by one"))
    lower = sum(b < a - 0.05 for a, b in zip(plain, off, strict=True))
    trained = experiment("C135", "normalizers")
    return only_when(
        less > 0.01 and 0 < lower < len(off) and trained.kind != "false",
        f"At given scores: every weight of 16 keys with N(0, 1) scores shrinks, by {less:.0%} in the mean. Training "
        f"can make up for that: of {len(off)} small models, {lower} end with a weight on the first token that is lower "
        f"by more than 0.05 than with softmax. {trained.text}",
        *trained.by,
    )


LAB = {"vocab_size": 1000, "context": 512, "d_model": 256, "layers": 4, "heads": 4, "d_hidden": 1024}


@claim("Lab 5", "The model prints its number of parameters (which the chapter does not give).")
def c136() -> Verdict:
    count = {
        tied: sum(p.numel() for p in DecoderLM(DecoderConfig.gpt2(**LAB, attention_bias=False, tied=tied)).parameters())
        for tied in (True, False)
    }
    return holds(
        count == {True: 3_542_528, False: 3_798_528},
        f"A vocabulary of 1000 and the defaults, with the output tied to the embedding: {count[True]:,}; untied it "
        f"would be {count[False]:,}.",
    )


@claim("Lab 5", "On (2, 16) tokens it gives logits (2, 16, 1000) and four tensors (2, 4, 16, 16).")
def c137() -> Verdict:
    torch.manual_seed(0)
    seen = []
    with kernels.watching(lambda call, _: seen.append(call)), torch.no_grad():
        logits = DecoderLM(DecoderConfig.gpt2(**LAB, attention_bias=False))(torch.randint(1000, (2, 16)))
    weights = [qkv.attend(c.q, c.k, c.v, mask=c.mask, return_weights=True)[1].shape for c in seen]
    return holds(
        logits.shape == (2, 16, 1000) and weights == [(2, 4, 16, 16)] * 4,
        f"The same architecture gives {tuple(logits.shape)} and {len(weights)} times {tuple(weights[0])}.",
    )


@claim("Lab 5", "An output tied to a default embedding, N(0, 1), is a usable start.")
def c138() -> Verdict:
    losses: dict[float | None, list[float]] = {None: [], 0.02: []}  # by deviation; None: what torch draws
    for seed in range(5):
        for deviation, found in losses.items():
            torch.manual_seed(seed)
            model, ids = LabModel(1000), torch.randint(1000, (8, 64))
            if deviation is not None:
                for weight in (p for p in model.parameters() if p.ndim == 2):
                    torch.nn.init.normal_(weight, std=deviation)
            with torch.no_grad():
                found.append(model.loss(ids).item())
    low, high, small = min(losses[None]), max(losses[None]), losses[0.02]
    return only_when(
        low > 100 and max(abs(x - math.log(1000)) for x in small) < 0.3,
        "When it is made smaller. Tied to N(0, 1), logits have a deviation of about √256 = 16 and the token just "
        f"read stands out: the first loss of the lab's model is {low:.0f}–{high:.0f} nats (5 seeds), where guessing "
        f"costs ln 1000 = {math.log(1000):.1f}. With a deviation of 0.02, GPT-2's, it is {max(small):.1f}.",
    )


@claim("App. A", "The sink score is the mean over heads and queries 2 … n of $1[A_{i,1} > \\tau]$.")
def c141() -> Verdict:
    weights = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(0))
    heads = [sum(weights[h, i, 0].item() > 0.3 for i in range(1, 12)) / 11 for h in range(3)]
    return holds(
        abs(sum(heads) / 3 - lab_score(weights)) < 1e-12,
        "The formula and the lab's code agree. It is not the score of Gu et al. ([C125](#c125)).",
    )


@claim("App. A", "The equations of the appendix repeat those of sections 4 to 6.")
def c142() -> Verdict:
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(12, 3, bias=False, fused=False).double(), torch.randn(1, 5, 12, dtype=torch.float64)
    hide = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    heads = []
    for i in range(3):
        w_q, w_k, w_v = (p.weight.T[:, 4 * i : 4 * (i + 1)] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads.append(((x @ w_q) @ (x @ w_k).mT / 2 + hide).softmax(-1) @ (x @ w_v))
    error = (torch.cat(heads, -1) @ layer.out_proj.weight.T - layer(x, mask=masks.Causal())).abs().max().item()
    return holds(
        error < 1e-14,
        f"Scaled dot products, heads side by side times W^O, and 0 or −∞ for the mask: written out they are a causal "
        f"multi-head layer to {error:.1g}.",
    )

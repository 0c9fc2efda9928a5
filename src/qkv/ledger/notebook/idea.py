"""Checks for sections 1 and 2: the idea of attention and its formula."""

from __future__ import annotations

import torch
from torch import nn

import qkv
from qkv.ledger import Verdict, claim, false, holds, only_when, trial
from qkv.masks import Causal
from qkv.models import DecoderConfig, DecoderLM

RECALL = "trial `lesson_long_recall`"


@claim(
    "C143", "notebook", "1", "Processing “cat” in “The cat sat on the mat” looks at all other words, later ones too."
)
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


@claim("C144", "notebook", "1", "RNNs have limited memory because gradients vanish with distance.")
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
    )


@claim("C145", "notebook", "1", "Attention has unlimited memory.")
def c145() -> Verdict:
    model = DecoderLM(DecoderConfig(vocab_size=50, context=16, d_model=32, layers=2, heads=4))
    try:
        model(torch.zeros(1, 17, dtype=torch.long))
        refused = False
    except qkv.InputError:
        refused = True
    kept, work = [], []
    for n in (1_000, 2_000):
        state = model.start(cache=lambda n=n: qkv.cache.Full(n))
        model.step(torch.zeros(1, 16, dtype=torch.long), state)
        kept.append(state.nbytes)
        work.append(qkv.plan(*torch.empty(3, 1, 1, n, 16)).flops)
    return false(
        refused and kept[1] == 2 * kept[0] and work[1] == 4 * work[0],
        "It reaches as far as the context, and pays for it: a model with a table of 16 positions refuses 17 tokens, "
        f"and from 1,000 to 2,000 tokens the cache grows {kept[1] / kept[0]:.0f} times and the work of a pass "
        f"{work[1] / work[0]:.0f} times. Within the context nothing fades with distance, which is what is meant.",
    )


@claim("C146", "notebook", "1", "Attention captures long-range dependencies easily.")
def c146() -> Verdict:
    found = trial("lesson_long_recall")
    worst = {
        kind: {lag: min(r["accuracy"] for r in found[kind][lag].values()) for lag in ("4", "16", "64")}
        for kind in ("attention", "RNN", "GRU")
    }
    best_rnn = max(r["accuracy"] for r in found["RNN"]["64"].values())
    text = "; ".join(f"{kind} {', '.join(f'{x:.2f}' for x in by.values())}" for kind, by in worst.items())
    return holds(
        min(worst["attention"].values()) >= 0.95 and best_rnn < worst["attention"]["64"] - 0.05,
        f"Recall of a marked symbol over 4, 16 and 64 tokens after 250 steps, the worst of three seeds: {text} (chance "
        "0.125). It holds if attention is right at 0.95 or more of all of them, and a tanh RNN is worse over 64 by "
        "more than 0.05.",
        RECALL,
    )


@claim("C147", "notebook", "2", "Element (i, j) of $QK^T$ is how much position i attends to position j.")
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


@claim("C148", "notebook", "2", "Scaling by $1/\\sqrt{d_k}$ keeps the softmax from saturating.")
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

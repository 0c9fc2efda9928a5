"""Checks for sections 1 and 2: the idea of attention and its formula."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv.masks import Causal
from research.claims import Verdict, claim, false, holds, only_when


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

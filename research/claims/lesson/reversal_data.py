"""Checks on step 3 of the build-along: its sequences, the model's inputs, and the meaning of its metrics."""

from __future__ import annotations

import math

import torch
from torch import nn

from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.lesson.model import BATCH, LENGTH, VOCABULARY, Model, causal, sequences

STEP = "Step 3: reversal"


def drawn(size: int = 1000) -> torch.Tensor:
    """The lesson's random sequences, (size, 13)."""
    return sequences(size, torch.Generator().manual_seed(0))


@claim("C207", "lesson", STEP, "The task turns 1 2 3 4 5 into 5 4 3 2 1.")
def c207() -> Verdict:
    symbols = drawn()[:, :LENGTH]
    return only_when(
        symbols.shape[1] == 6 and symbols.min() == 2 and symbols.max() == 15,
        f"As an illustration: in the code there are {symbols.shape[1]} symbols from {symbols.min()} to "
        f"{symbols.max()}, drawn with repetition; 1 is the separator and 0 is reserved.",
    )


@claim("C208", "lesson", STEP, "A sequence is the input, a separator, and the input reversed: 13 tokens.")
def c208() -> Verdict:
    ids = drawn()
    mirrored = torch.equal(ids[:, :LENGTH].flip(1), ids[:, LENGTH + 1 :])
    return holds(
        mirrored and bool((ids[:, LENGTH] == 1).all()) and ids.shape[1] == 13,
        f"{LENGTH} + 1 + {LENGTH} = {ids.shape[1]}, and position p holds what position 12 − p holds.",
    )


@claim("C209", "lesson", STEP, "A comment: the model's input is a b c d e f SEP and then six unknown tokens.")
def c209() -> Verdict:
    ids = drawn()
    x = ids[:, :-1]
    shown = torch.equal(x[:, LENGTH + 1 :], ids[:, :LENGTH].flip(1)[:, :-1])
    return false(
        shown and x.shape[1] == 12,
        f"It is {x.shape[1]} tokens: six symbols, the separator, and the first {x.shape[1] - LENGTH - 1} of the "
        "reversed ones, which are the true answers (teacher forcing).",
    )


@claim("C210", "lesson", STEP, "The loss covers the six reversed tokens only.")
def c210() -> Verdict:
    ids = drawn()
    counted = ids[:, 1:][:, LENGTH:]
    return holds(
        torch.equal(counted, ids[:, :LENGTH].flip(1)),
        f"The target shifted by one, from index {LENGTH} on, is {counted.shape[1]} tokens: the input reversed.",
    )


@claim("C211", "lesson", STEP, "A comment: in the target the reversed part starts at seq_len + 1.")
def c211() -> Verdict:
    y, answer = drawn()[:, 1:], drawn()[:, :LENGTH].flip(1)
    starts = [s for s in range(y.shape[1] - LENGTH + 1) if torch.equal(y[:, s : s + LENGTH], answer)]
    return false(
        starts == [LENGTH],
        f"At index {LENGTH} = seq_len: the target has been shifted by one already. The code beside the comment slices "
        "there.",
    )


@claim("C212", "lesson", STEP, "The number printed as Loss is the model's loss.")
def c212() -> Verdict:
    torch.manual_seed(0)
    model, parts = Model(VOCABULARY, 2 * LENGTH + 1), drawn(5000).split(BATCH)
    adam, losses = torch.optim.Adam(model.parameters(), lr=3e-4), list[float]()
    for ids in parts:
        logits = model(ids[:, :-1], causal())[0][:, LENGTH:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LENGTH + 1 :].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    printed, mean = sum(losses), sum(losses) / len(losses)
    return only_when(
        len(losses) == 40 and abs(mean - math.log(14)) < 0.5 and printed > 35 * mean,
        f"Divided by {len(losses)}: it is the sum over the {len(losses)} batches of an epoch. Chance is not ln 14 = "
        f"{math.log(14):.2f} but {40 * math.log(14):.1f}; the first epoch prints {printed:.0f}, where the mean loss is "
        f"{mean:.2f}.",
    )


@claim("C213", "lesson", STEP, "The printed reversal accuracy says how well the model reverses.")
def c213() -> Verdict:
    share = 5000 / (VOCABULARY - 2) ** LENGTH
    return experiment(
        "C213",
        "lesson",
        "It is measured on batches of training while the model changes, and the test set is made but never scored. The "
        f"5,000 sequences of training are {share:.2%} of all there are.",
    )

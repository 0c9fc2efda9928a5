"""Checks on step 3 of the build-along: its sequences, the model's inputs, and the meaning of its metrics."""

from __future__ import annotations

import math

import torch

from qkv.ledger import Verdict, claim, false, holds, only_when, trial
from qkv.ledger.trials.lesson_reversal import LENGTH, VOCABULARY, sequences

STEP = "Step 3: reversal"
TRIAL = "trial `lesson_reversal`"


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
    (start,) = [s for s in range(y.shape[1]) if torch.equal(y[:, s : s + LENGTH], answer)]
    return false(
        start == LENGTH,
        f"At index {start} = seq_len: the target has been shifted by one already. The code beside the comment slices "
        "there.",
    )


@claim("C212", "lesson", STEP, "The number printed as Loss is the model's loss.")
def c212() -> Verdict:
    epochs = [
        run["epoch, sum of losses, training accuracy, test accuracy"]
        for run in trial("lesson_reversal")["seeds"].values()
    ]
    first, last = [e[0][1] for e in epochs], [e[-1][1] for e in epochs]
    return only_when(
        min(first) > 40 * 2.5,
        f"Divided by 40: it is the sum over the 40 batches of an epoch. Chance is not ln 14 = {math.log(14):.2f} but "
        f"{40 * math.log(14):.1f}; three runs begin with {min(first):.0f} to {max(first):.0f} and end at "
        f"{max(last):.2f} or less.",
        TRIAL,
    )


@claim("C213", "lesson", STEP, "The printed reversal accuracy says how well the model reverses.")
def c213() -> Verdict:
    runs = trial("lesson_reversal")["seeds"].values()
    alone = [r["generated"] for r in runs]
    gap = max(abs(r["train_accuracy"] - r["generated"]) for r in runs)
    share = 5000 / (VOCABULARY - 2) ** LENGTH
    return only_when(
        share < 0.001 and gap < 0.01,
        "It is measured on batches of training while the model changes, and the test set is made but never scored. "
        f"Here that does no harm: on new sequences, writing by itself, the model is right at {min(alone):.1%}, within "
        f"{gap:.1%} of the last number printed (three runs), for the 5,000 sequences are {share:.2%} of all there are.",
        TRIAL,
    )

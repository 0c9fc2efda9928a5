"""Checks for section 8.5: when sinks emerge."""

from __future__ import annotations

from research.claims import Verdict, claim, experiment


@claim("C078", "chapter", "8.5", "Larger learning rates encourage sinks.")
def c078() -> Verdict:
    return experiment("C078", "learning_rate")


@claim("C079", "chapter", "8.5", "More training steps strengthen the sink.")
def c079() -> Verdict:
    return experiment("C079", "emergence")


@claim("C080", "chapter", "8.5", "Sinks emerge when there is enough unique training data.")
def c080() -> Verdict:
    return experiment("C080", "data_amount")


@claim("C081", "chapter", "8.5", "Diversity of the data matters more than its size.")
def c081() -> Verdict:
    return experiment("C081", "data_amount")


@claim("C082", "chapter", "8.5", "Weight decay encourages the sink.")
def c082() -> Verdict:
    return experiment("C082", "weight_decay")


@claim("C083", "chapter", "8.5", "Training as a prefix language model moves the sink to somewhere within the prefix.")
def c083() -> Verdict:
    return experiment("C083", "prefix")


@claim(
    "C084", "chapter", "8.5", "With windowed attention the sink is the absolutely first token, not the window's first."
)
def c084() -> Verdict:
    return experiment("C084", "window")


@claim("C085", "chapter", "8.5", "RoPE, ALiBi, learned and no positions: none prevents sinks.")
def c085() -> Verdict:
    return experiment("C085", "positions")


@claim("C086", "chapter", "8.5", "Pre-norm or post-norm does not matter for sinks.")
def c086() -> Verdict:
    return experiment("C086", "norm_place")


@claim("C087", "chapter", "8.5", "The activation function of the feed-forward layers does not matter for sinks.")
def c087() -> Verdict:
    return experiment("C087", "activation")


@claim("C088", "chapter", "8.5", "The number of heads does not matter for sinks.")
def c088() -> Verdict:
    return experiment("C088", "heads")


@claim("C089", "chapter", "8.5", "That softmax normalises its rows is the critical factor.")
def c089() -> Verdict:
    return experiment("C089", "normalizers")

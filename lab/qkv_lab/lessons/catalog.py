"""The labs, the chapters of the tutorial and the pages around them, with their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkv.errors import InputError, nearest


@dataclass(frozen=True)
class Lesson:
    """A lab, a chapter of the tutorial, or another page that runs.

    Attributes:
        name: name on the command line.
        part: the folder of its page, one of `PARTS`.
        minutes: estimated time of a reader who writes the answers of the exercises.
        about: what it is about, in a line.
    """

    name: str
    part: str
    minutes: int
    about: str

    def text(self) -> str:
        """The page, in MyST Markdown."""
        return (folder() / self.part / f"{self.name}.md").read_text(encoding="utf-8")


LESSONS = (
    Lesson("01-lookup", "tutorial", 15, "a dictionary that answers by how well keys fit"),
    Lesson("02-scores", "tutorial", 15, "three ways to compare two vectors, and why √d"),
    Lesson("03-by-hand", "tutorial", 15, "three tokens on paper, the same in four programs"),
    Lesson("04-masks", "tutorial", 15, "which tokens may attend to which, and a test that finds leaks"),
    Lesson("05-positions", "tutorial", 15, "sinusoids, rotations and biases add order"),
    Lesson("06-heads", "tutorial", 15, "several attentions added up, and sharing keys"),
    Lesson("07-a-model", "tutorial", 15, "a model that reverses, trained in seconds and opened"),
    Lesson("08-seeing", "tutorial", 15, "all heads of a language model, and what weights do not say"),
    Lesson("09-sinks", "tutorial", 15, "heads that attend to a token without content, and six alternatives"),
    Lesson("10-long", "tutorial", 15, "linear memory, windows, caches, linear attention, and their costs"),
    Lesson("11-since-2024", "tutorial", 20, "gates, forgetting, small caches, selected keys, states, hybrids"),
    Lesson("attention", "labs", 40, "one head, its mask, queries with no visible key"),
    Lesson("multi-head", "labs", 60, "multi-head attention, dropout, cross-attention"),
    Lesson("visualise", "labs", 40, "maps and a statistic of two trained models"),
    Lesson("sinks", "labs", 60, "two measures of sinks, two alternatives, a small model with a sink"),
    Lesson("transformer", "labs", 75, "a language model from its parts, trained on Python code"),
    Lesson("numpy", "labs", 45, "softmax, lookup, masks and heads, without torch"),
    Lesson("notebook", "labs", 25, "a first course, cell by cell, with its claims tested"),
    Lesson("reversal", "labs", 60, "a small Transformer on a task with a known solution"),
    Lesson("bahdanau", "labs", 50, "additive attention; models that translate"),
    Lesson("caption", "labs", 30, "experiments with a model that describes scenes"),
    Lesson("long", "labs", 50, "positions that rotate, shared keys, a cache, linear attention"),
    Lesson("recent", "labs", 50, "softpick, forget gates, the delta rule, attention over layers"),
    Lesson("worked-example", "labs", 35, "the sources' calculations by hand, to three decimals"),
    Lesson("recurrence", "background", 15, "RNNs and attention: path, steps, memory, and gradients over distance"),
    Lesson("routing", "background", 10, "what skip connections, gates and attention have in common"),
    Lesson("people", "background", 10, "attention in psychology"),
    Lesson("related-models", "background", 10, "T5, Transformer-XL, Vision Transformers, CLIP"),
    Lesson("interview", ".", 20, "six questions, with answers and where they are computed"),
    Lesson("by-hand", "_static", 10, "three tokens whose numbers you change, in the browser"),
)
"""In the order in which they can be read."""


PARTS = {
    "tutorial": "Tutorial", "labs": "Labs, with exercises", "background": "Background", ".": "Questions",
    "_static": "In the browser",
}  # fmt: skip


def lesson(name: str) -> Lesson:
    """The lab or chapter with a name.

    >>> lesson("sinks").minutes
    60
    """
    found = {one.name: one for one in LESSONS}
    if name not in found:
        raise InputError(f"lab is {name!r}, expected one of {', '.join(found)}{nearest(name, found)}")
    return found[name]


def folder() -> Path:
    """The folder with the pages: inside the package in an installed wheel, the documentation in a clone."""
    installed = Path(__file__).parent / "pages"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "docs"

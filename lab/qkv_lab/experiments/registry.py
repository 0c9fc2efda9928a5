"""The experiments, by name. To add one, write its file in this folder and a line in `BUILT_IN`."""

from __future__ import annotations

from typing import Any

from qkv._registry import Registry
from qkv_lab.experiments.base import Experiment

BUILT_IN = {
    "emergence": "texts.Emergence",
    "mechanism": "mechanism.Mechanism",
    "learning_rate": "architecture.LearningRate",
    "weight_decay": "architecture.WeightDecay",
    "data_amount": "texts.DataAmount",
    "first_token": "texts.FirstToken",
    "positions": "architecture.Positions",
    "norm_place": "architecture.NormPlace",
    "activation": "architecture.Activation",
    "heads": "architecture.Heads",
    "model_size": "architecture.ModelSize",
    "prefix": "masks.PrefixMask",
    "window": "masks.WindowMask",
    "normalizers": "normalizers.Normalizers",
    "streaming": "streaming.Streaming",
    "overmixing": "mechanism.Overmixing",
    "random_scores": "scaling.RandomScores",
    "scaling": "scaling.Scaling",
    "bottleneck": "bottleneck.Bottleneck",
    "coreference": "associations.Pronouns",
    "hops": "associations.Depth",
    "projections": "associations.Projections",
    "two_lookups": "head_numbers.TwoLookups",
    "four_lookups": "head_numbers.FourLookups",
    "shared_keys": "head_numbers.SharedKeys",
    "score_functions": "associations.ScoreFunctions",
    "linear_attention": "associations.LinearAttention",
    "hard_attention": "associations.HardAttention",
    "recurrence": "bottleneck.Recurrence",
    "no_mask": "masks.NoMask",
    "extrapolation": "masks.Extrapolation",
    "relative_positions": "masks.RelativePositions",
    "lesson": "bottleneck.Lesson",
    "blocks": "architecture.Blocks",
    "text_sink": "texts.TextSink",
    "dropout": "texts.Dropout",
}
GROUP = "qkv.experiments"
"""The group of entry points in which an installed package registers subclasses of `Experiment`."""


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as an experiment."""
    if not issubclass(cls, Experiment):
        return "is not a subclass of qkv_lab.experiments.Experiment"
    missing = [name for name in ("name", "question", "claims") if not hasattr(cls, name)]
    if cls.conclude is Experiment.conclude:
        missing += [name for name in ("criteria", "effects") if getattr(cls, name) is getattr(Experiment, name)]
    if missing:
        return f"does not define {', '.join(missing)}"
    return None


REGISTRY = Registry("experiment", "qkv_lab.experiments", BUILT_IN, GROUP, _problem)


def names() -> tuple[str, ...]:
    """The names of all experiments, those of installed packages last."""
    return REGISTRY.names()


def experiment(name: str) -> Experiment:
    """The experiment of a name, built in or of an installed package (entry points in the group ``qkv.experiments``).

    Raises:
        InputError: if there is none (with the nearest name), or if an installed package's cannot be loaded.

    >>> experiment("learning_rate").claims
    ('C078', 'C100')
    """
    made: Experiment = REGISTRY.load(name)()
    return made

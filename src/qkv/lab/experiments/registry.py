"""The experiments, by name."""

from __future__ import annotations

from importlib import import_module

from qkv.errors import InputError
from qkv.lab.experiments.base import Experiment
from qkv.models.config import nearest

_CLASSES = {
    "emergence": "emergence.Emergence",
    "mechanism": "mechanism.Mechanism",
    "learning_rate": "optimisation.LearningRate",
    "weight_decay": "optimisation.WeightDecay",
    "data_amount": "data.DataAmount",
    "first_token": "data.FirstToken",
    "positions": "architecture.Positions",
    "norm_place": "architecture.NormPlace",
    "activation": "architecture.Activation",
    "heads": "architecture.Heads",
    "model_size": "architecture.ModelSize",
    "prefix": "masks.PrefixMask",
    "window": "masks.WindowMask",
    "normalizers": "normalizers.Normalizers",
    "streaming": "streaming.Streaming",
    "overmixing": "overmixing.Overmixing",
    "scaling": "scaling.Scaling",
    "bottleneck": "bottleneck.Bottleneck",
    "mini": "mini.Mini",
}


def names() -> tuple[str, ...]:
    """All experiments."""
    return tuple(_CLASSES)


def experiment(name: str) -> Experiment:
    """An experiment; `InputError` with the nearest name if there is none.

    >>> experiment("learning_rate").claims
    ('C078', 'C100')
    """
    if name not in _CLASSES:
        raise InputError(f"experiment is {name!r}, expected one of {', '.join(_CLASSES)}{nearest(name, _CLASSES)}")
    module, cls = _CLASSES[name].split(".")
    made: Experiment = getattr(import_module(f"qkv.lab.experiments.{module}"), cls)()
    return made

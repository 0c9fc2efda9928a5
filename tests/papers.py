"""The equations of papers on recurrent attention, for one sequence and one query at a time, in NumPy."""

from __future__ import annotations

import numpy as np
from torch import nn

Parameters = dict[str, np.ndarray]


def parameters(module: nn.Module) -> Parameters:
    """The parameters of a module as arrays, by name."""
    return {name: x.detach().numpy() for name, x in module.named_parameters()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(scores: np.ndarray, shown: np.ndarray | None = None) -> np.ndarray:
    """Weights over the scores that are shown, and zero for all others."""
    exps = np.exp(scores) * (1 if shown is None else shown)
    return exps / exps.sum() if exps.any() else exps


def additive(p: Parameters, h: np.ndarray, keys: np.ndarray, shown: np.ndarray | None = None) -> np.ndarray:
    """Bahdanau et al. 2015, eq. 6 and app. A.1.2: the weights of the decoder state h on the keys."""
    return softmax(np.array([p["vector"] @ np.tanh(p["w_q"] @ h + p["w_k"] @ key) for key in keys]), shown)


def luong(
    p: Parameters, score: str, kind: str, width: int, h: np.ndarray, keys: np.ndarray, step: int,
    shown: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Luong et al. 2015, eq. 5 and 7–10: h~ and the weights of the decoder state h on the keys of a source."""
    scored = {
        "dot": lambda key: h @ key,
        "general": lambda key: h @ p["weight"] @ key,
        "concat": lambda key: p["vector"] @ np.tanh(p["weight"] @ np.concatenate([h, key])),
    }[score]
    places, centre = np.arange(len(keys)), step
    if kind == "local-p":
        centre = len(keys) * sigmoid(p["position_vector"] @ np.tanh(p["position_weight"] @ h))
    near = np.ones(len(keys), bool) if shown is None else shown
    if kind != "global":
        near = near & (abs(places - centre) <= width)
    weights = softmax(np.array([scored(key) for key in keys]), near)
    if kind == "local-p":
        weights = weights * np.exp(-((places - centre) ** 2) / (2 * (width / 2) ** 2))
    return np.tanh(p["combine.weight"] @ np.concatenate([weights @ keys, h])), weights

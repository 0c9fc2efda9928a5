"""Hand-made decoders whose sinks are known in closed form, for the tests of `research.sinks`."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.models import DecoderConfig, DecoderLM

VOCABULARY, WIDTH = 199, 16
MARK, PEAK = 0, 1
"""Dimensions: that in which only token 0 is not zero, and that which blocks write."""
STRENGTH = 12.0
"""The score of the first key; all other scores are 0."""


def decoder(layers: int) -> DecoderLM:
    """A decoder with one head in each layer whose parameters are all zero, but for the embeddings and norms.

    Every embedding is ±1 in 14 dimensions; token 0 has 1 in the dimension `MARK`, too.
    """
    config = DecoderConfig(
        vocab_size=VOCABULARY, context=64, d_model=WIDTH, layers=layers, heads=1, d_hidden=3, positions="none",
        norm="rmsnorm", norm_eps=1e-12, activation="relu",
    )  # fmt: skip
    model = DecoderLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        signs = torch.randint(2, (VOCABULARY, WIDTH - 2), generator=torch.Generator().manual_seed(0))
        model.embedding.weight[:, 2:] = 2.0 * signs - 1
        model.embedding.weight[0, MARK] = 1
    return model


@torch.no_grad()
def add_head(model: DecoderLM, layer: int, dimension: int, factor: float) -> None:
    """A head with the query (1, 0, 0, …), the keys (factor · x̂[dimension], x̂[2], 0, …), and the values x̂[2:]."""
    attention = model.get_submodule(f"blocks.{layer}.attention")
    _, k, v = attention.in_proj.weight.view(3, WIDTH, WIDTH)  # type: ignore[operator, union-attr]
    attention.in_proj.bias[0] = 1  # type: ignore[index, union-attr]
    k[0, dimension], k[1, 2] = factor, 1
    v[2:, 2:] = torch.eye(WIDTH - 2)
    attention.out_proj.weight.copy_(torch.eye(WIDTH))  # type: ignore[operator, union-attr]


@torch.no_grad()
def with_known_head() -> DecoderLM:
    """One layer, whose score of token 0 is `STRENGTH` from every query: 0.25 · factor · x̂[MARK]."""
    model = decoder(1)
    add_head(model, 0, MARK, 4 * STRENGTH * (15 / 16) ** 0.5)
    return model


@torch.no_grad()
def with_peak(*, read: bool) -> DecoderLM:
    """Two layers: the first writes a peak at token 0, and a head of the second has its sink there.

    Its key reads the peak, or else the mark that is in the embedding already.
    """
    model = decoder(2)
    feed_forward = model.get_submodule("blocks.0.feed_forward")
    feed_forward.up.weight[0, MARK] = 10  # type: ignore[index, union-attr]
    feed_forward.down.weight[PEAK, 0] = 100  # type: ignore[index, union-attr]
    written = 1000 / (15 / 16) ** 0.5
    rms = ((15 + written**2) / 16) ** 0.5
    add_head(model, 1, PEAK if read else MARK, 4 * STRENGTH * rms / (written if read else 1))
    return model


def texts(count: int = 16, n: int = 64) -> Tensor:
    """Texts that begin with token 0, and do not have it elsewhere."""
    ids = torch.randint(1, VOCABULARY, (count, n), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 0
    return ids

"""`measure`, tables, figures and surveys agree with the objects of statistics."""

from __future__ import annotations

import pytest
import torch

import qkv
from conftest import close, rand, refused, triple
from qkv import InputError
from qkv.masks import Causal, Dense, Mask, Window
from qkv.statistics import BUILT_IN, Local, Mass, Sink, Streaming
from qkv.statistics.result import field_of

CASES = {
    "causal": (13, 13, Causal(), torch.float64),
    "window": (11, 17, Window(4) & Causal(), torch.float32),
    "tiles": (300, 270, None, torch.float32),
    "holes": (17, 19, Dense(rand(2, 1, 17, 19) < -0.3), torch.float64),
}


@pytest.mark.parametrize(("nq", "nk", "mask", "dtype"), CASES.values(), ids=CASES)
def test_measure_agrees_with_the_statistic_objects(nq: int, nk: int, mask: Mask | None, dtype: torch.dtype) -> None:
    q, k = rand(2, 6, nq, 8, dtype=dtype), rand(2, 3, nk, 8, seed=1, dtype=dtype)
    counted = torch.ones(2, nq, dtype=torch.bool)
    counted[1, : nq // 3] = False
    mass = {s.name: s.mask for s in (Local(3), Streaming())}
    statistics = (*BUILT_IN.values(), Local(3), Streaming())
    result = qkv.measure(q, k, mask=mask, queries=counted, mass=mass, statistics=statistics)
    for name in BUILT_IN:
        fused, by_object = getattr(result, field_of(name)), result.own[name]
        size = 1e-9 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(fused, by_object, rtol=size / 10, atol=size, msg=name)
    for name, inside in result.mass.items():
        torch.testing.assert_close(inside, result.own[name], rtol=1e-5, atol=1e-6)


def test_a_tile_holds_the_first_key_of_its_text() -> None:
    q, k, _ = triple()
    result = qkv.measure(q, k, first=torch.tensor([3, 0]), statistics=[Sink()])
    close(result.own["sink"], result.sink)


def test_statistics_reject_masks_that_do_not_fit() -> None:
    q, k, _ = triple()
    larger = torch.ones(40, 40, dtype=torch.bool)
    with pytest.raises(InputError, match="40"):
        qkv.measure(q, k, statistics=[Mass("large", Dense(larger))])
    with refused("mask"):
        Mass("tensor", larger)  # type: ignore[arg-type]
    with refused("statistics", "one Sink object"):
        qkv.measure(q, k, statistics=Sink())  # type: ignore[arg-type]

"""The cases of tests/core/test_ring.py; as a script, the processes that share a sequence.

python ring_cases.py FOLDER SIZE…: groups of so many processes, each of which writes what it found to
FOLDER/found-SIZE.pt. At the end one process of three is killed, and the others write their errors to
FOLDER/lost-RANK.txt.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import qkv
from qkv import masks
from qkv.biases import ALiBi, ByDistance, SoftCap, T5Bias, TensorBias
from qkv.engine.sizes import BY_DEVICE
from qkv.normalizers import Softmax
from qkv.scores import Additive
from qkv.statistics import PrefixSinkScores

N = 36  # tokens: 2 × 2 chunks of 9, 2 × 3 of 6
BATCH, HEADS, KEY_HEADS, D, DV = 2, 6, 2, 3, 5


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 7919 + sum(shape)), dtype=torch.float64)


AT = torch.arange(N)
DOCUMENTS = masks.Document(torch.stack([AT * 3 // N, torch.where(AT < 9, -1, AT * 5 // N)]))


@dataclass(frozen=True)
class Case:
    """One call. The parameter is the same on all processes, and so is its gradient once it is added up."""

    mask: masks.Mask | None = None
    keys: int = N
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    poison: slice | None = None
    statistics: bool = False  # beside the output; those of `measure` are compared for more cases
    shape: tuple[int, ...] | None = None  # of the parameter, if there is one
    composed: Callable[[Any], dict[str, Any]] = field(default=lambda p: {})  # called with the parameter

    def parameter(self) -> Tensor | None:
        return None if self.shape is None else rand(*self.shape, seed=7).to(self.dtype).requires_grad_()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k and v of the whole, and the slopes of the loss in out and in lse."""
        shapes = [(HEADS, N, D), (KEY_HEADS, self.keys, D), (KEY_HEADS, self.keys, DV), (HEADS, N, DV), (HEADS, N)]
        q, k, v, slope, slope_lse = (rand(BATCH, *s, seed=i).to(self.dtype) for i, s in enumerate(shapes))
        if self.poison is not None:
            k[0, :, self.poison], v[0, :, self.poison] = torch.nan, torch.nan
        return q, k, v, slope, slope_lse

    def run(self, move: Callable[[Tensor], Tensor], *group: Any) -> dict[str, Tensor]:
        """out, lse and gradients; `move` takes a tensor of the whole to the part that is here."""
        q, k, v, slope, slope_lse = (move(x) for x in self.tensors())
        parameter, inputs = self.parameter(), [x.requires_grad_() for x in (q, k, v)]
        attend: Any = qkv.ring.attend if group else qkv.attend
        out, lse, *measured = attend(
            *inputs, *group, mask=self.mask, kernel=self.kernel, return_lse=True, return_statistics=self.statistics,
            **self.composed(parameter),
        )  # fmt: skip
        loss = (out * slope).sum() + torch.where(lse.isfinite(), lse * slope_lse, 0).sum()
        found = {"out": out.detach(), "lse": lse.detach()}
        if self.statistics:
            found["received"] = measured[0].received.detach()
        inputs += [] if parameter is None else [parameter]
        return found | dict(zip(("dq", "dk", "dv", "parameter"), torch.autograd.grad(loss, inputs), strict=False))


CAUSAL = masks.Causal()
CASES = {
    "causal": Case(CAUSAL, statistics=True),
    "no mask": Case(),
    "float32": Case(CAUSAL, dtype=torch.float32),
    "bfloat16": Case(CAUSAL, dtype=torch.bfloat16),
    "native": Case(CAUSAL, statistics=True, dtype=torch.float32, kernel="native"),
    "window": Case(masks.Window(5)),
    "documents, causal": Case(DOCUMENTS & CAUSAL),
    "left padding": Case(masks.Padding([N - 11, N - 3], "left") & CAUSAL),
    "not a number in padding": Case(masks.Padding([N - 11, N - 3]) & CAUSAL, poison=slice(N - 11, N)),
    "random blocks": Case(masks.bigbird(4, random=1)),
    "dense": Case(masks.Dense(rand(HEADS, N, N, seed=5) > 0.4)),
    "of heads and items": Case(masks.Predicate(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0)),
    "more keys than queries": Case(CAUSAL, statistics=True, keys=2 * N),
    "fewer keys than queries": Case(CAUSAL, keys=16),
    "sink": Case(CAUSAL, statistics=True, shape=(HEADS,), composed=lambda p: {"normalizer": Softmax(1.5, sink=p)}),
    "off by one, and nothing visible": Case(~masks.Prefix(N), composed=lambda p: {"normalizer": Softmax(sink=0.0)}),
    "learned key": Case(masks.Window(9), shape=(HEADS, D), composed=lambda p: {"normalizer": Softmax(key=p)}),
    "ALiBi": Case(CAUSAL, composed=lambda p: {"bias": ALiBi(), "normalizer": Softmax(0.7)}),
    "ALiBi, learned": Case(masks.Window(17), shape=(HEADS,), composed=lambda p: {"bias": ALiBi(p)}),
    "T5": Case(statistics=True, shape=(32, HEADS), composed=lambda p: {"bias": (T5Bias(p), SoftCap(2.0))}),
    "by distance, more keys": Case(CAUSAL, 2 * N, shape=(1, 3 * N - 1), composed=lambda p: {"bias": ByDistance(p)}),
    "dense bias": Case(shape=(1, HEADS, N, N), composed=lambda p: {"bias": TensorBias(p)}),
    "additive": Case(CAUSAL, shape=(HEADS, D), composed=lambda p: {"score": Additive(p)}),
}

MEASURED = (
    "causal", "no mask", "documents, causal", "float32", "not a number in padding", "window",
    "of heads and items", "random blocks", "more keys than queries", "learned key", "sink",
    "off by one, and nothing visible", "T5", "additive",
)  # fmt: skip


def run_by(size: int) -> tuple[str, ...]:
    """The cases that so many processes run: three every fifth one, two the others and the first."""
    return _share(tuple(CASES), size)


def measured_by(size: int) -> tuple[str, ...]:
    """The cases whose statistics so many processes measure."""
    return _share(MEASURED, size)


def _share(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    return names[::5] if size == 3 else tuple(name for n, name in enumerate(names) if n % 5 or n == 0)


def measured(case: Case, move: Callable[..., Tensor], *group: Any) -> dict[str, Tensor]:
    """All statistics with all options; the queries of a few tokens are excluded."""
    q, k, *_ = case.tensors()
    parameter = case.parameter()
    counted = torch.stack([AT % 11 != 3, AT >= 9])
    if case.poison is not None:
        q[~counted[:, None].expand(-1, HEADS, -1)] = torch.nan
    measure: Any = qkv.ring.measure if group else qkv.measure
    found = measure(
        move(q),
        move(k),
        *group,
        mask=case.mask,
        mass={"near": masks.Window(6, ahead=5), "odd": masks.Predicate(lambda b, h, q, k: k % 2 == 1)},
        first=torch.tensor([0, 9]),
        queries=move(counted, 1),
        statistics=[PrefixSinkScores(12)],
        **case.composed(None if parameter is None else parameter.detach()),
    )
    named = {f.name: getattr(found, f.name) for f in fields(found) if f.name not in ("mass", "own", "thumbnail")}
    named |= {f"mass {name}": x for name, x in found.mass.items()}
    return {name: x for name, x in named.items() if x is not None}


# --- one process ------------------------------------------------------------------------------------------------------


def _shared(case: Case, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The results of all processes, gathered."""
    found = case.run(lambda x: qkv.ring.shard(x, group), group)
    for name, x in found.items():
        if name == "parameter":
            dist.all_reduce(x, group=group)
        else:
            found[name] = qkv.ring.unshard(x, group)
    return found


def _shared_statistics(case: Case, group: dist.ProcessGroup) -> dict[str, Tensor]:
    found = measured(case, lambda x, dim=2: qkv.ring.shard(x, group, dim), group)
    return {name: x if name == "prefix_sink_scores" else qkv.ring.unshard(x, group) for name, x in found.items()}


def _check_refusals(group: dist.ProcessGroup) -> None:
    """Bad input raises on every process, also if only one of them has it, and none waits for the others."""
    rank = dist.get_rank(group)
    x = torch.zeros(1, 2, 6, 4)

    def twice() -> None:
        q = x.clone().requires_grad_()
        out = qkv.ring.attend(q, x, x, group)
        torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum().backward()

    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("q", "5 tokens", lambda: qkv.ring.attend(*[x[:, :, :5]] * 3, group)),
        ("q", "process 1 has q ", lambda: qkv.ring.attend(*[x[:, :, : 4 if rank == 1 else 6]] * 3, group)),
        ("q", "with gradient", lambda: qkv.ring.attend(*[x.clone().requires_grad_(rank == 1)] * 3, group)),
        ("normalizer", "", lambda: qkv.ring.attend(x, x, x, group, normalizer=qkv.normalizers.Sigmoid())),
        ("bias", "", lambda: qkv.ring.attend(x, x, x, group, bias=qkv.biases.RelativePosition(torch.zeros(3, 4)))),
        ("ids", "", lambda: qkv.ring.attend(x, x, x, group, mask=masks.Document([0] * 6))),
        ("kernel", "'eager'", lambda: qkv.ring.attend(x, x, x, group, kernel="eager")),
        ("kernel", "second", twice),
        ("x", "length 5", lambda: qkv.ring.shard(x[:, :, :5], group)),
        ("dim", "", lambda: qkv.ring.shard(x, group, dim=4)),
        ("first", "", lambda: qkv.ring.measure(x, x, group, first=12 * dist.get_world_size(group))),
        ("x", "gradient", lambda: qkv.ring.unshard(x.clone().requires_grad_(), group)),
    ]
    for argument, match, call in calls:
        with pytest.raises(qkv.InputError, match=match or None) as raised:
            call()
        assert raised.value.argument == argument


class Reader(torch.nn.Module):
    """Two causal layers on ids, of which each process may have a shard."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attends(group) for _ in range(2))
        self.embedding = torch.nn.Embedding(11, 12)
        generator = torch.Generator().manual_seed(3)
        for weight in self.parameters():
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)  # scores that float32 resolves

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(positions[..., None] * torch.arange(1.0, 13.0))
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attends(torch.nn.Module):
    """Three heads of four, one key head."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.q, self.k = torch.nn.Linear(12, 12), torch.nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).unflatten(-1, (3, 4)).transpose(1, 2), self.k(x)[:, None]
        out = (
            qkv.attend(q, k, k, mask=masks.Causal())
            if self.group is None
            else qkv.ring.attend(q, k, k, self.group, mask=masks.Causal())
        )
        return out.transpose(1, 2).flatten(2)


IDS = torch.arange(2 * 80).view(2, 80) * 7 % 11


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    group = dist.group.WORLD
    assert group is not None
    tile = 4 if size == 3 else 256  # smaller than the chunks of three processes, larger than those of two
    with patch.dict(BY_DEVICE, cpu=replace(BY_DEVICE["cpu"], tile=tile)):
        found: dict[str, Any] = {name: _shared(CASES[name], group) for name in run_by(size)}
        found["statistics"] = {name: _shared_statistics(CASES[name], group) for name in measured_by(size)}
    chunk = 24 // (2 * size)
    early, late = rank * chunk, (2 * size - 1 - rank) * chunk  # which balances the work of a causal mask
    mine = qkv.ring.positions(24, group).tolist()
    assert mine == [*range(early, early + chunk), *range(late, late + chunk)]
    assert mine == qkv.ring.shard(torch.arange(24), group, dim=0).tolist()
    _check_refusals(group)
    if size == 2:
        ids, positions = (qkv.ring.shard(x, group, dim=1) for x in (IDS, torch.arange(80).expand(2, 80)))
        profile = qkv.profile(Reader(group), {"input_ids": ids, "positions": positions}, progress=False)
        profile.save(folder / f"profile-{rank}.qkv.zip", exact=True)
    some = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        found["two of three"] = _shared(CASES["causal"], some)
    if rank == 0:
        torch.save(found, folder / f"found-{size}.pt")
    if size == 3:
        lost(rank, group, folder)
    else:
        dist.destroy_process_group()


def lost(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """The process of rank 2 is killed, and the others write their error."""
    q = rand(1, 2, 8, 4, seed=0)
    qkv.ring.attend(q, q, q, group, mask=masks.Causal())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        qkv.ring.attend(q, q, q, group, mask=masks.Causal())
    except RuntimeError as error:
        (folder / f"lost-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    import safetensors.numpy  # noqa: F401
    import torch.fx.experimental.symbolic_shapes

    import qkv.runs.run  # before they fork: otherwise each would import it

    fork = multiprocessing.get_context("fork")
    folder = Path(sys.argv[1])
    places = [(rank, int(size), folder) for size in sys.argv[2:] for rank in range(int(size))]
    processes = [fork.Process(target=main, args=place) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * (len(codes) - 1) + [-signal.SIGKILL], codes

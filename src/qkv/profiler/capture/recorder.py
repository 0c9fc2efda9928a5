"""`Recorder` measures the attention calls of one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.engine import Call, Result, RowState, Shared, detached
from qkv.errors import InputError
from qkv.profiler.capture.layer import Layer
from qkv.profiler.capture.record import PREFIX, Measures, ObservedCall, Record, is_causal, served
from qkv.statistics import PrefixSinkScores
from qkv.statistics.measure import sweep
from qkv.statistics.result import Statistics


class Recorder:
    """Receives the calls of one forward and measures each, together with its result where that is not known.

    Args:
        measures: what is measured.
    """

    def __init__(self, measures: Measures) -> None:
        self.measures = measures
        self.records: list[Record] = []
        self.group: ProcessGroup | None = None
        """The processes that share the sequence, if there are several."""
        self._layers: list[tuple[int, Layer]] = []  # places of records, and modules that attend step by step

    def __call__(self, observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]) -> Result:
        if observed.step is None:
            result, record = self.measures.record(observed, result, changed)
            self.records.append(record)
            return result
        if observed.step == 0:
            layer = Layer(observed.module, observed.group, observed.layer, observed.source, own_keys=True)
            self._layers.append((len(self.records), layer))
            self.records.append(None)  # type: ignore[arg-type]
        layer = next(one for _, one in reversed(self._layers) if one.module == observed.module)
        layer.add(observed, observed.step, 0, None, stays=True)
        return served(observed.call) if result is None else result

    def finish(self, real: Mapping[int, Tensor]) -> None:
        """Join the steps of each module that attends step by step; `real` is True at real queries, by their number."""
        for at, layer in self._layers:
            total = sum(piece.count for piece in layer.pieces)  # type: ignore[union-attr, misc]
            self.records[at] = layer.record(self.measures, real.get(total), total, {})
        self._layers.clear()

    def add_shared(self, name: str, group: str, layer: int, shared: Shared, result: Result) -> None:
        """Record a call of which this process has a shard."""
        if names := [s.name for s in self.measures.statistics]:
            raise InputError(
                f"statistics has {', '.join(names)}, but {name} shares its sequence with other processes, where custom "
                "statistics are not supported; expected none"
            )
        self.group, call = shared.group, detached(shared.call)
        mass = self.measures.masses(0, shared.grid.n_keys)
        found = sweep(call, RowState(result.lse), mass=mass, statistics=[PrefixSinkScores(PREFIX)], shared=shared)
        whole = _gathered(found, shared.group)
        self.records.append(Record(name, group, layer, whole, {}, None, None, None, is_causal(call.mask)))


def _gathered(statistics: Statistics, group: ProcessGroup) -> Statistics:
    """The statistics of a whole sequence, from processes that each have those of their own shard."""

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else ring.unshard(x, group)

    by_token = {
        f.name: whole(getattr(statistics, f.name))
        for f in fields(Statistics)
        if f.name not in ("mass", "own", "prefix_sink_scores", "thumbnail")
    }
    mass = {name: whole(x) for name, x in statistics.mass.items()}
    return replace(statistics, **by_token, mass=mass)  # type: ignore[arg-type]

"""In a worker: the statistics of the requests that ask, measured after each layer's attention.

Queries and keys are those of the attention backend in force, which computes the output as without the plugin. A chunk
of a prompt is measured when it is computed. The queries of generated tokens wait, and are measured together: the keys
are in the pages of the engine's cache as long as the request has them.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.biases import ALiBi, Bias, SoftCap
from qkv.engine import Call
from qkv.errors import InputError, first_line
from qkv.masks import Causal, Mask
from qkv.native.library import description
from qkv.normalizers import Softmax
from qkv.profiler.capture.layer import Measured, Moment, joined
from qkv.profiler.capture.record import Measures, ObservedCall, Record, refuse_nan
from qkv.scores import Dot
from qkv.statistics.paged import gathered
from qkv_vllm.answer import WINDOW, packed, passages
from qkv_vllm.caches import keys_of
from qkv_vllm.settings import Asked, Settings

UNKNOWN_LAYOUT = (
    "the cache of this attention backend has a layout that qkv-vllm does not know; on a CPU with AMX, serve with "
    "dtype float32"
)
CAUSAL = Causal()
WAITING = 64
"""So many queries of generated tokens wait at most."""


@dataclass(frozen=True)
class _Measures(Measures):
    """What is measured of a served request: also the share of each passage."""

    passages: tuple[tuple[int, int], ...] = ()

    def masses(self, first: int | Tensor, n_keys: int, device: torch.device) -> dict[str, Mask]:
        of_passages = {s.name: s.mask for s in passages(self.passages)}
        return super().masses(first, n_keys, device) | of_passages


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer of the engine."""

    name: str
    number: int
    module: Any
    """vLLM's `Attention`."""
    score: Dot
    biases: tuple[Bias, ...]

    @classmethod
    def of(cls, name: str, number: int, module: Any) -> Layer:
        """Read the layer of a model of vLLM.

        Raises:
            InputError: for what is not measured.
        """
        impl = module.impl
        if module.sliding_window is not None:
            raise InputError(f"{name} has a sliding window, which qkv-vllm does not measure; expected full attention")
        if module.attn_type != "decoder" or module.use_mm_prefix:
            raise InputError(
                f"{name} lets tokens attend to later ones, which qkv-vllm does not measure; expected a decoder"
            )
        cap, slopes = getattr(impl, "logits_soft_cap", None), getattr(impl, "alibi_slopes", None)
        biases: list[Bias] = [SoftCap(float(cap))] if cap else []
        if slopes is not None:
            biases.append(ALiBi(torch.as_tensor(slopes)))
        return cls(name, number, module, Dot(float(impl.scale)), tuple(biases))

    def keys(self, cache: Tensor, table: Int[Tensor, " most"], length: int) -> Float[Tensor, "1 hkv n d"]:
        """Return a copy of the keys of a request."""
        return gathered(keys_of(self.module, cache), table, length)

    def observed(self, q: Float[Tensor, "1 h nq d"], k: Float[Tensor, "1 hkv nk d"]) -> ObservedCall:
        sinks = getattr(self.module.impl, "sinks", None)
        normalizer = None if sinks is None else Softmax(sink=sinks.float())
        call = Call.of(q, k, k, CAUSAL, self.biases, self.score, normalizer)
        return ObservedCall(self.name, "self", self.number, call, None, None, None, 0, True, "vllm")


@dataclass
class _Rows:
    """One layer of one request."""

    known: int = 0
    """Number of tokens that were computed."""
    measured: Measured | None = None
    waiting: list[Float[Tensor, "n h d"]] = field(default_factory=list)
    norms: list[Float[Tensor, "n hkv"]] = field(default_factory=list)
    """Of the values."""


class Request:
    """The statistics of one request so far."""

    def __init__(self, asked: Asked, settings: Settings) -> None:
        self.measures = _Measures(WINDOW, settings.weights, 0, passages=asked.passages)
        self.asked, self.rows, self.error = asked, 0, ""
        self.layers = dict[int, _Rows]()
        self.table: Int[Tensor, " most"] | None = None
        """The blocks of its keys after the last step."""
        self.seconds = 0.0

    def fail(self, error: Exception) -> None:
        """Measure no more of this request, whose answer says why."""
        self.error, self.layers = first_line(error), {}

    def add(self, layer: Layer, start: int, q: Tensor, value: Tensor, cache: Tensor) -> None:
        """Add the tokens of a step: their queries (n, h, d) and values (n, hkv, d), and where the cache is."""
        if start == 0:
            self.layers[layer.number] = _Rows()  # the first step, or all is computed again after a preemption
        at = self.layers[layer.number]
        if start != at.known:
            raise InputError(f"the engine computes token {start} after {at.known}, so it does not compute all queries")
        at.known += len(q)
        at.waiting.append(q.clone())
        at.norms.append(torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32))
        if start == 0 or len(q) > 1:
            self.measure(layer, at.known, cache)
        elif len(at.waiting) > WAITING:
            newest = at.waiting.pop()  # it may turn out to follow the end of the answer
            self.measure(layer, start, cache)
            at.waiting.append(newest)

    def measure(self, layer: Layer, stop: int, cache: Tensor) -> None:
        """Measure the queries that wait, the last of which is that of token `stop` − 1."""
        at = self.layers[layer.number]
        if not at.waiting:
            return
        assert self.table is not None
        q = torch.cat(at.waiting).transpose(0, 1)[None]
        at.waiting.clear()
        observed = layer.observed(q, layer.keys(cache, self.table, stop))
        norms = torch.cat(at.norms)
        at.norms = [norms]
        norms = norms[:stop].T[None].repeat_interleave(q.shape[1] // norms.shape[1], 1)
        _, statistics, weights = self.measures.of(observed, norms=norms, output=False)
        refuse_nan(layer.name, statistics)
        start = stop - q.shape[2]
        record = Record(layer.name, "self", layer.number, statistics, {}, weights, None, None, True)
        part = Measured(start, q.shape[2], 0, [*range(start, stop)], record)
        if at.measured is not None:
            whole, of_pairs = joined([at.measured, part], Moment(self.measures, stop), stop, None)
            record = Record(layer.name, "self", layer.number, whole, {}, of_pairs, None, None, True)
            part = Measured(0, stop, 0, [*range(stop)], record)
        at.measured = part


class Recorder:
    """The requests of a worker that ask."""

    def __init__(self, runner: Any, settings: Settings, layers: list[Layer], version: str) -> None:
        self.runner, self.settings, self.layers, self.version = runner, settings, layers, version
        self.parameters = sum(p.numel() for p in runner.model.parameters())
        self.requests = dict[str, Request]()
        self.scheduled: Any = None
        """The engine's output of its scheduler, in a step."""
        self.checked = set[int]()
        """Layers whose keys were found where they are expected."""
        self.step: list[tuple[Request, int, slice]] = []
        """Of the requests that ask in this step: the first token, and the place among the queries."""

    @contextmanager
    def following(self, scheduled: Any) -> Iterator[None]:
        """Follow one step of the engine."""
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and (asked := Asked.of(params.extra_args)) is not None:
                self.requests[new.req_id] = Request(asked, self.settings)
        for name, request in self.requests.items():
            if name not in scheduled.num_scheduled_tokens:  # its pages may be given to others
                self._settle(request)
        self.scheduled, self.step = scheduled, []
        try:
            yield
        finally:
            self.scheduled, self.step = None, []

    def attended(self, layer: Layer, q: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any) -> None:
        """Record the packed queries, keys and values (tokens, h, d) of a layer that has attended in this step."""
        if layer is self.layers[0]:
            self._place(metadata)
        for request, start, rows in self.step:
            if request.error:
                continue
            began = time.perf_counter()
            try:
                if layer.number not in self.checked:
                    assert request.table is not None
                    found = layer.keys(cache, request.table, start + rows.stop - rows.start)[0, :, start:]
                    if not torch.equal(found.transpose(0, 1), key[rows]):
                        raise InputError(UNKNOWN_LAYOUT)
                    self.checked.add(layer.number)
                request.add(layer, start, q[rows], value[rows], cache)
            except Exception as error:  # of this request alone
                request.fail(error)
            request.seconds += time.perf_counter() - began

    def _place(self, metadata: Any) -> None:
        """Find the requests that ask in the batch."""
        batch, at, self.step = self.runner.input_batch, 0, []
        for i, name in enumerate(batch.req_ids):
            n = self.scheduled.num_scheduled_tokens[name]
            if name in self.requests:
                start = int(batch.num_computed_tokens_cpu[i])
                self.requests[name].rows, self.requests[name].table = start + n, metadata.block_table[i].clone()
                self.step.append((self.requests[name], start, slice(at, at + n)))
            at += n

    def _settle(self, request: Request, stop: int | None = None) -> None:
        """Measure what waits, of tokens before `stop`."""
        stop = request.rows if stop is None else stop
        try:
            for layer in self.layers if request.layers else ():
                waiting = request.layers[layer.number].waiting
                if waiting and request.rows > stop:
                    waiting.pop()
                request.measure(layer, stop, layer.module.kv_cache)
        except Exception as error:  # of this request alone
            request.fail(error)

    def take(self, name: str, ids: list[int], prompt: int) -> dict[str, Any]:
        """The answer of a request that has ended: of all tokens but the last, which was not read."""
        request = self.requests.pop(name, None)
        if request is None:
            return {"error": "the engine has ended the request before its statistics were measured"}
        began = time.perf_counter()
        rows = len(ids) - 1
        if not request.error:
            self._settle(request, rows)
        if request.error:
            return {"error": request.error}
        found = [at.measured for at in request.layers.values()]
        if not found or any(part is None or len(part.rows) != rows for part in found):
            return {"error": "the engine has not computed the queries of all tokens"}
        config = self.runner.model_config
        about = {
            "ids": ids[:-1], "prompt": prompt, "passages": request.asked.passages, "model": config.served_model_name,
            "dtype": str(config.dtype).removeprefix("torch."), "parameters": self.parameters,
            "vllm": self.version, "engine": description(), "seconds": round(request.seconds, 3),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        answer = {"profile": packed([part.record for part in found if part is not None], about)}
        if (size := len(answer["profile"]) * 3 // 4) > self.settings.bytes:
            return {"error": f"the statistics take {size:,} bytes, more than {self.settings.bytes:,} that are allowed"}
        return answer | {"seconds": round(request.seconds + time.perf_counter() - began, 3)}

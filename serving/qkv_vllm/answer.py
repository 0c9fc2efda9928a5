"""The statistics of a request as bytes in the engine's answer, and the `qkv.Profile` that they make."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from qkv._untrusted import parse_json
from qkv.errors import InputError, refusing
from qkv.masks import Grid, Mask
from qkv.profiler.capture.datasets import Recorded, datasets
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.record import Record
from qkv.runs.profiles import Profile
from qkv.runs.run import preview, versions
from qkv.statistics import Mass, Statistics

WINDOW = 8
"""`local` is the weight on keys at most this many tokens away, as in `qkv.profile`."""


@dataclass(frozen=True)
class Span(Mask):
    """The keys from `start` to `stop` − 1, for every query."""

    start: int
    stop: int

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return (k >= self.start) & (k < self.stop)

    def key_mask(self, grid: Grid) -> Tensor:
        at = grid.columns(0, grid.n_keys)[None]
        return (at >= self.start) & (at < self.stop)


def passages(bounds: tuple[tuple[int, int], ...]) -> list[Mass]:
    """The statistic of each passage: a query's weight on its tokens."""
    return [
        Mass(f"passage_{i}", Span(a, b), f"weight on the tokens {a} to {b - 1}")
        for i, (a, b) in enumerate(bounds, start=1)
    ]


def packed(records: list[Record], about: Mapping[str, Any]) -> str:
    """The records of all layers of one text as text: base64 of a safetensors file."""
    tensors = dict[str, Tensor]()

    def stack(name: str, values: list[Any]) -> None:
        if all(isinstance(x, Tensor) for x in values):
            tensors[name] = torch.stack([x[0].float().cpu() for x in values]).contiguous()

    statistics = [record.statistics for record in records]
    for name in Statistics.__dataclass_fields__:
        if name in ("mass", "own"):
            for key in getattr(statistics[0], name):
                stack(f"{name} {key}", [getattr(s, name)[key] for s in statistics])
        else:
            stack(name, [getattr(s, name) for s in statistics])
    stack("weights", [record.weights for record in records])
    layers = [(record.module, record.layer) for record in records]
    file = save(tensors, {"about": json.dumps({**about, "layers": layers})})
    return base64.b64encode(file).decode()


def profile(answer: Any, tokenizer: Any = None) -> Profile:
    """The profile of a request that asked for it.

    Its rows are those of the tokens that the model has read: the prompt and the answer without its last token. It
    equals `qkv.profile` of these tokens within the rounding of the engine's dtype, without norms and directions of
    vectors, small maps and probes. Passages are statistics ``passage_1``, ``passage_2`` …

    Args:
        answer: a `RequestOutput` of vLLM; or the answer of its OpenAI-compatible server, an object or a mapping.
        tokenizer: gives the names of tokens; names are ids if it is None.

    Raises:
        InputError: if the answer has no statistics, or says why they could not be measured.
    """
    found = answer.get("kv_transfer_params") if isinstance(answer, Mapping) else answer.kv_transfer_params
    found = (found or {}).get("qkv")
    if found is None:
        raise InputError(
            "answer has no statistics; expected that of a request with extra_args={'qkv': 'profile'} that has ended"
        )
    if "error" in found:
        raise InputError(f"answer has no statistics: {found['error']}")
    with refusing("answer has statistics that cannot be read ({})", ValueError, KeyError, TypeError, RuntimeError):
        file = base64.b64decode(found["profile"], validate=True)
        size = int.from_bytes(file[:8], "little")
        about = parse_json(parse_json(file[8 : 8 + size])["__metadata__"]["about"])
        tensors, records = load(file), list[Record]()
        for i, (module, number) in enumerate(about["layers"]):
            fields: dict[str, Any] = {"lse": None, "max_logit": None, "mass": {}, "own": {}}
            for name, x in tensors.items():
                kind, _, key = name.partition(" ")
                (fields[kind] if key else fields)[key or kind] = x[i][None]
            weights = fields.pop("weights", None)
            statistics = Statistics(**fields)
            records.append(Record(module, "self", number, statistics, {}, weights, None, None, True))
        bounds = tuple((int(a), int(b)) for a, b in about["passages"])
        ids = torch.tensor([about["ids"]])
        groups = datasets([Recorded(records, Sequences(ids), passages(bounds))], tokenizer, WINDOW)
        attrs = {
            "model": about["model"], "dtype": about["dtype"], "parameters": about["parameters"],
            "versions": versions() | {"vllm": about["vllm"]}, "native_library": about["engine"], "command": "",
            "created": about["created"], "seconds": about["seconds"], "text_preview": preview(ids, tokenizer),
            "unobserved": [], "sources": dict.fromkeys((module for module, _ in about["layers"]), "vllm"), "checks": [],
            "probes": "not run: the model was served", "prompt_tokens": about["prompt"],
        }  # fmt: skip
    return Profile(groups, attrs, {})

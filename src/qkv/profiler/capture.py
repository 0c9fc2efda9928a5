"""Observe the attention of a Hugging Face model while it runs.

Inside `observe` the model's attention calls come to us: one kernel pass gives the output the model goes on with *and*
the log-sum-exp from which the statistics follow, so the forward is not paid twice and no n × n tensor is made. The
model and transformers' registries are as they were afterwards, whatever happens.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv.call import Call, detached
from qkv.errors import InputError
from qkv.huggingface.attention import call_of, configurations, routes
from qkv.huggingface.masks import lazy_mask
from qkv.kernels import eager, serve
from qkv.masks import And, Dense, Mask, Window
from qkv.measure import Statistics, sweep

_NAMES = (f"qkv_observer_{n}" for n in itertools.count())  # transformers reads meaning into names: keep it neutral


@dataclass(frozen=True)
class Record:
    """What one attention call of the model did."""

    module: str
    group: str
    layer: int
    statistics: Statistics
    weights: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are
    keys: Tensor | None
    causal: bool


@dataclass
class Observer:
    """Settings and findings of one observation."""

    model: nn.Module
    layers: Collection[int] | None = None
    local_window: int = 8
    map_tokens: int = 256
    on_call: Callable[[str], None] = lambda module: None
    # Real tokens by length: of queries whose keys are others; of keys where the model's own mask does not say.
    query_masks: dict[int, Tensor] = field(default_factory=dict)
    key_masks: dict[int, Tensor] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.expected = [name for name, module in self.model.named_modules() if routes(module)]
        self._calls: dict[str, int] = {}

    def deepest(self) -> int:
        """Number of the last attention layer of the group that has most."""
        return max(self._calls.values(), default=0) - 1

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """What transformers calls for attention: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        name = self.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        if call.dropout_p:
            raise InputError(f"{name} applies dropout {call.dropout_p} to its weights; profile in evaluation mode")
        result = serve(call)
        assert result.lse is not None
        if result.lse.isnan().any():
            raise InputError(f"{name} computes scores that are NaN: the model's weights or its inputs contain NaN")
        self._record(name, detached(call), result.lse, keys)
        self.fired.append(name)
        self.on_call(name)
        return result.out.transpose(1, 2).contiguous(), None

    def _record(self, name: str, call: Call, lse: Tensor, keys: Tensor | None) -> None:
        group = _group(name, self.model)
        layer = self._calls.get(group, 0)
        self._calls[group] = layer + 1
        if self.layers is not None and layer not in self.layers:
            return
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        if keys is None and group in ("self", "text", "encoder", "cross"):
            keys = self.key_masks.get(n_keys)
        queries = keys if group != "cross" and n_queries == n_keys else self.query_masks.get(n_queries)
        first = 0 if keys is None else keys.to(torch.int8).argmax(1)
        local = {"local": Window(self.local_window + 1, ahead=self.local_window)}
        statistics = sweep(call, lse, mass=local, first=first, queries=queries)
        weights = _weights(call) if max(n_queries, n_keys) <= self.map_tokens else None
        causal = _is_causal(call.mask)
        self.records.append(Record(name, group, layer, statistics, weights, queries, keys, causal))


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Route the model's attention through `observer`; restore everything on the way out.

    Raises:
        InputError: if no attention of the model goes through transformers' attention interface.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = observer.model
    if not observer.expected:
        raise InputError(
            f"{type(model).__name__} does not send its attention through transformers' attention interface "
            "(AttentionInterface), so qkv cannot observe it; expected a model that does, such as GPT-2, Llama or BERT"
        )
    name = next(_NAMES)
    configs = configurations(model)
    before = [config._attn_implementation_internal for config in configs]
    training = [m for m in model.modules() if m.training]
    try:
        AttentionInterface.register(name, observer.attend)
        AttentionMaskInterface.register(name, lazy_mask)
        for config in configs:
            config._attn_implementation_internal = name
        model.eval()
        with torch.no_grad(), _Watch(observer):
            yield observer
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        for module in training:
            module.training = True
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def unobserved(observer: Observer) -> list[str]:
    """Attention modules that did not come to us: expected ones that never fired, and those that computed elsewhere."""
    silent = set(observer.expected) - set(observer.fired)
    return sorted(silent | observer.outside)


class _Watch(TorchFunctionMode):
    """Notes modules that compute attention without asking the interface."""

    ATTENTION = (nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward)
    SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ATTENTION:
            self._note()
        elif func in self.SOFTMAX and args and isinstance(args[0], Tensor) and args[0].ndim >= 3:
            self._note(only_named=True)
        return func(*args, **(kwargs or {}))

    def _note(self, *, only_named: bool = False) -> None:
        """Note the module whose method is running; a softmax counts only in a class that calls itself attention."""
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self.observer.names:
                name = self.observer.names[id(module)]
                attention = re.search("attention|attn", type(module).__name__, re.IGNORECASE) is not None
                if name not in self.observer.expected and (attention or not only_named):
                    self.observer.outside.add(name)
                return
            frame = frame.f_back  # type: ignore[assignment]


def _weights(call: Call) -> Tensor:
    """The weights of a short call, float32 whatever its dtype."""
    q, k, v = (x.float() for x in (call.q, call.k, call.v))
    weights = eager.run(replace(call, q=q, k=k, v=v)).weights
    assert weights is not None
    return weights


def _is_causal(mask: Mask | None) -> bool:
    """Whether no query sees a key after it."""
    match mask:
        case None:
            return False
        case And(left, right):
            return _is_causal(left) or _is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            return n_queries > 1 and not bool(tensor.triu(n_keys - n_queries + 1).any())
    return mask.band is not None and mask.band[0] >= 0


def _group(name: str, model: nn.Module) -> str:
    """Which kind of attention a module is: cross, encoder, decoder; vision, audio, text; or simply self."""
    if re.search(r"cross|encoder_attn|enc_?dec", name, re.IGNORECASE):
        return "cross"
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        side = re.search(r"(?:^|\.)(encoder|decoder)\.", name)  # the first: a BERT that decodes has an encoder in it
        return side[1] if side else "decoder"
    towers = [t for t in ("vision", "audio") if getattr(config, f"{t}_config", None) is not None]
    for tower in towers:
        if re.search(f"{tower}|visual" if tower == "vision" else tower, name, re.IGNORECASE):
            return tower
    return "text" if towers else "self"

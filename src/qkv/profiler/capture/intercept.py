"""Observe attention that a model computes without transformers' attention interface and without qkv.

Two kinds of calls are intercepted: torch's attention functions, whose arguments are a complete call that qkv's kernel
computes in linear memory; and, in modules with "attention" in their class name, one softmax over scores. There the
model forms its scores, so the memory is quadratic. Modules that cannot be read (several softmaxes in one forward,
scores in blocks or bands) are listed as unreadable; nothing is guessed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._engine.call import Call, Result
from qkv.profiler.capture.torch_calls import as_scores, of_multi_head, of_scores, of_sdpa

SDPA, MULTI_HEAD = nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward
SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nhead", "heads")
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_SOFTMAX = re.compile("softmax", re.IGNORECASE)

OnCall = Callable[[str, str, Call], Result]  # module, source ("sdpa" or "softmax") and call; returns its result


def unwatched() -> AbstractContextManager[object]:
    """Inside, torch's functions are called directly: passing them through an `Intercept`, which only needs those of
    the model, takes longer than most of them take on short texts."""
    return torch._C.DisableTorchFunction()


class Intercept(TorchFunctionMode):
    """Inside, `on_call` receives every recognised attention call; other attention modules are added to `unreadable`.

    Args:
        model: the model whose calls are intercepted.
        names: names of its modules, by id.
        expected: modules that use transformers' attention interface, which is observed elsewhere.
        on_call: callback for every recognised call.
        unreadable: set to which the names of modules are added whose attention cannot be read.
    """

    def __init__(
        self, model: nn.Module, names: dict[int, str], expected: Collection[str], on_call: OnCall, unreadable: set[str]
    ) -> None:
        super().__init__()
        self.model, self.names, self.expected = model, names, frozenset(expected)
        self.on_call, self.unreadable = on_call, unreadable
        self.scores: dict[int, list[Tensor | None]] = {}  # of modules whose forward is running; None: not readable
        self.handles: list[Any] = []

    def __enter__(self) -> Any:
        for module in self.model.modules():
            if _is_attention(module):
                self.handles.append(module.register_forward_pre_hook(self._begins))
                self.handles.append(module.register_forward_hook(self._ends))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()
        for module in self.scores:  # softmaxes outside of any forward, in another method of the module
            self.unreadable.add(self.names[module])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            module = self._module()
            if module is not None and args and args[0].ndim == 3 and _heads(module) is None:
                self.unreadable.add(self.names[id(module)])  # heads may be folded into the batch
            elif module is not None:
                call, shape = of_sdpa(_heads(module), *args, **kwargs)
                return self._serve(module, call).reshape(shape)
        elif func is MULTI_HEAD:
            module = self._module()
            if module is not None:
                multi_head = of_multi_head(*args, **kwargs)
                if multi_head is None:
                    self.unreadable.add(self.names[id(module)])
                else:
                    self._serve(module, multi_head)
        elif func in SOFTMAX:
            self._softmax(*args, **kwargs)
        return func(*args, **kwargs)

    def _serve(self, module: nn.Module, call: Call) -> Tensor:
        return self.on_call(self.names[id(module)], "sdpa", call).out

    def _softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        """Keep the scores until the module's forward ends: only then is it known that there is one softmax."""
        if not isinstance(input, Tensor) or input.ndim < 3:
            return
        if input.shape[-1] == 1 != input.shape[-2]:  # a softmax over a single number, as in some convolutions
            return
        module = self._module()
        if module is not None and _is_attention(module):
            over_keys = dim in (-1, input.ndim - 1)
            scores = as_scores(input, _heads(module)) if over_keys else None
            self.scores.setdefault(id(module), []).append(scores)

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self.scores.pop(id(module), None)

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        kept = self.scores.pop(id(module), [])
        if not kept:
            return
        scores = kept[0]
        if len(kept) > 1 or scores is None:
            self.unreadable.add(self.names[id(module)])
            return
        self.on_call(self.names[id(module)], "softmax", of_scores(scores))

    def _module(self) -> nn.Module | None:
        """The innermost running module of the model; None inside qkv's kernels and in modules that are `expected`."""
        frame = sys._getframe(2)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("qkv.kernels"):
            module = frame.f_locals.get("self")
            known = isinstance(module, nn.Module) and id(module) in self.names
            if known and not _SOFTMAX.search(type(module).__name__):  # a softmax module counts as its owner
                return None if self.names[id(module)] in self.expected else module
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _is_attention(module: nn.Module) -> bool:
    return _ATTENTION.search(type(module).__name__) is not None


def _heads(module: nn.Module) -> int | None:
    """The number of heads by an attribute of the module or of its configuration; None if neither has one."""
    owners = (module, getattr(module, "config", None))
    return next((n for owner in owners for name in HEADS if isinstance(n := getattr(owner, name, None), int)), None)

"""`Subject`: a model whose sinks can be studied, with its blocks, and what one forward tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models import DecoderLM
from qkv.normalizers import Softmax
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.observe import WEIGHTS_ONLY, ObservedCall
from qkv.profiler.capture.residual import layer_of


@dataclass(frozen=True, eq=False)
class Recording:
    """One forward: the residual stream, and the attention call of each layer."""

    states: list[Float[Tensor, "b n d"]]
    """By depth: 0 is the input of the first block, i is the output of the i-th block."""
    calls: list[ObservedCall]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in which each block of one stack has one softmax self-attention, and reads the output of the last one."""

    model: nn.Module
    blocks: list[nn.Module]
    causal: bool

    @staticmethod
    def of(model: nn.Module, ids: Int[Tensor, "b n"]) -> Subject:
        """Find the blocks of a model, and check them with one forward on these tokens.

        Raises:
            InputError: for a model in which the measurements are not known to be right, with the reason.
        """
        name = type(model).__name__
        calls = self_attention(model, ids)
        layers = [layer_of(model, call.module) or "" for call in calls]
        stacks = {layer.rpartition(".")[0] for layer in layers}
        stack = stacks.pop() if len(stacks) == 1 else ""
        blocks = [b for n, b in model.get_submodule(stack).named_children() if n.isdigit()] if stack else []
        if [id(model.get_submodule(layer)) for layer in layers] != [id(block) for block in blocks]:
            raise InputError(
                f"model {name} has attention in {', '.join(dict.fromkeys(layers)) or 'no layers'}; expected one stack "
                "of blocks with one attention each, so that its residual stream can be followed"
            )
        subject = Subject(model, blocks, calls[0].causal)
        subject._check_stream(ids)
        return subject

    def states(self, ids: Int[Tensor, "b n"]) -> list[Float[Tensor, "b n d"]]:
        """The residual stream by depth, as the model computes it now, with any edits that are active."""
        with self._recorded() as (inputs, outputs):
            self._run(ids)
        return [inputs[0], *outputs]

    def record(self, ids: Int[Tensor, "b n"]) -> Recording:
        """The residual stream and the attention calls."""
        with self._recorded() as (inputs, outputs):
            calls = self_attention(self.model, ids)
        return Recording([inputs[0], *outputs], calls)

    @torch.no_grad()
    def _run(self, ids: Tensor) -> None:
        (batch,) = batches(self.model, ids, None, None)
        self.model(**batch)

    @contextmanager
    def _recorded(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Inside, the input and the output of every block are recorded."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def enter(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs.append(hidden_of(args, named))

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(output if isinstance(output, Tensor) else output[0])

        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(leave).remove)
            yield inputs, outputs

    def _check_stream(self, ids: Tensor) -> None:
        with self._recorded() as (inputs, outputs):
            self._run(ids)
        once = len(inputs) == len(outputs) == len(self.blocks)
        if not once or not all(torch.equal(a, b) for a, b in zip(outputs, inputs[1:], strict=False)):
            raise InputError(
                f"model {type(self.model).__name__} changes the residual stream between its blocks, or runs a block "
                "more than once; expected blocks that each read the output of the one before"
            )


def self_attention(model: nn.Module, ids: Int[Tensor, "b n"]) -> list[ObservedCall]:
    """The attention call of every layer on these tokens.

    Raises:
        InputError: unless all attention is self-attention by a softmax of products, with queries, keys and values that
            can be observed.
    """
    name = type(model).__name__
    if not isinstance(model, DecoderLM):
        _check_hugging_face(model)
    (batch,) = batches(model, ids, None, None)
    calls = calls_of(model, batch)
    for call in calls:
        reason = _unsupported_reason(call, ids.shape[1])
        if reason:
            raise InputError(f"model {name} {reason} in {call.module}, where sinks cannot be measured")
    return calls


def _check_hugging_face(model: nn.Module) -> None:
    name, base = type(model).__name__, getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        raise InputError(f"model is {name}, expected qkv's DecoderLM or a decoder or encoder of Hugging Face")
    config: Any = model.config
    if config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise InputError(f"model {name} does not read one sequence of tokens, expected a decoder or an encoder of text")


def _unsupported_reason(observed: ObservedCall, n: int) -> str | None:
    call = observed.call
    if observed.group != "self":
        return f"has attention of the kind {observed.group!r}, but the criteria are for self-attention,"
    if observed.source in WEIGHTS_ONLY:
        return "forms its weights itself, so that its queries, keys and values are not known,"
    if not isinstance(call.normalizer, Softmax):
        return f"attends by {type(call.normalizer).__name__}, but the criteria are for weights of a softmax,"
    if call.pairwise is not None or call.values is not None:
        return "has scores or values that depend on pairs of tokens, so that a key has no angle or value of its own,"
    if (call.q.shape[2], call.k.shape[2]) != (n, n):
        return f"attends with {call.q.shape[2]} queries to {call.k.shape[2]} keys in a text of {n} tokens,"
    return None


def hidden_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Float[Tensor, "b n d"]:
    """The hidden states among the arguments of a block."""
    found = args[0] if args else named.get("hidden_states")
    if not isinstance(found, Tensor):
        raise InputError("model has a block that is not called with hidden states, expected them as its first argument")
    return found


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and has no gradients."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True

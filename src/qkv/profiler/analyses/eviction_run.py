"""Run a language model with a cache that evicts keys, and measure its loss on the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.cache import Full
from qkv.errors import InputError
from qkv.huggingface.attention import call_of, routes
from qkv.huggingface.routing import routed
from qkv.kernels import serve
from qkv.masks import Mask
from qkv.models.decoder import DecoderLM
from qkv.models.token_loss import token_loss
from qkv.profiler.analyses.policies import Policy

CACHES, MASKS = "caches", "masks"  # run modes


def run_mode(model: nn.Module, policies: Sequence[Policy]) -> str:
    """The way to run a model with these policies: `CACHES`, or `MASKS` on its own attention.

    Raises:
        InputError: if the model cannot be run with these policies.
    """
    kind = type(model).__name__
    if isinstance(model, DecoderLM):
        return CACHES
    if not any(map(routes, model.modules())):
        raise InputError(
            f"model {kind} cannot be run with a cache of qkv; expected a qkv.models.DecoderLM or a causal language "
            "model of Hugging Face; run=False (--no-run) estimates from its attention weights alone"
        )
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise InputError(
            f"model {kind} has no output head, so it has no loss; expected a causal language model, such as "
            "AutoModelForCausalLM loads; run=False (--no-run) estimates from its attention weights alone"
        )
    for policy in policies:
        if policy.mask is None:
            raise InputError(
                f"policies has {policy.name!r}, which cannot be a fixed mask and runs only with qkv's models, not with "
                f"{kind}; expected 'window' and 'sinks', or run=False (--no-run)"
            )
    return MASKS


@torch.no_grad()
def nats_of(
    mode: str, model: nn.Module, ids: Int[Tensor, "1 n"], policy: Policy | None, budget: int,
    on_tokens: Callable[[float], None],
) -> float:  # fmt: skip
    """The sum of the loss over the n − 1 next tokens, in nats; without a policy all keys are kept."""
    if mode == CACHES:
        assert isinstance(model, DecoderLM)
        training = model.training
        try:
            model.eval()
            online = policy is not None and policy.mask is None
            chunk, begin = (1, budget) if online else (64, 0)
            make = (lambda: Full(ids.shape[1])) if policy is None else (lambda: policy.cache(budget))
            return float(token_loss(model, ids, make, chunk=chunk, begin=begin, on_chunk=on_tokens).sum())
        finally:
            model.train(training)
    found = _with_mask(model, ids, policy.mask(budget) if policy and policy.mask else None)
    on_tokens(ids.shape[1])
    return found


def _with_mask(model: nn.Module, ids: Tensor, kept: Mask | None) -> float:
    """The loss of a Hugging Face model whose causal attention is restricted to the keys in `kept`."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        call, _ = call_of(module, type(module).__name__, query, key, value, attention_mask, **arguments)
        if kept is not None and call.mask is not None:
            call = replace(call, mask=call.mask & kept)
        return serve(call).out.transpose(1, 2).contiguous(), None

    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with routed(model, attend):
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for module in training:
            module.training = True
    return float(nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="sum"))

"""transformers' `generate` with a cache that evicts keys by a policy of qkv. (Written for transformers 5.24.)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from qkv.attention import Attention
from qkv.cache import Evicting
from qkv.cache.evicting import FIRST, policies_of
from qkv.errors import InputError
from qkv.huggingface.attention import asks_weights, call_of, routed, routes
from qkv.huggingface.presses import presses_of
from qkv.masks import Causal
from qkv.models.pretrained import tell_rotary


class EvictingLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: passes new keys and values on to the attention, which adds them to `held`, a cache of qkv."""

    is_croppable = False
    is_sliding = False

    def __init__(self, held: Evicting) -> None:
        super().__init__()
        self.held = held
        self.new: Tensor | None = None
        self.open = True
        """Whether the model attends through `held`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `held` allocates its buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.open:
            raise InputError("past_key_values is a cache of `evicting`, expected inside of its context only")
        self.new = key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.held.seen  # new tokens alone: a policy hides no held key

    def get_seq_length(self) -> int:
        return self.held.seen  # also of evicted tokens, so that positions go on

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.held = self.held.fresh()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise InputError(
            "past_key_values is to give back tokens, which an evicting cache cannot; expected generate without "
            "assistant_model and prompt_lookup_num_tokens"
        )


class EvictingCache(Cache):  # type: ignore[misc]
    """A cache of transformers, each layer of which passes its keys on to one of qkv's."""

    @property
    def caches(self) -> list[Evicting]:
        """Those of qkv, in which `qkv.watch` and `qkv.edit` find the keys."""
        return [layer.held for layer in self.layers]


@contextmanager
def evicting(
    model: nn.Module, policy: str | type[Evicting], keys: int | Sequence[int], *, first: int = FIRST
) -> Iterator[Cache]:
    """Inside, the model attends through the cache of transformers that is yielded.

    Pass it as ``past_key_values``, which is called ``cache`` since transformers 5.24. A prompt is read whole; after it,
    and then before every token, each layer evicts down to its budget. Positions go on counting evicted tokens, and keys
    keep the rotary position that they were computed with: the output is that of the model with a full cache in which
    evicted keys are masked. With a budget that covers the text nothing is evicted.

    Args:
        model: a causal language model of Hugging Face, in evaluation mode. Texts of one batch have the same length.
        policy: a name (window, sinks, heavy, snapkv, pyramid, tova, keydiff, knorm, expected, or one that an installed
            package registers), or a subclass of `qkv.cache.Evicting`.
        keys: how many keys each key head of a layer holds; in "pyramid" the mean over layers. Or one number for each
            layer, such as `qkv.profiler.eviction` advises.
        first: number of first keys that "sinks" keeps.

    Yields:
        an empty cache for one text; ``cache.layers[i].held`` is the cache of qkv of layer i.

    Raises:
        InputError: where the policy cannot be exact: for padding, windows and biases by position, for layers without
            keys, and with "expected" for models other than GPT-2 and Llama.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    >>> with evicting(model, "snapkv", 8) as cache:
    ...     text = model.generate(torch.arange(20)[None], past_key_values=cache, max_new_tokens=5, do_sample=False)
    >>> text.shape, cache.get_seq_length(), cache.layers[0].held.length
    (torch.Size([1, 25]), 24, 8)
    """
    of_layers = keys if isinstance(keys, Sequence) else None
    least = keys if not isinstance(keys, Sequence) else min(keys, default=0)
    [made] = policies_of([policy], least, first).values()
    made.layer_keys = of_layers
    tell_rotary(model, [made])
    with presses_of(model, [made]), attending_through(model, made.for_layers(layers_of(model))) as cache:
        yield cache


def layers_of(model: nn.Module) -> int:
    """The number of layers of a causal language model, all of which attend to all earlier tokens."""
    name = type(model).__name__
    if not any(map(routes, model.modules())) or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"model is {name}, expected a causal language model that uses transformers' AttentionInterface"
        )
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []  # of models like Mistral
    other = set(getattr(config, "layer_types", None) or windows) - {"full_attention"}
    if other:
        raise InputError(
            f"model {name} has layers of {', '.join(sorted(other))}, expected full attention in all of them"
        )
    return int(config.num_hidden_layers)


@contextmanager
def attending_through(model: nn.Module, caches: Sequence[Any]) -> Iterator[Cache]:
    """Inside, layer i of the model attends through ``caches[i]``, if the cache that is yielded is passed to it."""
    cache = EvictingCache(layers=[EvictingLayer(held) for held in caches])

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        name, layer = type(module).__name__, cache.layers[module.layer_idx]
        if layer.new is not key:
            raise InputError(f"past_key_values is another cache in {name}, expected the one that `evicting` yields")
        layer.new = None
        if asks_weights(arguments):
            raise InputError("output_attentions is True, but weights on evicted keys do not exist; expected False")
        call, padding = call_of(module, name, query, key, value, attention_mask, **arguments)
        if padding is not None:
            raise InputError(
                "attention_mask has padding, which a policy would take for keys; expected one text, or equal lengths"
            )
        if call.dropout_p:
            raise InputError("model applies dropout, but caches are for inference; expected model.eval()")
        user = call.user
        mask = Causal() if user.mask is None and query.shape[2] == 1 else user.mask  # the newest token sees all keys
        attention = Attention(mask, user.biases, user.score, user.normalizer)
        out = layer.held.attend(attention, query, key, value)
        return out.transpose(1, 2).contiguous(), None

    attend.served = True  # type: ignore[attr-defined]  # qkv's own attention reports the call
    try:
        with torch.no_grad(), routed(model, attend):
            yield cache
    finally:
        for layer in cache.layers:
            layer.open = False

"""Scores of NVIDIA's kvpress as eviction policies: "kvpress:KeyDiff". (Written for kvpress 0.5.5.)

A press gets what kvpress itself passes: the attention module, the hidden states of all tokens so far, and the keys and
values that the cache holds, by position. Weights are None, as with kernels that form none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dis import get_instructions
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.cache.base import Step
from qkv.cache.evicting import Evicting, Held
from qkv.errors import InputError, first_line, nearest
from qkv.huggingface.attention import routes

INSTALL = "pip install datasets fire cachetools && pip install --no-deps kvpress==0.5.5"
"""kvpress itself requires transformers below 5.3, but runs with the one that qkv requires."""


class Inputs:
    """What the attention modules of a model got in the last forward, for presses that compute queries or keys anew."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if routes(module)]
        rotaries = (getattr(module, "rotary_emb", None) for module in model.modules())
        self.rotary = next((one for one in rotaries if isinstance(one, nn.Module)), None)
        self.hidden: list[Tensor | None] = [None] * len(self.modules)

    def keep(self, layer: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.hidden[layer] = named["hidden_states"] if "hidden_states" in named else arguments[0]


class Press(Evicting):
    """A policy whose worth is the score of a press of kvpress. It decides at every token, and the newest key stays.

    A press sees the held keys by position, and as `compression_ratio` the share that is evicted now.
    """

    needs, most_recent = (), 1
    press_class: ClassVar[type[Any]]
    reads_hidden: ClassVar[bool]
    """Whether the code of `score` reads its argument hidden_states."""
    inputs: Inputs | None = None
    """None for a model that is not one of Hugging Face: then a press has only keys and values."""
    hidden: Float[Tensor, "b seen width"] | None = None
    """The input of the attention module for all tokens so far, also of those whose keys were evicted; all tokens of a
    text that the model read whole, if they are added in parts."""
    layer = 0

    def __init__(self, keys: int, recent: int | None = None) -> None:
        super().__init__(keys, recent)
        self.press = self.press_class()

    def for_layers(self, layers: int) -> list[Self]:
        caches = super().for_layers(layers)
        for layer, cache in enumerate(caches):
            cache.layer = layer
        return caches

    def fresh(self, keys: int | None = None) -> Self:
        made = super().fresh(keys)
        made.hidden = None
        return made

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        super().reorder(rows)
        self.hidden = None if self.hidden is None else self.hidden[rows]

    @property
    def nbytes(self) -> int:
        """With the hidden states, which the press needs to choose."""
        return super().nbytes + (0 if self.hidden is None else self.hidden.nbytes)

    def _check(self, step: Step) -> None:
        super()._check(step)
        if self.inputs is None or not self.reads_hidden:
            return
        n, new = step.k.shape[2], self.inputs.hidden[self.layer]
        assert new is not None
        before = None if new.shape[1] != n else self.hidden
        self.hidden = new if before is None else torch.cat([before, new], 1)

    def worth(self, held: Held) -> Tensor:
        order, n = held.positions.argsort(-1), held.positions.shape[2]
        keys, values = (x.gather(2, order[..., None].expand_as(x)) for x in (held.keys, held.values))
        module, hidden, more = None, None, dict[str, Any]()
        if self.inputs is not None:
            module = self.inputs.modules[self.layer]
        if self.inputs is not None and self.hidden is not None:
            hidden = self.hidden[:, : held.seen]
            if self.inputs.rotary is not None:
                at = torch.arange(held.seen, device=hidden.device)[None]
                more["position_embeddings"] = self.inputs.rotary(hidden[:1], at)
        self.press.compression_ratio = 1 - (min(self.keys, n - 1) + 0.5) / n  # kvpress rounds the number kept down
        wants = ""
        if module is None:
            wants = "; the press may need the hidden states of a model of Hugging Face"
        elif held.seen > n:
            wants = "; if it works before any key is evicted, `needle` (--needle) can measure it"
        with self.in_its_words(wants):
            scores = self.press.score(module, hidden, keys, values, None, more)
        if not isinstance(scores, Tensor) or scores.shape != order.shape:
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InputError(f"policy {self.name!r}: its score is {found}, expected {tuple(order.shape)}")
        return torch.empty_like(scores).scatter_(-1, order, scores)

    @contextmanager
    def in_its_words(self, wants: str = "") -> Iterator[None]:
        """What kvpress raises inside becomes a refusal in its words."""
        try:
            yield
        except Exception as error:  # assertions, and whatever else a press raises
            said = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"policy {self.name!r} cannot choose keys here: kvpress says {said}{wants}") from error


@contextmanager
def presses_of(model: nn.Module, caches: Iterable[Evicting]) -> Iterator[None]:
    """Inside, the presses among these caches, and caches made from them, see what the model's attention modules get."""
    presses = [cache for cache in caches if isinstance(cache, Press)]
    inputs = Inputs(model) if presses else None
    if inputs is None or not inputs.modules:
        yield
        return
    hooks = [
        module.register_forward_pre_hook(lambda _, *got, layer=layer: inputs.keep(layer, *got), with_kwargs=True)
        for layer, module in enumerate(inputs.modules)
    ]
    lent = [module for module in inputs.modules if inputs.rotary is not None and not hasattr(module, "rotary_emb")]
    for module in lent:  # as kvpress does, but not as a submodule, and only for this time
        module.__dict__["rotary_emb"] = inputs.rotary
    try:
        for cache in presses:
            cache.inputs = inputs
            with cache.in_its_words():
                cache.press.post_init_from_model(model)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in lent:
            del module.__dict__["rotary_emb"]


def press_policy(name: str) -> type[Press]:
    """The policy of a name like "kvpress:KeyDiff".

    Raises:
        InputError: if kvpress is not installed, has no such press, or the press is more than a score.
    """
    kvpress = _kvpress(name)
    every = {key.removesuffix("Press"): one for key, one in vars(kvpress).items() if key.endswith("Press")}
    other = {key: _beside_score(kvpress, one) for key, one in every.items()}
    short = name.removeprefix("kvpress:")
    if other.get(short, ""):
        raise InputError(
            f"policies has {name!r}, but {short}Press {other[short]}; a policy is the score of a press alone"
        )
    if short not in every:
        known = [f"kvpress:{key}" for key, why in other.items() if not why]
        raise InputError(f"policies has {name!r}, expected some of {', '.join(known)}{nearest(name, known)}")
    press = every[short]
    reads = any(x.argval == "hidden_states" and x.opname.startswith("LOAD") for x in get_instructions(press.score))
    parts = {
        "name": name,
        "press_class": press,
        "reads_hidden": reads,
        "meaning": f"the score of kvpress's {short}Press",
    }
    return type(press.__name__, (Press,), parts)


def _beside_score(kvpress: Any, press: type[Any]) -> str:
    """What a press is beside a score, in words; empty if nothing."""
    if not issubclass(press, kvpress.ScorerPress) or press is kvpress.ScorerPress:
        return "has no score"
    for method in ("compress", "forward_hook"):
        if getattr(press, method) is not getattr(kvpress.ScorerPress, method):
            return f"also has its own method {method}"
    needed = [one.name for one in inspect.signature(press).parameters.values() if one.default is one.empty]
    return f"is made of {', '.join(needed)}" if needed else ""


def _kvpress(name: str) -> Any:
    """The package. What it puts in place of the attention functions of transformers is taken back."""
    if find_spec("kvpress") is None:
        raise InputError(f"policies has {name!r}, but kvpress is not installed: {INSTALL}")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        import kvpress
    except ImportError as error:
        reason = first_line(error)
        raise InputError(f"policies has {name!r}, but kvpress cannot be imported ({reason}): {INSTALL}") from error
    for key, function in functions.items():
        if ALL_ATTENTION_FUNCTIONS[key] is not function:
            del ALL_ATTENTION_FUNCTIONS[key]  # what kvpress set for this process alone
        if ALL_ATTENTION_FUNCTIONS[key] is not function:
            ALL_ATTENTION_FUNCTIONS[key] = function
    return kvpress

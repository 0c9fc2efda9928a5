"""A fact hidden in a long text: whether a model still answers after its caches have evicted most keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv._progress import bar
from qkv.attention import Attention
from qkv.cache import Evicting, LastKeys
from qkv.errors import InputError
from qkv.huggingface.attention import cache_name
from qkv.huggingface.presses import presses_of
from qkv.models.generation import evaluation_mode
from qkv.models.loading import load_if_named
from qkv.models.pretrained import tell_rotary
from qkv.profiler.analyses.eviction import BUILT_IN, empty_caches, run_mode, token_ids

if TYPE_CHECKING:
    import pandas as pd

FACTS = (("harbour", 7294), ("library", 3815), ("museum", 6042), ("castle", 9157), ("garden", 2638))
"""The places and codes that `needle` hides, at depths of 10, 30, 50, 70 and 90 %."""


@torch.no_grad()
def needle(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    budgets: Sequence[int] = (256, 512, 1024),
    policies: Sequence[str | type[Evicting]] = BUILT_IN,
    first: int = 4,
    tokenizer: Any = None,
    name: str = "",
    progress: bool = True,
) -> pd.DataFrame:
    """Hide facts in a text, one at a time, and ask for each once the keys of the text were evicted.

    The text is read whole, with full attention. Then each layer evicts down to its budget, before the question is
    known, and reads question and answer through what is left. (After Kamradt 2023, "Needle in a haystack".)

    Args:
        model: a causal language model of Hugging Face, as in `qkv.huggingface.evicting`, or a name for `qkv.load`.
        inputs: one text, of at least 64 tokens; the fact takes the place of its last ones.
        budgets: numbers of keys in the cache of each layer.
        policies: as in `eviction`.
        first: number of first keys that ``sinks`` keeps.
        tokenizer: the model's; if `model` is a name, it is loaded.
        name: name of the model, kept in the attributes.
        progress: show a progress bar while it runs, if standard error is a terminal.

    Returns:
        A row for each policy (first "full", which keeps all keys), budget and fact: its ``depth`` in the text, the
        ``nats`` per token of the right answer, and whether the greedy answer is ``right``. The attribute ``attrs`` has
        the model and the number of tokens.

    Raises:
        InputError: as `eviction` and `qkv.huggingface.evicting`.

    >>> found = needle("smollm2", open("book.txt").read(), policies=["snapkv"])  # doctest: +SKIP
    """
    import pandas as pd

    from qkv.huggingface.generation import attending_through, layers_of

    settings = empty_caches(budgets, policies, first)
    loaded = load_if_named(model, tokenizer, name, inputs=inputs, head=True)
    model, tokenizer = loaded.model, loaded.tokenizer
    layers = layers_of(model)
    run_mode(model)  # raises without an output head
    tell_rotary(model, settings.values())
    text = next(token_ids(model, inputs, tokenizer))[:1]
    if (n := text.shape[1]) < 64:
        raise InputError(f"inputs has a text of {n} tokens, expected at least 64, to hide a fact in")
    caches: dict[Any, Evicting] = {("full", None): LastKeys(n + 64), **settings}
    read: Any = getattr(model, "base_model", model)  # without the head
    rows = []
    with (
        evaluation_mode(model),
        presses_of(model, settings.values()),
        bar("hiding", "facts", len(FACTS), show=progress) as step,
    ):
        for at, (place, code) in enumerate(FACTS):
            depth = (at + 0.5) / len(FACTS)
            known = f"secret pass code of the {place}"
            asking = f"\n\nQuestion: What is the {known}?\nAnswer: The {known} is"
            fact, question, answer = (
                torch.tensor([tokenizer(part, add_special_tokens=False)["input_ids"]], device=text.device)
                for part in (f"\n\nThe {known} is {code}.\n\n", asking, f" {code}")
            )
            start = int(depth * (n - fact.shape[1]))
            whole = torch.cat([text[:, :start], fact, text[:, start : n - fact.shape[1]]], 1)
            made = {setting: cache.for_layers(layers) for setting, cache in caches.items()}
            readers = [_Readers(held, lambda: step(0.8 / layers)) for held in zip(*made.values(), strict=True)]
            with attending_through(model, readers) as cache:
                read(input_ids=whole, **{cache_name(read): cache})
            asked = torch.cat([question, answer], 1)
            for (policy, budget), held in made.items():
                with attending_through(model, [_Asked(one) for one in held]) as cache:
                    logits = model(input_ids=asked[:, :-1], **{cache_name(model): cache}).logits[0, -answer.shape[1] :]
                nats = float(nn.functional.cross_entropy(logits.double(), answer[0]))
                right = bool((logits.argmax(-1) == answer[0]).all())
                rows.append({"policy": policy, "budget": budget, "depth": depth, "nats": nats, "right": right})
                step(0.2 / len(made))
    found = pd.DataFrame(rows).astype({"budget": "Int64"})
    found.attrs = {"model": loaded.name, "tokens": n, "policies": {one: c.meaning for (one, _), c in settings.items()}}
    return found


class _Readers:
    """The caches of one layer for all policies, which hold the same text: its queries attend once."""

    def __init__(self, caches: Sequence[Evicting], on_read: Callable[[], None]) -> None:
        self.caches, self.on_read = caches, on_read

    @property
    def seen(self) -> int:
        return self.caches[0].seen

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cache in self.caches:
            cache.hold(attention, q, k, v)
        self.on_read()
        return attention(q, k, v)


class _Asked:
    """The cache of one layer while a question is asked: nothing is added, so nothing is evicted again."""

    def __init__(self, cache: Evicting) -> None:
        self.seen, self.attend = cache.seen, cache.read

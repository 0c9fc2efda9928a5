"""`mixing` measures over-mixing: how far a change of one token moves the hidden states of all tokens, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.engine import at_least_float32
from qkv.errors import InputError
from qkv.models.generation import evaluation_mode
from qkv.models.loading import load_if_named
from qkv.profiler.capture.datasets import Arrays, joined
from qkv.profiler.capture.inputs import batches, sequences_of, special_ids, token_texts, vocabulary
from qkv.profiler.capture.residual import attention_modules, observe_residual

_MEANING = {
    "response": "‖h′ − h‖ / ‖h‖ for each token's hidden state h, and h′ after the replacement of the changed token; "
    "mean over the replacements",
    "deviation": "standard deviation of ‖h′ − h‖ / ‖h‖ over the replacements",
    "later": "mean of the response over the tokens after the changed token",
}


def mixing(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    position: int = 1,
    replacement: int | Sequence[int] | None = None,
    replacements: int = 4,
    seed: int = 0,
    without_first: bool = False,
    stack: str | None = None,
    tokenizer: Any = None,
    target: str | None = None,
) -> xr.Dataset:
    """Measure how far the hidden states of all tokens move, at every depth, when one token is replaced.

    This is the measure of over-mixing of Barbero et al. 2025 (arXiv:2504.02732, §3.1). The text and its variants run
    through the model as one batch of ``1 + replacements`` texts, and hidden states are compared while the model runs,
    so none of them are kept. In a causal model no earlier token moves.

    Args:
        model: any module with numbered layers that have attention, or a name for `qkv.load`.
        inputs: as in `qkv.profile`; each text is run separately, without its padding.
        position: position of the token that is replaced, from 0, in the whole text.
        replacement: the ids to replace it by; drawn at random if None.
        replacements: number of ids to draw; special tokens and the token itself are excluded.
        seed: seed of the draw, which is the same with and without the first token.
        without_first: remove the first token, and with it the usual sink, from the text. For the model the positions of
            all other tokens are then lower by one.
        stack: name of the stack of layers, such as "decoder.block": see `qkv.profiler.capture.residual`. If None, the
            first stack with as many tokens as the text.
        tokenizer: converts text to ids, names tokens and knows special ones; if `model` is a name, its tokenizer is
            loaded.
        target: the text that the decoder of an encoder-decoder reads; it is not changed.

    Returns:
        ``response`` and ``deviation`` (text, depth, token) and ``later`` (text, depth), all without unit. Depth 0 is
        the embeddings, depth i the output of the i-th layer. ``token`` is a position in the whole text, also if its
        first token was removed; values beyond a text's end are NaN. In a stack that reads another text, such as a
        decoder's, ``token`` is a position in that text, and all of its tokens count as later. Coordinates are
        ``token_name`` (text, token) and ``replaced_by`` (text, replacement).

    Raises:
        InputError: if the model does not read tokens or has no such stack, the position is outside of a text, or a
            replacement is the token itself or not in the vocabulary.

    >>> data = mixing("qkv-mini", "def mean(values):", position=3)
    >>> float(data["response"][0, -1, :3].max()) < 1e-5
    True
    """
    loaded = load_if_named(model, tokenizer, inputs=inputs)
    model, tokenizer = loaded.model, loaded.tokenizer
    if replacements < 1:
        raise InputError(f"replacements is {replacements}, expected at least 1")
    if position < int(without_first):
        expected = "expected 1 or more without the first token" if without_first else "expected 0 or more"
        raise InputError(f"position is {position}, {expected}")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for batch in batches(model, inputs, tokenizer, target):
        for text in _texts(model, batch, position):
            others = _others(model, text.ids[position], replacement, replacements, tokenizer, generator)
            responses = _responses(model, text.changed(position, others, without_first), 1 + len(others))
            name, same_text = _stack(responses, stack, len(text.ids) - without_first, type(model).__name__)
            response = torch.stack(responses[name], 1).double().numpy()
            start = int(without_first) if same_text else 0
            names = token_texts(tokenizer, text.ids[start:].tolist()) if same_text else [""] * response.shape[2]
            one = _of_text(response, names, max(0, position + 1 - start) if same_text else 0)
            one.coords["replaced"] = "text", [int(text.ids[position])]
            one.coords["replaced_by"] = ("text", "replacement"), [others]
            found.append(one._replace(attrs={"stack": name, "start": start}))
    data = joined(found)
    start = data.attrs.pop("start")
    data = data.assign_coords(token=np.arange(start, start + data.sizes["token"]))
    facts = {"model": type(model).__name__, "position": position, "without_first": int(without_first), "seed": seed}
    data.attrs = facts | data.attrs
    data["depth"].attrs["definition"] = "0: input of the first layer; i: output of the i-th layer"
    for name, definition in _MEANING.items():
        data[name].attrs |= {"units": "1", "definition": definition}
    return data


def _of_text(response: Float[np.ndarray, "r depth n"], names: list[str], later: int) -> Arrays:
    """The response of one text; `later` is the first token that counts as later than the changed one."""
    mean = response.mean(0)
    with np.errstate(invalid="ignore"):
        of_later = mean[:, later:].sum(-1) / mean[:, later:].shape[-1]
    return Arrays(
        {
            "response": (("text", "depth", "token"), mean[None]),
            "deviation": (("text", "depth", "token"), response.std(0)[None]),
            "later": (("text", "depth"), of_later[None]),
        },
        {"depth": ("depth", np.arange(len(mean))), "token_name": (("text", "token"), np.array([names], object))},
        {},
    )


@dataclass(frozen=True, eq=False)
class _Text:
    """The arguments of the model for one text, the name of its ids, and the names of other arguments of this length."""

    batch: dict[str, Any]
    name: str
    along: tuple[str, ...]

    @property
    def ids(self) -> Int[Tensor, " n"]:
        ids: Tensor = self.batch[self.name][0]
        return ids

    def changed(self, position: int, others: Sequence[int], without_first: bool) -> dict[str, Any]:
        """A batch of the text and its variants, with another id at `position` in each."""
        ids = self.ids.repeat(1 + len(others), 1)
        ids[1:, position] = torch.tensor(others, device=ids.device)
        batch = self.batch | {self.name: ids}
        for name in self.along if without_first else ():
            batch[name] = batch[name][:, 1:]
        return {n: x.expand(len(ids), *x.shape[1:]) if isinstance(x, Tensor) else x for n, x in batch.items()}


def _texts(model: nn.Module, batch: dict[str, Any], position: int) -> Iterator[_Text]:
    """The texts of a batch one by one, without padding."""
    sequences = sequences_of(model, batch)
    name = next((n for n, x in batch.items() if x is sequences.source), None)
    if name is None or sequences.source is None:
        raise InputError(f"inputs has no tokens for {type(model).__name__}, expected a text or token ids")
    items, n = sequences.source.shape
    of_target = {k for k, x in batch.items() if k.startswith("decoder") or (x is sequences.target and k != name)}
    along = tuple(
        k for k, x in batch.items() if isinstance(x, Tensor) and x.shape[:2] == (items, n) and k not in of_target
    )
    for item in range(items):
        one = {k: x[item : item + 1] if isinstance(x, Tensor) else x for k, x in batch.items()}
        for k in (*along, *of_target):
            real = (sequences.real_target if k in of_target else sequences.real_source).get(one[k].shape[1])
            if real is not None:
                one[k] = one[k][:, real[item]]
        text = _Text(one, name, along)
        if position >= len(text.ids):
            raise InputError(f"position is {position}, but a text has {len(text.ids)} tokens")
        yield text


def _responses(model: nn.Module, batch: dict[str, Any], items: int) -> dict[str, list[Float[Tensor, "r n"]]]:
    """‖h′ − h‖ / ‖h‖ for every replacement and token, by stack and depth."""
    found: dict[str, list[Tensor]] = {}

    def compare(stack: str, depth: int, hidden: Tensor) -> None:
        if len(hidden) != items:
            return  # batch items are windows of an image or frames of audio, not texts
        x = hidden.to(at_least_float32(hidden.dtype))
        found.setdefault(stack, []).append(((x[1:] - x[:1]).norm(dim=2) / x[:1].norm(dim=2)).cpu())

    with evaluation_mode(model), torch.no_grad(), observe_residual(model, attention_modules(model), compare):
        model(**batch)
    return found


def _others(
    model: nn.Module,
    own: Tensor,
    replacement: int | Sequence[int] | None,
    count: int,
    tokenizer: Any,
    generator: torch.Generator,
) -> list[int]:
    """Ids by which a token is replaced."""
    size = vocabulary(model)
    if replacement is not None:
        ids = [replacement] if isinstance(replacement, int) else list(replacement)
        wrong = [i for i in ids if i < 0 or i == int(own) or (size is not None and i >= size)]
        if wrong or not ids:
            limit = "" if size is None else f" from 0 to {size - 1}"
            raise InputError(
                f"replacement is {replacement}, expected ids{limit} other than the token's own, {int(own)}"
            )
        return ids
    if size is None:
        raise InputError(f"replacement is None, but {type(model).__name__} does not state its vocabulary; expected ids")
    never = {int(own), *special_ids(model, tokenizer)}
    ordinary = [i for i in range(size) if i not in never]
    if len(ordinary) < count:
        raise InputError(f"replacements is {count}, but the vocabulary has {len(ordinary)} other ordinary tokens")
    return [ordinary[i] for i in torch.randperm(len(ordinary), generator=generator)[:count].tolist()]


def _stack(responses: dict[str, list[Tensor]], wanted: str | None, n: int, model: str) -> tuple[str, bool]:
    """The requested stack, and True if it reads the text itself: the first stack with as many tokens does."""
    own = next((s for s, x in responses.items() if x[0].shape[1] == n), None)
    found = own if wanted is None else wanted
    if found is None or found not in responses:
        have = ", ".join(responses) or "no numbered layers with attention"
        raise InputError(f"stack is {wanted!r}, but {model} has {have}")
    return found, found == own

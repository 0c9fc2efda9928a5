"""Over-mixing: how far one changed token moves the hidden states of all others, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._engine.call import at_least_float32
from qkv.errors import InputError
from qkv.profiler.capture.inputs import batches, real_tokens, sequences_of, vocabulary
from qkv.profiler.capture.models import load
from qkv.profiler.capture.residual import attending, follow
from qkv.profiler.capture.tokens import as_read, special_ids

_MEANING = {
    "response": "‖h′ − h‖ / ‖h‖ of each token's hidden state h, and h′ with another token in the changed one's place; "
    "mean over the replacements",
    "deviation": "standard deviation of the same over the replacements",
    "later": "mean of the response over the tokens after the changed one",
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
    """How far the hidden states of all tokens move, at every depth, if one token is another (Barbero et al. 2025,
    arXiv:2504.02732, §3.1).

    The text and its variants go through the model side by side, and hidden states are compared as they are computed:
    memory is that of a batch of ``1 + replacements`` texts. In a causal model no earlier token moves.

    Args:
        model: any module with numbered layers that attend, or a name for `qkv.load`.
        inputs: as in `qkv.profile`; each text by itself, without its padding.
        position: of the token that is changed, counted from 0 in the whole text.
        replacement: the ids to put there; drawn if None.
        replacements: how many other ids are drawn, of those that are neither special nor the token itself.
        seed: of the draw, which is the same with and without the first token.
        without_first: leave the first token, and with it the usual sink, out of the text. All others then have
            positions one lower, as far as the model is concerned.
        stack: which stack of layers, such as "decoder.block": see `qkv.profiler.capture.residual`. If None, the first
            with as many tokens as the text has.
        tokenizer: for text, names of tokens and which are special; loaded with the model if that is a name.
        target: the text the decoder of an encoder-decoder reads; it stays as it is.

    Returns:
        ``response`` and ``deviation`` (text, depth, token) and ``later`` (text, depth), all without unit. Depth 0 is
        the embeddings, depth i what the i-th layer leaves. ``token`` counts in the whole text, with or without its
        first token; beyond a text's end all is NaN. In a stack that reads another text, a decoder's, ``token`` counts
        in that, and all of it is later. ``token_name`` (text, token), and ``replaced_by`` (text, replacement).

    Raises:
        InputError: for a model that reads no tokens or has no such stack, a position outside of a text, and a
            replacement that is the token itself or not in the vocabulary.

    >>> data = mixing("qkv-mini", "def mean(values):", position=3)
    >>> data.sizes["depth"], float(data["response"][0, -1, :3].max()) < 1e-5
    (5, True)
    """
    if isinstance(model, str):
        loaded = load(model)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    if replacements < 1:
        raise InputError(f"replacements is {replacements}, expected at least 1")
    if position < int(without_first):
        what = "the first token is left out, so expected 1 or more" if without_first else "expected 0 or more"
        raise InputError(f"position is {position}, {what}")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for batch in batches(model, inputs, tokenizer, target):
        for text in _texts(model, batch, position):
            others = _others(model, text.ids[position], replacement, replacements, tokenizer, generator)
            responses = _responses(model, text.changed(position, others, without_first), 1 + len(others))
            name, own = _stack(responses, stack, len(text.ids) - without_first, type(model).__name__)
            response = torch.stack(responses[name], 1).double().numpy()
            found.append(_Found(text.ids, others, name, own, response))
    facts = {"model": type(model).__name__, "position": position, "without_first": int(without_first), "seed": seed}
    return _dataset(found, facts, tokenizer)


@dataclass(frozen=True, eq=False)
class _Text:
    """What the model takes for one text, the name of its ids there, and what else runs along it."""

    batch: dict[str, Any]
    name: str
    along: tuple[str, ...]

    @property
    def ids(self) -> Int[Tensor, " n"]:
        ids: Tensor = self.batch[self.name][0]
        return ids

    def changed(self, position: int, others: Sequence[int], without_first: bool) -> dict[str, Any]:
        """The text, and below it one for each other id in that place."""
        ids = self.ids.repeat(1 + len(others), 1)
        ids[1:, position] = torch.tensor(others, device=ids.device)
        batch = self.batch | {self.name: ids}
        for name in self.along if without_first else ():
            batch[name] = batch[name][:, 1:]
        return {n: x.expand(len(ids), *x.shape[1:]) if isinstance(x, Tensor) else x for n, x in batch.items()}


def _texts(model: nn.Module, batch: dict[str, Any], position: int) -> Iterator[_Text]:
    """The texts of a batch one by one, without padding."""
    sequences = sequences_of(model, batch)
    source, target = real_tokens(model, batch, sequences)
    name = next((n for n, x in batch.items() if x is sequences.source), None)
    if name is None or sequences.source is None:
        raise InputError(f"inputs has no tokens that {type(model).__name__} reads, expected a text or token ids")
    items, n = sequences.source.shape
    beside = {k for k, x in batch.items() if k.startswith("decoder") or (x is sequences.target and k != name)}
    along = tuple(
        k for k, x in batch.items() if isinstance(x, Tensor) and x.shape[:2] == (items, n) and k not in beside
    )
    for item in range(items):
        one = {k: x[item : item + 1] if isinstance(x, Tensor) else x for k, x in batch.items()}
        for k in (*along, *beside):
            real = (target if k in beside else source).get(one[k].shape[1])
            if real is not None:
                one[k] = one[k][:, real[item]]
        text = _Text(one, name, along)
        if position >= len(text.ids):
            raise InputError(f"position is {position}, but a text has {len(text.ids)} tokens")
        yield text


def _responses(model: nn.Module, batch: dict[str, Any], items: int) -> dict[str, list[Float[Tensor, "r n"]]]:
    """‖h′ − h‖ / ‖h‖ of every replacement and token, by stack and depth."""
    found: dict[str, list[Tensor]] = {}

    def look(stack: str, depth: int, hidden: Tensor) -> None:
        if len(hidden) != items:
            return  # windows of an image or frames of a sound, not texts
        x = hidden.to(at_least_float32(hidden.dtype))
        found.setdefault(stack, []).append(((x[1:] - x[:1]).norm(dim=2) / x[:1].norm(dim=2)).cpu())

    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with torch.no_grad(), follow(model, attending(model), look):
            model(**batch)
    finally:
        for module in training:
            module.training = True
    return found


def _others(
    model: nn.Module,
    own: Tensor,
    given: int | Sequence[int] | None,
    count: int,
    tokenizer: Any,
    generator: torch.Generator,
) -> list[int]:
    """Ids to put in place of a token."""
    size = vocabulary(model)
    if given is not None:
        ids = [given] if isinstance(given, int) else list(given)
        wrong = [i for i in ids if i < 0 or i == int(own) or (size is not None and i >= size)]
        if wrong or not ids:
            limit = "" if size is None else f" from 0 to {size - 1}"
            raise InputError(f"replacement is {given}, expected ids{limit} other than the token's own, {int(own)}")
        return ids
    if size is None:
        raise InputError(f"replacement: the vocabulary of {type(model).__name__} is not known, expected token ids")
    never = {int(own), *special_ids(model, tokenizer)}
    ordinary = [i for i in range(size) if i not in never]
    if len(ordinary) < count:
        raise InputError(f"replacements is {count}, but there are {len(ordinary)} ordinary tokens to choose from")
    return [ordinary[i] for i in torch.randperm(len(ordinary), generator=generator)[:count].tolist()]


def _stack(responses: dict[str, list[Tensor]], wanted: str | None, n: int, model: str) -> tuple[str, bool]:
    """Which stack is asked for, and whether it reads the text itself: the first with as many tokens does."""
    own = next((s for s, x in responses.items() if x[0].shape[1] == n), None)
    found = own if wanted is None else wanted
    if found is None or found not in responses:
        have = ", ".join(responses) or "no numbered layers that attend"
        raise InputError(f"stack is {wanted!r}, but {model} has {have}")
    return found, found == own


@dataclass(frozen=True, eq=False)
class _Found:
    """The response of one text, its whole ids and what was put in place of one."""

    ids: Int[Tensor, " n"]
    others: list[int]
    stack: str
    own: bool  # whether the stack reads this text, and not, say, what a decoder does
    response: Float[np.ndarray, "r depth m"]


def _dataset(found: list[_Found], facts: dict[str, Any], tokenizer: Any) -> xr.Dataset:
    position, start = facts["position"], facts["without_first"]
    own = found[0].own
    longest = max(f.response.shape[2] for f in found)
    tokens = np.arange(start if own else 0, longest + (start if own else 0))

    def padded(values: list[np.ndarray]) -> np.ndarray:
        empty = [(0, longest - v.shape[-1]) for v in values]
        return np.stack([np.pad(v, ((0, 0), e), constant_values=np.nan) for v, e in zip(values, empty, strict=True)])

    response = padded([f.response.mean(0) for f in found])
    after = response[..., tokens > position] if own else response
    with np.errstate(invalid="ignore"):
        later = np.nansum(after, -1) / np.isfinite(after).sum(-1)
    names = np.full((len(found), longest), "", object)
    for row, f in zip(names, found, strict=True):
        ids = f.ids[start:].tolist() if own else []
        known = tokenizer is not None and hasattr(tokenizer, "convert_ids_to_tokens")
        pieces = tokenizer.convert_ids_to_tokens(ids) if known else [str(i) for i in ids]
        row[: len(ids)] = [as_read(tokenizer, i, str(p)) if known else p for i, p in zip(ids, pieces, strict=True)]
    by_token = ("text", "depth", "token")
    data = xr.Dataset(
        {
            "response": (by_token, response),
            "deviation": (by_token, padded([f.response.std(0) for f in found])),
            "later": (("text", "depth"), later),
        },
        coords={
            "depth": np.arange(response.shape[1]),
            "token": tokens,
            "token_name": (("text", "token"), names),
            "replaced": ("text", [int(f.ids[position]) for f in found]),
            "replaced_by": (("text", "replacement"), [f.others for f in found]),
        },
        attrs=facts | {"stack": found[0].stack},
    )
    data["depth"].attrs["definition"] = "0: what the first layer takes; i: what the i-th layer leaves"
    for name, definition in _MEANING.items():
        data[name].attrs |= {"units": "1", "definition": definition}
    return data

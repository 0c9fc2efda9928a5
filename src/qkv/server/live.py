"""The live page: the next token, and the attention of a text while heads are edited."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import edits as of_heads
from qkv.errors import InputError
from qkv.models import DecoderLM, Sampler
from qkv.models.generation import evaluating
from qkv.models.loading import Loaded
from qkv.normalizers import Sigmoid, Softmax
from qkv.profiler.analyses import edits as own_edits
from qkv.profiler.analyses.edits import AS_TRAINED, Edit, attention_layers, edited
from qkv.profiler.capture.inputs import device_of, positions, token_text
from qkv.profiler.editing import Key, edit
from qkv.profiler.run import profile
from qkv.server.schemas import MAX_CHARACTERS

if TYPE_CHECKING:
    import xarray as xr

    from qkv.server.schemas import LiveRequest, StepRequest


NAMES = {"softmax": "softmax", "off_by_one": "off-by-one", "sigmoid": "sigmoid"}
"""Normalizers of `DecoderConfig` that the page offers, with the names that the page uses."""


class Answer(NamedTuple):
    """Logits of the next token, and the attention weights of every layer."""

    logits: Float[Tensor, "1 vocabulary"]
    weights: list[Float[Tensor, "heads n n"]]


class LiveModel(Protocol):
    """A language model whose heads can get another normalizer or temperature."""

    own: str
    """The name of the normalizer that the model was trained with."""
    heads: list[int]
    """The number of heads of each layer."""
    most_tokens: int | None
    """The largest number of tokens; None if there is no limit."""

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        """One forward over the tokens, with these edits."""


def live_model(model: nn.Module) -> LiveModel | None:
    """The model for the Live page; None if it is no language model whose heads can be edited."""
    if isinstance(model, DecoderLM):
        known = model.config.normalizer in NAMES and model.config.attention is None  # else its normalizer may be any
        return _Own(model) if known else None
    head = getattr(model, "get_output_embeddings", None)
    if head is None or head() is None or getattr(model.config, "is_encoder_decoder", False):
        return None
    try:
        return _HuggingFace(model)
    except InputError:  # its attention cannot be read, or not be edited
        return None


class _Own:
    """A `DecoderLM`."""

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self.own = NAMES[model.config.normalizer]
        self.heads = [layer.heads for layer in attention_layers(model)]
        self.most_tokens: int | None = model.config.context

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        weights: list[Tensor] = []
        with (
            evaluating(self.model),
            edited(self.model, edits, on_weights=lambda layer, found: weights.append(found[0].float().cpu())),
        ):
            logits = self.model(torch.tensor([list(ids)], device=device_of(self.model)))[:, -1].cpu()
        return Answer(logits, weights)


class _HuggingFace:
    """A causal language model of Hugging Face, edited by `qkv.edit`; a profile inside reads its weights."""

    own = "softmax"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.most_tokens = positions(model)
        data = _profiled(model, [0, 0])
        if "sink_mass" in data or not data.attrs["causal"]:
            raise InputError("model has a learned sink or sees the future, expected a causal softmax")
        self.heads = [data.sizes["head"]] * data.sizes["layer"]
        self.run([0, 0], [Edit(0, 0, "off-by-one")])

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        changes: dict[Key, of_heads.Edit | str] = {(one.layer, one.head): _of_head(one) for one in edits}
        with torch.no_grad(), evaluating(self.model), edit(self.model, changes) if changes else nullcontext():
            logits = self.model(torch.tensor([list(ids)], device=device_of(self.model))).logits[:, -1].float().cpu()
            data = _profiled(self.model, ids)
        return Answer(logits, [torch.from_numpy(one.copy()) for one in data["weights"].values[0]])


def everywhere(model: nn.Module, normalizer: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which all heads of a model have another normalizer, with the same parameters.

    Raises:
        InputError: for a model whose heads cannot be edited.
    """
    if getattr(model, "one_stack", False):
        changes = own_edits.everywhere(model, normalizer)
        return lambda: own_edits.edited(model, changes)
    if not hasattr(model, "get_input_embeddings") or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"model is {type(model).__name__}, whose heads cannot be edited here; expected a decoder or an encoder of "
            "qkv or Hugging Face"
        )
    data = _profiled(model, [0, 0])
    every = itertools.product(range(data.sizes["layer"]), range(data.sizes["head"]))
    made: dict[Key, of_heads.Edit | str] = {at: _of_head(Edit(*at, normalizer)) for at in every}
    return lambda: edit(model, made)


def _profiled(model: nn.Module, ids: Sequence[int]) -> xr.Dataset:
    tokens = torch.tensor([list(ids)], device=device_of(model))
    found = profile(model, tokens, map_tokens=len(ids), map_bins=0, probe=False, progress=False)
    if list(found.groups) != ["self"]:
        raise InputError(f"model has attention of the kinds {', '.join(found.groups)}, expected self-attention only")
    return found.data


def _of_head(one: Edit) -> of_heads.Edit:
    match one.normalizer:
        case "off-by-one":
            return of_heads.WithNormalizer(Softmax(one.temperature, sink=0.0))
        case "sigmoid":
            return of_heads.WithNormalizer(Sigmoid().with_temperature(one.temperature))
        case "softmax" | "as trained":
            return of_heads.Temperature(one.temperature)
    raise InputError(f"normalizer is {one.normalizer!r}, expected one of {', '.join(NAMES.values())}")


MAX_TOKENS = 512
"""Limits the size of an answer, which holds attention maps."""
EXAMPLE = "import os\n\nclass Stack:\n    def __init__(self"
CONTEXT_TOKENS = 16  # decoded with a new token, because the text of a token depends on the tokens before it


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The result of one forward pass over a text."""

    probabilities: Float[Tensor, " vocabulary"]
    """Probabilities of the next token, float64."""
    logits: Float[Tensor, "1 vocabulary"]
    weights: list[Float[Tensor, "heads n n"]]
    """Attention weights of every layer."""
    sigmoid: list[list[bool]]
    """Whether a head of a layer has sigmoid weights, whose rows do not sum to 1."""


class Live:
    """Live answers of one model; `description` is None if the model does not support them.

    >>> from types import SimpleNamespace
    >>> from qkv.models.loading import load_model
    >>> live = Live(load_model("qkv-mini"))
    >>> edit = SimpleNamespace(layer=0, head=0, normalizer="off-by-one", temperature=1.0)
    >>> answer = live.answer(SimpleNamespace(text="import os", edits=[edit], layer=0, head=0, k=3, ids=None))
    >>> answer["tokens"], answer["divergence"] > 0
    (['<s>', 'import', ' os'], True)
    """

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.model = None if loaded.tokenizer is None else live_model(loaded.model)

    def description(self) -> dict[str, Any] | None:
        """The fields of `LiveModel`, or None if the model is no language model whose heads can be edited.

        It also needs a tokenizer. The first of the normalizers is the one that the model was trained with.
        """
        if self.model is None:
            return None
        own, heads = self.model.own, self.model.heads
        return {
            "model": self.loaded.name,
            "layers": len(heads),
            "heads": max(heads),
            "most_tokens": min(MAX_TOKENS, self.model.most_tokens or MAX_TOKENS),
            "most_characters": MAX_CHARACTERS,
            "normalizers": [own, *(name for name in NAMES.values() if name != own)],
            "example": EXAMPLE,
        }

    def answer(self, request: LiveRequest) -> dict[str, Any]:
        """Attention weights of every head and the probabilities of the next token, before and after the edits.

        Returns:
            The fields of `LiveAnswer`: ``tokens``; ``next``, the `k` likeliest tokens before and after the edits, in
            the same order; ``divergence``, KL(before ‖ after) of the next token in nats; for each layer and head,
            before and after, ``sink`` (mean share of the row on the first token over all later queries; 0 for a text
            of one token) and ``entropy`` (mean over the queries, of the weights divided by their sum, in nats);
            ``rows``, the weights of the last query after the edits; ``map`` and ``map_before`` of the requested head,
            base64 of float32.
        """
        ids = self._ids(request)
        edits = self._edits(request)
        before = self._run(ids, [])
        after = self._run(ids, edits) if edits else before
        likeliest = _likeliest([before, after], request.k)
        return {
            "tokens": self._names(ids),
            "next": {"before": self._listed(before, likeliest), "after": self._listed(after, likeliest)},
            "divergence": _divergence(before.probabilities, after.probabilities),
            "sink": {"before": _sinks(before), "after": _sinks(after)},
            "entropy": {"before": _entropies(before), "after": _entropies(after)},
            "rows": [x[:, -1].tolist() for x in after.weights],
            "map": _encoded(after.weights[request.layer][request.head]),
            "map_before": _encoded(before.weights[request.layer][request.head]),
        }

    def step(self, request: StepRequest) -> dict[str, Any]:
        """Sample the next token of a text. The same request gives the same token.

        Steps 0, 1, … with one seed sample the same tokens as `qkv.models.generate` with that seed, provided that each
        request sends the ``ids`` of the answer before.

        Returns:
            ``text`` and ``ids`` with the token appended; the ``token`` and its ``probability`` before the sampling
            temperature is applied; ``top``, the `k` likeliest tokens; ``tokens`` of the text before, and ``row``, the
            weights of the last of them in the requested head.
        """
        ids = self._ids(request)
        edits = self._edits(request)
        found = self._run(ids, edits)
        probabilities = Sampler(temperature=request.sampling_temperature).probabilities(
            found.logits, torch.tensor([ids])
        )
        token = _sample(probabilities, request.seed, request.step)
        return {
            "text": self._continued(request.text, ids, token),
            "ids": [*ids, token],
            "token": self._names([token])[0],
            "probability": float(found.probabilities[token]),
            "top": self._listed(found, _likeliest([found], request.k)),
            "tokens": self._names(ids),
            "row": found.weights[request.layer][request.head, -1].tolist(),
        }

    def _ids(self, request: LiveRequest) -> list[int]:
        text, description = request.text, self.description()
        if description is None:
            raise InputError(
                f"model: {self.loaded.name} does not support live text, expected a language model with softmax "
                "attention that qkv.edit can change, such as qkv-mini"
            )
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"text has {len(text):,} characters, expected at most {MAX_CHARACTERS:,}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("text has half of a character (a lone surrogate), expected whole ones") from error
        # Tokenizing a text that was generated token by token need not give the same tokens again.
        ids = request.ids
        if ids is None:
            ids = self.loaded.tokenizer(text, return_tensors="pt")["input_ids"][0].tolist()
        most = description["most_tokens"]
        if not 1 <= len(ids) <= most:
            raise InputError(f"text has {len(ids)} tokens, expected 1 to {most}")
        return ids

    def _edits(self, request: LiveRequest) -> list[Edit]:
        """The edits that have an effect. This also checks the requested head."""
        assert self.model is not None
        own, heads = self.model.own, self.model.heads
        if not 0 <= request.layer < len(heads):
            raise InputError(f"layer is {request.layer}, expected 0 to {len(heads) - 1}")
        if not 0 <= request.head < heads[request.layer]:
            raise InputError(f"head is {request.head}, expected 0 to {heads[request.layer] - 1}")
        return [  # an edit to the trained normalizer at temperature 1 has no effect
            Edit(e.layer, e.head, AS_TRAINED if e.normalizer == own else e.normalizer, e.temperature)
            for e in request.edits
            if e.normalizer != own or e.temperature != 1
        ]

    def _run(self, ids: list[int], edits: list[Edit]) -> ForwardPass:
        assert self.model is not None
        logits, weights = self.model.run(ids, edits)
        used = {(e.layer, e.head): e.normalizer for e in edits if e.normalizer != AS_TRAINED}
        own = self.model.own
        sigmoid = [[used.get((i, j), own) == "sigmoid" for j in range(len(x))] for i, x in enumerate(weights)]
        return ForwardPass(logits[0].double().softmax(-1), logits, weights, sigmoid)

    def _listed(self, run: ForwardPass, tokens: list[int]) -> list[dict[str, Any]]:
        names = zip(tokens, self._names(tokens), strict=True)
        return [{"token": name, "probability": float(run.probabilities[token])} for token, name in names]

    def _names(self, ids: Sequence[int]) -> list[str]:
        """Tokens as readable text."""
        tokenizer, ids = self.loaded.tokenizer, list(ids)
        pieces = tokenizer.convert_ids_to_tokens(ids)
        return [token_text(tokenizer, token, str(piece)) for token, piece in zip(ids, pieces, strict=True)]

    def _continued(self, text: str, ids: list[int], token: int) -> str:
        """The text with a token appended, which may complete an unfinished character at its end."""
        tail = ids[-CONTEXT_TOKENS:]
        before, after = (
            str(self.loaded.tokenizer.decode(x, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            for x in (tail, [*tail, token])
        )
        if text.endswith(before):
            return text[: len(text) - len(before)] + after
        return text + after.removeprefix(before)


def _likeliest(runs: Sequence[ForwardPass], k: int) -> list[int]:
    """The union of the k likeliest tokens of each run, sorted by their largest probability in any run."""
    k = min(k, len(runs[0].probabilities))
    found = {int(i) for run in runs for i in run.probabilities.topk(k).indices}
    return sorted(found, key=lambda i: (-max(float(run.probabilities[i]) for run in runs), i))


def _divergence(p: Tensor, q: Tensor) -> float:
    """KL(p ‖ q) = Σ p ln(p/q) in nats, clamped at 0 because rounding could make it negative."""
    smallest = torch.finfo(q.dtype).tiny
    terms = torch.where(p > 0, p * (p.clamp(min=smallest).log() - q.clamp(min=smallest).log()), 0.0)
    return max(float(terms.sum()), 0.0)


def _sinks(run: ForwardPass) -> list[list[float]]:
    """The mean share of the row on the first token over all later queries, by layer and head, as in a profile."""
    if run.weights[0].shape[1] == 1:
        return [[0.0] * len(x) for x in run.weights]
    shares = [
        torch.where(torch.tensor(sigmoid)[:, None, None], divided, x)
        for sigmoid, x, divided in zip(run.sigmoid, run.weights, _divided(run.weights), strict=True)
    ]
    return [x[:, 1:, 0].mean(1).tolist() for x in shares]


def _entropies(run: ForwardPass) -> list[list[float]]:
    """The mean entropy of the normalized weights of a query, by layer and head, in nats."""
    return [torch.special.entr(x).sum(-1).mean(1).tolist() for x in _divided(run.weights)]


def _divided(weights: list[Float[Tensor, "heads n n"]]) -> list[Float[Tensor, "heads n n"]]:
    """The weights divided by the sums of their rows; rows of zeros stay zero."""
    return [x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) for x in weights]


def _encoded(weights: Float[Tensor, "n n"]) -> str:
    return base64.b64encode(weights.numpy().astype("<f4").tobytes()).decode("ascii")


def _sample(probabilities: Float[Tensor, "1 vocabulary"], seed: int, step: int) -> int:
    """Sample the token that `qkv.models.generation` samples for the first item of a batch at this step."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, 0)).generate_state(1)[0]))
    for _ in range(step):  # each earlier step consumed one number
        torch.rand(1, generator=generator, dtype=torch.float64)
    return int(Sampler().draw(probabilities, [generator]))

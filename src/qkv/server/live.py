"""The live page: the next token, and the attention of a text while heads are edited."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import edits
from qkv.errors import InputError, one_of
from qkv.models import DecoderLM, Sampler
from qkv.models.generation import evaluating
from qkv.models.loading import Loaded
from qkv.normalizers import Sigmoid, Softmax
from qkv.profiler.capture.inputs import device_of, positions, token_text, vocabulary
from qkv.profiler.editing import Key, edit
from qkv.profiler.editing import everywhere as every_head
from qkv.profiler.run import profile
from qkv.server.schemas import MAX_CHARACTERS

if TYPE_CHECKING:
    import xarray as xr

    from qkv.server.schemas import LiveRequest, StepRequest


NAMES = {"softmax": "softmax", "off_by_one": "off-by-one", "sigmoid": "sigmoid"}
"""Normalizers of `DecoderConfig` that the page offers, with the names that the page uses."""
AS_TRAINED = "as trained"
COLDEST, HOTTEST = 1e-3, 1e3
"""The lowest and highest temperature of an edit: beyond, scores overflow, or differ only by rounding."""


class Answer(NamedTuple):
    """Logits of the next token, and the attention weights of every layer."""

    logits: Float[Tensor, "1 vocabulary"]
    weights: list[Float[Tensor, "heads n n"]]


class HeadEdit(NamedTuple):
    """Another normalizer in one head, by a name that the page uses; its scores are divided by the temperature."""

    layer: int
    head: int
    normalizer: str = AS_TRAINED
    temperature: float = 1.0


@functools.cache  # heads with the same edit are computed together
def _change(normalizer: str, temperature: float) -> edits.Edit:
    match normalizer:
        case "softmax":
            return edits.WithNormalizer(Softmax(temperature))
        case "off-by-one":
            return edits.WithNormalizer(Softmax(temperature, sink=0.0))
        case "sigmoid":
            return edits.WithNormalizer(Sigmoid().with_temperature(temperature))
    return edits.Temperature(temperature)


def live_model(model: nn.Module) -> LiveModel | None:
    """The model for the Live page; None if it is no language model whose heads can be edited."""
    if isinstance(model, DecoderLM):
        if model.config.normalizer not in NAMES or model.config.attention is not None:  # its normalizer may be any
            return None
        return LiveModel(model, NAMES[model.config.normalizer])
    head = getattr(model, "get_output_embeddings", None)
    if head is None or head() is None or getattr(model.config, "is_encoder_decoder", False):
        return None
    try:
        return LiveModel(model, "softmax")
    except InputError:  # its attention cannot be read, or not be edited
        return None


class LiveModel:
    """A language model whose heads can get another normalizer or temperature, by `qkv.edit`.

    Args:
        model: a `DecoderLM`, or a causal language model of Hugging Face.
        own: the name of the normalizer that it was trained with.
    """

    def __init__(self, model: Any, own: str) -> None:
        self.model, self.own = model, own
        self.most_tokens = getattr(model.config, "context", None) or positions(model)
        data = _profiled(model, [0, 0])
        if not isinstance(model, DecoderLM) and ("sink_mass" in data or not data.attrs["causal"]):
            raise InputError("model has a learned sink or sees the future, expected a causal softmax")
        self.heads: list[int] = [data.sizes["head"]] * data.sizes["layer"]
        self.run([0, 0], [HeadEdit(0, 0, "off-by-one")])

    def run(self, ids: Sequence[int], changes: list[HeadEdit]) -> Answer:
        """One forward over the tokens, with these edits; a profile inside reads its weights."""
        logits: list[Tensor] = []
        made: dict[Key, edits.Edit | str] = {one[:2]: _change(*one[2:]) for one in changes}
        with torch.no_grad(), evaluating(self.model), edit(self.model, made) if made else nullcontext():
            data = _profiled(self.model, ids, lambda out: logits.append(getattr(out, "logits", out)[:, -1]))
        return Answer(logits[0].float().cpu(), [torch.from_numpy(one.copy()) for one in data["weights"].values[0]])


def everywhere(model: nn.Module, normalizer: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which all heads of a model have another normalizer, with the same parameters.

    Raises:
        InputError: for a model whose heads cannot be edited.
    """
    other = not hasattr(model, "get_input_embeddings") or getattr(model.config, "is_encoder_decoder", False)
    if other and not getattr(model, "one_stack", False):
        raise InputError(
            f"model is {type(model).__name__}, whose heads cannot be edited here; expected a decoder or an encoder of "
            "qkv or Hugging Face"
        )
    return functools.partial(edit, model, every_head(model, normalizer))


def _profiled(
    model: nn.Module, ids: Sequence[int], on_output: Callable[[Any], None] = lambda output: None
) -> xr.Dataset:
    tokens = torch.tensor([list(ids)], device=device_of(model))
    handle = model.register_forward_hook(lambda module, inputs, output: on_output(output))
    try:
        found = profile(model, tokens, map_tokens=len(ids), map_bins=0, probe=False, progress=False)
    finally:
        handle.remove()
    if list(found.groups) != ["self"]:
        raise InputError(f"model has attention of the kinds {', '.join(found.groups)}, expected self-attention only")
    return found.data


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
        changes = self._changes(request)
        before = self._run(ids, [])
        after = self._run(ids, changes) if changes else before
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
        changes = self._changes(request)
        found = self._run(ids, changes)
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
        if (size := vocabulary(self.loaded.model)) and not 0 <= min(ids) <= max(ids) < size:
            raise InputError(f"tokens has ids in {min(ids)}..{max(ids)}, expected 0..{size - 1} for this model")
        return ids

    def _changes(self, request: LiveRequest) -> list[HeadEdit]:
        """The edits that have an effect. This also checks the requested head."""
        assert self.model is not None
        own, heads = self.model.own, self.model.heads
        if not 0 <= request.layer < len(heads):
            raise InputError(f"layer is {request.layer}, expected 0 to {len(heads) - 1}")
        if not 0 <= request.head < heads[request.layer]:
            raise InputError(f"head is {request.head}, expected 0 to {heads[request.layer] - 1}")
        changes: dict[tuple[int, int], HeadEdit] = {}
        for e in request.edits:
            if not (0 <= e.layer < len(heads) and 0 <= e.head < heads[e.layer]):
                raise InputError(f"edit: layer is {e.layer} and head {e.head}, expected one of the {sum(heads)} heads")
            if (e.layer, e.head) in changes:
                raise InputError(f"edits has two edits of layer {e.layer}, head {e.head}, expected one for each head")
            one_of("edit: normalizer", e.normalizer, NAMES.values())
            if not COLDEST <= e.temperature <= HOTTEST:
                raise InputError(f"edit: temperature is {e.temperature}, expected {COLDEST} to {HOTTEST:g}")
            as_trained = AS_TRAINED if e.normalizer == own else e.normalizer
            changes[e.layer, e.head] = HeadEdit(e.layer, e.head, as_trained, e.temperature)
        return [one for one in changes.values() if one[2:] != (AS_TRAINED, 1)]  # others have no effect

    def _run(self, ids: list[int], changes: list[HeadEdit]) -> ForwardPass:
        assert self.model is not None
        logits, weights = self.model.run(ids, changes)
        used = {(e.layer, e.head): e.normalizer for e in changes if e.normalizer != AS_TRAINED}
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

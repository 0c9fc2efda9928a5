"""A language model that answers to a text as it is typed, with other normalizers or temperatures in chosen heads."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError
from qkv.models import DecoderLM, Sampler
from qkv.models.generation import evaluating
from qkv.profiler.analyses.edits import AS_TRAINED, Edit, attention_layers, edited
from qkv.profiler.capture.models import Loaded
from qkv.profiler.capture.tokens import token_text

if TYPE_CHECKING:
    from qkv.server.schemas import LiveRequest, StepRequest

MOST_TOKENS = 512
"""So that the maps of a head, and the answer with them, stay small."""
MOST_CHARACTERS = 2_000
EXAMPLE = "import os\n\nclass Stack:\n    def __init__(self"
NAMES = {"softmax": "softmax", "off_by_one": "off-by-one", "sigmoid": "sigmoid"}
"""Of the normalizers of `DecoderConfig`, those that a page offers, by the names it has for them."""
BEFORE = 16  # tokens that are enough to see how what follows them reads


@dataclass(frozen=True, eq=False)
class Run:
    """One forward over a text."""

    probabilities: Float[Tensor, " vocabulary"]
    """Of the next token, float64."""
    logits: Float[Tensor, "1 vocabulary"]
    weights: list[Float[Tensor, "heads n n"]]
    """Of every layer."""


class Live:
    """Answers about one model; see `described` for whether it can.

    >>> from types import SimpleNamespace
    >>> from qkv.profiler.capture.models import load
    >>> live = Live(load("qkv-mini"))
    >>> edit = SimpleNamespace(layer=0, head=0, normalizer="off-by-one", temperature=1.0)
    >>> answer = live.answer(SimpleNamespace(text="import os", edits=[edit], layer=0, head=0, k=3, ids=None))
    >>> answer["tokens"], answer["divergence"] > 0
    (['<s>', 'import', ' os'], True)
    """

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def described(self) -> dict[str, Any] | None:
        """What a page has to know, or None of a model that cannot go on with a text, or whose heads cannot be edited.

        The first of the normalizers is the one the model was trained with.
        """
        model = self.loaded.model
        if not isinstance(model, DecoderLM) or self.loaded.tokenizer is None or model.config.normalizer not in NAMES:
            return None
        own = NAMES[model.config.normalizer]
        return {
            "model": self.loaded.name,
            "layers": model.config.layers,
            "heads": model.config.heads,
            "most_tokens": min(MOST_TOKENS, model.config.context),
            "most_characters": MOST_CHARACTERS,
            "normalizers": [own, *(name for name in NAMES.values() if name != own)],
            "example": EXAMPLE,
        }

    def answer(self, request: LiveRequest) -> dict[str, Any]:
        """Where every head attends on a text and what would come next, without the edits and with them.

        Returns:
            As the page gets it: ``tokens``; ``next``, the `k` likeliest tokens of either, both times in the same
            order; ``divergence``, Kullback and Leibler's of the next token, before ‖ after, in nats; by layer and head
            ``sink`` (mean weight on the first token, of all queries after it; 0 of a text of one token) and ``entropy``
            (of the weights of a query, divided by their sum, in nats; mean over the queries), before and after;
            ``rows``, weights of the last query after; ``map`` and ``map_before`` of the head asked for, as base64 of
            float32.

        Raises:
            InputError: for a text without tokens, or too many, and for a head that is not there.
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
        """One more token of a text. The same request gives the same token.

        With seed s, steps 0, 1, … draw what `qkv.models.generate` draws with that seed, if each is asked with the
        ``ids`` of the one before.

        Returns:
            ``text`` and ``ids`` with the token appended, the ``token`` and its ``probability``, as the model says
            before the sampling temperature; ``top``, the `k` likeliest; ``tokens`` that were read, and ``row``, the
            weights of the last of them in the head asked for.

        Raises:
            InputError: as of `answer`, and for a text to which no token can be added.
        """
        ids = self._ids(request)
        edits = self._edits(request)
        found = self._run(ids, edits)
        chances = Sampler(temperature=request.sampling_temperature).probabilities(found.logits, torch.tensor([ids]))
        token = _drawn(chances, request.seed, request.step)
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
        text, described = request.text, self.described()
        if described is None:
            raise InputError(
                f"model: {self.loaded.name} does not go on with a text, expected a DecoderLM such as qkv-mini"
            )
        if len(text) > MOST_CHARACTERS:
            raise InputError(f"text has {len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("text has half of a character (a lone surrogate), expected whole ones") from error
        # A text that was made token by token need not be cut into the same tokens again.
        ids = request.ids
        if ids is None:
            ids = self.loaded.tokenizer(text, return_tensors="pt")["input_ids"][0].tolist()
        most = described["most_tokens"]
        if not 1 <= len(ids) <= most:
            raise InputError(f"text has {len(ids)} tokens, expected 1 to {most}")
        return ids

    def _edits(self, request: LiveRequest) -> list[Edit]:
        """The edits that change something; the head asked for is checked, too."""
        model = self.loaded.model
        assert isinstance(model, DecoderLM)
        own, layers = NAMES[model.config.normalizer], attention_layers(model)
        if not 0 <= request.layer < len(layers):
            raise InputError(f"layer is {request.layer}, expected 0 to {len(layers) - 1}")
        if not 0 <= request.head < layers[request.layer].heads:
            raise InputError(f"head is {request.head}, expected 0 to {layers[request.layer].heads - 1}")
        return [  # what is as trained is no edit
            Edit(e.layer, e.head, AS_TRAINED if e.normalizer == own else e.normalizer, e.temperature)
            for e in request.edits
            if e.normalizer != own or e.temperature != 1
        ]

    def _run(self, ids: list[int], edits: list[Edit]) -> Run:
        model = self.loaded.model
        assert isinstance(model, DecoderLM)
        weights: list[Tensor] = []
        device = next(model.parameters()).device
        with evaluating(model), edited(model, edits, told=lambda layer, found: weights.append(found[0].float().cpu())):
            logits = model(torch.tensor([ids], device=device))[:, -1].cpu()
        return Run(logits[0].double().softmax(-1), logits, weights)

    def _listed(self, run: Run, tokens: list[int]) -> list[dict[str, Any]]:
        names = zip(tokens, self._names(tokens), strict=True)
        return [{"token": name, "probability": float(run.probabilities[token])} for token, name in names]

    def _names(self, ids: Sequence[int]) -> list[str]:
        """Tokens as a person reads them."""
        tokenizer, ids = self.loaded.tokenizer, list(ids)
        pieces = tokenizer.convert_ids_to_tokens(ids)
        return [token_text(tokenizer, token, str(piece)) for token, piece in zip(ids, pieces, strict=True)]

    def _continued(self, text: str, ids: list[int], token: int) -> str:
        """The text and what the token adds to it, which may complete the character at its end."""
        tail = ids[-BEFORE:]
        before, after = (
            str(self.loaded.tokenizer.decode(x, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            for x in (tail, [*tail, token])
        )
        if text.endswith(before):
            return text[: len(text) - len(before)] + after
        return text + after.removeprefix(before)


def _likeliest(runs: Sequence[Run], k: int) -> list[int]:
    """The k likeliest tokens of each run together, those first that are likeliest in any."""
    k = min(k, len(runs[0].probabilities))
    found = {int(i) for run in runs for i in run.probabilities.topk(k).indices}
    return sorted(found, key=lambda i: (-max(float(run.probabilities[i]) for run in runs), i))


def _divergence(p: Tensor, q: Tensor) -> float:
    """Σ p ln(p/q), in nats; rounding does not make it negative."""
    smallest = torch.finfo(q.dtype).tiny
    terms = torch.where(p > 0, p * (p.clamp(min=smallest).log() - q.clamp(min=smallest).log()), 0.0)
    return max(float(terms.sum()), 0.0)


def _sinks(run: Run) -> list[list[float]]:
    return [x[:, 1:, 0].mean(1).tolist() if x.shape[1] > 1 else [0.0] * len(x) for x in run.weights]


def _entropies(run: Run) -> list[list[float]]:
    shares = [x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) for x in run.weights]
    return [torch.special.entr(x).sum(-1).mean(1).tolist() for x in shares]


def _encoded(weights: Float[Tensor, "n n"]) -> str:
    return base64.b64encode(weights.numpy().astype("<f4").tobytes()).decode("ascii")


def _drawn(chances: Float[Tensor, "1 vocabulary"], seed: int, step: int) -> int:
    """What `qkv.models.generation` draws for the first item of a batch at this step."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, 0)).generate_state(1)[0]))
    for _ in range(step):  # those before took one number each
        torch.rand(1, generator=generator, dtype=torch.float64)
    return int(Sampler().draw(chances, [generator]))

"""The live page: the next token, and the attention of a text while heads are edited."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import edits
from qkv.errors import InputError
from qkv.models import DecoderLM, Sampler
from qkv.models.generation import evaluation_mode
from qkv.models.loading import Loaded
from qkv.profiler.capture.inputs import device_of, positions, token_texts, vocabulary
from qkv.profiler.data.sinks import EPSILON, sink_table
from qkv.profiler.data.tables import is_short
from qkv.profiler.editing import Key, edit
from qkv.profiler.editing import everywhere as every_head
from qkv.runs.run import profile
from qkv.server.schemas import MAX_CHARACTERS, LiveModel, Normalizer

if TYPE_CHECKING:
    import xarray as xr

    from qkv.server.schemas import LiveRequest, StepRequest


NAMES: dict[str, Normalizer] = {"softmax": "softmax", "off_by_one": "off-by-one", "sigmoid": "sigmoid"}
"""Normalizers of `DecoderConfig` that the page offers, with the names that the page uses."""


@functools.cache  # heads with the same edit are computed together
def _change(normalizer: str | None, temperature: float) -> edits.Edit:
    """The edit of a head: another normalizer, by a name that the page uses, or its own for None."""
    if normalizer is None:
        return edits.Temperature(temperature)
    named: Any = edits.BY_NAME[normalizer]
    return edits.WithNormalizer(named.normalizer.with_temperature(temperature))


def own_normalizer(model: nn.Module) -> Normalizer | None:
    """The name of the normalizer of a language model whose heads can be edited, as far as its class tells; else None.

    The model is a `DecoderLM`, or a causal language model of Hugging Face.
    """
    if isinstance(model, DecoderLM):
        return None if model.config.attention is not None else NAMES.get(model.config.normalizer)
    head = getattr(model, "get_output_embeddings", None)
    decoder = head is not None and head() is not None and not getattr(model.config, "is_encoder_decoder", False)
    return "softmax" if decoder else None


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


MAX_TOKENS = 512
"""Limits the size of an answer, which holds attention maps."""
EXAMPLE = "import os\n\nclass Stack:\n    def __init__(self"
BEGINNING = 64  # tokens of the user's text at which the page begins
CONTEXT_TOKENS = 16  # decoded with a new token, because the text of a token depends on the tokens before it


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The result of one forward pass over a text."""

    logits: Float[Tensor, "1 vocabulary"]
    """Of the next token."""
    data: xr.Dataset
    """Its profile, with all weights."""

    @property
    def probabilities(self) -> Float[Tensor, " vocabulary"]:
        """Probabilities of the next token, float64."""
        return self.logits[0].double().softmax(-1)

    @property
    def weights(self) -> Float[Tensor, "layers heads n n"]:
        return torch.from_numpy(self.data["weights"].values[0].copy())

    @property
    def sinks(self) -> list[list[bool]]:
        """Whether each head has an attention sink at the first token, as findings count them, by layer and head."""
        has = sink_table(self.data)["alpha_first"].to_numpy() > EPSILON
        shape = self.data.sizes["layer"], self.data.sizes["head"]
        found: list[list[bool]] = (has & (not is_short(self.data))).reshape(shape).tolist()
        return found

    def mean(self, name: str, first: int) -> list[list[float]]:
        """The mean of a statistic over the queries from `first` on, by layer and head; 0 if there are none."""
        values = self.data[name].values[0, :, :, first:]
        means: list[list[float]] = (values.sum(-1) / max(1, values.shape[-1])).tolist()
        return means


class Live:
    """Live answers of one model.

    >>> from types import SimpleNamespace
    >>> from qkv.models.loading import load_model
    >>> live = Live(load_model("qkv-mini"))
    >>> edit = SimpleNamespace(layer=0, head=0, normalizer="off-by-one", temperature=1.0)
    >>> answer = live.answer(SimpleNamespace(text="import os", edits=[edit], layer=0, head=0, k=3, ids=None))
    >>> answer["tokens"], answer["divergence"] > 0
    (['<s>', 'import', ' os'], True)
    """

    def __init__(self, loaded: Loaded, inputs: Any = None) -> None:
        self.loaded = loaded
        self.description = self._describe(inputs)
        """The model for the page, or None if it is no language model whose heads can be edited.

        It also needs a tokenizer. The first of the normalizers is the one that the model was trained with.
        """

    def _describe(self, inputs: Any) -> LiveModel | None:
        model = self.loaded.model
        own = None if self.loaded.tokenizer is None else own_normalizer(model)
        if own is None:
            return None
        try:
            data = self._run([0, 0], {}).data
            self._run([0, 0], {(0, 0): _change("off-by-one", 1.0)})
        except InputError:  # its attention cannot be read, or not be edited
            return None
        if not isinstance(model, DecoderLM) and (not data.attrs["causal"] or "sink_mass" in data):
            return None  # its class does not tell its normalizer
        most_tokens = getattr(model.config, "context", None) or positions(model)
        return LiveModel(
            model=self.loaded.name,
            layers=data.sizes["layer"],
            heads=data.sizes["head"],
            most_tokens=min(MAX_TOKENS, most_tokens or MAX_TOKENS),
            most_characters=MAX_CHARACTERS,
            normalizers=[own, *(name for name in NAMES.values() if name != own)],
            example=self._beginning(inputs) or EXAMPLE,
        )

    def _beginning(self, inputs: Any) -> str:
        """The text that the model was opened with, as far as the page begins with it; empty if there is none."""
        tokenizer = self.loaded.tokenizer
        first = inputs[0] if isinstance(inputs, list | tuple) else inputs
        read = tokenizer(first, return_tensors="pt") if isinstance(first, str) else first
        ids = read.get("input_ids") if isinstance(read, Mapping) else read
        if not isinstance(ids, Tensor):
            return ""
        kept = (ids if ids.ndim == 1 else ids[0])[:BEGINNING].tolist()
        text = str(tokenizer.decode(kept, skip_special_tokens=False))
        if tokenizer(text, return_tensors="pt")["input_ids"][0].tolist() != kept:  # it adds special tokens itself
            text = str(tokenizer.decode(kept, skip_special_tokens=True))
        return text[:MAX_CHARACTERS]

    def answer(self, request: LiveRequest) -> dict[str, Any]:
        """Attention weights of every head and the probabilities of the next token, before and after the edits.

        Returns:
            The fields of `qkv.server.schemas.LiveAnswer`. The `k` likeliest tokens before and after the edits are in
            the same order; ``sink`` and ``entropy`` are means over the queries, as in a profile; ``sinks`` are those
            of its findings.
        """
        ids, changes = self._read(request)
        before = self._run(ids, {})
        after = self._run(ids, changes) if changes else before
        likeliest = _likeliest([before, after], request.k)
        # KL(before ‖ after) in nats; rounding could make it negative.
        log_after = after.probabilities.clamp(min=torch.finfo(torch.float64).tiny).log()
        return {
            "tokens": self._names(ids),
            "divergence": max(0.0, float(nn.functional.kl_div(log_after, before.probabilities, reduction="sum"))),
            "rows": after.weights[:, :, -1].tolist(),
        } | {
            when: {
                "next": self._listed(run, likeliest),
                "sink": run.mean("sink", 1),
                "sinks": run.sinks,
                "entropy": run.mean("entropy", 0),
                "map": _encoded(run.weights[request.layer, request.head]),
            }
            for when, run in (("before", before), ("after", after))
        }

    def step(self, request: StepRequest) -> dict[str, Any]:
        """Sample the next token of a text. The same request gives the same token.

        Steps 0, 1, … with one seed sample the same tokens as `qkv.models.generate` with that seed, provided that each
        request sends the ``ids`` of the answer before.

        Returns:
            The fields of `qkv.server.schemas.StepAnswer`; probabilities are those without the sampling temperature.
        """
        ids, changes = self._read(request)
        found = self._run(ids, changes, [request.layer])
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
            "row": found.weights[0, request.head, -1].tolist(),
        }

    # The types of a request limit its text, normalizers and temperatures: see `qkv.server.schemas`.

    def _read(self, request: LiveRequest) -> tuple[list[int], dict[Key, edits.Edit | str]]:
        """The token ids of a request, and its edits that have an effect; this also checks the requested head."""
        about = self.description
        if about is None:
            raise InputError(
                f"model: {self.loaded.name} does not support live text, expected a language model with softmax "
                "attention that qkv.edit can change, such as qkv-mini"
            )
        # Tokenizing a text that was generated token by token need not give the same tokens again.
        ids = request.ids
        if ids is None:
            ids = self.loaded.tokenizer(request.text, return_tensors="pt")["input_ids"][0].tolist()
        if not 1 <= len(ids) <= about.most_tokens:
            raise InputError(f"text has {len(ids)} tokens, expected 1 to {about.most_tokens}")
        if (size := vocabulary(self.loaded.model)) and not 0 <= min(ids) <= max(ids) < size:
            raise InputError(f"tokens has ids in {min(ids)}..{max(ids)}, expected 0..{size - 1} for this model")
        heads = [("", request.layer, request.head), *(("edit: ", e.layer, e.head) for e in request.edits)]
        for what, layer, head in heads:
            for name, index, size in (("layer", layer, about.layers), ("head", head, about.heads)):
                if not 0 <= index < size:
                    raise InputError(f"{what}{name} is {index}, expected 0 to {size - 1}")
        settings, own = dict[Key, tuple[str | None, float]](), about.normalizers[0]
        for e in request.edits:
            if (e.layer, e.head) in settings:
                raise InputError(f"edits has two edits of layer {e.layer}, head {e.head}, expected one for each head")
            settings[e.layer, e.head] = (None if e.normalizer == own else e.normalizer, e.temperature)
        return ids, {at: _change(*setting) for at, setting in settings.items() if setting != (None, 1)}

    def _run(
        self, ids: Sequence[int], changes: Mapping[Key, edits.Edit | str], layers: list[int] | None = None
    ) -> ForwardPass:
        """One forward over the tokens, with these edits; a profile inside reads the weights of all or some layers."""
        model: Any = self.loaded.model
        logits: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, out: Any) -> None:
            logits.append(getattr(out, "logits", out)[:, -1])

        handle = model.register_forward_hook(keep)
        try:
            with evaluation_mode(model), torch.inference_mode(), edit(model, changes) if changes else nullcontext():
                tokens = torch.tensor([list(ids)], device=device_of(model))
                found = profile(
                    model, tokens, layers=layers, map_tokens=len(ids), map_bins=0, probe=False, progress=False
                )
        finally:
            handle.remove()
        if list(found.groups) != ["self"]:
            kinds = ", ".join(found.groups)
            raise InputError(f"model has attention of the kinds {kinds}, expected self-attention only")
        return ForwardPass(logits[0].float().cpu(), found.data)

    def _listed(self, run: ForwardPass, tokens: list[int]) -> list[dict[str, Any]]:
        names = zip(tokens, self._names(tokens), strict=True)
        return [{"token": name, "probability": float(run.probabilities[token])} for token, name in names]

    def _names(self, ids: Sequence[int]) -> list[str]:
        """Tokens as readable text."""
        return token_texts(self.loaded.tokenizer, ids)

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


def _encoded(weights: Float[Tensor, "n n"]) -> str:
    return base64.b64encode(weights.numpy().astype("<f4").tobytes()).decode("ascii")


def _sample(probabilities: Float[Tensor, "1 vocabulary"], seed: int, step: int) -> int:
    """Sample the token that `qkv.models.generation` samples for the first item of a batch at this step."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, 0)).generate_state(1)[0]))
    for _ in range(step):  # each earlier step consumed one number
        torch.rand(1, generator=generator, dtype=torch.float64)
    return int(Sampler().draw(probabilities, [generator]))

"""`study` measures a model, and `result` gives the stored study of a bundled one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from jaxtyping import Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import bar
from qkv._untrusted import load_json
from qkv.errors import InputError, nearest, refusing
from qkv.models.loading import load_model
from qkv.profiler.capture.probes import weights_hash
from qkv.runs.run import versions
from qkv_lab.experiments.evidence import Verdict
from qkv_lab.log import finite
from research.sinks.criteria import Sinks
from research.sinks.measure import Kept, measure
from research.sinks.subject import CHOICE, JUDGED, SHORT, Subject, default_texts, evaluated, prepared

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORM = "qkv sinks 1"
"""The form of the files; it changes when a reader of the old form would misread the new one."""


@dataclass(frozen=True)
class Study:
    """The sinks of one model."""

    attrs: Mapping[str, Any]
    """Facts about the run: model, parameters, whether it is causal, versions, seconds."""
    lengths: Mapping[int, Mapping[str, Any]]
    """All measurements by the length of the texts in tokens: see `research.sinks.measure.measure`."""

    @property
    def verdicts(self) -> dict[int, list[Verdict]]:
        """The verdict on each claim, by the length of the texts in tokens."""
        return {n: made.conclude(made.results) for n, made in self._judged.items()}

    @property
    def _judged(self) -> dict[int, Sinks]:
        return {n: Sinks(found, self.attrs["model"]) for n, found in self.lengths.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, lists and strings: the content of the file that `save` writes."""
        return {
            "form": FORM,
            "attrs": dict(self.attrs),
            "verdicts": [{"tokens": n, **finite(v.as_dict())} for n, found in self.verdicts.items() for v in found],
            "lengths": [dict(found) for found in self.lengths.values()],
        }

    def save(self, file: str | Path) -> None:
        """Write measurements and verdicts as JSON."""
        write_atomically(Path(file), json.dumps(self.as_dict(), allow_nan=False) + "\n")

    @staticmethod
    def load(file: str | Path) -> Study:
        """Read a file of `save`; the verdicts follow from its measurements."""
        with refusing(f"file: cannot read {file} as JSON ({{}})", OSError, ValueError):
            data = load_json(Path(file))
        if not isinstance(data, dict) or data.get("form") != FORM:
            raise InputError(f"file is {str(file)!r}, expected one that Study.save wrote, of the form {FORM!r}")
        with refusing(f"file: {str(file)!r} is a damaged study ({{}})"):
            found = Study(data["attrs"], {one["tokens"]: one for one in data["lengths"]})
            with np.errstate(invalid="raise", over="raise"):  # a measurement that is infinite or no number
                _ = found.verdicts  # they read all measurements
            return found

    def figure(self) -> Figure:
        """The effects of every claim at the first length, and the magnitudes by depth."""
        made = next(iter(self._judged.values()))
        return made.figure(made.results)


RESULTS = Path(__file__).parent / "results"
NAMES = ("qkv-mini", "minilm", "smollm2")


def stored(name: str) -> Study:
    """The stored study of ``"qkv-mini"``, ``"minilm"`` or ``"smollm2"``."""
    if name not in NAMES:
        raise InputError(f"name is {name!r}, expected one of {', '.join(map(repr, NAMES))}{nearest(name, NAMES)}")
    return Study.load(RESULTS / f"{name}.json")


def result(name: str) -> dict[str, Any]:
    """The stored study of a model as plain data: ``attrs``, ``verdicts`` and ``lengths``, see `Study.as_dict`.

    >>> sorted(result("minilm"))
    ['attrs', 'form', 'lengths', 'verdicts']
    """
    return stored(name).as_dict()


def study(
    model: nn.Module | str,
    texts: str | Sequence[str] | Int[Tensor, "t n"] | None = None,
    *,
    tokenizer: Any = None,
    file: Path | None = None,
    progress: bool = True,
    name: str = "",
) -> Study:
    """Judge the claims about attention sinks on a trained model, at 64 tokens and over the whole text.

    The model runs on 16 texts: on 4, which choose the sink heads, and on 12, of which each gives one value for the
    interval of each effect. docs/howto/sinks-of-a-model.md defines all measurements.

    Args:
        model: qkv's `DecoderLM` or a decoder or encoder of Hugging Face; or a name or folder for `qkv.load`.
        texts: texts from which 16 windows of up to 512 tokens are cut; or token ids (texts, length). By default files
            that qkv-mini was not trained on, and for any other model chapters of the Python language reference.
        tokenizer: converts texts to ids; if `model` is a name, its tokenizer is loaded.
        file: keeps the texts that are measured, so that an interrupted study resumes; it is removed at the end.
        progress: show a progress bar with the time that is left, if standard error is a terminal.
        name: of the model, kept in the attributes.

    >>> import torch
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=50, context=64, d_model=16, layers=1, heads=2))
    >>> found = study(model, torch.randint(50, (16, 64)), progress=False)
    >>> {verdict.claim: verdict.holds for verdict in found.verdicts[64]}["C061"]
    'does not hold'
    """
    started = time.perf_counter()
    if isinstance(model, str):
        loaded = load_model(model, head=None)
        texts = default_texts(model) if texts is None else texts
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    if texts is None:
        raise InputError("texts is None, expected texts or token ids, unless the model is given by its name")
    windows = prepared(model, [texts] if isinstance(texts, str) else texts, tokenizer)
    whole = windows.windows.shape[1]
    lengths = sorted({SHORT, whole})
    key = "" if file is None else f"{weights_hash(model)}:{xxhash.xxh3_128_hexdigest(windows.windows.numpy().data)}"
    done = Kept(file, key)
    with evaluated(model), bar(f"studying {name}".strip(), "texts", show=progress) as step:
        step(0, of=1.5 * JUDGED * len(lengths))
        subject = Subject.of(model, windows.of(SHORT)[:1])
        found = {n: measure(subject, windows, n, step, done) for n in lengths}
    attrs = {
        "model": name or type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": len(subject.blocks),
        "causal": subject.causal,
        "special_first": bool(windows.special.before),
        "texts": {"choice": CHOICE, "judged": JUDGED, "tokens": whole},
        "versions": versions(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if file is not None:
        file.unlink(missing_ok=True)
    return Study(attrs, found)

"""Everything that is measured on a model at one length. Results are plain numbers and lists, ready for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import Step
from research.sinks import effects
from research.sinks.criteria import SINK, geometric, ratio
from research.sinks.effects import HeadNumber, Magnitudes, Rows
from research.sinks.subject import CHOICE, JUDGED, Subject, Texts, self_attention, untrained

DRAWS = 4
"""Other first tokens, and sets of random dimensions, per text."""
CHANGES = 2
"""Tokens by which the one in the middle is replaced."""
INITIALISATIONS = 3
"""Models with random weights; the texts take turns."""

Found = dict[str, Any]


class Kept(dict[tuple[int, int], Found]):
    """The measurements of texts, by length and number, in a file from which an interrupted study resumes.

    Args:
        file: None to keep nothing.
        key: changes with the model and the texts; the measurements of others are not read.
    """

    def __init__(self, file: Path | None = None, key: str = "") -> None:
        self.file, self.key = file, key
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
        super().__init__({(row["tokens"], row["text"]): row["found"] for row in rows if row["key"] == key})

    def keep(self, of: tuple[int, int], found: Found) -> None:
        """Add the measurements of one text."""
        if of in self:
            return
        self[of] = found
        if self.file is not None:
            rows = ({"key": self.key, "tokens": n, "text": text, "found": one} for (n, text), one in self.items())
            write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Chosen:
    """What the texts that choose say about a model at one length."""

    alpha: list[list[float]]
    """By layer and head."""
    heads: list[HeadNumber]
    """The sink heads."""
    strongest: HeadNumber
    depth: int
    """The depth behind a block at which the largest magnitude of the first token is largest, over the median."""
    peaks: dict[int, list[int]]
    """The peaks that blocks write."""
    all_peaks: dict[int, list[int]]
    """With those that are in the embedding."""

    @staticmethod
    def of(subject: Subject, ids: Int[Tensor, "t n"]) -> Chosen:
        """Choose heads and dimensions by the means over these texts."""
        recording = subject.record(ids)
        alpha = [Rows.of(observed.call).alpha.mean(0).tolist() for observed in recording.calls]
        by_head = {(layer, head): x for layer, row in enumerate(alpha) for head, x in enumerate(row)}
        heads = [head for head, x in by_head.items() if x > SINK]
        strongest = max(by_head, key=by_head.__getitem__)
        depth = max(range(1, len(recording.states)), key=lambda depth: _massive(recording.states[depth]))
        of_blocks, every = (effects.peaks(recording.states, written=written) for written in (True, False))
        return Chosen(alpha, heads, strongest, depth, of_blocks, every)

    @property
    def later_heads(self) -> list[HeadNumber]:
        """The sink heads in blocks whose input has peaks, and in those behind."""
        return [(layer, head) for layer, head in self.heads if layer >= min(self.peaks, default=math.inf)]


def measure(subject: Subject, texts: Texts, n: int, step: Step, done: Kept) -> Found:
    """Measure a model at a length of n tokens.

    Args:
        subject: the model.
        texts: the texts.
        n: number of tokens.
        step: advances the progress bar.
        done: keeps the texts that are finished, and has those of an interrupted run.

    Returns:
        ``tokens``, the fields of `Chosen`, and ``texts``: for each judged text the results of `of_text`, and those of
        `of_untrained` as ``untrained``.
    """
    ids = texts.of(n)
    chosen = Chosen.of(subject, ids[:CHOICE])
    weights = effects.output_weights(subject, ids[:1])
    found = []
    for text in range(CHOICE, CHOICE + JUDGED):
        of_this = done.get((n, text)) or of_text(subject, chosen, texts, n, text, weights)
        done.keep((n, text), of_this)
        found.append(of_this)
        step(1)
    for seed in range(INITIALISATIONS):
        made = untrained(subject.model, seed)
        for text in range(seed, JUDGED, INITIALISATIONS):
            found[text]["untrained"] = of_untrained(made, ids[CHOICE + text][None])
            step(0.5)
    return {"tokens": n, **asdict(chosen), "adds": weights is not None, "texts": found}


def of_text(
    subject: Subject, chosen: Chosen, texts: Texts, n: int, text: int, weights: Sequence[Float[Tensor, "h dv d"]] | None
) -> Found:
    """The measurements of one text; lists are by sink head, in the order of `Chosen.heads`."""
    generator = torch.Generator().manual_seed(text)
    ids = texts.of(n)[text][None]
    recording = subject.record(ids)
    rows = [Rows.of(observed.call) for observed in recording.calls]
    alpha = torch.cat([row.alpha[0] for row in rows])
    layer, head = chosen.strongest
    found: Found = {
        "strongest": float(rows[layer].alpha[0, head]),
        "often": float(rows[layer].share[0, head]),
        "share_of_heads": float((alpha > SINK).double().mean()),
        "sink": [float(rows[layer].alpha[0, head]) for layer, head in chosen.heads],
        "magnitudes": [Magnitudes.of(x[0])._asdict() for x in recording.states],
        "added": [] if weights is None else [asdict(one) for one in effects.added(recording, rows, weights)],
    }
    if not chosen.heads:
        return found
    found["first_key"] = [
        effects.FirstKey.of(recording.calls[layer].call, head)._asdict() for layer, head in chosen.heads
    ]
    first = ids.repeat(DRAWS, 1)
    first[:, 0] = texts.drawn((DRAWS,), generator)
    found["other_first"] = _weights(subject, first, chosen.heads)
    if texts.special.before:
        found["own_first"] = _weights(subject, texts.without_special(n)[text][None], chosen.heads)[0]
    found["random"] = _weights(subject, texts.random(n, generator)[text][None], chosen.heads)[0]
    if chosen.later_heads:
        kept = torch.stack([rows[layer].alpha[0, head] for layer, head in chosen.later_heads]).mean()
        width = recording.states[0].shape[-1]
        found["peaks"] = {"kept": float(kept), **_without_peaks(subject, chosen, ids, width, generator)}
    if chosen.all_peaks:
        with effects.replaced(subject, chosen.all_peaks, "mean"):
            found["all_peaks"] = _weights(subject, ids, chosen.heads)[0]
    found["moved"] = _moved(subject, chosen.heads, ids, texts, generator)
    found["cost"] = effects.cost(subject, ids, chosen.heads)
    return found


def of_untrained(model: nn.Module, ids: Int[Tensor, "1 n"]) -> Found:
    """The largest α of any head, and the mean uniformity of the rows of all heads."""
    rows = [Rows.of(observed.call) for observed in self_attention(model, ids)]
    return {
        "largest": max(float(row.alpha.max()) for row in rows),
        "uniformity": float(torch.cat([row.uniformity[0] for row in rows]).mean()),
    }


def _massive(states: Float[Tensor, "t n d"]) -> float:
    """The largest magnitude of the first token over the median: the mean over texts."""
    found = map(Magnitudes.of, states)
    return geometric([ratio(one.first, one.median) for one in found])


def _weights(subject: Subject, ids: Int[Tensor, "b n"], heads: Sequence[HeadNumber]) -> list[float]:
    """The mean α of some heads, by text."""
    rows = [Rows.of(observed.call) for observed in self_attention(subject.model, ids)]
    return torch.stack([rows[layer].alpha[:, head] for layer, head in heads]).mean(0).tolist()


def _without_peaks(subject: Subject, chosen: Chosen, ids: Tensor, width: int, generator: torch.Generator) -> Found:
    """The mean α of the later sink heads without the peaks, and without random dimensions."""

    def weight(dimensions: effects.Dimensions, by: effects.By) -> float:
        with effects.replaced(subject, dimensions, by):
            return _weights(subject, ids, chosen.later_heads)[0]

    control = [weight(effects.others(chosen.peaks, width, generator), "mean") for _ in range(DRAWS)]
    return {
        "heads": len(chosen.later_heads),
        "mean": weight(chosen.peaks, "mean"),
        "zero": weight(chosen.peaks, "zero"),
        "control": sum(control) / DRAWS,
    }


def _moved(
    subject: Subject, heads: Sequence[HeadNumber], ids: Tensor, texts: Texts, generator: torch.Generator
) -> Found:
    """How far a change of the token in the middle moves the others, with the sink and without."""
    position = ids.shape[1] // 2
    changed = ids.repeat(1 + CHANGES, 1)
    ordinary = texts.ordinary[texts.ordinary != ids[0, position]]
    changed[1:, position] = ordinary[torch.randint(len(ordinary), (CHANGES,), generator=generator)]
    with subject.keeping() as outputs:
        with_sink = effects.movement(subject, changed, position)
    with effects.removed(subject, heads, outputs, masked=True, zero_value=False):
        return {"with": with_sink, "without": effects.movement(subject, changed, position)}

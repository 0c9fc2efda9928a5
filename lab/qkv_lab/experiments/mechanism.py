"""Experiments: the mechanism of a sink, and over-mixing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import qkv
from qkv import kernels
from qkv.edits import HideFirst
from qkv.errors import InputError
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler.capture.residual import TIMES_MEDIAN, attention_modules, observe_residual
from qkv_lab import heads
from qkv_lab.experiments import small
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Outcome, Results
from qkv_lab.experiments.small import DATED, SINK, Change, Sweep, has_sink, not_learnt, setting
from qkv_lab.task import Measured
from qkv_lab.tasks.backcopy import Backcopy

TEXTS = 16
PEAK = 10.0
"""A magnitude above this multiple of the text's median is a peak."""
DRAINED = 0.5
"""A value is drained if its norm is below this multiple of the others' mean norm."""
NEARLY_ALL = 0.9
ONE, THREE = "1 layer", "3 layers"


class Mechanism(Sweep):
    """Models of one and three layers. With three, an early layer can write a peak that later keys use."""

    name = "mechanism"
    question = "Which properties of the first token make it a sink: its value, the angle of its key, its residual?"
    seeds = 40
    criteria = (
        Criterion("C067", DATED, "Largest magnitude of the hidden states at the first token over the median magnitude "
                  "in the text", TIMES_MEDIAN, ratio=True),
        Criterion("C068", DATED, "Norm of the first value over the mean of the others, in the head with the strongest "
                  "sink", DRAINED, above=False),
        Criterion("C069", DATED, "Share of queries for which, of all visible keys, the first has the smallest angle, "
                  "in the head with the strongest sink", NEARLY_ALL),
        Criterion("C073", DATED, "Weight on the first token when what earlier layers wrote there is removed in the "
                  f"dimensions whose magnitude is above {PEAK:g} times the median", SINK, above=False),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {ONE: Change(), THREE: Change(model={"layers": 3})}

    def measure(self, model: Any, setting: Setting) -> Measured:
        """Measurements in the layer of the strongest head.

        ``nearest``: share of queries, from the third on, whose cosine with the first key is larger than with any other
        visible key. ``peaks``: the number of dimensions of the layer's input that are peaks at the first token because
        of earlier layers; ``without_peaks``: the head's weight on the first token when they have the values of the
        embedding there.
        """
        task: Any = setting.task
        ids = task.held_out(TEXTS)["ids"]
        first = heads.weights(model, ids)["first"]
        layer, head = small.argmax_head(first[..., 1:].mean((0, 3)))
        calls: list[Any] = []
        with kernels.watching(lambda call, _: calls.append(call)):
            states = residual_stream(model, ids)
        x, embedded, call = states[layer], states[0], calls[layer]
        size, written = x.abs(), (x - embedded).abs()
        high = (size[:, 0].mean(0) > PEAK * size.median()) & (written[:, 0].mean(0) > size[:, 0].mean(0) / 2)

        def remove(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed = given[0].clone()
            changed[:, 0, high] = embedded[:, 0, high]
            return (changed, *given[1:])

        with model.blocks[layer].register_forward_pre_hook(remove):
            left = heads.weights(model, ids)["first"][:, layer, head, 1:]
        return {
            "layer": layer,
            "nearest": nearest_first(call.q[:, head], call.k[:, head // (call.q.shape[1] // call.k.shape[1])]),
            "peaks": int(high.sum()),
            "without_peaks": float(left.mean()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per depth, if models of that depth learn the task and have a sink."""
        found: dict[str, list[Effect]] = {criterion.claim: [has_sink(results, ONE)] for criterion in self.criteria}
        found["C067"] = [
            Effect(f"the ratio with {ONE}", results.values(ONE, "check.massive"), bound=PEAK, premise=True)
        ]
        for variant in self.variants:
            why = not_learnt(results, variant)
            peaks = results.by_seed(variant, "measured.peaks")
            left = results.by_seed(variant, "measured.without_peaks")[peaks > 0]
            few = f"earlier layers write a peak in {len(left)} of {len(peaks)} runs"
            for claim, values, reason in (
                ("C067", results.values(variant, "check.massive"), why),
                ("C068", list(results.by_seed(variant, _drain)), why),
                ("C069", results.values(variant, "measured.nearest"), why),
                ("C073", list(left), why or (few if len(left) < max(2, len(peaks) / 2) else "")),
            ):
                found[claim].append(Effect(variant, values, unless=reason))
        return found


def _drain(outcome: Outcome) -> float:
    """The norm of the first value over the mean of the others, in the strongest head."""
    layer, head = small.strongest_head(outcome)
    return float(outcome.check["value_drain"][layer][head])


def nearest_first(q: Float[Tensor, "b n d"], k: Float[Tensor, "b n d"]) -> float:
    """The share of causal queries, from the third on, for which the first key has the largest cosine.

    >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]]])
    >>> nearest_first(torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.5], [-1.0, 0.1]]]), keys)
    0.5
    """
    unit = nn.functional.normalize
    cosine = unit(q, dim=-1) @ unit(k, dim=-1).mT
    n = cosine.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    best = cosine.masked_fill(hidden, -torch.inf).argmax(-1)[:, 2:]
    return float((best == 0).double().mean())


MIXED, CHANGED = 64, 8  # held-out texts, and the position where they are changed
RESTING, LIGHT = 0.7, 0.3  # thresholds of the weight on the first key (mean over heads): resting and active rows
TIMES = 1.5  # least ratio of the movement without the sink to that with it, for C074 and C077
BARELY, LITTLE = 0.05, 0.1  # thresholds relative to a representation's norm: of movement, and of added output
CASES = ("sink kept", "sink hidden", "untrained")
TRAINED = "trained"


class Overmixing(Experiment):
    """Bigram-Backcopy with three layers: changes one byte, and measures the tokens that do not depend on it."""

    name = "overmixing"
    question = "Does the sink keep a changed token from moving the representations of the other tokens?"
    seeds = 20
    criteria = (
        Criterion("C074", DATED, "Movement of tokens that do not depend on a changed token, with the first key masked "
                  "(rows renormalised), over that with it", TIMES, ratio=True,
                  remark="Movement at the last layer, as a share of the norm, with the sink: "
                         "{measured.far.sink kept of trained}; with it masked: {measured.far.sink hidden of trained}; "
                         "untrained: {measured.far.untrained of trained}."),
        Criterion("C076", DATED, "Norm of what attention adds over that of the residual stream, on rows with more "
                  f"than {RESTING} of their weight on the first key, in the layer with the greatest sink", LITTLE,
                  above=False,
                  remark=f"On rows of that layer with less than {LIGHT} it is {{measured.added_light of trained}}."),
        Criterion("C077", DATED, "Movement of tokens that do not depend on a changed token", BARELY, above=False,
                  parts=True),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model; the cases without a sink and without training are derived from it."""
        config = DecoderConfig(layers=3, heads=1, d_model=64)
        return {TRAINED: setting(Backcopy(model=config), seed, quick, steps=600, lr=6e-3)}

    def measure(self, model: Any, setting: Setting) -> Measured:
        """Movement by layer and token in each case, and the relative norm of the attention output.

        ``moved`` has lists (layer, position); layer 0 is the embeddings. ``far`` is the mean at the last layer over the
        tokens at least two after the changed one, whose predictions do not depend on it.
        """
        task: Any = setting.task
        ids, changed = changed_texts(task)
        with torch.random.fork_rng():
            torch.manual_seed(setting.training.seed)
            untrained = task.build().to(model.embedding.weight.device).eval()
        moved = {
            "sink kept": movement(model, ids, changed),
            "sink hidden": movement(model, ids, changed, mask_first=True),
            "untrained": movement(untrained, ids, changed),
        }
        first = heads.weights(model, ids)["first"].mean(2)  # (text, layer, query)
        weight, ratio = np.moveaxis(first, 1, 0)[..., 2:], output_ratio(model, ids)[..., 2:]  # (layer, text, query)
        greatest = int(weight.mean((1, 2)).argmax())
        heavy, light = weight[greatest] > RESTING, weight[greatest] < LIGHT
        return {
            "moved": {case: x.tolist() for case, x in moved.items()},
            "far": {case: float(x[-1, CHANGED + 2 :].mean()) for case, x in moved.items()},
            "sink": float(weight.mean((1, 2)).max()),
            "layer": greatest,
            "added_heavy": float(ratio[greatest][heavy].mean()) if heavy.any() else None,
            "added_light": float(ratio[greatest][light].mean()) if light.any() else None,
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        kept, hidden = (results.by_seed(TRAINED, f"measured.far.{case}") for case in CASES[:2])
        why = not_learnt(results, TRAINED)
        seen = Effect(
            "the weight on the first key in the layer with the greatest sink",
            results.values(TRAINED, "measured.sink"), bound=heads.THRESHOLD, above=True, premise=True,
        )  # fmt: skip
        ratio = list(hidden / kept)
        heavy = [o.measured["added_heavy"] for o in results.finished(TRAINED)]
        return {
            "C074": [seen, Effect("", ratio, unless=why)],
            "C076": [seen, Effect("", [x for x in heavy if x is not None], unless=why)],
            "C077": [
                seen,
                Effect("with the sink", list(kept), unless=why),
                Effect("with the first key masked, times as far", ratio, unless=why, bound=TIMES, above=True),
            ],
        }

    def lines(self, results: Results) -> Lines:
        moved = {case: results.rows(TRAINED, f"measured.moved.{case}") for case in CASES}
        found = {case: x[..., CHANGED + 2 :].mean(-1) for case, x in moved.items()}  # (seed, layer)
        layers = range(found[CASES[0]].shape[1])
        return Lines(layers, found, "layer (0: embeddings)", "movement over norm, later tokens")


def changed_texts(task: Backcopy) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Held-out texts with an ordinary byte at position `CHANGED`, and copies with another ordinary byte there."""
    ids = task.held_out(2 * MIXED)["ids"]
    ids = ids[~task.is_trigger(ids[:, CHANGED])][:MIXED]
    ordinary = torch.tensor([0, *range(task.triggers + 1, task.symbols)])
    at = torch.searchsorted(ordinary, ids[:, CHANGED].contiguous())
    step = torch.randint(1, len(ordinary), at.shape, generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, CHANGED] = ordinary[(at + step) % len(ordinary)]
    return ids, changed


@torch.no_grad()
def movement(
    model: DecoderLM, ids: Int[Tensor, "b n"], changed: Int[Tensor, "b n"], *, mask_first: bool = False
) -> Float[np.ndarray, "layers n"]:
    """The mean over texts of ‖x′ − x‖ / ‖x‖, where x and x′ are representations of two texts at the same position.

    Args:
        model: the model whose residual stream is compared: the embeddings, and the output of every layer.
        ids: texts.
        changed: changed texts of the same shape.
        mask_first: mask the first key for all queries but the first.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2)).eval()
    >>> movement(model, torch.tensor([[0, 1, 2]]), torch.tensor([[0, 3, 2]]))[:, 0].tolist()
    [0.0, 0.0]
    """
    if ids.shape != changed.shape:
        raise InputError(f"changed has shape {tuple(changed.shape)}, expected that of ids, {tuple(ids.shape)}")
    heads = [(layer, head) for layer in range(len(model.blocks)) for head in range(model.config.heads)]
    with qkv.edit(model, dict.fromkeys(heads, HideFirst())) if mask_first else nullcontext():
        before, after = (residual_stream(model, x) for x in (ids, changed))
    moved: np.ndarray = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean(1).cpu().numpy()
    return moved


@torch.no_grad()
def residual_stream(model: DecoderLM, ids: Int[Tensor, "b n"]) -> Float[Tensor, "layers b n d"]:
    """The residual stream: the embeddings, and the output of every layer."""
    found: list[Tensor] = []
    with observe_residual(model, attention_modules(model), lambda _, __, x: found.append(x)):
        model(ids.to(model.embedding.weight.device))
    return torch.stack(found)


@torch.no_grad()
def output_ratio(model: DecoderLM, ids: Int[Tensor, "b n"]) -> Float[np.ndarray, "layers b n"]:
    """The norm of each layer's attention output divided by that of the residual stream to which it is added."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        for block in model.blocks:
            stack.callback(
                block.get_submodule("attention").register_forward_hook(lambda _, __, x: found.append(x)).remove
            )
        before = residual_stream(model, ids)[:-1]
    ratio: np.ndarray = (torch.stack(found).norm(dim=-1) / before.norm(dim=-1)).cpu().numpy()
    return ratio

"""Experiment on over-mixing: how far one changed token moves the representations of the others, with and without a sink
(Barbero et al. 2025, arXiv:2504.02732)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.masks import Dense
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab import track
from qkv_lab.experiments.base import Experiment, Results, Setting
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict, number
from qkv_lab.experiments.sinks import DATED, not_learnt
from qkv_lab.task import Measured
from qkv_lab.tasks.backcopy import Backcopy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS, CHANGED = 64, 8  # held-out texts, and the position where they are changed
HEAVY, LIGHT = 0.7, 0.3  # thresholds of the weight on the first key (mean over heads): resting and active rows
TIMES = 1.5  # least ratio of the movement without the sink to that with it, for C074 and C077
BARELY, LITTLE = 0.05, 0.1  # thresholds relative to a representation's norm: of movement, and of added output
CASES = ("sink kept", "sink hidden", "untrained")
TRAINED = "trained"


class Overmixing(Experiment):
    """Bigram-Backcopy with three layers: changes one byte, and measures the tokens that do not depend on it."""

    name = "overmixing"
    question = "Does the sink keep a changed token from moving the representations of the other tokens?"
    criteria = (
        Criterion("C074", DATED, "Movement of tokens that do not depend on a changed token, with the first key masked "
                  "(rows renormalised), over that with it", TIMES, ratio=True),
        Criterion("C076", DATED, "Norm of what attention adds over that of the residual stream, on rows with more "
                  f"than {HEAVY} of their weight on the first key, in the layer with the greatest sink", LITTLE,
                  above=False),
        Criterion("C077", DATED, "Movement of tokens that do not depend on a changed token", BARELY, above=False,
                  parts=True),
    )  # fmt: skip
    looks = (10, 20)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model; the cases without a sink and without training are derived from it."""
        config = DecoderConfig(layers=3, heads=1, d_model=64)
        some: dict[str, Any] = (
            {"steps": 30, "warmup": 10} if quick else {"steps": 600, "lr": 6e-3, "evaluate_every": 600}
        )
        return {TRAINED: Setting(Backcopy(model=config), replace(Backcopy.training(), seed=seed, **some))}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Movement by layer and token in each case, and the relative norm of the attention output.

        ``moved`` has lists (layer, position); layer 0 is the embeddings. ``far`` is the mean at the last layer over the
        tokens at least two after the changed one, whose predictions do not depend on it.
        """
        assert isinstance(model, DecoderLM)
        assert isinstance(setting.task, Backcopy)
        ids, changed = changed_texts(setting.task)
        with torch.random.fork_rng():
            torch.manual_seed(setting.training.seed)
            untrained = setting.task.build().to(model.embedding.weight.device).eval()
        moved = {
            "sink kept": movement(model, ids, changed),
            "sink hidden": movement(model, ids, changed, mask_first=True),
            "untrained": movement(untrained, ids, changed),
        }
        first = track.weights(model, ids)["first"].mean(2)  # (text, layer, query)
        added = output_ratio(model, ids)  # (layer, text, query)
        weight, ratio = np.moveaxis(first, 1, 0)[..., 2:], added[..., 2:]  # (layer, text, query)
        greatest = int(weight.mean((1, 2)).argmax())
        heavy, light = weight[greatest] > HEAVY, weight[greatest] < LIGHT
        return {
            "moved": {case: x.tolist() for case, x in moved.items()},
            "far": {case: float(x[-1, CHANGED + 2 :].mean()) for case, x in moved.items()},
            "sink": float(weight.mean((1, 2)).max()),
            "layer": greatest,
            "heavy_rows": float(heavy.mean()),
            "added_heavy": float(ratio[greatest][heavy].mean()) if heavy.any() else None,
            "added_light": float(ratio[greatest][light].mean()) if light.any() else None,
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the movement of later tokens, and the norm of the attention output."""
        kept, hidden = (results.by_seed(TRAINED, f"measured.far.{case}") for case in CASES[:2])
        why = not_learnt(results, TRAINED)
        seen = Effect(
            "the weight on the first key in the layer with the greatest sink", results.values(TRAINED, "measured.sink"),
            (TRAINED,), bound=track.THRESHOLD, above=True, premise=True,
        )  # fmt: skip
        ratio = [hidden[seed] / kept[seed] for seed in kept]
        heavy = [o.measured["added_heavy"] for o in results.finished(TRAINED)]
        return {
            "C074": [seen, Effect("", ratio, (TRAINED,), unless=why)],
            "C076": [seen, Effect("", [x for x in heavy if x is not None], (TRAINED,), unless=why)],
            "C077": [
                seen,
                Effect("with the sink", list(kept.values()), (TRAINED,), unless=why),
                Effect(
                    "with the first key masked, times as far", ratio, (TRAINED,), unless=why, bound=TIMES, above=True
                ),
            ],
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The movements themselves, and what attention adds on other rows of the same layer."""
        far = {case: number(float(np.mean(results.values(TRAINED, f"measured.far.{case}")))) for case in CASES}
        light = [o.measured["added_light"] for o in results.finished(TRAINED) if o.measured["added_light"] is not None]
        added = f"On rows of that layer with less than {LIGHT} it is {number(float(np.mean(light)))}." if light else ""
        moved = "; ".join(f"{case}: {value}" for case, value in far.items())
        return {"C074": f"Movement at the last layer, as a share of the norm: {moved}.", "C076": added}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """How much further a changed token moves the others without the sink."""
        kept, hidden = (results.by_seed(TRAINED, f"measured.far.{case}") for case in CASES[:2])
        ratio = number(geometric_mean([hidden[seed] / kept[seed] for seed in kept]))
        so = "" if verdicts["C074"].holds == HOLDS else f"; at least {TIMES} was expected, which is not shown"
        return f"With the sink masked a changed token moves the others {ratio} times as far{so} ({results.seeds} seeds)"

    def figure(self, results: Results) -> Figure:
        """The movement by position at the last layer, and by layer."""
        from qkv_lab import draw

        note = (
            f"Bigram-Backcopy, 3 layers × 1 head, {TEXTS} held-out texts; the byte at position {CHANGED} is changed. "
            "Later "
            f"tokens but the next one have no use for it. {results.note}"
        )
        figure, (by_position, by_layer) = draw.panels(
            self.conclude(results).title, note, columns=2, width=7.6, height=3.0
        )
        found = {
            case: np.array([o.measured["moved"][case] for o in results.finished(TRAINED)]) for case in CASES
        }  # (seed, layer, position)
        n = found[CASES[0]].shape[2]
        far = {case: 100 * x[:, -1, CHANGED + 2 :] for case, x in found.items()}
        draw.curves(by_position, range(CHANGED + 2, n), far)
        by_position.set(xlabel="position (tokens)", ylabel="moved at the last layer (% of the norm)", ylim=(0, None))
        layers = range(found[CASES[0]].shape[1])
        draw.curves(
            by_layer, layers, {case: 100 * x[..., CHANGED + 2 :].mean(-1) for case, x in found.items()}, markers=True
        )
        by_layer.set(xlabel="layer (0: embeddings)", ylabel="moved, mean of later tokens (%)", ylim=(0, None))
        by_layer.set_xticks(list(layers))
        by_layer.legend(fontsize=8, frameon=False)
        return figure


def geometric_mean(values: Sequence[float]) -> float:
    """e to the mean of the logarithms; NaN without values.

    >>> round(geometric_mean([1.0, 4.0]), 6)
    2.0
    """
    return float(np.exp(np.mean(np.log(values)))) if len(values) else float("nan")


def changed_texts(task: Backcopy) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Held-out texts with an ordinary byte at position `CHANGED`, and copies with another ordinary byte there."""
    ids = task.held_out(2 * TEXTS)["ids"]
    ids = ids[~task.is_trigger(ids[:, CHANGED])][:TEXTS]
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
    with first_key_masked(model, ids.shape[1]) if mask_first else ExitStack():
        before, after = (residual_stream(model, x) for x in (ids, changed))
    moved: np.ndarray = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean(1).cpu().numpy()
    return moved


@torch.no_grad()
def residual_stream(model: DecoderLM, ids: Int[Tensor, "b n"]) -> Float[Tensor, "layers b n d"]:
    """The residual stream: the embeddings, and the output of every layer."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        stack.callback(model.blocks[0].register_forward_pre_hook(lambda _, given: found.append(given[0])).remove)
        for block in model.blocks:
            stack.callback(block.register_forward_hook(lambda _, __, x: found.append(x)).remove)
        model.hidden(ids.to(model.embedding.weight.device))
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


@contextmanager
def first_key_masked(model: DecoderLM, n: int) -> Iterator[None]:
    """Inside, the first key is masked for all queries but the first, in texts of `n` tokens."""
    visible = torch.ones(n, n, dtype=torch.bool, device=model.embedding.weight.device)
    visible[1:, 0] = False
    mask = Dense(visible)

    def add_mask(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return given, {**named, "mask": mask}

    with ExitStack() as stack:
        for block in model.blocks:
            stack.callback(block.register_forward_pre_hook(add_mask, with_kwargs=True).remove)
        yield

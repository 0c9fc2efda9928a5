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
from qkv.lab import track
from qkv.lab.experiments.base import Conclusion, Experiment, Results, Setting, Verdict, holds_if, larger, summary
from qkv.lab.task import Measured
from qkv.lab.tasks.backcopy import Backcopy
from qkv.masks import Dense
from qkv.models import DecoderConfig, DecoderLM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS, CHANGED = 64, 8  # held-out texts, and the position where they are changed
HEAVY, LIGHT = 0.7, 0.3  # thresholds of the weight on the first key (mean over heads): resting and active rows
TIMES = 1.5  # least ratio of the movement without the sink to that with it, for C074 and C077
BARELY, LITTLE = 0.05, 0.1  # thresholds relative to a representation's norm: of movement, and of added output
CASES = ("sink kept", "sink hidden", "untrained")


class Overmixing(Experiment):
    """Bigram-Backcopy with three layers: changes one byte, and measures the tokens that do not depend on it."""

    name = "overmixing"
    question = "Does the sink keep a changed token from moving the representations of the other tokens?"
    claims = ("C074", "C076", "C077")

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """One model; the cases without a sink and without training are derived from it."""
        config = DecoderConfig(layers=3, heads=1, d_model=64)
        some: dict[str, Any] = (
            {"steps": 30, "warmup": 10} if quick else {"steps": 600, "lr": 6e-3, "evaluate_every": 600}
        )
        return {
            "trained": [
                Setting(Backcopy(model=config), replace(Backcopy.training(), seed=seed, **some))
                for seed in range(1 if quick else 3)
            ]
        }

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
        rows = np.moveaxis(first, 1, 0)[..., 2:], added[..., 2:]
        heavy, light = rows[0] > HEAVY, rows[0] < LIGHT
        return {
            "moved": {case: x.tolist() for case, x in moved.items()},
            "far": {case: float(x[-1, CHANGED + 2 :].mean()) for case, x in moved.items()},
            "sink": float(rows[0].mean((1, 2)).max()),
            "heavy_rows": float(heavy.mean()),
            "added_heavy": float(rows[1][heavy].mean()) if heavy.any() else 0.0,
            "added_light": float(rows[1][light].mean()) if light.any() else 0.0,
        }

    def conclude(self, results: Results) -> Conclusion:
        """By the movement of later tokens, and the norm of the attention output."""
        far = {case: results.values("trained", f"measured.far.{case}") for case in CASES}
        kept, hidden = far["sink kept"], far["sink hidden"]
        sink = results.values("trained", "measured.sink")
        seen = min(sink) > track.THRESHOLD
        prevents = larger(hidden, [TIMES * x for x in kept])
        ratio = float(np.mean(hidden)) / max(float(np.mean(kept)), 1e-12)
        heavy = [x for x in results.values("trained", "measured.added_heavy") if x]
        light = [x for x in results.values("trained", "measured.added_light") if x]
        movement_text = (
            f"A changed token moves tokens that do not depend on it by {summary(kept, 3)} of their norm at the last "
            f"layer, and by {summary(hidden, 3)}, {ratio:.1f} times as much, with the first key masked and rows "
            "renormalised"
        )
        sink_text = f"the layer with the greatest sink has {summary(sink)} of its weight on the first key"
        added_text = "No row has that much weight on the first key."
        if heavy:
            added_text = (
                f"On rows with more than {HEAVY} of their weight on the first key attention adds {summary(heavy, 3)} "
                "of the residual's norm"
                + (f", on those with less than {LIGHT} {summary(light, 3)}" if light else "")
                + f". It holds at {LITTLE} or less, for every seed."
            )
        verdicts = [
            Verdict(
                "C074",
                holds_if(prevents, seen=seen),
                f"{movement_text}. It holds if masking makes it more than {TIMES} times as much, beyond the spread "
                f"over seeds; {sink_text}, and without more than {track.THRESHOLD} it could not be seen.",
            ),
            Verdict("C076", holds_if(bool(heavy) and max(heavy) <= LITTLE, seen=seen and bool(heavy)), added_text),
            Verdict(
                "C077",
                holds_if(max(kept) <= BARELY and prevents, seen=seen),
                f"{movement_text}; in the untrained model by {summary(far['untrained'], 3)}. It holds if it is at most "
                f"{BARELY} with the sink, and more than {TIMES} times as much without.",
            ),
        ]
        if not seen:
            title = "These models form no sink that could be masked"
        elif prevents:
            title = f"A changed token moves the others {ratio:.1f} times as far when the sink is masked"
        else:
            title = "A changed token does not move the others much further when the sink is masked"
        return Conclusion(verdicts, title, " ".join(v.text for v in verdicts))

    def figure(self, results: Results) -> Figure:
        """The movement by position at the last layer, and by layer."""
        from qkv.lab import draw

        note = (
            f"Bigram-Backcopy, 3 layers × 1 head, {TEXTS} held-out texts; the byte at position {CHANGED} is changed. "
            "Later "
            f"tokens but the next one have no use for it. {results.note}"
        )
        figure, (by_position, by_layer) = draw.panels(
            self.conclude(results).title, note, columns=2, width=7.6, height=3.0
        )
        found = {
            case: np.array([o.measured["moved"][case] for o in results.finished("trained")]) for case in CASES
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

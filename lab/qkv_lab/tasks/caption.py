"""The task of captioning rendered scenes, with a check whether the model attends to the object that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import InputError
from qkv.models.generation import Sampler, generate
from qkv_lab import scenes
from qkv_lab.models import Captioner, CaptionerConfig
from qkv_lab.scenes import COLOURS, END, PAD, START, TOKEN, VOCABULARY, Scenes
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIDDLE, SCALE = 0.25, 4.0
"""Normalisation of pixel values: `MIDDLE` is subtracted, then the result is multiplied by `SCALE`."""
COLOUR_WORDS = [TOKEN[word] for word in COLOURS]
COLUMNS = 7
"""The number of images in a row of a figure."""


@dataclass(frozen=True)
class Caption:
    """Scenes of a few shapes, described: "red circle blue square".

    All objects of a scene differ in colour and shape, so that the model has to attend to an object to know which shape
    has which colour. The descriptions of held-out scenes never occur in training. The set-up follows Xu et al. 2015
    (arXiv:1502.03044), with a ground truth for every word. Soft attention learns the task. Hard attention (REINFORCE)
    learns to attend to the object that it names, but gets hardly any caption completely right:
    ``--objects 2 --model.attention hard --model.entropy 0.005 --steps 1000 --lr 5e-3``.

    >>> Caption().batch(0, 4, 0)["captions"].shape
    torch.Size([4, 8])
    """

    name: ClassVar[str] = "caption"

    size: int = 40
    """Height and width of an image, in pixels."""
    objects: int = 3
    """The largest number of objects in a scene; all numbers from 1 on are equally frequent."""
    held_out: int = 256
    """The number of held-out scenes for metrics."""
    model: CaptionerConfig = CaptionerConfig(  # noqa: RUF009 (frozen)
        len(VOCABULARY), channels=3, d_features=32, convolutions=2, d_embedding=32, d_hidden=32, d_attention=64,
        gate=False, penalty=0.0,
    )  # fmt: skip
    """The captioner's configuration. Its state is small, so that it has to use attention. The penalty λ of eq. 14 is 0,
    because it rewards equal attention to all cells, most of which show background."""

    def __post_init__(self) -> None:
        if self.size < scenes.LEAST_SIZE:
            raise InputError(f"size is {self.size}, expected at least {scenes.LEAST_SIZE} pixels")
        if not 1 <= self.objects <= scenes.MOST:
            raise InputError(f"objects is {self.objects}, expected 1 to {scenes.MOST}")
        if self.held_out < 1:
            raise InputError(f"held_out is {self.held_out}, expected at least 1 scene")

    @staticmethod
    def training() -> Training:
        """Training settings for soft attention."""
        return Training(steps=1600, batch=64, lr=1e-2, warmup=50, weight_decay=0.0)

    def build(self) -> Captioner:
        """A new model; its weights are drawn from torch's global generator."""
        needed = {"vocab_size": len(VOCABULARY), "channels": 3, "pad": PAD, "start": START, "end": END}
        return Captioner(with_entries(self.model, **needed))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``images`` (size, 3, height, width), centred around 0, and ``captions`` (size, t)."""
        drawn = self._draw(np.random.default_rng((seed, step)), size, held_out=False)
        return {"images": to_input(drawn), "captions": torch.from_numpy(drawn.captions)}

    def count(self, batch: Batch) -> int:
        """The number of tokens after the start token, without padding."""
        return int((batch["captions"][:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The captioner's loss. With hard attention in training it is a REINFORCE surrogate, not a cross-entropy."""
        return model.loss(batch["images"], batch["captions"])  # type: ignore[operator]

    def evaluate(self, model: nn.Module) -> Measured:
        """On held-out scenes: cross-entropy in nats per token, token accuracy, and exact match of greedy captions."""
        held, (images, captions) = self._held_out(model)
        logits, target = model(images, captions[:, :-1]), captions[:, 1:]
        real = target != PAD
        said = greedy_captions(model, images)
        right = [scenes.text(np.array(x)) == scenes.text(c) for x, c in zip(said, held.captions, strict=True)]
        return {
            "loss": F.cross_entropy(logits[real], target[real]).item(),
            "token_accuracy": (logits.argmax(-1) == target)[real].float().mean().item(),
            "exact_match": float(np.mean(right)),
        }

    @torch.no_grad()
    def check(self, model: nn.Module) -> Measured:
        """The attention to the object whose colour or shape is being predicted: see `attention_to_objects`."""
        held, (images, captions) = self._held_out(model)
        weights = model.maps(images, captions[:, :-1]).float().cpu().numpy()  # type: ignore[operator]
        return attention_to_objects(weights, held)

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Two scenes with the attention map of every generated word."""
        held, (images, _) = self._held_out(model)
        number = held.masks.any((2, 3)).sum(1)
        chosen = [int(np.flatnonzero(number == n)[0]) for n in sorted({*number})[-2:]]
        said = greedy_captions(model, images[chosen])
        captions = torch.full((len(chosen), scenes.longest(self.objects)), END, device=images.device)
        for row, words in zip(captions, said, strict=True):
            row[: len(words) + 1] = torch.tensor([START, *words])[: captions.shape[1]]
        weights = model.maps(images[chosen], captions).float().cpu().numpy()  # type: ignore[operator]
        shown = [(held, i, words, maps) for i, words, maps in zip(chosen, said, weights, strict=True)]
        return {"attention": _overlays(shown, self.check(model), self.model.attention)}

    def files(self) -> Mapping[str, str]:
        """The vocabulary, in the order of token numbers."""
        return {"vocabulary.json": json.dumps({"captions": VOCABULARY}, indent=1) + "\n"}

    def _draw(self, rng: np.random.Generator, n: int, *, held_out: bool) -> Scenes:
        return scenes.draw(rng, n, held_out=held_out, size=self.size, most=self.objects)

    def unseen(self) -> Scenes:
        """The held-out scenes."""
        return self._draw(np.random.default_rng(0), self.held_out, held_out=True)

    def _held_out(self, model: nn.Module) -> tuple[Scenes, tuple[Tensor, Tensor]]:
        """The held-out scenes, and their images and captions on the model's device."""
        drawn = self.unseen()
        device = next(model.parameters()).device
        return drawn, (to_input(drawn).to(device), torch.from_numpy(drawn.captions).to(device))


def to_input(drawn: Scenes) -> Float[Tensor, "n 3 size size"]:
    """Images, normalised to a standard deviation near 1; without this the convolutions hardly learn."""
    return (torch.from_numpy(drawn.images) - MIDDLE) * SCALE


def attention_to_objects(weights: Float[np.ndarray, "n t gh gw"], held: Scenes) -> dict[str, float]:
    """Attention to the object being named, over all colour and shape words of the captions.

    Args:
        weights: attention maps; the map of token t predicted token t + 1 (`Captioner.maps`).
        held: the scenes.

    Returns:
        ``mass``: mean weight on the cells that overlap the object, and the same for colour words and shape words alone;
        ``chance``: the mean share of these cells in the grid; ``strongest``: the share of words whose strongest cell is
        one of them.
    """
    caption, word = np.nonzero(held.objects[:, 1:] >= 0)
    maps = weights[caption, word].reshape(len(word), -1)
    stride = round(held.images.shape[-1] / weights.shape[-1])
    cells = scenes.on_grid(held.masks, stride)[caption, held.objects[caption, word + 1]].reshape(maps.shape) > 0
    mass, is_colour = (maps * cells).sum(1), np.isin(held.captions[caption, word + 1], COLOUR_WORDS)
    return {
        "mass": float(mass.mean()),
        "mass_at_colours": float(mass[is_colour].mean()),
        "mass_at_shapes": float(mass[~is_colour].mean()),
        "chance": float(cells.mean()),
        "strongest": float(cells[np.arange(len(maps)), maps.argmax(1)].mean()),
    }


def greedy_captions(model: Any, images: Tensor) -> list[list[int]]:
    """Greedy captions, without start and end tokens."""
    first, greedy = torch.full((len(images), 1), START, device=images.device), Sampler(temperature=0)
    longest = scenes.longest(scenes.MOST)
    return generate(model, model.start(images), first, max_new_tokens=longest, sampling=greedy, end=END)


def _overlays(shown: list[tuple[Scenes, int, list[int], np.ndarray]], found: Measured, kind: str) -> Figure:
    """One image per generated word, darkened where the attention is low, with the named object outlined."""
    from qkv.plot.map import show_image
    from qkv_lab.draw import panels

    rows = [-(-(len(words) + 1) // COLUMNS) for _, _, words, _ in shown]
    title = (
        f"{kind.capitalize()} attention: {found['mass']:.0%} lies on the object being named, "
        f"{found['mass'] / found['chance']:.1f} times chance"
    )
    note = (
        "Held-out scenes with generated captions. Brightness shows the attention with which the word was predicted; "
        "the outline shows the object that the word names, and the number is its share of the attention. Mean share "
        "over all words of the held-out captions: "
        f"{found['mass_at_colours']:.0%} at colours, {found['mass_at_shapes']:.0%} at shapes."
    )
    figure, axes = panels(title, note, columns=COLUMNS, rows=sum(rows), height=1.05)
    for panel in axes:
        panel.set_axis_off()
    first = 0
    for (held, i, words, maps), height in zip(shown, rows, strict=True):
        picture = held.images[i].transpose(1, 2, 0)
        show_image(axes[first], picture, "the image")
        truth = zip(held.captions[i, 1:], held.objects[i, 1:], strict=True)
        for panel, word, weights, (right, thing) in zip(axes[first + 1 :], words, maps, truth, strict=False):
            show_image(panel, picture, VOCABULARY[word], weights, corners=True)
            if word == right and thing >= 0:
                mask = held.masks[i, thing]
                panel.contour(mask, [0.5], colors="white", linewidths=0.9)
                on = scenes.on_grid(mask, round(len(mask) / len(weights))) > 0
                panel.text(0.5, -0.03, f"{weights[on].sum():.0%}", size=7, ha="center", va="top",
                           transform=panel.transAxes)  # fmt: skip
        first += height * COLUMNS
    return figure

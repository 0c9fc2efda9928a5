"""Captions of rendered scenes: does the model look at the object it is naming?"""

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
from qkv.lab import scenes
from qkv.lab.scenes import COLOURS, END, PAD, START, TOKEN, VOCABULARY, Scenes
from qkv.lab.settings import fitted
from qkv.lab.task import Batch, Measured, Training
from qkv.models import Captioner, CaptionerConfig
from qkv.models.generation import generate
from qkv.models.sampling import Sampler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIDDLE, SCALE = 0.25, 4.0
"""What is taken from the value of a pixel, and what the rest is multiplied by, before the model sees it."""
COLOUR_WORDS = [TOKEN[word] for word in COLOURS]
COLUMNS = 7
"""Pictures in a row of a figure."""


@dataclass(frozen=True)
class Caption:
    """Scenes of a few shapes, described: "red circle blue square".

    All objects of a scene differ in colour and shape, so that which shape has which colour must be looked up where it
    is. The descriptions of held-out scenes never occur in training. The set-up is that of Xu et al. 2015
    (arXiv:1502.03044), with the truth about every word. Soft attention learns it; hard attention (REINFORCE) comes to
    look at the object that it names, but hardly a whole caption is right:
    ``--objects 2 --model.attention hard --model.entropy 0.005 --steps 1000 --lr 5e-3``.

    >>> Caption().batch(0, 4, 0)["captions"].shape
    torch.Size([4, 8])
    """

    name: ClassVar[str] = "caption"

    size: int = 40
    """Height and width of an image, in pixels."""
    objects: int = 3
    """In a scene, at most; each number from 1 is as frequent."""
    held_out: int = 256
    """Scenes to evaluate on."""
    model: CaptionerConfig = CaptionerConfig(  # noqa: RUF009 (frozen)
        len(VOCABULARY), channels=3, d_features=32, convolutions=2, d_embedding=32, d_hidden=32, d_attention=64,
        gate=False, penalty=0.0,
    )  # fmt: skip
    """Sizes of the captioner: little memory, so that looking pays. λ of eq. 14 is 0: it asks for equal attention to all
    cells, and most show nothing that is named."""

    def __post_init__(self) -> None:
        if self.size < scenes.LEAST_SIZE:
            raise InputError(f"caption.size is {self.size}, expected at least {scenes.LEAST_SIZE} pixels")
        if not 1 <= self.objects <= scenes.MOST:
            raise InputError(f"caption.objects is {self.objects}, expected 1 to {scenes.MOST}")
        if self.held_out < 1:
            raise InputError(f"caption.held_out is {self.held_out}, expected at least 1 scene")

    @staticmethod
    def training() -> Training:
        """Settings of soft attention."""
        return Training(steps=1600, batch=64, lr=1e-2, warmup=50, weight_decay=0.0)

    def build(self) -> Captioner:
        """The model, with initial weights drawn from torch's generator."""
        needed = {"vocab_size": len(VOCABULARY), "channels": 3, "pad": PAD, "start": START, "end": END}
        return Captioner(fitted(self.model, **needed))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Images (size, 3, height, width), around 0, and captions (size, t)."""
        drawn = self._draw(np.random.default_rng((seed, step)), size, held_out=False)
        return {"images": seen(drawn), "captions": torch.from_numpy(drawn.captions)}

    def count(self, batch: Batch) -> int:
        """Tokens after the first of each caption, without padding."""
        return int((batch["captions"][:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The captioner's own; of hard attention in training mode a number that means little."""
        return model.loss(batch["images"], batch["captions"])  # type: ignore[operator]

    def evaluate(self, model: nn.Module) -> Measured:
        """On held-out scenes: cross-entropy in nats a token, the share of tokens and of whole greedy captions right."""
        held, (images, captions) = self._held_out(model)
        logits, target = model(images, captions[:, :-1]), captions[:, 1:]
        real = target != PAD
        said = _said(model, images)
        right = [scenes.text(np.array(x)) == scenes.text(c) for x, c in zip(said, held.captions, strict=True)]
        return {
            "loss": F.cross_entropy(logits[real], target[real]).item(),
            "token_accuracy": (logits.argmax(-1) == target)[real].float().mean().item(),
            "exact_match": float(np.mean(right)),
        }

    @torch.no_grad()
    def check(self, model: nn.Module) -> Measured:
        """Where the model looks when it names the colour or shape of an object: see `looked`."""
        held, (images, captions) = self._held_out(model)
        weights = model.maps(images, captions[:, :-1]).float().cpu().numpy()  # type: ignore[operator]
        return looked(weights, held)

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Scenes with the attention of every generated word."""
        held, (images, _) = self._held_out(model)
        number = held.masks.any((2, 3)).sum(1)
        chosen = [int(np.flatnonzero(number == n)[0]) for n in sorted({*number})[-2:]]
        said = _said(model, images[chosen])
        captions = torch.full((len(chosen), scenes.longest(self.objects)), END, device=images.device)
        for row, words in zip(captions, said, strict=True):
            row[: len(words) + 1] = torch.tensor([START, *words])[: captions.shape[1]]
        weights = model.maps(images[chosen], captions).float().cpu().numpy()  # type: ignore[operator]
        shown = [(held, i, words, maps) for i, words, maps in zip(chosen, said, weights, strict=True)]
        return {"attention": _overlays(shown, self.check(model), self.model.attention)}

    def files(self) -> Mapping[str, str]:
        """The words, by token."""
        return {"vocabulary.json": json.dumps(VOCABULARY, indent=1) + "\n"}

    def _draw(self, rng: np.random.Generator, n: int, *, held_out: bool) -> Scenes:
        return scenes.draw(rng, n, held_out=held_out, size=self.size, most=self.objects)

    def _held_out(self, model: nn.Module) -> tuple[Scenes, tuple[Tensor, Tensor]]:
        """The held-out scenes, and images and captions where the model is."""
        drawn = self._draw(np.random.default_rng(0), self.held_out, held_out=True)
        device = next(model.parameters()).device
        return drawn, (seen(drawn).to(device), torch.from_numpy(drawn.captions).to(device))


def seen(drawn: Scenes) -> Float[Tensor, "n 3 size size"]:
    """Images as the model takes them: with a spread near 1, without which convolutions hardly begin to learn."""
    return (torch.from_numpy(drawn.images) - MIDDLE) * SCALE


def looked(weights: Float[np.ndarray, "n t gh gw"], held: Scenes) -> dict[str, float]:
    """Attention to the object being named, over all colour and shape words of the captions.

    Args:
        weights: with which the word after each token but the last was looked for (`Captioner.maps`).
        held: the scenes.

    Returns:
        ``mass``: the share of the weight on cells that the object reaches into, with the same for words of colours and
        of shapes alone; ``chance``: the share that these cells are of the grid; ``strongest``: how often the cell of
        the highest weight is one of them.
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


def _said(model: nn.Module, images: Tensor) -> list[list[int]]:
    """Greedy captions, without start and end."""
    first = torch.full((len(images), 1), START, device=images.device)
    greedy = Sampler(temperature=0)
    longest = scenes.longest(scenes.MOST)
    return generate(model, model.start(images), first, max_new_tokens=longest, sampling=greedy, end=END)  # type: ignore[arg-type, operator]


def _overlays(shown: list[tuple[Scenes, int, list[int], np.ndarray]], found: Measured, kind: str) -> Figure:
    """A picture for each generated word: the image, dark where the attention is not; the object it names outlined."""
    from qkv.lab.draw import panels

    rows = [-(-(len(words) + 1) // COLUMNS) for _, _, words, _ in shown]
    title = (
        f"{kind.capitalize()} attention: {found['mass']:.0%} lies on the object being named, "
        f"{found['mass'] / found['chance']:.1f} times chance"
    )
    note = (
        "Held-out scenes and the captions generated for them. The image is as bright as the attention with which the "
        "word was looked for is strong; outlined is the object that the word names, with the share of the attention on "
        "it. Over all words of the held-out captions that share is the title's: "
        f"{found['mass_at_colours']:.0%} at colours, {found['mass_at_shapes']:.0%} at shapes."
    )
    figure, axes = panels(title, note, columns=COLUMNS, rows=sum(rows), height=1.05)
    for panel in axes:
        panel.set_axis_off()
    first = 0
    for (held, i, words, maps), height in zip(shown, rows, strict=True):
        picture = held.images[i].transpose(1, 2, 0)
        axes[first].imshow(picture)
        axes[first].set_title("the image", size=8, style="italic", pad=3)
        truth = zip(held.captions[i, 1:], held.objects[i, 1:], strict=True)
        for panel, word, weights, (right, thing) in zip(axes[first + 1 :], words, maps, truth, strict=False):
            _overlay(panel, picture, weights)
            panel.set_title(VOCABULARY[word], size=8, pad=3)
            if word == right and thing >= 0:
                mask = held.masks[i, thing]
                panel.contour(mask, [0.5], colors="white", linewidths=0.9)
                on = scenes.on_grid(mask, round(len(mask) / len(weights))) > 0
                panel.text(0.5, -0.03, f"{weights[on].sum():.0%}", size=7, ha="center", va="top",
                           transform=panel.transAxes)  # fmt: skip
        first += height * COLUMNS
    return figure


def _overlay(panel: Any, picture: np.ndarray, weights: np.ndarray) -> None:
    """The picture, as bright as the weights of its cells, smoothly between their middles."""
    size, stride = len(picture), round(len(picture) / len(weights))
    at, middles = np.arange(size), stride * np.arange(len(weights))
    along = np.stack([np.interp(at, middles, column) for column in (weights / weights.max()).T], 1)
    light = np.stack([np.interp(at, middles, row) for row in along])
    panel.imshow(picture * (0.25 + 0.75 * light[..., None]))

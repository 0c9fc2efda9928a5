"""The task of several hops: follow pointers from each position, one step after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor, nn, stack

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN, CHECKED = 500, 100
"""The numbers of held-out sequences for metrics and for the attention check."""


@dataclass(frozen=True)
class Hops:
    """A random permutation: each position holds a pointer to another. Name the positions after 2, 3, … hops.

    The token at position i is its pointer p(i), so the first hop is given. A head that attends from i to p(i) reads
    p(p(i)), the second hop. In the next layer a head can attend to the position that was read before it, so that the
    number of hops doubles with each layer at best. The correct attention is known: from position i to one on its chain,
    p(i), p(p(i)), …. Attention is bidirectional: the task sets the prefix of the model to the whole sequence. Each
    number of hops has tokens of its own for its answers.

    >>> Hops(places=7).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 7])
    """

    name: ClassVar[str] = "hops"

    places: int = 8
    """The number of positions, and of tokens; pointer p is token 2 + p."""
    hops: int = 4
    """The largest number of hops to answer for."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, tied=False))
    """The configuration of the `DecoderLM`; the task sets vocab_size, context and prefix."""

    def __post_init__(self) -> None:
        if self.hops < 2:
            raise InputError(f"hops is {self.hops}, expected at least 2: the first hop is in the input")
        heads.check_enough(math.factorial(min(max(self.places, 0), 64)), f"places is {self.places}")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=1000, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        vocabulary = heads.FIRST_SYMBOL + self.places * (self.hops - 1)
        return DecoderLM(
            with_entries(self.model, vocab_size=vocabulary, context=self.places, prefix=self.places)
        )  # fmt: skip

    def sequences(self, generator: np.random.Generator, size: int, *, unseen: bool) -> Int[Tensor, "size places"]:
        """Random permutations as tokens, held out or not."""
        return heads.drawn(
            lambda n: heads.FIRST_SYMBOL + generator.random((n, self.places)).argsort(1), size, unseen=unseen
        )

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, places); no permutation is held out."""
        return {"ids": self.sequences(np.random.default_rng((seed, step)), size, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of predictions: one for each position and number of hops."""
        return batch["ids"].numel() * (self.hops - 1)

    def after(self, ids: Int[Tensor, "b places"]) -> Int[Tensor, "b places hops"]:
        """The position that each position reaches after 1, 2, … hops."""
        pointers = ids - heads.FIRST_SYMBOL
        found = [pointers]
        for _ in range(1, self.hops):
            found.append(pointers.gather(1, found[-1]))
        return stack(found, -1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the positions after 2 hops and more."""
        answers = self.after(batch["ids"])[..., 1:]
        return nn.functional.cross_entropy(self._logits(model, batch["ids"]).flatten(0, 2), answers.flatten())

    def _logits(self, model: Any, ids: Int[Tensor, "b places"]) -> Float[Tensor, "b places more places"]:
        found: Tensor = model(ids)[..., heads.FIRST_SYMBOL :].unflatten(-1, (self.hops - 1, self.places))
        return found

    def unseen(self) -> Int[Tensor, "sequences places"]:
        """The held-out permutations."""
        return self.sequences(np.random.default_rng(0), UNSEEN, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """On held-out permutations: ``accuracy`` after the most hops, ``accuracy_by_hops`` from 2 on, and ``loss``."""
        ids = self.unseen().to(next(model.parameters()).device)
        right = self._logits(model, ids).argmax(-1) == self.after(ids)[..., 1:]
        by_hops = right.double().mean((0, 1)).tolist()
        return {"accuracy": by_hops[-1], "loss": self.loss(model, {"ids": ids}).item(), "accuracy_by_hops": by_hops}

    def check(self, model: Any) -> Measured:
        """The attention of every head along the chain, in held-out permutations.

        Returns:
            By layer and head: ``hop_1``, ``hop_2``, …, the share of queries whose strongest key is the position after
            that many hops. ``best_layer``, ``best_head``, ``best_hop`` and its share ``best``, of the head and hop with
            the largest share; ``best_by_hop``, the largest share of each hop.
        """
        ids = self.unseen()[:CHECKED]
        weights, queries = heads.maps(model, ids), np.arange(self.places)
        reached = self.after(ids).numpy()
        shares = {
            f"hop_{hop}": heads.share_of_strongest(weights, (queries, reached[..., hop - 1]))
            for hop in range(1, self.hops)
        }
        all_of = np.stack(list(shares.values()))
        hop, layer, head = (int(i) for i in np.unravel_index(all_of.argmax(), all_of.shape))
        return {
            **{name: share.tolist() for name, share in shares.items()},
            "best_layer": layer,
            "best_head": head,
            "best_hop": hop + 1,
            "best": float(all_of[hop, layer, head]),
            "best_by_hop": all_of.max((1, 2)).tolist(),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``hops``: the map of the best head, and every head's share on each position of the chain."""
        from qkv_lab import draw

        measured, found, ids = self.evaluate(model), self.check(model), self.unseen()[:1]
        layer, head, hop = found["best_layer"], found["best_head"], found["best_hop"]
        title = f"Layer {layer}, head {head} attends {hop} hop{'s' * (hop > 1)} ahead in {found['best']:.0%} of queries"
        rates = ", ".join(f"{x:.1%} after {n + 2}" for n, x in enumerate(measured["accuracy_by_hops"]))
        shape = f"{self.model.layers} layers × {self.model.heads} heads"
        note = f"{shape}, {UNSEEN} held-out permutations. Accuracy: {rates} hops."
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        queries, keys = np.arange(self.places), self.after(ids)[0, :, hop - 1].numpy()
        names = [f"{i} → {token - heads.FIRST_SYMBOL}" for i, token in enumerate(ids[0].tolist())]
        heads.show_map(left, heads.maps(model, ids)[0, layer, head], ids[0], (queries, keys), names=names)
        left.set(xlabel="key: position → its pointer", ylabel="query: position → its pointer")
        left.set_title(f"layer {layer}, head {head}; squares: {hop} hop{'s' * (hop > 1)} ahead", size=9)
        shares = np.stack([np.ravel(found[f"hop_{hop}"]) for hop in range(1, self.hops)], 1)
        draw.heatmap(
            right, shares, rows=heads.head_names(np.asarray(found["hop_1"])), columns=[""] * shares.shape[1], vmax=1
        )
        right.set_aspect("auto")
        right.set_xticks(range(shares.shape[1]), [f"{hop + 1}" for hop in range(shares.shape[1])])
        for (row, column), share in np.ndenumerate(shares):
            ink = "white" if share > 0.5 else draw.INK
            right.text(column, row, f"{share:.2f}", ha="center", va="center", color=ink, size=8)
        right.set(xlabel="hops from the query to its strongest key", ylabel="layer and head, counted from 0")
        return {"hops": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

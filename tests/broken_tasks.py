"""Tasks that each break one law of `qkv_lab.Task`, with the message that `check_task` must give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lab_tasks import Counting
from qkv_lab.task import Batch, Measured, Training

BROKEN: list[tuple[Any, str]] = []


def broken(message: str, **fields: Any) -> Any:
    """Enter an object of the class in `BROKEN`."""

    def enter(cls: type[Any]) -> type[Any]:
        BROKEN.append((dataclass(frozen=True)(cls)(**fields), message))
        return cls

    return enter


# --- fields and training settings -------------------------------------------------------------------------------------


@dataclass
class NotFrozen:
    """As `Counting` in all but what the decorator says."""

    name: ClassVar[str] = "not_frozen"
    model: Any = field(default_factory=lambda: Counting().model)
    training = staticmethod(Counting.training)
    build = batch = count = loss = evaluate = check = figures = files = Counting.build


@dataclass(frozen=True, eq=False)
class NotEqual(Counting):
    """Compared by identity."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True)
class Required(Counting):
    """A field without a default."""

    more: int


BROKEN += [
    (Counting, "check_task: got the class Counting, expected an object of a dataclass"),
    (3, "check_task: got an object of class int"),
    (NotFrozen(), "NotFrozen: its fields can be set, expected @dataclass"),
    (NotEqual(), "NotEqual.fields: are the same in another object, which is not equal"),
    (Required(more=1), "Required.__init__: called without arguments, as `qkv train` does: raised TypeError"),
    (Counting(poison=0, poisoned="gradient"), "Counting.loss: gives a gradient to .* that is not finite"),
    (Counting(poison=0), "Counting.loss: is nan for batch 0, expected a finite number"),
]


@broken("Missing does not define training, build, batch")
class Missing:
    name: ClassVar[str] = "missing"


@broken("TwoWords.name: is 'to count', expected one word")
class TwoWords(Counting):
    name: ClassVar[str] = "to count"


@broken("NotPlain.table: is an object of class list, expected text, a number")
class NotPlain(Counting):
    table: list[int] = field(default_factory=lambda: [1, 2])


@broken("LostNone.fields: change when .* read again: limit: 3, not none", limit=None)
class LostNone(Counting):
    limit: int | None = 3


@broken("NoModel.model: is an object of class NoneType, expected a dataclass")
class NoModel(Counting):
    model: Any = None


@broken("NoTraining.training: returned an object of class dict, expected qkv_lab.Training")
class NoTraining(Counting):
    @staticmethod
    def training() -> Any:
        return {"steps": 3}


# --- model and batches ------------------------------------------------------------------------------------------------


@broken("NoModule.build: returned an object of class DecoderConfig, expected a torch.nn.Module")
class NoModule(Counting):
    def build(self) -> Any:
        return self.model


@broken("OwnSeed.build: made the same weights after torch.manual_seed")
class OwnSeed(Counting):
    def build(self) -> nn.Module:
        torch.manual_seed(7)
        return super().build()


@broken("OtherGenerator.build: made other weights after torch.manual_seed.* the second time")
class OtherGenerator(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        with torch.no_grad():
            next(model.parameters()).add_(float(np.random.rand()))
        return model


@broken("Fixed.build: made a model without trained parameters")
class Fixed(Counting):
    def build(self) -> nn.Module:
        return super().build().requires_grad_(False)


@broken("NoTensors.batch: returned an object of class list for batch")
class NoTensors(Counting):
    def batch(self, step: int, size: int, seed: int) -> Any:
        return [1, 2]


@broken("GlobalGenerator.batch: made another batch for step 5 the second time")
class GlobalGenerator(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(int(torch.randint(10_000, ())), size, seed)


@broken("FirstAsked.batch: depends on the batches made before, expected the same in any order")
class FirstAsked(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        first = self.__dict__.setdefault("first", step)
        return super().batch(step + first, size, seed)


@broken("SameSteps.batch: made the same batch for every step")
class SameSteps(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(0, size, seed)


@broken("SameSeeds.batch: made the same batch for the seeds 0, 1, 2")
class SameSeeds(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(step, size, 0)


@broken("OtherSize.batch: made 'ids' .* expected 5 as the first dimension")
class OtherSize(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(step, 8, seed)


# --- loss -------------------------------------------------------------------------------------------------------------


@broken("SumOfLosses.loss: is not the mean over its count")
class SumOfLosses(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * self.count(batch)


@broken("CountsSequences.loss: is not the mean over its count of 5 predictions")
class CountsSequences(Counting):
    def count(self, batch: Batch) -> int:
        return len(batch["ids"])


@broken("OneCount.count: is 8 for a batch, but 8 \\+ 8 for its 2 parts")
class OneCount(Counting):
    def count(self, batch: Batch) -> int:
        return 8


@broken("TensorCount.count: returned tensor.*, expected an int, at least 1")
class TensorCount(Counting):
    def count(self, batch: Batch) -> Any:
        return (batch["targets"] != -100).sum()


@broken("ByToken.loss: returned torch.float32 of shape \\(5,\\)")
class ByToken(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch).expand(len(batch["ids"]))


@broken("Noisy.loss: returned .* and then .* in evaluation mode, expected the same")
class Noisy(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) + torch.rand(())


@broken("Writes.loss: or count wrote to the batch, expected it unchanged: 'step'")
class Writes(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        batch["step"].add_(1)
        return super().loss(model, batch)


@broken("Detached.loss: has no gradient")
class Detached(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch).detach()


@broken("Unused.loss: gives no gradient to unused")
class Unused(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        model.register_parameter("unused", nn.Parameter(torch.randn(3)))
        return model


@broken("ZeroGradient.loss: has a gradient of zero for every parameter")
class ZeroGradient(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return 0 * super().loss(model, batch)


# --- measurements, figures and files ----------------------------------------------------------------------------------


@broken("NoNames.evaluate: returned an object of class float, expected numbers")
class NoNames(Counting):
    def evaluate(self, model: nn.Module) -> Any:
        return 0.5


@broken(r"Float32.check: returned an object of class float32 at \['by_head'\]\[0\]\[1\]")
class Float32(Counting):
    def check(self, model: nn.Module) -> Measured:
        return {"by_head": [[0.5, np.float32(0.5)]]}


@broken(r"Sampled.evaluate: returned other numbers .* the second time, expected the same: \['loss'\] is")
class Sampled(Counting):
    def evaluate(self, model: nn.Module) -> Measured:
        return {"loss": float(torch.rand(()))}


@broken("Trains.evaluate: changed the model, expected it as before: 'embedding.weight'")
class Trains(Counting):
    def evaluate(self, model: nn.Module) -> Measured:
        model.embedding.weight.mul_(2)  # type: ignore[operator, union-attr]
        return super().evaluate(model)


@broken("LeavesMode.check: changed the model, expected it as before: 'model.training'")
class LeavesMode(Counting):
    def check(self, model: nn.Module) -> Measured:
        model.train()
        return super().check(model)


@broken("LeavesHook.figures: changed the model, expected it as before: 'hooks of embedding'")
class LeavesHook(Counting):
    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        model.embedding.register_forward_hook(lambda *_: None)  # type: ignore[operator, union-attr]
        return {}


@broken("NoFigure.figures: returned an object of class str as 'map', expected a matplotlib.figure.Figure")
class NoFigure(Counting):
    def figures(self, model: nn.Module) -> Any:
        return {"map": "map.png"}


@broken("NotDrawn.figures: drawn: 'map': raised ValueError")
class NotDrawn(Counting):
    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        figure = Figure()
        figure.text(0, 0, r"$\frac$")
        return {"map": figure}


@broken("Folder.figures: has the name 'maps/one', expected the name of a file")
class Folder(Counting):
    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        return {"maps/one": Figure()}


@broken("Taken.files: has the name 'config.json', which the lab writes itself")
class Taken(Counting):
    def files(self) -> Mapping[str, str]:
        return {"config.json": "{}"}


@broken("Bytes.files: returned an object of class bytes as 'words.txt', expected text")
class Bytes(Counting):
    def files(self) -> Any:
        return {"words.txt": b"one two"}


@broken("OtherText.files: returned other texts the second time")
class OtherText(Counting):
    def files(self) -> Mapping[str, str]:
        return {"words.txt": str(np.random.rand())}


# --- training ---------------------------------------------------------------------------------------------------------


@broken("NotSaved.training: trained for 4 steps: model is Own, expected one of DecoderLM")
class NotSaved(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        model.__class__ = type("Own", (type(model),), {})
        return model


@broken("NoRate: no weight changed in 4 steps of training")
class NoRate(Counting):
    @staticmethod
    def training() -> Training:
        return Training(steps=4, lr=0.0)


@broken("NotInConfig: the saved model has other metrics than the trained one")
class NotInConfig(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        model.embedding.register_forward_hook(lambda _, __, x: 2 * x)  # type: ignore[operator, union-attr]
        return model


@broken("NoisyTraining: a run that resumed after step 2 of 4 ended with other weights")
class NoisyTraining(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = float(np.random.rand()) if model.training else 0.0
        return super().loss(model, batch) * (1 + noise)

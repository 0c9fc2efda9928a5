"""Check that an object survives pickle and copy.deepcopy, as data loader workers and saved experiments require."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from qkv._contract import learned_tensors
from qkv.testing.agreement import run
from qkv.testing.definition import Composition
from qkv.testing.inputs import Size, can_be_copied, converted, triple
from qkv.testing.report import CheckFailed, difference


def _pickled(thing: object) -> Any:
    return pickle.loads(pickle.dumps(thing))


@torch.no_grad()
def check_copies(c: Composition, size: Size) -> None:
    """Copies by pickle and copy.deepcopy can be made and give the same output."""
    where = f"{size}, float64"
    tensors = triple(size, torch.float64)
    before = run(c.of(converted(c.thing, torch.float64)), tensors, "eager", where)
    assert before is not None
    name = type(c.thing).__name__
    ways: list[tuple[str, Callable[[Any], Any]]] = [("pickle", _pickled)]
    if can_be_copied(c.thing):
        ways.append(("copy.deepcopy", deepcopy))
    for way, copied in ways:
        try:
            made = copied(c.thing)
        except Exception as error:
            raise CheckFailed(
                f"{name}: {way} raised {type(error).__name__}: {str(error).strip()}; expected a copy: "
                "the class and every function among its attributes must be defined at the top level of a module"
            ) from error
        kind = type(made)
        if kind is not type(c.thing):
            raise CheckFailed(f"{name}: {way} made an object of class {kind.__name__}, expected {name}")
        if list(learned_tensors(made)) != list(learned_tensors(c.thing)):
            raise CheckFailed(
                f"{name}: {way} made an object with the learned tensors {list(learned_tensors(made))}, "
                f"expected {list(learned_tensors(c.thing))}"
            )
        after = run(c.of(converted(made, torch.float64)), tensors, "eager", where)
        assert after is not None
        wrong = difference(after[0], before[0])
        if wrong is not None:
            raise CheckFailed(f"{name}: {way} made an object whose output differs with {where}: {wrong}")

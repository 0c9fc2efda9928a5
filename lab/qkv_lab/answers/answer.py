"""A reader's answer in a file: loaded, called by a check, and compared with the right answer on the failing input."""

from __future__ import annotations

import copy
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.errors import InputError, nearest
from qkv_lab.lessons.exercises import exercise

MODULE = "answer"


@dataclass
class Call:
    """One call of the answer: copies of its arguments, the state of torch's generator, and its result or exception."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Tensor
    result: Any = None
    error: BaseException | None = None


class Recorded:
    """The answer, which remembers its last call. A module that it makes is called with the check's input as well."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.last: Call | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.last = Call(_copied(args), _copied(kwargs), torch.random.get_rng_state())
        try:
            result = self.last.result = self.answer(*args, **kwargs)
        except BaseException as error:
            self.last.error = error
            raise
        if isinstance(result, nn.Module):
            result.register_forward_hook(self._forward)
        return result

    def _forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert self.last is not None
        self.last.args, self.last.result = (*self.last.args[:1], *_copied(args)), output


def load(file: Path, name: str) -> Callable[..., Any]:
    """The function or class with a name that a Python file defines.

    Raises:
        InputError: if the file is not Python, raises an exception, or does not define the name as a function or class.
    """
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        raise InputError(f"FILE.py is {file.name}, expected a Python file, whose name ends in .py")
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        raise InputError(f"{file.name} is not valid Python\n{shown}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{file.name} raises an exception when it is loaded\n{own_frames(error, file)}") from error
    if not hasattr(module, name):
        defined = [x for x, value in vars(module).items() if getattr(value, "__module__", None) == MODULE]
        has = f"it defines {', '.join(defined)}" if defined else "it defines no function"
        raise InputError(f"{file.name} does not define {name}; {has}{nearest(name, defined)}")
    found = getattr(module, name)
    if not callable(found):
        raise InputError(f"{file.name}: {name} is {type(found).__name__}, expected a function or class")
    answer: Callable[..., Any] = found
    return answer


def own_frames(error: BaseException, file: Path) -> str:
    """The traceback of an exception, with only the lines of the reader's file."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list([x for x in told.stack if x.filename == str(file)])
    told.__cause__ = told.__context__ = None
    return "".join(told.format()).rstrip()


def solution(name: str) -> Callable[..., Any]:
    """The right answer of an exercise, from its lab."""
    one, space = exercise(name), dict[str, Any]()
    exec(compile(one.solution, f"<solution of {name}>", "exec"), space)
    answer: Callable[..., Any] = space[one.defines]
    return answer


def expected(name: str, call: Call) -> Any:
    """The right answer's result for the arguments of a call."""
    right = solution(name)
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(call.random)
        if isinstance(right, type) and len(call.args) > 1:  # the class of a module, and the module's input
            return right(call.args[0])(*call.args[1:])
        return right(*call.args, **call.kwargs)


def _copied(value: Any) -> Any:
    """A deep copy, in which tensors are detached, since answers may change their arguments."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.items()}
    return copy.deepcopy(value)

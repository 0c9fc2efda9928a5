"""Mutation tests of the ledger's checks: ``python -m research.claims.mutation`` tells which notice a wrong answer.

A check that passes whatever is computed proves nothing. So each place of a check that gives an answer (a call, an array
operation, an error that is caught) is made to give wrong answers, one place and one wrong answer at a time. The check
*notices* it if it raises `Drifted`, or comes to another kind of verdict. Other errors do not count: code that breaks on
a wrong shape has not compared anything. A check *can fail* if it notices at least one wrong answer. That is necessary,
not sufficient: whether a check is about its claim remains for a reader to see.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import io
import json
import math
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qkv._files import write_atomically
from research.claims.claim import CLAIMS, KINDS, Claim, Drifted, Verdict
from research.claims.settled import Entry, load

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Array = Tensor | np.ndarray
PLAIN = bool | int | float | complex | str


def _is_leaf(value: object) -> bool:
    """Whether a value is a number, a truth value, a text, a tensor or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return isinstance(value, PLAIN | np.generic | Tensor)


def _is_answer(value: object, within: bool = False) -> bool:
    """Whether a value is such a leaf, a verdict, or a container with at least one such leaf.

    A dataclass is a container if it has tensors, collections or other dataclasses (`within` which numbers will do);
    others are settings, as the sizes of a model.
    """
    if _is_leaf(value) or isinstance(value, Verdict):
        return True
    if _is_record(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return any(_is_answer(x, within=True) and (within or not isinstance(x, PLAIN)) for x in parts)
    if isinstance(value, Mapping):
        return any(_is_answer(x) for x in value.values())
    return isinstance(value, tuple | list | set | frozenset) and any(_is_answer(x) for x in value)


def _is_record(value: Any) -> TypeGuard[DataclassInstance]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Array) and "bool" in str(value.dtype))


def _larger(value: Any) -> Any:
    if isinstance(value, str) or _is_truth(value):
        return value
    if isinstance(value, Array):
        floating = "float" in str(value.dtype) or "complex" in str(value.dtype)
        return 1.5 * value if floating else 2 * value + 1
    return 2 * value + 1 if isinstance(value, int) else 1.5 * value


def _squared(value: Any) -> Any:
    """Of small integers, which may be sizes, the same."""
    if isinstance(value, str) or _is_truth(value) or (isinstance(value, int) and value < 10_000):
        return value
    return value * value


def _shifted(value: Any) -> Any:
    return value if isinstance(value, str) or _is_truth(value) else value + 1


def _opposite(value: Any) -> Any:
    if isinstance(value, str):
        return value[::-1]
    if _is_truth(value):
        return ~value if isinstance(value, Array) else not value
    return value if isinstance(value, Array) and value.dtype == torch.uint8 else -value


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else type(value)()


def _moved(value: Any, axis: int) -> Any:
    """The entries moved on by one along an axis."""
    if not isinstance(value, Array) or value.ndim < -axis:
        return value
    return value.roll(1, axis) if isinstance(value, Tensor) else np.roll(value, 1, axis)


def _cut(value: Any, axis: int) -> Any:
    """Without the last entry along an axis."""
    if not isinstance(value, Array) or value.ndim < (axis + 1 if axis >= 0 else -axis) or value.shape[axis] < 2:
        return value
    if isinstance(value, Tensor):
        return value.narrow(axis, 0, value.shape[axis] - 1)
    return np.delete(value, -1, axis)


def _off_at(value: Any, index: int) -> Any:
    """One entry off by one, at the beginning (0) or the end (-1)."""
    if not isinstance(value, Array) or value.ndim == 0 or 0 in value.shape:
        return value
    changed = value.clone() if isinstance(value, Tensor) else value.copy()
    at = (index,) * value.ndim
    changed[at] = ~changed[at] if _is_truth(value) else changed[at] + 1
    return changed


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of each leaf of an answer."""

    def changed(value: Any) -> Any:
        if _is_leaf(value):
            return change(value)
        if not _is_answer(value) or isinstance(value, Verdict):
            return value
        if _is_record(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return dataclasses.replace(value, **{name: changed(x) for name, x in fields.items()})
        if isinstance(value, Mapping):
            return {key: changed(x) for key, x in value.items()}
        if isinstance(value, tuple | list):
            return _like(value, [changed(x) for x in value])
        return type(value)(changed(x) for x in value)

    return changed


def _first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of the first leaf of an answer."""

    def changed(value: Any) -> Any:
        done = False

        def once(leaf: Any) -> Any:
            nonlocal done
            if done:
                return leaf
            other = change(leaf)
            done = not _same(other, leaf)
            return other

        return _each(once)(value)

    return changed


def _like(value: Any, items: list[Any]) -> Any:
    """The items as a list or a tuple of the kind of `value`."""
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, torch.Size):
        return torch.Size(items) if all(isinstance(x, int) and not isinstance(x, bool) for x in items) else value
    return type(value)(items)


def _reordered(value: Any) -> Any:
    """The parts of a container in another order: each under the name or in the place of another."""
    if isinstance(value, Mapping) and not _is_record(value) and len(value) > 1:
        parts = list(value.values())
        return dict(zip(value, [*parts[1:], parts[0]], strict=True))
    if isinstance(value, tuple | list) and len(value) > 1:
        return _like(value, [*value[1:], value[0]])
    return value


def _reordered_within(value: Any) -> Any:
    """The parts of each part of a container in another order."""
    if isinstance(value, Mapping) and not _is_record(value):
        return {key: _reordered(x) for key, x in value.items()}
    return _like(value, [_reordered(x) for x in value]) if isinstance(value, tuple | list) else value


def _shortened(value: Any) -> Any:
    """A container without its last part."""
    if isinstance(value, Mapping) and not _is_record(value) and len(value) > 1:
        return dict(list(value.items())[:-1])
    if isinstance(value, list) and len(value) > 1:
        return value[:-1]
    return value


def _contradicted(value: Any) -> Any:
    """A verdict of another kind."""
    if not isinstance(value, Verdict):
        return value
    return dataclasses.replace(value, kind=next(kind for kind in KINDS if kind != value.kind))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a half more": _each(_larger),
    "last axis shorter": _each(lambda leaf: _cut(leaf, -1)),
    "the opposite": _each(_opposite),
    "parts reordered": _reordered,
    "zero": _each(_zero),
    "moved along the last axis": _each(lambda leaf: _moved(leaf, -1)),
    "first entry off": _each(lambda leaf: _off_at(leaf, 0)),
    "one more": _each(_shifted),
    "first part a half more": _first(_larger),
    "the square": _each(_squared),
    "another verdict": _contradicted,
    "parts of parts reordered": _reordered_within,
    "moved along the axis before": _each(lambda leaf: _moved(leaf, -2)),
    "last entry off": _each(lambda leaf: _off_at(leaf, -1)),
    "first part the opposite": _first(_opposite),
    "last part missing": _shortened,
    "first axis shorter": _each(lambda leaf: _cut(leaf, 0)),
}
"""The wrong answers that are tried, by name, in this order. Each is a function from the right answer to a wrong one;
where it does not apply, it returns an equal value."""


def applicable(value: Any) -> Iterable[str]:
    """The names of the changes that make another answer of a value; none if the value is no answer.

    An answer is a number, a text, a tensor or an array, a verdict, or a tuple, list, dict, set or dataclass of answers.
    A single truth value is none: it is a judgement on answers, and its negation would always be noticed.

    >>> list(applicable(True)), list(applicable(None))
    ([], [])
    >>> list(applicable(0.0))
    ['one more']
    """
    if not _is_answer(value) or (_is_truth(value) and (not isinstance(value, Array) or value.ndim == 0)):
        return []
    found = []
    for name, change in CHANGES.items():
        with suppress(Exception):  # an object that refuses such a field
            found += [name] if not _same(change(value), value) else []
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two answers are equal; NaN equals NaN."""
    if isinstance(one, Array) or isinstance(other, Array):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        if isinstance(one, Tensor):
            return one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())
        return bool(np.array_equal(one, other, equal_nan="float" in str(one.dtype)))
    if _is_record(one) and type(one) is type(other):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_same(x, y) for x, y in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one is other or bool(one == other)


VERDICTS = {"holds", "false", "only_when", "unseen"}
"""Functions that make a verdict of a condition, which is their first argument, or `unless`."""
JUDGES = {"abs", "all", "allclose", "amax", "amin", "any", "bool", "equal", "isclose", "isfinite", "isinf", "isnan"}
JUDGES |= {"isinstance", "item", "len", "max", "min", "norm", "round", "sorted"}
"""Calls that judge answers, or measure how far two are apart: a mutation there would be noticed by any check."""
READS = {"append", "clone", "cpu", "decode", "detach", "dict", "double", "encode", "enumerate", "eval", "extend"}
READS |= {"float", "format", "getattr", "getsource", "hasattr", "int", "items", "keys", "list", "map", "numpy", "print"}
READS |= {"parameters", "range", "read_text", "removeprefix", "set", "state_dict", "str", "strip", "title", "to"}
READS |= {"tolist", "tuple", "update", "values", "zip"}
"""Calls that only pass on or print what was computed or written elsewhere."""
INPUTS = {"Generator", "RandomState", "arange", "default_rng", "empty", "eye", "full", "full_like", "linspace"}
INPUTS |= {"manual_seed", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm"}
INPUTS |= {"seed", "tensor", "zeros", "zeros_like"}
"""Calls that make the data on which a check computes."""
SKIPPED = JUDGES | READS | INPUTS
ANSWER, SILENT = "_mutation_answer", "_mutation_silent"
"""Names in the instrumented code: a function that may replace an answer, and one that tells to overlook an error."""
Kind = Literal["call", "operation", "error"]


@dataclass(frozen=True)
class Site:
    """A place of a check that gives an answer: a call, a product, quotient, power or sum, or an error that is caught.

    Places of a function whose code is alike are one site, so that a check that f(x) == f(x) cannot notice a wrong f.
    """

    line: int
    code: str
    kind: Kind


@dataclass(frozen=True)
class Instrumented:
    """The code of a check, with the parts of its module that it uses."""

    name: str
    sites: tuple[Site, ...]
    code: CodeType
    module: dict[str, Any]

    def run(self, answer: Callable[[int, Any], Any], silent: Callable[[int], bool]) -> Verdict:
        """Run the check in a namespace of its own, so that nothing is cached from another run.

        Args:
            answer: called with the index of a site and its answer; returns the answer to go on with.
            silent: called with the index of a site where an error was caught; True: as if there had been no error.
        """
        names = {"__name__": self.module["__name__"], "__file__": self.module.get("__file__")}
        names |= {"__builtins__": __builtins__, ANSWER: answer, SILENT: silent}
        exec(self.code, names)
        verdict: Verdict = names[self.name]()
        return verdict


def judges(check: Callable[[], Verdict]) -> bool:
    """Whether a check computes its verdict: it, or a function of its module that it uses, passes a condition on.

    Verdicts without a condition are not computed here: `cited` ones rest on reading, `experiment` ones on an
    experiment, which judges its results, and `unseen` without `unless` states nothing.
    """
    used = _used(_parsed(check.__module__), check.__name__)
    calls = [x for part in used for x in ast.walk(part) if isinstance(x, ast.Call)]
    return any(_name(x) in VERDICTS and _condition(x) is not None for x in calls)


def instrument(check: Callable[[], Verdict]) -> Instrumented:
    """The instrumented code of a check."""
    name, tree = check.__name__, copy.deepcopy(_parsed(check.__module__))
    rewriter = _Rewriter()
    body = [rewriter.visit(x) for x in _used(tree, name)]
    module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    path = inspect.getsourcefile(check) or "<check>"
    module_dict = vars(sys.modules[check.__module__])
    return Instrumented(name, tuple(rewriter.sites), compile(module, path, "exec"), module_dict)


@functools.cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _used(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The imports of a module, and the statements that a function needs, directly or not, in their order."""
    needed, last = {name}, -1
    while len(needed) > last:
        last = len(needed)
        for statement in tree.body:
            if _defines(statement) & needed:
                needed |= {x.id for x in ast.walk(statement) if isinstance(x, ast.Name)}
    imports = (ast.Import, ast.ImportFrom)
    return [x for x in tree.body if isinstance(x, imports) or _defines(x) & needed]


def _defines(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return {x.id for x in ast.walk(statement) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return set()


def _name(call: ast.Call) -> str:
    """The last name of what is called: `mean` of `x.mean()`."""
    callee = call.func
    return callee.id if isinstance(callee, ast.Name) else callee.attr if isinstance(callee, ast.Attribute) else ""


def _condition(call: ast.Call) -> ast.expr | None:
    if _name(call) != "unseen":
        return call.args[0] if call.args else None
    return next((x.value for x in call.keywords if x.arg == "unless"), None)


class _Rewriter(ast.NodeTransformer):
    """Wraps the places that give an answer. What only forms the text of a verdict is left alone."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._scope, self._judged = "", False
        self._index: dict[tuple[str, str], int] = {}

    def _site(self, node: ast.expr | ast.ExceptHandler, code: str, kind: Kind) -> ast.Constant:
        key = self._scope, f"{node.lineno}: error" if kind == "error" else code
        if key not in self._index:
            self._index[key] = len(self.sites)
            self.sites.append(Site(node.lineno, code, kind))
        return ast.Constant(self._index[key])

    def _wrapped(self, node: ast.expr, code: str, kind: Kind) -> ast.expr:
        index = self._site(node, code, kind)
        return ast.copy_location(ast.Call(ast.Name(ANSWER, ast.Load()), [index, node], []), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._scope = self._scope, f"{self._scope}.{node.name}"
        node.decorator_list = [x for x in node.decorator_list if not (isinstance(x, ast.Call) and _name(x) == "claim")]
        node.body = [self.visit(x) for x in node.body]
        self._scope = outer
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call):  # its result is not used
            self.generic_visit(node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        outer, self._judged = self._judged, True
        self.generic_visit(node)
        self._judged = outer
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return self.generic_visit(node) if self._judged else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name, code = _name(node), ast.unparse(node)
        if name in VERDICTS and isinstance(node.func, ast.Name):
            for i, argument in enumerate(node.args[:1] if name != "unseen" else []):
                node.args[i] = self.visit(argument)
            for keyword in node.keywords:
                keyword.value = self.visit(keyword.value) if keyword.arg == "unless" else keyword.value
            return node
        if name == "join" and not self._judged:
            return node
        self.generic_visit(node)
        if name in SKIPPED or name == "join" or name[:1].isupper():  # a class: an object, not an answer
            return node
        return self._wrapped(node, code, "call")

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        code = ast.unparse(node)
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult | ast.Mult | ast.Div | ast.Pow | ast.Add):
            return self._wrapped(node, code, "operation")
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        for handler in node.handlers:
            caught = ast.unparse(handler.type) if handler.type else ""
            index = self._site(handler, f"except {caught}", "error")
            overlooked = ast.Call(ast.Name(SILENT, ast.Load()), [index], [])
            handler.body = [ast.If(ast.UnaryOp(ast.Not(), overlooked), handler.body, [])]
        return node


PUBLISHED = Path(__file__).parent / "mutation.json"
"""The results for all checks, which come with the package."""
NO_ERROR = "no error"
ORDER = (NO_ERROR, *CHANGES)
RUNS = 60
"""The most runs of a check with wrong answers. All places give one kind of wrong answer, then all the next kind."""

SECONDS = 20.0
"""The most CPU time of such a run. No check takes more than 3 s."""


@dataclass(frozen=True)
class Mutated:
    """What a check noticed."""

    noticed: tuple[Site, ...]
    """Places where at least one wrong answer was noticed."""
    overlooked: tuple[Site, ...]
    """Places where none was: they do not bear on the verdict, or not by the wrong answers that were tried."""

    @property
    def can_fail(self) -> bool:
        return bool(self.noticed)


@dataclass
class _Record:
    """Collects which wrong answers exist at each site, in a run without any."""

    sites: tuple[Site, ...]
    changes: dict[int, list[str]] = field(default_factory=dict)

    def answer(self, index: int, value: Any) -> Any:
        if self.sites[index].kind == "call" or isinstance(value, torch.Tensor | np.ndarray):
            known = self.changes.setdefault(index, [])
            known += [name for name in applicable(value) if name not in known]
        return value

    def silent(self, index: int) -> bool:
        self.changes[index] = [NO_ERROR]
        return False


def mutate(check: Callable[[], Verdict]) -> Mutated:
    """Give wrong answers to a check, one at a time."""
    code = instrument(check)
    record = _Record(code.sites)
    right = _run(code, record.answer, record.silent)
    tried = ((index, name) for name in ORDER for index, names in sorted(record.changes.items()) if name in names)
    noticed: set[int] = set()
    runs = 0
    for index, name in tried:
        if index not in noticed and runs < RUNS:
            runs += 1
            noticed |= {index} if _notices(code, index, name, right.kind) else set()
    places = [index for index, names in sorted(record.changes.items()) if names]
    sites = [[code.sites[index] for index in places if (index in noticed) == wanted] for wanted in (True, False)]
    return Mutated(tuple(sites[0]), tuple(sites[1]))


def _notices(code: Instrumented, index: int, change: str, kind: str) -> bool:
    def answer(at: int, value: Any) -> Any:
        return CHANGES[change](value) if at == index and change in CHANGES else value

    try:
        with _limited_to(SECONDS):
            return _run(code, answer, lambda at: at == index).kind != kind
    except Drifted:
        return True
    except Exception:  # a wrong answer may break anything that follows
        return False


@contextmanager
def _limited_to(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so much CPU time: a wrong answer may make a loop endless. Main thread, on Unix."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _run(code: Instrumented, answer: Callable[[int, Any], Any], silent: Callable[[int], bool]) -> Verdict:
    """Run a check as every time: the same random numbers, nothing printed."""
    torch.manual_seed(0)
    np.random.seed(0)  # the state that checks of NumPy code share
    random.seed(0)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return code.run(answer, silent)


def computed() -> list[Claim]:
    """The claims whose checks compute a condition, by number."""
    return [c for _, c in sorted(CLAIMS.items()) if not isinstance(c.check, Entry) and judges(c.check)]


def summary(found: dict[str, Mutated]) -> dict[str, Any]:
    """The content of mutation.json: counts, the claims whose checks cannot fail, and the places by claim."""
    by = {id_: {"places": len(x.noticed) + len(x.overlooked), "noticed": len(x.noticed)} for id_, x in found.items()}
    return {
        "computed": len(found),
        "can_fail": sum(x.can_fail for x in found.values()),
        "cannot": [id_ for id_, x in found.items() if not x.can_fail],
        "by": by,
    }


def main(ids: Iterable[str]) -> int:
    torch.set_num_threads(1)
    load()
    ids, among = list(ids), {c.id: c for c in computed()}
    if unknown := [i for i in ids if i not in among]:
        print(f"claim {', '.join(unknown)} is unknown or has no check that computes its verdict", file=sys.stderr)
        return 2
    found = {}
    for id_ in ids or among:
        found[id_] = result = mutate(among[id_].check)
        if ids or not result.can_fail:
            print(f"{id_}: {len(result.noticed)} of {len(result.noticed) + len(result.overlooked)} places", flush=True)
            for word, sites in (("noticed", result.noticed), ("overlooked", result.overlooked)):
                print("".join(f"  {word}: line {site.line}, {site.code}\n" for site in sites), end="")
    if not ids:
        made = summary(found)
        write_atomically(PUBLISHED, json.dumps(made, indent=1) + "\n")
        print(f"{made['can_fail']} of {made['computed']} checks notice a wrong answer; {PUBLISHED}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

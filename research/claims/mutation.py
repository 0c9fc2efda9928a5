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
import functools
import inspect
import io
import json
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from qkv._files import write_atomically
from research.claims.claim import CLAIMS, KINDS, Claim, Drifted, Verdict
from research.claims.settled import Entry, load

Array = Tensor | np.ndarray
LEAVES = bool | int | float | complex | str | np.generic | Tensor | np.ndarray


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Array) and "bool" in str(value.dtype))


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of each number and array of an answer; texts are reversed, truth values negated, verdicts replaced."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Verdict):
            return replace(leaf, kind=next(kind for kind in KINDS if kind != leaf.kind))
        if isinstance(leaf, str):
            return leaf[::-1]
        if _is_truth(leaf):
            return ~leaf if isinstance(leaf, Array) else not leaf
        return change(leaf) if isinstance(leaf, LEAVES) else leaf

    return lambda value: tree_map(changed, value)


def _shorter(value: Any) -> Any:
    """An array without the last entry along each axis."""
    return value[tuple(slice(max(1, n - 1)) for n in value.shape)] if isinstance(value, Array) else value


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else type(value)()


def _reordered(value: Any) -> Any:
    """The parts of a container in another order: each under the name or in the place of another."""
    if isinstance(value, dict) and len(value) > 1:
        parts = list(value.values())
        return dict(zip(value, [*parts[1:], parts[0]], strict=True))
    return type(value)([*value[1:], value[0]]) if type(value) in (tuple, list) and len(value) > 1 else value


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a half more": _each(lambda x: x + x // 2 + 1),  # whole numbers stay whole
    "shorter": _each(_shorter),
    "the opposite": _each(lambda x: -x),
    "parts reordered": _reordered,
    "zero": _each(_zero),
    "one more": _each(lambda x: x + 1),
    "the square": _each(lambda x: x * x if isinstance(x, float | Array) else x),  # not of sizes
}
"""The wrong answers that are tried, by name, in this order: functions from the right answer to a wrong one, or to an
equal one where they do not apply."""


VERDICTS = {"holds", "false", "only_when", "unseen"}
"""Functions that make a verdict of a condition, which is their first argument, or `unless`."""
JUDGES = {"abs", "all", "allclose", "amax", "amin", "any", "bool", "equal", "isclose", "isfinite", "isinf", "isnan"}
JUDGES |= {"isinstance", "item", "len", "max", "min", "norm", "round", "sorted"}
"""Calls that judge answers, or measure how far two are apart: a mutation there would be noticed by any check."""
READS = {"append", "clone", "cpu", "decode", "detach", "dict", "double", "encode", "enumerate", "eval", "extend"}
READS |= {"float", "format", "getattr", "hasattr", "int", "items", "keys", "list", "map", "numpy", "print"}
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
SECONDS = 20.0
"""The most CPU time of a run with a wrong answer. No check takes more than 3 s."""


class Site(NamedTuple):
    """A place of a check that gives an answer: a call, a product, quotient, power or sum, or an error that is caught.

    Places of a function whose code is alike are one site, so that a check that f(x) == f(x) cannot notice a wrong f.
    """

    line: int
    code: str
    operation: bool
    """Whether it is a product, quotient, power or sum, which is an answer if it is of arrays."""


class Instrumented:
    """The code of a check, in which a place can be made to give a wrong answer."""

    def __init__(self, check: Callable[[], Verdict]) -> None:
        rewriter = _Rewriter()
        body = [rewriter.visit(x) for x in _used(copy.deepcopy(_parsed(check.__module__)), check.__name__)]
        module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
        self.check, self.sites = check, rewriter.sites
        self.code = compile(module, inspect.getsourcefile(check) or "<check>", "exec")

    def run(self, at: int, change: str) -> tuple[str, bool]:
        """The kind of the verdict, and whether a place was reached where it gives an answer that can be wrong.

        The check runs in a namespace of its own, so that nothing is cached from another run, with the same random
        numbers each time.

        Args:
            at: the index of the site that gives a wrong answer, or where an error that is caught is overlooked.
            change: the name of the change that makes the wrong answer.
        """
        reached = False

        def answer(index: int, value: Any) -> Any:
            nonlocal reached
            counts = isinstance(value, Array) if self.sites[index].operation else not _is_judgement(value)
            if index != at or not counts or not any(isinstance(x, LEAVES | Verdict) for x in tree_leaves(value)):
                return value
            reached = True
            try:
                return CHANGES[change](value)
            except Exception:  # a value that refuses such a change
                return value

        def silent(index: int) -> bool:
            nonlocal reached
            reached |= index == at
            return index == at

        module = vars(sys.modules[self.check.__module__])
        names = {"__name__": module["__name__"], "__file__": module.get("__file__"), "__builtins__": __builtins__}
        names |= {ANSWER: answer, SILENT: silent}
        torch.manual_seed(0)
        np.random.seed(0)  # the state that checks of NumPy code share
        random.seed(0)
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(), _limited_to(SECONDS):
            warnings.simplefilter("ignore")
            try:
                exec(self.code, names)
                return names[self.check.__name__]().kind, reached
            except Drifted:
                return "drifted", reached
            except Exception:  # a wrong answer may break anything that follows
                return self.kind, reached

    @functools.cached_property
    def kind(self) -> str:
        """The kind of the verdict without a wrong answer."""
        return self.check().kind

    def notices(self, at: int) -> bool | None:
        """Whether the check notices a wrong answer of a place; None if the place gives none."""
        found = [self.run(at, change) for change in CHANGES]
        return any(kind != self.kind for kind, _ in found) if any(reached for _, reached in found) else None

    def can_fail(self) -> bool:
        """Whether the check notices any wrong answer."""
        return any(self.run(at, change)[0] != self.kind for change in CHANGES for at in range(len(self.sites)))


def _is_judgement(value: object) -> bool:
    """Whether a value is a single truth value: a judgement on answers, whose negation would always be noticed."""
    return _is_truth(value) and (not isinstance(value, Array) or value.ndim == 0)


def judges(check: Callable[[], Verdict]) -> bool:
    """Whether a check computes its verdict: it, or a function of its module that it uses, passes a condition on.

    Verdicts without a condition are not computed here: `cited` ones rest on reading, `experiment` ones on an
    experiment, which judges its results, and `unseen` without `unless` states nothing.
    """
    used = _used(_parsed(check.__module__), check.__name__)
    calls = [x for part in used for x in ast.walk(part) if isinstance(x, ast.Call)]
    return any(_name(x) in VERDICTS and _condition(x) is not None for x in calls)


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

    def _site(self, node: ast.expr | ast.ExceptHandler, code: str) -> ast.Constant:
        key = self._scope, f"{node.lineno}: error" if isinstance(node, ast.ExceptHandler) else code
        if key not in self._index:
            self._index[key] = len(self.sites)
            self.sites.append(Site(node.lineno, code, isinstance(node, ast.BinOp)))
        return ast.Constant(self._index[key])

    def _wrapped(self, node: ast.expr, code: str) -> ast.expr:
        index = self._site(node, code)
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
        return self._wrapped(node, code)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        code = ast.unparse(node)
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult | ast.Mult | ast.Div | ast.Pow | ast.Add):
            return self._wrapped(node, code)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        for handler in node.handlers:
            caught = ast.unparse(handler.type) if handler.type else ""
            index = self._site(handler, f"except {caught}")
            overlooked = ast.Call(ast.Name(SILENT, ast.Load()), [index], [])
            handler.body = [ast.If(ast.UnaryOp(ast.Not(), overlooked), handler.body, [])]
        return node


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


PUBLISHED = Path(__file__).parent / "mutation.json"
"""The results for all checks, which the page of claims reads."""


def computed() -> list[Claim]:
    """The claims whose checks compute a condition, by number."""
    return [c for _, c in sorted(CLAIMS.items()) if not isinstance(c.check, Entry) and judges(c.check)]


def main(ids: Sequence[str]) -> int:
    """Print what the checks of some claims notice; without ids, count the checks that can fail, for mutation.json."""
    torch.set_num_threads(1)
    load()
    among = {c.id: Instrumented(c.check) for c in computed()}
    if unknown := [i for i in ids if i not in among]:
        print(f"claim {', '.join(unknown)} is unknown or has no check that computes its verdict", file=sys.stderr)
        return 2
    for id_ in ids:
        for at, site in enumerate(among[id_].sites):
            if (noticed := among[id_].notices(at)) is not None:
                print(f"{id_} {'noticed' if noticed else 'overlooked'}: line {site.line}, {site.code}", flush=True)
    if not ids:
        cannot = [id_ for id_, one in among.items() if not one.can_fail()]
        write_atomically(PUBLISHED, json.dumps({"computed": list(among), "cannot": cannot}) + "\n")
        print(f"{len(among) - len(cannot)} of {len(among)} checks notice a wrong answer; {PUBLISHED}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

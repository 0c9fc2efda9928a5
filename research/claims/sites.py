"""Where a check computes: its code, in which every computed answer passes through a function that may replace it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from research.claims.claim import Verdict

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
    calls = [x for part in _used(*_module_of(check)) for x in ast.walk(part) if isinstance(x, ast.Call)]
    return any(_name(x) in VERDICTS and _condition(x) is not None for x in calls)


def instrument(check: Callable[[], Verdict]) -> Instrumented:
    """The instrumented code of a check."""
    tree, name = _module_of(check)
    rewriter = _Rewriter()
    body = [rewriter.visit(x) for x in _used(tree, name)]
    module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    path = inspect.getsourcefile(check) or "<check>"
    module_dict = vars(sys.modules[check.__module__])
    return Instrumented(name, tuple(rewriter.sites), compile(module, path, "exec"), module_dict)


def _module_of(check: Callable[[], Verdict]) -> tuple[ast.Module, str]:
    return ast.parse(inspect.getsource(sys.modules[check.__module__])), check.__name__


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

"""The exercises that stand in the labs: what to define, its signature, and the code to start from."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from qkv.errors import InputError, nearest
from qkv_lab.lessons.catalog import LESSONS, Lesson, lesson
from qkv_lab.lessons.page import Cell, cells


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lab.

    Attributes:
        name: name of its check in `qkv_lab.check`.
        lab: name of the lab.
        defines: the function or class that the answer must define.
        signature: how it is called, such as ``entropy(weights)``.
        before: the imports and definitions of the lab that the code uses.
        code: the lab's code to start from. It contains a mistake.
    """

    name: str
    lab: str
    defines: str
    signature: str
    before: str
    code: str

    @property
    def start(self) -> str:
        """A file to start from, complete."""
        return f"{self.before}\n\n\n{self.code}\n" if self.before else f"{self.code}\n"

    @property
    def solution(self) -> str:
        """The right answer that the lab gives, complete."""
        before: dict[str, str] = {}
        for cell in cells(lesson(self.lab).text()):
            code, found, _ = cell.source.partition(f"assert check.{self.name}(")
            if cell.kind == "code" and found:
                return f"{_needed(code, {k: v for k, v in before.items() if k not in _binds(code)})}\n{code}"
            before |= _binds(cell.source) if cell.kind == "code" else {}
        raise InputError(f"lab {self.lab} has no solution of {self.name}")


def exercise(name: str) -> Exercise:
    """The exercise with a name.

    >>> exercise("key_bias").signature
    'with_key(q, k, v, key, mask=None)'
    """
    found = exercises()
    if name not in found:
        raise InputError(f"exercise is {name!r}, expected one of {', '.join(found)}{nearest(name, found)}")
    return found[name]


@functools.cache
def exercises() -> dict[str, Exercise]:
    """All exercises by name, in the order of the labs.

    >>> list(exercises())[:3]
    ['attention', 'entropy', 'temperature']
    """
    return {one.name: one for page in LESSONS if page.part == "labs" for one in _of(page)}


def checked(cell: Cell) -> tuple[str, str] | None:
    """The exercise whose starting code a cell is, and the name that it defines; None for other cells.

    Such a cell calls a check; a solution asserts that the check returns True.

    >>> checked(Cell("code", "def f(w): ...\\n\\ncheck.entropy(f);"))
    ('entropy', 'f')
    """
    if cell.kind != "code" or "check." not in cell.source:
        return None
    last = ast.parse(cell.source).body[-1]
    match last:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("check"), name), [ast.Name(defined)])):
            return name, defined
    return None


def _of(page: Lesson) -> Iterator[Exercise]:
    """The exercises of a lab. Imports and definitions of the cells before are added where the code uses them."""
    before: dict[str, str] = {}
    for cell in cells(page.text()):
        if cell.kind == "text":
            continue
        if (found := checked(cell)) is not None:
            yield _exercise(page, cell.source, *found, before)
        before |= _binds(cell.source)


def _exercise(page: Lesson, source: str, name: str, defined: str, before: dict[str, str]) -> Exercise:
    body = ast.parse(source).body[:-1]
    node = next(x for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == defined)
    call = node.args if isinstance(node, ast.FunctionDef) else _made_by(node)
    code = "\n".join(source.splitlines()[: body[-1].end_lineno])
    needed = _needed(code, {key: text for key, text in before.items() if key not in _binds(code)})
    return Exercise(name, page.name, defined, f"{defined}({_parameters(call)})", needed, code)


def _binds(source: str) -> dict[str, str]:
    """The names that imports, functions and classes of a cell bind, with the code that does it."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        code = ast.get_source_segment(source, node) or ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: code for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = code
    return found


def _needed(code: str, before: dict[str, str]) -> str:
    """The imports and definitions of earlier cells that some code uses, and those that these use."""
    used: set[str] = set()
    waiting = [code]
    while waiting:
        names = {x.id for x in ast.walk(ast.parse(waiting.pop())) if isinstance(x, ast.Name)}
        new = (names & before.keys()) - used
        used |= new
        waiting += [before[name] for name in new]
    parts = list(dict.fromkeys(text for name, text in before.items() if name in used))
    imports = [part for part in parts if part.startswith(("import ", "from "))]
    return "\n\n\n".join(["\n".join(imports)] * bool(imports) + [x for x in parts if x not in imports])


def _made_by(node: ast.ClassDef) -> ast.arguments:
    """The parameters of a class, with self."""
    made = next(x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    return made.args


def _parameters(arguments: ast.arguments) -> str:
    return ast.unparse(arguments).removeprefix("self, ")

"""The exercises that stand in the labs: what to define, its signature, and the code to start from."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from qkv.errors import InputError, nearest
from qkv.lab.lessons.catalog import LESSONS, Lesson
from qkv.lab.lessons.page import Cell, cells


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lab.

    Attributes:
        name: name of its check in `qkv.lab.check`.
        lab: name of the lab.
        defines: the function or class that the answer must define.
        signature: how it is called, such as ``entropy(weights)``.
        about: first line of its docstring, if it has one.
        start: the lab's code to start from, with the imports that it needs. It contains the mistake of the lab.
    """

    name: str
    lab: str
    defines: str
    signature: str
    about: str
    start: str


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
    return {one.name: one for lesson in LESSONS if lesson.part == "labs" for one in _of(lesson)}


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


def _of(lesson: Lesson) -> Iterator[Exercise]:
    page = [cell for cell in cells(lesson.text()) if cell.kind == "code"]
    imports = [node for cell in page for node in ast.parse(cell.source).body if isinstance(node, IMPORTS)]
    for cell in page:
        if (found := checked(cell)) is not None:
            yield _exercise(lesson, cell, *found, imports)


IMPORTS = (ast.Import, ast.ImportFrom)


def _exercise(
    lesson: Lesson, cell: Cell, name: str, defined: str, imports: list[ast.Import | ast.ImportFrom]
) -> Exercise:
    body = ast.parse(cell.source).body[:-1]
    node = next(x for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == defined)
    call = node.args if isinstance(node, ast.FunctionDef) else _made_by(node)
    doc = (ast.get_docstring(node) or "").split("\n")[0]
    used = {x.id for part in body for x in ast.walk(part) if isinstance(x, ast.Name)}
    needed = [ast.unparse(x) for x in imports if any((a.asname or a.name).split(".")[0] in used for a in x.names)]
    code = "\n".join(cell.source.splitlines()[: body[-1].end_lineno])
    start = "\n".join([*needed, *["", ""] * bool(needed), code, ""])
    return Exercise(name, lesson.name, defined, f"{defined}({_parameters(call)})", doc, start)


def _made_by(node: ast.ClassDef) -> ast.arguments:
    """The parameters of a class, without self."""
    made = next(x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    return made.args


def _parameters(arguments: ast.arguments) -> str:
    return ast.unparse(arguments).removeprefix("self, ")

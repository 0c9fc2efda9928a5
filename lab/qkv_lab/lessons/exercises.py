"""The exercises that stand in the labs: what to define, its signature, and the code to start from."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qkv.errors import InputError, nearest
from qkv_lab.lessons.catalog import LESSONS, Lesson
from qkv_lab.lessons.page import Cell, cells


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lab.

    Attributes:
        name: name of its check in `qkv_lab.check`.
        lab: name of the lab.
        defines: the function or class that the answer must define.
        signature: how it is called, such as ``entropy(weights)``.
        start: the lab's code to start from, complete. It contains a mistake.
        code: the same without the imports and definitions of the lab that it uses.
        solution: the right answer that the lab gives, complete.
    """

    name: str
    lab: str
    defines: str
    signature: str
    start: str
    code: str
    solution: str = ""


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


def _of(page: Lesson) -> Iterable[Exercise]:
    """The exercises of a lab. Imports and definitions of the cells before are added where the code uses them."""
    found: dict[str, Exercise] = {}
    before: dict[str, str] = {}
    for cell in cells(page.text()):
        if cell.kind == "text":
            continue
        if (starts := checked(cell)) is not None:
            found[starts[0]] = _exercise(page, cell.source, *starts, before)
        for assertion in re.finditer(r"assert check\.(\w+)\(", cell.source):
            code = cell.source[: assertion.start()]
            found[assertion[1]] = replace(found[assertion[1]], solution=_complete(code, before, "\n"))
        before |= definitions(cell.source)
    return found.values()


def _exercise(page: Lesson, source: str, name: str, defined: str, before: dict[str, str]) -> Exercise:
    body = ast.parse(source).body[:-1]
    node = next(x for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == defined)
    functions = [x for x in ast.walk(node) if isinstance(x, ast.FunctionDef) and x.name in (defined, "__init__")]
    code = "\n".join(source.splitlines()[: body[-1].end_lineno])
    signature = f"{defined}({ast.unparse(functions[0].args).removeprefix('self, ')})"
    return Exercise(name, page.name, defined, signature, _complete(f"{code}\n", before, "\n\n\n"), code)


def _complete(code: str, before: dict[str, str], between: str) -> str:
    """The code behind the imports and definitions of earlier cells that it uses."""
    needed = needed_by(code, {key: text for key, text in before.items() if key not in definitions(code)})
    return f"{needed}{between}{code}" if needed else code


def definitions(source: str) -> dict[str, str]:
    """The names that imports, functions, classes and constants of a cell bind, with the code that does it."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        first = min([node.lineno, *(x.lineno for x in decorators)])
        code = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: code for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = code
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_constant(node.value):
            found[node.targets[0].id] = code
    return found


def _is_constant(value: ast.expr) -> bool:
    """Whether a value is a literal or a function, for which nothing has to be computed."""
    if isinstance(value, ast.Lambda):
        return True
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


def needed_by(code: str, before: dict[str, str]) -> str:
    """The imports and definitions of earlier cells that some code uses, and those that these use in turn."""
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

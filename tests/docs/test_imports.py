"""Imports go down, between the rooms and within them, and `import qkv` is light and inert."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from qkv import engine
from qkv._above import ABOVE

ROOT = Path(__file__).parents[2]
# The rooms, the lowest first: each imports only from itself and those before it.
ROOMS = {"qkv": ROOT / "src" / "qkv", "qkv_lab": ROOT / "lab" / "qkv_lab", "research": ROOT / "research"}
# Layers within a room, the lowest first. A dotted name is a package of its own inside another.
ORDER = {
    "qkv": [
        "errors", "_lazy", "_above", "_contract", "_packages", "_untrusted", "_files", "_progress",
        "_registry", "_survey_settings", "course", "lab",
        "masks", "biases", "positions", "scores", "normalizers", "features", "partial",
        "results", "native", "engine", "compat", "reference", "kernels", "linear",
        "statistics", "choice", "_plan", "_operator", "attention", "ring",
        "edits", "testing", "cache", "nn", "models", "huggingface",
        "profiler.data", "profiler.capture", "profiler.editing", "profiler.surveys", "profiler.explore",
        "profiler.analyses", "profiler", "plot", "page", "report",
        "runs", "tracking", "server", "cli", "__main__",
    ],
    "qkv_lab": [
        "experiments.evidence", "draw", "task", "lexicon", "grammar", "scenes", "log", "heads", "tokens", "models",
        "course_masks", "course_pictures", "course", "translation", "tasks", "settings", "resume", "loop",
        "experiments", "testing", "check", "lessons", "answers", "align", "cli",
    ],
    "research": ["sinks", "sources", "claims"],
}  # fmt: skip
FILES = {
    ".".join((room, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
    for room, folder in ROOMS.items()
    for file in folder.rglob("*.py")
}


def imports(file: Path) -> Iterator[str]:
    """Modules of the rooms that a file imports, in functions and for types too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the order"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module or "" for name in full]
        else:
            names = [alias.name for alias in node.names]
        # `import qkv` itself, and a name in it such as `attend`, is all of the core.
        yield from ("qkv.attention" if name == "qkv" else name for name in names if name.split(".")[0] in ROOMS)


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """The modules that each module imports; of `_above`, whose table is for what goes up, see the test of it."""
    return {name: set(imports(file)) - {name, "qkv._above"} for name, file in FILES.items() if name != "qkv._above"}


def layer(module: str) -> tuple[int, int]:
    """The place of a module: its room, and in ORDER the innermost package there that it belongs to."""
    room, *parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    within = next((ORDER[room].index(name) for name in names if name in ORDER[room]), None)
    assert within is not None or not parts, f"{module}: give its package a place in ORDER"
    return list(ROOMS).index(room), -1 if within is None else within


def test_every_import_goes_to_the_same_layer_or_a_lower_one() -> None:
    upwards = [
        f"{a} -> {b}"
        for a, found in all_imports().items()
        for b in found
        if "." in a and layer(b) > layer(a)  # the `__init__` of a room names all of it
    ]
    assert not upwards


@pytest.mark.parametrize("room", ROOMS)
def test_modules_do_not_import_one_another_in_a_circle(room: str) -> None:
    """Imports inside functions and for types count."""
    graph = {name: {b for b in found if b.split(".")[0] == room and "." in b} for name, found in all_imports().items()}
    try:
        TopologicalSorter({name: found for name, found in graph.items() if name.split(".")[0] == room}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}", pytrace=False)


def test_only_methods_that_draw_or_compare_reach_a_room_above_and_by_one_table() -> None:
    """`above` is called with names of the table, all of which exist, and nothing else loads a module by its name."""
    asked, by_name = set[str](), set[str]()
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "above":
                asked.add(ast.literal_eval(node.args[0]))
            if "import_module" in (getattr(node, "id", ""), getattr(node, "attr", "")):
                by_name.add(name)
    assert asked == set(ABOVE)
    assert all(Path(FILES[place.rpartition(".")[0]]).exists() for place in ABOVE.values())
    others = {"qkv.profiler.surveys.corpus", "qkv.tracking.tracker", "research.claims.settled"}
    assert by_name == {"qkv._above", "qkv._lazy", "qkv._packages", "qkv._registry"} | others


@pytest.mark.parametrize("folder", ["src/qkv/page", "lab/qkv_lab/align/page"])
def test_scripts_of_a_page_do_not_import_one_another_in_a_circle(folder: str) -> None:
    found = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob("*.js")}
    graph = {name: set(re.findall(r'\bfrom "\./([\w.]+)"', text)) for name, text in found.items()}
    assert any(graph.values())
    TopologicalSorter(graph).prepare()


def test_no_kernel_imports_another() -> None:
    kernels = {
        name: found for name, found in all_imports().items() if name.startswith("qkv.kernels.") and name.count(".") == 2
    }
    assert set(kernels) > {"qkv.kernels.tiled", "qkv.kernels.eager", "qkv.kernels.flex"}
    known = ("qkv.kernels", "qkv.kernels.fused_sink", "qkv.kernels.native_call")  # parts of `fused` and of `native`
    assert not [(a, b) for a, found in kernels.items() for b in found if b.startswith(known[0]) and b not in known]


def test_outside_of_the_core_nothing_of_the_engine_is_imported_but_its_documented_names() -> None:
    core = layer("qkv.ring")
    used = {b for a, found in all_imports().items() if layer(a) > core for b in found if b.startswith("qkv.engine")}
    assert used == {"qkv.engine"}
    page = (ROOT / "docs" / "dev" / "engine.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(engine.__all__)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = {
    "transformers", "tokenizers", "safetensors", "xarray", "matplotlib", "seaborn", "pandas", "rich", "tyro",
    "beartype", "scipy", "sklearn", "fastapi", "pydantic", "uvicorn", "PIL",
}  # fmt: skip


CORE = """
import qkv, qkv.kernels, qkv.reference
qkv.attend, qkv.measure, qkv.choose_keys, qkv.linear_attend, qkv.merge
qkv.cache, qkv.huggingface, qkv.models, qkv.nn, qkv.ring, qkv.testing, qkv.lab
"""


def test_help_does_without_torch_and_import_qkv_without_anything() -> None:
    said = python("""
import sys, qkv
print(*sorted(name for name in sys.modules if name[:4] == "qkv."))
from qkv.cli import main
for command in ("--help", "profile --help", "generate --help", "--version"):
    try:
        main(command.split())
    except SystemExit:
        pass
    print("loaded:", *sorted({"torch", "numpy"} & set(sys.modules)))
""")
    at_once, said = said.split("\n", 1)
    assert at_once == "qkv._lazy qkv.errors"
    shown = said.split("loaded:\n")
    assert (len(shown), shown[-1]) == (5, "")
    assert all(shown[:-1])


@pytest.mark.slow
def test_the_core_is_inert_and_works_with_torch_numpy_and_jaxtyping_alone() -> None:
    """No patches, no threads, no environment, no seeds, no settings of torch; nothing heavy is loaded or needed.

    Names load on first use: `attend` without models, `models` without the profiler.
    """
    core, models, *loaded, blocked = python(
        f"""
import os, sys, threading, warnings

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import torch, numpy, jaxtyping
modules = set(sys.modules)
def state():
    return (
        dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.random.get_rng_state().sum().item(), torch.is_grad_enabled(), torch.nn.functional.softmax,
        torch.nn.functional.scaled_dot_product_attention, torch.Tensor.__matmul__, list(sys.meta_path), sys.excepthook,
        list(warnings.filters),
    )
before = state()
def ours():
    return {{n.split(".")[1] for n in sys.modules if n[:4] == "qkv."}}
import qkv
qkv.attend
print(*ours())
from qkv import models
print(*ours())
{CORE}
assert state() == before
print(*set(sys.modules) - modules, sep="\\n")
q = k = v = torch.randn(1, 4, 10, 8, requires_grad=True)
for kernel in ("native", "tiled", "eager"):
    qkv.attend(q, k, v, mask=qkv.masks.Window(3), kernel=kernel).sum().backward()
assert qkv.measure(q, k, mask=qkv.masks.Causal()).entropy.shape == (1, 4, 10)
try:
    qkv.profile
except ModuleNotFoundError as error:
    print(error)
"""
    ).splitlines()
    rooms = ORDER["qkv"]
    assert "attention" in core.split()
    assert not set(core.split()) & set(rooms[rooms.index("testing") :])
    assert "models" in models.split()
    assert not set(models.split()) & set(rooms[rooms.index("huggingface") :])
    assert {"qkv.kernels.tiled", "qkv.models.decoder", "qkv.testing.weights"} <= set(loaded)
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert blocked.split()[0] in HEAVY
    assert "is blocked" in blocked

"""Each module imports only from those before it, and `import qkv` is light and inert."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "qkv"
# Layers of the package, the lowest first. A dotted name is a package of its own inside another.
ORDER = [
    "_lazy", "errors", "_contract", "_warnings", "_lost", "_packages", "_names", "_files", "_untrusted", "_addresses",
    "_datasets", "_progress", "_registry",
    "masks", "biases", "positions", "scores", "normalizers", "features", "partial",
    "_engine", "ring", "reference", "kernels.flash", "kernels", "linear", "statistics", "choice", "_launches", "_cost",
    "_diagram", "attention",
    "edits", "testing", "cache", "nn", "course", "models", "huggingface",
    "profiler.data", "profiler.capture", "profiler.surveys", "profiler.explore", "profiler.analyses",
    "figures", "page", "report", "profiler", "plot", "tracking", "bench", "lab", "testing.lab",
    "sinks", "ledger", "server", "cli",
]  # fmt: skip
FILES = {
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in SOURCE.rglob("*.py")
    if file.parent != SOURCE or file.name != "__init__.py"
}


def imports(file: Path) -> Iterator[str]:
    """Modules of qkv that a file imports, in functions too, but not for types alone; dotted, without ``qkv.``."""
    tree = ast.parse(file.read_text())
    never = {
        x
        for f in ast.walk(tree)
        if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.dump(f.test)
        for b in f.body
        for x in ast.walk(b)
    }
    for node in ast.walk(tree):
        if node in never:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the order"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("qkv.") in FILES else node.module or "" for name in full]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        # `import qkv` itself, and a name in it such as `attend`, is all of the core.
        yield from (name.removeprefix("qkv.") if name != "qkv" else "attention" for name in names if name[:3] == "qkv")


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: set(imports(file)) for name, file in FILES.items()}


def layer(module: str) -> int:
    """The place in ORDER of the innermost package there that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(ORDER.index(name) for name in names if name in ORDER)


def test_every_import_goes_to_the_same_layer_or_a_lower_one() -> None:
    upwards = [f"{a} -> {b}" for a, found in all_imports().items() for b in found if layer(b) > layer(a)]
    assert not upwards


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    """Imports inside functions count."""
    TopologicalSorter({name: found - {name} for name, found in all_imports().items()}).prepare()


def test_no_kernel_imports_another() -> None:
    kernels = {
        name: found for name, found in all_imports().items() if name.startswith("kernels.") and name.count(".") == 1
    }
    assert set(kernels) > {"kernels.tiled", "kernels.eager", "kernels.flex"}
    assert not [(a, b) for a, found in kernels.items() for b in found if b.startswith("kernels") and b != "kernels"]


def test_outside_of_the_core_the_engine_is_only_its_calls_and_row_states() -> None:
    core = ORDER.index("attention")
    used = {b for name, found in all_imports().items() if layer(name) > core for b in found if b.startswith("_engine")}
    assert used == {"_engine.call", "_engine.row_state"}


def test_the_walk_finds_imports() -> None:
    names = {name for found in all_imports().values() for name in found}
    assert {"errors", "masks", "kernels", "_engine.tiles", "profiler.data.tables"} <= names
    assert {name.split(".")[0] for name in all_imports()} >= set(ORDER[:11])


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = {
    "transformers", "tokenizers", "safetensors", "xarray", "zarr", "matplotlib", "seaborn", "pandas", "rich", "tyro",
    "beartype", "scipy", "sklearn", "fastapi", "pydantic", "uvicorn", "PIL",
}  # fmt: skip


CORE = """
import qkv, qkv.kernels, qkv.reference
qkv.attend, qkv.measure, qkv.choose_keys, qkv.linear_attend, qkv.merge
qkv.cache, qkv.huggingface, qkv.models, qkv.nn, qkv.ring, qkv.testing, qkv.lab
"""


def test_import_loads_no_module_of_the_package() -> None:
    """Names load on first use: `attend` without models, `models` without the profiler."""
    ours = "*sorted(n.removeprefix('qkv.') for n in sys.modules if n[:4] == 'qkv.'), 'torch' in sys.modules"
    said = python(f"import sys, qkv; print({ours}); qkv.attend; print({ours}); from qkv import models; print({ours})")
    at_once, core, models = (line.split() for line in said.splitlines())
    assert at_once == ["_lazy", "errors", "False"]
    assert "attention" in core
    assert not {name.split(".")[0] for name in core} & set(ORDER[ORDER.index("testing") :])
    assert {"models.decoder", "nn"} <= set(models)
    assert not {name.split(".")[0] for name in models} & set(ORDER[ORDER.index("huggingface") :])


@pytest.mark.parametrize("command", ["--help", "profile --help", "generate --help", "--version"])
def test_help_does_without_torch(command: str) -> None:
    code = f"""
import sys
from qkv.cli import main
try:
    main({command.split()})
except SystemExit:
    pass
print("loaded:", *sorted({{"torch", "numpy"}} & set(sys.modules)))
"""
    said = python(code)
    assert len(said) > len("loaded:\n")
    assert said.endswith("loaded:\n")


def test_the_core_works_with_torch_numpy_and_jaxtyping_alone() -> None:
    out = python(f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import torch, qkv
q = k = v = torch.randn(1, 4, 10, 8, requires_grad=True)
for kernel in ("flash", "tiled", "eager"):
    qkv.attend(q, k, v, mask=qkv.masks.Window(3), kernel=kernel).sum().backward()
assert qkv.measure(q, k, mask=qkv.masks.Causal()).entropy.shape == (1, 4, 10)
try:
    qkv.profile
except ModuleNotFoundError as error:
    print(error)
""")
    assert out.split()[0] in HEAVY
    assert "is blocked" in out


def test_the_core_is_inert_and_loads_nothing_heavy() -> None:
    """No patches, no threads, no environment, no seeds, no settings of torch."""
    loaded = python(
        """
import os, sys, threading, warnings, torch, numpy, jaxtyping
modules = set(sys.modules)
def state():
    return (
        dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.random.get_rng_state().sum().item(), torch.is_grad_enabled(), torch.nn.functional.softmax,
        torch.nn.functional.scaled_dot_product_attention, torch.Tensor.__matmul__, list(sys.meta_path), sys.excepthook,
        list(warnings.filters),
    )
before = state()
"""
        + CORE
        + "assert state() == before\nprint(*set(sys.modules) - modules)"
    ).split()
    assert {"qkv.kernels.tiled", "qkv.models.decoder", "qkv.testing.masks"} <= set(loaded)
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()


def test_names_that_do_not_exist_are_said_so() -> None:
    import qkv

    with pytest.raises(AttributeError, match="module 'qkv' has no attribute 'atend'"):
        qkv.atend  # noqa: B018
    for name in qkv.__all__:
        if name not in ("Profile", "profile"):
            assert hasattr(qkv, name)

"""Each module imports only from those before it, and `import qkv` is light and inert."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "qkv"
ORDER = [
    "errors", "contract", "inputs", "files", "masks", "biases", "positions", "scores", "normalizers", "features",
    "partial", "noise", "parallel", "call", "transforms", "ring", "tiles", "weights", "weight_tiles", "parts", "cuts",
    "reference", "kernels", "linear",
    "sums", "measure", "transposed", "maps", "choice", "cost",
    "attention", "testing", "cache", "nn", "models", "huggingface",
    "profiler", "view", "bench", "lab", "server", "cli",
]  # fmt: skip
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts[0].removesuffix(".py") in ORDER)


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Modules of qkv that a file imports, dotted, without ``qkv.``; and whether it does so on use, in a function."""
    tree = ast.parse(file.read_text())
    late = {x for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for x in ast.walk(f)}
    never = {x for f in ast.walk(tree) if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.dump(f.test) for x in f.body}
    for node in ast.walk(tree):
        if node in never:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the order"
            module = node.module or ""
            names = [f"qkv.{a.name}" for a in node.names] if module == "qkv" else [module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        yield from ((name.removeprefix("qkv."), node in late) for name in names if name.startswith("qkv"))


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(SOURCE)) for f in FILES])
def test_a_module_imports_only_from_those_before(file: Path) -> None:
    path = file.relative_to(SOURCE).with_suffix("").parts
    for name, late in imports(file):
        if late and (path[-1] == "__init__" or path in (("profiler", "data"), ("profiler", "compare"))):
            continue  # conveniences that load on use
        target = name.split(".")
        # `import qkv` itself, and a name in it such as `InputError`, is all of the core.
        core = target[0] not in ORDER
        here, there = ORDER.index(path[0]), ORDER.index("attention" if core else target[0])
        assert there < here or (there == here and len(path) > 1), f"imports qkv.{name}"
        if path[0] == target[0] == "kernels":
            assert path[1] == "__init__", f"one kernel imports another: qkv.{name}"


def test_the_walk_finds_imports() -> None:
    names = {name for file in FILES for name, _ in imports(file)}
    assert {"errors", "masks", "kernels", "tiles"} <= names
    assert {f.relative_to(SOURCE).parts[0].removesuffix(".py") for f in FILES} >= set(ORDER[:11])


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = {
    "transformers", "tokenizers", "safetensors", "xarray", "zarr", "matplotlib", "seaborn", "pandas", "rich", "tyro",
    "beartype", "scipy", "sklearn", "fastapi", "pydantic", "uvicorn", "PIL",
}  # fmt: skip


def test_import_loads_nothing_heavy() -> None:
    loaded = python(
        "import sys, torch, numpy, jaxtyping; a = set(sys.modules); import qkv; print(*set(sys.modules) - a)"
    )
    assert {name.split(".")[0] for name in loaded.split()} & HEAVY == set()


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


def test_import_is_inert() -> None:
    """No patches, no threads, no environment, no seeds, no settings of torch."""
    python("""
import os, sys, threading, warnings, torch, numpy, jaxtyping
def state():
    return (
        dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.random.get_rng_state().sum().item(), torch.is_grad_enabled(), torch.nn.functional.softmax,
        torch.nn.functional.scaled_dot_product_attention, torch.Tensor.__matmul__, list(sys.meta_path), sys.excepthook,
        list(warnings.filters),
    )
before = state()
import qkv
assert state() == before
""")


def test_names_that_do_not_exist_are_said_so() -> None:
    import qkv

    with pytest.raises(AttributeError, match="module 'qkv' has no attribute 'atend'"):
        qkv.atend  # noqa: B018
    for name in qkv.__all__:
        if name not in ("Profile", "profile"):
            assert hasattr(qkv, name)

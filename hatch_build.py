"""What the build adds to pyproject.toml: the compiled library, project URLs and the README of a package index.

The library is compiled here, not by scikit-build-core or meson-python, because neither (1.1.2, 0.22.1) writes the bill
of materials of the bundled models into a wheel (PEP 770), as hatchling does, and because one call of the compiler for
each set of instructions needs neither CMake nor Meson.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

NATIVE = "src/qkv/native"
FUNCTIONS = ("qkv_attend", "qkv_decode", "qkv_gradients", "qkv_pool", "qkv_eigenvalues", "qkv_nodes")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Wno-psabi")
X86 = {f"v{n}": [f"-march=x86-64-v{n}"] for n in (2, 3, 4)}
X86["products"] = [*X86["v4"], "-mavx512bf16", "-DBFLOAT16"]
"""The builds for x86-64, by the end of the names of their functions."""
AMX = [*X86["v4"], "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
TILES = {f"tiles{parts}": [*AMX, f"-DPARTS={parts}"] for parts in (1, 2, 3)}
"""Those that a compiler must know AMX for: GCC 11 or clang 12."""

ADDRESS = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)")
RELATIVE = r"\((?!https?:)([^)\s]*)\)"


def urls(repository: str, version: str) -> dict[str, str]:
    """The links of the project beside its description on a package index; none without a repository."""
    if not repository:
        return {}
    found = ADDRESS.fullmatch(repository)
    if found is None:
        raise ValueError(
            f"repository is {repository!r} in pyproject.toml, expected https://github.com/OWNER/NAME or ''"
        )
    return {
        "Source": repository,
        "Documentation": f"https://{found['owner'].lower()}.github.io/{found['name']}/",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def published(readme: str, repository: str, version: str) -> str:
    """The README for a package index, where relative links lead nowhere.

    They become links to the files of this version in the repository. Without a repository the text of a link stays, and
    pictures go.
    """
    if not repository:
        readme = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n\n", "", readme)
        return re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1", readme)
    readme = re.sub(rf"!\[([^\]]*)\]{RELATIVE}", rf"![\1]({repository}/raw/v{version}/\2)", readme)
    return re.sub(rf"\]{RELATIVE}", rf"]({repository}/blob/v{version}/\1)", readme)


class ProjectMetadata(MetadataHookInterface):
    """Fills in what pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = self.config["repository"], metadata["version"]
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = urls(repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": published(readme, repository, version)}


class CompiledLibrary(BuildHookInterface):
    """Compiles src/qkv/native, once for each set of instructions. Without a compiler the package works, but slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root, NATIVE)
        problem = compiled(folder, folder / "attention.so")
        if problem is not None:
            self.app.display_warning(f"qkv is built without its native library: {problem}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())


def compiled(folder: Path, library: Path) -> str | None:
    """Compile the C files of a folder to a shared library; returns why that failed, or None."""
    if sys.platform != "linux":
        return f"it is compiled on Linux, not on {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    x86 = platform.machine() in ("x86_64", "AMD64")
    builds, more = X86 if x86 else {"base": []}, ["-DNO_TILES"]
    with TemporaryDirectory() as temporary:
        try:
            if (
                x86
                and not subprocess.run([*compiler, *AMX, "-fsyntax-only", "-xc", os.devnull], check=False).returncode
            ):
                builds, more = X86 | TILES, []
            parts = [f"{temporary}/{name}.o" for name in builds]
            for part, (name, flags) in zip(parts, builds.items(), strict=True):
                names = [f"-D{function}={function}_{name}" for function in FUNCTIONS]
                source = ["-c", str(folder / "library.c"), *names]
                subprocess.run([*compiler, *FLAGS, *flags, *source, "-o", part], check=True)
            finished = Path(temporary, library.name)
            choose = [str(folder / "choose.c"), *parts]
            subprocess.run([*compiler, *FLAGS, *more, "-shared", *choose, "-o", str(finished), "-lm"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)  # it would be of older sources
            return str(error)
        new = library.with_suffix(".new")
        new.write_bytes(finished.read_bytes())
        new.chmod(0o755)
        os.replace(new, library)
    return None

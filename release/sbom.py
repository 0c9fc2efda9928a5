"""Write sbom.cdx.json: what the wheel contains besides qkv's code, as a software bill of materials (CycloneDX).

These are the trained models, with the SHA-256 hash of every file. The wheel carries the file in its metadata (PEP 770).
`make sbom` runs this; a test compares the file with the models. The bill of the dependencies is not here, because they
differ from one installation to the next: `cyclonedx-py environment` writes it for yours.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import qkv
from qkv.models import checkpoint

FILE = Path(__file__).parents[1] / "sbom.cdx.json"


def sbom() -> dict[str, Any]:
    """The bill of materials; it depends on the version and the files of the models alone."""
    package = {
        "type": "library",
        "bom-ref": "qkv",
        "name": "qkv",
        "version": qkv.__version__,
        "purl": f"pkg:pypi/qkv@{qkv.__version__}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": package},
        "components": [_model(name, purpose) for name, purpose in checkpoint.NAMES.items()],
        "dependencies": [{"ref": "qkv", "dependsOn": list(checkpoint.NAMES)}],
    }


def _model(name: str, purpose: str) -> dict[str, Any]:
    folder = checkpoint.folder_of(name)
    assert folder is not None
    package = folder.parents[2]  # qkv, or qkv_lab
    return {
        "type": "machine-learning-model",
        "bom-ref": name,
        "name": name,
        "version": qkv.__version__,
        "description": purpose,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "components": [
            {
                "type": "file",
                "name": file.relative_to(package.parent).as_posix(),
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
            }
            for file in sorted(folder.iterdir())
        ],
    }


def text() -> str:
    return json.dumps(sbom(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

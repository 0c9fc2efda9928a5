"""The report: a profile as one HTML file that needs no network, no server and no installation."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.files import write_whole
from qkv.view.payload import payload

if TYPE_CHECKING:
    from qkv.profiler.data import Profile

SCRIPTS = ("report_data.js", "report_charts.js", "report.js")  # in the order they build on one another
# Characters that could end a script element, start a comment in it, or break a line of JavaScript.
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_report(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """Write `profile` as one self-contained HTML page, and return its path.

    The page holds the numbers of every head exactly as `Profile.heads` gives them (to six digits), curves
    along the text in 16 bits (binned for long texts), and dense maps, where kept, in steps of 1/255. Tokens
    are data, never markup; a content security policy lets nothing run but the page's own script.

    Raises:
        InputError: the folder of `path` does not exist, or `path` is a folder.
    """
    target = Path(path)
    write_whole(target, render(profile).encode("utf-8", "replace"))
    return target


def render(profile: Profile) -> str:
    """The page as a string."""
    page, blobs = payload(profile)
    style = _asset("report.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "title": html.escape(f"{profile.attrs.get('model', 'Model')} · attention profile"),
        "policy": (
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "page": _json(page),
        "blobs": "\n".join(f'<script type="text/plain" id="{name}">{blob}</script>' for name, blob in blobs.items()),
    }
    # One pass, so that no inserted text is searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(UNSAFE)


def _asset(name: str) -> str:
    return (files("qkv.view") / name).read_text("utf-8")


def _hash(content: str) -> str:
    """How a content security policy names an inline element that may take effect."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode("ascii")

"""Being written."""

from __future__ import annotations

from qkv.call import Call, Result


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    return "it is being written"


def run(call: Call) -> Result:
    raise NotImplementedError

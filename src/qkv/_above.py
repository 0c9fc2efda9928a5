"""The only imports that go up: methods of data and definitions that hand their object to a room above.

Data does not depend on drawing: `Comparison.plot` and `Mask.plot` are names for what the rooms `plot` and
`report` do with it. A room is loaded on use.
"""

from __future__ import annotations

import importlib
from typing import Any

ABOVE = {
    "mask": "qkv.plot.composition.mask_axes",
    "picture": "qkv.plot.composition.picture_of",
    "plot comparison": "qkv.plot.comparison.comparison_figure",
    "plot sources": "qkv.plot.analyses.sources_figure",
    "press": "qkv.huggingface.presses.press_policy",
    "report": "qkv.report.html.write_report",
}
"""What a method hands its object to."""


def above(what: str, *arguments: object) -> Any:
    """Call a function of the table `ABOVE`."""
    module, _, name = ABOVE[what].rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments)

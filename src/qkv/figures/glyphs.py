"""Characters that the fonts of a figure lack, and text that runs from right to left."""

from __future__ import annotations

import functools
import unicodedata

from matplotlib import font_manager
from matplotlib.font_manager import FontProperties, findfont, get_font

IGNORED = ("Cf", "Mn", "Cc")  # joiners, marks and control characters: they are dropped, since they stand for nothing


def drawable(text: str) -> str:
    """The text as matplotlib can draw it: a character that no font of the figure has is named by its code point.

    >>> drawable("café"), drawable("\\U000e0fff")
    ('café', '[U+E0FFF]')
    """
    known = _characters(tuple(FontProperties().get_family()))
    if all(ord(x) in known for x in text):
        return text
    made = []
    for x in text:
        if ord(x) in known:
            made.append(x)
        elif unicodedata.category(x) not in IGNORED:
            made.append(f"[U+{ord(x):04X}]")
    return "".join(made)


@functools.lru_cache(maxsize=8)
def _characters(families: tuple[str, ...]) -> frozenset[int]:
    """The code points that the fonts of these families have; matplotlib falls back from one to the next."""
    files = set()
    for family in families:
        with_default = family in font_manager.font_family_aliases
        try:
            files.add(findfont(FontProperties(family=[family]), fallback_to_default=with_default))
        except ValueError:  # matplotlib skips a family that is not installed, too
            continue
    files = files or {findfont(FontProperties())}
    return frozenset(code for file in files for code in get_font(file).get_charmap())

"""Recognise tokens that are punctuation or white space."""

from __future__ import annotations

import unicodedata


def is_delimiter(piece: str) -> bool:
    """True if a token, as text or in its tokenizer's spelling, is only punctuation or white space.

    >>> [is_delimiter(piece) for piece in (".", "Ġ(", "##!", "Ċ", "▁a", "")]
    [True, True, True, True, False, False]
    """
    plain = piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("<0x0A>", "\n")
    return plain != "" and all(unicodedata.category(c).startswith("P") for c in plain.strip().removeprefix("##"))

"""Punctuation and white space among tokens."""

from __future__ import annotations

import unicodedata


def is_delimiter(piece: str) -> bool:
    """Whether a token, as read or as its tokenizer writes it, is punctuation or white space alone.

    >>> [is_delimiter(piece) for piece in (".", "Ġ(", "##!", "Ċ", "▁a", "")]
    [True, True, True, True, False, False]
    """
    plain = piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("<0x0A>", "\n")
    return plain != "" and all(unicodedata.category(c).startswith("P") for c in plain.strip().removeprefix("##"))

"""`InputError`, the one exception that qkv raises for bad arguments, and what its messages share."""

import difflib
import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 2000  # characters of a message; a wrong value can be a text of any length
_HEAD = re.compile(r"(?:(?P<of>[\w.]+(?:\[[^]]*\])?): )?(?P<word>-{0,2}[A-Za-z_][\w.-]*)?")
_NO_NAMES = {"a", "an", "all", "cannot", "each", "expected", "got", "it", "no", "not", "one", "the", "these", "this"}


class InputError(ValueError):
    """An argument is wrong. The message names the argument, the value it got and the value that was expected.

    >>> from qkv.masks import Window
    >>> try:
    ...     Window(0)
    ... except InputError as error:
    ...     print(error)
    ...     print(error.argument)
    Window: size is 0, expected a whole number, at least 1 (the query's own key)
    size
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-200:]}")

    @property
    def argument(self) -> str:
        """Name of the wrong argument: the first word of the message, or the first after the called function's name.

        The name of the class if the error is about an object, such as a mask without its method.
        """
        match = _HEAD.match(str(self))
        assert match is not None
        of, word = match["of"], match["word"]
        return of if of is not None and (word is None or word in _NO_NAMES) else word or ""


@contextmanager
def renamed(**options: str) -> Iterator[None]:
    """Errors about these arguments name an option of the command line instead.

    >>> with renamed(size="--window"):
    ...     raise InputError("size is 0, expected at least 1")
    Traceback (most recent call last):
    qkv.errors.InputError: --window is 0, expected at least 1
    """
    try:
        yield
    except InputError as error:
        if error.argument not in options:
            raise
        words = str(error)
        at = words.index(error.argument)
        raise InputError(f"{options[error.argument]}{words[at + len(error.argument) :]}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next one after a colon; at most 240 characters."""
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [type(error).__name__]
    return " ".join(x.strip() for x in lines[: 1 + lines[0].endswith(":")])[:240].rstrip(".;")


@contextmanager
def refusing(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Inside, an error of these kinds, or any, becomes an `InputError`: the message with its first line for ``{}``.

    >>> with refusing("dtype is 'x' ({})", KeyError):
    ...     {}["x"]
    Traceback (most recent call last):
    qkv.errors.InputError: dtype is 'x' ('x')
    """
    wrong = kinds or (Exception,)
    try:
        yield
    except InputError:
        raise
    except wrong as error:
        raise InputError(message.replace("{}", first_line(error))) from error


def at_least_one(of: str = "", **sizes: object) -> None:
    """Raise `InputError` for the first size that is not a whole number of at least 1; `of` begins the message.

    >>> at_least_one(heads=4, layers=2)
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"{of}{': ' * bool(of)}{name} is {size!r}, expected a whole number, at least 1")


def finite(*values: Any) -> bool:
    """Whether all are finite numbers, and not texts, lists or tensors of several.

    >>> finite(2, 0.5), finite(1.0, "2"), finite(math.nan)
    (True, False, False)
    """
    try:
        return all(math.isfinite(x) for x in values)
    except (TypeError, ValueError, RuntimeError):
        return False


def kind_of(x: Any) -> str:
    """A wrong value in a message: the dtype and shape of a tensor or an array, else the name of its class.

    >>> kind_of(3), kind_of(int)
    ('int', 'the class int')
    """
    if isinstance(x, type):
        return f"the class {x.__name__}"
    return f"{x.dtype} of shape {tuple(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else type(x).__name__


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for an error message, "; did you mean …?", if a known name is similar; else an empty string.

    >>> nearest("layer", ["layers", "heads"])
    "; did you mean 'layers'?"
    """
    similar = difflib.get_close_matches(name[:100], known, 1)  # the time grows as the square of the length
    return f"; did you mean {similar[0]!r}?" if similar else ""


def one_of(name: str, value: object, expected: Collection[str | None]) -> None:
    """Raise `InputError` unless `value` is in `expected`."""
    if value not in expected:
        hint = nearest(value, [x for x in expected if x is not None]) if isinstance(value, str) else ""
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, expected))}{hint}")

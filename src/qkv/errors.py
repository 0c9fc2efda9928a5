"""`InputError`, the one exception that qkv raises for bad arguments."""

import re

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
    Window: size is 0, expected at least 1 (the query's own key)
    size
    """

    @property
    def argument(self) -> str:
        """Name of the wrong argument: the first word of the message, or the first after the called function's name."""
        found = _HEAD.match(str(self))
        assert found is not None
        of, word = found["of"], found["word"]
        return of if of is not None and (word is None or word in _NO_NAMES) else word or ""

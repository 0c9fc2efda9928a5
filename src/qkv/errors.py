"""The one exception that qkv raises for input it cannot accept."""

import re

_HEAD = re.compile(r"(?:(?P<of>[\w.]+(?:\[[^]]*\])?): )?(?P<word>-{0,2}[A-Za-z_][\w.-]*)?")
_NO_NAMES = {"a", "an", "all", "cannot", "each", "expected", "got", "it", "no", "not", "one", "the", "these", "this"}


class InputError(ValueError):
    """Bad input: one sentence that names the argument, what came, and what was expected.

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
        """The argument that the sentence is about: its first word, or the first after the name of what was called."""
        found = _HEAD.match(str(self))
        assert found is not None
        of, word = found["of"], found["word"]
        return of if of is not None and (word is None or word in _NO_NAMES) else word or ""

"""The one exception qkv raises for input it cannot accept."""


class InputError(ValueError):
    """Bad input: one sentence that names the argument, what came, and what was expected.

    >>> from qkv.masks import Window
    >>> try:
    ...     Window(0)
    ... except InputError as error:
    ...     print(error)
    Window: size is 0, expected at least 1 (the query's own key)
    """

"""The one exception qkv raises for input it cannot accept."""


class InputError(ValueError):
    """Bad input: one sentence that names the argument, what came, and what was expected."""

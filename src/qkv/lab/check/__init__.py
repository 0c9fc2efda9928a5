"""Checks of the labs' exercises: each tries an answer on inputs it has not seen, and says what is wrong with it."""

__all__: list[str] = []

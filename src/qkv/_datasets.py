"""Names of datasets of the Hugging Face hub, and the package that reads them."""

from __future__ import annotations

import importlib.util

from qkv.errors import InputError


def dataset_and_column(name: str) -> tuple[str, str]:
    """The names of a dataset and its column in ``"hf:NAME"`` or ``"hf:NAME:COLUMN"``.

    Raises:
        InputError: if `name` is not of this form.

    >>> dataset_and_column("hf:imdb")
    ('imdb', 'text')
    """
    _, dataset, *rest = name.split(":")
    if not dataset or len(rest) > 1:
        raise InputError(f"corpus is {name!r}, expected 'hf:NAME' or 'hf:NAME:COLUMN'")
    return dataset, rest[0] if rest else "text"


def checked_datasets(name: str) -> None:
    """Raise `InputError` if the package ``datasets``, which the corpus `name` needs, is missing or too old."""
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"corpus: {name!r} needs the package datasets: pip install 'datasets>=4'")
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4:
        raise InputError(
            f"corpus: {name!r} needs datasets 4 or newer, which does not run code from datasets; installed is "
            f"{datasets.__version__}: pip install 'datasets>=4'"
        )

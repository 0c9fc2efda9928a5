"""A dataset of the Hugging Face hub as a stream, by the package ``datasets``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qkv._files import checked_datasets, dataset_and_column, reason
from qkv.errors import InputError
from qkv.profiler.surveys.corpus import Document, Source, checked_shards
from qkv.profiler.surveys.formats import of_value
from qkv.profiler.surveys.stream import CHUNK


@dataclass(frozen=True)
class Dataset(Source):
    """The train split of a dataset, which is downloaded while it is read."""

    name: str
    dataset: str
    column: str
    fingerprint: str
    """SHA-256 of the names of dataset and column, and of the versions of its files."""

    def shards(self, number: int) -> Sequence[Share]:
        """`number` shares: files of the dataset if `number` divides their number, else every n-th row."""
        checked_shards(number)
        return [Share(self, i, number) for i in range(number)]


@dataclass(frozen=True)
class Share:
    """One of `of` shares of a dataset."""

    dataset: Dataset
    number: int
    of: int

    @property
    def size(self) -> int:
        """The size of a share is not known in advance."""
        return 0

    def chunks(self) -> Iterator[Sequence[Document]]:
        """The rows, in lists of about `CHUNK` bytes."""
        from datasets.distributed import split_dataset_by_node

        column = self.dataset.column
        found, size = list[Document](), 0
        try:
            rows = split_dataset_by_node(_rows(self.dataset.dataset, column), self.number, self.of)
            for at, row in enumerate(rows):
                found.append(of_value(f"{self.dataset.name} share {self.number} row {at}", row[column], column))
                size += found[-1].size
                if size >= CHUNK:
                    yield found
                    found, size = [], 0
        except InputError:
            raise
        except Exception as error:  # the network libraries underneath raise their own types of errors
            raise InputError(f"corpus: cannot read the dataset {self.dataset.dataset!r} ({reason(error)})") from error
        yield found


def of_dataset(name: str) -> Dataset:
    """The dataset of a name ``"hf:NAME"`` or ``"hf:NAME:COLUMN"``. Only its description is downloaded now."""
    dataset, column = dataset_and_column(name)
    checked_datasets(name)
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset)
        origins = [getattr(files, "origin_metadata", None) for files in (builder.config.data_files or {}).values()]
        columns = list(builder.info.features or _rows(dataset, None).features or {})
    except Exception as error:  # the network libraries underneath raise their own types of errors
        raise InputError(f"corpus: cannot load the dataset {dataset!r} ({reason(error)})") from error
    if column not in columns:
        raise InputError(
            f"corpus is {name!r}, but {dataset} has no column {column!r}, expected 'hf:{dataset}:COLUMN' with one of "
            f"{', '.join(columns)}"
        )
    version = f"{dataset}\0{column}\0{builder.hash}\0{origins}\0batched by {CHUNK} bytes"
    return Dataset(name, dataset, column, hashlib.sha256(version.encode()).hexdigest())


def _rows(dataset: str, column: str | None) -> Any:
    import datasets

    rows = datasets.load_dataset(dataset, split="train", streaming=True)
    return rows.select_columns([column]) if column else rows

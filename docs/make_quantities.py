"""Writes docs/quantities.md: every number of a profile, its unit and its definition, as the package has them.

.venv/bin/python docs/make_quantities.py
"""

from __future__ import annotations

from pathlib import Path

from qkv.profiler.capture.residual import VARIABLES as STATES
from qkv.profiler.data.frames import COLUMNS
from qkv.profiler.data.tables import ROLES, TRAITS, Kind
from qkv.profiler.data.variables import VARIABLES

FILE = Path(__file__).parent / "quantities.md"


def main() -> None:
    FILE.write_text(page())


def page() -> str:
    """The page."""
    variables = "\n".join(
        f"| `{name}` | {', '.join(v.dims)} | {v.units} | {cell(v.definition)} |" for name, v in VARIABLES.items()
    )
    hidden = "\n".join(
        f"| `{name}` | {units} | {cell(definition)} |" for name, (_, units, definition) in STATES.items()
    )
    columns = "\n".join(f"| `{name}` | {units} | {cell(definition)} |" for name, (units, definition) in COLUMNS.items())
    return f"""<!-- Made by docs/make_quantities.py: do not edit. -->
# What a profile holds

Every number carries its unit and definition: of variables in ``profile.data["entropy"].attrs``, of columns in
``profile.heads().attrs`` and in the metadata of Parquet files. A unit of 1 is a plain number, or a share.

A **share of the row** is a weight divided by the sum of its row, in which a null key counts as a key: a sink logit, a
learned key with value 0, or the 1 of softmax off by one. So the shares of a softmax, of softmax off by one and of
entmax are their weights, and rows of sigmoid, ELU + 1 and ReLU attention are divided by `row_sum`. A row that sums to 0
gives no key a share. There the model's own weight is share × `row_sum`; `weights`, `sink_mass` and maps stay undivided.
[Statistics of your own](howto/your-own.md#your-own-statistic) stand beside these, and are computed from the model's own
weights.

## Variables

`profile.groups[…]`, one [xarray](https://xarray.dev) data set for each kind of attention. Those that a model or a text
does not have are left out; values beyond the end of a text are NaN.

| variable | over | unit | definition |
|---|---|---|---|
{variables}

## Hidden states

`profile.residual[…]`, one data set for each stack of layers, over (text, depth, token). Depth 0 is what the first layer
takes, depth i what the i-th layer leaves.

| variable | unit | definition |
|---|---|---|
{hidden}

## Kinds of heads

`profile.types()`. A head's type is the first of these that holds, else "mixed".

| role | threshold | score |
|---|---|---|
{_kinds(ROLES)}

Traits are listed in addition to the type; a head can have several.

| trait | threshold | score |
|---|---|---|
{_kinds(TRAITS)}

## Columns of tables

`profile.heads()`, `.sinks()`, and files of `.export`, where scores of kinds are called "… score".

| column | unit | definition |
|---|---|---|
{columns}
"""


def cell(text: str) -> str:
    """A text as it stands in a table."""
    return text.replace("|", r"\|")


def _kinds(kinds: dict[str, Kind]) -> str:
    return "\n".join(
        f"| {name} | {'≤' if kind.below else '≥'} {kind.threshold:g} | {cell(kind.definition)} |"
        for name, kind in kinds.items()
    )


if __name__ == "__main__":
    main()

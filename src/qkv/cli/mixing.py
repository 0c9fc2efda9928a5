"""Over-mixing for `qkv profile --perturb`: how much replacing one token changes the hidden states of the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.capture.models import Loaded


def measured(loaded: Loaded, inputs: Any, position: int) -> xr.Dataset:
    """How the hidden states respond when the token at `position` is replaced."""
    from qkv._progress import spinner
    from qkv.profiler.analyses.mixing import mixing

    if isinstance(inputs, dict):  # the inputs of --tokens
        inputs = inputs["input_ids"]
    with spinner("measuring the response to a replaced token"):
        return mixing(loaded.model, inputs, position=position, tokenizer=loaded.tokenizer)


def write(data: xr.Dataset, name: str, out: Path) -> list[Path]:
    """Write mixing.png and mixing.csv: the mean response of each layer and token."""
    from qkv._files import write_atomically
    from qkv.figures.analyses import mixing_figure
    from qkv.figures.layout import save_figure

    figure, table = out / "mixing.png", out / "mixing.csv"
    save_figure(mixing_figure(data, name=name), figure)
    write_atomically(table, data["response"].to_dataframe().reset_index().to_csv(index=False).encode())
    return [figure, table]

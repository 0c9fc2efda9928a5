"""`qkv flow`: which tokens does a token's final state come from, through all layers?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from qkv.cli.files import folder
from qkv.cli.inputs import given_text, ready
from qkv.cli.terminal import print_line

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def flow(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "qkv-mini",
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")] = None,
    /,
    *,
    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    from_: Annotated[tuple[int, ...], tyro.conf.arg(name="from", metavar="N …", help_behavior_hint="")] = (),
    to: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …", help_behavior_hint="")] = (),
    residual: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.5,
    group: Annotated[str | None, tyro.conf.arg(metavar="KIND", help_behavior_hint="")] = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-flow"),
) -> None:
    """Which tokens does a token's final state come from? Attention rollout, in memory linear in the text.

    Follows the mean attention of every layer, residual connections included, from the final states of chosen tokens
    down to the embeddings (--from), or from the embeddings of chosen tokens up to all final states (--to). Writes to
    DIR a figure for each chosen token and flow.csv.

    qkv flow                                       (what the last token of a program is made of)

    qkv flow minilm "The cat sat." --to 0          (who lives off [CLS])

    qkv flow --tokens 400 --from -1 200 --to 0

    Args:
        model: A folder with a model, a name on the Hugging Face hub, or one of qkv's: see qkv profile.
        text: The text to run on; a bundled passage if none is given.
        file: Read the text from this UTF-8 file instead; - is standard input.
        tokens: Use this many tokens: of the text or file if given, else of Python's own standard library.
        target: For an encoder-decoder, what its decoder reads; the text itself if not given.
        from_: Positions of tokens whose final states are followed back; -1 is the last. That one if nothing is chosen.
        to: Positions of tokens whose way into all others is followed.
        residual: What the residual connection keeps of a state in each layer.
        group: For an encoder-decoder: encoder or decoder.
        dtype: Of the weights.
        out: Folder to write to; made if it is not there.
    """
    from rich.console import Console

    from qkv._files import write_whole
    from qkv._progress import bar
    from qkv.figures.flow import flow_figure
    from qkv.figures.save import save_figure
    from qkv.profiler.analyses.flow import flow_to, rollout

    back, forth = from_ if from_ or to else (-1,), to
    passage = given_text(model, text, file, tokens)
    console = Console()
    with folder(out):
        loaded, inputs = ready(model, passage, tokens, dtype)
        tables = []
        for chosen, trace, way in ((back, rollout, "from"), (forth, flow_to, "to")):
            if not chosen:
                continue
            with bar(f"following {way}", "layers") as step:
                found = trace(
                    loaded.model, inputs, chosen, tokenizer=loaded.tokenizer, target=target, group=group,
                    residual=residual, name=loaded.name, on_layer=functools.partial(step, 1),
                )  # fmt: skip
            for index, position in enumerate(found["chosen_position"].values[0]):
                path = out / f"flow-{way}-{position}.png"
                save_figure(flow_figure(found, index), path)
                _show(console, found, index)
                print_line("Figure", path)
            tables.append(_table(found, way))
        import pandas as pd

        write_whole(out / "flow.csv", pd.concat(tables).to_csv(index=False).encode())
        print_line("Data", out / "flow.csv")


def _table(found: xr.DataArray, way: str) -> pd.DataFrame:
    """A row for each chosen token, depth and token."""
    one = found.isel(text=0).assign_coords(position=("token", range(found.sizes["token"])))
    table = one.to_dataframe().reset_index()
    table.insert(0, "direction", way)
    columns = ["direction", "chosen_position", "chosen_name", "depth", "position", "token_name", "flow"]
    return table[columns]


def _show(console: Any, found: xr.DataArray, index: int, most: int = 8) -> None:
    """The tokens with the largest shares."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    one = found.isel(text=0, chosen=index)
    backward = found.attrs["of"] == "queries"
    share, names = one.values[0 if backward else -1], one["token_name"].values
    at, name = int(one["chosen_position"]), str(one["chosen_name"].values)
    what = (
        "What the final state of {} (token {:,}) is made of"
        if backward
        else "What final states take from {} (token {:,})"
    )
    console.print(Text(what.format(_readable(name), at), style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("token", "position", "share"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for token in share.argsort(kind="stable")[::-1][:most]:
        if share[token] > 0:
            table.add_row(Text(_readable(str(names[token]))), f"{token:,}", f"{share[token]:.1%}")
    console.print(table)


def _readable(token: str) -> str:
    return f"“{token}”" if token.isprintable() else repr(token)

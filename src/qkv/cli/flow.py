"""`qkv flow`: attention rollout, which traces a token's final hidden state back to the input tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from qkv._files import write_atomically
from qkv._progress import bar
from qkv.cli.shared import INPUT, Input, folder
from qkv.cli.terminal import print_line, show, table, token_name
from qkv.errors import renamed

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def flow(
    given: Annotated[Input, tyro.conf.arg(name="")] = INPUT,
    *,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    from_: Annotated[tuple[int, ...], tyro.conf.arg(name="from", metavar="N …", help_behavior_hint="")] = (),
    to: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …", help_behavior_hint="")] = (),
    residual: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.5,
    by: Literal["weights", "values", "without-first"] = "weights",
    group: Annotated[str | None, tyro.conf.arg(metavar="KIND", help_behavior_hint="")] = None,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-flow"),
) -> None:
    """Trace which input tokens a token's final hidden state comes from (attention rollout).

    The command follows the attention of every layer, averaged over heads, and the residual connections: from the final
    states of chosen tokens down to the embeddings (--from), or from the embeddings of chosen tokens up to all final
    states (--to). It needs memory linear in the length of the text. It writes a figure for each chosen token and
    flow.csv to DIR.

    qkv flow                                       (where the final state of the last token comes from)

    qkv flow minilm "The cat sat." --to 0          (how far the token [CLS] spreads)

    qkv flow --tokens 400 --from -1 200 --to 0

    Args:
        given: Model and text.
        target: For an encoder-decoder: the text that the decoder reads. By default it reads the same text.
        from_: Positions of tokens whose final states are traced back to the embeddings; -1 is the last token, which is
            traced if you choose none.
        to: Positions of tokens whose embeddings are traced forward into all final states.
        residual: Share of a hidden state that the residual connection carries past each attention layer.
        by: How much a head takes from a token: its weight; the weight times the norm of the value; or the weight where
            the first token, an attention sink in many models, is left out. The last two are divided by their sums.
        group: For an encoder-decoder: trace the encoder or the decoder.
        out: Folder for the results. It is created if it does not exist.
    """
    from qkv.plot.analyses import flow_figure
    from qkv.plot.layout import save_figure
    from qkv.profiler.analyses.flow import rollout

    backward, forward = from_ if from_ or to else (-1,), to
    passage = given.passage()
    with folder(out):
        loaded, inputs = given.load(passage)
        target = given.target_of(passage, target)
        tables = []
        for chosen, of, direction in ((backward, "queries", "from"), (forward, "keys", "to")):
            if not chosen:
                continue
            options = {"queries": "--from", "keys": "--to", "group": "--group", "target": "--target"}
            with renamed(**options), bar(f"tracing {direction}", "layers") as step:
                found = rollout(
                    loaded.model, inputs, **{of: chosen}, tokenizer=loaded.tokenizer, target=target, group=group,
                    residual=residual, by=by, name=loaded.name, on_layer=functools.partial(step, 1),
                )  # fmt: skip
            for index, position in enumerate(found["chosen_position"].values[0]):
                path = out / f"flow-{direction}-{position}.png"
                save_figure(flow_figure(found, index), path)
                _show(found, index)
                print_line("Figure", path)
            tables.append(_table(found, direction))
        import pandas as pd

        write_atomically(out / "flow.csv", pd.concat(tables).to_csv(index=False).encode())
        print_line("Data", out / "flow.csv")


LEAST = 0.0005  # a smaller share would be printed as < 0.1 %
MOST = 0.9  # a larger share of the first token needs the next sentence
TO_THE_FIRST = (
    "Where tokens see only earlier ones, every layer leads back, and a rollout of {} layers ends at the first token. "
    "--residual 0.95 lets a token keep more of its own state, and flow.csv has the shares at every depth."
)


def _table(found: xr.DataArray, direction: str) -> pd.DataFrame:
    """The table in flow.csv: a row for each chosen token, depth and other token."""
    one = found.isel(text=0).assign_coords(position=("token", range(found.sizes["token"])))
    table = one.to_dataframe().reset_index()
    table.insert(0, "direction", direction)
    columns = ["direction", "chosen_position", "chosen_name", "depth", "position", "token_name", "flow"]
    return table[columns]


def _show(found: xr.DataArray, index: int, most: int = 8) -> None:
    """Print the tokens with the largest shares of one chosen token."""
    import numpy as np
    from rich.text import Text

    from qkv.profiler.data.frames import percent

    one = found.isel(text=0, chosen=index)
    backward = found.attrs["of"] == "queries"
    share, names = one.values[0 if backward else -1], one["token_name"].values
    at, name = int(one["chosen_position"]), str(one["chosen_name"].values)
    title = (
        "Where the final state of {} (token {:,}) comes from"
        if backward
        else "Share of {} (token {:,}) in the final states"
    )
    show(Text(title.format(token_name(name), at), "bold"))
    rows = table("token", ">position", ">share")
    largest = [token for token in share.argsort(kind="stable")[::-1][:most] if share[token] >= LEAST]
    for token in largest:
        rows.add_row(token_name(str(names[token])), f"{token:,}", percent(float(share[token])))
    others = np.delete(share, largest)
    others = others[others > 0]
    if len(others):
        rows.add_row(Text(f"{len(others):,} other tokens together", "dim"), "", percent(float(others.sum())))
    show(rows)
    if backward and at and share[0] > MOST:
        show(TO_THE_FIRST.format(found.sizes["depth"] - 1))

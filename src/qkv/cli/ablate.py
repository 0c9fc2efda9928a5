"""`qkv ablate`: which heads a language model needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from qkv.cli.shared import TEXTS, Texts, folder, numbers
from qkv.cli.terminal import print_files, show, table

if TYPE_CHECKING:
    from qkv.profiler.analyses.ablation import Ablation

DEFAULT_TOKENS = 256
MOST = 10


def ablate(
    given: Annotated[Texts, tyro.conf.arg(name="")] = TEXTS,
    *,
    what: Literal["heads", "means", "sinks", "values"] = "heads",
    layers: Annotated[str | None, tyro.conf.arg(metavar="0,3,8-11", help_behavior_hint="")] = None,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-ablate"),
) -> None:
    """Remove each head of a language model, or what it takes from the first token, and measure how its loss rises.

    Each head is removed alone, then all heads of each layer, then all heads. The command prints the heads that matter
    most (with several texts ± a 95 % confidence interval over them), and writes tables (CSV, JSON) and a figure to DIR.
    An interrupted run resumes with the same command.

    qkv ablate                              (the small model that comes with qkv, on 256 tokens)

    qkv ablate --what sinks                 (hide the first token from one head after the other)

    qkv ablate --files notes/ --tokens 256  (texts of your own, with intervals)

    qkv ablate gpt2 --layers 4-6            (a model from the Hugging Face hub)

    Args:
        given: Model and texts.
        what: heads sets the output of a head to 0, means replaces it by its mean over the tokens, sinks hides the first
            token from the queries of a head, values sets the value of the first token to 0.
        layers: Layers whose heads are removed; all by default.
        out: Folder for the results. It is created if it does not exist.
    """
    from qkv.plot.analyses import ablation_figure
    from qkv.plot.layout import save_figure
    from qkv.profiler.analyses.ablation import ablation

    chosen = None if layers is None else numbers(layers)
    if given.is_default:
        given = replace(given, tokens=DEFAULT_TOKENS)
    with folder(out, resumes=True):
        loaded, inputs = given.load_texts(head=True)
        counted = loaded.asked if inputs is loaded.sample else None
        found = ablation(
            loaded.model, inputs, what=what, layers=chosen, counted=counted, tokenizer=loaded.tokenizer, folder=out,
            name=loaded.name,
        )  # fmt: skip
        _show(found)
        files = found.save(out)
        files.append(out / "ablation.png")
        save_figure(ablation_figure(found), files[-1])
        print_files(files)


def _show(found: Ablation) -> None:
    """Print the heads that matter most."""
    from rich.text import Text

    from qkv.profiler.data.findings import head_name
    from qkv.profiler.data.frames import signed

    attrs, several = found.attrs, found.attrs["texts"] > 1
    rows = table(">head", ">loss, nats", ">increase" + " ± 95 %" * several)
    for _, row in found.table.sort_values("delta_nats", ascending=False, kind="stable").head(MOST).iterrows():
        interval = f" ± {row['high'] - row['delta_nats']:.3f}" * several
        place = {"layer": int(row["layer"]), "head": int(row["head"])}
        rows.add_row(head_name(place), f"{row['nats']:.3f}", signed(row["delta_nats"]) + interval)
    read = f"{attrs['tokens']:,} tokens" + f" in {attrs['texts']} texts" * several
    show(Text(f"{attrs['model']} · {read} · loss {found.nats:.3f} nats a token", "bold"), rows)
    worst = found.layers.loc[found.layers["delta_nats"].idxmax()]
    heads, layer, rise = len(found.table), int(worst["layer"]), signed(worst["delta_nats"])
    said = f"All {heads:,} heads of these layers at once: {signed(found.all_nats - found.nats)} nats. "
    show(f"{said}All heads of one layer: at most {rise}, of layer {layer}.")

"""`qkv evict`: what does a model lose when its cache lets keys go?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from qkv.cli.files import folder
from qkv.cli.inputs import given_text, ready
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.profiler.analyses.eviction import Eviction

MINI_TOKENS = 512  # of qkv-mini, which has positions for no more


def evict(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "qkv-mini",
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")] = None,
    /,
    *,
    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    budgets: Annotated[str, tyro.conf.arg(metavar="32,64,128")] = "32,64,128,256",
    policies: Annotated[str, tyro.conf.arg(metavar="window,sinks,heavy")] = "window,sinks,heavy",
    first: Annotated[int, tyro.conf.arg(metavar="N")] = 4,
    run: bool = True,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-evict"),
) -> None:
    """What does a model lose when its cache lets keys go?

    For each policy and budget: the attention that every head puts on keys it would no longer find, and how much the
    model's loss rises when it runs with such a cache. Writes to DIR tables (CSV, JSON) and figures.

    Policies: window, the last keys; sinks, the first few and the last (StreamingLLM); heavy, half the last and half
    those that received most attention (H2O; for its attention lost, what was received by the end of the text counts).

    qkv evict                                      (the small model that comes with qkv, on 512 tokens)

    qkv evict --budgets 16,64 --policies window,sinks

    qkv evict gpt2 --policies window,sinks         (a model of the Hugging Face hub)

    qkv evict gpt2 --no-run                        (from attention alone)

    Args:
        model: A causal language model: a folder, a name on the Hugging Face hub, or one of qkv's (see qkv profile).
        text: The text to run on; Python's own standard library if none is given.
        file: Read the text from this UTF-8 file instead; - is standard input.
        tokens: Use this many tokens.
        budgets: Keys held in each layer.
        policies: Which keys stay.
        first: How many first keys "sinks" keeps.
        run: Run the model, too: qkv's own through its caches, others with masks, which heavy cannot do.
        dtype: Of the weights.
        out: Folder to write to; made if it is not there.
    """

    from qkv.figures.eviction import budget_figure, heads_figure
    from qkv.figures.save import save_figure
    from qkv.profiler.analyses.eviction import eviction

    sizes = [part.strip() for part in budgets.split(",")]
    if not all(part.isdecimal() and len(part) <= 9 for part in sizes):
        raise InputError(f"--budgets is {budgets!r}, expected numbers of keys such as 32,64,128")
    if tokens is None and text is None and file is None:
        tokens = MINI_TOKENS
    passage = given_text(model, text, file, tokens, least=2)
    with folder(out):
        loaded, inputs = ready(model, passage, tokens, dtype, head=run)
        found = eviction(
            loaded.model,
            inputs,
            budgets=sorted({int(part) for part in sizes}),
            policies=[part.strip() for part in policies.split(",")],
            first=first,
            run=run,
            tokenizer=loaded.tokenizer,
            name=loaded.name,
        )
        _show(found)
        files = found.save(out)
        for name, draw in (("eviction.png", budget_figure), ("heads.png", heads_figure)):
            save_figure(draw(found), out / name)
            files.append(out / name)
        print("\n".join(map(str, files)))


def _show(found: Eviction) -> None:
    """A row for each policy and budget."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    attrs = found.attrs
    console.print(f"{attrs['model']} · {attrs['tokens']:,} tokens", style="bold", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("policy", "keys", "attention lost", *(() if found.loss is None else ("loss, nats", "rise"))):
        table.add_column(column, justify="left" if column == "policy" else "right")
    lost = found.mass.groupby(["policy", "budget"])["mass_lost"].mean()
    if found.loss is None:
        for (policy, budget), share in lost.items():
            table.add_row(str(policy), f"{budget:,}", f"{share:.1%}")
    else:
        for row in found.loss.itertuples():
            full = row.policy == "full"
            share = 0.0 if full else lost[row.policy, row.budget]
            cells = row.policy, "all" if full else f"{row.budget:,}", f"{share:.1%}"
            table.add_row(*cells, f"{row.nats:.3f}", "" if full else f"{row.delta_nats:+.3f}")
    console.print(table)

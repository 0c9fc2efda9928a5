"""`qkv profile`: measure where every head of a model attends on a text, and write a report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from qkv._files import write_atomically
from qkv._progress import bar, spinner
from qkv.cli.shared import INPUT, PROFILE, Dtype, Input, folder, numbers, saved_profile, statistics_of
from qkv.cli.terminal import Laps, head_grid, print_files, print_line, show, table
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    from qkv.models.loading import Loaded
    from qkv.profiler.comparison import Comparison
    from qkv.profiler.data.findings import Findings
    from qkv.runs.profiles import Profile


def show_comparison(comparison: Comparison, most: int = 10) -> None:
    """Print a summary and the heads that changed most."""
    from rich.text import Text

    for group in comparison.groups:
        of_both = [profile.attrs for profile in (comparison.a, comparison.b)]
        names = " → ".join(f"{one.get('model', 'model')} ({one.get('dtype', 'unknown')})" for one in of_both)
        kind = "" if len(comparison.groups) == 1 else f"{group} · "
        show(Text(f"\n{kind}{names}", "bold"), *comparison.summary(group))
        heads = comparison.heads(group)
        if heads["change"].any():
            show(_changes_table(heads.sort_values("change", ascending=False, kind="stable").head(most)))


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write comparison.csv, with all heads, and a figure of each group that changed: compare.png, compare-cross.png."""
    import pandas as pd

    from qkv.plot.layout import save_figure

    tables = [comparison.heads(group).assign(group=group) for group in comparison.groups]
    files = [out / "comparison.csv"]
    table = pd.concat(tables).set_index("group").reset_index()
    write_atomically(files[0], table.to_csv(index=False).encode())
    for group in (name for name in comparison.groups if comparison.changed(name)):
        name = "compare.png" if group == comparison.a.main else f"compare-{group}.png"
        files.append(out / name)
        save_figure(comparison.plot(group), files[-1])
    return files


def _changes_table(heads: Any) -> Any:
    from rich.text import Text

    from qkv.profiler.data.findings import head_name
    from qkv.profiler.data.frames import percent, signed

    columns = ">head", ">moved", "attended to", "now attends to", ">first token", ">entropy, nats"
    found = table(*columns, title="Most changed heads")
    for _, row in heads.iterrows():
        found.add_row(
            head_name(row), percent(row["change"]), Text(row["goes_to_a"]),
            Text(row["goes_to_b"], style="bold" if row["moved"] else ""),
            f"{signed(100 * row['sink_difference'], 1)} %", signed(row["entropy_difference"], 2),
        )  # fmt: skip
    return found


def write_mixing(loaded: Loaded, inputs: Any, position: int, out: Path) -> list[Path]:
    """Measure how the hidden states respond when the token at `position` is replaced; write a figure and a table."""
    from qkv.plot.analyses import mixing_figure
    from qkv.plot.layout import save_figure
    from qkv.profiler.analyses.mixing import mixing

    if isinstance(inputs, dict):  # the inputs of --tokens
        inputs = inputs["input_ids"]
    with spinner("measuring the response to a replaced token"):
        data = mixing(loaded.model, inputs, position=position, tokenizer=loaded.tokenizer)
    figure, table = out / "mixing.png", out / "mixing.csv"
    save_figure(mixing_figure(data, loaded.name), figure)
    write_atomically(table, data["response"].to_dataframe().reset_index().to_csv(index=False).encode())
    return [figure, table]


FIGURES = ("overview", "received", "sinks", "types", "signed")


def profile(
    given: Annotated[Input, tyro.conf.arg(name="")] = INPUT,
    *,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    layers: Annotated[str | None, tyro.conf.arg(metavar="0,3,8-11", help_behavior_hint="")] = None,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-profile"),
    local_window: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    map_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 384,
    statistics: Annotated[str | None, tyro.conf.arg(metavar="NAME,…", help_behavior_hint="")] = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="MODEL|FILE", help_behavior_hint="")] = None,
    against_dtype: Annotated[Dtype | None, tyro.conf.arg(help_behavior_hint="")] = None,
    perturb: Annotated[int | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="")] = None,
    no_probe: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    partial: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Measure where every attention head of a model attends on a text, and write a report.

    The statistics are exact and need memory linear in the length of the text. The command prints a summary and writes
    to DIR: report.html (a page that opens offline), figures as PNG, heads.csv (one row per head), and profile.qkv.zip
    (all the data, for qkv.Profile.load).

    qkv profile                                    (the small model that comes with qkv, on Python code)

    qkv profile smollm2 --chat "Why is the sky blue?"  (a language model that answers, from a package)

    qkv profile model.gguf --file book.txt         (a GGUF file of llama.cpp or Ollama, and your own text)

    qkv profile gpt2 "The cat sat on the mat."     (a model from the Hugging Face hub)

    qkv profile minilm --preset fox                (a bundled text by its name)

    qkv profile ./my-model --file book.txt         (a model in a folder, and your own text)

    qkv profile ./my-vlm "What is this?" --image cat.png   (a vision-language model, and an image)

    qkv profile random-gpt2 --tokens 32768         (time and memory of a long context)

    qkv profile ./tuned --against ./base           (compare two models, head by head)

    qkv profile gpt2 --dtype bfloat16 --against-dtype float32    (compare two number formats of one model)

    Args:
        given: Model and text.
        preset: Run on this bundled text: a sentence of a course (fox, car, cat or pronoun: "The animal didn't cross the
            street because it was too tired."), lighthouse (a passage of about 200 tokens) or logbook (a short program).
        image: Read this image before the text, with a model that reads images; the report shows where it looks.
        target: For an encoder-decoder: the text that the decoder reads. By default it reads the same text.
        layers: Attention layers to measure, counted from 0; all by default.
        out: Folder for the results. It is created if it does not exist.
        local_window: Keys at most this many tokens from the query count as local.
        map_tokens: Keep the full attention maps of texts up to this many tokens.
        statistics: Also measure these statistics, which installed packages provide (qkv.statistics.Statistic in the
            group of entry points qkv.statistics).
        against: Compare MODEL with this model on the same text, or with the profile.qkv.zip of an earlier run.
        against_dtype: Compare with this number format of the weights: of MODEL, or of the model of --against.
        perturb: Also replace the token at this position, counted from 0, and measure how much the hidden states of all
            later tokens change in every layer (over-mixing).
        no_probe: Skip the short synthetic texts that identify induction, duplicate-token and positional heads.
        partial: Continue even if some attention of the model cannot be observed.
    """

    from qkv.models import loading
    from qkv.profiler import corpora
    from qkv.runs import run

    wanted = None if layers is None else numbers(layers)
    own = statistics_of(statistics)
    other = None if against is None else saved_profile(against, "--against")
    if perturb is not None and perturb < 0:
        raise InputError(f"--perturb is {perturb}, expected the position of a token, counted from 0")
    if other is not None and against_dtype is not None:
        raise InputError(f"--against-dtype is {against_dtype}, but --against {against} is a profile; expected a model")
    if preset is not None:
        if given.text is not None or given.file is not None:
            text = "text" if given.file is None else "--file"
            raise InputError(f"--preset ({preset}) and {text} are both given, expected one")
        with renamed(preset="--preset"):
            given = replace(given, text=corpora.preset(preset))
    passage = given.passage()
    with renamed(image="--image"):
        picture = None if image is None else loading.read_image(image)

    def profiled(loaded: loading.Loaded, inputs: Any) -> Profile:
        made = run.profile(
            loaded.model,
            inputs,
            tokenizer=loaded.tokenizer,
            target=target,
            layers=wanted,
            local_window=local_window,
            map_tokens=map_tokens,
            probe=not no_probe,
            statistics=own,
            partial=partial,
        )
        made.attrs |= {"model": loaded.name, "command": shlex.join(["qkv", *sys.argv[1:]])}
        return made

    laps = Laps()
    options = {
        "local_window": "--local-window",
        "map_tokens": "--map-tokens",
        "position": "--perturb",
        "b": "--against",
    }
    with folder(out), renamed(**options):
        with laps("loading"):
            loaded, inputs = given.load(passage, image=picture)
            target = given.target_of(passage, target)
        with laps("measuring"):
            result = profiled(loaded, inputs).rounded()  # all that is printed and drawn is that of the saved file
        arguments = given.arguments(passage, out, target)
        result.attrs["arguments"] = (
            arguments if arguments is None or image is None else arguments | {"image": str(image)}
        )
        comparison = None
        if against is not None or against_dtype is not None:
            with laps("comparing"):
                reference = replace(given, dtype=against_dtype or given.dtype)
                comparison = (other or profiled(*reference.load(passage, model=against, image=picture))).compare(result)
        mixed = [] if perturb is None else write_mixing(loaded, inputs, perturb, out)
        _show(result)
        if comparison is not None:
            show_comparison(comparison)
        with laps("drawing"):
            files = _figures(result, out)
            if comparison is not None:
                files += write_comparison(comparison, out)
        with laps("writing"):
            _write(result, comparison, picture, out, [*files, *mixed])
        print_line("Time", str(laps))


def _figures(result: Profile, out: Path) -> list[Path]:
    from qkv.plot.layout import save_figure

    made = list[Path]()
    with bar("drawing", "figures", len(FIGURES)) as step:
        for name in FIGURES:
            for group in result.groups if name == "signed" else [result.main]:
                figure = getattr(result.plot, name)(group=group)
                if figure is not None:
                    made.append(out / f"{name}{'' if group == result.main else f'-{group}'}.png")
                    save_figure(figure, made[-1])
            step(1)
    return made


def _write(result: Profile, comparison: Comparison | None, picture: Any, out: Path, files: list[Path]) -> None:
    from qkv.report.html import write_report

    with spinner("writing the report"):
        data = result.save(out / PROFILE)
        heads = result.export(out / "heads.csv")
        report = write_report(result, out / "report.html", comparison, picture)
    print_line("Report", report, main=True)
    print_files([data, heads, *files])


def _show(result: Profile) -> None:
    """Print a summary of every group: the types of its heads, its findings, the next steps, and its tokens."""
    from rich.text import Text

    from qkv.profiler.data.findings import Findings
    from qkv.profiler.data.frames import percent
    from qkv.profiler.data.tables import names_of

    for group, data in result.groups.items():
        found = Findings(data, result.attrs, group)
        show(
            Text(f"\n{_title(result, group)}", "bold"),
            found.headline,
            "",
            *head_grid(found.types, map(int, result.attrs.get("without_map", {}).get(group, ()))),
            "",
        )
        show(_findings_table(found))
        names = names_of(data)
        tokens = [f"“{names[row.token]}” {percent(row.share)}" for row in result.tokens(5, group).itertuples()]
        show(f"Most attended tokens: {', '.join(tokens)}.")
        if group == result.main:
            _show_states(result)
        for purpose, command in _next_steps(found).items():
            show(Text(f"To {purpose}:", "dim"), Text(f"  {command}", "cyan", no_wrap=True))


def _show_states(result: Profile) -> None:
    """One line for each stack of layers: its massive activations."""
    from qkv.profiler.data.sinks import massive_sentence

    tokens = [data["key_token"].values for data in result.groups.values()]
    for stack, data in result.residual.items():
        names = next((x for x in tokens if x.shape[1] == data.sizes["token"]), None)
        show(f"States of {stack}: {massive_sentence(data, names)}.")


def _title(result: Profile, group: str) -> str:
    from qkv.profiler.data.frames import size_of

    kind = "" if len(result.groups) == 1 else f"{group} · "
    return f"{kind}{result.attrs['model']} · {size_of(result.groups[group])}"


def _findings_table(found: Findings) -> Any:
    """A row for each finding: its number and its meaning. Details are in the report."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", justify="right", no_wrap=True)
    table.add_column()
    for one in found.all:
        table.add_row(Text(one.value), Text(f"{one.label}."))
    return table


def _next_steps(found: Findings) -> dict[str, str]:
    """The commands that look closer, by their purpose: one of each kind."""
    steps = {step.command.split()[1]: step for one in reversed(found.all) for step in one.steps}
    steps["map"] = found.first_step
    return {step.purpose: step.command for step in steps.values()}

"""`qkv evict`: measure what a model loses when its cache evicts keys."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from qkv._files import write_atomically
from qkv.cli.shared import TEXTS, Texts, folder, numbers
from qkv.cli.terminal import print_files, show, table
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    import pandas as pd

    from qkv.profiler.analyses.eviction import Eviction

DEFAULT_TOKENS = 512  # as many as qkv-mini read in training
FILES = 8
"""How many files of Python's standard library are read if no text is given."""
NEEDLE_TOKENS = 4096
TITLE = "{model} · {tokens:,} tokens"


def evict(
    given: Annotated[Texts, arg(name="")] = TEXTS,
    *,
    budgets: Annotated[str, arg(metavar="32,64,128")] = "32,64,128,256",
    policies: Annotated[str, arg(metavar="window,sinks,…")] = "window,sinks,heavy",
    first: Annotated[int, arg(metavar="N")] = 4,
    advise: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    run: bool = True,
    needle: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-evict"),
) -> None:
    """Measure what a language model loses when its key-value cache evicts keys.

    For each eviction policy and cache size, the command reports how much attention every head puts on evicted keys,
    how much the model's loss rises when it runs with such a cache (with several texts ± a 95 % confidence interval over
    them), and the time of a token and the memory of the cache. It writes tables (CSV, JSON) and figures to DIR. An
    interrupted run resumes with the same command.

    Policies: window keeps the last keys. sinks keeps the first few and the last keys (StreamingLLM). heavy keeps the
    keys that received most attention, half of the cache, and the last keys (H2O). tova keeps the keys that the last
    query attended to most, snapkv those that the last queries did, and pyramid as well, most of them in the first
    layers. keydiff keeps the keys least like the mean of the keys, knorm those of the smallest norm, and expected those
    that later queries should attend to most. kvpress:NAME is the score of a press of NVIDIA's kvpress, if that is
    installed. An installed package can add policies (subclasses of qkv.cache.Evicting, in the group of entry points
    qkv.policies).

    qkv evict                           (the small model that comes with qkv, on 8 texts of 512 tokens)

    qkv evict smollm2 --policies sinks,heavy,snapkv,tova,keydiff,knorm    (a language model)

    qkv evict smollm2 --files notes/ letters.txt --tokens 1024    (texts of your own)

    qkv evict smollm2 --needle --policies sinks,snapkv,expected --budgets 512,1024

    qkv evict smollm2 --policies sinks,heavy --advise    (also with a budget for each layer)

    qkv evict smollm2 --policies snapkv,kvpress:CUR,kvpress:LagKV --budgets 128,256

    qkv evict gpt2 --policies window,sinks         (a model from the Hugging Face hub)

    qkv evict gpt2 --no-run                        (attention only, without running the model again)

    Args:
        given: Model and texts: by default 512 tokens of 8 files of Python's standard library.
        budgets: Cache sizes: numbers of keys kept in each layer.
        policies: Eviction policies to compare.
        first: How many keys at the start of the text the policy "sinks" keeps.
        advise: Divide each budget among the layers by what evicted keys change in the first text, and measure "sinks
            advised" beside "sinks" with the other texts. The budgets are in eviction.json.
        run: Also run the model with each cache and measure its loss. Models of qkv use real caches, if there are any;
            otherwise masks keep the same keys (in sinks without rotating keys by their slot in the cache).
        needle: Instead hide a fact in the text (4,096 tokens if you give none), evict keys, and ask for the fact: five
            times. The table says the loss of the right answer and how often the greedy answer is right.
        out: Folder for the results. It is created if it does not exist.
    """

    from qkv.plot.analyses import budget_figure, heads_figure, needle_figure
    from qkv.plot.layout import save_figure
    from qkv.profiler.analyses import eviction
    from qkv.profiler.analyses.needle import needle as hidden_fact

    sizes = numbers(budgets, "--budgets")
    several = given.is_default and not needle
    if given.is_default:
        given = replace(given, tokens=NEEDLE_TOKENS if needle else DEFAULT_TOKENS)
    if needle and (advise or given.more or given.files):
        raise InputError(f"{'--advise' if advise else 'several texts'} and --needle are given, expected one of them")
    with folder(out, resumes=True), renamed(budgets="--budgets", policies="--policies", first="--first"):
        loaded, inputs = given.load_texts(head=run or needle)
        if several and loaded.tokenizer is not None and loaded.sample is None:
            inputs = library(loaded.tokenizer, inputs)
        options: dict[str, Any] = {
            "budgets": sorted({*sizes}), "first": first, "tokenizer": loaded.tokenizer,
            "policies": [part.strip() for part in policies.split(",")], "name": loaded.name,
        }  # fmt: skip
        if needle:
            hidden = hidden_fact(loaded.model, inputs, **options)
            _show_needle(hidden)
            files = [out / "needle.csv"]
            write_atomically(files[0], hidden.to_csv(index=False).encode())
            figures = {"needle.png": needle_figure(hidden)}
        else:
            counted = loaded.asked if inputs is loaded.sample else None
            found = eviction.eviction(
                loaded.model, inputs, advise=advise, run=run, counted=counted, folder=out, **options
            )
            _show(found)
            files = found.save(out)
            figures = {"eviction.png": budget_figure(found), "heads.png": heads_figure(found)}
        for name, figure in figures.items():
            save_figure(figure, out / name)
            files.append(out / name)
        print_files(files)


def _show_needle(found: pd.DataFrame) -> None:
    """Print a row for each policy and budget."""
    rows = table("policy", ">keys", ">loss of the answer, nats", ">right", title=TITLE.format(**found.attrs))
    for (policy, budget), facts in found.groupby(["policy", "budget"], sort=False, dropna=False):
        keys = "all" if policy == "full" else f"{budget:,}"
        rows.add_row(policy, keys, f"{facts['nats'].mean():.2f}", f"{facts['right'].sum()} of {len(facts)}")
    show(rows)


def library(tokenizer: Any, other: Any) -> Any:
    """The first tokens of some files of Python's standard library; `other` if no file has so many."""
    import torch

    from qkv.profiler import corpora

    texts = (tokenizer(text[:8192], return_tensors="pt")["input_ids"] for text in corpora.load("library").texts)
    long = (ids[:, :DEFAULT_TOKENS] for ids in texts if ids.shape[1] >= DEFAULT_TOKENS)
    return torch.cat(found) if (found := list(itertools.islice(long, FILES))) else other


def _show(found: Eviction) -> None:
    """Print a row for each policy and budget."""
    from qkv.profiler.data.frames import percent, signed

    loss, several = found.loss, found.attrs["texts"] > 1
    measured = () if loss is None else (">loss,\nnats", ">increase" + "\n± 95 %" * several, ">ms a\ntoken", ">MB")
    title = TITLE.format(**found.attrs) + f" in {found.attrs['texts']} texts" * several
    rows = table("policy", ">keys", ">attention\nlost", *measured, title=title)
    lost: dict[tuple[str, int | None], float] = {} if loss is None else {("full", None): 0.0}
    lost |= found.mass.groupby(["policy", "budget"], sort=False)["mass_lost"].mean().to_dict()
    for at, ((policy, budget), share) in enumerate(lost.items()):
        cells = [policy, f"{budget:,}" if budget else "all", percent(share)]
        if loss is not None:
            row = loss.iloc[at]
            rise = signed(row["delta_nats"]) + f" ± {row['high'] - row['delta_nats']:.3f}" * several
            cost = [f"{1e3 * row['seconds']:.1f}", f"{row['bytes'] / 1e6:.1f}"] if row["seconds"] > 0 else ["–", "–"]
            cells += [f"{row['nats']:.3f}", rise if at else "", *cost]
        rows.add_row(*cells)
    show(rows)
    if whole := found.attrs["whole"]:
        show(f"A cache of {' or '.join(map(str, whole))} keys holds every text whole: not measured.")
    if loss is not None and not several:
        show("One text gives no interval: pass several or --files, or none, which reads files of the standard library.")

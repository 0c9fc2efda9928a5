"""Writes docs/evicting.md from docs/evicting/, which the two commands in `COMMANDS` wrote for SmolLM2.

PYTHONPATH=. .venv/bin/python docs/make_evicting.py --run      (makes the results anew, then the page: half an hour)
PYTHONPATH=. .venv/bin/python docs/make_evicting.py --costs    (only time and memory, on the first text: eight minutes)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch

import qkv
from benchmarks.mechanisms.timing import machine
from qkv.cli.evict import library
from qkv.profiler.analyses.eviction import eviction

DOCS = Path(__file__).parent
KEPT = DOCS / "evicting"
POLICIES = "window,sinks,heavy,snapkv,pyramid,tova,keydiff,knorm,expected"
COMMANDS = {
    "loss": f"qkv evict smollm2 --budgets 64,128,256 --policies {POLICIES}",
    "needle": f"qkv evict smollm2 --needle --budgets 512,1024,2048 --policies {POLICIES}",
    "advise-sinks": "qkv evict smollm2 --advise --budgets 32,64,128 --policies sinks",
    "advise-snapkv": "qkv evict smollm2 --advise --budgets 64 --policies snapkv",
    "presses-needle": "qkv evict smollm2 --needle --budgets 1024,2048 --policies "
    + ",".join(f"kvpress:{name}" for name in ["Compactor", "LeverageScore", "NonCausalAttn", "Cap", "CUR", "LagKV"]),
}
SOURCES = {
    "window": "[2004.05150](https://arxiv.org/abs/2004.05150)", "sinks": "[2309.17453](https://arxiv.org/abs/2309.17453)",
    "heavy": "[2306.14048](https://arxiv.org/abs/2306.14048)", "snapkv": "[2404.14469](https://arxiv.org/abs/2404.14469)",
    "pyramid": "[2406.02069](https://arxiv.org/abs/2406.02069)", "tova": "[2401.06104](https://arxiv.org/abs/2401.06104)",
    "keydiff": "[2504.15364](https://arxiv.org/abs/2504.15364)", "knorm": "[2406.11430](https://arxiv.org/abs/2406.11430)",
    "expected": "[2510.00636](https://arxiv.org/abs/2510.00636)",
}  # fmt: skip


def run() -> None:
    """Run the commands, and keep their tables and figures."""
    KEPT.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "qkv.cli", *command.split()[1:], "--out", folder]
            subprocess.run(words, check=True)
            keep(name, Path(folder))
    (KEPT / "machine.json").write_text(json.dumps(machine(torch.get_num_threads()), indent=1) + "\n")


def costs() -> None:
    """Measure time and memory anew, on the first text alone, as the first command does after the losses."""
    model, tokenizer = qkv.load("smollm2", head=True)
    kept = pd.read_csv(KEPT / "loss.csv")
    budgets, policies = sorted({int(x) for x in kept["budget"].dropna()}), POLICIES.split(",")
    found = eviction(model, library(tokenizer, None)[:1], budgets=budgets, policies=policies).loss
    assert found is not None
    at = ["policy", "budget"]
    kept = kept.drop(columns=["seconds", "bytes"]).merge(found[[*at, "seconds", "bytes"]], on=at, validate="1:1")
    kept.to_csv(KEPT / "loss.csv", index=False)
    (KEPT / "machine.json").write_text(json.dumps(machine(torch.get_num_threads()), indent=1) + "\n")


def keep(name: str, folder: Path) -> None:
    """Keep the tables and the figure that a command wrote to a folder."""
    if name not in ("loss", "needle"):
        shutil.copy(folder / ("needle.csv" if name.endswith("needle") else "loss.csv"), KEPT / f"{name}.csv")
        return
    for table in ("loss.csv", "eviction.json") if name == "loss" else ("needle.csv",):
        shutil.copy(folder / table, KEPT / table)
    figure = "eviction.png" if name == "loss" else "needle.png"
    shutil.copy(folder / figure, DOCS / "figures" / f"smollm2-{figure}")


def page() -> str:
    loss, needle = pd.read_csv(KEPT / "loss.csv"), pd.read_csv(KEPT / "needle.csv")
    on = json.loads((KEPT / "machine.json").read_text())
    summary = pd.read_json(KEPT / "eviction.json", typ="series")
    lost = pd.DataFrame(summary["mass_lost"]).set_index(["policy", "budget"])["mass_lost"]
    by = loss.set_index(["policy", "budget"])
    rise, half = by["delta_nats"], by["high"] - by["delta_nats"]
    budgets, order = sorted(lost.index.unique("budget")), list(SOURCES)
    order.sort(key=lambda policy: rise[policy, budgets[0]])
    lines = [
        "<!-- Made by docs/make_evicting.py from docs/evicting/: do not edit. -->",
        "# Which keys can a cache evict?",
        "",
        "Policies that people compare, on SmolLM2-135M-Instruct. Each is one class with one method, `worth`",
        "(`qkv.cache.Evicting`), which serves this comparison, qkv's caches, and transformers' `generate`",
        "(`qkv.huggingface.evicting`).",
        "",
        "## Loss",
        "",
        f"    {COMMANDS['loss']}",
        "",
        f"It reads the first {summary['longest']} tokens of {summary['texts']} files of Python's standard library. The "
        f"loss with all keys is {loss['nats'][0]:.2f} nats a token.",
        "Each policy decides at every token. After ± is the half of a 95 % confidence interval over the texts.",
        "",
        "| policy | keeps | "
        + " | ".join(f"rise with {b} keys | attention on evicted keys" for b in budgets)
        + " | paper |",
        "|---|---|" + "---:|---:|" * len(budgets) + "---|",
    ]
    for policy in order:
        cells = " | ".join(f"{rise[policy, b]:+.2f} ± {half[policy, b]:.2f} | {lost[policy, b]:.0%}" for b in budgets)
        lines.append(f"| `{policy}` | {summary['policies'][policy]} | {cells} | {SOURCES[policy]} |")
    lines += [
        "",
        "![The loss of SmolLM2 by policy and budget](figures/smollm2-eviction.png)",
        "",
        "Policies whose papers compress a prompt once decide at every token here.",
        "",
        "## Time and memory",
        "",
        "The median time of the last 16 tokens of the first text, which all caches read in turn, one by one; and the",
        "bytes of the keys and values of all layers, with what the policy needs to choose. With all keys a token takes",
        f"{1e3 * loss['seconds'][0]:.0f} ms and the cache {loss['bytes'][0] / 1e6:.1f} MB.",
        f"({on['cpu']}, {on['threads']} thread{'s' * (on['threads'] != '1')}.)",
        "`snapkv` also holds the weights of the last 32 queries; `expected` multiplies keys with covariances.",
        "",
        "| policy | " + " | ".join(f"ms a token with {b} keys | MB" for b in budgets) + " |",
        "|---|" + "---:|---:|" * len(budgets),
    ]
    for policy in order:
        cells = " | ".join(
            f"{1e3 * by['seconds'][policy, b]:.0f} | {by['bytes'][policy, b] / 1e6:.1f}" for b in budgets
        )
        lines.append(f"| `{policy}` | {cells} |")
    lines += [
        "",
        "## A fact hidden in 4,096 tokens",
        "",
        f"    {COMMANDS['needle']}",
        "",
        *_needle(needle),
        "",
        "![The loss of the answer by policy and budget](figures/smollm2-needle.png)",
        "",
        "## Presses of kvpress",
        "",
        "A press of [kvpress](https://github.com/NVIDIA/kvpress) that is a score is a policy, too",
        "([how](howto/your-own.md#a-cache-policy)), here of version 0.5.5, in the test of the hidden fact:",
        "",
        f"    {COMMANDS['presses-needle']}",
        "",
        *_needle(pd.read_csv(KEPT / "presses-needle.csv"))[4:],
        "",
        "`KeyDiff`, `Knorm`, `ExpectedAttention` and `StreamingLLM` choose the keys of `keydiff`, `knorm`,",
        "`expected` and `sinks`. `Compactor`, `LeverageScore` and `NonCausalAttn` can score a whole prompt only,",
        "and are refused where keys are evicted at every token.",
        "",
        "## Budgets for each layer",
        "",
        f"    {COMMANDS['advise-sinks']}",
        f"    {COMMANDS['advise-snapkv']}",
        "",
        "The first of the eight texts is read with the full cache. In each layer qkv measures how much the output",
        "of the attention changes, beside the residual stream, if that layer alone evicts down to a quarter to",
        "four times of the budget. Keys go one by one to the layer in which they save most; together the layers",
        "hold as many as with equal budgets. The seven other texts measure the loss:",
        "",
        *_advised(),
        "",
        "The advice was better in the mean each time, but its advantage is of the size of the differences between",
        "texts: measure it on yours. `eviction.json` has the keys of each layer, and `qkv.huggingface.evicting`",
        "takes them. Budgets for each head are not advised: the key heads of a layer share one tensor.",
    ]
    return "\n".join(lines) + "\n"


def _advised() -> list[str]:
    lines = ["| policy | keys in the mean | rise, equal budgets | rise, advised |", "|---|---:|---:|---:|"]
    for policy in ("sinks", "snapkv"):
        found = pd.read_csv(KEPT / f"advise-{policy}.csv").set_index(["policy", "budget"])
        rise, half = found["delta_nats"], found["high"] - found["delta_nats"]
        for budget in rise[policy].index:
            cells = (f"{rise[name, budget]:+.3f} ± {half[name, budget]:.3f}" for name in (policy, f"{policy} advised"))
            lines.append(f"| `{policy}` | {budget:.0f} | {' | '.join(cells)} |")
    return lines


def _needle(found: pd.DataFrame) -> list[str]:
    full = found[found["policy"] == "full"]
    by = found.groupby(["policy", "budget"])[["nats", "right"]].agg({"nats": "mean", "right": "sum"})
    budgets = sorted(by.index.unique("budget"))
    policies = [policy for policy in by.index.unique("policy") if policy != "full"]
    order = sorted(policies, key=lambda policy: (-by["right"][policy].sum(), by["nats"][policy].mean()))
    lines = [
        "Five facts such as “The secret pass code of the harbour is 7294.” are hidden in source code, one at a time.",
        "The text is read whole, keys are evicted, and only then the question is asked: no policy can know it.",
        f"With all keys the greedy answer is right {full['right'].sum()} of {len(full)} times, at a loss of "
        f"{full['nats'].mean():.2f} nats a token.",
        "",
        "| policy | " + " | ".join(f"loss with {b:,.0f} keys, nats | right" for b in budgets) + " |",
        "|---|" + "---:|---:|" * len(budgets),
    ]
    for policy in order:
        cells = " | ".join(f"{by['nats'][policy, b]:.2f} | {by['right'][policy, b]}" for b in budgets)
        lines.append(f"| `{policy}` | {cells} |")
    return lines


if __name__ == "__main__":
    if "--run" in sys.argv:
        run()
    if "--costs" in sys.argv:
        costs()
    (DOCS / "evicting.md").write_text(page(), encoding="utf-8")

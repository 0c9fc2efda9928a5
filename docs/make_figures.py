"""Makes the figures, tables and generated pages of the documentation, for `make figures`.

Figures come from qkv itself, run on its bundled models; benchmark tables come from benchmarks/results (`make bench`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import linear_error
import make_coverage
import make_evicting
import make_larger
import make_launches
import make_layout
import make_matrix
import make_quantities
import make_screenshots
import matplotlib.pyplot as plt
import model_speed
import trained_models
from make_screenshots import small

import qkv
from benchmarks.mechanisms import run, show
from qkv import cli
from qkv.figures.layout import save_figure
from qkv.models.loading import load_model
from qkv.profiler.corpora import default_text
from research.sinks.run import stored

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
FLOP, PEAK = 1.45e20, 989e12  # of the survey estimated in docs/scale.md; per second of one GPU, dense bfloat16
CHROMIUM = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"


def pictures() -> None:
    """Figures of a trained BERT, and a screenshot of the beginning of a report on SmolLM2."""
    figures = DOCS / "figures"
    figures.mkdir(exist_ok=True)
    profile = qkv.profile("minilm", default_text())
    profile.plot.overview().savefig(figures / "overview.png", dpi=120)
    profile.plot.sinks().savefig(figures / "sinks.png", dpi=120)
    profile.plot.types().savefig(figures / "types.png", dpi=120)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no chromium: the screenshot of the report stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        asked = ["profile", "smollm2", "--chat", "Why is the sky blue?", "--out", folder]
        assert cli.main(asked) == 0
        report = Path(folder) / "report.html"
        shot = f"--screenshot={figures / 'report.png'}"
        size = ["--window-size=1280,1800", "--virtual-time-budget=6000", f"--user-data-dir={folder}/chromium"]
        subprocess.run([browser, *CHROMIUM.split(), *size, shot, report.as_uri()], check=True, capture_output=True)
    (figures / "report.png").write_bytes(small((figures / "report.png").read_bytes()))


def of_mini() -> None:
    """The figures of `qkv flow`, `qkv evict` and `qkv ablate` for the bundled model."""
    with tempfile.TemporaryDirectory() as folder:
        for command in ("flow --out flow", "evict --out evict", "ablate --out ablate"):
            subprocess.run([sys.executable, "-m", "qkv.cli", *command.split()], cwd=folder, check=True)
        drawn = {"flow": "flow/flow-from-320.png", "eviction": "evict/eviction.png", "ablation": "ablate/ablation.png"}
        for name, file in drawn.items():
            shutil.copy(Path(folder) / file, DOCS / "figures" / f"{name}.png")


def masks() -> None:
    """docs/figures/masks.png: pictures of six masks."""
    m = qkv.masks
    drawn = {
        "bigbird()": (m.bigbird(), 4096),
        "longformer(16, [0, 24])": (m.longformer(16, [0, 24]), 64),
        "(Strided(8) | Window(8)) & Causal()": ((m.Strided(8) | m.Window(8)) & m.Causal(), 64),
        "Dilated(6, step=3)": (m.Dilated(6, 3), 64),
        "Prefix(4) | Window(16)": (m.Prefix(4) & m.Causal() | m.Window(16), 64),
        "Document(…) & Causal()": (m.Document([0] * 20 + [1] * 13 + [2] * 31) & m.Causal(), 64),
    }
    fig, axes = plt.subplots(2, 3, figsize=(9, 6.4), layout="constrained")
    for ax, (name, (mask, n)) in zip(axes.flat, drawn.items(), strict=True):
        mask.plot(n, ax=ax)
        ax.set_title(f"{name}\n{mask.sparsity(n):.0%} of {n:,} × {n:,} masked", fontsize=9)
    fig.savefig(DOCS / "figures" / "masks.png", dpi=120)
    plt.close(fig)


def sinks() -> None:
    """docs/figures/sinks-smollm2.png: the stored study of SmolLM2's sinks."""
    save_figure(stored("smollm2").figure(), DOCS / "figures" / "sinks-smollm2.png")


def minilm() -> None:
    """docs/minilm.md: does MiniLM send most attention to [SEP], as BERT does?"""
    loaded = load_model("minilm")
    one, two = default_text().split("\n\n")
    inputs = {"first paragraph": (one,), "second paragraph": (two,), "both, as a pair": (one, two)}
    lines = [
        "# Does MiniLM attend to `[SEP]`?",
        "",
        "Made by `make figures`; do not edit. Clark et al. (2019, arXiv:1906.04341, §3.2) saw over half of the",
        "attention of BERT-base's layers 6–10 go to `[SEP]`, and interpreted it as a no-op. The table shows the share",
        "of all attention that goes to a token, averaged over the heads and queries of a layer (exact: Σ received /",
        "queries), and how many of the 72 heads send more than half of their weight to it.",
        "",
        "| input | tokens | to | " + " | ".join(f"layer {i}" for i in range(6)) + " | heads over half |",
        "|---|---|---|" + "---|" * 7,
    ]
    most = {}
    for name, texts in inputs.items():
        batch = dict(loaded.tokenizer(*texts, return_tensors="pt"))
        data = qkv.profile(loaded.model, batch, tokenizer=loaded.tokenizer, progress=False).data
        for token in ("[CLS]", "[SEP]"):
            here = data["key_token"].values[0] == token
            share = data["received"].values[0][..., here].sum(-1) / data.sizes["query"]
            most[token] = max(most.get(token, 0.0), float(share.mean(1).max()))
            layers = " | ".join(f"{x:.1%}" for x in share.mean(1))
            lines.append(f"| {name} | {data.sizes['query']} | `{token}` | {layers} | {int((share > 0.5).sum())} |")
    shown = most["[SEP]"] > 0.5
    lines += [
        "",
        f"**MiniLM {'does' if shown else 'does not'}.** No layer sends more than {most['[SEP]']:.1%} of its "
        f"attention to `[SEP]`; `[CLS]` receives up to {most['[CLS]']:.0%} of a layer's.",
    ]
    (DOCS / "minilm.md").write_text("\n".join(lines) + "\n")


BOUNDS = {  # of the benchmarks with goals that are missed, what they are bound by
    "measure": "the elementwise operations between the two products of a tile, each of which reads it from memory; the "
    "products alone take as long as SDPA.",
    "decode": "the elementwise operations on the weights of each head: grouped heads share keys, but not weights.",
    "measure_short": "a call makes more than a hundred small operations, each a few microseconds.",
    "profile_cost": "as `measure`. The time of eager attention differs between machines of this name.",
    "profile_short": "the fixed cost of observing (hooks, geometry, data sets), and one reading of all parameters, "
    "which tells whether the model is still the one that was probed.",
    "survey": "the statistics of each batch, which are elementwise.",
}


def benchmarks() -> None:
    """docs/benchmarks.md from the newest results."""
    results = {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json")) if p.stem != "torture"}
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` and `make figures`; do not edit. Ratios are medians over alternating repeats in one",
        "process; memory is the largest resident size of a fresh process. Goals in parentheses; a goal that is missed",
        "says by how much.",
        "",
        "| benchmark | measured | value | goal |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        for what, value in result.items():
            if isinstance(value, float):
                lines.append(f"| {name} | {what} | {value:.3g} | {_verdict(what, value)} |")
            elif what.startswith("time"):
                lines += [f"| {name} | {what}: {n.replace('|', 'or')} | {v:.3f} | |" for n, v in value.items()]
    missed = [name for name in BOUNDS if any(f"| {name} |" in line and "missed" in line for line in lines)]
    lines += ["", "What bounds the goals that are missed:", "", *(f"- `{name}`: {BOUNDS[name]}" for name in missed)]
    model_speed.stream_figure(results["stream"], DOCS / "figures" / "stream.png")
    lines += ["", *_profile_table(results), "", *model_speed.table(results["decoder"])]
    lines += ["![Milliseconds per token over 100,000 tokens](figures/stream.png)", "", *_mechanisms()]
    lines += _machines(results)
    (DOCS / "benchmarks.md").write_text("\n".join(lines) + "\n")


def _verdict(what: str, value: float) -> str:
    """Whether a value meets the goal in parentheses at the end of its name."""
    goal = re.search(r"\(([≤≥]) ([\d.]+)\)$", what)
    if goal is None:
        return ""
    least, bound = goal[1] == "≥", float(goal[2])
    if value >= bound if least else value <= bound:
        return "met"
    percent = 100 * abs(value - bound) / bound
    return f"**missed** by {percent:.{0 if percent >= 1 else 1}f} %"


def scale() -> None:
    """The tables of docs/scale.md: measurements, and the estimate for a larger model."""
    survey, processes = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("survey", "survey_processes"))
    (ratio,) = (value for name, value in survey.items() if name.startswith("throughput"))
    (gain,) = (value for name, value in processes.items() if name.startswith("time"))
    rate, costs = survey["tokens a second"], make_launches.of_a_survey()
    measured = [
        "| measured here | value |",
        "|---|---|",
        f"| throughput, survey / plain batched inference (MiniLM, {survey['texts']:,} texts of "
        f"{survey['tokens in a text']} tokens, 2 threads) | {ratio:.3f} |",
        f"| tokens per second, plain | {rate['plain']:,.0f} |",
        f"| tokens per second, survey | {rate['survey']:,.0f} |",
        f"| time, one process of one thread / two of one thread | {gain:.2f} |",
    ]
    uses = (0.3, 0.4, 0.5)
    plain = [FLOP / (use * PEAK) / 3600 for use in uses]
    rows = {
        f"plain forward, GPU-hours ({PEAK / 1e12:,.0f} Tflop/s)": plain,
        **{
            f"with the memory traffic of the {name}": [x + 1e6 * make_launches.milliseconds(cost) / 3600 for x in plain]
            for name, cost in costs.items()
        },
        f"with the ratio measured above (plain hours / {ratio:.3f})": [hours / ratio for hours in plain],
    }
    hours = [
        "| at utilisation | " + " | ".join(f"{use:.0%}".replace("%", " %") for use in uses) + " |",
        "|---|---|---|---|",
    ]
    hours += [f"| {name} | " + " | ".join(f"{x:,.0f}" for x in row) + " |" for name, row in rows.items()]
    _fill(DOCS / "scale.md", {"measured": measured, "hours": hours})
    make_launches.fill(DOCS / "scale.md", "traffic", make_launches.page_on_surveys(costs))


def viewer() -> None:
    """The table of docs/view.md."""
    tiles, page = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("viewer", "viewer_page"))
    (interactive,) = (value for name, value in page.items() if name.startswith("overview: seconds"))
    (frames,) = (value for name, value in page.items() if name.startswith("frames a second"))
    (weight,) = (value for name, value in page.items() if name.startswith("heaviest page"))
    rows = ["| 2 threads, medians | measured | goal |", "|---|---:|---:|"]
    rows += [f"| overview of 32 × 32 heads, from the server's answer to interactive | {interactive:.2f} s | ≤ 1 s |"]
    rows += [f"| pan and zoom at {page['tokens of the map']:,} tokens, cached tiles | {frames:.0f} frames/s | ≥ 30 |"]
    for length, found in tiles["milliseconds"].items():
        zooms = found["cold tiles by zoom: median"]
        deep = [ms for zoom, ms in zooms.items() if int(zoom) >= 2]
        goal = "≤ 150 ms" if length.startswith("16,384") else ""
        rows += [f"| a cold tile of 256 × 256, {length}, all zooms | {found['cold tiles']:.0f} ms | {goal} |"]
        rows += [f"| … zoom 2 and deeper | {min(deep):.0f} to {max(deep):.0f} ms | |"]
        rows += [f"| … zoom 0: the whole map in one pass | {zooms['0'] / 1000:.1f} s | |"]
        rows += [f"| a row, a column, {length} | {found['asked']['row']:.1f}, {found['asked']['column']:.1f} ms | |"]
    rows += [f"| the heaviest page without data, uncompressed | {weight:.0f} kB | ≤ 300 kB |"]
    _fill(DOCS / "view.md", {"viewer": rows, "load": _load()})


def _load() -> list[str]:
    """The table of the server under load, and the figure of its memory."""
    found = json.loads((RESULTS / "server_load.json").read_text())
    columns = ("median", "95th percentile", "most")
    rows = [f"| a cheap request, milliseconds | {' | '.join(columns)} |", "|---|---:|---:|---:|"]
    for name, times in found["milliseconds of a cheap request"].items():
        rows += [f"| {name} | {' | '.join(f'{times[column]:.1f}' for column in columns)} |"]
    seconds, megabytes = zip(*found["memory, seconds and megabytes"], strict=True)
    figure, axes = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
    axes.plot(seconds, megabytes, color="#2a6fbb")
    axes.set(xlabel="seconds", ylabel="resident memory, MB", ylim=(0, 1.1 * max(megabytes)), xlim=(0, None))
    axes.set_title("Memory of the server: caches fill, then nothing grows", loc="left", fontsize=10)
    ends = found["ends of the phases, seconds"]
    for begin, end, name in zip([0, *ends], [*ends, seconds[-1]], ("cold maps", "slow clients"), strict=False):
        axes.axvline(end, color="#bbbbbb", linewidth=0.8)
        axes.text((begin + end) / 2, 0.06 * max(megabytes), name, ha="center", fontsize=9)
    save_figure(figure, DOCS / "figures" / "server-load.png")
    return rows


def _fill(page: Path, tables: dict[str, list[str]]) -> None:
    """Insert each table at the comment with its name."""
    text = page.read_text()
    for name, lines in tables.items():
        begin = f"<!-- {name}: docs/make_figures.py -->\n"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(["", *lines, "", ""]) + rest[rest.index("<!-- end -->") :]
    page.write_text(text)


def _mechanisms() -> list[str]:
    """Tables of `python -m benchmarks.mechanisms`: the goals, and all measurements."""
    found = {path.stem: run.load(path) for path in sorted((RESULTS / "mechanisms").glob("*.json"))}
    lines = [
        "## Every mechanism",
        "",
        "Measured by `python -m benchmarks.mechanisms`: milliseconds of qkv, and the ratio to the time of an",
        "alternative in the same run.",
        "`plain` is qkv's causal softmax; `sdpa` is torch's fused attention, with a mask or bias tensor if needed;",
        "`flex` is FlexAttention compiled for CPU (the block mask is made before; forward only, from 4,096 tokens on);",
        "`eager` forms the weights. An alternative is left out if its scores would take more than 3 GiB. Exponents of",
        "time are fitted from 2,048 tokens on; exponents of memory are fitted to the growth of a fresh process over",
        "the last three lengths. The last column is the FLOP/s at the longest length, relative to one large float32",
        "product in the same run, which is an upper limit.",
        "",
        "![Milliseconds by length](figures/bench.png)",
        "",
    ]
    for result in found.values():
        shape = show.settings(result)
        lines += [f"### {shape[0].upper()}{shape[1:]}", ""]
        if any(row["goals"] for row in result["mechanisms"].values()):
            lines += ["Goals:", "", show.goals(result)]
        lines += ["All:", "", show.markdown(result)]
    shutil.copy(RESULTS / "mechanisms" / "float32-8-forward.png", DOCS / "figures" / "bench.png")
    return lines


def _profile_table(results: dict[str, Any]) -> list[str]:
    """Seconds and peak memory of a profile and its alternatives."""
    cost = results["profile_cost"]
    rows = ["| 6 layers × 6 heads × 64, 8,192 tokens | seconds | peak memory |", "|---|---|---|"]
    for job, what in (("plain", "torch SDPA"), ("profile", "qkv profile"), ("eager", "`output_attentions=True`")):
        seconds = sorted(cost["seconds"][job])
        rows.append(f"| {what} | {seconds[len(seconds) // 2]:.2f} | {cost['peak'][job] / 1e9:.2f} GB |")
    return rows


def _machines(results: dict[str, Any]) -> list[str]:
    """One line for each machine, with the benchmarks that ran on it."""
    names: dict[str, list[str]] = {}
    for name, result in results.items():
        names.setdefault(", ".join(f"{k} {v}" for k, v in result["machine"].items()), []).append(name)
    return [f"- {', '.join(of)}: {machine}" for machine, of in names.items()]


if __name__ == "__main__":
    pictures()
    make_screenshots.screenshots(DOCS / "figures")
    of_mini()
    (DOCS / "quantities.md").write_text(make_quantities.page())
    (DOCS / "larger-models.md").write_text(make_larger.page())
    (DOCS / "evicting.md").write_text(make_evicting.page())
    masks()
    linear_error.linear_error(DOCS / "figures" / "linear_error.png")
    (DOCS / "matrix.md").write_text(make_matrix.page())
    make_layout.main()
    (DOCS / "coverage.md").write_text(make_coverage.page(make_coverage.every_row()))
    sinks()
    minilm()
    trained_models.figures(DOCS / "figures")
    folder = DOCS.parent / "src" / "qkv" / "models" / "trained"
    (folder / "README.md").write_text(trained_models.page("../../../../docs/howto/sinks-of-a-model.md"))
    (DOCS / "trained.md").write_text(trained_models.page("howto/sinks-of-a-model.md"))
    benchmarks()
    make_launches.fill(DOCS / "gpu.md", "launches", make_launches.page_on_gpus())
    make_launches.fill(DOCS / "gpu.md", "card", make_launches.page_on_a_card())
    scale()
    viewer()

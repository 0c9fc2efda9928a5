"""Makes the figures, tables and generated pages of the documentation, for `make figures`.

Figures come from qkv itself, run on its bundled models; benchmark tables come from benchmarks/results (`make bench`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import linear_error
import make_coverage
import make_evicting
import make_larger
import make_launches
import make_layout
import make_matrix
import make_quantities
import make_screenshots
import make_tables
import matplotlib.pyplot as plt
import model_speed
import torch
import trained_models
from make_screenshots import small

import qkv
from qkv import cli
from qkv.models.loading import load_model
from qkv.plot.layout import save_figure
from qkv.profiler.corpora import default_text
from research.sinks.run import stored

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
CHROMIUM = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"


def pictures() -> None:
    """Figures of a trained BERT, and a screenshot of the first screen of a report on SmolLM2."""
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
        size = ["--window-size=1280,720", "--virtual-time-budget=6000", f"--user-data-dir={folder}/chromium"]
        subprocess.run([browser, *CHROMIUM.split(), *size, shot, report.as_uri()], check=True, capture_output=True)
    for name in ("report", "sinks"):
        (figures / f"{name}.png").write_bytes(small((figures / f"{name}.png").read_bytes()))


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


EFFECTS = (
    "C061  strongest head: weight on the first token",
    "C062  other first tokens that are sinks, too: share",
    "C063  strongest head: queries with more than 0.3 on it",
    "C064  random weights: entropy / that of uniform rows",
    "C064  random weights: largest weight on the first token",
    "C065  sink heads: weight on it before random tokens",
    "C067  first token's largest activation / the median",
    "C067  first token's largest activation",
    "C067  first token's largest activation / that of others",
    "C068  norm of its value / that of others",
    "C069  queries most similar to its key: share",
    "C070  norm of its key / that of others",
    "C073  weight on it without random dimensions",
    "C073  weight on it without its largest activations",
    "C074  a token's effect on others, without / with the sink",
    "C075  what a head adds: rows with the sink / without",
    "C076  what a head adds / the residual stream",
    "C076  the same / that of other rows",
    "C077  a token's effect on others / their norm",
    "C077  the same, without / with the sink",
)


def sinks() -> None:
    """docs/figures/sinks-smollm2.png: all effects of the study of SmolLM2 beside the bounds of their claims."""
    colours, most = {"holds": "#12415f", "undecided": "#9aa2a8", "does not hold": "#b8501a"}, 20
    rows = [(one, verdict.holds) for verdict in stored("smollm2").verdicts[64] for one in verdict.intervals if one.n]
    fig, ax = plt.subplots(figsize=(9, 5.6), layout="none")
    fig.subplots_adjust(left=0.42, right=0.87, top=0.9, bottom=0.06)
    for at, (one, holds) in enumerate(rows):
        low, mean, high = (
            x / one.bound if one.above else one.bound / max(x, 1e-9) for x in (one.low, one.mean, one.high)
        )
        ax.plot([low, high], [at, at], color=colours[holds], lw=2.5, solid_capstyle="butt")
        ax.plot(min(mean, most), at, ">" if mean > most else "o", ms=6, color=colours[holds], clip_on=False)
        number = f"{one.mean:,.0f}" if one.mean > 100 else f"{one.mean:.2g}"
        ax.text(23, at, f"{number}, {'>' if one.above else '<'} {one.bound:g}", va="center", fontsize=8.5)
    ax.axvline(1, color="#626b73", lw=0.9, ls=(0, (4, 3)))
    ax.set(xscale="log", xlim=(0.2, most), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks([0.2, 0.5, 1, 2, 5, 10, most], ["1/5", "1/2", "bound", "2 ×", "5 ×", "10 ×", "≥ 20 ×"], fontsize=8.5)
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), EFFECTS, fontsize=8.5, ha="left")
    ax.tick_params(axis="y", length=0, pad=268)
    ax.spines[["top", "right", "left"]].set_visible(False)
    fig.text(
        0.015,
        0.965,
        "Claims about attention sinks on SmolLM2, at 64 tokens: effect and its bound",
        weight="bold",
        fontsize=11,
    )
    fig.text(
        0.015,
        0.925,
        "dot and bar: mean of 12 texts and its 95 % interval, relative to the bound. The claim:",
        fontsize=8.5,
        color="#626b73",
    )
    for x, (holds, colour) in zip((0.575, 0.625, 0.705), colours.items(), strict=True):
        fig.text(x, 0.925, holds, color=colour, weight="bold", fontsize=8.5)
    fig.savefig(DOCS / "figures" / "sinks-smollm2.png", dpi=120)
    plt.close(fig)


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


def patches() -> None:
    """docs/figures/image.png: a head of a vision transformer, set by hand: it looks for red, its sink is a corner."""
    from PIL import Image, ImageDraw
    from transformers import ViTConfig, ViTModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    picture = Image.new("RGB", (520, 300), "#9fc4e0")
    draw = ImageDraw.Draw(picture)
    draw.rectangle([0, 205, 520, 300], fill="#6f9a4e")
    draw.ellipse([390, 30, 450, 90], fill="#f6d04d")
    draw.rectangle([150, 130, 260, 240], fill="#b5523b")
    draw.polygon([(135, 130), (205, 65), (275, 130)], fill="#6b3a2a")
    draw.rectangle([195, 182, 222, 240], fill="#f0e6d2")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ViTModel(ViTConfig(image_size=224, patch_size=16, **sizes)).eval()
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    torch.nn.init.ones_(model.layers[0].layernorm_before.weight)
    embed = model.embeddings.patch_embeddings.projection
    red = torch.tensor([1.0, -1.0, 0.0])[:, None, None] / 16**2  # red less green, mean of the patch
    embed.weight.data[0], embed.weight.data[1] = red, -red
    embed.bias.data[2:4] = torch.tensor([2.0, -2.0])  # the norm before the head keeps how red a patch is, then
    model.embeddings.position_embeddings.data[0, 1, 4] = 6.0  # the patch in the corner
    attention = model.layers[0].attention
    attention.q_proj.bias.data[0] = 8.0
    attention.k_proj.weight.data[0, 0], attention.k_proj.weight.data[0, 4] = 1.2, 1.05
    processor = CLIPImageProcessorPil(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224})
    profile = qkv.profile(model, dict(processor(picture, return_tensors="pt")), tokenizer=processor, progress=False)
    save_figure(profile.plot.image(picture, [0], layer=0, head=0), DOCS / "figures" / "image.png")


def memory_of_server() -> None:
    """The figure of the memory of the server under load."""
    found = json.loads((RESULTS / "server_load.json").read_text())
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


if __name__ == "__main__":
    pictures()
    make_screenshots.screenshots(DOCS / "figures")
    make_screenshots.sources(DOCS / "figures")
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
    patches()
    minilm()
    trained_models.figures(DOCS / "figures")
    folder = DOCS.parent / "src" / "qkv" / "models" / "trained"
    (folder / "README.md").write_text(trained_models.page("../../../../docs/howto/sinks-of-a-model.md"))
    (DOCS / "trained.md").write_text(trained_models.page("howto/sinks-of-a-model.md"))
    for page, text in make_tables.pages().items():
        page.write_text(text)
    make_launches.write()
    memory_of_server()
    model_speed.stream_figure(json.loads((RESULTS / "stream.json").read_text()), DOCS / "figures" / "stream.png")
    shutil.copy(RESULTS / "mechanisms" / "float32-8-forward.png", DOCS / "figures" / "bench.png")

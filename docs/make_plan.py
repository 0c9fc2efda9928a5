"""The plan of a survey of 10¹² tokens, a table of docs/scale.md: `python docs/make_tables.py` derives its numbers.

It needs nothing but Python. The ratio of survey to plain inference is that of `python -m benchmarks survey`; everything
else is a formula of the page or an assumption that is named here.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKENS, BYTES_OF_TOKEN = 1e12, 4
SLICES, SHARDS = 16, 4096  # a survey each; shards of each
FLOP, PEAK, USE = 1.45e11, 989e12, 0.4  # a token, forward, 70 billion parameters; a second of one GPU; utilisation
GPUS = 2  # of a process: the weights in bfloat16 fill two
PRICE, SPOT = 2.5, 1.0  # assumed: dollars for an hour of a GPU, reserved and as spot
LIFE = {"reserved": 1000, "spot": 24}  # assumed: hours until a machine is lost
HEADS, QUANTITIES = 80 * 64, 10
READ = 100e6  # assumed: bytes of shards that a merging process reads, inflates and adds in a second


def shard_bytes() -> float:
    """The size of a shard's file before compression: histograms, t-digests and sums; sink scores; tokens."""
    return HEADS * QUANTITIES * (128 * 8 + 2500 + 60) + 12e6 + 3e6


def table() -> list[str]:
    """The rows of the table."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "survey.json").read_text())
    (ratio,) = (value for name, value in measured.items() if name.startswith("throughput"))
    plain = TOKENS * FLOP / (USE * PEAK) / 3600
    hours = plain / ratio
    number = SLICES * SHARDS
    each = hours / number / GPUS
    lost = {kind: each / 2 / life for kind, life in LIFE.items()}
    merge = SHARDS * shard_bytes() / READ / 3600
    rows = {
        "plain forward": f"{plain:,.0f} GPU-hours",
        f"survey (plain / {ratio:.3f}, the ratio measured above)": f"{hours:,.0f} GPU-hours",
        f"shards: {SLICES} slices × {SHARDS:,}": f"{number:,}",
        "tokens and text of a shard": f"{TOKENS / number:,.0f}; {TOKENS * BYTES_OF_TOKEN / number / 1e6:,.0f} MB",
        f"time of a shard, on {GPUS} GPUs": f"{each:.1f} hours",
        f"on {512 * GPUS:,} GPUs": f"{hours / 512 / GPUS / 24:,.0f} days",
        "files of a shard, at most": f"{shard_bytes() / 1e6:,.0f} MB",
        "files of all shards; of a slice; the result": (
            f"{number * shard_bytes() / 1e12:,.0f} TB; {SHARDS * shard_bytes() / 1e12:.1f} TB; "
            f"{shard_bytes() / 1e9:.1f} GB"
        ),
        f"work repeated, if a machine lasts {LIFE['reserved']:,} hours": f"{lost['reserved']:.2%}".replace("%", " %"),
        f"work repeated, if a spot machine lasts {LIFE['spot']} hours": f"{lost['spot']:.1%}".replace("%", " %"),
        f"cost, reserved (${PRICE:.2f} for a GPU-hour)": f"${hours * (1 + lost['reserved']) * PRICE:,.0f}",
        f"cost, spot (${SPOT:.2f} for a GPU-hour)": f"${hours * (1 + lost['spot']) * SPOT:,.0f}",
        f"merging a slice, one core ({READ / 1e6:.0f} MB/s)": f"{merge:.1f} hours",
        f"merging {SLICES} slices": f"{SLICES * shard_bytes() / READ:,.0f} s",
    }
    return ["| 70 billion parameters, 10¹² tokens | |", "|---|---|", *(f"| {name} | {x} |" for name, x in rows.items())]

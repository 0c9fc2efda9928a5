"""The cost of `qkv.measure`: long, against torch's SDPA; short, against forming the weights and reducing them."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qkv
from benchmarks.attend_speed import tensors
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS
from qkv.engine import Call
from qkv.statistics.measure import measured

CAUSAL = qkv.masks.Causal()


@torch.no_grad()
def long(repeats: int = 7) -> dict[str, Any]:
    """Every statistic of a causal call, without and with the output; the matrix products are the least it can cost."""
    torch.set_num_threads(THREADS)
    q, k, v = tensors(8192)
    call = Call.of(q, k, v, CAUSAL)
    seconds = alternating(
        {
            "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
            "attend": lambda: qkv.attend(q, k, v, mask=CAUSAL),
            "measure": lambda: qkv.measure(q, k, mask=CAUSAL),
            "output and statistics": lambda: measured(call, output=True),
            "products": lambda: products(q, k, v),
        },
        repeats,
    )
    q1, k1, v1 = (torch.randn(1, 1, 65536, 64) for _ in range(3))
    one = alternating(
        {
            "SDPA": lambda: scaled_dot_product_attention(q1, k1, v1, is_causal=True),
            "measure": lambda: qkv.measure(q1, k1, mask=CAUSAL),
        },
        3,
    )
    return {
        "time: measure / SDPA, 6 heads, 8,192 tokens": median_ratio(seconds, "measure", "SDPA"),
        "time: output and statistics / SDPA, 6 heads, 8,192 tokens": median_ratio(
            seconds, "output and statistics", "SDPA"
        ),
        "time: the two matrix products alone / SDPA, 6 heads, 8,192 tokens": median_ratio(seconds, "products", "SDPA"),
        "time: attend / SDPA, 6 heads, 8,192 tokens": median_ratio(seconds, "attend", "SDPA"),
        "time: measure / SDPA, 1 head, 65,536 tokens": median_ratio(one, "measure", "SDPA"),
        "seconds": seconds | {f"{name}, 65,536": x for name, x in one.items()},
    }


def products(q: Tensor, k: Tensor, v: Tensor, rows: int = 512, columns: int = 1024) -> None:
    """q·kᵀ and weights·v of every tile of a causal call, without anything between them, on a thread for each core."""
    n, threads = q.shape[2], torch.get_num_threads()

    def head(h: int) -> None:
        scores, out = torch.empty(rows, columns), torch.zeros(rows, v.shape[3])
        for a in range(0, n, rows):
            for b in range(0, a + rows, columns):
                keys = slice(b, min(b + columns, a + rows))
                tile = scores.view(-1)[: rows * (keys.stop - b)].view(rows, -1)
                torch.mm(q[0, h, a : a + rows], k[0, h, keys].T, out=tile)
                out.addmm_(tile, v[0, h, keys])

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(head, range(q.shape[1])))
    torch.set_num_threads(threads)


@torch.no_grad()
def decode(keys: int = 100_000, repeats: int = 15) -> dict[str, Any]:
    """One new token against a long cache, with and without statistics, for plain and for grouped heads."""
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {}
    for heads, key_heads in ((8, 8), (32, 8)):
        q, (k, v) = torch.randn(1, heads, 1, 64), torch.randn(2, 1, key_heads, keys, 64)
        call = Call.of(q, k, v, CAUSAL)
        jobs = {
            "attend": lambda q=q, k=k, v=v: qkv.attend(q, k, v, mask=CAUSAL),
            "attend, window of 4,096": lambda q=q, k=k, v=v: qkv.attend(q, k, v, mask=qkv.masks.Window(4096)),
            "measure": lambda q=q, k=k: qkv.measure(q, k, mask=CAUSAL),
            "output and statistics": lambda call=call: measured(call, output=True),
        }
        seconds = alternating(jobs, repeats)  # type: ignore[arg-type]
        what = f"{heads} heads on {key_heads}, 1 query, {keys:,} keys"
        result[f"time: measure / attend, {what}"] = median_ratio(seconds, "measure", "attend")
        result[f"time: output and statistics / attend, {what}"] = median_ratio(
            seconds, "output and statistics", "attend"
        )
        result[f"time: window of 4,096 / attend, {what}"] = median_ratio(seconds, "attend, window of 4,096", "attend")
    return result


@torch.no_grad()
def short(repeats: int = 30) -> dict[str, Any]:
    """Short calls: `measure` against eager weights and the same statistics, and the time of the smallest call."""
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {}
    for shape in ((8, 8, 64, 64), (32, 12, 128, 64)):
        q, k = torch.randn(shape), torch.randn(shape)
        seconds = alternating(
            {"measure": lambda q=q, k=k: qkv.measure(q, k, mask=CAUSAL), "weights": lambda q=q, k=k: formed(q, k)},  # type: ignore[misc]
            repeats,
        )
        name = f"time: measure / forming the weights and reducing them, {shape}"
        result[name] = median_ratio(seconds, "measure", "weights")
    q, k, v = (torch.randn(1, 4, 16, 32) for _ in range(3))
    smallest = alternating(
        {
            "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
            "measure": lambda: qkv.measure(q, k, mask=CAUSAL),
        },
        200,
    )
    micro = {name: 1e6 * statistics.median(x) for name, x in smallest.items()}
    return result | {
        "microseconds: measure, (1, 4, 16, 32)": micro["measure"],
        "microseconds: SDPA, (1, 4, 16, 32)": micro["SDPA"],
    }


def formed(q: Tensor, k: Tensor) -> None:
    """The statistics of `measure` from weights that are formed."""
    n = q.shape[2]
    position = torch.arange(n, dtype=q.dtype)
    masked = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(masked, -torch.inf)
    scores.logsumexp(-1)
    a = scores.softmax(-1)
    torch.special.entr(a).sum(-1)
    a.sum(-2)
    _ = a[..., 0], a.diagonal(0, -2, -1), a.diagonal(-1, -2, -1), a.diagonal(1, -2, -1)
    mean = a @ position
    _ = position - mean  # distance, causal
    (a @ position.square() - mean.square()).clamp(min=0).sqrt()
    1 / a.square().sum(-1)
    (~masked).sum(-1), (~masked).sum(-2)

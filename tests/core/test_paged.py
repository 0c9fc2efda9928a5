"""Statistics over a paged cache: against dense float64 weights, over random tables, for every way of an engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, largest_tensor, refusals
from qkv.biases import SoftCap
from qkv.masks import Causal, Mask, Window
from qkv.normalizers import Softmax
from qkv.scores import Dot
from qkv.statistics import PagedKeys, measure_paged

SIZE, D = 4, 8
LENGTHS, COUNTS = (13, 1, 8, 30), (5, 1, 8, 1)  # a chunk, a first token, a whole prompt, a step of decoding


def batch(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, PagedKeys, list[int]]:
    """Packed queries with padding at the end, keys in random blocks with a prefix that two requests share."""
    blocks = torch.randn(40, kv_heads, SIZE, D, dtype=dtype)
    needed = [-(-n // SIZE) for n in LENGTHS]
    order = torch.randperm(len(blocks)).tolist()
    tables = torch.full((len(LENGTHS), max(needed) + 1), -7)  # entries that are not used may be anything
    for row, n in zip(tables, needed, strict=True):
        row[:n] = torch.tensor([order.pop() for _ in range(n)])
    tables[3, :2] = tables[2, :2]
    starts = [0]
    for n in COUNTS:
        starts.append(starts[-1] + n)
    q = torch.randn(starts[-1] + 3, heads, D, dtype=dtype)
    q[starts[-1] :] = torch.nan
    return q, PagedKeys(blocks, tables, torch.tensor(LENGTHS, dtype=torch.int32)), starts


def dense(q: Tensor, keys: PagedKeys, request: int, *, window: int, cap: float, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (h, nq, nk) and log-sum-exp (h, nq) of a request in float64, key by key."""
    n, table = int(keys.lengths[request]), keys.tables[request].tolist()
    rows = [keys.blocks[table[j // SIZE], :, j % SIZE].double() for j in range(n)]
    k = torch.stack(rows, 1).repeat_interleave(q.shape[1] // len(rows[0]), 0)
    scores = torch.einsum("ihd,hjd->hij", q.double(), k) * D**-0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    at, j = torch.arange(n - len(q), n)[:, None], torch.arange(n)
    scores = scores.masked_fill((j > at) | (j <= at - window), -torch.inf)
    lse = torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], 2).logsumexp(2)
    return (scores - lse[..., None]).exp(), lse


@pytest.mark.parametrize(("heads", "kv_heads", "window", "cap", "sink"), [(2, 2, 99, 0, 0), (6, 2, 5, 3.0, 1)])
def test_paged_statistics_match_dense_weights(heads: int, kv_heads: int, window: int, cap: float, sink: int) -> None:
    q, keys, starts = batch(heads, kv_heads)
    logits = torch.randn(heads) if sink else torch.full((heads,), -torch.inf)
    mask: Mask = Causal() if window == 99 else Window(window)
    found = measure_paged(
        q, keys, starts, mask=mask, bias=SoftCap(cap) if cap else None, score=Dot(D**-0.5),
        normalizer=Softmax(sink=logits) if sink else None, mass={"last two": Window(2)},
    )  # fmt: skip
    for i, statistics in enumerate(found):
        rows = q[starts[i] : starts[i + 1]]
        a, lse = dense(rows, keys, i, window=window, cap=cap, sink=logits)
        close(statistics.lse[0], lse)
        close(statistics.received[0], a.sum(1), eps=256)
        close(statistics.sink[0], a[..., 0])
        shares = a / a.sum(-1, keepdim=True)
        close(statistics.entropy[0], -(shares * shares.clamp(min=1e-300).log()).sum(-1), eps=256)
        back = torch.arange(LENGTHS[i] - len(rows), LENGTHS[i])[:, None] - torch.arange(LENGTHS[i])
        close(statistics.mass["last two"][0], (a * (back < 2)).sum(-1))


def test_chunks_of_a_prompt_add_up_to_the_statistics_of_the_whole() -> None:
    n, blocks = 23, torch.randn(9, 2, SIZE, D)
    q, table = torch.randn(n, 4, D), torch.randperm(9)[None]
    whole = measure_paged(q, PagedKeys(blocks, table, torch.tensor([n])), [0, n])[0]
    received, entropy, start = torch.zeros(1, 4, n), [], 0
    for stop in (7, 8, 20, n):  # across the edges of blocks
        (chunk,) = measure_paged(q[start:stop], PagedKeys(blocks, table, torch.tensor([stop])), [0, stop - start])
        received[..., :stop] += chunk.received
        entropy.append(chunk.entropy)
        start = stop
    close(received, whole.received.double(), eps=256)
    close(torch.cat(entropy, 2), whole.entropy.double(), eps=256)


def test_paged_statistics_of_half_precision_and_other_layouts_equal_those_of_measure() -> None:
    q, keys, starts = batch(6, 2, torch.bfloat16)
    by_token = keys.blocks.transpose(1, 2).contiguous()  # (blocks, size, hkv, d)
    found = measure_paged(q, PagedKeys(by_token.transpose(1, 2), keys.tables, keys.lengths), torch.tensor(starts))
    for i, statistics in enumerate(found):
        k = torch.cat([keys.blocks[block] for block in keys.tables[i, : -(-LENGTHS[i] // SIZE)]], 1)[None]
        rows = q[starts[i] : starts[i + 1]].transpose(0, 1)[None]
        want = qkv.measure(rows, k[:, :, : LENGTHS[i]].contiguous(), mask=Causal())
        assert torch.equal(statistics.received, want.received)
        assert torch.equal(statistics.distance, want.distance)


def test_paged_memory_is_linear_in_the_request() -> None:
    n, cache = 2048, torch.randn(2**15, 1, 16, D)  # much larger than the keys of a request, and strided
    keys = PagedKeys(
        cache.transpose(2, 3).contiguous().transpose(2, 3), torch.randperm(n // 16)[None], torch.tensor([n])
    )
    q = torch.randn(n, 1, D)
    assert largest_tensor(lambda: measure_paged(q, keys, [0, n])) < n * n / 4


Q, KEYS, _ = batch(2, 2)
test_paged_arguments_that_do_not_fit_are_refused = refusals([
    ("starts", lambda: measure_paged(Q, KEYS, [0, 5, 6, 14]), "expected 5 numbers from 0 to 18"),
    ("starts", lambda: measure_paged(Q, KEYS, [0, 5, 5, 13, 14]), "request 1 0 queries, expected 1 to 1"),
    ("starts", lambda: measure_paged(Q, KEYS, [0, 14, 15, 16, 17]), "request 0 14 queries, expected 1 to 13"),
    ("tables", lambda: PagedKeys(KEYS.blocks[:3], KEYS.tables, KEYS.lengths), "expected 0 to 2"),
    ("lengths", lambda: PagedKeys(KEYS.blocks, KEYS.tables, KEYS.lengths * 9), "117 for request 0, expected 1 to 36"),
    ("tables", lambda: PagedKeys(KEYS.blocks, KEYS.tables.float(), KEYS.lengths), "expected whole numbers"),
    ("blocks", lambda: PagedKeys(KEYS.blocks[0], KEYS.tables, KEYS.lengths)),
    ("lengths", lambda: PagedKeys(KEYS.blocks, KEYS.tables, KEYS.lengths[:2])),
])  # fmt: skip

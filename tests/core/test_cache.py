"""Caches: decoding token by token equals attention at once, or plain loops over the keys that are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import MASKS, close, oracle, rand, refusals, refused, triple
from own_objects import MeanAttention
from qkv import Attention, InputError, attend, biases, kernels, masks, normalizers, scores
from qkv.cache import Cache, Evicting, Full, HeavyHitters, Sinks, Sliding
from qkv.positions import Rotary, YaRN

B, H, HKV, N, D, DV = 2, 6, 3, 23, 7, 5
CAUSAL = Attention(mask=masks.Causal())
ONES = [1] * N


@dataclass(frozen=True)
class Exact(Rotary):
    """Rotation with float64 tables, so that float64 tests are tight where two ways turn by different angles."""

    def tables(self, positions: Tensor, length: int | None = None, *more: Any) -> tuple[Tensor, Tensor]:
        length = int(positions.max()) + 1 if length is None else length
        size = 1.0
        turn = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        if self.scaling is not None:
            turn, size = self.scaling.frequencies(self.dim, self.base, length), self.scaling.magnitude
        angle = positions.double()[..., None] * turn
        return angle.cos() * size, angle.sin() * size


ROTARY = Exact(4, base=100.0)


def tokens(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return triple(B, H, HKV, n, n, D, DV, seed=seed, dtype=dtype)


def feed(
    cache: Cache,
    attention: Attention,
    qkv: tuple[Tensor, Tensor, Tensor],
    sizes: Sequence[int],
    *,
    rotary: Rotary | None = None,
    extra: Callable[[int, int], dict[str, Any]] = lambda start, stop: {},
) -> Tensor:
    """What all tokens get, chunk by chunk."""
    outs, stop = [], cache.seen
    for size in sizes:
        start, stop = stop, stop + size
        new = (x[:, :, start:stop] for x in qkv)
        outs.append(cache.attend(attention, *new, rotary=rotary, **extra(start, stop)))
        assert cache.seen == stop
    return torch.cat(outs, 2)


@st.composite
def chunkings(draw: st.DrawFn, n: int = N) -> list[int]:
    """Sizes of chunks that add up to n: often one token."""
    sizes: list[int] = []
    while sum(sizes) < n:
        sizes.append(min(draw(st.sampled_from([1, 1, 1, 2, 3, 5, 11])), n - sum(sizes)))
    return sizes


PAST: dict[str, masks.Mask] = {
    **{name: MASKS[name](N, N, B, H) for name in (
        "causal", "window", "window of one", "sink and window", "dilated", "longformer, causal", "strided",
        "causal window",
    )},
    **{f"{name}, past": MASKS[name](N, N, B, H) & masks.Causal() for name in (
        "outside the window", "predicate", "blockwise", "prefix", "window ahead",
    )},
    "global, past": (masks.Global([0]) & masks.Causal()) | masks.Window(2),
}  # fmt: skip
T5 = biases.T5Bias(rand(8, H), bidirectional=False, max_distance=16)
KINDS: dict[str, tuple[Any, Rotary | None]] = {
    "none": (None, None),
    "rotary": (None, ROTARY),
    "float32 rotary": (None, Rotary(6, interleaved=True)),
    "alibi": (biases.ALiBi(), None),
    "t5": (T5, None),
    "relative, cap": ((biases.SoftCap(2.0), biases.RelativePosition(rand(7, D), rand(7, DV))), ROTARY),
}
NORMALIZERS: dict[str, normalizers.Normalizer | None] = {
    "softmax": None,
    "sink": normalizers.Softmax(0.8, sink=rand(H)),
    "key": normalizers.Softmax(key=rand(H, D)),
    "sigmoid": normalizers.Sigmoid(),
    "elu": normalizers.EluPlusOne(),
    "entmax": normalizers.Entmax(),
}


def uncached(attention: Attention, qkv: tuple[Tensor, Tensor, Tensor], rotary: Rotary | None, mask: Any) -> Tensor:
    q, k, v = qkv
    if rotary is not None:
        q, k = (rotary(x, torch.arange(x.shape[2])) for x in (q, k))
    parts = {"bias": attention.bias, "score": attention.score, "normalizer": attention.normalizer}
    out = attend(q, k, v, mask=mask, kernel="eager", **parts)
    assert isinstance(out, Tensor)
    return out


# --- Full -------------------------------------------------------------------------------------------------------------


COMPOSITIONS = [
    (kind, normalizer, mask)
    for (kind, normalizer), mask in zip(itertools.product(KINDS, NORMALIZERS), itertools.cycle(PAST), strict=False)
]
"""Every bias and position with every normalizer, and every mask several times."""


@pytest.mark.parametrize(("kind", "normalizer", "mask"), COMPOSITIONS)
def test_full_is_uncached_at_every_step(kind: str, normalizer: str, mask: str) -> None:
    bias, rotary = KINDS[kind]
    attention = Attention(mask=PAST[mask], bias=bias, normalizer=NORMALIZERS[normalizer])
    want = uncached(attention, tokens(), rotary, PAST[mask])
    for sizes in ([4, *[1] * (N - 4)], [1, 1, 2, 1, 5, 1, 11, 1]):
        close(feed(Full(N + 2), attention, tokens(), sizes, rotary=rotary), want, eps=4096)


def test_full_with_padding_on_the_left_is_each_text_alone() -> None:
    pads = torch.tensor([4, 0])
    places = torch.arange(N)
    positions = (places - pads[:, None]).clamp(min=0)
    real = places >= pads[:, None]

    def extra(start: int, stop: int) -> dict[str, Any]:
        return {"positions": positions[:, start:stop], "mask": masks.Dense(real[:, None, None, :stop])}

    attention = Attention(mask=masks.Causal(), bias=biases.ALiBi())
    got = feed(Full(N), attention, tokens(), [6, 1, 1, 1, 5, *[1] * 9], rotary=ROTARY, extra=extra)
    for item, pad in enumerate(pads.tolist()):
        alone = tuple(x[item : item + 1, :, pad:] for x in tokens())
        close(got[item : item + 1, :, pad:], uncached(attention, alone, ROTARY, masks.Causal()))


def test_full_rejects_tokens_beyond_its_capacity() -> None:
    cache = Full(5)
    feed(cache, CAUSAL, tokens(), [4])
    with refused("capacity"):
        feed(cache, CAUSAL, tokens(), [2])
    assert cache.length == cache.seen == 4
    close(feed(cache, CAUSAL, tokens(), [1]), feed(Full(5), CAUSAL, tokens(), [5])[:, :, 4:])


# --- Sliding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 19, 99])
def test_sliding_equals_a_window_mask(window: int) -> None:
    n = 71
    own = st.sampled_from([masks.Causal(), masks.Window(3), masks.Window(9, ahead=2) & masks.Causal()])

    @settings(max_examples=8)
    @given(
        chunkings(n) | st.sampled_from([[71], [3, 50, 1, 17], [20, 1, 49, 1]]),
        own,
        st.sampled_from(sorted(KINDS)),
        st.sampled_from(sorted(NORMALIZERS)),
    )
    def check(sizes: list[int], mask: masks.Mask, kind: str, normalizer: str) -> None:
        bias, rotary = KINDS[kind]
        attention = Attention(mask=mask, bias=bias, normalizer=NORMALIZERS[normalizer])
        cache = Sliding(window)
        got = feed(cache, attention, tokens(n), sizes, rotary=rotary)
        close(got, uncached(attention, tokens(n), rotary, mask & masks.Window(window)), eps=4096)
        assert cache.length == min(n, window)

    check()


def test_sliding_rotates_by_the_given_positions() -> None:
    places = torch.arange(N) * 3 + 7
    got = feed(Sliding(5), CAUSAL, tokens(), ONES, rotary=ROTARY, extra=lambda a, b: {"positions": places[a:b]})
    q, k, v = tokens()
    q, k = ROTARY(q, places), ROTARY(k, places)
    close(got, uncached(CAUSAL, (q, k, v), None, masks.Window(5)))


# --- Sinks ------------------------------------------------------------------------------------------------------------


def by_slots(
    qkv: tuple[Tensor, Tensor, Tensor], sinks: int, window: int, rotary: Rotary | None = None, **parts: Any
) -> Tensor:
    """StreamingLLM by definition: each query, its kept keys, both rotated by slot, and the reference for one query."""
    (q, k, v), outs = qkv, []
    for i in range(q.shape[2]):
        held = list(range(i + 1)) if i < sinks + window else [*range(sinks), *range(i - window + 1, i + 1)]
        query, keys = q[:, :, i : i + 1], k[:, :, held]
        if rotary is not None:
            slots = torch.arange(len(held))
            query, keys = rotary(query, slots[-1:]), rotary(keys, slots)
        outs.append(oracle(query, keys, v[:, :, held], **parts)[0])
    return torch.cat(outs, 2)


SINK, KEY = rand(H, seed=1), rand(H, D, seed=2)
MAGNIFIED = Exact(4, base=100.0, scaling=YaRN(1.0, 64, attention=1.3))
SLOTS: dict[str, tuple[dict[str, Any], Rotary | None]] = {
    "none": ({}, None),
    "rotary": ({}, ROTARY),
    "rotary, sink": ({"normalizer": normalizers.Softmax(sink=SINK)}, ROTARY),
    "rotary, key": ({"normalizer": normalizers.Softmax(key=KEY)}, ROTARY),
    "rotary, cap": ({"bias": biases.SoftCap(0.7)}, ROTARY),
    "alibi": ({"bias": biases.ALiBi()}, None),
    "alibi, key": ({"bias": biases.ALiBi(), "normalizer": normalizers.Softmax(key=KEY)}, None),
    "alibi, rotary, sink": ({"bias": biases.ALiBi(), "normalizer": normalizers.Softmax(sink=SINK)}, ROTARY),
    "t5": ({"bias": T5}, None),
    "sigmoid": ({"normalizer": normalizers.Sigmoid()}, ROTARY),
    "window": ({"mask": masks.Window(6)}, ROTARY),
    "magnitude": ({"normalizer": normalizers.Softmax(key=KEY)}, MAGNIFIED),
}


@pytest.mark.parametrize(("name", "sizes"), [*zip(SLOTS, [(2, 5), (1, 1), (3, 2), (2, 50)] * 3, strict=True)])
def test_sinks_equal_attention_over_slots(name: str, sizes: tuple[int, int]) -> None:
    (sinks, window), n = sizes, 61 if sizes[1] == 50 else 27  # more than the buffer: rows move, and chunks pass it
    parts, rotary = SLOTS[name]
    attention = Attention(**{"mask": masks.Causal(), **parts})
    want = by_slots(tokens(n), sinks, window, rotary, **parts)
    for chunks in ([1] * n, [n], [3, 1, 1, 5, 1, n - 11]):
        cache = Sinks(sinks, window)
        close(feed(cache, attention, tokens(n), chunks, rotary=rotary), want, eps=4096)
        assert cache.length == min(n, sinks + window)


@pytest.mark.parametrize(("make", "rows"), [(lambda: Full(70), 70), (lambda: Sinks(2, 5), None)], ids=["Full", "Sinks"])
def test_one_query_is_one_call_without_mask_on_views_of_one_buffer(make: Callable[[], Cache], rows: int | None) -> None:
    cache, calls = make(), []
    feed(cache, CAUSAL, tokens(61), [9], rotary=ROTARY)
    with kernels.watching(lambda call, result: calls.append(call)):
        feed(cache, CAUSAL, tokens(61), [1] * 52, rotary=ROTARY)
    assert len(calls) == 52
    assert all(call.mask is None for call in calls)
    assert len({call.k.untyped_storage().data_ptr() for call in calls}) == 1
    if rows is None:
        assert {call.k.shape[2] for call in calls} == {7}
    else:
        assert calls[0].k.untyped_storage().nbytes() == B * HKV * rows * D * 8


# --- HeavyHitters -----------------------------------------------------------------------------------------------------


HITTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "off by one": {"normalizer": normalizers.Softmax(sink=0.0)},
    "sigmoid": {"normalizer": normalizers.Sigmoid(bias=-1.0)},
    "sparse": {"normalizer": normalizers.Entmax(2.0, temperature=0.3)},  # many weights of 0: ties
    "cap": {"bias": biases.SoftCap(1.5)},
    "a policy of one's own": {},
}


@pytest.mark.parametrize("name", HITTERS)
def test_tokens_attend_to_the_keys_that_an_evicting_cache_holds(name: str) -> None:
    (q, k, v), places = tokens(), torch.arange(N)
    for sizes in (ONES, [N], [5, 1, 1, 3, 7, 1, 1, 4]):
        cache, outs, stop = MeanAttention(6, 2) if "own" in name else HeavyHitters(3, 4), [], 0
        visible = torch.zeros(B, HKV, N, N, dtype=torch.bool)
        for size in sizes:
            start, stop = stop, stop + size
            row = torch.zeros(B, HKV, N, dtype=torch.bool)
            before = row.scatter(2, cache._buffers["positions"][..., : cache._stop], True) if start else row
            new = (x[:, :, start:stop] for x in (q, k, v))
            outs.append(cache.attend(Attention(mask=masks.Causal(), **HITTERS[name]), *new, rotary=ROTARY))
            held = cache._buffers["positions"][..., : cache._stop]
            for at in range(start, stop):
                visible[:, :, at] = row.scatter(2, held, True) if size == 1 else before
                visible[:, :, at, start : at + 1] = True
        mask = masks.Dense(visible.repeat_interleave(H // HKV, 1))
        out, _, weights = oracle(ROTARY(q, places), ROTARY(k, places), v, mask=mask, **HITTERS[name])
        close(torch.cat(outs, 2), out, eps=4096)
        received = weights.unflatten(1, (HKV, -1)).sum((2, 3)).gather(2, held)
        close(cache._buffers["received"], received, eps=4096)


# --- all --------------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], Cache]] = {
    "Full": lambda: Full(200),
    "Sliding": lambda: Sliding(7),
    "Sinks": lambda: Sinks(2, 5),
    "HeavyHitters": lambda: HeavyHitters(3, 4),
}
EVICTING = [name for name in MAKERS if name != "Full"]


@pytest.mark.parametrize("name", MAKERS)
def test_memory_is_constant(name: str) -> None:
    cache = MAKERS[name]()
    assert cache.nbytes == 0
    sizes = [3, *[1] * 40, 90, 1, 1]  # far more than 5 windows, and a chunk longer than any buffer
    qkv, stop, seen = tokens(sum(sizes)), 0, set()
    for size in sizes:
        start, stop = stop, stop + size
        cache.attend(CAUSAL, *(x[:, :, start:stop] for x in qkv), rotary=ROTARY)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in cache._buffers.values()}
        assert sum(storages.values()) == cache.nbytes
        seen.add((cache.nbytes, *storages))
        assert cache.length == min(stop, cache._most)
    assert len(seen) == 1
    rows = B * HKV * (D + DV) * 8
    assert cache.nbytes <= rows * (200 if name == "Full" else 7 + 16 + 2 + 2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("rows", "before"), [([1, 0], 6), ([1, 1], 19), ([0, 1, 1, 0, 1], 1), ([1], 19)])
def test_reorder_equals_starting_with_the_reordered_batch(name: str, rows: list[int], before: int) -> None:
    n, index = 27, torch.tensor(rows)
    cache, other = MAKERS[name](), MAKERS[name]()
    qkv = tokens(n)
    gathered = tuple(x[index] for x in qkv)
    sizes = [1] * (n - before - 4) + [4]
    feed(cache, CAUSAL, qkv, [before], rotary=ROTARY)
    cache.reorder(index)
    got = feed(cache, CAUSAL, gathered, sizes, rotary=ROTARY)
    feed(other, CAUSAL, gathered, [before], rotary=ROTARY)
    close(got, feed(other, CAUSAL, gathered, sizes, rotary=ROTARY))


SIZES: list[tuple[str, Callable[[], object]]] = [
    ("capacity", lambda: Full(0)), ("capacity", lambda: Full(8.5)), ("window", lambda: Sliding(0)),
    ("sinks", lambda: Sinks(0, 3)), ("window", lambda: Sinks(3, 0)), ("heavy", lambda: HeavyHitters(-1, 3)),
    ("recent", lambda: HeavyHitters(3, 0)), ("keys", lambda: MeanAttention(0, 1)), ("Evicting", lambda: Evicting(3, 1)),
    ("recent", lambda: MeanAttention(3, 3)), ("recent", lambda: MeanAttention(3, 0)),
]  # fmt: skip

test_sizes_that_are_no_numbers_of_keys_are_refused = refusals(SIZES)


def rejects(cache: Cache, argument: str, attention: Attention = CAUSAL, match: str | None = None, **extra: Any) -> None:
    """Assert that the call raises for this argument and leaves the cache unchanged."""
    seen, size = cache.seen, cache.nbytes
    q, k, v = extra.pop("qkv", tokens(3))
    with refused(argument, match):
        cache.attend(attention, q, k, v, **extra)
    assert (cache.seen, cache.nbytes) == (seen, size)


@pytest.mark.parametrize("name", MAKERS)
def test_all_caches_reject_unsupported_calls(name: str) -> None:
    cache = MAKERS[name]()
    q, k, v = tokens(3)
    rejects(cache, "mask", Attention(), match="is None")
    rejects(cache, "mask", Attention(mask=masks.Window(3, ahead=2)), match="up to 2")
    rejects(cache, "attention", attention=None)  # type: ignore[arg-type]
    rejects(cache, "q", qkv=(q[:, :, :2], k, v), match="n new tokens")
    rejects(cache, "q", qkv=(q, k, v[:, :1]), match="n new tokens")
    rejects(cache, "q", qkv=(q[0], k[0], v[0]), match="n new tokens")
    rejects(cache, "q", qkv=tuple(x[:, :, :0] for x in (q, k, v)), match="n new tokens")
    rejects(cache, "k", qkv=(q, k.clone().requires_grad_(), v), match="gradient")
    rejects(cache, "q", qkv=(q.clone().requires_grad_(), k, v), match="gradient")
    with torch.no_grad():
        MAKERS[name]().attend(CAUSAL, q, k.clone().requires_grad_(), v)
    feed(cache, CAUSAL, (q, k, v), [3])
    rejects(cache, "q", qkv=tuple(x[:1] for x in (q, k, v)), match="fit the cache")
    rejects(cache, "q", qkv=(q, k[:, :1], v[:, :1]), match="fit the cache")
    rejects(cache, "q", qkv=tokens(3, dtype=torch.float32), match="fit the cache")
    rejects(cache, "q", qkv=(q[..., :4], k[..., :4], v), match="fit the cache")


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_caches_reject_masks_and_positions_by_batch_item(name: str) -> None:
    cache = MAKERS[name]()
    for mask in (masks.Prefix(2) & masks.Causal(), masks.Padding([3, 2])):
        rejects(cache, "mask", Attention(mask=mask), match="the distance")
    rejects(cache, "mask", mask=masks.Padding([3, 2], "left"), match="was passed")
    rejects(cache, "positions", positions=torch.zeros(2, 3, dtype=torch.int64), match="same positions")


def test_sinks_reject_positions_and_scores_that_do_not_fit_slots() -> None:
    cache = Sinks(2, 5)
    places = torch.arange(3)
    cache.attend(CAUSAL, *tokens(3), rotary=ROTARY, positions=places)
    rejects(cache, "positions", positions=places, match="its slots")
    general = Attention(mask=masks.Causal(), score=scores.General(rand(D, D)))
    rejects(cache, "score", general, rotary=ROTARY)
    relative = Attention(mask=masks.Causal(), bias=biases.RelativePosition(rand(7, D)))
    rejects(cache, "bias", relative, rotary=ROTARY)
    three = Attention(mask=masks.Causal(), bias=biases.ALiBi(), normalizer=normalizers.Softmax(key=KEY))
    rejects(cache, "normalizer", three, rotary=ROTARY)


def test_heavy_hitters_reject_what_depends_on_the_order_of_keys() -> None:
    cache = HeavyHitters(3, 4)
    rejects(cache, "mask", Attention(mask=masks.Window(3)), match="unordered")
    rejects(cache, "bias", Attention(mask=masks.Causal(), bias=biases.ALiBi()))
    drawn = Attention(mask=masks.Causal(), normalizer=normalizers.Hard(sample=True))
    rejects(cache, "normalizer", drawn)


@pytest.mark.parametrize("name", MAKERS)
def test_a_cache_cannot_be_used_after_a_failed_call(name: str) -> None:
    cache = MAKERS[name]()
    feed(cache, CAUSAL, tokens(), [4])
    q, k, v = (x[:, :, 4:5] for x in tokens())
    with pytest.raises(InputError):
        cache.attend(CAUSAL, q[..., :-1], k, v)
    with refused("cache"):
        cache.attend(CAUSAL, q, k, v)


@pytest.mark.parametrize(("match", "wrong"), [
    (r"\(2, 3, 1\)", lambda self, held: held.received[..., :1]),
    ("NaN", lambda self, held: held.received * torch.nan),
])  # fmt: skip
def test_a_policy_with_a_wrong_worth_is_refused(match: str, wrong: Callable[..., Tensor]) -> None:
    policy = type("Wrong", (Evicting,), {"worth": wrong})(3, 1)
    with refused("worth", match):
        feed(policy, CAUSAL, tokens(), ONES)

"""Masks of transformers: the decoded masks have the same visible pairs as transformers' own tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as hf

from qkv.huggingface.masks import LazyMask, decode, lazy_mask
from qkv.masks import EMPTY, FULL, PARTIAL, And, Causal, Dense, Grid, Mask, Or, Predicate, Region, Shifted, Tiles

BATCH, NQ, NK = 3, 11, 17
LOWEST = torch.finfo(torch.float32).min
Function = Callable[..., Any]


def ids(*shape: int, most: int = 3, seed: int = 0) -> Tensor:
    """Random integers from −1 to `most` − 1."""
    return torch.randint(-1, most, shape, generator=torch.Generator().manual_seed(seed))


def every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A user's mask function that is not one of transformers' factories."""
    return (q + 2 * k + b) % 3 == 0


def by_kind(kinds: Tensor) -> Function:
    """Another user's mask function, which works on single indices only."""

    def later(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (kinds[q] > 0) | (kinds[k] == 0)

    return later


def by_table(table: Tensor) -> Function:
    """A user's mask function that looks positions up in a tensor (as models of images and text do)."""

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return table[b, q] == table[b, k]

    return same


def places(*lengths: int) -> Tensor:
    """Positions of packed sequences, with the sequences in another order in each batch item."""
    turned = [lengths[i % len(lengths) :] + lengths[: i % len(lengths)] for i in range(BATCH)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in turned])


LEFT = torch.tensor([0, 3, 5])
PACKED = places(5, 4, 8)
SEQUENCES = hf.find_packed_sequence_indices(PACKED)
FUNCTIONS: dict[str, Function] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(4),
    "window of one": hf.sliding_window_causal_mask_function(1),
    "window of none": hf.sliding_window_causal_mask_function(0),
    "window, not causal": hf.sliding_window_overlay(4),
    "symmetric window": hf.sliding_window_bidirectional_mask_function(4),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
    "chunks, left padding": hf.chunked_causal_mask_function(4, LEFT),
    "chunks, not causal": hf.chunked_overlay(5, LEFT),
    "blocks": hf.blockwise_overlay(ids(BATCH, NK)),
    "blocks of one row": hf.blockwise_overlay(ids(1, NK).expand(BATCH, -1)),
    "causal or blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids(BATCH, NK, seed=1))),
    "window or blocks": hf.or_masks(
        hf.sliding_window_causal_mask_function(3), hf.blockwise_overlay(ids(BATCH, NK, seed=2))
    ),
    "padding": hf.padding_mask_function(ids(BATCH, NK) >= 0),
    "packed": hf.packed_sequence_compatibility_function(hf.causal_mask_function, PACKED, SEQUENCES),
    "packed window": hf.packed_sequence_compatibility_function(
        hf.sliding_window_causal_mask_function(3), PACKED, SEQUENCES
    ),
    "packed chunks": hf.packed_sequence_compatibility_function(
        hf.chunked_causal_mask_function(3, LEFT), PACKED, SEQUENCES
    ),
    "packed, not causal": hf.packed_sequence_compatibility_function(hf.bidirectional_mask_function, PACKED, SEQUENCES),
    "everything or window": hf.or_masks(hf.bidirectional_mask_function, hf.sliding_window_causal_mask_function(3)),
    "everything and everything": hf.and_masks(hf.bidirectional_mask_function, hf.bidirectional_mask_function),
    "user's own": every_third,
    "user's own, a table": by_table(ids(BATCH, NK)),
    "user's own, a list": by_kind(ids(NK)),
    "causal and user's own": hf.and_masks(hf.causal_mask_function, every_third),
    "causal or user's own": hf.or_masks(hf.causal_mask_function, by_table(ids(BATCH, NK, seed=3))),
    "blocks and user's own": hf.and_masks(hf.blockwise_overlay(ids(BATCH, NK)), every_third),
    "a lambda": lambda b, h, q, k: k <= q,
    "a partial": functools.partial(lambda step, b, h, q, k: (q - k) % step == 0, 3),
}
DECODED = sorted(set(FUNCTIONS) - {name for name in FUNCTIONS if "own" in name or name.startswith("a ")})
OFFSETS = [(0, NK, 0), (NK - 9, NK, 0), (2, NK, 0), (8, 13, 4)]  # q_offset, keys, kv_offset


def shown(lazy: LazyMask) -> Tensor:
    """The visible pairs of the decoded mask, for each batch item; False at keys that it leaves out."""
    grid = lazy.grid
    seen = torch.zeros(lazy.shape, dtype=torch.bool)
    if lazy.mask is None:
        seen[..., : grid.n_keys] = True
    else:
        lazy.mask.check(grid)
        region = Region(slice(0, grid.n_queries), slice(0, grid.n_keys))
        seen[..., : grid.n_keys] = lazy.mask.visible(region, grid)
    assert torch.equal(seen, lazy.tensor() == 0)
    return seen


def theirs(function: Function, **sizes: Any) -> Tensor:
    """The visible pairs by transformers."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return hf.sdpa_mask(mask_function=function, use_vmap=True, **skips, **sizes)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("q_offset", "n_keys", "kv_offset"), OFFSETS)
@pytest.mark.parametrize("padded", [False, True])
def test_every_mask_equals_that_of_transformers(
    name: str, q_offset: int, n_keys: int, kv_offset: int, padded: bool
) -> None:
    sizes: dict[str, Any] = {
        "batch_size": BATCH, "q_length": 9, "kv_length": n_keys, "q_offset": q_offset, "kv_offset": kv_offset,
    }  # fmt: skip
    if padded:
        sizes["attention_mask"] = ids(BATCH, NK, seed=7) >= 0
    lazy = lazy_mask(mask_function=FUNCTIONS[name], **sizes)
    assert torch.equal(shown(lazy), theirs(FUNCTIONS[name], **sizes))
    assert lazy.shape == (BATCH, 1, 9, n_keys)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_block_status_of_tiles_is_right(name: str) -> None:
    """EMPTY and FULL are promises; a mask decoded wrongly may still be right where nothing is looked at."""
    lazy = lazy_mask(BATCH, NK, NK, mask_function=FUNCTIONS[name], attention_mask=ids(BATCH, NK, seed=7) >= 0)
    seen = shown(lazy)
    assert lazy.mask is not None
    kinds = lazy.mask.classify(Tiles.of(lazy.grid, 4, 4), lazy.grid).expand(BATCH, 1, 5, 5)
    for b in range(BATCH):
        for r in range(5):
            for c in range(5):
                tile = seen[b, 0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4]
                kind = int(kinds[b, 0, r, c])
                assert kind in (EMPTY, PARTIAL, FULL)
                assert kind != EMPTY or not tile.any()
                assert kind != FULL or tile.all()


@pytest.mark.parametrize("name", DECODED)
def test_mask_factories_of_transformers_are_decoded(name: str) -> None:
    mask = decode(FUNCTIONS[name], BATCH, NK, 0)
    # Positions within a sequence are not key indices, and a window of no keys is not one of ours
    evaluated = name in ("packed chunks", "window of none")
    assert any(isinstance(m, Predicate) for m in _parts(mask)) is evaluated


def _parts(mask: Mask | None) -> list[Mask | None]:
    if isinstance(mask, And | Or):
        return [mask, *_parts(mask.left), *_parts(mask.right)]
    return [mask]


def test_banded_masks_are_decoded_as_bands() -> None:
    """Kernels fold bands far faster than anything else."""
    bands = {"causal": (0, float("inf")), "window": (0, 3), "window of one": (0, 0), "symmetric window": (-4, 4)}
    for name, band in bands.items():
        mask = decode(FUNCTIONS[name], BATCH, NK, 0)
        assert mask is not None
        assert mask.band == band
    assert decode(FUNCTIONS["bidirectional"], BATCH, NK, 0) is None


def test_every_mask_factory_of_transformers_is_tested() -> None:
    """A new mask factory in transformers must fail here, not in a user's profile."""
    factories = {
        name
        for name, x in vars(hf).items()
        if callable(x) and getattr(x, "__module__", "") == hf.__name__
        and (name.endswith(("mask_function", "_overlay")) or name in ("and_masks", "or_masks"))
    }  # fmt: skip
    tested = {
        "and_masks", "or_masks", "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
        "sliding_window_causal_mask_function", "sliding_window_bidirectional_overlay",
        "sliding_window_bidirectional_mask_function", "chunked_overlay", "chunked_causal_mask_function",
        "blockwise_overlay", "padding_mask_function", "packed_sequence_mask_function",
    }  # fmt: skip
    assert factories - {"add_offsets_to_mask_function"} == tested  # that one is for flex attention only


@given(st.data())
def test_compositions_equal_those_of_transformers(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 13), "keys")
    n_queries = data.draw(st.integers(1, n), "queries")
    batch = data.draw(st.integers(1, 3), "batch")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    leaves = st.one_of(
        st.just(hf.causal_mask_function),
        st.just(hf.bidirectional_mask_function),
        st.just(every_third),
        st.builds(hf.sliding_window_overlay, st.integers(1, 14)),
        st.builds(hf.sliding_window_bidirectional_overlay, st.integers(1, 14)),
        st.builds(lambda c: hf.chunked_overlay(c, ids(batch, most=4, seed=seed).clamp(min=0)), st.integers(1, 6)),
        st.just(hf.blockwise_overlay(ids(batch, n, seed=seed))),
        st.just(hf.packed_sequence_mask_function(ids(batch, n, seed=seed).clamp(min=0))),
    )
    function = data.draw(
        st.recursive(
            leaves,
            lambda inner: st.builds(hf.and_masks, inner, inner) | st.builds(hf.or_masks, inner, inner),
            max_leaves=4,
        ),
        "function",
    )
    sizes: dict[str, Any] = {
        "batch_size": batch, "q_length": n_queries, "kv_length": n,
        "q_offset": data.draw(st.integers(0, n - n_queries), "q_offset"),
        "attention_mask": data.draw(st.none() | st.just(ids(batch, n, seed=seed) >= 0), "attention_mask"),
    }  # fmt: skip
    assert torch.equal(shown(lazy_mask(mask_function=function, **sizes)), theirs(function, **sizes))


# --- caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "window", "chunks, left padding", "symmetric window", "user's own"])
def test_static_cache_may_advance_its_counter_after_the_mask_is_made(name: str) -> None:
    """Its counter is the tensor that is passed as q_offset; the mask is used after the counter was increased."""
    counter = torch.tensor([6])
    sizes: dict[str, Any] = {"batch_size": BATCH, "q_length": 5, "kv_length": NK}
    want = theirs(FUNCTIONS[name], **sizes, q_offset=6)
    lazy = lazy_mask(mask_function=FUNCTIONS[name], **sizes, q_offset=counter)
    counter += 5
    assert torch.equal(shown(lazy), want)
    backward = name not in ("symmetric window", "user's own")  # no query can see what the cache has room for yet
    assert lazy.grid.n_keys == (11 if backward else NK)
    assert isinstance(lazy.mask, Shifted) is not backward


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_step_needs_only_the_padding_mask(padded: bool) -> None:
    """A step of decoding with a cache that has unused slots: the mask is as simple as possible."""
    real = torch.ones(BATCH, 9, dtype=torch.bool)
    real[1, :2] = not padded
    sizes: dict[str, Any] = {"batch_size": BATCH, "q_length": 1, "kv_length": NK, "attention_mask": real}
    lazy = lazy_mask(mask_function=hf.causal_mask_function, q_offset=8, **sizes)
    assert (lazy.grid.n_keys, lazy.shape) == (9, (BATCH, 1, 1, NK))
    assert isinstance(lazy.mask, Dense if padded else Causal)
    assert torch.equal(shown(lazy), theirs(hf.causal_mask_function, q_offset=8, **sizes))
    windowed = lazy_mask(mask_function=hf.sliding_window_causal_mask_function(4), q_offset=8, **sizes)
    assert torch.equal(shown(windowed), theirs(hf.sliding_window_causal_mask_function(4), q_offset=8, **sizes))


def test_attention_mask_may_be_shorter_than_the_cache() -> None:
    """Unused slots of a static cache count as padding."""
    mask = torch.ones(BATCH, 9, dtype=torch.bool)
    mask[1, :2] = False
    sizes: dict[str, Any] = {"batch_size": BATCH, "q_length": 1, "kv_length": NK, "q_offset": 8}
    lazy = lazy_mask(mask_function=hf.causal_mask_function, attention_mask=mask, **sizes)
    assert torch.equal(shown(lazy), theirs(hf.causal_mask_function, attention_mask=mask, **sizes))
    assert lazy.keys is not None
    assert lazy.keys.sum(1).tolist() == [9, 7, 9]


def test_attention_mask_may_begin_before_the_keys_of_a_window() -> None:
    mask = torch.ones(BATCH, 20, dtype=torch.long)
    mask[2, :15] = 0
    sizes: dict[str, Any] = {"batch_size": BATCH, "q_length": 3, "kv_length": 7, "q_offset": 17, "kv_offset": 13}
    lazy = lazy_mask(mask_function=hf.sliding_window_causal_mask_function(5), attention_mask=mask, **sizes)
    their_mask = theirs(hf.sliding_window_causal_mask_function(5), attention_mask=mask.bool(), **sizes)
    assert torch.equal(shown(lazy), their_mask)
    assert lazy.keys is not None
    assert lazy.keys.sum(1).tolist() == [7, 7, 5]


def test_keys_are_none_without_padding() -> None:
    lazy = lazy_mask(
        BATCH, NQ, NK, NK - NQ, mask_function=hf.causal_mask_function, attention_mask=torch.ones(BATCH, NK)
    )
    assert lazy.keys is None
    assert lazy.mask == Causal()


def test_lazy_mask_is_passed_on_unchanged() -> None:
    lazy = lazy_mask(BATCH, NQ, NK)
    assert lazy_mask(BATCH, 2, 3, attention_mask=lazy) is lazy


# --- what passes for a tensor -------------------------------------------------------------------------------------


def _lazy(dtype: torch.dtype = torch.float32) -> tuple[LazyMask, Tensor]:
    """A mask of ours, and transformers' additive tensor of the same."""
    sizes: dict[str, Any] = {
        "batch_size": BATCH, "q_length": NQ, "kv_length": NK, "q_offset": NK - NQ,
        "mask_function": FUNCTIONS["chunks, left padding"], "attention_mask": ids(BATCH, NK, seed=7) >= 0,
        "dtype": dtype,
    }  # fmt: skip
    return lazy_mask(**sizes), hf.eager_mask(**sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_mask_has_the_interface_of_the_additive_tensor(dtype: torch.dtype) -> None:
    lazy, dense = _lazy(dtype)
    assert (lazy.shape, lazy.ndim, lazy.dtype, lazy.device) == (dense.shape, dense.ndim, dense.dtype, dense.device)
    assert (lazy.dim(), lazy.size(), lazy.size(2), lazy.size(-1)) == (4, dense.size(), NQ, NK)
    assert lazy.to("cpu") is lazy.to(dtype=dtype) is lazy.contiguous() is lazy
    assert torch.equal(lazy.tensor(), dense)
    assert not isinstance(lazy, Tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: x + m,
        lambda m, x: m + x,
        lambda m, x: m - x,
        lambda m, x: x - m,
        lambda m, x: m * 0.5,
        lambda m, x: 0.5 * m,
        lambda m, x: m[:, :, :, :5],
        lambda m, x: m[..., -1:, 2],
        lambda m, x: m == 0,
        lambda m, x: m != 0,
        lambda m, x: m < 0,
        lambda m, x: m >= 0,
        lambda m, x: m > m[:, :, :1],
        lambda m, x: m + m,
        lambda m, x: torch.where(x > 0, m, x),
        lambda m, x: torch.cat([m, x[:, :1]], -1),
        lambda m, x: torch.add(x, other=m),
        lambda m, x: torch.nn.functional.softmax(x + m, -1),
        lambda m, x: torch.stack([m, m]).sum(0),
        lambda m, x: m.masked_fill(x[:, :1] > 0, -1.0),
        lambda m, x: m.bool(),
        lambda m, x: m.expand(-1, 4, -1, -1),
        lambda m, x: torch.nn.functional.scaled_dot_product_attention(
            x, x[..., :1, :].expand(-1, -1, NK, -1), x[..., :1, :].expand(-1, -1, NK, -1), attn_mask=m
        ),
    ],
)
def test_operations_on_a_lazy_mask_use_the_additive_tensor(use: Callable[[Any, Tensor], Tensor]) -> None:
    lazy, dense = _lazy()
    x = torch.randn(BATCH, 4, NQ, NK, generator=torch.Generator().manual_seed(1))
    got, want = use(lazy, x), use(dense, x)
    assert type(got) is Tensor
    assert torch.equal(got, want)


def test_in_place_addition_to_a_lazy_mask_gives_a_tensor() -> None:
    lazy, dense = _lazy()
    x = torch.ones(BATCH, 1, NQ, NK)
    changed: Any = operator.iadd(lazy, x)
    assert torch.equal(changed, dense + x)
    assert torch.equal(lazy.tensor(), dense)


def test_lazy_mask_without_a_mask_is_zero() -> None:
    lazy = lazy_mask(BATCH, NQ, NK, mask_function=hf.bidirectional_mask_function)
    assert lazy.mask is None
    assert torch.equal(lazy.tensor(), torch.zeros(BATCH, 1, NQ, NK))


def test_unknown_attributes_come_from_the_tensor() -> None:
    lazy, _ = _lazy()
    assert lazy.is_floating_point()
    assert not hasattr(lazy, "__array_interface__")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = lazy.no_such_thing


def test_boolean_dtype_becomes_float() -> None:
    assert lazy_mask(BATCH, NQ, NK, dtype=torch.bool).dtype == torch.float32


def test_mask_works_for_any_number_of_heads() -> None:
    """The mask is made before the number of heads is known."""
    lazy = lazy_mask(BATCH, NQ, NQ, mask_function=FUNCTIONS["causal or user's own"])
    assert lazy.mask is not None
    seen = lazy.mask.dense(NQ, NQ, batch=BATCH, heads=4)
    assert torch.equal(seen.expand(BATCH, 4, NQ, NQ), shown(lazy).expand(-1, 4, -1, -1))
    assert Grid.of(NQ, NQ, BATCH, 1) == lazy.grid

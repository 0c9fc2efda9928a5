"""Masks of transformers: the decoded masks have the same visible pairs as transformers' own tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as hf

from qkv.huggingface.masks import LazyMask, decode, lazy_mask
from qkv.masks import And, Causal, Dense, Grid, Mask, Or, Predicate, Region, Shifted

BATCH, NQ, NK = 3, 11, 17
Function = Callable[..., Any]


def ids(*shape: int, most: int = 3, seed: int = 0) -> Tensor:
    """Random integers from −1 to `most` − 1."""
    return torch.randint(-1, most, shape, generator=torch.Generator().manual_seed(seed))


def every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A user's mask function that is not one of transformers' factories."""
    return (q + 2 * k + b) % 3 == 0


def by_table(table: Tensor) -> Function:
    """A user's mask function that looks positions up in a tensor (as models of images and text do)."""
    return lambda b, h, q, k: table[b, q] == table[b, k]


def places(*lengths: int) -> Tensor:
    """Positions of packed sequences, with the sequences in another order in each batch item."""
    turned = [lengths[i % len(lengths) :] + lengths[: i % len(lengths)] for i in range(BATCH)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in turned])


LEFT, KINDS = torch.tensor([0, 3, 5]), ids(NK)
PACKED = places(5, 4, 8)
SEQUENCES = hf.find_packed_sequence_indices(PACKED)
CAUSAL, ALL, WINDOW = hf.causal_mask_function, hf.bidirectional_mask_function, hf.sliding_window_causal_mask_function
BLOCKS = [hf.blockwise_overlay(ids(BATCH, NK, seed=seed)) for seed in range(3)]


def of_single_indices(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A user's mask function that works on single indices only."""
    return (KINDS[q] > 0) | (KINDS[k] == 0)


def packed(function: Function) -> Function:
    remapped = hf.remap_positions_for_packed_sequence(function, PACKED)
    return hf.and_masks(hf.packed_sequence_mask_function(SEQUENCES), remapped)


FUNCTIONS: dict[str, Function] = {
    "causal": CAUSAL,
    "bidirectional": ALL,
    "window": WINDOW(4),
    "window of one": WINDOW(1),
    "window of none": WINDOW(0),
    "window, not causal": hf.sliding_window_overlay(4),
    "symmetric window": hf.sliding_window_bidirectional_mask_function(4),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
    "chunks, left padding": hf.chunked_causal_mask_function(4, LEFT),
    "chunks, not causal": hf.chunked_overlay(5, LEFT),
    "blocks": BLOCKS[0],
    "blocks of one row": hf.blockwise_overlay(ids(1, NK).expand(BATCH, -1)),
    "causal or blocks": hf.or_masks(CAUSAL, BLOCKS[1]),
    "window or blocks": hf.or_masks(WINDOW(3), BLOCKS[2]),
    "padding": hf.padding_mask_function(ids(BATCH, NK) >= 0),
    "packed": packed(CAUSAL),
    "packed window": packed(WINDOW(3)),
    "packed chunks": packed(hf.chunked_causal_mask_function(3, LEFT)),
    "packed, not causal": packed(ALL),
    "everything or window": hf.or_masks(ALL, WINDOW(3)),
    "everything and everything": hf.and_masks(ALL, ALL),
    "user's own": every_third,
    "user's own, a table": by_table(ids(BATCH, NK)),
    "user's own, a list": of_single_indices,
    "causal and user's own": hf.and_masks(CAUSAL, every_third),
    "causal or user's own": hf.or_masks(CAUSAL, by_table(ids(BATCH, NK, seed=3))),
    "blocks and user's own": hf.and_masks(BLOCKS[0], every_third),
    "a lambda": lambda b, h, q, k: k <= q,
    "a partial": functools.partial(lambda step, b, h, q, k: (q - k) % step == 0, 3),
}
OFFSETS = [(0, NK, 0), (NK - 9, NK, 0), (2, NK, 0), (8, 13, 4)]  # q_offset, keys, kv_offset
EVALUATED = ("packed chunks", "window of none")  # positions within a sequence are not keys; no window of ours is empty
BANDS = {
    "causal": (0, float("inf")), "window": (0, 3), "window of one": (0, 0), "symmetric window": (-4, 4),
}  # fmt: skip


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
    """The visible pairs by transformers; by its slow way only where a function works on single indices."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return hf.sdpa_mask(mask_function=function, use_vmap=function is of_single_indices, **skips, **sizes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mask_equals_that_of_transformers(name: str) -> None:
    for place, (q_offset, n_keys, kv_offset) in enumerate(OFFSETS):
        for padded in (False, True)[place % 2 :]:
            sizes: dict[str, Any] = {
                "batch_size": BATCH, "q_length": 9, "kv_length": n_keys, "q_offset": q_offset, "kv_offset": kv_offset,
                "attention_mask": ids(BATCH, NK, seed=7) >= 0 if padded else None,
            }  # fmt: skip
            lazy = lazy_mask(mask_function=FUNCTIONS[name], **sizes)
            assert torch.equal(shown(lazy), theirs(FUNCTIONS[name], **sizes))
            assert lazy.shape == (BATCH, 1, 9, n_keys)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "own" not in name and not name.startswith("a ")])
def test_mask_factories_of_transformers_are_decoded(name: str) -> None:
    """As bands where they are, which kernels fold far faster than anything else."""
    mask = decode(FUNCTIONS[name], BATCH, NK, 0)
    assert any(isinstance(m, Predicate) for m in _parts(mask)) is (name in EVALUATED)
    assert (mask is None) is (name in ("bidirectional", "everything or window", "everything and everything"))
    assert name not in BANDS or (mask is not None and mask.band == BANDS[name])


def _parts(mask: Mask | None) -> list[Mask | None]:
    return [mask, *_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And | Or) else [mask]


def test_every_mask_factory_of_transformers_is_tested() -> None:
    """A new mask factory in transformers must fail here, not in a user's profile."""
    factories = {
        name
        for name, x in vars(hf).items()
        if callable(x) and getattr(x, "__module__", "") == hf.__name__
        and name.endswith(("mask_function", "_overlay", "and_masks", "or_masks"))
    }  # fmt: skip
    untested = {name for name in factories if f"hf.{name}" not in Path(__file__).read_text(encoding="utf-8")}
    assert untested == {"add_offsets_to_mask_function"}  # for flex attention only
    assert len(factories) == 14


@given(st.data())
def test_compositions_equal_those_of_transformers(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 13), "keys")
    n_queries = data.draw(st.integers(1, n), "queries")
    batch = data.draw(st.integers(1, 3), "batch")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    leaves = st.one_of(
        st.sampled_from([CAUSAL, ALL, every_third]),
        st.builds(hf.sliding_window_overlay, st.integers(1, 14)),
        st.builds(hf.sliding_window_bidirectional_overlay, st.integers(1, 14)),
        st.builds(lambda c: hf.chunked_overlay(c, ids(batch, most=4, seed=seed).clamp(min=0)), st.integers(1, 6)),
        st.just(hf.blockwise_overlay(ids(batch, n, seed=seed))),
        st.just(hf.packed_sequence_mask_function(ids(batch, n, seed=seed).clamp(min=0))),
    )
    both = lambda inner: st.builds(hf.and_masks, inner, inner) | st.builds(hf.or_masks, inner, inner)  # noqa: E731
    function = data.draw(st.recursive(leaves, both, max_leaves=4), "function")
    sizes: dict[str, Any] = {
        "batch_size": batch, "q_length": n_queries, "kv_length": n,
        "q_offset": data.draw(st.integers(0, n - n_queries), "q_offset"),
        "attention_mask": data.draw(st.none() | st.just(ids(batch, n, seed=seed) >= 0), "attention_mask"),
    }  # fmt: skip
    assert torch.equal(shown(lazy_mask(mask_function=function, **sizes)), theirs(function, **sizes))


@pytest.mark.parametrize("name", ["window", "chunks, left padding", "symmetric window", "user's own"])
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


def masked(n: int, *starts: int) -> Tensor:
    """An attention mask of n tokens, whose texts begin at `starts`."""
    return torch.arange(n) >= torch.tensor(starts)[:, None]


@pytest.mark.parametrize(
    ("function", "sizes", "mask", "keys"),
    [  # a step of decoding with a cache that has unused slots, with and without padding, and a window that moved
        (CAUSAL, (1, NK, 8, 0), masked(9, 0, 0, 0), None),
        (CAUSAL, (1, NK, 8, 0), masked(9, 0, 2, 0), [9, 7, 9]),
        (WINDOW(8), (1, NK, 8, 0), masked(9, 0, 2, 0), [9, 7, 9]),
        (WINDOW(4), (3, 7, 17, 13), masked(20, 0, 0, 15), [7, 7, 5]),
        (CAUSAL, (NQ, NK, NK - NQ, 0), masked(NK, 0, 0, 0), None),
    ],
)  # fmt: skip
def test_attention_mask_may_have_another_length_than_the_cache(
    function: Function, sizes: tuple[int, ...], mask: Tensor, keys: list[int] | None
) -> None:
    """Unused slots of a static cache count as padding."""
    given: dict[str, Any] = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), sizes, strict=True))
    given |= {"batch_size": BATCH, "attention_mask": mask}
    lazy = lazy_mask(mask_function=function, **given)
    assert torch.equal(shown(lazy), theirs(function, **given))
    assert (None if lazy.keys is None else lazy.keys.sum(1).tolist()) == keys
    if function is CAUSAL:  # needs the padding only
        assert isinstance(lazy.mask, Causal if keys is None else Dense)
        assert (lazy.grid.n_keys, lazy.shape) == (mask.shape[1], (BATCH, 1, sizes[0], NK))


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
    assert lazy.is_floating_point()  # as of the tensor
    assert not hasattr(lazy, "__array_interface__")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = lazy.no_such_thing
    assert lazy_mask(BATCH, 2, 3, attention_mask=lazy) is lazy
    assert lazy_mask(BATCH, NQ, NK, mask_function=ALL, dtype=torch.bool).dtype == torch.float32
    x = torch.ones(BATCH, 1, NQ, NK, dtype=dtype)
    changed: Any = operator.iadd(lazy, x)
    assert torch.equal(changed, dense + x)
    assert torch.equal(lazy.tensor(), dense), "an addition in place changed the mask"


USES: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: x + m, lambda m, x: m + x, lambda m, x: m - x, lambda m, x: x - m, lambda m, x: m * 0.5,
    lambda m, x: 0.5 * m, lambda m, x: m[:, :, :, :5], lambda m, x: m[..., -1:, 2], lambda m, x: m == 0,
    lambda m, x: m != 0, lambda m, x: m < 0, lambda m, x: m >= 0, lambda m, x: m > m[:, :, :1], lambda m, x: m + m,
    lambda m, x: torch.where(x > 0, m, x), lambda m, x: torch.cat([m, x[:, :1]], -1),
    lambda m, x: torch.add(x, other=m), lambda m, x: torch.stack([m, m]).sum(0),
    lambda m, x: m.masked_fill(x[:, :1] > 0, -1.0), lambda m, x: m.bool(), lambda m, x: m.expand(-1, 4, -1, -1),
    lambda m, x: torch.nn.functional.scaled_dot_product_attention(
        x, x[..., :1, :].expand(-1, -1, NK, -1), x[..., :1, :].expand(-1, -1, NK, -1), attn_mask=m
    ),
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_operations_on_a_lazy_mask_use_the_additive_tensor(use: Callable[[Any, Tensor], Tensor]) -> None:
    lazy, dense = _lazy()
    x = torch.randn(BATCH, 4, NQ, NK, generator=torch.Generator().manual_seed(1))
    got, want = use(lazy, x), use(dense, x)
    assert type(got) is Tensor
    assert torch.equal(got, want)


def test_mask_works_for_any_number_of_heads() -> None:
    """The mask is made before the number of heads is known."""
    lazy = lazy_mask(BATCH, NQ, NQ, mask_function=FUNCTIONS["causal or user's own"])
    assert lazy.mask is not None
    seen = lazy.mask.dense(NQ, NQ, batch=BATCH, heads=4)
    assert torch.equal(seen.expand(BATCH, 4, NQ, NQ), shown(lazy).expand(-1, 4, -1, -1))
    assert Grid.of(NQ, NQ, BATCH, 1) == lazy.grid

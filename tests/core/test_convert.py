"""Conversion of masks to and from SDPA, MultiheadAttention and FlexAttention, and the outputs of these libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import qkv
from conftest import MASKS, fits, grids, mask_trees, rand, refusals, triple
from qkv import InputError, biases, masks
from qkv.masks import Causal, Dense, Global, Mask, Padding, RandomKeys, Shifted, Window

B, H, NQ, NK = 2, 3, 11, 13

MORE: dict[str, Mask] = {
    "global, shifted": Shifted(Global([0, 2]), 1),
    "no random": RandomKeys(0),
    "random besides": RandomKeys(2, besides=Window(3)),
    "blocks of dense": masks.Blockwise(Dense(rand(1, 7) < 0), 2),
}


def whole(mask: Mask, nq: int, nk: int, batch: int = B, heads: int = H) -> Tensor:
    return mask.dense(nq, nk, batch=batch, heads=heads).expand(batch, heads, -1, -1)


def every_mask(nq: int = NQ, nk: int = NK) -> dict[str, Mask]:
    found = {name: make(nq, nk, B, H) for name, make in MASKS.items() if fits(name, nq, nk)}
    return {name: mask for name, mask in (found | MORE).items() if mask is not None}


# --- round trips ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_round_trips_keep_the_visible_pairs(data: st.DataObject) -> None:
    grid = data.draw(grids())
    b, h, nq, nk = grid.batch, grid.heads, grid.n_queries, grid.n_keys
    mask = data.draw(mask_trees(nq, nk, b, h))
    want = whole(mask, nq, nk, b, h)
    sizes: dict[str, Any] = {"batch": b, "heads": h}

    theirs = masks.to_sdpa(mask, nq, nk, **sizes)
    assert torch.equal(theirs.expand_as(want), want)
    assert torch.equal(whole(masks.from_sdpa(theirs, n_queries=nq, n_keys=nk), nq, nk, b, h), want)

    hidden = masks.to_multihead(mask, nq, nk, **sizes)
    assert torch.equal(whole(masks.from_multihead(hidden, heads=h), nq, nk, b, h), want)

    size = data.draw(st.sampled_from([1, 3, 4, 128]))
    blocks = masks.to_flex(mask, nq, nk, **sizes, block_size=size)
    assert torch.equal(whole(masks.from_flex(blocks), nq, nk, b, h), want)
    visible = masks.mask_mod(mask, nq, nk, **sizes)
    assert torch.equal(whole(masks.from_flex(visible), nq, nk, b, h), want)


def same_blocks(ours: Any, theirs: Any) -> None:
    assert (ours.shape, ours.BLOCK_SIZE) == (theirs.shape, theirs.BLOCK_SIZE)
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, indices = (getattr(ours, f"{kind}_{x}") for x in ("num_blocks", "indices"))
        assert torch.equal(count, getattr(theirs, f"{kind}_num_blocks"))
        assert indices.dtype == torch.int32
        used = torch.arange(indices.shape[-1]) < count[..., None]
        assert torch.equal(indices[used], getattr(theirs, f"{kind}_indices")[used])


@pytest.mark.parametrize("name", every_mask())
def test_every_mask_as_sdpa_and_flex_blocks(name: str) -> None:
    """The blocks are those that torch makes of the predicate; the output is that of `scaled_dot_product_attention`."""
    mask = every_mask()[name]
    visible = masks.mask_mod(mask, NQ, NK, batch=B, heads=H)
    assert torch.equal(torch_flex.create_mask(visible, B, H, NQ, NK, device="cpu"), whole(mask, NQ, NK))
    theirs = torch_flex.create_block_mask(visible, B, H, NQ, NK, device="cpu", BLOCK_SIZE=4)
    same_blocks(masks.to_flex(mask, NQ, NK, batch=B, heads=H, block_size=4), theirs)
    q, k, v = triple(B, H, H, NQ, NK)
    some = whole(mask, NQ, NK).any(-1)
    want = scaled_dot_product_attention(q, k, v, attn_mask=masks.to_sdpa(mask, NQ, NK, batch=B, heads=H))
    torch.testing.assert_close(qkv.attend(q, k, v, mask=mask, kernel="eager")[some], want[some])


# --- outputs of the libraries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nq", "nk"), [(5, 7), (7, 5), (6, 6), (1, 4)])
def test_sdpa_is_causal_is_top_left(nq: int, nk: int) -> None:
    q, k, v = triple(B, H, H, nq, nk)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True)
    for mask in (masks.from_sdpa(is_causal=True), masks.from_sdpa(is_causal=True, n_queries=nq, n_keys=nk)):
        torch.testing.assert_close(qkv.attend(q, k, v, mask=mask), theirs)
    assert (masks.from_sdpa(is_causal=True, n_queries=nq, n_keys=nk) == Causal()) == (nq == nk)


@pytest.mark.parametrize("name", ["causal", "dense of heads", "dense of items"])
def test_multihead_padding_and_mask_together(name: str) -> None:
    mask = every_mask(NK, NK)[name]
    hidden = masks.to_multihead(mask, NK, NK, batch=B, heads=H)
    assert hidden.shape == ((NK, NK) if name == "causal" else (B * H, NK, NK))
    padding = torch.arange(NK) >= torch.tensor([[5], [9]])
    both, allowed = masks.from_multihead(hidden, padding, heads=H), whole(mask & Padding([5, 9]), NK, NK)
    assert torch.equal(whole(both, NK, NK), allowed)
    assert torch.equal(whole(masks.from_multihead(key_padding_mask=padding[0]), NK, NK), whole(Padding([5]), NK, NK))
    module = nn.MultiheadAttention(H * 4, H, batch_first=True, dtype=torch.float64)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = rand(*parameter.shape, seed=seed)
    x = rand(B, NK, H * 4)
    projected = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(2, (3 * H, 4))
    out = qkv.attend(*projected.transpose(1, 2).chunk(3, 1), mask=both, kernel="eager")
    assert isinstance(out, Tensor)
    want, _ = module(x, x, x, need_weights=False, attn_mask=hidden, key_padding_mask=padding)
    some = allowed.any(-1).all(1)  # of a query with a blind head all is NaN there
    assert some.any()
    torch.testing.assert_close(module.out_proj(out.transpose(1, 2).flatten(2))[some], want[some])


# --- from FlexAttention -----------------------------------------------------------------------------------------------


def test_from_flex_counts_rows_not_positions() -> None:
    ours = masks.from_flex(lambda b, h, q, k: k <= q)
    assert torch.equal(ours.dense(3, 5), Shifted(Causal(), 0).dense(3, 5))
    assert torch.equal(ours.dense(5, 5), Causal().dense(5, 5))


def test_from_flex_masks_pairs_beyond_its_lengths() -> None:
    ids = torch.tensor([0, 0, 1])
    visible = masks.from_flex(lambda b, h, q, k: ids[q] == ids[k], 3, 3)
    assert visible.dense(4, 4)[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    blocks = masks.to_flex(Causal(), 3, 3, block_size=2)
    assert masks.from_flex(blocks, 3).dense(4, 4)[0, 0].int().tolist()[2:] == [[1, 1, 1, 0], [0, 0, 0, 0]]


def test_from_flex_follows_the_lists_of_blocks() -> None:
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    order = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    theirs = torch_flex.BlockMask.from_kv_blocks(one, order, BLOCK_SIZE=2, mask_mod=lambda b, h, q, k: q >= k)
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert masks.from_flex(theirs).dense(4, 4)[0, 0].int().tolist() == want
    none = 0 * one
    theirs = torch_flex.BlockMask.from_kv_blocks(none, order, one, order, BLOCK_SIZE=2)
    assert masks.from_flex(theirs).dense(4, 4)[0, 0].int().tolist() == [[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_converters_reject_float_masks() -> None:
    added = torch.zeros(NQ, NK)
    for convert in (masks.from_sdpa, masks.from_multihead, lambda x: masks.from_multihead(key_padding_mask=x)):
        with pytest.raises(InputError, match=r"bias=qkv\.biases\.TensorBias\(tensor\)"):
            convert(added)
    assert biases.TensorBias(added).tensor is added  # the error message recommends this


SQUARE = torch.ones(3, 3, dtype=torch.bool)
BLOCKS = masks.to_flex(Causal(), 8, 8, block_size=4)
REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("attn_mask", lambda: masks.from_sdpa(SQUARE.long())),
    ("attn_mask", lambda: masks.from_sdpa(SQUARE, is_causal=True)),
    ("n_queries", lambda: masks.from_sdpa(SQUARE, n_queries=3)),
    ("mask", lambda: masks.from_sdpa(SQUARE, n_queries=4, n_keys=3)),
    ("attn_mask", lambda: masks.from_multihead(SQUARE[None].expand(4, -1, -1))),
    ("attn_mask", lambda: masks.from_multihead(SQUARE[None].expand(4, -1, -1), heads=3)),
    ("attn_mask", lambda: masks.from_multihead(SQUARE[0])),
    ("key_padding_mask", lambda: masks.from_multihead(key_padding_mask=SQUARE[None])),
    ("block_size", lambda: masks.to_flex(Causal(), 3, 3, block_size=0)),
    ("lengths", lambda: masks.to_flex(Padding([3, 4]), 5, 7)),
    ("mask", lambda: masks.from_flex(Causal())),  # type: ignore[arg-type]
    ("n_queries", lambda: masks.from_flex(BLOCKS, 9)),
    ("mask", lambda: masks.from_flex(BLOCKS[:, :, 0])),
    ("mask", lambda: masks.mask_mod(Dense(SQUARE), 4, 3)),
]

test_converters_reject_wrong_arguments = refusals(REFUSALS)

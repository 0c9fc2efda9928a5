"""The table "who means what by True" of docs/conventions.md, against the libraries themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv.biases import Dense as AddedTensor
from qkv.masks import Causal, Dense, Predicate

B, H, N, D = 2, 3, 7, 5


@pytest.fixture
def heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(B, H, N, D, generator=generator) for _ in range(3)]


@pytest.fixture
def mask() -> Tensor:
    """Random, each query with its own key at least."""
    return (torch.rand(N, N, generator=torch.Generator().manual_seed(4)) < 0.4) | torch.eye(N, dtype=torch.bool)


def test_sdpa_bool_masks_mean_the_same(heads: list[Tensor], mask: Tensor) -> None:
    torch.testing.assert_close(
        qkv.attend(*heads, mask=Dense(mask)), scaled_dot_product_attention(*heads, attn_mask=mask)
    )


def test_sdpa_float_is_a_bias(heads: list[Tensor], mask: Tensor) -> None:
    added = torch.zeros(N, N).masked_fill(~mask, -torch.inf) + torch.arange(N) / N
    ours = qkv.attend(*heads, bias=AddedTensor(added))
    torch.testing.assert_close(ours, scaled_dot_product_attention(*heads, attn_mask=added))


def test_sdpa_is_causal_agrees_for_equal_lengths_only(heads: list[Tensor]) -> None:
    q, k, v = heads
    torch.testing.assert_close(
        qkv.attend(q, k, v, mask=Causal()), scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    short = q[:, :, :3]
    ours, theirs = qkv.attend(short, k, v, mask=Causal()), scaled_dot_product_attention(short, k, v, is_causal=True)
    assert isinstance(ours, Tensor)
    assert (ours - theirs).abs().max() > 0.1


@pytest.mark.parametrize("which", ["attn_mask", "key_padding_mask"])
def test_multihead_attention_masks_mean_the_opposite(which: str, mask: Tensor) -> None:
    torch.manual_seed(5)
    module = nn.MultiheadAttention(H * D, H, batch_first=True)
    x = torch.randn(B, N, H * D)
    padding = torch.arange(N) >= torch.tensor([[5], [7]])
    theirs_hidden = ~mask if which == "attn_mask" else padding
    ours = ~Dense(theirs_hidden) if which == "attn_mask" else ~Dense(theirs_hidden[:, None, None, :])
    with torch.no_grad():
        theirs, _ = module(x, x, x, need_weights=False, **{which: theirs_hidden})
        q, k, v = (
            y.unflatten(2, (H, D)).transpose(1, 2)
            for y in nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, 2)
        )
        out = qkv.attend(q, k, v, mask=ours)
        assert isinstance(out, Tensor)
        torch.testing.assert_close(module.out_proj(out.transpose(1, 2).flatten(2)), theirs)


def test_flex_attention_mask_mod_is_a_predicate(heads: list[Tensor]) -> None:
    from torch.nn.attention.flex_attention import create_mask

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k + h + b) % 3 != 1)

    dense = create_mask(mask_mod, B, H, N, N, device="cpu")
    torch.testing.assert_close(
        qkv.attend(*heads, mask=Predicate(mask_mod)), qkv.attend(*heads, mask=Dense(dense), kernel="eager")
    )
    assert torch.equal(Predicate(mask_mod).dense(N, N, batch=B, heads=H), dense)


def test_a_tokenizer_marks_real_tokens_with_1(heads: list[Tensor]) -> None:
    marked = (torch.arange(N) < torch.tensor([[4], [7]])).long()
    ours = qkv.attend(*heads, mask=Dense((marked == 1)[:, None, None, :]))
    assert isinstance(ours, Tensor)
    alone = qkv.attend(*(x[:1, :, :4] for x in heads))
    torch.testing.assert_close(ours[:1, :, :4], alone)

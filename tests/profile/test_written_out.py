"""Attention that a model writes out by hand is found by what is computed, and read exactly or refused.

The oracle of each spelling is the formula in float64; that of x-transformers is what the library says itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import refused

F = nn.functional
B, N, H, D = 3, 10, 4, 5
X = torch.randn(B, N, H * D, generator=torch.Generator().manual_seed(0))


def parts(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D))


def heads(x: Tensor) -> Tensor:
    return parts(x).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def masked(s: Tensor, low: float = -torch.inf) -> Tensor:
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1), low)


def helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(q @ k.mT).softmax(-1) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(parts, (q, k, v))
    w = masked(torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", w, v).flatten(2)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(parts, (q, k, v))
    s = torch.einsum("bqhd,bkhd->bqkh", q, k)
    s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1)[..., None], -torch.inf)
    return torch.einsum("bqkh,bkhd->bqhd", F.softmax(s, 2), v).flatten(2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(parts, (q, k, v))
    w = masked(torch.einsum("...qhd,...khd->h...qk", q, k)).softmax(-1)
    return torch.einsum("h...qk,...khd->...qhd", w, v).flatten(2)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads(x).reshape(-1, N, D) for x in (q, k, v))
    return joined(torch.bmm(masked(torch.bmm(q, k.transpose(1, 2))).softmax(-1), v).view(B, H, N, D))


def folded_by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat(x.chunk(H, -1), 0) for x in (q, k, v))
    return torch.cat((masked(q @ k.transpose(1, 2)).softmax(-1) @ v).chunk(H, 0), -1)


def length_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).contiguous().view(N, B * H, D).transpose(0, 1) for x in (q, k, v))
    w = masked(torch.baddbmm(torch.zeros(1), q, k.transpose(1, 2), beta=0)).softmax(-1)
    return torch.bmm(w, v).transpose(0, 1).reshape(N, B, H * D).transpose(0, 1)


def chunks_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    found = [
        (q[:, :, i : i + 4] @ k.mT).masked_fill(mask[i : i + 4], -torch.inf).softmax(-1) @ v for i in range(0, N, 4)
    ]
    return joined(torch.cat(found, 2))


def chunks_over_more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    found = [helper(q[:, :, i : i + 2], k[:, :, : i + 2], v[:, :, : i + 2]) for i in range(0, N, 2)]
    return joined(torch.cat(found, 2))


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    s = masked(q @ k.mT)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return joined((e / e.sum(-1, keepdim=True)) @ v)


def by_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return joined(F.log_softmax(masked(q @ k.mT), -1).exp() @ v)


def finite_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    w = F.dropout(F.softmax(masked(torch.matmul(q, k.transpose(-2, -1)), -1e9).float(), dim=-1), 0.1, False)
    return joined(torch.matmul(w.type_as(v), v))


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    w = torch.softmax(masked(q @ k.mT).mT, dim=-2)
    return joined((v.mT @ w).mT)


def one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.stack(x.split(D, -1)) for x in (q, k, v))
    return torch.cat((*helper(q, k, v),), -1)


def three_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return torch.einsum("bhqk,bhkd,de->bhqe", masked(q @ k.mT).softmax(-1), v, torch.eye(D)).transpose(1, 2).flatten(2)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    s = q @ k.mT
    s += torch.full((N, N), -torch.inf).triu(1)
    w = s.softmax(-1)
    w *= 1.0
    return joined(w @ v)


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Parameters mix the heads, before the softmax and after it; here each stays what it is."""
    mix = nn.Parameter(torch.eye(H), requires_grad=False)
    s = torch.einsum("hg,bhij->bgij", mix, masked(heads(q) @ heads(k).mT, -1e4))
    w = F.linear(s.softmax(-1).permute(0, 2, 3, 1), mix).permute(0, 3, 1, 2)
    return joined(w @ heads(v))


SPELLINGS = [
    lambda q, k, v: joined(helper(heads(q), heads(k), heads(v))), einsums, heads_last, heads_first, folded,
    folded_by_heads, length_first, chunks_of_queries, chunks_over_more_keys, by_exponentials, by_logarithms,
    finite_mask, keys_first, one_head_at_a_time, three_operands, in_place, talking_heads,
]  # fmt: skip


class Mixing(nn.Module):
    """Its class and its attributes say neither that it attends nor how many heads it has."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.q, self.k, self.v, self.out = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.q(x) / math.sqrt(D), self.k(x), self.v(x)))

    def weights(self, x: Tensor) -> Tensor:
        q, k = (heads(x.double() @ one.weight.double().T + one.bias.double()) for one in (self.q, self.k))
        return masked(q @ k.mT / math.sqrt(D)).softmax(-1)


def model_of(*mixes: Any) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(*(Mixing(mix) for mix in mixes)).eval()


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("mix", SPELLINGS)
def test_each_spelling_is_read_exactly(mix: Any, batch: int) -> None:
    if batch == 1 and mix in (folded, length_first):
        pytest.skip("it is written for three texts")
    model, x = model_of(SPELLINGS[0], mix), X[:batch]
    want, hidden = model(x), model[0](x)
    got = qkv.profile(model, {"input": x}, progress=False)
    assert got.data["module"].values.tolist() == ["0", "1"]
    assert (got.attrs["unobserved"], got.data.attrs["causal"]) == ([], True)
    np.testing.assert_allclose(got.data["weights"].values[:, 0], model[0].weights(x), atol=1e-6)
    np.testing.assert_allclose(got.data["weights"].values[:, 1], model[1].weights(hidden), atol=1e-6)
    with qkv.watch(model) as watched:
        assert torch.equal(model(x), want)
    np.testing.assert_allclose(watched.profile().data["weights"].values, got.data["weights"].values, atol=1e-6)


def divided_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    e = masked(q @ k.mT).exp()
    return joined((e @ v) / e.sum(-1, keepdim=True))


def of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return joined(v @ (q.mT @ k).softmax(-1).mT)


def signed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return joined((masked(q @ k.mT).softmax(-1) - 2 * masked(k @ q.mT).softmax(-1)) @ v)


def in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (parts(x).unflatten(1, (5, 2)).transpose(2, 3) for x in (q, k, v))
    k, v = (torch.cat([x, x.roll(1, 1)], 3) for x in (k, v))  # windows that overlap
    return ((q @ k.mT).softmax(-1) @ v).transpose(2, 3).flatten(3).flatten(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return joined((masked(q @ k.mT).softmax(-1)[..., None] * v[:, :, None]).sum(-2))


def by_landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    few = q[:, :, ::2], k[:, :, ::2]
    return joined(
        (q @ few[1].mT).softmax(-1) @ torch.linalg.pinv((few[0] @ few[1].mT).softmax(-1)) @ helper(few[0], k, v)
    )


REFUSED = {
    "sum of its exponentials": divided_afterwards, "over channels": of_channels, "negative": signed,
    "heads cannot be told": in_windows,
    "matrix product": by_products, "weights with weights": by_landmarks,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("reason", REFUSED)
def test_a_layer_that_cannot_be_read_is_named_beside_one_that_can(reason: str) -> None:
    model = model_of(SPELLINGS[0], REFUSED[reason])
    with refused("model", match=rf"1 \(1: .*{reason}"):
        qkv.profile(model, {"input": X}, progress=False)
    assert qkv.profile(model, {"input": X}, progress=False, partial=True).attrs["unobserved"] == ["1"]
    with qkv.watch(model) as watched:
        model(X)
    with pytest.warns(UserWarning, match=reason):
        assert watched.profile().data.sizes["layer"] == 1


class Merging(nn.Module):
    """Queries are parameters: any text becomes three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, H * D, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.queries, x.mT).softmax(-1) @ x


@torch.no_grad()
def test_queries_that_are_parameters_are_those_of_every_text() -> None:
    model = Merging()
    [data] = qkv.profile(model, {"x": X}, progress=False).groups.values()
    np.testing.assert_allclose(data["weights"].values[:, 0, 0], (model.queries @ X.mT).softmax(-1), atol=1e-6)


class InWindows(Mixing):
    """Windows of an image attend: (batch, rows, columns of windows, height, width, features)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(3, 4).flatten(0, 2)
        return super().forward(flat).unflatten(0, x.shape[:3]).unflatten(3, x.shape[3:5])


@torch.no_grad()
def test_windows_of_an_image_are_batch_items() -> None:
    torch.manual_seed(1)
    inner, x = InWindows(lambda q, k, v: joined(helper(*map(heads, (q, k, v))))), torch.randn(2, 3, 2, 2, 5, H * D)
    data = qkv.profile(nn.Sequential(inner), {"input": x}, progress=False).data
    want = inner.weights(x.flatten(3, 4).flatten(0, 2))
    np.testing.assert_allclose(data["weights"].values[:, 0], want, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "ALiBi": {"alibi_pos_bias": True}, "T5": {"rel_pos_bias": True},
    "talking heads": {"attn_pre_talking_heads": True}, "top-k": {"attn_sparse_topk": 4},
    "one key head": {"attn_one_kv_head": True},
    "grouped": {"attn_kv_heads": 2}, "qk-norm": {"attn_qk_norm": True}, "sigmoid": {"attn_sigmoid": True},
    "memory keys": {"attn_num_mem_kv": 3}, "gates": {"attn_gate_values": True},
    "soft cap": {"attn_softclamp_logits": True},
    "L2": {"attn_l2_distance": True}, "CoPE": {"attn_use_cope": True}, "selective": {"attn_selective": True},
}  # fmt: skip
WITHOUT_FLASH = {"T5", "talking heads", "top-k", "sigmoid", "soft cap", "CoPE", "selective"}


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_weights_of_x_transformers_are_its_own(option: str, flash: bool) -> None:
    x_transformers = pytest.importorskip("x_transformers")
    if flash and option in WITHOUT_FLASH:
        pytest.skip("x-transformers has no flash attention with this option")

    def model(flash: bool) -> Any:
        torch.manual_seed(0)
        layers = x_transformers.Decoder(
            dim=32,
            depth=2,
            heads=4,
            attn_dim_head=8,
            cross_attend=option == "plain",
            attn_flash=flash,
            **OPTIONS[option],
        )
        made = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers).eval()
        for x in made.parameters():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())) * 0.3)
        return made

    inputs: Any = {"x": torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(2))}
    if option == "plain":
        inputs["context"] = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(3))
    got = qkv.profile(model(flash), inputs, probe=False, progress=False)
    own = model(False)(**inputs, return_intermediates=True)[1].attn_intermediates
    assert got.attrs["unobserved"] == []
    found = {name: [*data["weights"].values.swapaxes(0, 1)] for name, data in got.groups.items()}
    for one in own:
        want = one.post_softmax_attn
        mine = next(rows.pop(0) for rows in found.values() if rows and rows[0].shape == want.shape)
        np.testing.assert_allclose(mine, want, atol=2e-5)
    assert not any(found.values())

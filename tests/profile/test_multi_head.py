"""`nn.MultiheadAttention` and the layers of torch that have it: read on their fast path too, and edited by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import covering, rand, refused

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
F = nn.functional
B, N, M, H, E = 2, 7, 5, 4, 24
X, Y = rand(B, N, E), rand(B, M, E, seed=1)
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDING: dict[str, Any] = {
    "none": None, "right": torch.arange(N) >= torch.tensor([[N], [4]]),
    "left": torch.arange(N) < torch.tensor([[0], [3]]), "all": torch.arange(N) >= torch.tensor([[6], [4]]),
}  # fmt: skip


def filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for x in model.parameters():
        x.data = 0.4 * torch.randn(x.shape, generator=generator).double()
    return model.double().eval()


def encoder(norm_first: bool = False) -> Any:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=norm_first)
    return filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))


def split(x: Tensor) -> Tensor:
    return torch.transpose(x.unflatten(-1, (H, -1)), 1, 2)


def formula(layer: Any, x: Tensor, y: Tensor, *hidden: Tensor | None, added: Any = None, edits: bool = False) -> Any:
    """Output and weights by the definition; with head 0 set to zero and the scores of head 1 doubled, if edited."""
    w, bias = layer.in_proj_weight, layer.in_proj_bias
    bias = w.new_zeros(3 * E) if bias is None else bias
    q, k, v = (F.linear(z, *one) for z, one in zip((x, y, y), zip(w.chunk(3), bias.chunk(3), strict=True), strict=True))
    if layer.bias_k is not None:
        k, v = (torch.cat([z, one.expand(B, 1, -1)], 1) for z, one in ((k, layer.bias_k), (v, layer.bias_v)))
    if layer.add_zero_attn:
        k, v = (F.pad(z, (0, 0, 0, 1)) for z in (k, v))
    q, k, v = map(split, (q, k, v))
    scores = q @ k.mT / (E // H) ** 0.5
    scores = scores if added is None else scores + F.pad(added, (0, scores.shape[-1] - added.shape[-1]))
    for one in hidden:
        if one is not None:
            scores = scores.masked_fill(F.pad(one, (0, scores.shape[-1] - one.shape[-1])), -torch.inf)
    if edits:
        scores = scores * torch.tensor([1.0, 2, 1, 1]).view(-1, 1, 1)
    weights = scores.softmax(-1)
    heads = weights @ v
    heads = heads * torch.tensor([0.0, 1, 1, 1]).view(-1, 1, 1) if edits else heads
    return layer.out_proj(heads.transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize(
    ("norm_first", "padding", "causal", "grad"), covering([False, True], list(PADDING), [False, True], [False, True])
)
def test_torchs_encoder_is_watched_without_leaving_its_fast_path(
    norm_first: bool, padding: str, causal: bool, grad: bool
) -> None:
    model, hidden = encoder(norm_first), PADDING[padding]
    given: Any = {"mask": CAUSAL if causal and padding != "left" else None, "src_key_padding_mask": hidden}
    with torch.set_grad_enabled(grad):
        want = model(X, **given)
        with qkv.watch(model) as watched:
            assert torch.equal(model(X, **given), want)
    data, x = watched.profile().data, X
    hidden = torch.zeros(B, N, dtype=torch.bool) if hidden is None else hidden
    for i, layer in enumerate(model.layers):
        z = layer.norm1(x) if norm_first else x
        out, weights = formula(layer.self_attn, z, z, hidden[:, None, None], given["mask"])
        x = x + out if norm_first else layer.norm1(x + out)
        x = x + layer._ff_block(layer.norm2(x)) if norm_first else layer.norm2(x + layer._ff_block(x))
        for item, real in enumerate(~hidden):
            n = int(real.sum())
            assert data["n_queries"].values[item] == n
            mine = data["weights"].values[item, i, :, :n, :n]
            np.testing.assert_allclose(mine, weights.detach()[item][:, real][:, :, real], atol=1e-6)


@torch.no_grad()
def test_nested_tensors_are_watched_and_nothing_else() -> None:
    model, nested = encoder(), torch.nested.as_nested_tensor([X[0], X[1, :4]])
    padded = model(X, src_key_padding_mask=PADDING["right"])
    with refused("inputs", match="nested"), qkv.edit(model, {(0, 1): "zero"}):
        model(nested)
    with refused("inputs", match="nested"):
        qkv.profile(model, {"src": nested}, progress=False)
    with qkv.watch(model) as watched:
        out = model(nested)
    torch.testing.assert_close(out.to_padded_tensor(0.0), padded)
    with qkv.watch(model) as other:
        assert torch.equal(model(X, src_key_padding_mask=PADDING["right"]), padded)
    for name in ("weights", "received", "n_keys"):
        np.testing.assert_allclose(watched.profile().data[name], other.profile().data[name], atol=1e-6)


@torch.no_grad()
def test_numbers_of_a_mask_count_as_masked_on_the_fast_path_as_torch_does() -> None:
    model, mask = encoder(), torch.zeros(N, N, dtype=torch.float64)
    mask[:, 2] = 0.5
    want = model(X, mask=mask)
    with qkv.watch(model) as watched:
        assert torch.equal(model(X, mask=mask), want)
    first = formula(model.layers[0].self_attn, X, X, mask != 0)[1]
    np.testing.assert_allclose(watched.profile().data["weights"].values[:, 0], first, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("needs", [False, True])
def test_attention_on_its_fast_path_is_watched(needs: bool) -> None:
    layer = filled(nn.MultiheadAttention(E, H, batch_first=True))
    given: Any = {"key_padding_mask": PADDING["right"], "need_weights": needs}
    want = layer(X, X, X, **given)
    with qkv.watch(layer) as watched:
        out = layer(X, X, X, **given)
    assert torch.equal(out[0], want[0])
    data = watched.profile().data.isel(text=1)
    weights = formula(layer, X, X, PADDING["right"][:, None, None])[1][1, :, :4, :4]
    np.testing.assert_allclose(data["weights"].values[0, :, :4, :4], weights, atol=1e-6)


@pytest.mark.parametrize("needs", [False, True])
def test_dropout_draws_the_same_numbers_when_watched_or_edited(needs: bool) -> None:
    layer = filled(nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)).train()

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return layer(X, X, X, need_weights=needs)[0], torch.rand(1)

    want = run()
    with qkv.watch(layer):
        watched = run()
    with qkv.edit(layer, {(0, 2): qkv.edits.Scale(1.0)}):
        edited = run()
    for got in (watched, edited):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("cross", "first", "bias", "appended", "mask", "padding", "needs"),
    covering(
        [False, True], [False, True], [False, True], [0, 1, 2], ["none", "bool", "float"], [False, True],
        [None, "mean", "heads"],
    ),
)  # fmt: skip
def test_edited_heads_and_their_gradients_are_those_of_the_formula(
    cross: bool, first: bool, bias: bool, appended: int, mask: str, padding: bool, needs: str | None
) -> None:
    layer = filled(
        nn.MultiheadAttention(E, H, bias=bias, add_bias_kv=appended > 0, add_zero_attn=appended > 1, batch_first=first)
    )
    y, n = (Y, M) if cross else (X, N)
    boolean, added = torch.ones(N, n, dtype=torch.bool).triu(1), rand(N, n, seed=3)
    hidden = torch.arange(n) >= torch.tensor([[n], [3]])
    given: Any = {"need_weights": needs is not None, "average_attn_weights": needs == "mean"}
    if mask != "none":
        given["attn_mask"] = boolean if mask == "bool" else added
    if padding:
        floats = torch.zeros(B, n).double().masked_fill(hidden, -torch.inf)
        given["key_padding_mask"] = floats if mask == "float" else hidden
    x, z = (one if first else one.transpose(0, 1) for one in (X, y))
    name = "MultiheadAttention"
    with qkv.edit(layer, {(name, 0): "zero", (name, 1): qkv.edits.Temperature(0.5)}):
        out, weights = layer(x, z, z, **given)
    want, of_heads = formula(
        layer, X, y, hidden[:, None, None] if padding else None, boolean if mask == "bool" else None,
        added=added if mask == "float" else None, edits=True,
    )  # fmt: skip
    torch.testing.assert_close(out if first else out.transpose(0, 1), want)
    if needs is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, of_heads.mean(1) if needs == "mean" else of_heads)
    for got, expected in zip(
        *(torch.autograd.grad(one.square().sum(), [*layer.parameters()]) for one in (out, want)), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("needs", [False, True])
def test_heads_that_are_not_edited_keep_their_bits(needs: bool) -> None:
    layer = filled(nn.MultiheadAttention(E, H)).float()
    x = X[0].float()
    want = layer(x, x, x, need_weights=needs)
    with qkv.edit(layer, {("MultiheadAttention", 0): qkv.edits.Scale(1.0)}):
        got = layer(x, x, x, need_weights=needs)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_layers_of_torch_are_edited_and_profiled_with_their_edits() -> None:
    model = filled(nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 32, batch_first=True), 2))
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    plain = model(X, Y, tgt_mask=causal, tgt_is_causal=True)
    edits: Any = {("decoder", 0, 1): qkv.edits.HideFirst(), ("cross", 1, 2): "zero"}
    with qkv.edit(model, edits):
        edited = model(X, Y, tgt_mask=causal, tgt_is_causal=True)
        data = qkv.profile(model, {"tgt": X, "memory": Y, "tgt_mask": causal}, progress=False).groups["decoder"]
    assert not torch.allclose(plain, edited, atol=1e-3)
    weights = formula(model.layers[0].self_attn, X, X, CAUSAL)[1]
    weights[:, 1, 1:, 0] = 0
    weights /= weights.sum(-1, keepdim=True)
    np.testing.assert_allclose(data["weights"].values[:, 0], weights, atol=1e-6)


@torch.no_grad()
def test_a_causal_hint_is_the_mask_where_torch_does_not_read_the_mask() -> None:
    layer = filled(nn.MultiheadAttention(E, H, add_zero_attn=True, batch_first=True))
    with qkv.watch(layer) as watched:
        layer(X, X, X, attn_mask=torch.zeros(N, N, dtype=torch.bool), is_causal=True, need_weights=False)
    [data] = watched.profile().groups.values()
    weights = formula(layer, X, X, F.pad(CAUSAL, (0, 1), value=True))[1]
    np.testing.assert_allclose(data["weights"].values[:, 0], weights, atol=1e-6)

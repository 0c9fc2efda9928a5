"""Lessons of five courses, retold: each runs with its import changed, and gives what the lesson's formula gives.

The code before the first assert of each test is what a student of the course types; only its import names qkv.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import close, rand, refused, unchecked
from qkv import course, masks, measure


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √d) v and the weights, in float64; zeros where a query sees nothing."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    weights = s.softmax(-1).nan_to_num(nan=0.0)
    return weights @ v.double(), weights


def heads_formula(
    mha: course.MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Concat(head_1, …, head_h) W_O with the parameters of a layer."""
    layer = mha.layer.double()
    split = [
        (x.double() @ w.T + b).unflatten(-1, (layer.heads, layer.head_dim)).transpose(1, 2)
        for x, w, b in zip((query, key, value), layer.in_proj.weight.chunk(3), layer.in_proj.bias.chunk(3), strict=True)
    ]
    out, weights = formula(*split, visible)
    return out.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T + layer.out_proj.bias, weights


def close32(got: Tensor, want: Tensor) -> None:
    """Equal within roundings of float32, in which lessons compute."""
    close(got, want, eps=256, dtype=torch.float32)


# --- first course: chapters from the basics to sinks ------------------------------------------------------------------


def test_first_lab_attention_of_a_batch_without_heads() -> None:
    from qkv.course import scaled_dot_product_attention

    torch.manual_seed(0)
    batch, tokens, d = 2, 4, 8
    queries, keys, values = torch.randn(3, batch, tokens, d)
    context, weights = scaled_dot_product_attention(queries, keys, values)
    row_sums = weights.sum(dim=-1)

    assert context.shape == (batch, tokens, d)
    assert weights.shape == (batch, tokens, tokens)
    close32(row_sums, torch.ones(batch, tokens))
    want, want_weights = formula(queries, keys, values)
    close32(context, want)
    close32(weights, want_weights)


def test_first_lab_worked_example_of_three_tokens() -> None:
    from qkv.course import scaled_dot_product_attention

    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    keys = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    out, weights = scaled_dot_product_attention(queries, keys, values)

    e, ee = math.exp(2**-0.5), math.exp(2**0.5)
    want = torch.tensor([[e, e, 1], [e, 1, e], [ee, e, e]], dtype=torch.float64)
    want = want / want.sum(1, keepdim=True)
    close32(weights, want)
    close32(out, want @ values.double())
    assert [round(x, 2) for x in out[0].tolist()] == [0.6, 0.6]  # as the chapter computes by hand


def test_exercise_entropy_of_the_weights() -> None:
    from qkv.course import scaled_dot_product_attention

    torch.manual_seed(0)
    x = torch.randn(1, 6, 8)
    _, sharp = scaled_dot_product_attention(4 * x, x, x)
    _, soft = scaled_dot_product_attention(x, x, x)
    entropies = [-(w * torch.log(w + 1e-9)).sum(-1) for w in (sharp, soft)]

    for got, scale in zip(entropies, (4, 1), strict=True):
        torch.testing.assert_close(got, measure(scale * x, x).entropy, rtol=0, atol=1e-5)
    assert entropies[0].mean() < entropies[1].mean() < math.log(6)


def test_second_lab_a_mask_of_zeros_and_ones_as_the_second_argument() -> None:
    from qkv.course import MultiHeadAttention

    def lower_triangle(n: int) -> Tensor:
        return torch.tril(torch.ones(n, n))[None, None]

    torch.manual_seed(0)
    mha, x = MultiHeadAttention(64, 4), torch.randn(2, 8, 64)
    out, weights = mha(x, lower_triangle(8))

    assert weights.shape == (2, 4, 8, 8)
    want, want_weights = heads_formula(mha, x, x, x, torch.ones(8, 8).tril() > 0)
    close32(out, want)
    close32(weights, want_weights)


def test_fourth_lab_the_sink_score_of_weights() -> None:
    from qkv.course import create_causal_mask, scaled_dot_product_attention

    def share_of_sinks(attention: Tensor, threshold: float) -> float:
        return (attention[:, 1:, 0] > threshold).float().mean().item()

    torch.manual_seed(0)
    queries, keys = torch.randn(2, 1, 32, 64)
    keys[0, 0] = queries.mean((0, 1)) * 60
    _, weights = scaled_dot_product_attention(queries, keys, keys, create_causal_mask(32))
    found = share_of_sinks(weights, 0.2)

    _, want = formula(queries, keys, keys, torch.ones(32, 32).tril() > 0)
    assert found == pytest.approx((want[0, 1:, 0] > 0.2).double().mean().item())
    assert 0.5 < found < 1


def test_fifth_lab_a_transformer_of_blocks() -> None:
    from qkv.course import TransformerBlock

    class Small(nn.Module):
        def __init__(self, tokens: int, d_model: int = 32, n_heads: int = 4, n_layers: int = 3) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(tokens, d_model), nn.Embedding(64, d_model)
            self.blocks = nn.ModuleList([TransformerBlock(d_model, n_heads, 48, 0.1) for _ in range(n_layers)])
            self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, tokens, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
            n, maps = ids.shape[1], []
            x = self.embedding(ids) + self.places(torch.arange(n))
            mask = torch.tril(torch.ones(n, n)).unsqueeze(0).unsqueeze(0)
            for block in self.blocks:
                x, attention = block(x, mask)
                maps.append(attention)
            return self.head(self.norm(x)), maps

    torch.manual_seed(0)
    model, ids = Small(50), torch.randint(0, 50, (2, 16))
    logits, maps = model(ids)

    assert logits.shape == (2, 16, 50)
    assert [x.shape for x in maps] == [(2, 4, 16, 16)] * 3
    assert not any(x.triu(1).any() for x in maps)
    of_block = (
        4 * 32 * 33 + 2 * 32 * 48 + 48 + 32 + 4 * 32
    )  # four projections, two of the feed-forward layer, two norms
    assert sum(x.numel() for x in model.parameters()) == 50 * 32 + 64 * 32 + 3 * of_block + 2 * 32
    model.eval()
    longer = torch.cat([ids, ids[:, :3]], 1)
    close32(model(longer)[0][:, :16], model(ids)[0])  # the future cannot change the past
    assert not torch.equal(model.train()(ids)[0], model(ids)[0])  # dropout


# --- second course: a notebook ----------------------------------------------------------------------------------------


def test_notebook_an_output_without_weights() -> None:
    from qkv.course import MultiHeadAttention

    torch.manual_seed(0)
    mha = MultiHeadAttention(d_model=128, n_heads=8, dropout=0.0)
    x = torch.randn(2, 10, 128)
    out, _ = mha(x, return_attention=False)

    assert mha.head_dim == 16
    assert _ is None
    close32(out, heads_formula(mha, x, x, x)[0])


def test_notebook_weights_of_every_head_under_a_causal_mask() -> None:
    from qkv.course import MultiHeadAttention, create_causal_mask

    torch.manual_seed(0)
    mha, x = MultiHeadAttention(d_model=128, n_heads=8, dropout=0.0), torch.randn(2, 10, 128)
    mask = create_causal_mask(10)
    out, weights = mha(x, mask=mask, return_attention=True)
    first_head = weights[0, 0].detach().cpu().numpy()

    assert weights.shape == (2, 8, 10, 10)
    assert not np.triu(first_head, 1).any()
    want, want_weights = heads_formula(mha, x, x, x, torch.ones(10, 10).tril() > 0)
    close32(out, want)
    close32(weights, want_weights)


def test_notebook_a_query_without_keys_is_zero_and_not_nan() -> None:
    from qkv.course import scaled_dot_product_attention

    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    mask = torch.ones(2, 4, 4)
    mask[1, 2] = 0
    out, weights = scaled_dot_product_attention(x, x, x, mask)

    want, want_weights = formula(x, x, x, mask > 0)
    close32(out, want)
    close32(weights, want_weights)
    assert not out[1, 2].any()
    assert not weights[1, 2].any()


# --- third course: build-along ----------------------------------------------------------------------------------------


def test_build_along_self_attention_by_capital_names() -> None:
    from qkv.course import MultiHeadAttention

    torch.manual_seed(0)
    multihead, x = MultiHeadAttention(d_model=32, num_heads=4), torch.randn(2, 5, 32)
    out, weights = multihead(Q=x, K=x, V=x)

    want, want_weights = heads_formula(multihead, x, x, x)
    close32(out, want)
    close32(weights, want_weights)


def test_build_along_cross_attention_from_ten_tokens_to_fifty() -> None:
    from qkv.course import MultiHeadAttention

    torch.manual_seed(0)
    multihead = MultiHeadAttention(d_model=32, num_heads=4)
    decoder, encoder = torch.randn(2, 10, 32), torch.randn(2, 50, 32)
    out, weights = multihead(Q=decoder, K=encoder, V=encoder)

    assert out.shape == (2, 10, 32)
    assert weights.shape == (2, 4, 10, 50)
    close32(out, heads_formula(multihead, decoder, encoder, encoder)[0])


def test_build_along_einsum() -> None:
    from qkv.course import EinsumAttention, create_causal_mask

    torch.manual_seed(0)
    attention, x = EinsumAttention(32, 4), torch.randn(2, 5, 32)
    out, weights = attention(x, create_causal_mask(5))

    q, k, v = (
        torch.einsum("bsm,hmd->bhsd", x.double(), w.double()) + b.double()[:, None]
        for w, b in ((attention.w_q, attention.b_q), (attention.w_k, attention.b_k), (attention.w_v, attention.b_v))
    )
    inner, want_weights = formula(q, k, v, torch.ones(5, 5).tril() > 0)
    close32(weights, want_weights)
    close32(out, torch.einsum("bhsd,hdm->bsm", inner, attention.w_o.double()) + attention.b_o.double())


# --- fourth course: reference pages -----------------------------------------------------------------------------------


def test_reference_page_torchs_own_function() -> None:
    from qkv import attend as scaled_dot_product_attention

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 16)
    output = scaled_dot_product_attention(
        query, key, value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=True,
    )  # fmt: skip

    close32(output, formula(query, key, value, torch.ones(9, 9).tril() > 0)[0])


def test_reference_page_worked_example_with_a_dimension_of_heads() -> None:
    from qkv.course import scaled_dot_product_attention

    q = torch.tensor([[[1.0, 0.5], [0.3, 1.2], [0.8, 0.6]]]).unsqueeze(1)
    k = torch.tensor([[[1.0, 0.5], [0.4, 1.0], [0.9, 0.3]]]).unsqueeze(1)
    v = torch.tensor([[[0.1, 0.2], [0.5, 0.8], [0.3, 0.1]]]).unsqueeze(1)
    output, weights = scaled_dot_product_attention(q, k, v)

    scores = np.array([[1.25, 0.9, 1.05], [0.9, 1.32, 0.63], [1.1, 0.92, 0.9]]) / math.sqrt(2)
    want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    close32(weights.squeeze(), torch.from_numpy(want))
    close32(output.squeeze(), torch.from_numpy(want) @ v.squeeze().double())


def test_reference_page_dropout_of_the_weights_in_training_only() -> None:
    from qkv.course import MultiHeadAttention, create_causal_mask

    torch.manual_seed(0)
    mha = MultiHeadAttention(d_model=64, num_heads=8, dropout=0.1)
    x = torch.randn(8, 10, 64)
    _, in_training = mha(query=x, key=x, value=x)
    mha.eval()
    out, weights = mha(query=x, key=x, value=x, mask=create_causal_mask(10)[None, None])

    dropped = (in_training == 0).float().mean().item()
    assert abs(dropped - 0.1) < 5 * (0.1 * 0.9 / in_training.numel()) ** 0.5
    assert weights[0, 0].triu(diagonal=1).abs().max() == 0
    close32(out, heads_formula(mha, x, x, x, torch.ones(10, 10).tril() > 0)[0])


def test_reference_page_a_mask_in_which_true_hides_is_refused_with_the_way_out() -> None:
    """The one snippet that needs more than its import: its own mask means the opposite."""
    mha, x = course.MultiHeadAttention(d_model=64, num_heads=8), torch.randn(2, 10, 64)
    hidden = torch.triu(torch.ones(10, 10, dtype=torch.bool), diagonal=1)
    for theirs in (hidden, hidden[None, None], hidden.float(), hidden.int()):
        with refused("mask", match="~mask"):
            mha(query=x, key=x, value=x, mask=theirs)
    close32(mha(x, x, x, mask=~hidden)[0], heads_formula(mha, x, x, x, ~hidden)[0])


# --- fifth course: an essay with code ---------------------------------------------------------------------------------


def test_essay_self_attention_in_numpy() -> None:
    from qkv.course import scaled_dot_product_attention

    words = ["The", "cat", "sat"]
    embeddings = np.random.default_rng(0).standard_normal((len(words), 16))
    contextualized, weights = scaled_dot_product_attention(embeddings, embeddings, embeddings)
    rows = [f"{word:<6} | {' '.join(f'{w:.3f}' for w in weights[i])}" for i, word in enumerate(words)]

    assert isinstance(contextualized, np.ndarray)
    scores = embeddings @ embeddings.T / 4
    want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, want, atol=1e-12)
    np.testing.assert_allclose(contextualized, want @ embeddings, atol=1e-12)
    assert rows[0].startswith("The    | 0.")


def test_essay_three_positional_arguments_with_and_without_a_mask() -> None:
    from qkv.course import MultiHeadAttention

    torch.manual_seed(0)
    mha, x = MultiHeadAttention(64, 8), torch.randn(2, 6, 64)
    out, weights = mha(x, x, x)
    causal_mask = torch.tril(torch.ones(6, 6))
    masked, masked_weights = mha(x, x, x, mask=causal_mask.unsqueeze(0).unsqueeze(0))

    for got, visible in (((out, weights), None), ((masked, masked_weights), causal_mask > 0)):
        for a, b in zip(got, heads_formula(mha, x, x, x, visible), strict=True):
            close32(a, b)


def test_essay_a_recurrent_decoder_that_attends_to_the_encoder() -> None:
    from qkv.course import MultiHeadAttention

    class Translator(nn.Module):
        def __init__(self, source: int, target: int, size: int = 16) -> None:
            super().__init__()
            self.read, self.write = nn.Embedding(source, size), nn.Embedding(target, size)
            self.encoder = nn.LSTM(size, size, batch_first=True)
            self.decoder = nn.LSTM(2 * size, size, batch_first=True)
            self.attention = MultiHeadAttention(size, num_heads=4)
            self.output = nn.Linear(size, target)

        def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            states, state = self.encoder(self.read(source))
            logits, rows = [], []
            for token in target.split(1, dim=1):
                query = state[0].transpose(0, 1)
                context, weights = self.attention(query, states, states)
                h, state = self.decoder(torch.cat([self.write(token), context], dim=-1), state)
                logits.append(self.output(h))
                rows.append(weights)
            return torch.cat(logits, 1), torch.cat(rows, 2)

    torch.manual_seed(0)
    model = Translator(100, 120)
    source, target = torch.randint(0, 100, (2, 4)), torch.randint(0, 120, (2, 3))
    logits, alignment = model(source, target)

    assert logits.shape == (2, 3, 120)
    assert alignment.shape == (2, 4, 3, 4)
    states, (h, _) = model.encoder(model.read(source))
    close32(alignment[:, :, :1], heads_formula(model.attention, h.transpose(0, 1), states, states)[1])
    model.float()
    logits.square().mean().backward()
    assert all(x.grad is not None for x in model.parameters())


# --- errors -----------------------------------------------------------------------------------------------------------


def test_wrong_calls_are_refused_in_one_sentence() -> None:
    mha, x = course.MultiHeadAttention(24, 4), rand(2, 5, 24, dtype=torch.float32)
    with refused("mask", match="other numbers"):
        course.scaled_dot_product_attention(x, x, x, torch.full((5, 5), -1e9).triu(1))
    with unchecked(), refused("mask", match="list"):
        course.scaled_dot_product_attention(x, x, x, [[True]])  # type: ignore[arg-type]
    with refused("causal", match="mask="):
        mha(x, causal=x)
    with refused("x"):
        mha()
    with refused("Q", match="both passed"):
        mha(x, Q=x)
    with refused("key", match="mask="):
        mha(x, masks.Causal(), x)
    out, weights = mha(x, masks.Causal())
    close32(out, mha(x, mask=course.create_causal_mask(5))[0])
    assert not weights.triu(1).any()

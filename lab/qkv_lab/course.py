"""The classes and functions that five courses define: names, calls, attributes and return values of their lessons.

A lesson that defines one of these names runs with an import from here instead, and a state dict of its model loads.
They compute with `qkv.attend` and return the weights of every call, so memory is quadratic in the length.

**A mask is True, or 1, where a query may attend**, as everywhere in qkv. In some courses True hides a key; their causal
mask is refused, and ``blocked=mask`` takes it. `create_causal_mask` of this module fits all calls.

Where courses differ, arguments decide: projections have biases unless ``bias=False``, dropout is 0 unless it is passed,
`MultiHeadAttention.scale` is √d_k, and a query that may attend to no key gets zeros, not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import qkv
from qkv.attention import attend
from qkv.compat import renamed
from qkv.engine import as_mask
from qkv.errors import InputError, at_least_one
from qkv.masks import Mask
from qkv.models.config import check_ids
from qkv.models.tokenizers import ByteTokenizer as Tokenizer
from qkv.normalizers import Sigmoid
from qkv.scores import Additive, Dot
from qkv_lab.course_masks import GivenMask, create_causal_mask, visible
from qkv_lab.course_pictures import plot_attention, visualize_attention

__all__ = [
    "BahdanauAttention",
    "EinsumAttention",
    "MinimalTransformer",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "Seq2SeqWithAttention",
    "TinyTransformer",
    "Tokenizer",
    "TransformerBlock",
    "analyze_attention_heads",
    "causal_attention",
    "compute_sink_metric",
    "create_causal_mask",
    "experiment_sigmoid_attention",
    "generate_reversal_data",
    "measure_first_token_attention",
    "plot_attention",
    "scaled_dot_product_attention",
    "simple_attention",
    "test_attention",
    "test_mha",
    "test_transformer",
    "visualize_attention",
]
__dir__ = __all__.copy

A = TypeVar("A", Tensor, np.ndarray)
INPUTS = {"x": "query", "Q": "query", "K": "key", "V": "value"}


# --- functions --------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: A | None = None, key: A | None = None, value: A | None = None, mask: GivenMask = None,
    dropout_p: float = 0.0, *, blocked: Tensor | np.ndarray | None = None, **other_names: Any,
) -> tuple[A, A]:  # fmt: skip
    """softmax(Q Kᵀ / √d) V and the weights (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    Args:
        query: (b, h, nq, d), (b, nq, d) or (nq, d); a tensor or a NumPy array, like the other two. Also called `Q`.
        key: (b, h, nk, d), (b, nk, d) or (nk, d). Also called `K`.
        value: (b, h, nk, dv), (b, nk, dv) or (nk, dv). Also called `V`.
        mask: True or 1 where a query may attend; broadcasts to the weights. A fully masked query gives zeros.
        dropout_p: probability with which each weight is dropped.
        blocked: a mask in the other convention, True or 1 where a query may *not* attend.
        **other_names: `Q`, `K` and `V`.

    Returns:
        ``(output, weights)``: (…, nq, dv) and (…, nq, nk).

    Raises:
        InputError: for shapes that do not fit, and for a mask in which True hides.

    >>> x = torch.randn(2, 5, 8)
    >>> output, weights = scaled_dot_product_attention(x, x, x, mask=create_causal_mask(5))
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]))
    """
    given = {"query": query, "key": key, "value": value}
    query, key, value = renamed("scaled_dot_product_attention", other_names, INPUTS, given)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None:
            raise InputError(f"{name} is None, expected a tensor or an array (…, length, d)")
    seen = visible(mask, blocked, of_items=query.ndim == 3)
    return attend(query, key, value, mask=seen, dropout_p=dropout_p, return_weights=True)


def simple_attention(Q: A, K: A, V: A) -> tuple[A, A]:
    """`scaled_dot_product_attention` without a mask."""
    return scaled_dot_product_attention(Q, K, V)


def causal_attention(Q: A, K: A, V: A) -> tuple[A, A]:
    """`scaled_dot_product_attention` with the causal mask."""
    return scaled_dot_product_attention(Q, K, V, qkv.masks.Causal())


class ScaledDotProductAttention:
    """softmax(Q Kᵀ / √d_k) V of NumPy arrays (length, d), as an object.

    >>> x = np.eye(3)
    >>> output, weights = ScaledDotProductAttention(3).forward(x, x, x, mask=np.tril(np.ones((3, 3))))
    >>> weights[0].tolist()
    [1.0, 0.0, 0.0]
    """

    def __init__(self, d_k: int) -> None:
        self.d_k, self.scale = d_k, math.sqrt(d_k)

    def forward(
        self, Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: GivenMask = None, *, blocked: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Output (nq, dv) and weights (nq, nk). Whole numbers, as of an example by hand, become floats."""
        Q, K, V = (x.astype(float) if np.asarray(x).dtype.kind in "iu" else x for x in (Q, K, V))
        return attend(Q, K, V, mask=visible(mask, blocked), score=Dot(1 / self.scale), return_weights=True)

    def _softmax(self, x: np.ndarray, axis: int = -1) -> np.ndarray:
        return torch.from_numpy(x * 1.0).softmax(axis).numpy()


class BahdanauAttention:
    """Additive attention v · tanh(W h + U s) with untrained NumPy parameters (Bahdanau et al. 2015, arXiv:1409.0473).

    >>> states = [np.full((8, 1), 1.0 * i) for i in range(4)]
    >>> context, weights = BahdanauAttention(8).compute_attention(np.ones((8, 1)), states)
    >>> context.shape, weights.shape
    ((8, 1), (4,))
    """

    def __init__(self, hidden_dim: int) -> None:
        self.hidden_dim = hidden_dim
        self.Wa, self.Ua = (np.random.randn(hidden_dim, hidden_dim) * 0.01 for _ in range(2))
        self.va = np.random.randn(hidden_dim, 1) * 0.01

    def compute_attention(
        self, decoder_state: np.ndarray, encoder_states: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The context (hidden_dim, 1) and the weights (states) of one decoder state and a list of encoder states."""
        states = np.concatenate(encoder_states, 1).T * 1.0  # whole numbers become floats
        va, ua, wa = map(torch.from_numpy, (self.va[:, 0], self.Ua, self.Wa))
        score = Additive(va, w_q=ua, w_k=wa)
        context, weights = attend(decoder_state.T * 1.0, states, states, score=score, return_weights=True)
        return context.T, weights[0]


# --- modules ----------------------------------------------------------------------------------------------------------


class MultiHeadAttention(nn.Module):
    """Multi-head attention that returns ``(output, weights)``, called as lessons call it.

    Args:
        d_model: input and output dimension.
        num_heads: number of heads; `n_heads` is accepted, too.
        dropout: dropout of the weights, in training.
        output_dropout: dropout of the output, in training.
        bias: whether projections have biases. A state dict that is loaded decides anew.
        **other_names: `n_heads`.

    >>> mha, x = MultiHeadAttention(d_model=64, num_heads=8), torch.randn(2, 5, 64)
    >>> output, weights = mha(query=x, key=x, value=x)
    >>> output.shape, weights.shape, sum(p.numel() for p in mha.parameters())
    (torch.Size([2, 5, 64]), torch.Size([2, 8, 5, 5]), 16640)
    """

    def __init__(
        self, d_model: int | None = None, num_heads: int | None = None, dropout: float = 0.0, *,
        output_dropout: float = 0.0, bias: bool = True, **other_names: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"d_model": d_model, "num_heads": num_heads}
        d_model, heads = renamed("MultiHeadAttention", other_names, {"n_heads": "num_heads"}, sizes)
        self.d_model, self.num_heads, self.d_k = d_model, heads, _head_size(d_model, heads)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        self.dropout, self.out_dropout = nn.Dropout(dropout), nn.Dropout(output_dropout)
        self.scale = math.sqrt(self.d_k)
        self.register_load_state_dict_pre_hook(_biases_as_in)  # type: ignore[no-untyped-call]

    n_heads = property(lambda self: self.num_heads)
    head_dim = d_v = property(lambda self: self.d_k)
    attn_dropout = property(lambda self: self.dropout)
    out_proj = property(lambda self: self.W_o)

    def split_heads(self, x: Float[Tensor, "b n d_model"], batch_size: int | None = None) -> Float[Tensor, "b h n d"]:
        """The heads of projected tokens; `batch_size` is that of `x`."""
        return x.unflatten(-1, (self.num_heads, self.d_k)).transpose(1, 2)

    def combine_heads(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n d_model"]:
        """The heads of a token side by side."""
        return x.transpose(1, 2).flatten(2)

    merge_heads = combine_heads

    def forward(
        self,
        query: Float[Tensor, "b nq d_model"] | None = None,
        key: Tensor | Mask | None = None,
        value: Float[Tensor, "b nk d_model"] | None = None,
        mask: GivenMask = None,
        *,
        return_attention: bool = True,
        blocked: Tensor | np.ndarray | None = None,
        **other_names: Any,
    ) -> tuple[Tensor, Any]:
        """``(output, weights)``: (b, nq, d_model), and (b, h, nq, nk) or None without `return_attention`.

        Keys are the queries if they are None, and values the keys. `x`, `Q`, `K` and `V` are accepted, too. A second
        argument of two or four dimensions is the mask, for lessons that call ``mha(x, mask)``. Masks are those of
        `scaled_dot_product_attention`.

        Raises:
            InputError: for shapes that do not fit, for unknown names, and for a mask in which True hides.
        """
        given = {"query": query, "key": key, "value": value}
        query, key, value = renamed("MultiHeadAttention", other_names, INPUTS, given)
        if mask is None and value is None and not (isinstance(key, Tensor) and key.ndim == 3):
            key, mask = None, key
        if isinstance(key, Tensor) and value is None and key.shape[1:] == (query.shape[-2],) * 2 and key.equal(key**2):
            raise InputError("key has only zeros and ones, as a mask has; expected it as mask=, or value=, too")
        keys: Any = query if key is None else key
        value = keys if value is None else value
        for name, x in (("query", query), ("key", keys), ("value", value)):
            _check_tokens(name, x, self.d_model)
        q, k, v = self.split_heads(self.W_q(query)), self.split_heads(self.W_k(keys)), self.split_heads(self.W_v(value))
        found: Any = attend(
            q, k, v, mask=visible(mask, blocked), score=Dot(1 / self.scale), return_weights=return_attention,
            dropout_p=self.dropout.p if self.training else 0.0,
        )  # fmt: skip
        out, weights = found if return_attention else (found, None)
        return self.out_dropout(self.W_o(self.combine_heads(out))), weights


class EinsumAttention(nn.Module):
    """Multi-head self-attention with every step written as an einsum over named dimensions, without biases.

    Dimensions: b batch, s queries, t keys, h heads, m model, d head.

    >>> layer, x = EinsumAttention(64, 8), torch.randn(2, 10, 64)
    >>> output, weights = layer(x, create_causal_mask(10))
    >>> output.shape, weights.shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 10, 64]), torch.Size([2, 8, 10, 10]), 16384)
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.d_k = num_heads, _head_size(d_model, num_heads)
        shape = (d_model, num_heads, self.d_k)
        self.W_q, self.W_k, self.W_v = (nn.Parameter(torch.randn(shape) * 0.02) for _ in range(3))
        self.W_o = nn.Parameter(torch.randn(num_heads, self.d_k, d_model) * 0.02)

    def forward(
        self, x: Float[Tensor, "b s m"], mask: GivenMask = None, *, blocked: Tensor | None = None
    ) -> tuple[Float[Tensor, "b s m"], Float[Tensor, "b h s t"]]:
        """Output and weights; mask True where a query may attend."""
        _check_tokens("x", x, len(self.W_q))
        q, k, v = (torch.einsum("bsm,mhd->bshd", x, w) for w in (self.W_q, self.W_k, self.W_v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(self.d_k)
        given, seen = as_mask(visible(mask, blocked)), None
        if given is not None:
            seen = given.dense(x.shape[1], x.shape[1], batch=len(x), heads=self.num_heads).to(x.device)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)  # −∞ gives NaN without visible keys
        weights = scores.softmax(-1)
        if seen is not None:
            weights = weights.masked_fill(~seen, 0)
        return torch.einsum("bhst,bthd,hdm->bsm", weights, v, self.W_o), weights


class TransformerBlock(nn.Module):
    """A pre-norm layer with GELU that returns ``(x, weights)``.

    Args:
        d_model: input and output dimension.
        num_heads: number of heads; `n_heads` is accepted, too.
        d_ff: hidden dimension of the feed-forward layer; 4 · d_model if None.
        dropout: dropout before each residual addition, in training.
        attention: the attention layer, such as an `EinsumAttention`; a `MultiHeadAttention` without biases if None.
        **other_names: `n_heads`.

    >>> block, x = TransformerBlock(64, 8, d_ff=256), torch.randn(2, 5, 64)
    >>> x, weights = block(x, create_causal_mask(5))
    >>> x.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    def __init__(
        self, d_model: int, num_heads: int | None = None, d_ff: int | None = None, dropout: float = 0.0, *,
        attention: nn.Module | None = None, **other_names: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if attention is not None and (num_heads is not None or other_names):
            raise InputError("attention and num_heads are both passed, expected one: a layer has its number of heads")
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = attention or MultiHeadAttention(d_model, num_heads, bias=False, **other_names)
        self.dropout1, self.norm2 = nn.Dropout(dropout), nn.LayerNorm(d_model)
        up, down = nn.Linear(d_model, d_ff or 4 * d_model), nn.Linear(d_ff or 4 * d_model, d_model)
        self.ff = nn.Sequential(up, nn.GELU(), down, nn.Dropout(dropout))
        self.register_load_state_dict_pre_hook(_parts_as_in)  # type: ignore[no-untyped-call]

    attention = property(lambda self: self.attn)
    ffn = property(lambda self: self.ff)

    def forward(
        self, x: Float[Tensor, "b n d_model"], mask: GivenMask = None, *, blocked: Tensor | None = None
    ) -> tuple[Float[Tensor, "b n d_model"], Float[Tensor, "b h n n"]]:
        """One layer: its output and the weights. `mask` is True or 1 where a token may attend, `blocked` where not."""
        attended, weights = self.attn(self.norm1(x), mask=mask, blocked=blocked)
        x = x + self.dropout1(attended)
        return x + self.ff(self.norm2(x)), weights


class MinimalTransformer(nn.Module):
    """A causal language model of `TransformerBlock` with learned positions and tied embeddings."""

    def __init__(
        self, vocab_size: int, d_model: int = 256, n_heads: int = 4, n_layers: int = 4, d_ff: int = 1024,
        max_seq_len: int = 512, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_model = d_model
        self.tok_emb, self.pos_emb = nn.Embedding(vocab_size, d_model), nn.Embedding(max_seq_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(d_model, n_heads, d_ff, dropout) for _ in range(n_layers))
        self.norm_f, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.tok_emb.weight

    def forward(self, x: Int[Tensor, "b n"], return_attentions: bool = False) -> Any:
        """Logits (b, n, vocab_size); with `return_attentions` also a list of the weights (b, h, n, n) of each layer."""
        hidden = self.dropout(_embedded(x, self.tok_emb, self.pos_emb))
        attentions = []
        for block in self.blocks:
            hidden, weights = block(hidden, qkv.masks.Causal())
            attentions.append(weights)
        logits = self.head(self.norm_f(hidden))
        return (logits, attentions) if return_attentions else logits


class TinyTransformer(nn.Module):
    """A stack of `TransformerBlock` with `EinsumAttention`, for tasks on sequences; its mask is an argument."""

    def __init__(
        self, vocab_size: int, d_model: int = 64, num_heads: int = 4, num_layers: int = 2, max_seq_len: int = 128
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.token_emb, self.pos_emb = nn.Embedding(vocab_size, d_model), nn.Embedding(max_seq_len, d_model)
        layers = (EinsumAttention(d_model, num_heads) for _ in range(num_layers))
        self.layers = nn.ModuleList(TransformerBlock(d_model, attention=layer) for layer in layers)
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size)

    def forward(
        self, x: Int[Tensor, "b n"], mask: GivenMask = None, *, blocked: Tensor | None = None
    ) -> tuple[Float[Tensor, "b n vocab_size"], list[Float[Tensor, "b h n n"]]]:
        """Logits, and the weights of each layer."""
        hidden, all_weights = _embedded(x, self.token_emb, self.pos_emb), []
        for layer in self.layers:
            hidden, weights = layer(hidden, mask, blocked=blocked)
            all_weights.append(weights)
        return self.head(self.norm(hidden)), all_weights


class Seq2SeqWithAttention(nn.Module):
    """An LSTM encoder, and an LSTM decoder that attends to its states with four heads."""

    def __init__(
        self, input_vocab_size: int, output_vocab_size: int, embedding_dim: int = 64, hidden_dim: int = 128
    ) -> None:
        super().__init__()
        self.encoder_embedding = nn.Embedding(input_vocab_size, embedding_dim)
        self.encoder_lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True)
        self.decoder_embedding = nn.Embedding(output_vocab_size, embedding_dim)
        self.decoder_lstm = nn.LSTM(embedding_dim + hidden_dim, hidden_dim, batch_first=True)
        self.attention = MultiHeadAttention(hidden_dim, num_heads=4, dropout=0.1)
        self.output_proj = nn.Linear(hidden_dim, output_vocab_size)

    def encode(self, src: Int[Tensor, "b n"]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """All states of the encoder (b, n, hidden_dim), and its last state (h, c)."""
        return self.encoder_lstm(self.encoder_embedding(src))

    def decode_step(
        self, tgt_token: Int[Tensor, "b 1"], decoder_state: tuple[Tensor, Tensor], encoder_outputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Logits (b, 1, vocabulary), the new state, and the weights (b, 4, 1, n)."""
        context, weights = self.attention(decoder_state[0].transpose(0, 1), encoder_outputs, encoder_outputs)
        step = torch.cat([self.decoder_embedding(tgt_token), context], dim=-1)
        output, state = self.decoder_lstm(step, decoder_state)
        return self.output_proj(output), state, weights

    def forward(self, src: Int[Tensor, "b n"], tgt: Int[Tensor, "b m"]) -> Float[Tensor, "b m vocabulary"]:
        """Logits of every step with the true tokens as inputs (teacher forcing)."""
        memory, state = self.encode(src)
        logits = []
        for token in tgt.split(1, dim=1):
            one, state, _ = self.decode_step(token, state, memory)
            logits.append(one)
        return torch.cat(logits, 1)


# --- measures ---------------------------------------------------------------------------------------------------------


def measure_first_token_attention(attentions: Sequence[Tensor], tokens: Sequence[str]) -> None:
    """Print the mean and the largest weight on the first token, of the queries after it, for each layer."""
    for i, layer in enumerate(attentions):
        first = layer[0, :, 1:, 0]
        print(f"Layer {i:2d}: mean={first.mean():.4f}, max={first.max():.4f}")


def compute_sink_metric(attention_weights: Float[Tensor, "h n n"], threshold: float = 0.3) -> float:
    """The share of queries after the first, and of heads, with more than `threshold` on the first token.

    >>> compute_sink_metric(torch.tensor([[[1.0, 0.0], [0.4, 0.6]], [[1.0, 0.0], [0.1, 0.9]]]))
    0.5
    """
    weights = torch.as_tensor(attention_weights)
    if weights.ndim != 3 or weights.shape[1] < 2:
        shape = tuple(weights.shape)
        raise InputError(f"attention_weights is {shape}, expected (heads, queries, keys), 2 queries or more")
    return (weights[:, 1:, 0] > threshold).float().mean().item()


def experiment_sigmoid_attention() -> None:
    """Print the weights on the first of 32 tokens, whose key is twice the mean query: softmax against sigmoid."""
    q, k = torch.randn(1, 32, 64), torch.randn(1, 32, 64)
    k[0, 0] = 2 * q.mean((0, 1))
    for name, normalizer in (("softmax", None), ("sigmoid", Sigmoid(bias=0.0))):
        _, weights = attend(q, k, k, mask=qkv.masks.Causal(), normalizer=normalizer, return_weights=True)
        print(f"{name}: weights [1:5, 0] {[round(w, 4) for w in weights[0, 1:5, 0].tolist()]}, "
              f"sink score {compute_sink_metric(weights, threshold=0.2):.3f}")  # fmt: skip


def generate_reversal_data(num_samples: int, seq_len: int, vocab_size: int) -> Int[Tensor, "samples n"]:
    """Random tokens from 2 to vocab_size − 1, the separator 1, and the same tokens backwards.

    >>> generate_reversal_data(3, 4, 16)[:, 4].tolist()
    [1, 1, 1]
    """
    tokens = torch.randint(2, vocab_size, (num_samples, seq_len))
    return torch.cat([tokens, torch.ones(num_samples, 1, dtype=torch.long), tokens.flip(1)], 1)


def analyze_attention_heads(model: nn.Module, test_data: Tensor, seq_len: int, device: str = "cpu") -> None:
    """Print for each head how often the key that is to be copied next gets the largest weight, in percent.

    The lesson looks one position too late: at position seq_len + j the model predicts the token of seq_len − 1 − j.
    """
    model.eval()
    with torch.no_grad():
        x = test_data[:100, :-1].to(device)
        layers: list[Tensor] = model(x, mask=create_causal_mask(x.shape[1], device))[1]
    expected = torch.arange(seq_len - 1, -1, -1, device=device)
    for i, weights in enumerate(layers):
        right = (weights[:, :, seq_len:].argmax(-1) == expected).float().mean((0, 2))
        for h, share in enumerate(right.tolist()):
            print(f"  Layer {i + 1}, Head {h + 1}: {100 * share:5.1f}%  {'#' * int(50 * share)}")


def test_attention() -> None:
    """Check the shapes and the sums of the weights of `scaled_dot_product_attention` on random tokens."""
    output, weights = scaled_dot_product_attention(*torch.randn(3, 2, 4, 8))
    assert output.shape == (2, 4, 8)
    assert weights.shape == (2, 4, 4)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4), atol=1e-6)
    print(f"All tests passed!\nSample attention weights:\n{weights[0]}")


def test_mha() -> None:
    """Check and print the shapes of `MultiHeadAttention` under a causal mask."""
    output, weights = MultiHeadAttention(64, 4)(torch.randn(2, 8, 64), create_causal_mask(8))
    assert output.shape == (2, 8, 64)
    assert weights.shape == (2, 4, 8, 8)
    print(f"Output shape: {output.shape}\nAttention weights shape: {weights.shape}\n{weights[0, 0].detach()}")


def test_transformer() -> None:
    """Check and print the shapes and the number of parameters of `MinimalTransformer`."""
    model = MinimalTransformer(1000)
    logits, attentions = model(torch.randint(0, 1000, (2, 16)), return_attentions=True)
    assert logits.shape == (2, 16, 1000)
    assert attentions[0].shape == (2, 4, 16, 16)
    print(f"Output logits shape: {logits.shape}\nTotal parameters: {sum(p.numel() for p in model.parameters()):,}")


for _test in (test_attention, test_mha, test_transformer):
    _test.__test__ = False  # type: ignore[attr-defined]  # where they are imported, pytest does not collect them


# --- parts ------------------------------------------------------------------------------------------------------------


def _head_size(d_model: int, heads: int) -> int:
    at_least_one(d_model=d_model, num_heads=heads)
    if d_model % heads:
        raise InputError(f"d_model is {d_model}, expected a multiple of num_heads = {heads}")
    return d_model // heads


def _embedded(x: Int[Tensor, "b n"], tokens: nn.Embedding, positions: nn.Embedding) -> Float[Tensor, "b n d"]:
    check_ids("x", x, tokens.num_embeddings)
    if x.shape[1] > positions.num_embeddings:
        raise InputError(f"x is {tuple(x.shape)}, expected (batch, at most max_seq_len = {positions.num_embeddings})")
    return tokens(x) + positions(torch.arange(x.shape[1], device=x.device))


def _biases_as_in(layer: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Give the projections biases, or none, as the state dict has them."""
    for name in ("W_q", "W_k", "W_v", "W_o"):
        linear, has = getattr(layer, name), f"{prefix}{name}.bias" in state
        if f"{prefix}{name}.weight" in state and has != (linear.bias is not None):
            linear.bias = nn.Parameter(linear.weight.new_zeros(layer.d_model)) if has else None


def _parts_as_in(block: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Take the names of the build-along, `attention` and `ffn`, for `attn` and `ff`, and its einsum layer."""
    for old, new in (("attention.", "attn."), ("ffn.", "ff.")):
        for key in [key for key in state if key.startswith(prefix + old)]:
            state[prefix + new + key.removeprefix(prefix + old)] = state.pop(key)
    if f"{prefix}attn.W_q" in state and not isinstance(block.attn, EinsumAttention):
        d_model, heads, _d = state[f"{prefix}attn.W_q"].shape
        block.attn = EinsumAttention(d_model, heads).to(block.norm1.weight)


def _check_tokens(name: str, x: object, d_model: int) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != d_model:
        shape = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
        raise InputError(f"{name} is {shape}, expected (batch, length, {d_model}); pass a mask as mask=")

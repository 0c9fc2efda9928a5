"""Our mechanisms against the implementations of other libraries, run with the same tensors and weights.

Outputs and all gradients are compared, over tiles small enough that these few tokens make many. Where a peer computes
its softmax in float32 whatever it is given, so is the tolerance. Performer and Linformer are in `test_linear.py`.
"""

from __future__ import annotations

import importlib
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from conftest import close, rand, triple
from qkv import attend, biases, masks
from qkv.biases import ALiBi, SoftCap, T5Bias
from qkv.masks import Blockwise, Causal, Dense, Document, Padding, Window
from qkv.normalizers import Entmax, Hard, Sigmoid, Softmax, Sparsemax
from qkv.scores import Cosine, Dot

pytestmark = [pytest.mark.usefixtures("tile4"), pytest.mark.slow]

KERNELS = ["auto", "tiled", "eager"]
WIDTHS = [torch.float32, torch.float64]
SHAPES = {  # (batch, heads, key heads, queries, keys, head_dim, head_dim of values): nearly all different
    "grouped": (2, 6, 3, 11, 13, 5, 7),
    "chunk": (1, 4, 2, 3, 17, 8, 6),
    "one key head": (3, 5, 1, 9, 10, 4, 2),
    "one query": (2, 3, 3, 1, 8, 5, 6),
}
Run = Callable[..., Tensor]


def peer(module: str, why: str) -> Any:
    """A module of another library, or a skip; its deprecation warnings on import are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"needs {module.partition('.')[0]} ({why})")


def of_transformers(name: str) -> Any:
    """The modeling module of one family of models."""
    return peer(f"transformers.models.{name}.modeling_{name}", "the peer's own attention")


def config_of(name: str, **settings: Any) -> Any:
    """A configuration of the family, to attend eagerly."""
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    kind = next(x for x in vars(module) if x.lower() == name.replace("_", "") + "config")
    return getattr(module, kind)(attn_implementation="eager", **settings)


def made(module: nn.Module, dtype: torch.dtype, *, train: bool = False) -> nn.Module:
    """The peer's layer, with weights large enough that attention is far from uniform."""
    for i, x in enumerate(module.parameters()):
        x.data = rand(*x.shape, seed=40 + i) * (0.6 if x.ndim > 1 else 1.0)
    return module.to(dtype).train(train)


def same(ours: Run, theirs: Run, leaves: Sequence[Tensor], *, eps: float = 64, wide: torch.dtype | None = None) -> None:
    """One output and one gradient in every leaf; `wide` is the dtype of the tolerance if the peer's is lower."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = []
    for run in (theirs, ours):
        out = run(*leaves)
        grads = torch.autograd.grad((out.double() * rand(*out.shape, seed=9)).sum(), leaves)
        results.append((out.detach(), *grads))
    want, got = results
    assert want[0].abs().max() > 0.01
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape
        size = max(1.0, float(y.abs().max()))  # a gradient may be a sum of many numbers
        close(x / size, y / size, eps=eps if i == 0 else 4 * eps, dtype=wide or x.dtype)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(b, n, h · d) as (b, h, n, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(b, h, n, d) as (b, n, h · d)."""
    return x.transpose(1, 2).flatten(2)


def added(mask: masks.Mask, nq: int, nk: int, dtype: torch.dtype, **size: int) -> Tensor:
    """A mask as models add it to their scores: 0 where visible, the lowest finite number elsewhere."""
    hidden = ~mask.dense(nq, nk, **size)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def through(layer: nn.Module, x: Tensor, run: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """`run(x)` of a layer as a function of x and of all weights of the layer, and these."""
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(
            _Ran(layer, run), {f"layer.{n}": w for n, w in zip(names, weights, strict=True)}, (x,)
        )

    return function, [x, *layer.parameters()]


class _Ran(nn.Module):
    def __init__(self, layer: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


def layers(layer: nn.Module, x: Tensor, ours: Any, theirs: Any, **asked: Any) -> None:
    """A peer's whole layer and ours with its weights: outputs, and gradients in the input and in every weight."""
    mine, leaves = through(layer, x, ours)
    same(mine, through(layer, x, theirs)[0], leaves, **asked)


# --- torch: scaled_dot_product_attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["plain", "bool", "float", "scale", "causal"])
def test_sdpa(kernel: str, dtype: torch.dtype, shape: str, how: str) -> None:
    b, h, hkv, nq, nk, d, dv = SHAPES[shape]
    nq = nk if how == "causal" else nq  # with nq ≠ nk torch aligns the first query and the first key
    tensors = triple(b, h, hkv, nq, nk, d, dv, dtype=dtype)
    seen = (rand(b, h, nq, nk, seed=5) > 0) | (torch.arange(nk) == 2)
    bias = rand(h, nq, nk, seed=6, dtype=dtype)
    ours, theirs = {
        "plain": ({}, {}),
        "bool": ({"mask": seen}, {"attn_mask": seen}),
        "float": ({"bias": biases.Dense(bias)}, {"attn_mask": bias}),
        "scale": ({"score": Dot(0.7)}, {"scale": 0.7}),
        "causal": ({"mask": Causal()}, {"is_causal": True}),
    }[how]
    same(
        lambda q, k, v: attend(q, k, v, kernel=kernel, **ours),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs),
        tensors,
    )


def test_the_gradient_of_a_float_mask_is_sdpas() -> None:
    for kernel in KERNELS:
        same(
            lambda q, k, v, bias, kernel=kernel: attend(q, k, v, bias=biases.Dense(bias), kernel=kernel),
            lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, attn_mask=bias),
            [*triple(2, 4, 4), rand(4, 11, 13, seed=6)],
        )


# --- torch: FlexAttention ---------------------------------------------------------------------------------------------

FLEX_DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2])
SLOPES = torch.tensor([0.5, 0.25, 0.9, 0.1, 0.7, 0.3])


def _alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - SLOPES[h].to(s) * (i - j).abs()


def _cap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 0.8 * torch.tanh(s / 0.8)


FLEX: dict[str, tuple[dict[str, Any], Any, Any]] = {  # ours, score_mod, mask_mod
    "alibi": ({"bias": ALiBi(SLOPES)}, _alibi, None),
    "soft cap": ({"bias": SoftCap(0.8)}, _cap, None),
    "alibi, then soft cap": (
        {"bias": (ALiBi(SLOPES), SoftCap(0.8))}, lambda s, *at: _cap(_alibi(s, *at), *at), None,
    ),
    "soft cap, then alibi": (
        {"bias": (SoftCap(0.8), ALiBi(SLOPES))}, lambda s, *at: _alibi(_cap(s, *at), *at), None,
    ),
    "sliding window": ({"mask": Window(4)}, None, lambda b, h, i, j: (i >= j) & (i - j < 4)),
    "documents": (
        {"mask": Document(FLEX_DOCUMENTS) & Causal()}, None,
        lambda b, h, i, j: (FLEX_DOCUMENTS[i] == FLEX_DOCUMENTS[j]) & (i >= j),
    ),
    "prefix": ({"mask": masks.Prefix(5) | Causal()}, None, lambda b, h, i, j: (j < 5) | (i >= j)),
    "window under alibi": (
        {"mask": Window(6), "bias": ALiBi(SLOPES)}, _alibi, lambda b, h, i, j: (i >= j) & (i - j < 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(kernel: str, dtype: torch.dtype, name: str) -> None:
    """Forward and lse: on CPU FlexAttention has no backward."""
    flex = peer("torch.nn.attention.flex_attention", "FlexAttention")
    ours, score_mod, mask_mod = FLEX[name]
    q, k, v = triple(2, 6, 3, 13, 13, 5, 7, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not compiled, and says so
        block = None if mask_mod is None else flex.create_block_mask(mask_mod, 2, 6, 13, 13, device="cpu")
        want, lse = flex.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=block, enable_gqa=True, return_lse=True
        )
    out, ours_lse = attend(q, k, v, kernel=kernel, return_lse=True, **ours)
    close(out, want)
    close(ours_lse, lse, dtype=dtype)


# --- torch: MultiheadAttention ----------------------------------------------------------------------------------------


def _multihead(heads: int, width: int, **settings: Any) -> nn.MultiheadAttention:
    module = made(nn.MultiheadAttention(width, heads, batch_first=True, **settings), torch.float64)
    assert isinstance(module, nn.MultiheadAttention)
    return module


def _like_multihead(layer: nn.MultiheadAttention, x: Tensor, **asked: Any) -> Tensor:
    projected = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    return layer.out_proj(merged(attend(*(heads_of(y, layer.num_heads) for y in projected), **asked)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_add_zero_attn_is_softmax_off_by_one(kernel: str) -> None:
    layers(
        _multihead(3, 15, add_zero_attn=True),
        rand(2, 11, 15),
        lambda layer, x: _like_multihead(layer, x, normalizer=Softmax(sink=0.0), kernel=kernel),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_bias_k_of_value_zero_is_a_key_that_owns_no_value(kernel: str) -> None:
    layer = _multihead(3, 15, add_bias_kv=True)
    del layer._parameters["bias_v"]
    layer.register_buffer("bias_v", torch.zeros(1, 1, 15, dtype=torch.float64))
    layers(
        layer,
        rand(2, 11, 15),
        lambda layer, x: _like_multihead(layer, x, normalizer=Softmax(key=layer.bias_k.reshape(3, 5)), kernel=kernel),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    )


# --- transformers: eager attention functions --------------------------------------------------------------------------


def _groups(h: int, hkv: int, **more: Any) -> types.SimpleNamespace:
    """What eager attention functions read of their module."""
    return types.SimpleNamespace(num_key_value_groups=h // hkv, training=False, **more)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sink", [0.0, 6.0])
def test_gpt_oss(kernel: str, dtype: torch.dtype, shape: str, window: int | None, sink: float) -> None:
    gpt_oss = of_transformers("gpt_oss")
    b, h, hkv, nq, nk, d, dv = SHAPES[shape]
    mask = Causal() if window is None else Window(window)
    hidden = added(mask, nq, nk, dtype)
    same(
        lambda q, k, v, s: attend(q, k, v, mask=mask, normalizer=Softmax(sink=s), score=Dot(0.4), kernel=kernel),
        lambda q, k, v, s: gpt_oss.eager_attention_forward(
            _groups(h, hkv, sinks=s), q, k, v, hidden, scaling=0.4
        )[0].transpose(1, 2),
        [*triple(b, h, hkv, nq, nk, d, dv, dtype=dtype), sink + rand(h, seed=8, dtype=dtype)],
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_llama(kernel: str, shape: str) -> None:
    llama = of_transformers("llama")
    b, h, hkv, nq, nk, d, dv = SHAPES[shape]
    hidden = added(Causal(), nq, nk, torch.float32)
    same(
        lambda q, k, v: attend(q, k, v, mask=Causal(), kernel=kernel),
        lambda q, k, v: llama.eager_attention_forward(
            _groups(h, hkv), q, k, v, hidden, scaling=d**-0.5
        )[0].transpose(1, 2),
        triple(b, h, hkv, nq, nk, d, dv, dtype=torch.float32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_gpt2_layer(dtype: torch.dtype, by_layer: bool) -> None:
    gpt2 = of_transformers("gpt2")
    config = config_of("gpt2", n_embd=15, n_head=3, scale_attn_by_inverse_layer_idx=by_layer)
    layer = made(gpt2.GPT2Attention(config, layer_idx=2), dtype)
    scale = 5**-0.5 / (3 if by_layer else 1)
    hidden = added(Causal(), 11, 11, dtype)

    def ours(layer: Any, x: Tensor) -> Tensor:
        parts = (heads_of(y, 3) for y in layer.c_attn(x).chunk(3, -1))
        return layer.c_proj(merged(attend(*parts, mask=Causal(), score=Dot(scale))))

    layers(layer, rand(2, 11, 15, dtype=dtype), ours, lambda layer, x: layer(x, attention_mask=hidden)[0])


# --- transformers: windows, and a soft cap ----------------------------------------------------------------------------


def _still(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotations by nothing."""
    return torch.ones(1, n, d, dtype=dtype), torch.zeros(1, n, d, dtype=dtype)


def _window_mask(config: Any, x: Tensor) -> Tensor:
    """The mask the peer itself makes for a layer with a sliding window."""
    utils = peer("transformers.masking_utils", "how its models make masks")
    return utils.create_sliding_window_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None,
        position_ids=torch.arange(x.shape[1])[None],
    )  # fmt: skip


GROUPED = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("window", [2, 4, 30])
@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_with_a_window(name: str, window: int, kernel: str) -> None:
    """Theirs of w keeps the query's own key and w − 1 before it: so does `Window(w)`."""
    module = of_transformers(name)
    gemma = name == "gemma2"
    more = {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5} if gemma else {}
    config = config_of(name, sliding_window=window, **GROUPED, **more)
    if gemma:
        assert config.layer_types[0] == "sliding_attention"
    layer = made(getattr(module, f"{name.capitalize()}Attention")(config, layer_idx=0), torch.float32)
    x = rand(2, 11, 18, dtype=torch.float32)
    hidden = _window_mask(config, x)

    def ours(layer: Any, x: Tensor) -> Tensor:
        q, k, v = (heads_of(p(x), n) for p, n in ((layer.q_proj, 6), (layer.k_proj, 2), (layer.v_proj, 2)))
        bent = {"bias": SoftCap(1.5), "score": Dot(3**-0.5)} if gemma else {}
        return layer.o_proj(merged(attend(q, k, v, mask=Window(window), kernel=kernel, **bent)))

    def theirs(layer: Any, x: Tensor) -> Tensor:
        return layer(x, position_embeddings=_still(11, 4, x.dtype), attention_mask=hidden)[0]

    layers(layer, x, ours, theirs)


# --- transformers: ALiBi of bloom -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 11, 12, 16, 20, 112])
def test_slopes_of_bloom(heads: int) -> None:
    bloom = of_transformers("bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    close(biases.alibi_slopes(heads), theirs, eps=4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [3, 4, 7])
@pytest.mark.parametrize("padded", [False, True])
def test_bloom_layer(kernel: str, heads: int, padded: bool) -> None:
    """Theirs adds slope · (key position), ours −slope · distance: softmax ignores the constant difference."""
    bloom = of_transformers("bloom")
    width, n = 5 * heads, 11
    config = config_of("bloom", hidden_size=width, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0)
    layer = made(bloom.BloomAttention(config, layer_idx=0), torch.float32)
    real = torch.ones(2, n)
    mask: masks.Mask = Causal()
    if padded:
        real[1, :3] = 0
        mask = Causal() & Padding([n, n - 3], "left")
    hidden = added(mask, n, n, torch.float32, batch=2)
    alibi = bloom.build_alibi_tensor(real, heads, torch.float32)
    rows = real[..., None]  # a query in the padding gets a mean of everything there, and zeros here

    def ours(layer: Any, x: Tensor) -> Tensor:
        fused = layer.query_key_value(x).unflatten(-1, (heads, 3, 5)).permute(3, 0, 2, 1, 4)
        return rows * layer.dense(merged(attend(*fused.unbind(0), mask=mask, bias=ALiBi(), kernel=kernel)))

    layers(
        layer,
        rand(2, n, width, dtype=torch.float32),
        ours,
        lambda layer, x: rows * layer(x, torch.zeros_like(x), alibi, hidden)[0],
    )


# --- transformers: T5 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (4, 3), (64, 1000), (20, 128)])
def test_buckets_of_t5(bidirectional: bool, buckets: int, furthest: int) -> None:
    t5 = of_transformers("t5")
    ahead = torch.arange(-1100, 1101)
    theirs = t5.T5Attention._relative_position_bucket(ahead, bidirectional, buckets, furthest)
    assert torch.equal(biases.t5_bucket(-ahead, buckets, furthest, bidirectional=bidirectional), theirs)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("n", [2, 29])
def test_t5_layer(dtype: torch.dtype, decoder: bool, n: int) -> None:
    t5 = of_transformers("t5")
    config = config_of(
        "t5", d_model=11, d_kv=5, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        is_decoder=decoder,
    )  # fmt: skip
    layer = made(t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder), dtype)
    mask = Causal() if decoder else None
    hidden = None if mask is None else added(mask, n, n, dtype)

    def ours(kernel: str) -> Callable[..., Tensor]:
        def run(layer: Any, x: Tensor) -> Tensor:
            table = T5Bias(layer.relative_attention_bias.weight, bidirectional=not decoder, max_distance=20)
            q, k, v = (heads_of(p(x), 3) for p in (layer.q, layer.k, layer.v))
            return layer.o(merged(attend(q, k, v, mask=mask, bias=table, score=Dot(1.0), kernel=kernel)))

        return run

    for kernel in KERNELS:
        layers(layer, rand(2, n, 11, dtype=dtype), ours(kernel), lambda layer, x: layer(x, mask=hidden)[0])


@pytest.mark.parametrize("past", [0, 6])
def test_t5_bias_with_a_past(past: int) -> None:
    t5 = of_transformers("t5")
    config = config_of("t5", d_model=11, d_kv=5, num_heads=3, is_decoder=True)
    layer = made(t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0), torch.float64)
    q = torch.zeros(1, 3, 7, 5, dtype=torch.float64)
    k = torch.zeros(1, 3, 7 + past, 5, dtype=torch.float64)
    table = T5Bias(layer.relative_attention_bias.weight, bidirectional=False)
    _, weights = attend(q, k, k, bias=table, return_weights=True)
    close(weights, layer.compute_bias(7, 7 + past, past_seen_tokens=past).softmax(-1))


# --- transformers: BigBird and Longformer -----------------------------------------------------------------------------


@pytest.fixture
def numpy_state() -> Iterator[None]:
    """BigBird seeds NumPy's generator, which is everyone's."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("blocks", "random"), [(13, 2), (15, 3), (8, 1)])
@pytest.mark.usefixtures("numpy_state")
def test_big_bird_layer(training: bool, blocks: int, random: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, their random blocks are random. In eval they are all block 0, which a query then counts 1 + r times.

    A key counted c times is a key with ln c added to its score: so far off is theirs from the model it trained.
    """
    big_bird = of_transformers("big_bird")
    size, heads, n = 4, 3, 4 * blocks
    config = config_of(
        "big_bird", hidden_size=15, num_attention_heads=heads, block_size=size, num_random_blocks=random,
        max_position_embeddings=n, use_bias=False,
    )  # fmt: skip
    layer = made(big_bird.BigBirdBlockSparseAttention(config, seed=5), torch.float64, train=training)
    drawn: list[Any] = []
    draw = layer._bigbird_block_rand_mask_with_head
    monkeypatch.setattr(
        layer, "_bigbird_block_rand_mask_with_head", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1]
    )
    real = torch.ones(2, n, dtype=torch.float64)
    real[1, n - 6 :] = 0
    blocked, band, rows, columns = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(real, size)

    def theirs(layer: Any, x: Tensor) -> Tensor:
        return layer(x, band, rows, columns, blocked, blocked)[0] * real[..., None]

    x = rand(2, n, 15)
    theirs(layer, x)
    table = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    table[:, 1:-1] = torch.zeros(heads, blocks - 2, blocks).scatter_(2, torch.tensor(np.array(drawn[-1])).long(), 1) > 0
    near = Window(2, ahead=1) | masks.Global([0, -1])
    visible = Blockwise(near | Dense(table), size) & Padding([n, n - 6])
    bias = None
    if training:
        assert ((near | Dense(table)).dense(blocks, blocks, heads=heads).sum(-1)[0, :, 2] == 5 + random).all()
    else:
        assert table[:, 1:-1].sum(-1).eq(1).all()  # block 0, `random` times over
        again = torch.zeros(n, n, dtype=torch.float64)
        again[size:-size, :size] = math.log(1 + random)
        bias = biases.Dense(again)

    def ours(kernel: str) -> Callable[..., Tensor]:
        def run(layer: Any, x: Tensor) -> Tensor:
            q, k, v = (heads_of(p(x), heads) for p in (layer.query, layer.key, layer.value))
            return merged(attend(q, k, v, mask=visible, bias=bias, kernel=kernel)) * real[..., None]

        return run

    for kernel in KERNELS:
        layers(layer, x, ours(kernel), theirs)


@pytest.mark.parametrize("tokens", [(), (0, 7)])
@pytest.mark.parametrize("window", [4, 6])  # at 2 theirs fails: it cannot fill an empty corner
def test_longformer_layer(tokens: tuple[int, ...], window: int) -> None:
    """Ours and theirs, whose global tokens attend with projections of their own."""
    longformer = of_transformers("longformer")
    heads, n = 3, 24
    config = config_of(
        "longformer", hidden_size=15, num_attention_heads=heads, attention_window=[window], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer = made(longformer.LongformerSelfAttention(config, layer_id=0), torch.float32)
    padded = torch.zeros(2, n, dtype=torch.bool)
    padded[1, n - 5 :] = True
    everywhere = torch.zeros(n, dtype=torch.bool)
    everywhere[list(tokens)] = True
    state = torch.zeros(2, n).masked_fill(padded, -10000.0).masked_fill(everywhere & ~padded, 10000.0)
    real = Padding([n, n - 5])

    def theirs(layer: Any, x: Tensor) -> Tensor:
        is_global = (state > 0).contiguous()
        return layer(
            x, attention_mask=state, is_index_masked=padded, is_index_global_attn=is_global,
            is_global_attn=bool(tokens),
        )[0].masked_fill(padded[..., None], 0)  # fmt: skip

    def ours(kernel: str) -> Callable[..., Tensor]:
        def run(layer: Any, x: Tensor) -> Tensor:
            q, k, v = (heads_of(p(x), heads) for p in (layer.query, layer.key, layer.value))
            mask = masks.longformer(window, tokens) if tokens else Window(window // 2 + 1, ahead=window // 2)
            out = merged(attend(q, k, v, mask=mask & real, kernel=kernel))
            if tokens:
                parts = (layer.query_global, layer.key_global, layer.value_global)
                whole = merged(attend(*(heads_of(p(x), heads) for p in parts), mask=real, kernel=kernel))
                out = torch.where(everywhere[:, None], whole, out)
            return out.masked_fill(padded[..., None], 0)

        return run

    if not tokens:  # their layer has these weights, and no use for them
        del layer.query_global, layer.key_global, layer.value_global
    for kernel in KERNELS:
        layers(layer, rand(2, n, 15, dtype=torch.float32), ours(kernel), theirs, eps=128)


# --- x-transformers ---------------------------------------------------------------------------------------------------


def x_transformers() -> Any:
    """Its module of layers; `Attend` of it is the lowest level that carries a mechanism."""
    return peer("x_transformers.x_transformers", "the peer's own attention")


def x_attend(heads: int, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """`Attend`, which makes its softmax in float32 unless it is told of query-key normalisation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x_transformers().Attend(heads=heads, **settings).to(dtype)


def x_run(module: Any, *tensors: Tensor, **asked: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module(*tensors, **asked)[0]


def _x_entmax(alpha: float) -> Callable[[Tensor], Tensor]:
    entmax = peer("entmax", "the peer's own entmax")
    return {1.5: entmax.entmax15, 2.0: entmax.sparsemax}[alpha]


X_WIDE = {"qk_norm": True}  # a softmax in the dtype of the input; the rest of `Attend` does not look at it
X_MECHANISMS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {  # our arguments, theirs
    "softmax": ({}, lambda: X_WIDE),
    "scale": ({"score": Dot(0.7)}, lambda: X_WIDE | {"scale": 0.7}),
    "soft clamp": ({"bias": SoftCap(0.9)}, lambda: X_WIDE | {"softclamp_logits": True, "logit_softclamp_value": 0.9}),
    "sigmoid": ({"normalizer": Sigmoid(bias=0.0)}, lambda: {"sigmoid": True}),
    "hard": ({"normalizer": Hard()}, lambda: {"hard": True}),
    "zero key and value": ({"normalizer": Softmax(sink=0.0)}, lambda: X_WIDE | {"add_zero_kv": True}),
    "zero key and value under a clamp": (
        {"normalizer": Softmax(sink=0.0), "bias": SoftCap(0.9)},
        lambda: X_WIDE | {"add_zero_kv": True, "softclamp_logits": True, "logit_softclamp_value": 0.9},
    ),
    "entmax": ({"normalizer": Entmax(1.5)}, lambda: {"custom_attn_fn": _x_entmax(1.5)}),
    "sparsemax": ({"normalizer": Sparsemax()}, lambda: {"custom_attn_fn": _x_entmax(2.0)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", X_MECHANISMS)
def test_x_transformers_attend(dtype: torch.dtype, causal: bool, name: str) -> None:
    ours, theirs = X_MECHANISMS[name]
    module = x_attend(4, dtype, causal=causal, **theirs())
    mask = Causal() if causal else None
    for kernel in KERNELS:
        same(
            lambda q, k, v, kernel=kernel: attend(q, k, v, mask=mask, kernel=kernel, **ours),
            lambda q, k, v: x_run(module, q, k, v),
            triple(2, 4, 4, 11, 13, 5, 7, dtype=dtype),
        )


@pytest.mark.parametrize("causal", [False, True])
def test_x_transformers_learned_sink(causal: bool) -> None:
    module = x_attend(4, causal=causal, head_learned_sink=True, **X_WIDE)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.func.functional_call(module, {"head_attn_sink": sink}, (q, k, v))[0]

    mask = Causal() if causal else None
    for kernel in KERNELS:
        same(
            lambda q, k, v, sink, kernel=kernel: attend(
                q, k, v, mask=mask, normalizer=Softmax(sink=sink), kernel=kernel
            ),
            theirs,
            [*triple(2, 4, 4, 11, 13, 5, 7), 1 + rand(4, seed=8)],
        )  # fmt: skip


@pytest.mark.parametrize("heads", [4, 6, 7])
@pytest.mark.parametrize("cap", [None, 0.9])
def test_x_transformers_alibi(heads: int, cap: float | None) -> None:
    """In theirs a bias comes before the clamp: a tuple in this order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bias = x_transformers().AlibiPositionalBias(heads)(11, 13).double()
    clamp = {} if cap is None else {"softclamp_logits": True, "logit_softclamp_value": cap}
    module = x_attend(heads, **clamp, **X_WIDE)
    ours = ALiBi() if cap is None else (ALiBi(), SoftCap(cap))
    for kernel in KERNELS:
        same(
            lambda q, k, v, kernel=kernel: attend(q, k, v, bias=ours, kernel=kernel),
            lambda q, k, v: x_run(module, q, k, v, attn_bias=bias),
            triple(2, heads, heads, 11, 13, 5, 3),
        )


@pytest.mark.parametrize("causal", [False, True])
def test_x_transformers_t5_bias(causal: bool) -> None:
    """Theirs multiplies the table by √d, because T5 does not divide scores by √d."""
    bias = made(
        x_transformers().RelativePositionBias(scale=5**0.5, causal=causal, num_buckets=8, max_distance=9, heads=4),
        torch.float64,
    )
    module = x_attend(4, causal=causal, **X_WIDE)
    mask = Causal() if causal else None

    def theirs(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        made_bias = torch.func.functional_call(bias, {"relative_attention_bias.weight": table}, (11, 13))
        return x_run(module, q, k, v, attn_bias=made_bias)

    for kernel in KERNELS:
        same(
            lambda q, k, v, table, kernel=kernel: attend(
                q, k, v, mask=mask, kernel=kernel, bias=T5Bias(table * 5**0.5, bidirectional=not causal, max_distance=9)
            ),
            theirs,
            [*triple(2, 4, 4, 11, 13, 5, 3), rand(8, 4, seed=8)],
        )


def test_x_transformers_distances() -> None:
    """−|q − k|²: the term of the query is constant for its keys; that of the key is one more entry of its vector."""
    module = x_attend(4, l2_distance=True, scale=0.4, **X_WIDE)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longer = torch.cat([2 * q, -torch.ones_like(q[..., :1])], -1), torch.cat([k, (k * k).sum(-1, keepdim=True)], -1)
        return attend(*longer, v, score=Dot(0.4))

    same(ours, lambda q, k, v: x_run(module, q, k, v), triple(2, 4, 4, 11, 13, 5, 3), eps=2**12)


def test_x_transformers_groups_heads_the_other_way_round() -> None:
    """Its query head i uses key head i mod hkv; ours, like torch's and every model's, key head i // (h / hkv)."""
    module = x_attend(6, **X_WIDE)
    q, k, v = triple(2, 6, 3, 11, 13, 5, 7)
    theirs = x_run(module, q, k, v)
    assert (attend(q, k, v) - theirs).abs().max() > 0.1
    order = torch.arange(6).reshape(2, 3).T.flatten()  # heads that share a key head, side by side
    close(attend(q[:, order], k, v), theirs[:, order])
    close(attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), theirs)


def _x_layer(**settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(x_transformers().Attention(13, dim_head=5, heads=3, **settings), torch.float64)


def _like_x_layer(layer: Any, x: Tensor, **asked: Any) -> Tensor:
    q, k, v = (heads_of(p(x), 3) for p in (layer.to_q, layer.to_k, layer.to_v))
    return layer.to_out(merged(attend(q, k, v, **asked)))


def _x_layer_run(layer: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer(x)


@pytest.mark.parametrize("past", [1, 4])
def test_x_transformers_window_counts_the_keys_before(past: int) -> None:
    """`max_attend_past` leaves the query's own key out of the count: w there is `Window(w + 1)` here."""
    layers(
        _x_layer(causal=True, max_attend_past=past),
        rand(2, 11, 13),
        lambda layer, x: _like_x_layer(layer, x, mask=Window(past + 1)),
        _x_layer_run,
        wide=torch.float32,
    )


def test_x_transformers_cosine() -> None:
    layers(
        _x_layer(qk_norm=True, qk_norm_scale=4.0),
        rand(2, 11, 13),
        lambda layer, x: _like_x_layer(layer, x, score=Cosine(4.0)),
        _x_layer_run,
    )


def test_x_transformers_memory_key_of_value_zero() -> None:
    layer = _x_layer(num_mem_kv=1)
    del layer._parameters["mem_v"]
    layer.register_buffer("mem_v", torch.zeros(3, 1, 5, dtype=torch.float64))
    layers(
        layer,
        rand(2, 11, 13),
        lambda layer, x: _like_x_layer(layer, x, normalizer=Softmax(key=layer.mem_k[:, 0])),
        _x_layer_run,
        wide=torch.float32,
    )


# --- entmax -----------------------------------------------------------------------------------------------------------


def _entmax(name: str, scores: Tensor) -> Tensor:
    entmax = peer("entmax", "the peer's own entmax")
    if name in ("sparsemax", "entmax15"):
        return getattr(entmax, name)(scores, dim=-1)
    return entmax.entmax_bisect(scores, alpha=float(name), dim=-1, n_iter=60)


ENTMAX = {
    "sparsemax": Sparsemax(),
    "entmax15": Entmax(1.5),
    "1.5": Entmax(1.5),
    "2.0": Entmax(2.0),
    "1.2": Entmax(1.2),
    "1.75": Entmax(1.75),
}


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ENTMAX)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_entmax(dtype: torch.dtype, shape: str, name: str, temperature: float) -> None:
    b, h, _, nq, nk, d, dv = SHAPES[shape]
    tensors = triple(b, h, h, nq, nk, d, dv, dtype=dtype)
    normalizer = Entmax(ENTMAX[name].alpha, temperature)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _entmax(name, q @ k.transpose(-1, -2) / d**0.5 / temperature) @ v

    # Bisection leaves the threshold a few roundings off; weights that are a power of a difference multiply them.
    eps = 64 if name in ("sparsemax", "entmax15") else 512
    for kernel in ("tiled", "eager"):
        same(
            lambda q, k, v, kernel=kernel: attend(q, k, v, normalizer=normalizer, kernel=kernel),
            theirs,
            tensors,
            eps=eps,
        )
    q, k, v = tensors
    want = _entmax(name, q @ k.transpose(-1, -2) / d**0.5 / temperature)
    weights = attend(q, k, v, normalizer=normalizer, return_weights=True)[1]
    close(weights, want, eps=eps)
    assert torch.equal(weights == 0, want == 0) or name not in ("sparsemax", "entmax15")


@pytest.mark.parametrize("name", ENTMAX)
def test_entmax_of_what_is_visible(name: str) -> None:
    """Row by row, theirs over the visible keys only."""
    q, k, v = triple(1, 2, 2, 11, 11, 5, 7)
    scores = q @ k.transpose(-1, -2) / 5**0.5
    rows = [(_entmax(name, scores[:, :, i, : i + 1])[..., None] * v[:, :, : i + 1]).sum(2) for i in range(11)]
    want = torch.stack(rows, 2)
    for kernel in ("tiled", "eager"):
        close(attend(q, k, v, mask=Causal(), normalizer=ENTMAX[name], kernel=kernel), want, eps=512)

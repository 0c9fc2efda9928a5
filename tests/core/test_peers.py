"""Our mechanisms against the implementations of other libraries, run with the same tensors and weights.

Outputs and all gradients are compared on every kernel, over tiles small enough that these few tokens make many. Where a
peer computes its softmax in float32 whatever it is given, so is the tolerance. Performer and Linformer are in
`test_linear.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import close, rand, triple
from qkv import attend, masks
from qkv.biases import SoftCap, T5Bias
from qkv.masks import Causal, Padding, Window
from qkv.normalizers import Entmax, Softmax
from qkv.scores import Dot

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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of other libraries about themselves are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def peer(module: str, why: str) -> Any:
    """A module of another library, or a skip."""
    with quiet():
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


def with_gradients(run: Run, leaves: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    with quiet():
        out = run(*leaves)
    return [out.detach(), *torch.autograd.grad((out.double() * rand(*out.shape, seed=9)).sum(), leaves)]


def same(ours: Run, theirs: Run, leaves: Sequence[Tensor], *, eps: float = 64, wide: torch.dtype | None = None) -> None:
    """One output and one gradient in every leaf of `ours(*leaves, kernel=…)`, on every kernel.

    `wide` is the dtype of the tolerance if the peer's is lower.
    """
    want = with_gradients(theirs, leaves)
    assert want[0].abs().max() > 0.01
    for kernel in KERNELS:
        got = with_gradients(functools.partial(ours, kernel=kernel), leaves)
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


class _Ran(nn.Module):
    def __init__(self, layer: nn.Module, run: Run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor, **on: str) -> Tensor:
        return self.run(self.layer, x, **on)


def layers(layer: nn.Module, x: Tensor, ours: Run, theirs: Run, **asked: Any) -> None:
    """A peer's whole layer and ours with its weights: outputs, and gradients in the input and in every weight."""
    names = [f"layer.{name}" for name, _ in layer.named_parameters()]

    def through(run: Run) -> Run:
        def function(x: Tensor, *weights: Tensor, **on: str) -> Tensor:
            return torch.func.functional_call(_Ran(layer, run), dict(zip(names, weights, strict=True)), (x,), on)

        return function

    same(through(ours), through(theirs), [x, *layer.parameters()], **asked)


# --- torch: MultiheadAttention ----------------------------------------------------------------------------------------


def test_bias_k_of_value_zero_is_a_key_that_owns_no_value() -> None:
    layer = made(nn.MultiheadAttention(15, 3, batch_first=True, add_bias_kv=True), torch.float64)
    del layer._parameters["bias_v"]
    layer.register_buffer("bias_v", torch.zeros(1, 1, 15, dtype=torch.float64))

    def ours(layer: Any, x: Tensor, **on: str) -> Tensor:
        projected = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        normalizer = Softmax(key=layer.bias_k.reshape(3, 5))
        return layer.out_proj(merged(attend(*(heads_of(y, 3) for y in projected), normalizer=normalizer, **on)))

    layers(layer, rand(2, 11, 15), ours, lambda layer, x: layer(x, x, x, need_weights=False)[0])


# --- transformers: eager attention functions --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "sink", "dtype"), [(None, 0.0, torch.float32), (4, 6.0, torch.float64)])
def test_gpt_oss(shape: str, window: int | None, sink: float, dtype: torch.dtype) -> None:
    gpt_oss = of_transformers("gpt_oss")
    b, h, hkv, nq, nk, d, dv = SHAPES[shape]
    mask = Causal() if window is None else Window(window)
    hidden = added(mask, nq, nk, dtype)
    same(
        lambda q, k, v, s, **on: attend(q, k, v, mask=mask, normalizer=Softmax(sink=s), score=Dot(0.4), **on),
        lambda q, k, v, s: gpt_oss.eager_attention_forward(
            types.SimpleNamespace(num_key_value_groups=h // hkv, training=False, sinks=s), q, k, v, hidden, scaling=0.4
        )[0].transpose(1, 2),
        [*triple(b, h, hkv, nq, nk, d, dv, dtype=dtype), sink + rand(h, seed=8, dtype=dtype)],
    )  # fmt: skip


# --- transformers: windows, and a soft cap ----------------------------------------------------------------------------

GROUPED = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(("name", "window"), [("mistral", 2), ("gemma2", 4)])
def test_layers_with_a_window(name: str, window: int) -> None:
    """Theirs of w keeps the query's own key and w − 1 before it: so does `Window(w)`."""
    module = of_transformers(name)
    gemma = name == "gemma2"
    more = {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5} if gemma else {}
    config = config_of(name, sliding_window=window, **GROUPED, **more)
    layer = made(getattr(module, f"{name.capitalize()}Attention")(config, layer_idx=0), torch.float32)
    x = rand(2, 11, 18, dtype=torch.float32)
    hidden = peer("transformers.masking_utils", "how its models make masks").create_sliding_window_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=torch.arange(11)[None]
    )
    still = torch.ones(1, 11, 4), torch.zeros(1, 11, 4)  # rotations by nothing

    def ours(layer: Any, x: Tensor, **on: str) -> Tensor:
        q, k, v = (heads_of(p(x), n) for p, n in ((layer.q_proj, 6), (layer.k_proj, 2), (layer.v_proj, 2)))
        bent = {"bias": SoftCap(1.5), "score": Dot(3**-0.5)} if gemma else {}
        return layer.o_proj(merged(attend(q, k, v, mask=Window(window), **bent, **on)))

    layers(layer, x, ours, lambda layer, x: layer(x, position_embeddings=still, attention_mask=hidden)[0])


# --- transformers: T5 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decoder", "n", "dtype"), [(False, 29, torch.float32), (True, 29, torch.float64)])
def test_t5_layer(decoder: bool, n: int, dtype: torch.dtype) -> None:
    t5 = of_transformers("t5")
    config = config_of(
        "t5", d_model=11, d_kv=5, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        is_decoder=decoder,
    )  # fmt: skip
    layer = made(t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder), dtype)
    mask = Causal() if decoder else None
    hidden = None if mask is None else added(mask, n, n, dtype)

    def ours(layer: Any, x: Tensor, **on: str) -> Tensor:
        table = T5Bias(layer.relative_attention_bias.weight, bidirectional=not decoder, max_distance=20)
        q, k, v = (heads_of(p(x), 3) for p in (layer.q, layer.k, layer.v))
        return layer.o(merged(attend(q, k, v, mask=mask, bias=table, score=Dot(1.0), **on)))

    layers(layer, rand(2, n, 11, dtype=dtype), ours, lambda layer, x: layer(x, mask=hidden)[0])


# --- transformers: BigBird and Longformer -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "window"), [((), 6), ((0, 7), 4)])  # at window 2 theirs fails
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
    everywhere = torch.isin(torch.arange(n), torch.tensor(tokens))
    state = torch.zeros(2, n).masked_fill(padded, -10000.0).masked_fill(everywhere & ~padded, 10000.0)
    asked = {"is_index_masked": padded, "is_index_global_attn": state > 0, "is_global_attn": bool(tokens)}
    real = Padding([n, n - 5])

    def theirs(layer: Any, x: Tensor) -> Tensor:
        return layer(x, attention_mask=state, **asked)[0].masked_fill(padded[..., None], 0)

    def ours(layer: Any, x: Tensor, **on: str) -> Tensor:
        q, k, v = (heads_of(p(x), heads) for p in (layer.query, layer.key, layer.value))
        mask = masks.longformer(window, tokens) if tokens else Window(window // 2 + 1, ahead=window // 2)
        out = merged(attend(q, k, v, mask=mask & real, **on))
        if tokens:
            parts = (layer.query_global, layer.key_global, layer.value_global)
            whole = merged(attend(*(heads_of(p(x), heads) for p in parts), mask=real, **on))
            out = torch.where(everywhere[:, None], whole, out)
        return out.masked_fill(padded[..., None], 0)

    if not tokens:  # their layer has these weights, and no use for them
        del layer.query_global, layer.key_global, layer.value_global
    layers(layer, rand(2, n, 15, dtype=torch.float32), ours, theirs, eps=128)


# --- entmax -----------------------------------------------------------------------------------------------------------


def _entmax(name: str, scores: Tensor) -> Tensor:
    entmax = peer("entmax", "the peer's own entmax")
    if name in ("sparsemax", "entmax15"):
        return getattr(entmax, name)(scores, dim=-1)
    return entmax.entmax_bisect(scores, alpha=float(name), dim=-1, n_iter=60)


ENTMAX = {"sparsemax": 2.0, "entmax15": 1.5, "1.2": 1.2, "1.75": 1.75}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "dtype", "temperature"),
    [("sparsemax", WIDTHS[0], 1.0), ("sparsemax", WIDTHS[1], 0.3), ("entmax15", WIDTHS[0], 0.3),
     ("entmax15", WIDTHS[1], 1.0), ("1.2", WIDTHS[0], 1.0), ("1.75", WIDTHS[1], 0.3)],
)  # fmt: skip
def test_entmax(shape: str, name: str, dtype: torch.dtype, temperature: float) -> None:
    b, h, _, nq, nk, d, dv = SHAPES[shape]
    q, k, v = triple(b, h, h, nq, nk, d, dv, dtype=dtype)
    normalizer = Entmax(ENTMAX[name], temperature)

    def theirs(q: Tensor, k: Tensor) -> Tensor:
        return _entmax(name, q @ k.mT / d**0.5 / temperature)

    # Bisection leaves the threshold a few roundings off; weights that are a power of a difference multiply them.
    eps = 64 if name in ("sparsemax", "entmax15") else 512
    same(functools.partial(attend, normalizer=normalizer), lambda q, k, v: theirs(q, k) @ v, (q, k, v), eps=eps)
    weights, want = attend(q, k, v, normalizer=normalizer, return_weights=True)[1], theirs(q, k)
    close(weights, want, eps=eps)
    assert torch.equal(weights == 0, want == 0) or name not in ("sparsemax", "entmax15")

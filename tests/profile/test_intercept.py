"""Attention that is not qkv's: torch's functions, softmaxes over scores, and functions of a user's own.

They run as they are, and are translated into calls, recomputed, read from their weights, or refused.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

import hf_models as hf
import qkv
from conftest import close, largest_tensor, rand, refused
from qkv.huggingface.attention import call_of
from qkv.kernels import eager
from qkv.profiler.capture import observer as observation
from qkv.profiler.capture.calls import multi_head_call, sdpa_call, softmax_call
from qkv.profiler.capture.modules import AttentionModules
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer
from qkv.reference import statistics
from qkv.runs.run import profile
from qkv.statistics.measure import row_state, sweep

F = nn.functional
B, H, NQ, NK, D, DV = 2, 6, 5, 7, 3, 4
WIDE = 12  # of the model


FOUR = ((B, H),) * 3
SEEN, ADDED = rand(NQ, NK, seed=2) > -1, rand(H, NQ, NK, seed=3).masked_fill(rand(NQ, NK, seed=4) > 0.8, -torch.inf)
LEADS: tuple[tuple[int, ...], ...] = ((), (3,), (B * H,), (2, 3, H))
SDPA: list[tuple[Any, dict[str, Any]]] = [  # dimensions of q, k and v before the last two, and further arguments
    (FOUR, {}),
    (FOUR, {"scale": 0.9}),
    (FOUR, {"is_causal": True}),  # from the top left
    (FOUR, {"attn_mask": SEEN}),
    (FOUR, {"attn_mask": rand(B, 1, 1, NK, seed=2) > -1}),
    (FOUR, {"attn_mask": ADDED}),
    (((B, H), (B, 2), (B, 2)), {"enable_gqa": True}),
    (((B, H), (1, 1), (B, 1)), {}),
    *(((lead,) * 3, {"attn_mask": SEEN}) for lead in LEADS),
    *(((lead,) * 3, {"attn_mask": rand(*lead, 1, NK, seed=2) > -1}) for lead in LEADS),
]


@pytest.mark.parametrize(("leads", "given"), SDPA)
def test_sdpa_call_computes_the_same(leads: Any, given: dict[str, Any]) -> None:
    sizes = ((NQ, D), (NK, D), (NK, DV))
    q, k, v = (rand(*lead, *size, seed=5 + i) for i, (lead, size) in enumerate(zip(leads, sizes, strict=True)))
    call, shape = sdpa_call(H, q, k, v, **given)
    want = F.scaled_dot_product_attention(q, k, v, **given)
    assert shape == want.shape
    assert call.q.shape[1] == (H if leads[0] and leads[0][-1] % H == 0 else 1)
    close(eager.forward(call).out.reshape(shape), want)


CHOICES = {
    "kdim": (None, 8),
    "bias": (True, False),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "mask": (None, "bool", "float", "heads"),
    "padding": (None, "bool", "float"),
}


@pytest.mark.parametrize("values", list(itertools.product(*CHOICES.values()))[::5], ids=str)
def test_multi_head_attention_call_computes_the_same(values: tuple[Any, ...], monkeypatch: Any) -> None:
    chosen = dict(zip(CHOICES, values, strict=True))
    mask, padding = chosen.pop("mask"), chosen.pop("padding")
    if (mask == "bool" and padding == "float") or (mask in ("float", "heads") and padding == "bool"):
        padding = None  # torch wants both of one kind
    layer = nn.MultiheadAttention(WIDE, H, vdim=chosen["kdim"], **chosen, batch_first=True).double().eval()
    width = chosen["kdim"] or WIDE
    for p in layer.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
    masks = {"bool": rand(NQ, NK, seed=2) > 1, "float": rand(NQ, NK, seed=2), "heads": rand(B * H, NQ, NK, seed=2)}
    hidden = torch.arange(NK) >= torch.tensor([[NK], [4]])
    paddings = {"bool": hidden, "float": torch.zeros(B, NK).double().masked_fill(hidden, -torch.inf)}
    heard: list[Any] = []
    own = F.multi_head_attention_forward

    def hear(*args: Any, **kwargs: Any) -> Any:
        heard.append(multi_head_call(*args, **kwargs))
        heard.append(
            multi_head_call(*args, **kwargs | {name: asked[name] for name in ("attn_mask", "key_padding_mask")})
        )
        return own(*args, **kwargs)

    monkeypatch.setattr(F, "multi_head_attention_forward", hear)
    x, y, z = rand(B, NQ, WIDE), rand(B, NK, width, seed=1), rand(B, NK, width, seed=2)
    asked = {"attn_mask": masks.get(mask), "key_padding_mask": paddings.get(padding), "average_attn_weights": False}
    out, want = layer(x, y, z, **asked)
    assert len(heard) == 2  # the layer makes floats of boolean masks
    for call in heard:
        close(eager.forward(call).weights, want)
        close(layer.out_proj(eager.forward(call).out.transpose(1, 2).flatten(2)), out)


def test_multi_head_attention_with_projected_keys_is_not_read() -> None:
    x, w = rand(3, B, WIDE), rand(3 * WIDE, WIDE, seed=1)
    static = rand(B * H, NK, WIDE // H, seed=2)
    args = (x, x, x, WIDE, H, w, None, None, None, False, 0.0, w[:WIDE], None)
    assert multi_head_call(*args) is not None
    assert multi_head_call(*args, static_k=static, static_v=static) is None


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min, -1e4])
def test_softmax_over_scores_is_a_call_for_any_masking_value(lowest: float) -> None:
    seen = rand(B, 1, NQ, NK, seed=1) > -0.5
    seen[..., 0] = True
    scores = (5 * rand(B, H, NQ, NK)).masked_fill(~seen, 0) + torch.where(seen, 0.0, torch.tensor(lowest).double())
    call = softmax_call(scores)
    want = scores.softmax(-1)
    close(eager.forward(call).weights, want)
    got = sweep(call, row_state(call))
    named = statistics(want.numpy())
    for name in ("entropy", "received", "distance", "effective_keys"):
        np.testing.assert_allclose(getattr(got, name), getattr(named, name), atol=1e-12, err_msg=name)
    assert (got.visible == seen.sum(-1)).all()
    close(got.lse, scores.logsumexp(-1))
    assert call.v.isnan().all()  # the values are not known


class SelfAttention(nn.Module):
    """Forms its weights; `kind` says how they are normalized."""

    def __init__(self, kind: str = "function") -> None:
        super().__init__()
        self.num_heads, self.kind = H, kind
        self.project = nn.Linear(WIDE, 3 * WIDE)
        self.normalizer = nn.Softmax(dim=-1)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        scores = (3 * q @ k.transpose(-1, -2)).masked_fill(torch.ones(2 * x.shape[1:2]).triu(1).bool(), -torch.inf)
        weights = {
            "function": lambda: F.softmax(scores, dim=-1, dtype=torch.float32),
            "module": lambda: self.normalizer(scores),
            "folded": lambda: scores.flatten(0, 1).softmax(-1).unflatten(0, (-1, H)),
            "twice": lambda: (torch.softmax(scores, -1) + scores.softmax(-1)) / 2,
            "queries": lambda: F.softmax(scores.nan_to_num(neginf=-9.0), dim=-2),
        }
        self.last = weights[self.kind]()
        return (self.last @ v).transpose(1, 2).flatten(2)


class Gate(nn.Module):
    """A softmax that is not attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.softmax(-1)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(hf.VOCABULARY, WIDE)
        self.layers = nn.Sequential(*layers)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embedding(ids))
        return out


IDS = torch.randint(0, hf.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["function", "module", "folded"])
def test_softmax_in_an_attention_module_is_recorded(kind: str) -> None:
    layer = SelfAttention(kind)
    model = Model(layer, Gate()).eval()
    with torch.no_grad():
        before = model(IDS)
    result = profile(model, IDS, progress=False)
    assert result.attrs["sources"] == {"layers.0": "softmax"}
    assert result.attrs["unobserved"] == []
    assert result.data.attrs["causal"]
    assert result.data["visible"].values[0, 0, 0].tolist() == list(range(1, 12))
    assert layer.last is not None
    np.testing.assert_allclose(result.data["weights"][:, 0], layer.last.detach(), atol=1e-6)
    assert "key_norm" not in result.data  # the keys are not known
    with torch.no_grad():
        assert torch.equal(model(IDS), before)


@pytest.mark.parametrize("kind", ["twice", "queries"])
def test_weights_that_are_no_softmax_over_keys_are_recorded_as_they_are(kind: str) -> None:
    layer = SelfAttention(kind)
    result = profile(Model(layer).eval(), IDS, progress=False, probe=False)
    assert layer.last is not None
    np.testing.assert_allclose(result.data["weights"][:, 0], layer.last.detach(), atol=1e-6)
    np.testing.assert_allclose(result.data["row_sum"][:, 0], layer.last.detach().sum(-1), atol=1e-5)


def test_models_without_attention_and_nan_scores_are_named() -> None:
    model = Model(SelfAttention("sdpa")).eval()
    with refused("model", r"no attention call that qkv can observe[^;]*$"):
        profile(Model(Gate()).eval(), IDS, progress=False)
    model.layers[0].project.weight.data[0, 0] = torch.nan
    with refused("model", r"NaN in layers\.0"):
        profile(model, IDS, progress=False)


@pytest.mark.slow
def test_sdpa_profile_needs_linear_memory() -> None:
    n = 4096
    model = Model(SelfAttention("sdpa")).eval()
    ids = torch.zeros(1, n, dtype=torch.long)
    model.embedding.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    largest = largest_tensor(lambda: profile(model, ids, probe=False, progress=False))
    assert largest <= H * n * n / 16


def test_a_model_whose_attention_is_not_all_routed_would_be_read_in_part() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hf.build("bert")

    model = hf.build("bert")
    assert AttentionModules(model).all_routed
    model.pooler.attention = nn.MultiheadAttention(8, 2)
    assert not AttentionModules(model).all_routed
    assert not AttentionModules(Pooled()).all_routed
    assert not AttentionModules(nn.MultiheadAttention(8, 2)).all_routed


# --- attention functions of a user ------------------------------------------------------------------------------------

NAME = "mine"


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, normalize: Any) -> tuple[Tensor, Tensor]:
    """The output and the weights, which `normalize` makes of the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights: Tensor = normalize(q @ k.mT * scaling + (0 if mask is None else mask))
    return (weights @ v).transpose(1, 2).contiguous(), weights


def plain(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Standard attention."""
    return attended(query, key, value, mask, scaling, lambda scores: scores.softmax(-1))[0], None


def colder(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Another temperature, of which nobody is told."""
    return plain(module, query, key, value, mask, 1.3 * scaling)


def sigmoid(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Weights that do not add up to 1, and that are returned."""
    return attended(query, key, value, mask, scaling, torch.sigmoid)


def lying(*args: Any, **named: Any) -> Any:
    """Returns weights that are not those of its output."""
    out, weights = sigmoid(*args, **named)
    return out, weights.softmax(-1)


def causal_inside(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Applies the causality itself, as functions without a mask function do."""
    assert mask is None
    n = query.shape[2]
    return plain(module, query, key, value, torch.full((n, n), -torch.inf).triu(1), scaling)


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Registers an attention function under `NAME`, or another name."""
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)

    def register(function: Any, *, mask: Any = eager_mask, name: str = NAME) -> None:
        AttentionInterface.register(name, function)
        if mask is not None:
            AttentionMaskInterface.register(name, mask)

    yield register
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(before[0])
    AttentionMaskInterface._global_mapping.clear()
    AttentionMaskInterface._global_mapping.update(before[1])


def observed(model: nn.Module, name: str = "llama", **settings: Any) -> tuple[Observer, Tensor]:
    inputs = hf.inputs(name)
    with observe(Observer(model, **settings)) as observer:
        out = model(**inputs)[0]
    return observer, out


@torch.no_grad()
@pytest.mark.parametrize(("function", "mask"), [(plain, eager_mask), (causal_inside, None)])
def test_function_that_computes_standard_attention_is_recomputed_and_its_output_kept(
    function: Any, mask: Any, registered: Callable[..., None]
) -> None:
    registered(function, mask=mask)
    model = hf.build("llama", NAME)
    want = model(**hf.inputs("llama"))[0]
    mapping = dict(AttentionInterface._global_mapping)
    observer, out = observed(model)
    assert torch.equal(out, want)
    assert AttentionInterface._global_mapping == mapping
    twin, _ = observed(hf.build("llama", "eager"))
    for mine, other in zip(observer.records, twin.records, strict=True):
        torch.testing.assert_close(mine.statistics.entropy, other.statistics.entropy, atol=1e-4, rtol=0)
        assert mine.causal
        assert torch.equal(mine.statistics.visible, other.statistics.visible)
    assert [x.module for x in observer.checks] == [r.module for r in observer.records]
    assert max(x.difference for x in observer.checks) < 1e-5


@pytest.mark.parametrize("function", [colder, lying])
def test_function_with_other_weights_is_refused_with_its_name_and_the_difference(
    function: Any, registered: Callable[..., None]
) -> None:
    registered(function)
    model = hf.build("llama", NAME)
    with refused("model", match=rf"layers\.0\.self_attn by \S+{function.__name__}, whose output differs .* by \d"):
        profile(model, hf.inputs("llama"), probe=False)
    with refused("model", match="made no attention call"):  # nor are its weights taken from a second forward
        profile(model, hf.inputs("llama"), probe=False, partial=True)
    assert model.config._attn_implementation == NAME


@torch.no_grad()
def test_weights_that_an_unknown_function_returns_are_recorded(registered: Callable[..., None]) -> None:
    registered(sigmoid)
    model = hf.build("llama", NAME)
    want, weights = model(**hf.inputs("llama"))[0], []
    registered(lambda *args, **named: (given := sigmoid(*args, **named), weights.append(given[1]))[0])
    observer, out = observed(model)
    assert torch.equal(out, want)
    assert set(observer.sources.values()) == {"returned"}
    for record, w in zip(observer.records, weights, strict=True):
        share = w / w.sum(-1, keepdim=True)
        torch.testing.assert_close(record.statistics.received, share.sum(2), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(record.statistics.row_sum, w.sum(-1), atol=1e-5, rtol=1e-5)
        entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
        torch.testing.assert_close(record.statistics.entropy, entropy, atol=1e-4, rtol=0)
    with qkv.watch(model) as watched:
        assert torch.equal(model(**hf.inputs("llama"))[0], want)
    assert watched.profile().attrs["sources"] == observer.sources


@torch.no_grad()
def test_function_that_replaces_one_of_transformers_is_not_taken_for_it(
    registered: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(colder, mask=None, name="sdpa")
    with refused("model", match="colder, whose output differs"):
        observed(hf.build("llama", "sdpa"))
    registered(sdpa_attention_forward, mask=None, name="sdpa")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", colder)
    with refused("model", match="colder, whose output differs"):
        observed(hf.build("llama", "eager"))
    assert "eager" not in AttentionInterface._global_mapping


@torch.no_grad()
def test_function_of_transformers_is_checked_on_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.build("gemma2")
    observer, _ = observed(model, "gemma2")
    assert [x.module for x in observer.checks] == ["layers.0.self_attn"]
    assert observer.checks[0].difference < 1e-5

    def without_softcap(*args: Any, **named: Any) -> Any:
        return call_of(*args, **named | {"softcap": None})

    monkeypatch.setattr(observation, "call_of", without_softcap)
    with refused("model", match="eager_attention_forward, whose output differs"):
        observed(hf.build("gemma2"), "gemma2")


def test_heads_that_cannot_be_told_from_batch_items_are_asked_for() -> None:
    x = {"x": torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(0))}
    with refused("model", match="set its attribute num_heads"):
        profile(nn.Sequential(OrderedDict(layer=Hidden())), {"input": x["x"]})


class Hidden(nn.Module):
    """Heads are as many as batch items, and come out of a function that torch does not show."""

    def forward(self, x: Tensor) -> Tensor:
        q: Any = Unseen.apply(x)
        return (torch.softmax(q @ q.mT, -1) @ q).sum(1)


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, None] * torch.arange(1, 5)[:, None, None]


@torch.no_grad()
def test_einsum_attention_profiles() -> None:
    layer = qkv.course.EinsumAttention(32, 4)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[0] = False
    found = profile(layer, {"x": x, "mask": mask})
    want = layer(x, mask)[1]
    torch.testing.assert_close(torch.tensor(found.data["weights"].values[:, 0]), want, atol=1e-6, rtol=0)


class OfPictures(nn.Module):
    """Self-attention over the pixels, then attention to a text, as in a UNet; both inputs are floating-point."""

    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, sample: Tensor, states: Tensor) -> Tensor:
        x = sample.flatten(2).transpose(1, 2)
        x = x + self.attn1(x, x, x)[0]
        return x + self.attn2(x, states, states)[0]


@pytest.mark.parametrize("n", [7, 16])
def test_self_attention_is_told_by_its_states_where_a_model_reads_two(n: int) -> None:
    torch.manual_seed(0)
    model, sample, states = OfPictures().eval(), torch.randn(2, 16, 4, 4), torch.randn(2, n, 16)
    profile = qkv.profile(model, {"sample": sample, "states": states}, progress=False)
    assert {name: [*data["module"].values] for name, data in profile.groups.items()} == {
        "self": ["attn1"], "cross": ["attn2"]
    }  # fmt: skip
    x = sample.flatten(2).transpose(1, 2)
    expected = model.attn1(x, x, x, average_attn_weights=False)[1].detach()
    np.testing.assert_allclose(profile.group("self")["weights"][:, 0], expected, atol=1e-6)


class WindowsAfterHeads(nn.Module):
    """(batch, heads, windows, tokens, features), as in Hiera."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv, self.split = nn.Linear(16, 48), heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x).unflatten(-1, (3, self.split, -1)).unflatten(1, (-1, 3)).permute(3, 0, 4, 2, 1, 5)
        return F.scaled_dot_product_attention(*x).transpose(1, 3).flatten(3).flatten(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_before_windows_are_told(heads: int) -> None:
    torch.manual_seed(0)
    model, x = WindowsAfterHeads(heads), torch.randn(2, 12, 16)
    want, (q, k, _) = model(x), model.qkv(x).chunk(3, -1)
    q, k = (y.unflatten(-1, (heads, -1)).unflatten(1, (4, 3)).permute(0, 2, 3, 1, 4) for y in (q, k))
    weights = (q @ k.mT / (16 // heads) ** 0.5).softmax(-1).flatten(0, 1)
    with qkv.watch(model) as watched:
        assert torch.equal(model(x), want)
    for found in (watched.profile(), qkv.profile(model, {"x": x}, progress=False)):
        np.testing.assert_allclose(found.data["weights"].values[:, 0], weights, atol=1e-6)
    with qkv.edit(model, {(0, 0): "zero"}):
        assert torch.allclose(model(x), want) is False


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_padding_of_torchs_encoder_is_no_text(dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = (
        nn.TransformerEncoder(layer, 2).eval(),
        torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0)),
    )
    hidden = torch.arange(10) >= torch.tensor([[10], [7]])
    mask = hidden if dtype == torch.bool else torch.zeros(2, 10).masked_fill(hidden, -torch.inf)
    got = profile(model, {"src": x, "src_key_padding_mask": mask}, progress=False).data.isel(text=[1])
    want = profile(model, {"src": x[1:, :7]}, progress=False).data
    assert got["n_queries"].values.tolist() == got["n_keys"].values.tolist() == [7]
    for name in ("received", "visible_queries", "entropy"):
        np.testing.assert_allclose(got[name].values[..., :7], want[name].values, atol=1e-5, err_msg=name)


SLOPES, LENGTHS = torch.tensor([0.5, 0.25, 0.1, 0.05]), torch.tensor([9, 6])


def slanted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q)


def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (k < LENGTHS[b])


class Flexible(nn.Module):
    """FlexAttention with grouped heads, a bias of each head and a mask of each text; `mod` is its score_mod."""

    def __init__(self, mod: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.q, self.kv, self.mod = nn.Linear(32, 32), nn.Linear(32, 32), mod or slanted

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.q(x).unflatten(-1, (4, 8)).transpose(1, 2), k, v

    def forward(self, x: Tensor) -> Tensor:
        mask = create_block_mask(seen, len(x), None, x.shape[1], x.shape[1], device="cpu")
        out = flex_attention(*self.heads(x), self.mod, mask, scale=0.3, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


@torch.no_grad()
def test_flex_attention_in_a_module_of_ones_own_is_read_or_refused() -> None:
    torch.manual_seed(0)
    model, x = Flexible(), torch.randn(2, 9, 32)
    q, k, v = (y.repeat_interleave(4 // y.shape[1], 1) for y in model.heads(x))
    i, j = torch.arange(9)[:, None], torch.arange(9)
    visible = seen(*torch.meshgrid(torch.arange(2), torch.arange(4), i[:, 0], j, indexing="ij"))
    scores = q @ k.mT * 0.3 + SLOPES[:, None, None] * (j - i)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    found = profile(model, {"x": x}, progress=False)
    np.testing.assert_allclose(found.data["weights"].values[:, 0], weights, atol=1e-6)
    assert found.attrs["checks"][0]["function"] == "torch.nn.attention.flex_attention"
    with qkv.watch(model) as watched:
        torch.testing.assert_close(model(x), (weights @ v).transpose(1, 2).flatten(2))
    np.testing.assert_allclose(watched.profile().data["weights"].values[:, 0], weights, atol=1e-6)
    vectors = torch.randn(9, 3)
    with refused("model", match="flex_attention"):  # a sum over numbers of a pair is one over pairs of tensors
        profile(Flexible(lambda score, b, h, q, k: score + (vectors[q] * vectors[k]).sum()), {"x": x}, progress=False)
    with refused("score_mod"):
        profile(Flexible(lambda score, b, h, q, k: score + torch.dot(vectors[q], vectors[k])), {"x": x}, progress=False)

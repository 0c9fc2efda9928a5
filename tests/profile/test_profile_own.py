"""Profiles of qkv's own models, and of any module that calls `qkv.attend`, without any change to the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional as F

import hf_models as hf
import qkv
from conftest import largest_tensor, refused
from own_objects import Heavy, Taken
from qkv import Attention, biases, features, masks, normalizers
from qkv.kernels import watching
from qkv.models import checkpoint
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.models.tokenizers import ByteTokenizer
from qkv.nn import LinearAttention, LinformerAttention, MultiHeadAttention
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.positions import Rotary
from qkv.profiler import Profile, profile
from qkv.profiler.capture.observe import Observer, observe
from qkv_lab.course import EinsumAttention
from qkv_lab.models.captioner import Captioner, CaptionerConfig
from qkv_lab.models.classifier import Classifier, ClassifierConfig
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

LOCAL, VOCABULARY = 2, 50
OWN_SEQUENCE = ("self", "previous", "next", "local", "distance")
LAYERS = (MultiHeadAttention, AdditiveAttention, LuongAttention)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


IDS, SOURCE, TARGET = tokens(2, 11), tokens(2, 9, seed=2), tokens(2, 7, seed=3)
SOURCE[1, 6:] = 0  # padding
TARGET[1, 5:] = 0
IMAGES = torch.randn(2, 1, 24, 32, generator=torch.Generator().manual_seed(4))


def lively(model: nn.Module) -> Any:
    """In evaluation mode, with weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn * 0.3 if parameter.ndim < 2 else drawn * 1.3 / math.sqrt(parameter.shape[-1])
    return model.eval()


def decoder(**changes: Any) -> DecoderLM:
    return lively(DecoderLM(DecoderConfig(vocab_size=VOCABULARY, context=32, d_model=32, layers=2, heads=4, **changes)))


def encoder_decoder(**changes: Any) -> EncoderDecoder:
    sizes = {"d_model": 32, "heads": 4, "layers": 2, "d_hidden": 48} | changes
    return lively(EncoderDecoder(EncoderDecoderConfig(VOCABULARY, VOCABULARY, **sizes)))


def classifier() -> Classifier:
    return lively(Classifier(ClassifierConfig(VOCABULARY, classes=3, d_model=32)))


def seq2seq(attention: Any, **changes: Any) -> RNNSeq2Seq:
    sizes = {"d_hidden": 16, "half_width": 2} | changes
    return lively(RNNSeq2Seq(RNNSeq2SeqConfig(VOCABULARY, VOCABULARY, attention=attention, **sizes)))


def captioner(attention: Any = "soft") -> Captioner:
    return lively(Captioner(CaptionerConfig(VOCABULARY, attention=attention, d_hidden=16)))


def own_profile(model: nn.Module, inputs: Any, **settings: Any) -> Profile:
    return profile(model, inputs, **{"progress": False, "probe": False, "local_window": LOCAL} | settings)


def own_weights(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Weights of each attention layer, asked of it again with what the model gave it: (batch, head, query, key).

    Of a layer called several times, side by side along the queries.
    """
    given: list[tuple[str, nn.Module, Any, Any]] = []
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LAYERS)}

    def keep(name: str) -> Any:
        return lambda module, args, kwargs: given.append((name, module, args, kwargs))

    handles = [m.register_forward_pre_hook(keep(n), with_kwargs=True) for n, m in layers.items()]
    with torch.no_grad():
        run()
        for handle in handles:
            handle.remove()
        found: dict[str, list[Tensor]] = {}
        for name, module, args, kwargs in given:
            weights = module(*args, **kwargs | {"return_weights": True})[1]
            found.setdefault(name, []).append(weights if weights.ndim == 4 else weights[:, None])
    return {name: torch.cat(calls, 2) for name, calls in found.items()}


def by_definition(weights: np.ndarray, null: np.ndarray | float) -> dict[str, np.ndarray]:
    """Variables of weights (head, query, key) and of the weight on a null key, as docs/quantities.md defines them."""
    A = weights.astype(np.float64)
    _, n_queries, n_keys = A.shape
    mass = A.sum(-1, keepdims=True)
    a = np.divide(A, mass, out=np.zeros_like(A), where=mass > 0)
    whole = mass + np.asarray(null)[..., None]
    shares = np.divide(A, whole, out=np.zeros_like(A), where=whole > 0)
    at, key = np.arange(n_queries)[:, None] + n_keys - n_queries, np.arange(n_keys)
    mean = (a * key).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "entropy": -np.where(a > 0, a * np.log(a), 0).sum(-1),
            "received": shares.sum(1),
            "row_sum": A.sum(-1),
            "sink": shares[..., 0],
            "self": (shares * (key == at)).sum(-1),
            "previous": (shares * (key == at - 1)).sum(-1),
            "next": (shares * (key == at + 1)).sum(-1),
            "local": (shares * (abs(key - at) <= LOCAL)).sum(-1),
            "distance": (a * abs(key - at)).sum(-1),
            "variance": (a * (key - mean) ** 2).sum(-1),
            "effective_keys": np.where(mass[..., 0] > 0, 1 / (a**2).sum(-1), 0),
            "weights": A,
        }


def check(data: xr.Dataset, weights: dict[str, Tensor], *, cross: bool = False) -> None:
    """All variables of a data set equal those computed from `weights` of its modules, by text and without padding."""
    assert data["module"].values.tolist() == list(weights)
    for layer, (module, whole) in enumerate(weights.items()):
        for text in range(data.sizes["text"]):
            one = data.isel(layer=layer, text=text)
            n_queries, n_keys = int(one["n_queries"]), int(one["n_keys"])
            null = one["sink_mass"].values[:, :n_queries] if "sink_mass" in one else 0.0
            want = by_definition(whole[text, :, :n_queries, :n_keys].double().numpy(), null)
            for name, values in want.items():
                what = f"{name} of {module}, text {text}"
                if name == "variance":
                    got = one["spread"].values[:, :n_queries] ** 2
                    np.testing.assert_allclose(got, values, atol=2e-3, err_msg=what)
                    continue
                got = one[name].values
                got = got[:, :n_keys] if name == "received" else got[:, :n_queries]
                got = got[..., :n_keys] if name == "weights" else got
                if cross and name in OWN_SEQUENCE:
                    assert np.isnan(got).all(), what
                else:
                    np.testing.assert_allclose(got, values, rtol=3e-5, atol=3e-5, err_msg=what)
            for name in ("entropy", "received"):
                assert np.isnan(one[name].values[:, n_keys if name == "received" else n_queries :]).all()


# --- every composition ------------------------------------------------------------------------------------------------

DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"kv_heads": 2},
    "one key head, rotary": {"kv_heads": 1, "positions": "rotary"},
    "sink": {"sink": True},
    "key bias": {"key_bias": True},
    "off by one": {"normalizer": "off_by_one"},
    "sigmoid": {"normalizer": "sigmoid"},
    "elu + 1": {"normalizer": "elu"},
    "relu": {"normalizer": "relu"},
    "entmax": {"normalizer": "entmax"},
    "window": {"window": 4},
    "alibi": {"positions": "alibi"},
    "t5": {"positions": "t5"},
    "gate, norms": {"gate": "elementwise", "qk_norm": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False},
}
SOFTMAX = set(DECODERS) - {"sigmoid", "elu + 1", "relu", "entmax"}


@pytest.mark.parametrize("case", DECODERS)
def test_decoder_profile_equals_its_weights(case: str) -> None:
    model = decoder(**DECODERS[case])
    result = own_profile(model, IDS)
    assert list(result.groups) == ["self"]
    weights = own_weights(model, lambda: model(IDS))
    check(result.data, weights)
    assert result.data["module"].values.tolist() == ["blocks.0.attention", "blocks.1.attention"]
    assert result.data.attrs["causal"] is True
    assert result.attrs["unobserved"] == []
    steps = np.arange(11) + 1
    assert (result.data["visible"] == (np.minimum(steps, 4) if case == "window" else steps)).all()
    assert np.isnan(result.data["lse"]).all() == (case not in SOFTMAX)
    missing = 1 - torch.stack(list(weights.values()), 1).sum(-1).numpy()
    if case in ("sink", "key bias", "off by one"):
        assert missing.max() > 0.1
        np.testing.assert_allclose(result.data["sink_mass"], missing, atol=1e-5)
    else:
        assert "sink_mass" not in result.data
    assert not result.heads().drop(columns="target_share").isna().all(axis=0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "entmax", "sink"])
def test_profile_in_other_dtypes(case: str, dtype: torch.dtype) -> None:
    model = decoder(**DECODERS[case])
    want = own_profile(model, IDS)
    got = own_profile(model.to(dtype), IDS)
    assert got.attrs["dtype"] == str(dtype).removeprefix("torch.")
    tolerance = 1e-4 if dtype == torch.float64 else 0.2
    np.testing.assert_allclose(got.data["weights"], want.data["weights"], atol=tolerance)
    weights = own_weights(model, lambda: model(IDS))
    if dtype == torch.float64:
        check(got.data, weights)


def test_log_sum_exps_and_weights_by_hand() -> None:
    """For plain heads, by five einsums that share no code with the package."""
    model = decoder()
    data = own_profile(model, IDS).data
    seen: list[Tensor] = []
    layer = model.blocks[1].attention
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(IDS)
    handle.remove()
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    with torch.no_grad():
        plain = MultiHeadAttention(layer.d_model, layer.heads)
        plain.load_state_dict(layer.state_dict())
        weights = EinsumAttention.of(plain)(seen[0], causal)[1]
        q, k, _ = layer.in_proj(seen[0]).view(2, 11, 3, 4, 8).permute(2, 0, 3, 1, 4)
        lse = (q @ k.mT / 8**0.5).masked_fill(~causal, -torch.inf).logsumexp(-1)
    np.testing.assert_allclose(data["weights"][:, 1], weights, atol=1e-5)
    np.testing.assert_allclose(data["lse"][:, 1], lse, rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    """A text model around one attention layer of any kind."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, 32), layer

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.embedding(ids))
        return out


LAYER_KINDS: dict[str, Callable[[], nn.Module]] = {
    "both ways": lambda: MultiHeadAttention(32, 4),
    "gate a head": lambda: MultiHeadAttention(32, 4, gate="head", attention=Attention(mask=masks.Causal())),
    "window ahead": lambda: MultiHeadAttention(32, 4, attention=Attention(mask=masks.Window(3, ahead=2))),
    "wide values, rotary": lambda: MultiHeadAttention(32, 4, head_dim=6, v_head_dim=10, rotary=Rotary(6)),
    "sparsemax": lambda: MultiHeadAttention(32, 4, attention=Attention(normalizer=normalizers.Sparsemax())),
    "hard": lambda: MultiHeadAttention(32, 4, attention=Attention(normalizer=normalizers.Hard())),
    "cap": lambda: MultiHeadAttention(32, 4, attention=Attention(bias=biases.SoftCap(2.0), mask=masks.Causal())),
    "linear": lambda: LinearAttention(32, 4, kv_heads=2),
    "linear, both ways": lambda: LinearAttention(32, 4, causal=False, features=features.relu),
}


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_layer_profile_equals_its_weights(kind: str) -> None:
    model = lively(Layer(LAYER_KINDS[kind]()))
    result = own_profile(model, IDS)
    check(result.data, own_weights(model, lambda: model(IDS)))
    assert list(result.groups) == ["self"]
    assert result.data.attrs["causal"] is (kind in ("gate a head", "cap", "linear"))


def test_linear_attention_by_hand() -> None:
    model = lively(Layer(LinearAttention(32, 4)))
    with torch.no_grad():
        q, k, _ = model.layer.in_proj(model.embedding(IDS)).view(2, 11, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    np.testing.assert_allclose(
        own_profile(model, IDS).data["weights"][:, 0], weights / weights.sum(-1, keepdim=True), atol=1e-5
    )


def test_linformer_keys_are_not_tokens() -> None:
    model = lively(Layer(LinformerAttention(32, 4, length=20, rank=5)))
    with torch.no_grad():
        q, k, _ = model.layer.in_proj(model.embedding(IDS)).view(2, 11, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ (model.layer.e[:11].T @ k).mT / 8**0.5).softmax(-1)
    data = own_profile(model, IDS).groups["cross"]
    check(data, {"layer": weights}, cross=True)
    assert data["key_token"][0].values.tolist() == list("01234")
    assert data["query_token"][0].values.tolist() == [str(i) for i in IDS[0].tolist()]


def test_padding_is_no_query_of_linformer() -> None:
    model = lively(Layer(LinformerAttention(32, 4, length=20, rank=5)))
    model.config = SimpleNamespace(pad=0)
    data = own_profile(model, SOURCE).data
    assert (data["n_queries"].values.tolist(), data["n_keys"].values.tolist()) == ([9, 6], [5, 5])
    np.testing.assert_allclose(data["received"].sum("key")[1], 6, rtol=1e-5)


# --- models of two sequences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("target", [TARGET, SOURCE.clone()], ids=["other length", "same length"])
def test_encoder_decoder_profile_equals_its_weights(target: Tensor, place: str) -> None:
    model = encoder_decoder(place=place, positions="learned", kv_heads=2)
    groups = own_profile(model, {"target": target, "source": SOURCE}).groups
    assert list(groups) == ["encoder", "decoder", "cross"]
    weights = own_weights(model, lambda: model(SOURCE, target))
    names = {
        "encoder": [f"encoder.blocks.{i}.attention" for i in range(2)],
        "decoder": [f"decoder.blocks.{i}.attention" for i in range(2)],
        "cross": [f"decoder.blocks.{i}.cross" for i in range(2)],
    }
    source, queries = [9, 6], (target != 0).sum(1).tolist()
    for group, modules in names.items():
        data = groups[group]
        assert data["n_queries"].values.tolist() == (source if group == "encoder" else queries)
        assert data["n_keys"].values.tolist() == (queries if group == "decoder" else source)
        check(data, {name: weights[name] for name in modules}, cross=group == "cross")
        assert data.attrs["causal"] is (group == "decoder")
    assert groups["cross"]["query_token"][1].values.tolist()[: queries[1]] == [
        str(i) for i in target[1, : queries[1]].tolist()
    ]
    assert groups["cross"]["key_token"][1].values.tolist() == [str(i) for i in SOURCE[1, :6].tolist()] + [""] * 3


SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {"bahdanau": ("bahdanau", {}), "gru": ("bahdanau", {"cell": "gru"})}
for _score in ("dot", "general", "concat"):
    for _kind in ("global", "local-m", "local-p"):
        for _fed in (False, True):
            _name = f"luong-{_score}, {_kind}" + (", fed" if _fed else "")
            SEQ2SEQ[_name] = (f"luong-{_score}", {"kind": _kind, "input_feeding": _fed})


@pytest.mark.parametrize("case", SEQ2SEQ)
def test_recurrent_decoder_is_one_layer(case: str) -> None:
    attention, changes = SEQ2SEQ[case]
    model = seq2seq(attention, **changes)
    result = own_profile(model, {"source": SOURCE, "target": TARGET})
    assert list(result.groups) == ["cross"]
    sizes = {"text": 2, "layer": 1, "head": 1, "query": 7, "key": 9}
    assert {dim: result.data.sizes[dim] for dim in sizes} == sizes
    with torch.no_grad():
        weights = model.alignments(SOURCE, TARGET)[:, None]
    check(result.data, {"attention": weights}, cross=True)
    assert result.attrs["unobserved"] == []
    assert result.data.attrs["causal"] is False
    assert result.data["n_queries"].values.tolist() == [7, 5]
    received = result.data["received"].sum("key")
    np.testing.assert_allclose(received, np.nansum(result.data["weights"], axis=(3, 4)), atol=1e-5)


def test_heads_between_recurrent_networks() -> None:
    model = seq2seq("multihead")
    data = own_profile(model, {"source": SOURCE, "target": TARGET}).groups["cross"]
    check(data, own_weights(model, lambda: model(SOURCE, TARGET)), cross=True)


class Stepwise(nn.Module):
    """A model that normally reads its target in one forward, here run token by token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = self.model.start(source)
        return torch.stack([self.model.step(token, state) for token in target.split(1, 1)], 1)


@pytest.mark.parametrize("map_tokens", [256, 8])
@pytest.mark.parametrize(
    ("attention", "kind"),
    [("luong-dot", "global"), ("luong-general", "local-m"), ("luong-concat", "local-p"), ("multihead", "global")],
)
def test_step_by_step_equals_one_forward(attention: str, kind: str, map_tokens: int) -> None:
    model = seq2seq(attention, kind=kind)
    inputs = {"source": SOURCE, "target": TARGET}
    settings = {"map_tokens": map_tokens, "statistics": [Heavy()]}
    whole = own_profile(model, inputs, **settings).groups["cross"]
    steps = own_profile(Stepwise(model), inputs, **settings).groups["cross"]
    beyond = {name for name in whole if name not in steps}  # of vectors, and of pictures of all queries: see `_Steps`
    assert beyond == {
        "query_norm", "key_norm", "value_norm", "cosine_first", "cosine_others", "first_key_angle", "key_directions",
        "streaming_mass", "prefix_sink_scores", "first_contribution",
    }  # fmt: skip
    assert set(steps) == set(whole) - beyond
    assert ("weights" in whole) is (map_tokens == 256)
    for name in steps:
        tolerance = 2e-3 if name == "spread" else 2e-5
        np.testing.assert_allclose(steps[name], whole[name], rtol=2e-5, atol=tolerance, err_msg=str(name))
    assert steps["module"].values.tolist() == ["model.attention"]
    if map_tokens == 8:
        with refused("statistics", match="step by step"):
            own_profile(Stepwise(model), inputs, statistics=[Taken()])


def test_decoding_with_a_cache_gives_a_layer_for_each_call() -> None:
    """The keys differ at every step, so the calls are separate layers."""
    model = decoder()

    class Generating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            state = model.start(len(ids))
            return torch.stack([model.step(token, state) for token in ids.split(1, 1)], 1)

    groups = own_profile(Generating(), IDS[:, :3]).groups
    assert [(d.sizes["query"], d.sizes["key"], d.sizes["layer"]) for d in groups.values()] == [
        (1, n, 2) for n in (1, 2, 3)
    ]
    whole = own_profile(model, IDS[:, :3]).data
    np.testing.assert_allclose(list(groups.values())[-1]["entropy"][..., 0], whole["entropy"][..., 2], atol=1e-5)


def test_windows_over_another_text_are_not_causal() -> None:
    """p_t of untrained weights is in the middle of the source, so the source's end is masked for a short target."""
    torch.manual_seed(1)
    model = RNNSeq2Seq(RNNSeq2SeqConfig(VOCABULARY, VOCABULARY, attention="luong-dot", kind="local-p", half_width=3))
    result = own_profile(model, {"source": tokens(1, 30), "target": tokens(1, 3)})
    assert list(result.groups) == ["cross"]
    assert (result.data["weights"].values[..., 20:] == 0).all()


def test_dense_mask_can_be_causal() -> None:
    model = lively(
        Layer(MultiHeadAttention(32, 4, attention=Attention(mask=torch.ones(11, 11, dtype=torch.bool).tril())))
    )
    assert own_profile(model, IDS).data.attrs["causal"] is True


def test_profile_forms_no_quadratic_tensor() -> None:
    n = 2048
    model = DecoderLM(
        DecoderConfig(vocab_size=VOCABULARY, context=n, d_model=32, layers=1, heads=4, normalizer="sigmoid")
    )
    run = lambda: own_profile(model, tokens(1, n), map_tokens=0)  # noqa: E731
    assert largest_tensor(run) <= 4 * n * n / 16


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_captioner_attends_to_the_cells_of_a_grid(attention: str) -> None:
    model = captioner(attention)
    result = own_profile(model, {"images": IMAGES, "captions": TARGET})
    assert list(result.groups) == ["cross"]
    with torch.no_grad():
        maps = model.maps(IMAGES, TARGET)
    check(result.data, {"attention" if attention == "soft" else "Captioner": maps.flatten(2)[:, None]}, cross=True)
    assert result.data["key_token"][1].values.tolist() == [str(i) for i in range(12)]
    assert result.data["query_token"][1].values.tolist() == [*map(str, TARGET[1, :5].tolist()), "", ""]
    assert result.attrs["text_preview"] == "images (2, 1, 24, 32), captions (2, 7)"


# --- padding ----------------------------------------------------------------------------------------------------------


def test_padding_counts_neither_as_query_nor_as_key() -> None:
    model = classifier()
    padded, alone = own_profile(model, SOURCE).data, own_profile(model, SOURCE[1, :6]).data
    check(padded, own_weights(model, lambda: model(SOURCE)))
    assert padded["n_queries"].values.tolist() == [9, 6]
    for name in ("entropy", "sink", "self", "local", "distance", "received"):
        np.testing.assert_allclose(padded[name][1, ..., :6], alone[name][0], rtol=1e-4, atol=1e-4, err_msg=name)
    assert list(own_profile(model, SOURCE).groups) == ["self"]  # an encoder without a decoder


def test_attention_mask_argument_is_honoured() -> None:
    class Masked(Layer):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            x = self.embedding(ids)
            mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
            out: Tensor = self.layer(x, mask=mask)
            return out

    model = lively(Masked(MultiHeadAttention(32, 4)))
    mask = torch.ones(2, 11, dtype=torch.long)  # has the dtype of ids, but is a mask
    mask[1, :4] = 0
    data = own_profile(model, {"ids": IDS, "attention_mask": mask}).data
    alone = own_profile(model, IDS[1, 4:]).data
    assert data["n_keys"].values.tolist() == [11, 7]
    for name in ("entropy", "sink", "received", "row_sum", "first_contribution"):  # the first key is the first real one
        np.testing.assert_allclose(data[name][1, ..., :7], alone[name][0], rtol=1e-4, atol=1e-4, err_msg=name)
    with refused("inputs", match="attention_mask unknown"):
        own_profile(Layer(MultiHeadAttention(32, 4)), {"input_ids": IDS, "attention_mask": mask})


# --- modules of users -------------------------------------------------------------------------------------------------


class Mine(nn.Module):
    """A user's module that calls attention twice itself, and once in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.inner = Layer(nn.Identity())
        self.fails = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        for normalizer in (normalizers.Softmax(), normalizers.Sigmoid()):
            x = x + qkv.attend(x, x, x, mask=masks.Causal(), normalizer=normalizer)
        if self.fails:
            raise RuntimeError("on purpose")
        return x


def test_module_that_calls_attend_is_observed() -> None:
    model = lively(Mine())
    data = own_profile(model, IDS).data
    assert data["module"].values.tolist() == ["Mine", "Mine"]
    with torch.no_grad():
        x = model.embedding(IDS)[:, None]
        out, weights = qkv.attend(x, x, x, mask=masks.Causal(), return_weights=True)
        np.testing.assert_allclose(data["weights"][:, 0], weights, atol=1e-5)
        x = x + out
        scores = x @ x.mT / 4 - torch.arange(1, 12).log()[:, None]
    np.testing.assert_allclose(data["weights"][:, 1], scores.sigmoid().tril(), atol=1e-5)
    assert np.isfinite(data["lse"][:, 0]).all()
    assert np.isnan(data["lse"][:, 1]).all()


def test_layer_used_twice_is_two_layers() -> None:
    class Twice(Layer):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            out: Tensor = self.layer(self.layer(x))
            return out

    model = lively(Twice(MultiHeadAttention(32, 4)))
    for ids in (IDS, IDS[:, :1]):  # also with one query each, whose keys are not the same
        data = own_profile(model, ids).data
        assert data["layer"].values.tolist() == [0, 1]
        assert data["module"].values.tolist() == ["layer", "layer"]


def test_two_sequences_with_other_argument_names() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 32)
            self.reads, self.looks = MultiHeadAttention(32, 4), MultiHeadAttention(32, 4)
            self.writes = MultiHeadAttention(32, 4, attention=Attention(mask=masks.Causal()))

        def forward(self, question: Tensor, answer: Tensor) -> Tensor:
            x, y = self.reads(self.embedding(question)), self.writes(self.embedding(answer))
            out: Tensor = self.looks(y, x)
            return out

    groups = own_profile(lively(Reader()), {"question": IDS, "answer": TARGET}).groups
    assert {group: d["module"].values.tolist() for group, d in groups.items()} == {
        "encoder": ["reads"], "decoder": ["writes"], "cross": ["looks"],
    }  # fmt: skip


def test_attention_outside_of_qkv_is_observed() -> None:
    class Both(Layer):
        def __init__(self) -> None:
            super().__init__(MultiHeadAttention(32, 4))
            self.theirs = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.layer(self.embedding(ids))
            out: Tensor = self.theirs(x, x, x, need_weights=False)[0]
            return out

    result = own_profile(Both().eval(), IDS)
    assert result.attrs["unobserved"] == []
    assert result.attrs["sources"] == {"layer": "qkv", "theirs": "sdpa"}
    assert result.data["module"].values.tolist() == ["layer", "theirs"]


def test_hugging_face_model_inside_a_user_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = hf.build("bert"), MultiHeadAttention(hf.SIZES["hidden_size"], 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.bert(ids).last_hidden_state)
            return out

    data = own_profile(Mixed(), IDS).data
    assert data["module"].values.tolist() == [*(f"bert.encoder.layer.{i}.attention.self" for i in range(2)), "head"]
    alone = own_profile(hf.build("bert"), IDS).data
    np.testing.assert_allclose(data["entropy"][:, :2], alone["entropy"], atol=1e-5)


def test_compiled_modules_run_in_eager_mode() -> None:
    import torch._dynamo  # (what a program with compiled modules has imported)

    model = decoder()
    want = own_profile(model, IDS).data
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    got = own_profile(torch.compile(model, backend="eager"), IDS)
    assert got.attrs["model"] == "DecoderLM"
    assert got.data["module"].values.tolist() == ["blocks.0._orig_mod.attention", "blocks.1.attention"]
    np.testing.assert_array_equal(got.data["entropy"], want["entropy"])


# --- nothing stays behind ---------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "decoder": lambda: (decoder(kv_heads=2), {"ids": IDS}),
    "encoder-decoder": lambda: (encoder_decoder(), {"source": SOURCE, "target": TARGET}),
    "luong": lambda: (seq2seq("luong-dot", kind="local-p", input_feeding=True), {"source": SOURCE, "target": TARGET}),
    "bahdanau": lambda: (seq2seq("bahdanau"), {"source": SOURCE, "target": TARGET}),
    "captioner": lambda: (captioner(), {"images": IMAGES, "captions": TARGET}),
    "hard captioner": lambda: (captioner("hard"), {"images": IMAGES, "captions": TARGET}),
    "classifier": lambda: (classifier(), {"ids": SOURCE}),
    "mine": lambda: (lively(Mine()), {"tokens": IDS}),
}


def hooks(model: nn.Module) -> int:
    kept = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return sum(len(getattr(m, name)) for m in model.modules() for name in kept)


@pytest.mark.parametrize("name", MODELS)
def test_profiling_does_not_change_outputs(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.no_grad():
        before = model(**inputs)
        with observe(Observer(model)) as observer:
            during = model(**inputs)
        after = model(**inputs)
    assert observer.records
    assert torch.equal(before, after)
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-4)
    assert hooks(model) == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_are_removed_after_an_error(error: type[BaseException]) -> None:
    model = lively(Mine()).train()
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        own_profile(model, IDS)
    assert hooks(model) == 0
    assert model.training

    def run() -> None:
        with observe(Observer(model)):
            assert hooks(model) > 0
            assert not model.training
            raise error

    with pytest.raises(error):
        run()
    assert hooks(model) == 0
    assert model.training


def test_failure_inside_the_model_keeps_calls_with_their_modules() -> None:
    class Tries(Layer):
        def __init__(self) -> None:
            super().__init__(MultiHeadAttention(32, 4))
            self.mine = Mine()
            self.mine.fails = True

        def forward(self, ids: Tensor) -> Tensor:
            with pytest.raises(RuntimeError):
                self.mine(ids)
            x = self.embedding(ids)[:, None]
            qkv.attend(x, x, x)
            out: Tensor = self.layer(x[:, 0])
            return out

    with observe(Observer(Tries().eval())) as observer:
        observer.model(IDS)
    assert [r.module for r in observer.records] == ["mine", "mine", "Tries", "layer"]


def test_failing_user_hook_keeps_calls_with_their_modules() -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    class Tries(Layer):
        def forward(self, ids: Tensor) -> Tensor:
            with pytest.raises(RuntimeError):
                self.layer(ids)
            x = self.embedding(ids)[:, None]
            return qkv.attend(x, x, x)  # type: ignore[return-value]

    model = Tries(MultiHeadAttention(32, 4))
    model.layer.register_forward_pre_hook(fail)
    assert own_profile(model, IDS).data["module"].values.tolist() == ["Tries"]


def test_kernels_that_are_not_observed_are_not_intercepted() -> None:
    class MyAttention(Layer):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)[:, None]
            with watching(None):
                qkv.attend(x, x, x)
            return qkv.attend(x, x, x)  # type: ignore[return-value]

    result = own_profile(MyAttention(nn.Identity()), IDS)
    assert result.attrs["unobserved"] == []
    assert result.data.sizes["layer"] == 1


def test_calls_outside_of_the_model_are_ignored() -> None:
    model, other = decoder(), decoder()
    q = torch.randn(1, 2, 5, 8)
    with observe(Observer(model)) as observer:
        qkv.attend(q, q, q)
        other(IDS)
        model(IDS)
        qkv.attend(q, q, q, normalizer=normalizers.Sigmoid())
    assert [r.module for r in observer.records] == ["blocks.0.attention", "blocks.1.attention"]


def test_separate_forwards_are_not_joined() -> None:
    model = seq2seq("bahdanau")
    with observe(Observer(model)) as observer:
        model(SOURCE, TARGET)
        model(SOURCE, TARGET)
    assert [(r.layer, r.statistics.entropy.shape[2]) for r in observer.records] == [(0, 7), (1, 7)]


def test_layers_selects_layers() -> None:
    model = decoder()
    every, last = own_profile(model, IDS).data, own_profile(model, IDS, layers=[1]).data
    xr.testing.assert_allclose(last, every.isel(layer=[1]), rtol=1e-4, atol=1e-4)  # layer 0 ran on another kernel
    with refused("layers", match=r"0\.\.0"):
        own_profile(captioner(), {"images": IMAGES, "captions": TARGET}, layers=[1])


# --- inputs and errors ------------------------------------------------------------------------------------------------


def test_text_inputs_and_targets() -> None:
    model = lively(DecoderLM(DecoderConfig(d_model=32, layers=1, heads=2)))
    data = own_profile(model, ["one text", "and another"], tokenizer=ByteTokenizer()).data
    assert data["n_keys"].values.tolist() == [8, 11]
    assert "".join(data["query_token"][1].values) == "and another"
    both = lively(EncoderDecoder(EncoderDecoderConfig(256, 256, d_model=32, heads=2, layers=1)))
    result = own_profile(both, "the source", tokenizer=ByteTokenizer(), target="its end")
    assert "".join(result.groups["cross"]["key_token"][0].values) == "the source"
    assert "".join(result.groups["decoder"]["key_token"][0].values) == "its end"
    itself = own_profile(both, "the source", tokenizer=ByteTokenizer())
    assert "".join(itself.data["key_token"][0].values) == "the source"
    with refused("inputs", match="no tokenizer"):
        own_profile(model, "text")
    with refused("target"):
        own_profile(model, "text", tokenizer=ByteTokenizer(), target="more")


ERRORS: dict[str, tuple[Callable[[], object], str, str]] = {
    "no attention": (
        lambda: own_profile(seq2seq("none"), {"source": SOURCE, "target": TARGET}),
        "model",
        "no attention call",
    ),
    "ids": (lambda: own_profile(decoder(), IDS + 40), "inputs", r"43\.\.87"),
    "target ids": (
        lambda: own_profile(encoder_decoder(), {"source": SOURCE, "target": TARGET + 40}),
        "target",
        r"40\.\.89",
    ),
    "no ids": (lambda: own_profile(decoder(), IDS[:, :0]), "inputs", "no tokens"),
    "unknown": (lambda: own_profile(decoder(), {"ids": IDS, "x": IDS}), "inputs", "x unknown"),
    "missing": (lambda: own_profile(captioner(), {"images": IMAGES}), "inputs", "captions missing"),
    "nan": (lambda: own_profile(broken("plain"), IDS), "model", "scores that are NaN"),
    "nan sigmoid": (lambda: own_profile(broken("sigmoid"), IDS), "model", "weights that are NaN"),
    "dropout": (lambda: own_profile(Dropping(), IDS), "model", "dropout"),
}


def broken(case: str) -> nn.Module:
    model = decoder(**DECODERS[case])
    model.blocks[0].attention.in_proj.weight.data[3, 3] = torch.nan
    return model


class Dropping(Mine):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        out: Tensor = qkv.attend(x, x, x, dropout_p=0.5)  # type: ignore[assignment]
        return out


@pytest.mark.parametrize("case", ERRORS)
def test_profile_errors_name_the_argument(case: str) -> None:
    run, argument, match = ERRORS[case]
    with refused(argument, match):
        run()


# --- folders, reports, the command line -------------------------------------------------------------------------------


def test_saved_model_is_loaded(tmp_path: Path) -> None:
    model = lively(DecoderLM(DecoderConfig(d_model=32, layers=2, heads=2)))
    folder = str(checkpoint.save(model, tmp_path / "bytes"))
    loaded = load_model(folder)
    assert isinstance(loaded.model, DecoderLM)
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    got = profile(folder, "some text", progress=False)
    assert got.attrs["model"] == folder
    xr.testing.assert_identical(got.data, profile(model, "some text", tokenizer=ByteTokenizer(), progress=False).data)
    assert profile(folder, "some text", dtype="bfloat16", progress=False).attrs["dtype"] == "bfloat16"
    assert load_model(str(checkpoint.save(decoder(), tmp_path / "ids"))).tokenizer is None
    assert isinstance(load_model(str(checkpoint.save(classifier(), tmp_path / "classes"))).model, Classifier)


def test_saved_model_with_a_tokenizer_is_loaded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = checkpoint.save(decoder(), tmp_path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "some": 1, "text": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    result = profile(str(folder), "some other text", progress=False)
    assert result.data["key_token"][0].values.tolist() == ["some", "<unk>", "text"]
    (folder / "tokenizer.json").write_text("{}")
    with refused("model", match="not a tokenizer"):
        load_model(str(folder))


def test_command_profiles_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qkv.cli import main

    model = lively(DecoderLM(DecoderConfig(d_model=32, layers=2, heads=2, normalizer="sigmoid", kv_heads=1)))
    folder, out = checkpoint.save(model, tmp_path / "model"), tmp_path / "out"
    assert main(["profile", str(folder), "A text of some bytes.", "--out", str(out)]) == 0
    capsys.readouterr()
    result = Profile.load(out / "profile.qkv.zip")
    assert "".join(result.data["key_token"][0].values) == "A text of some bytes."
    assert {p.name for p in out.iterdir()} >= {"report.html", "overview.png", "profile.qkv.zip"}
    assert main(["profile", str(folder), "--tokens", "40", "--out", str(out)]) == 0
    assert Profile.load(out / "profile.qkv.zip").data.sizes["key"] == 40


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "captioner", "bahdanau", "mine"])
def test_reports_figures_and_files(name: str, tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    model, inputs = MODELS[name]()
    result = own_profile(model, inputs)
    assert len(result.groups) == (3 if name == "encoder-decoder" else 1)
    assert result.report(tmp_path / "report.html").stat().st_size > 10_000
    for figure in ("overview", "received", "entropy", "sink"):
        plt.close(getattr(result.plot, figure)())
    loaded = Profile.load(result.save(tmp_path / "own.qkv.zip"))
    for group, data in result.groups.items():
        xr.testing.assert_identical(loaded.groups[group], data)
        assert len(result.heads(group)) == data.sizes["layer"] * data.sizes["head"]
        assert len(result.tokens(5, group)) > 0


def test_one_token_text_has_figures_and_a_report(tmp_path: Path) -> None:
    model = DecoderLM(DecoderConfig(vocab_size=11, context=8, d_model=12, layers=2, heads=3)).eval()
    profile = qkv.profile(model, torch.tensor([[3]]), progress=False)
    for name in ("overview", "received", "entropy", "sink"):
        getattr(profile.plot, name)().savefig(tmp_path / f"{name}.png")
    assert profile.report(tmp_path / "report.html").stat().st_size > 1000

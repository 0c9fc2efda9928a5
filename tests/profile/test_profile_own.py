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

import hf_models as hf
import qkv
from conftest import Command, refusals
from own_objects import Heavy, Taken
from profile_fixture import OF_ONE_TEXT, by_definition
from qkv import Attention, Profile, biases, features, masks, normalizers, profile
from qkv.kernels import serving
from qkv.models import checkpoint
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.models.tokenizers import ByteTokenizer
from qkv.nn import LinearAttention, LinformerAttention, MultiHeadAttention
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.positions import Rotary
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer
from qkv_lab.models.captioner import Captioner, CaptionerConfig
from qkv_lab.models.classifier import Classifier, ClassifierConfig
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

LOCAL, VOCABULARY = 2, 50
LAYERS = (MultiHeadAttention, AdditiveAttention, LuongAttention)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


IDS, SOURCE, TARGET = tokens(2, 11), tokens(2, 9, seed=2), tokens(2, 7, seed=3)
SOURCE[1, 6:] = 0  # padding
TARGET[1, 5:] = 0
IMAGES = torch.randn(2, 1, 24, 32, generator=torch.Generator().manual_seed(4))
REAL = (SOURCE > 0).long()
BOTH = {"source": SOURCE, "target": TARGET}


def lively(model: nn.Module) -> Any:
    """In evaluation mode, with weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn * 0.3 if parameter.ndim < 2 else drawn * 1.3 / math.sqrt(parameter.shape[-1])
    return model.eval()


def decoder(**changes: Any) -> DecoderLM:
    sizes = {"vocab_size": VOCABULARY, "context": 32, "d_model": 32, "layers": 2, "heads": 4}
    return lively(DecoderLM(DecoderConfig(**sizes | changes)))


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


def check(data: xr.Dataset, weights: dict[str, Tensor], *, cross: bool = False) -> None:
    """All variables of a data set equal those computed from `weights` of its modules, by text and without padding."""
    assert data["module"].values.tolist() == list(weights)
    for layer, (module, whole) in enumerate(weights.items()):
        for text in range(data.sizes["text"]):
            one = data.isel(layer=layer, text=text)
            n_queries, n_keys = int(one["n_queries"]), int(one["n_keys"])
            null = one["sink_mass"].values[:, :n_queries] if "sink_mass" in one else 0.0
            for name, values in by_definition(whole[text, :, :n_queries, :n_keys].numpy(), null, LOCAL).items():
                got = one[name].values[:, : n_keys if name == "received" else n_queries]
                got = got[..., :n_keys] if name == "weights" else got
                if cross and name in OF_ONE_TEXT:
                    assert np.isnan(got).all(), name
                elif name == "spread":
                    np.testing.assert_allclose(got**2, values**2, atol=2e-3)
                else:
                    np.testing.assert_allclose(got, values, rtol=3e-5, atol=3e-5, err_msg=f"{name} of {module}")
            assert np.isnan(one["entropy"].values[:, n_queries:]).all()
            assert np.isnan(one["received"].values[:, n_keys:]).all()


# --- every composition ------------------------------------------------------------------------------------------------

DECODERS: dict[str, dict[str, Any]] = {
    "sink, grouped heads": {"sink": True, "kv_heads": 2},
    "key bias": {"key_bias": True},
    "off by one, one key head, rotary": {"normalizer": "off_by_one", "kv_heads": 1, "positions": "rotary"},
    "sigmoid": {"normalizer": "sigmoid"},
    "elu + 1": {"normalizer": "elu"},
    "relu, t5": {"normalizer": "relu", "positions": "t5"},
    "entmax": {"normalizer": "entmax"},
    "window, alibi": {"window": 4, "positions": "alibi"},
    "gate, norms": {"gate": "elementwise", "qk_norm": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False},
}


@pytest.mark.parametrize("case", DECODERS)
def test_decoder_profile_equals_its_weights(case: str) -> None:
    settings = DECODERS[case]
    model = decoder(**settings)
    result = own_profile(model, IDS)
    assert list(result.groups) == ["self"]
    weights = own_weights(model, lambda: model(IDS))
    check(result.data, weights)
    assert result.data["module"].values.tolist() == ["blocks.0.attention", "blocks.1.attention"]
    assert result.data.attrs["causal"] is True
    assert result.attrs["unobserved"] == []
    steps = np.arange(11) + 1
    assert (result.data["visible"] == np.minimum(steps, settings.get("window", 11))).all()
    assert np.isnan(result.data["lse"]).all() == (settings.get("normalizer", "off_by_one") != "off_by_one")
    missing = 1 - torch.stack(list(weights.values()), 1).sum(-1).numpy()
    if case.startswith(("sink", "key bias", "off by one")):
        assert missing.max() > 0.1
        np.testing.assert_allclose(result.data["sink_mass"], missing, atol=1e-5)
    else:
        assert "sink_mass" not in result.data
    assert not result.heads().drop(columns="target_share").isna().all(axis=0).any()


class Layer(nn.Module):
    """A text model around one attention layer of any kind."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layer = MultiHeadAttention(32, 4) if layer is None else layer

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.embedding(ids))
        return out


def heads(attention: Attention | None = None, **settings: Any) -> MultiHeadAttention:
    return MultiHeadAttention(32, 4, attention=attention or Attention(), **settings)


TRIANGLE = torch.ones(11, 11, dtype=torch.bool).tril()
LAYER_KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether it is causal
    "gate a head": (lambda: heads(Attention(mask=masks.Causal()), gate="head"), True),
    "dense mask": (lambda: heads(Attention(mask=TRIANGLE)), True),
    "window ahead": (lambda: heads(Attention(mask=masks.Window(3, ahead=2))), False),
    "wide values, rotary": (lambda: heads(head_dim=(6, 10), rotary=Rotary(6)), False),
    "sparsemax": (lambda: heads(Attention(normalizer=normalizers.Sparsemax())), False),
    "hard": (lambda: heads(Attention(normalizer=normalizers.Hard())), False),
    "cap": (lambda: heads(Attention(bias=biases.SoftCap(2.0), mask=masks.Causal())), True),
    "linear": (lambda: LinearAttention(32, 4, kv_heads=2), True),
    "linear, both ways": (lambda: LinearAttention(32, 4, causal=False, features=features.relu), False),
}


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_layer_profile_equals_its_weights(kind: str) -> None:
    make, causal = LAYER_KINDS[kind]
    model = lively(Layer(make()))
    result = own_profile(model, IDS)
    check(result.data, own_weights(model, lambda: model(IDS)))
    assert list(result.groups) == ["self"]
    assert result.data.attrs["causal"] is causal


@torch.no_grad()
def test_linformer_keys_are_not_tokens_and_its_padding_is_no_query() -> None:
    model = lively(Layer(LinformerAttention(32, 4, length=20, rank=5)))
    model.config = SimpleNamespace(pad=0)
    q, k, _ = model.layer.in_proj(model.embedding(SOURCE)).view(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    weights = (q @ (model.layer.e[:9].T @ k).mT / 8**0.5).softmax(-1)
    data = own_profile(model, SOURCE).groups["cross"]
    check(data, {"layer": weights}, cross=True)
    assert data["key_token"][0].values.tolist() == list("01234")
    assert data["query_token"][0].values.tolist() == [str(i) for i in SOURCE[0].tolist()]
    assert (data["n_queries"].values.tolist(), data["n_keys"].values.tolist()) == ([9, 6], [5, 5])


# --- models of two sequences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "target"), [("pre", TARGET), ("post", SOURCE.clone())], ids=["shorter", "as long"])
def test_encoder_decoder_profile_equals_its_weights(target: Tensor, place: str) -> None:
    model = encoder_decoder(place=place, positions="learned", kv_heads=2)
    groups = own_profile(model, {"target": target, "source": SOURCE}).groups
    assert list(groups) == ["encoder", "decoder", "cross"]
    weights = own_weights(model, lambda: model(SOURCE, target))
    source, queries = [9, 6], (target != 0).sum(1).tolist()
    for group, data in groups.items():
        stem, layer = ("decoder", "cross") if group == "cross" else (group, "attention")
        assert data["n_queries"].values.tolist() == (source if group == "encoder" else queries)
        assert data["n_keys"].values.tolist() == (queries if group == "decoder" else source)
        modules = [f"{stem}.blocks.{i}.{layer}" for i in range(2)]
        check(data, {name: weights[name] for name in modules}, cross=group == "cross")
        assert data.attrs["causal"] is (group == "decoder")
    words = [str(i) for i in target[1, : queries[1]].tolist()]
    assert groups["cross"]["query_token"][1].values.tolist()[: queries[1]] == words
    assert groups["cross"]["key_token"][1].values.tolist() == [str(i) for i in SOURCE[1, :6].tolist()] + [""] * 3


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("bahdanau", {}),
        ("bahdanau", {"cell": "gru"}),
        ("luong-dot", {"kind": "global", "input_feeding": True}),
        ("luong-general", {"kind": "local-m"}),
        ("luong-concat", {"kind": "local-p", "input_feeding": True}),
    ],
)
def test_recurrent_decoder_is_one_layer(attention: str, changes: dict[str, Any]) -> None:
    model = seq2seq(attention, **changes)
    result = own_profile(model, BOTH)
    assert list(result.groups) == ["cross"]
    assert [result.data.sizes[dim] for dim in ("text", "layer", "head", "query", "key")] == [2, 1, 1, 7, 9]
    with torch.no_grad():
        weights = model.alignments(SOURCE, TARGET)[:, None]
    check(result.data, {"attention": weights}, cross=True)
    assert result.attrs["unobserved"] == []
    assert result.data.attrs["causal"] is False
    assert result.data["n_queries"].values.tolist() == [7, 5]
    received = result.data["received"].sum("key")
    np.testing.assert_allclose(received, np.nansum(result.data["weights"], axis=(3, 4)), atol=1e-5)


class Stepwise(nn.Module):
    """A model that normally reads its target in one forward, here run token by token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = self.model.start(source)
        return torch.stack([self.model.step(token, state) for token in target.split(1, 1)], 1)


@pytest.mark.parametrize(
    ("attention", "kind", "map_tokens"),
    [("luong-general", "local-m", 256), ("luong-concat", "local-p", 7), ("multihead", "global", 256)],
)
def test_step_by_step_equals_one_forward(attention: str, kind: str, map_tokens: int) -> None:
    model = seq2seq(attention, kind=kind)
    settings = {"map_tokens": map_tokens, "statistics": [Heavy(), Taken()]}
    whole = own_profile(model, BOTH, **settings).groups["cross"]
    if attention == "multihead":
        check(whole, own_weights(model, lambda: model(SOURCE, TARGET)), cross=True)
    steps = own_profile(Stepwise(model), BOTH, **settings).groups["cross"]
    assert set(steps) == set(whole)
    assert ("weights" in whole) is (map_tokens == 256)
    for name in steps:
        tolerance = 2e-3 if name == "spread" else 2e-5
        np.testing.assert_allclose(steps[name], whole[name], rtol=2e-5, atol=tolerance, err_msg=str(name))
    assert steps["module"].values.tolist() == ["model.attention"]


def test_windows_over_another_text_are_not_causal() -> None:
    """p_t of untrained weights is in the middle of the source, so the source's end is masked for a short target."""
    torch.manual_seed(1)
    model = RNNSeq2Seq(RNNSeq2SeqConfig(VOCABULARY, VOCABULARY, attention="luong-dot", kind="local-p", half_width=3))
    result = own_profile(model, {"source": tokens(1, 30), "target": tokens(1, 3)})
    assert list(result.groups) == ["cross"]
    assert (result.data["weights"].values[..., 20:] == 0).all()


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


def test_attention_mask_argument_is_honoured() -> None:
    class Masked(Layer):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
            return self.layer(self.embedding(ids), mask=mask)  # type: ignore[no-any-return]

    model = lively(Masked())
    mask = torch.ones(2, 11, dtype=torch.long)  # has the dtype of ids, but is a mask
    mask[1, :4] = 0
    data = own_profile(model, {"ids": IDS, "attention_mask": mask}).data
    assert list(own_profile(classifier(), SOURCE).groups) == ["self"]  # an encoder without a decoder
    alone = own_profile(model, IDS[1, 4:]).data
    assert data["n_keys"].values.tolist() == [11, 7]
    for name in ("entropy", "sink", "received", "row_sum", "first_contribution"):  # the first key is the first real one
        np.testing.assert_allclose(data[name][1, ..., :7], alone[name][0], rtol=1e-4, atol=1e-4, err_msg=name)


# --- modules of users -------------------------------------------------------------------------------------------------


class Mine(nn.Module):
    """A user's module that calls attention twice itself, and may fail after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.fails = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        for normalizer in (normalizers.Softmax(), normalizers.Sigmoid()):
            x = x + qkv.attend(x, x, x, mask=masks.Causal(), normalizer=normalizer)
        if self.fails:
            raise RuntimeError("on purpose")
        return x


@torch.no_grad()
def test_module_that_calls_attend_is_observed() -> None:
    model = lively(Mine())
    data = own_profile(model, IDS).data
    assert data["module"].values.tolist() == ["Mine", "Mine"]
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
            return self.layer(super().forward(ids))  # type: ignore[no-any-return]

    model = lively(Twice())
    for ids in (IDS, IDS[:, :1]):  # also with one query each, whose keys are not the same
        data = own_profile(model, ids).data
        assert data["layer"].values.tolist() == [0, 1]
        assert data["module"].values.tolist() == ["layer", "layer"]


def test_attention_of_other_libraries_is_observed_beside_that_of_qkv() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = hf.build("bert"), MultiHeadAttention(hf.SIZES["hidden_size"], 4)
            self.theirs = nn.MultiheadAttention(hf.SIZES["hidden_size"], 4, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.head(self.bert(ids).last_hidden_state)
            return self.theirs(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    result = own_profile(Mixed().eval(), IDS)
    layers = [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    assert result.data["module"].values.tolist() == [*layers, "head", "theirs"]
    assert result.attrs["unobserved"] == []
    assert result.attrs["sources"] == dict.fromkeys(layers, "interface") | {"head": "qkv", "theirs": "sdpa"}
    alone = own_profile(hf.build("bert"), IDS).data
    np.testing.assert_allclose(result.data["entropy"][:, :2], alone["entropy"], atol=1e-5)


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
    "encoder-decoder": lambda: (encoder_decoder(), BOTH),
    "luong": lambda: (seq2seq("luong-dot", kind="local-p", input_feeding=True), BOTH),
    "bahdanau": lambda: (seq2seq("bahdanau"), BOTH),
    "captioner": lambda: (captioner(), {"images": IMAGES, "captions": TARGET}),
    "hard captioner": lambda: (captioner("hard"), {"images": IMAGES, "captions": TARGET}),
    "mine": lambda: (lively(Mine()), {"tokens": IDS}),
}


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
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_failures_inside_the_model_keep_calls_with_their_modules() -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    class Tries(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mine, self.hooked = Mine(), heads()
            self.mine.fails = True
            self.hooked.register_forward_pre_hook(fail)

        def forward(self, ids: Tensor) -> Tensor:
            for failing in (self.mine, self.hooked):
                with pytest.raises(RuntimeError, match="on purpose"):
                    failing(ids)
            x = self.embedding(ids)[:, None]
            with serving(None):
                qkv.attend(x, x, x)  # a kernel that is not observed
            qkv.attend(x, x, x)
            return self.layer(x[:, 0])  # type: ignore[no-any-return]

    with observe(Observer(Tries().eval())) as observer:
        observer.modules.model(IDS)
    assert [r.module for r in observer.records] == ["mine", "mine", "Tries", "layer"]


def test_calls_outside_of_the_model_are_ignored_and_separate_forwards_not_joined() -> None:
    model, other, q = seq2seq("bahdanau"), decoder(), torch.randn(1, 2, 5, 8)
    with observe(Observer(model)) as observer:
        qkv.attend(q, q, q)
        other(IDS)
        model(SOURCE, TARGET)
        qkv.attend(q, q, q, normalizer=normalizers.Sigmoid())
        model(SOURCE, TARGET)
    found = [(r.module, r.layer, r.statistics.entropy.shape[2]) for r in observer.records]
    assert found == [("attention", 0, 7), ("attention", 1, 7)]


# --- inputs and errors ------------------------------------------------------------------------------------------------


def test_text_inputs_and_targets() -> None:
    data = own_profile(decoder(vocab_size=256), ["one text", "and another"], tokenizer=ByteTokenizer()).data
    assert data["n_keys"].values.tolist() == [8, 11]
    assert "".join(data["query_token"][1].values) == "and another"
    both = lively(EncoderDecoder(EncoderDecoderConfig(256, 256, d_model=32, heads=2, layers=1)))
    result = own_profile(both, "the source", tokenizer=ByteTokenizer(), target="its end")
    assert "".join(result.groups["cross"]["key_token"][0].values) == "the source"
    assert "".join(result.groups["decoder"]["key_token"][0].values) == "its end"


def broken(**changes: Any) -> nn.Module:
    model = decoder(**changes)
    model.blocks[0].attention.in_proj.weight.data[3, 3] = torch.nan
    return model


class Dropping(Mine):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        return qkv.attend(x, x, x, dropout_p=0.5)  # type: ignore[return-value]


REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("model", "no attention call", lambda: own_profile(seq2seq("none"), BOTH)),
    ("inputs", r"43\.\.87", lambda: own_profile(decoder(), IDS + 40)),
    ("target", r"40\.\.89", lambda: own_profile(encoder_decoder(), BOTH | {"target": TARGET + 40})),
    ("inputs", "x unknown", lambda: own_profile(decoder(), {"ids": IDS, "x": IDS})),
    ("inputs", "attention_mask unknown", lambda: own_profile(Layer(), {"input_ids": SOURCE, "attention_mask": REAL})),
    ("inputs", "captions missing", lambda: own_profile(captioner(), {"images": IMAGES})),
    ("layers", r"0\.\.0", lambda: own_profile(captioner(), {"images": IMAGES, "captions": TARGET}, layers=[1])),
    ("model", "scores that are NaN", lambda: own_profile(broken(), IDS)),
    ("model", "weights that are NaN", lambda: own_profile(broken(normalizer="sigmoid"), IDS)),
    ("model", "dropout", lambda: own_profile(Dropping(), IDS)),
]

test_profile_errors_name_the_argument = refusals(REFUSALS)


# --- folders, reports, the command line -------------------------------------------------------------------------------


def test_saved_model_is_loaded_from_python_and_by_the_command(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = decoder(vocab_size=256, context=64), "A text of some bytes."
    folder = str(checkpoint.save(model, tmp_path / "bytes"))
    loaded = load_model(folder)
    assert isinstance(loaded.model, DecoderLM)
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    got = profile(folder, text, probe=False, progress=False)
    assert got.attrs["model"] == folder
    xr.testing.assert_identical(
        got.data, profile(model, text, tokenizer=ByteTokenizer(), probe=False, progress=False).data
    )
    half = load_model(folder, dtype="bfloat16").model
    assert profile(half, text, tokenizer=ByteTokenizer(), probe=False, progress=False).attrs["dtype"] == "bfloat16"
    assert load_model(str(checkpoint.save(decoder(), tmp_path / "ids"))).tokenizer is None
    assert isinstance(load_model(str(checkpoint.save(classifier(), tmp_path / "classes"))).model, Classifier)
    monkeypatch.setattr("qkv.cli.profile.FIGURES", ())
    command.succeeds("profile", folder, text, "--no-probe", "--out", tmp_path / "out")
    written = Profile.load(tmp_path / "out" / "profile.qkv.zip").data
    assert "".join(written["key_token"][0].values) == text
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"report.html", "profile.qkv.zip"}

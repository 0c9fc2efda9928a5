"""The residual stream equals the hidden states that models return, and its summaries equal definitions by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import rand, refused
from hf_models import PADDED, build, inputs
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler.capture import residual
from qkv.profiler.capture.inputs import sequences_of
from qkv.profiler.capture.residual import Residuals, attention_modules, by_stack, layer_around, observe_residual
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig

States = dict[str, list[Tensor]]


def states(model: nn.Module, run: Callable[[], object], modules: list[str] | None = None) -> States:
    """All hidden states that `observe_residual` reports, by stack and in the order of depths."""
    found: States = {}

    def keep(stack: str, depth: int, hidden: Tensor) -> None:
        assert not hidden.requires_grad
        assert depth == len(found.setdefault(stack, []))
        found[stack].append(hidden.clone())

    with observe_residual(model, attention_modules(model) if modules is None else modules, keep):
        run()
    return found


STACKS = {
    "gpt2": ["h"], "bert": ["encoder.layer"], "distilbert": ["transformer.layer"], "llama": ["layers"],
    "albert": ["encoder.albert_layer_groups.0.albert_layers"], "modernbert": ["layers"], "llama4": ["layers"],
    "t5": ["encoder.block", "decoder.block"], "bart": ["encoder.layers", "decoder.layers"],
    "whisper": ["encoder.layers", "decoder.layers"], "switch": ["encoder.block", "decoder.block"],
    "vit": None, "beit": None, "clip_text": None, "deepseek_v3": None,
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
@torch.no_grad()
def test_hidden_states_equal_those_of_hugging_face(name: str) -> None:
    model = build(name)
    told: list[Any] = []
    seen = states(model, lambda: told.append(model(**inputs(name), output_hidden_states=True)))
    kinds = ("encoder_hidden_states", "decoder_hidden_states") if len(seen) == 2 else ("hidden_states",)
    assert STACKS[name] is None or list(seen) == STACKS[name]
    for stack, kind in zip(seen.values(), kinds, strict=True):
        want = told[0][kind]
        assert len(stack) == len(want)
        for x, y in zip(stack[:-1], want[:-1], strict=True):  # models return the last after their final norm
            assert torch.equal(x, y)


@torch.no_grad()
def test_hidden_states_of_qkv_models() -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    decoder = DecoderLM(DecoderConfig(vocab_size=11, d_model=24, layers=3, heads=2)).eval()
    seen = states(decoder, lambda: decoder(ids))
    want = [decoder.embedding(ids) + decoder.positions.span(0, 7)]
    for block in decoder.blocks:
        want.append(block(want[-1]))
    assert list(seen) == ["blocks"]
    assert torch.equal(torch.stack(seen["blocks"]), torch.stack(want))
    both = EncoderDecoder(EncoderDecoderConfig(11, 13, d_model=24, heads=2, layers=2, decoder_layers=3)).eval()
    sizes = {stack: (len(x), *x[0].shape) for stack, x in states(both, lambda: both(ids, ids[:, :5])).items()}
    assert sizes == {"encoder.blocks": (3, 1, 7, 24), "decoder.blocks": (4, 1, 5, 24)}


class Layer(nn.Module):
    """A layer of a hybrid model, with or without attention."""

    def __init__(self, d: int, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.map, self.attention = nn.Linear(d, d), attention

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        x = hidden_states if self.attention is None else hidden_states + self.attention(hidden_states)
        return x + self.map(x), None


class SelfAttention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(d, d)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](x)


class Hybrid(nn.Module):
    """Layers without attention, one with attention, and one with attention only; run twice on request."""

    def __init__(self, d: int = 5, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(d), Layer(d, SelfAttention(d)), Layer(d)])
        self.pool_attention = SelfAttention(d)
        self.times = times

    def forward(self, x: Tensor, *, apart: bool = False) -> Tensor:
        given = x
        for _ in range(self.times):
            x = given if apart else x
            for layer in self.layers:
                x, _ = layer(hidden_states=x)
        return self.pool_attention(x)


def layer_of(model: nn.Module, module: str, others: Sequence[str] = ()) -> str | None:
    return layer_around(module, {module, *others, *attention_modules(model)}, model)


def test_layers_without_attention_count_and_sublayers_and_heads_do_not() -> None:
    model, x = Hybrid(), rand(2, 3, 5, dtype=torch.float32)
    assert attention_modules(model) == ["layers.1.attention", "pool_attention"]
    assert layer_of(model, "layers.1.attention.heads.0", ["layers.1.attention"]) == "layers.1"
    assert layer_of(model, "pool_attention") is None
    seen = states(model, lambda: model(x))
    assert list(seen) == ["layers"]
    assert len(seen["layers"]) == 4
    assert torch.equal(seen["layers"][0], x)
    assert torch.equal(seen["layers"][1], model.layers[0](x)[0])
    assert layer_of(build("t5"), "decoder.block.2.layer.1.EncDecAttention") == "decoder.block.2"
    assert layer_of(nn.Sequential(SelfAttention(5), SelfAttention(5)), "1") == "1"  # nothing but attention
    picture, packed = rand(2, 3, 7, 5, dtype=torch.float32), rand(11, 5, dtype=torch.float32)
    assert states(model, lambda: model(picture))["layers"][2].shape == (2, 21, 5)
    assert states(model, lambda: model(packed))["layers"][2].shape == (1, 11, 5)


def test_reused_layer_adds_depth_and_rerun_stack_is_separate() -> None:
    model, x = Hybrid(times=2), rand(2, 3, 5, dtype=torch.float32)
    assert {s: len(v) for s, v in states(model, lambda: model(x)).items()} == {"layers": 7}
    again = states(model, lambda: model(x, apart=True))
    assert {s: len(v) for s, v in again.items()} == {"layers": 4, "layers-2": 4}
    for got, want in zip(again["layers-2"], again["layers"], strict=True):
        assert torch.equal(got, want)


def test_hooks_are_removed_after_errors() -> None:
    model = Hybrid()
    with pytest.raises(ZeroDivisionError), observe_residual(model, attention_modules(model), lambda *_: None):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with refused("modules"), observe_residual(model, ["layers.1.attention", "layers.9"], lambda *_: None):
        pass  # pragma: no cover
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("padding", [None, "left", "right"])
@torch.no_grad()
def test_norms_equal_those_of_the_hidden_states(padding: str | None) -> None:
    model, batch = build("llama"), inputs("llama", padding)
    sequences = sequences_of(model, batch)
    residuals = Residuals(sequences.real_source, sequences.real_target)
    with observe_residual(model, attention_modules(model), residuals.record):
        told = model(**batch, output_hidden_states=True).hidden_states
    data = by_stack([residuals])["layers"]
    n = 37
    assert dict(data["norm"].sizes) == {"text": 2, "depth": 3, "token": n}
    starts = {None: (0, n), "left": (PADDED, n), "right": (0, n - PADDED)}
    assert data["n_tokens"].values.tolist() == [n, n - (0 if padding is None else PADDED)]
    for depth in range(2):
        for text, (first, end) in enumerate(((0, n), starts[padding])):
            want = torch.linalg.vector_norm(told[depth][text, first:end], dim=1)
            norms = data["norm"].values[text, depth]
            assert np.array_equal(norms[: end - first], want.numpy())
            assert np.isnan(norms[end - first :]).all()
            median = told[depth][text, first:end].abs().median()
            assert data["median"].values[text, depth] == median.item()


def facts(x: Tensor, real: Tensor | None = None) -> dict[str, np.ndarray]:
    residuals = Residuals({} if real is None else {x.shape[1]: real})
    residuals.record("layers", 0, x)
    return {str(name): v.values[:, 0] for name, v in by_stack([residuals])["layers"].data_vars.items()}


def test_massive_activations_by_hand() -> None:
    x = torch.zeros(3, 7, 5).fill_(-0.25)
    x[0, 4, 2], x[0, 1, 3], x[0, 4, 0] = -251, 250, 100.5  # the second is 1000 × the median, the third too small for it
    x[1, 0, 1] = 1000.0  # of a token that does not count, as all before the second and after the fifth
    x[1, 4, 4] = 40.0
    x[2] = 0.05
    x[2, 0, 0] = 100  # 2000 × the median, but not above 100
    real = torch.ones(3, 7, dtype=torch.bool)
    real[1, :2], real[1, 5:] = False, False
    got = facts(x, real)
    assert got["massive"].tolist() == [2, 0, 0]
    assert got["median"].tolist() == pytest.approx([0.25, 0.25, 0.05])
    assert got["largest"].tolist() == [[251, 250, 100.5], [40, 0.25, 0.25], [100, *[pytest.approx(0.05)] * 2]]
    assert got["largest_token"][:2, 0].tolist() == [4, 2]  # positions count from the first real token
    assert got["largest_dimension"][:2, 0].tolist() == [2, 4]
    assert got["ratio"].tolist() == pytest.approx([1004, 160, 2000])
    short = facts(torch.tensor([[[3.0, -4.0]]], dtype=torch.bfloat16))
    assert short["norm"].dtype == np.float32
    assert short["norm"].tolist() == [[5.0]]
    np.testing.assert_array_equal(short["largest"], [[4, 3, np.nan]])
    assert short["largest_token"].tolist() == [[0, 0, -1]]
    assert short["largest_dimension"].tolist() == [[1, 0, -1]]


def test_median_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for n, kind in product((1, 2, 13, 16411), ("normal", "equal", "sorted", "by dimension", "few values")):
        x = rand(n, 3, seed=n, dtype=torch.float32).abs()
        if kind == "equal":
            x.fill_(2.5)
        elif kind == "sorted":
            x = x.flatten().sort().values.view(n, 3)
        elif kind == "by dimension":
            x *= torch.tensor([1, 100, 10_000])
        elif kind == "few values":
            x = x.round()
        assert residual._median(x[None]).item() == x.median().item(), (n, kind)
    x, misled = rand(20011, dtype=torch.float32).abs()[:, None], np.sort
    monkeypatch.setattr(np, "sort", lambda sample: misled(sample)[-60:])  # a sample far above the median
    assert residual._median(x[None]).item() == x.median().item()


@torch.no_grad()
def test_cosine_is_the_mean_over_all_pairs() -> None:
    """States of one cluster and an outlier; zero states, padding and short texts have no direction."""
    x = rand(2, 13, 7, dtype=torch.float32) + 3
    x[0, 5] *= -1e4
    x[1, 3] = 0
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 11:] = False
    for text, kept in enumerate((x[0], x[1, [i for i in range(11) if i != 3]])):
        cosine = nn.functional.cosine_similarity(kept.double()[:, None], kept.double(), dim=-1)
        m = len(kept)
        want = (cosine.sum() - m) / (m * (m - 1))
        assert facts(x, real)["cosine"][text] == pytest.approx(want.item(), abs=1e-6)
    assert np.isnan(facts(torch.ones(1, 1, 4))["cosine"]).all()
    assert np.isnan(facts(torch.zeros(1, 5, 4))["cosine"]).all()


def test_joined_concatenates_runs() -> None:
    model = Hybrid()
    runs = []
    for n in (3, 7):
        residuals = Residuals()
        with observe_residual(model, attention_modules(model), residuals.record):
            model(rand(2, n, 5, seed=n, dtype=torch.float32))
        runs.append(residuals)
    data = by_stack(runs)["layers"]
    assert dict(data.sizes) == {"text": 4, "depth": 4, "token": 7, "rank": 3}
    assert data["n_tokens"].values.tolist() == [3, 3, 7, 7]
    assert np.array_equal(data["norm"].values[2:], by_stack(runs[1:])["layers"]["norm"].values)
    assert np.array_equal(data["norm"].values[:2, :, :3], by_stack(runs[:1])["layers"]["norm"].values)
    assert np.isnan(data["norm"].values[:2, :, 3:]).all()
    assert all(v.attrs["units"] and v.attrs["definition"] for v in data.data_vars.values())
    runs[1].stacks["layers"].pop()
    assert not by_stack(runs), "they have other numbers of depths"


def test_layers_of_a_pyramid_are_left_out_and_channels_are_not_tokens() -> None:
    class Block(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv2d(6, 6, stride, stride=stride), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    def norms(*strides: int) -> dict[str, Any]:
        model, residuals = nn.ModuleDict({"blocks": nn.Sequential(*map(Block, strides))}), Residuals()
        names = [f"blocks.{i}.attention" for i in range(len(strides))]
        with observe_residual(model, names, residuals.record):
            model["blocks"](image)
        return {name: data["norm"].values for name, data in by_stack([residuals]).items()}

    image = rand(2, 6, 4, 8, dtype=torch.float32)
    np.testing.assert_allclose(norms(1, 1)["blocks"][:, 0], image.norm(dim=1).flatten(1), rtol=1e-6)
    with pytest.warns(UserWarning, match="blocks are left out: its layers have 8, 32 tokens"):
        assert norms(1, 2) == {}


def test_decoder_stacks_use_the_target_mask() -> None:
    source, target = torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])
    residuals, x = Residuals({3: source}, {3: target}), rand(1, 3, 5)
    for stack in ("encoder.layers", "decoder.layers"):
        residuals.record(stack, 0, x)
    assert [int(data["n_tokens"][0]) for data in by_stack([residuals]).values()] == [2, 1]

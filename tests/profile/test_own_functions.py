"""Attention functions of a user's own: they run as they are, and are recomputed, read from their weights or refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

import hf_models as hf
import qkv
from conftest import refused
from qkv.huggingface.attention import call_of
from qkv.profiler.capture import observer as observation
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer

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
        qkv.profile(model, hf.inputs("llama"), probe=False)
    with refused("model", match="made no attention call"):  # nor are its weights taken from a second forward
        qkv.profile(model, hf.inputs("llama"), probe=False, partial=True)
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


class SelfAttention(nn.Module):
    """Its class is named as attention layers are, and it has no attribute for its number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return (torch.softmax(q @ q.mT, -1) @ q).transpose(1, 2).flatten(2)


def test_a_module_without_a_number_of_heads_is_asked_for_the_attribute() -> None:
    model = nn.Sequential(OrderedDict(layer=SelfAttention()))
    x = {"input": torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))}
    with refused("model", match="num_heads; set one"):
        qkv.profile(model, x)
    model.layer.num_heads = 4  # type: ignore[assignment]
    assert qkv.profile(model, x).data.sizes["head"] == 4


@torch.no_grad()
def test_einsum_attention_profiles() -> None:
    layer = qkv.course.EinsumAttention(32, 4)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[0] = False
    found = qkv.profile(layer, {"x": x, "mask": mask})
    want = layer(x, mask)[1]
    torch.testing.assert_close(torch.tensor(found.data["weights"].values[:, 0]), want, atol=1e-6, rtol=0)

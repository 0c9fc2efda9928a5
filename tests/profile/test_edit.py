"""`qkv.edit`: edits of heads equal hooks, eager functions and models that do the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_watch import in_threads
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import hf_models as hf
import qkv
from conftest import refused
from hf_models import main_output
from qkv import edits
from qkv.cache.evicting import policies_of
from qkv.kernels import eager
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler import everywhere
from qkv.profiler.capture.datasets import calls_of
from qkv.testing import CheckFailed, check_edit

OUTPUT = {  # the output projection of an attention module, whose input is the heads' outputs side by side
    "llama": "o_proj", "gpt2": "c_proj", "bert": "dense", "gpt_oss": "o_proj", "gpt_neox": "dense", "vit": "o_proj",
    "bart": "out_proj", "t5": "o", "whisper": "out_proj",
}  # fmt: skip
HEAD = 2


def projection(model: nn.Module, module: str, name: str) -> nn.Module:
    """The output projection of an attention module: inside it, or beside it as in BERT."""
    for root in (module, module.rpartition(".")[0]):
        found = [m for n, m in model.get_submodule(root).named_modules() if n.rpartition(".")[2] == name]
        if found:
            return found[0]
    raise AssertionError(f"{module} has no {name}")


def by_hand(layer: nn.Module, heads: int, change: Callable[[Tensor], Tensor], run: Callable[[], Tensor]) -> Tensor:
    """What `run` returns while the input of an output projection is changed for one head."""

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        parts = x.unflatten(-1, (heads, -1))  # a view
        parts[..., HEAD, :] = change(parts[..., HEAD, :].clone())
        return (x, *args[1:])

    handle = layer.register_forward_pre_hook(hook)
    out = run()
    handle.remove()
    return out


@torch.no_grad()
@pytest.mark.parametrize("name", OUTPUT)
def test_edits_equal_hooks_on_the_output_projection(name: str) -> None:
    model, inputs = hf.build(name), hf.inputs(name)
    plain = main_output(model(**inputs))
    group, data = next(iter(qkv.profile(model, inputs, probe=False, progress=False).groups.items()))
    layer, heads = data.sizes["layer"] - 1, data.sizes["head"]
    module = str(data["module"].values[layer])
    target = projection(model, module, OUTPUT[name])
    vector = torch.linspace(-1, 1, target.weight.shape[-1 if name != "gpt2" else 0] // heads)  # type: ignore[index]
    changes: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        ("mean", lambda x: x.mean(1, keepdim=True).expand_as(x)),
        (edits.Scale(-2.0), lambda x: -2 * x),
        (edits.Steer(vector), lambda x: x + vector),
    ]
    for edit, change in changes:
        with qkv.edit(model, {(group, layer, HEAD): edit}):
            got = main_output(model(**inputs))
        want = by_hand(target, heads, change, lambda: main_output(model(**inputs)))
        assert not torch.allclose(want, plain, atol=1e-4), edit
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    with qkv.edit(model, {(module, HEAD): edits.Scale(1.0)}):
        assert torch.equal(main_output(model(**inputs)), plain), "heads that are not edited changed"
    assert torch.equal(main_output(model(**inputs)), plain)


@pytest.fixture
def llama() -> Any:
    return hf.build("llama", "eager")


def off_by_one(s: Tensor) -> Tensor:
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


SQUARE = torch.ones(hf.LENGTH, hf.LENGTH, dtype=torch.bool)
FIRST_KEY = ~SQUARE
FIRST_KEY[1:, 0] = True
SEEN = torch.arange(1, hf.LENGTH + 1).log()[:, None]  # of the number of keys that each query sees
WEIGHTS: dict[tuple[int, int], tuple[edits.Edit, Callable[[Tensor], Tensor]]] = {  # by layer and head
    (0, 1): (edits.WithNormalizer(qkv.normalizers.Sigmoid().with_temperature(0.5)), lambda s: (2 * s - SEEN).sigmoid()),
    (0, 2): (edits.WithNormalizer(qkv.normalizers.Softmax(sink=0.0)), off_by_one),
    (1, 0): (edits.Temperature(2.0), lambda s: (s / 2).softmax(-1)),
    (1, 1): (edits.WithMask(qkv.masks.Window(5)), lambda s: s.masked_fill(SQUARE.tril(-5), -torch.inf).softmax(-1)),
    (1, 2): (edits.HideFirst(), lambda s: s.masked_fill(FIRST_KEY, -torch.inf).softmax(-1)),
    (1, 3): (edits.WithNormalizer(qkv.normalizers.Sigmoid(bias=0.0)), torch.sigmoid),
}


@torch.no_grad()
def test_different_edits_in_each_layer_equal_an_eager_function_with_these_weights(llama: Any) -> None:
    inputs, layers = hf.inputs("llama"), list[Tensor]()

    def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        for (layer, head), (_, formula) in WEIGHTS.items():
            if layer == module.layer_idx:
                weights[:, head] = formula(scores[:, head])
        layers.append(weights)
        return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights

    with qkv.edit(llama, {place: edit for place, (edit, _) in WEIGHTS.items()}):
        got = main_output(llama(**inputs))
        profile = qkv.profile(llama, inputs, probe=False, progress=False)
    before = AttentionInterface._global_mapping.copy()
    AttentionInterface.register("by_hand", eager)
    twin = hf.build("llama", "by_hand")
    want = main_output(twin(**inputs))
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(before)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for layer, weights in enumerate(layers):
        np.testing.assert_allclose(profile.data["weights"].values[:, layer], weights, atol=1e-5)
        shares = weights / weights.sum(-1, keepdim=True)
        if layer == 0:
            shares[:, 2] = weights[:, 2]  # the rest is on the sink
        np.testing.assert_allclose(profile.data["received"].values[:, layer], shares.sum(2), atol=1e-4)


@torch.no_grad()
def test_profile_and_watch_inside_and_outside_record_the_edited_model(llama: Any) -> None:
    inputs = hf.inputs("llama")
    plain = qkv.profile(llama, inputs, probe=False, progress=False).data["entropy"].values
    with qkv.edit(llama, {(0, HEAD): "zero"}):
        inside = qkv.profile(llama, inputs, probe=False, progress=False).data["entropy"].values
        with qkv.watch(llama) as watched:
            out = main_output(llama(**inputs))
    with qkv.watch(llama) as around, qkv.edit(llama, {(0, HEAD): "zero"}):
        again = main_output(llama(**inputs))
    assert torch.equal(out, again)
    np.testing.assert_array_equal(inside[:, 0], plain[:, 0])
    assert np.abs(inside[:, 1] - plain[:, 1]).max() > 1e-3
    for found in (watched, around):
        np.testing.assert_allclose(found.profile().data["entropy"].values, inside, atol=2e-5)


@torch.no_grad()
def test_edits_of_a_model_are_not_lost_in_contexts_of_its_parts(llama: Any) -> None:
    whole = nn.Sequential(llama)
    for one, other in ((llama, whole), (whole, llama)):
        with qkv.edit(one, {(0, 0): "zero"}):
            with refused("model"), qkv.watch(other):
                pass
            with refused("model"):
                qkv.profile(other, hf.inputs("llama"), progress=False)
        with qkv.watch(one), refused("model"), qkv.edit(other, {(0, 0): "zero"}):
            pass


def test_edits_of_weights_are_recorded_inside_a_watch_from_where_they_begin(llama: Any) -> None:
    ids = hf.inputs("llama")["input_ids"]
    change = {(0, 1): edits.HideFirst(), (1, 2): edits.Temperature(0.5), (1, 0): "sigmoid"}
    rows: list[np.ndarray] = []
    for edit in (nullcontext(), qkv.edit(llama, change)):
        with edit:
            rows.append(qkv.profile(llama, ids, probe=False, progress=False).data["weights"].values)
    with qkv.watch(llama) as throughout, qkv.edit(llama, change):
        cache = llama(ids[:, :5]).past_key_values
        for t in range(5, ids.shape[1]):
            cache = llama(ids[:, t : t + 1], past_key_values=cache).past_key_values
    np.testing.assert_allclose(throughout.profile().data["weights"].values, rows[1], atol=1e-5)
    with qkv.watch(llama) as later:
        cache = llama(ids[:, :5]).past_key_values
        with qkv.edit(llama, {(0, 1): edits.HideFirst()}):
            cache = llama(ids[:, 5:], past_key_values=cache).past_key_values
    got = later.profile().data["weights"].values[:, 0]
    np.testing.assert_allclose(got[:, :, :5], rows[0][:, 0, :, :5], atol=1e-5)
    np.testing.assert_allclose(got[:, 1, 5:], rows[1][:, 0, 1, 5:], atol=1e-5)
    np.testing.assert_allclose(got[:, 2, 5:], rows[0][:, 0, 2, 5:], atol=1e-5)


@torch.no_grad()
def test_edits_hold_in_forwards_that_watch_leaves_out_and_in_other_threads(llama: Any) -> None:
    inputs, others = hf.inputs("llama"), list[Tensor]()

    with qkv.edit(llama, {(0, HEAD): "zero"}):
        want = main_output(llama(**inputs))
        with qkv.watch(llama, every=3) as watched:
            outs = [main_output(llama(**inputs, use_cache=False)) for _ in range(3)]
        in_threads([lambda: others.append(main_output(llama(**inputs))) for _ in range(2)])
    assert all(torch.equal(out, want) for out in (*outs, *others))
    assert len([s for s in watched.sequences if s.layers]) == 1


def test_padding_does_not_count_in_means(llama: Any) -> None:
    inputs = hf.inputs("llama", "left")
    bare = {"input_ids": inputs["input_ids"][1:, hf.PADDED :]}
    with qkv.edit(llama, {(0, 0): "mean", (1, 3): edits.HideFirst()}), torch.no_grad():
        got, want = main_output(llama(**inputs))[1:, hf.PADDED :], main_output(llama(**bare))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gradients_flow_through_edits(llama: Any) -> None:
    def loss(factor: Any) -> Tensor:
        with qkv.edit(llama, {(0, HEAD): edits.Scale(factor), (1, 1): edits.Temperature(1.5)}):
            return main_output(llama(**hf.inputs("llama"))).double().square().sum()

    factor, step = torch.ones((), requires_grad=True), 1e-2
    loss(factor).backward()
    slope = (loss(1 + step) - loss(1 - step)).item() / (2 * step)
    assert factor.grad is not None
    assert factor.grad.item() == pytest.approx(slope, rel=2e-2)


@torch.no_grad()
def test_edits_hold_in_every_step_of_generation() -> None:
    model = hf.build("llama", suffix="ForCausalLM", pad_token_id=0)
    ids = hf.inputs("llama", batch=1)["input_ids"][:, :8]
    first = edits.AtTokens([0, 9], edits.Zero())
    of_heads = {(1, 0): edits.Zero(), (0, 3): edits.HideFirst(), (0, 1): edits.Values(first)}
    with qkv.edit(model, {**of_heads, (0, "mlp"): first, (1, "residual"): edits.AtTokens([3, 11], edits.Scale(9.0))}):
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        whole = model(out[:, :-1]).logits.argmax(-1)
    assert torch.equal(whole[:, 7:], out[:, 8:])
    for key, edit in {(0, 0): "mean", (0, "mlp"): "mean", (1, 1): edits.Values(edits.Mean())}.items():
        with refused("edit", match="without a cache"), qkv.edit(model, {key: edit}):
            model.generate(ids, max_new_tokens=2, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "heavy", "snapkv"])
def test_edits_hold_in_every_step_with_a_cache_of_qkv(policy: str) -> None:
    """A step has one query, which no mask restricts; a cache that holds all keys gives the logits of a forward."""
    model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4, positions="rotary")).eval()
    ids, at = torch.arange(3, 21)[None], edits.AtTokens([0, 15], edits.Zero())
    changed: Any = {(0, 1): "zero", (1, 2): edits.HideFirst(), (1, 0): edits.Values(at), (0, "mlp"): at}
    made = qkv.cache.Full(18) if policy == "full" else policies_of([policy], 18)[policy]
    state = model.start(cache=lambda: copy.deepcopy(made))
    with qkv.edit(model, changed):
        whole = model(ids)[0, 13:]
        steps = torch.cat([model.step(part, state) for part in ids.split([14, 1, 1, 1, 1], 1)])
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(steps, model(ids)[0, 13:], atol=1e-3)


@torch.no_grad()
def test_edits_of_a_cache_that_attends_in_parts_are_those_of_single_steps() -> None:
    model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4, positions="rotary")).eval()
    ids, one_by_one = torch.arange(3, 21)[None], []
    with qkv.edit(model, {(0, 0): edits.Scale(3.0), (1, 1): "zero"}):
        for size in (1, 18):
            state = model.start(cache=lambda: qkv.cache.Sinks(2, 6))
            one_by_one.append([model.step(part, state, every=True) for part in ids.split(size, 1)])
    torch.testing.assert_close(*(torch.cat(steps, 1) for steps in one_by_one), rtol=1e-4, atol=1e-5)
    with refused("edits", match="parts"), qkv.edit(model, {(1, 1): "off-by-one"}):
        model.step(ids, model.start(cache=lambda: qkv.cache.Sinks(2, 6)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_edits_of_values_and_modules_equal_hooks_at_these_tokens(name: str) -> None:
    model, ids = hf.build(name), hf.inputs(name)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding, after which positions begin
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    real, vector = mask.bool(), torch.linspace(-1, 1, model.config.hidden_size)
    second = torch.zeros_like(mask, dtype=torch.bool)
    second[0, 1] = second[1, 4] = True
    block = next(m for n, m in model.named_modules() if n in ("layers.1", "h.1"))
    for what, module in (("mlp", block.mlp), ("residual", block)):
        with qkv.edit(model, {(1, what): edits.AtTokens([1], edits.Steer(vector))}):
            got = main_output(model(**inputs))

        def added(_: nn.Module, __: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            first = torch.where(second[..., None], first + vector, first)
            return (first, *out[1:]) if isinstance(out, tuple) else first

        handle = module.register_forward_hook(added)
        want = main_output(model(**inputs))
        handle.remove()
        torch.testing.assert_close(got[real], want[real])
    call = next(c for c in calls_of(model, inputs) if c.layer == 1).call
    weights = eager.forward(call).weights
    assert weights is not None
    value = call.v[:, HEAD * call.k.shape[1] // call.q.shape[1]]
    lost = (weights[:, HEAD] * second[:, None]) @ value
    plain = qkv.profiler.head_outputs(model, inputs, [(1, HEAD)])[1, HEAD]
    with qkv.edit(model, {(1, HEAD): edits.Patch(plain - lost)}):
        want = main_output(model(**inputs))
    assert not torch.allclose(want[real], main_output(model(**inputs))[real], atol=1e-3), "Patch changes nothing"
    with qkv.edit(model, {(1, HEAD): edits.Values(edits.AtTokens([1], edits.Zero()))}):
        torch.testing.assert_close(main_output(model(**inputs))[real], want[real], atol=1e-5, rtol=1e-5)


class Halve(edits.Edit):
    def apply(self, head: edits.Head) -> Tensor:
        return head.output / 2


class Wrong(edits.Edit):
    def apply(self, head: edits.Head) -> Tensor:
        return head.output[:, :1, :1]


class Noisy(edits.Edit):
    def apply(self, head: edits.Head) -> Tensor:
        return head.output + torch.rand(())


@torch.no_grad()
def test_an_edit_of_ones_own_is_applied_and_checked(llama: Any) -> None:
    inputs = hf.inputs("llama")
    with qkv.edit(llama, {(0, 0): Halve()}):
        mine = main_output(llama(**inputs))
    with qkv.edit(llama, {(0, 0): edits.Scale(0.5)}):
        assert torch.equal(mine, main_output(llama(**inputs)))
    with refused("apply", match="Wrong: apply returned"), qkv.edit(llama, {(0, 0): Wrong()}):
        llama(**inputs)
    for edit, what in ((Wrong(), "apply returned"), (Noisy(), "second time")):
        with pytest.raises(CheckFailed, match=what):
            check_edit(edit)


def test_every_edit_fulfils_its_contract() -> None:
    for edit in (
        edits.Zero(), edits.Mean(), edits.Scale(2.0), edits.Steer(torch.ones(6)), edits.Temperature(0.5),
        edits.WithMask(qkv.masks.Window(3)), edits.WithNormalizer(qkv.normalizers.Sigmoid()), edits.HideFirst(),
        Halve(), edits.AtTokens([1], edits.Zero()), edits.Values(edits.AtTokens([0], edits.Zero())),
    ):  # fmt: skip
        check_edit(edit)


@torch.no_grad()
@pytest.mark.parametrize(
    "bad",
    [
        {(0, 9): "zero"},
        {(7, 0): "zero"},
        {("layers.7", 0): "zero"},
        {(0, 0): "remove"},
        {(0, 0): 3},
        {0: "zero"},
        {},
        {(7, "mlp"): "zero"},
        {(0, "values"): "zero"},
        {("layers.7", "output"): "zero"},
        {("embed_tokens", "output"): edits.AtTokens([0], edits.Zero())},
        {(0, "mlp"): "softmax"},
        {(0, 0): edits.AtTokens([0], edits.Temperature(2.0))},
        {(0, 0): edits.AtTokens(torch.tensor([0, 1]), edits.Zero())},  # type: ignore[arg-type]
        {(0, "mlp"): edits.Values(edits.Zero())},
    ],
)
def test_bad_edits_are_refused_and_the_model_restored(bad: Any, llama: Any) -> None:
    inputs = hf.inputs("llama")
    plain, mapping = main_output(llama(**inputs)), dict(AttentionInterface._global_mapping)
    with refused("edits"), qkv.edit(llama, bad):
        llama(**inputs)
    assert mapping == AttentionInterface._global_mapping
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    assert torch.equal(main_output(llama(**inputs)), plain)


def test_attention_that_forms_its_own_weights_is_refused() -> None:
    layer = qkv.course.EinsumAttention(32, 4)
    with refused("edits", match="forms its weights itself"), qkv.edit(layer, {(0, 0): "zero"}):
        layer(torch.randn(1, 5, 32))
    with refused("model"), qkv.edit("llama", {(0, 0): "zero"}):  # type: ignore[arg-type]
        pass


# --- models of qkv ----------------------------------------------------------------------------------------------------


def model_of(**changes: object) -> DecoderLM:
    torch.manual_seed(3)
    config = DecoderConfig(vocab_size=50, context=64, d_model=32, layers=3, heads=4, **changes)  # type: ignore[arg-type]
    model = DecoderLM(config).eval()
    for block in model.blocks:
        nn.init.normal_(block.attention.in_proj.weight, std=0.5)  # scores far from equal
    return model


def ids_of(n: int = 20) -> Tensor:
    return torch.randint(50, (1, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("softmax", {"positions": "alibi"}),
        ("off-by-one", {"positions": "rotary", "kv_heads": 2}),
        ("sigmoid", {"window": 5}),
    ],
)
@torch.no_grad()
def test_editing_all_heads_equals_a_model_built_with_the_normalizer(name: str, more: dict[str, object]) -> None:
    model, ids = model_of(**more), ids_of()
    with qkv.edit(model, everywhere(model, name)):
        result = model(ids)
    built = DecoderLM(replace(model.config, normalizer=name.replace("-", "_"))).eval()
    built.load_state_dict(model.state_dict())
    torch.testing.assert_close(result, built(ids), rtol=0, atol=1e-6)
    if name != "softmax":
        assert (result - model(ids)).abs().max() > 1e-3


@torch.no_grad()
def test_a_learned_sink_is_kept_by_a_temperature_and_removed_by_softmax() -> None:
    model, ids = model_of(sink=True), ids_of()
    nn.init.constant_(model.blocks[0].attention.composition.normalizer_sink, 2.0)
    with qkv.edit(model, {(0, 0): edits.Temperature(2.0), (0, 1): "softmax"}):
        sums = torch.tensor(qkv.profile(model, ids, progress=False, probe=False).data["row_sum"].values[0, 0])
    assert sums[0].min() < 0.9
    torch.testing.assert_close(sums[1], torch.ones(20))
    assert sums[2].min() < 0.9


@torch.no_grad()
def test_lse_and_weights_that_a_layer_returns_are_those_of_its_edits() -> None:
    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return qkv.attend(q, k, v, return_lse=True, return_weights=True)

    layer = Layer()
    inputs = torch.randn(3, 1, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    _, lse, weights = layer(*inputs)
    with qkv.edit(layer, {("Layer", 1): "off-by-one", ("Layer", 2): "zero"}):
        _, edited_lse, edited = layer(*inputs)
    torch.testing.assert_close(edited[:, [0, 2, 3]], weights[:, [0, 2, 3]], rtol=0, atol=0)
    torch.testing.assert_close(edited_lse[:, 1], torch.logaddexp(lse[:, 1], torch.tensor(0.0)))
    torch.testing.assert_close(edited[:, 1], weights[:, 1] * torch.sigmoid(lse[:, 1])[..., None])


@pytest.mark.parametrize("normalizer", ["entmax", "sigmoid"])
def test_a_temperature_divides_the_scores_of_any_normalizer(normalizer: str) -> None:
    """The same effect as smaller queries, but for one head only."""
    model = model_of(normalizer=normalizer)
    result = {}
    for temperature in (1.0, 2.0, 1e3):
        with qkv.edit(model, {(0, 0): qkv.edits.Temperature(temperature)}):
            result[temperature] = model(ids_of())
    assert torch.equal(result[1.0], model(ids_of()))
    with torch.no_grad():
        layer = model.blocks[0].attention
        for parameter in (layer.in_proj.weight, layer.in_proj.bias):
            parameter[:8] /= 2.0  # the queries of the first head
    torch.testing.assert_close(result[2.0], model(ids_of()), rtol=0, atol=1e-5)
    assert not torch.equal(result[1e3], result[2.0])

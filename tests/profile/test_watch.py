"""`qkv.watch`: what is recorded while a model generates, trains or streams equals one forward over the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import hf_models as hf
import qkv
from conftest import refused
from qkv.errors import InputError
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.generation import generate
from qkv.profiler.capture import layer
from qkv.runs import watching

OF_WHOLE_FORWARDS = {
    "query_norm", "key_norm", "value_norm", "cosine_first", "cosine_others", "first_key_angle", "key_directions",
}  # fmt: skip
IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, :4] = 0


def causal_lm(name: str = "llama", implementation: str | None = None, **settings: Any) -> Any:
    sizes = {"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None} | settings
    return hf.build(name, implementation, suffix="ForCausalLM", **sizes)


@pytest.fixture(scope="module")
def llama() -> Any:
    return causal_lm()


def tokens(profile: qkv.Profile, group: str = "self") -> Tensor:
    """The token ids of every text of a profile made without a tokenizer."""
    return torch.tensor([[int(token) for token in row] for row in profile.groups[group]["query_token"].values])


def same(got: qkv.Profile, want: qkv.Profile, *, but: set[str] = OF_WHOLE_FORWARDS) -> None:
    """All variables of `want` but some are in `got`, and equal; the square of the spread is resolved to 0.002."""
    assert set(got.groups) == set(want.groups)
    for name, data in want.groups.items():
        for variable in set(data.data_vars) - but:
            mine, other = (np.asarray(x[variable].values, float) for x in (got.groups[name], data))
            if variable == "spread":
                mine, other = mine**2, other**2
            scale = max(1.0, float(np.nanmax(np.abs(other), initial=0)))
            allowed = 2e-3 * max(1, scale / 100) if variable == "spread" else 2e-5 * scale
            np.testing.assert_allclose(mine, other, atol=allowed, rtol=0, err_msg=f"{name}: {variable}")


def watched(model: nn.Module, run: Callable[[], Any], **settings: Any) -> tuple[watching.Watched, Any]:
    """What was recorded, and the result of `run`, which is what it is without `watch`."""
    torch.manual_seed(1)
    want = run()
    after = torch.rand(1)
    torch.manual_seed(1)
    with qkv.watch(model, **settings) as found:
        got = run()
    assert torch.equal(torch.rand(1), after), "random numbers were drawn"
    assert torch.equal(got, want)
    return found, got


def whole(model: Any, ids: Tensor, mask: Tensor | None = None) -> qkv.Profile:
    """The profile of one forward, in which positions count from the first real token."""
    inputs = {"input_ids": ids}
    if mask is not None:
        more = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype)
        inputs["attention_mask"] = torch.cat([mask, more], 1)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return qkv.profile(model, inputs, probe=False, progress=False)


GENERATE: dict[str, dict[str, Any]] = {
    "sampled, static cache": {"do_sample": True, "cache_implementation": "static"},
    "beams": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0},
    "padded on the left, longer than a batch of steps": {"attention_mask": MASK, "max_new_tokens": 40},
}


@pytest.mark.parametrize("name", GENERATE)
def test_generated_rows_equal_one_forward_over_the_same_tokens(name: str, llama: Any) -> None:
    options = {"max_new_tokens": 8, "do_sample": False} | GENERATE[name]
    found, out = watched(llama, lambda: llama.generate(IDS, **options))
    got = found.profile()
    mask = options.get("attention_mask")
    ids = tokens(got) if name == "beams" else out[:, :-1]  # those that are returned are some of those that are read
    assert mask is not None or torch.equal(tokens(got), ids)
    same(got, whole(llama, ids, mask))
    assert got.attrs["sources"] == dict.fromkeys(got.data["module"].values, "interface")
    assert not got.attrs["evicted"]


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_is_watched() -> None:
    model = causal_lm("llama", "flex_attention")
    with qkv.watch(model) as found:
        model(IDS)
    same(found.profile(), whole(model, IDS))


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_tokens_that_assisted_generation_rejects_leave_no_rows(how: str, llama: Any) -> None:
    ids = IDS[:1].repeat(1, 3)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if how == "assistant":
        options = {"assistant_model": causal_lm(num_hidden_layers=1)}
    found, out = watched(llama, lambda: llama.generate(ids, max_new_tokens=12, do_sample=False, **options))
    got = found.profile()
    n = tokens(got).shape[1]
    assert torch.equal(tokens(got), out[:, :n])
    assert out.shape[1] - n <= 1
    same(got, whole(llama, tokens(got)))


def test_encoder_decoder_has_rows_of_all_three_kinds_of_attention() -> None:
    t5 = hf.build("t5", suffix="ForConditionalGeneration", num_decoder_layers=2, eos_token_id=96)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 2}
    found, _ = watched(t5, lambda: t5.generate(IDS, **options))
    got = found.profile()
    assert set(got.groups) == {"encoder", "decoder", "cross"}
    inputs = {"input_ids": IDS.repeat_interleave(2, 0), "decoder_input_ids": tokens(got, "decoder")}
    same(got, qkv.profile(t5, inputs, probe=False, progress=False))


@torch.no_grad()
def test_forwards_over_a_cache_are_one_sequence_and_others_are_their_own(llama: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(layer, "HELD", 10)  # measured in parts
    with qkv.watch(llama) as found:
        out, ids = llama(IDS), IDS
        for _ in range(3):
            new = out.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
            out = llama(new, past_key_values=out.past_key_values)
        llama(IDS, use_cache=False)
    assert len(found.sequences) == 2
    same(found.profile(0), whole(llama, ids), but={*OF_WHOLE_FORWARDS, "prefix_sink_scores"})
    same(found.profile(1), whole(llama, IDS), but=set())
    assert found.profile().data.sizes["text"] == 4


def test_every_records_the_first_forward_and_then_every_so_many(llama: Any) -> None:
    found, out = watched(llama, lambda: llama.generate(IDS, max_new_tokens=9, do_sample=False), every=3)
    got, want = found.profile().data["entropy"].values, whole(llama, out[:, :-1]).data["entropy"].values
    recorded = [*range(12), 14, 17]
    np.testing.assert_allclose(got[..., recorded], want[..., recorded], atol=1e-5)
    missing = sorted({*range(20)} - {*recorded})
    assert np.isnan(got[..., missing]).all()
    assert found.profile().data["visible_queries"].values[0, 0, 0, 0] == len(recorded)
    some, _ = watched(llama, lambda: llama.generate(IDS, max_new_tokens=2, do_sample=False), layers=[1])
    assert some.profile().data["layer"].values.tolist() == [1]


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_computes_the_same_gradients_and_random_numbers() -> None:
    model = causal_lm(attention_dropout=0.3).train()

    def step() -> Tensor:
        model.zero_grad()
        for _ in range(2):
            model(IDS, labels=IDS).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found, _ = watched(model, step)
    assert model.training
    assert len(found.sequences) == 2
    got, want = (x.groups["self"].isel(layer=[0]) for x in (found.profile(0), whole(model, IDS)))
    same(qkv.Profile({"self": got}, {}), qkv.Profile({"self": want}, {}), but=set())  # without dropout of the weights


# --- caches of qkv ----------------------------------------------------------------------------------------------------


def decoder(**settings: Any) -> DecoderLM:
    config = DecoderConfig(vocab_size=97, d_model=32, layers=2, heads=4, kv_heads=2, context=256, **settings)
    model = DecoderLM(config).eval()
    hf.enliven(model)
    return model


CACHES: dict[str, tuple[Any, Any]] = {
    "full": (None, None),
    "sliding": (lambda: qkv.cache.Sliding(8), qkv.masks.Window(8)),
    "sinks": (lambda: qkv.cache.Sinks(2, 8), qkv.masks.Prefix(2) | qkv.masks.Window(8)),
}


@pytest.mark.parametrize("name", CACHES)
def test_streaming_with_own_caches_equals_the_mask_that_they_stand_for(name: str) -> None:
    make, mask = CACHES[name]
    model, ids = decoder(positions="learned"), IDS[:1, :6]
    found, out = watched(
        model, lambda: torch.tensor(generate(model, model.start(1, cache=make), ids, max_new_tokens=14, seed=0))
    )
    got = found.profile()
    assert torch.equal(tokens(got), torch.cat([ids, out[:, :-1]], 1))
    twin = decoder(positions="learned", **({} if mask is None else {"attention": qkv.Attention(mask=mask)}))
    twin.load_state_dict(model.state_dict())
    want = qkv.profile(twin, tokens(got), probe=False, progress=False)
    same(got, want, but=OF_WHOLE_FORWARDS | ({"prefix_sink_scores"} if name != "full" else set()))
    assert got.attrs["evicted"] == (name != "full")


def test_keys_that_heavy_hitters_evict_receive_no_more_attention() -> None:
    model = decoder()
    with qkv.watch(model) as found:
        state = model.start(1, cache=lambda: qkv.cache.HeavyHitters(6, 2))
        ids = IDS[:1]
        for token in ids.split(1, 1):
            model.step(token, state)
    data = found.profile().data
    np.testing.assert_allclose(data["received"].values.sum(-1), 12.0, atol=1e-4)  # every row adds up to 1
    assert data["visible"].values[0, 0, 0].tolist() == [*range(1, 9), *[8.0] * 4]
    weights = data["weights"].values[0]
    assert ((weights > 0).sum(-1) <= 8).all()
    assert (np.triu(weights, 1) == 0).all()


# --- models that attend step by step ----------------------------------------------------------------------------------


class OneQuery(nn.Module):
    num_heads = 1

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        scores = query[:, None] @ memory[:, None].mT
        return (torch.softmax(scores, -1) @ memory[:, None])[:, 0]


OneQuery.__name__ = "OneQueryAttention"


class Bahdanau(nn.Module):
    """A decoder that attends to its memory once for each target token, by a softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(97, 16), OneQuery()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embedding(source)
        return torch.cat([self.attention(state, memory) for state in self.embedding(target).split(1, 1)], 1)


@torch.no_grad()
def test_step_wise_decoder_has_one_layer_with_a_row_for_each_step() -> None:
    torch.manual_seed(0)
    model, source, target = Bahdanau(), IDS[:, :7], IDS[:, 7:10]
    want = torch.softmax(model.embedding(target) @ model.embedding(source).mT, -1).numpy()
    with qkv.watch(model) as found:
        model(source, target)
    for got in (found.profile(), qkv.profile(model, {"source": source, "target": target}, progress=False)):
        data = got.groups["cross"]
        assert (data.sizes["layer"], data.sizes["query"]) == (1, 3)
        np.testing.assert_allclose(data["weights"].values[:, 0, 0], want, atol=1e-6)


class OfPictures(nn.Module):
    """Reads no token ids; the first layer has one query for each text, and the second has as many as keys."""

    num_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mT[:, None]
        one = nn.functional.scaled_dot_product_attention(x[:, :, :1], x, x)
        return one + nn.functional.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_a_layer_with_one_query_of_a_model_without_ids_is_watched() -> None:
    model, x = OfPictures(), torch.randn(2, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    with qkv.watch(model) as found:
        model(x)
    x = x.flatten(2).mT
    data = found.profile().groups["cross"]
    np.testing.assert_allclose(data["weights"].values[:, 0, 0], (x[:, :1] @ x.mT / 8**0.5).softmax(-1), atol=1e-6)


# --- errors and restoration -------------------------------------------------------------------------------------------


def test_watch_inside_a_watch_is_refused(llama: Any) -> None:
    errors: list[str | None] = []

    def run() -> None:
        with pytest.raises(InputError) as error:
            whole(llama, IDS)
        errors.append(error.value.argument)

    with qkv.watch(llama) as found:
        with refused("model", match="watched already"), qkv.watch(llama):
            pass
        with refused("watched", match="inside the context"):
            found.profile()
        in_threads([run])
    assert errors == ["model"], "another thread profiles the model that is watched"
    with refused("every"), qkv.watch(llama, every=0):
        pass
    with refused("local_window"), qkv.watch(llama, local_window=0):
        pass
    with refused("model"), qkv.watch("llama"):  # type: ignore[arg-type]
        pass


def test_everything_is_restored_after_an_exception(llama: Any) -> None:
    mapping, caches = dict(AttentionInterface._global_mapping), list[Any]()

    def run() -> None:
        with qkv.watch(llama):
            caches.append(llama(IDS).past_key_values)
            llama(torch.full((1, 3), 10_000))  # ids beyond the vocabulary

    with pytest.raises(IndexError):
        run()
    assert mapping == AttentionInterface._global_mapping
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    assert "crop" not in vars(caches[0])
    found, _ = watched(llama, lambda: llama(IDS).logits.data)
    assert len(found.sequences) == 1


def in_threads(runs: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_watch_in_two_threads_records_each_model_alone() -> None:
    models, found = [causal_lm() for _ in range(2)], {}

    def run(i: int) -> None:
        with qkv.watch(models[i]) as found[i], torch.no_grad():
            for _ in range(3):
                models[i](IDS[i : i + 1])

    in_threads([lambda: run(0), lambda: run(1)])
    for i in range(2):
        assert len(found[i].sequences) == 3
        same(found[i].profile(0), whole(models[i], IDS[i : i + 1]), but=set())


def test_contexts_that_end_in_another_order_leave_a_watch_or_torch_compile_off() -> None:
    graphs: list[object] = []
    compiled = torch.compile(torch.sin, backend=lambda graph, _: graphs.append(graph) or graph)
    first, second = (qkv.watch(causal_lm()) for _ in range(2))
    for end in (first.__enter__, second.__enter__):
        end()
    for end in (first.__exit__, second.__exit__):
        compiled(torch.zeros(2))
        assert not graphs, "compiled code cannot be observed"
        end(None, None, None)
    compiled(torch.zeros(2))
    assert graphs
    torch.compiler.reset()


def test_one_model_profiled_by_several_threads_gives_each_the_right_profile(llama: Any) -> None:
    texts, found = [IDS[:1], IDS[1:], IDS[:1, :5]], dict[int, qkv.Profile]()
    in_threads([lambda i=i: found.update({i: whole(llama, texts[i])}) for i in range(3)])  # type: ignore[misc]
    for i, text in enumerate(texts):
        same(found[i], whole(llama, text), but=set())

"""Situations from public reports: what is recorded is what one forward over the same tokens and masks gives.

Each test is a kind of situation: gradient checkpointing, caches that a user copies or prunes, padding over many steps,
images, edits that speak of positions, masks of finite numbers, texts of padding only, beams, runs that must go on.
"""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_watch import OF_WHOLE_FORWARDS, causal_lm, same, tokens, whole
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, OpenAIGPTConfig, OpenAIGPTLMHeadModel, StaticCache

import hf_models as hf
import hf_zoo
import qkv
import qkv.huggingface.attention as hf_attention
from conftest import covering, refused

IDS = torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(1))
LEFT, RIGHT, INNER = (torch.ones(2, 12, dtype=torch.long) for _ in range(3))
LEFT[1, :5] = 0
RIGHT[1, 7:] = 0
INNER[1, 3:6] = 0
SIDES = {"left": LEFT, "right": RIGHT, "inner": INNER}


# --- gradient checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradients_of_edits_under_checkpointing_are_those_without(reentrant: bool, inside: bool) -> None:
    edits: Any = {(0, 2): "zero", (1, 1): "mean", (1, 3): qkv.edits.HideFirst(), (0, 0): qkv.edits.Temperature(0.5)}
    first = qkv.edits.AtTokens([0, 2], qkv.edits.Scale(0.5))
    edits |= {(0, "mlp"): first, (0, "residual"): qkv.edits.Scale(1.5), (1, 0): qkv.edits.Values(first)}

    def gradients(checkpoint: bool) -> dict[str, Tensor]:
        model = causal_lm().train()
        if checkpoint:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with qkv.edit(model, edits):
            loss = model(IDS, attention_mask=LEFT, labels=IDS, use_cache=False).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    want, got = gradients(False), gradients(True)
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, atol=1e-5, rtol=1e-4)


# --- caches -----------------------------------------------------------------------------------------------------------


def step_by_step(model: Any, cache: Any, ids: Tensor, by: int = 1) -> None:
    for part in ids.split(by, 1):
        model(part, past_key_values=cache)


@torch.no_grad()
def test_a_copy_of_a_cache_is_a_fork_of_its_text_and_the_users_object() -> None:
    model, more, others = causal_lm(), IDS[:, :3] + 1, IDS[:, 4:8]
    with qkv.watch(model) as watched:
        cache = DynamicCache(config=model.config)
        model(IDS, past_key_values=cache)
        mine = copy.deepcopy(cache)
        step_by_step(model, cache, more)
        step_by_step(model, mine, others, by=2)
        last = copy.deepcopy(mine)
        last.crop(-4)
        torch.save(cache, io.BytesIO())
        step_by_step(model, last, more[:, :1])
    assert (cache.get_seq_length(), mine.get_seq_length(), last.get_seq_length()) == (15, 16, 13)
    assert not any(callable(x) for x in vars(cache).values())
    for i, new in enumerate((more, others, more[:, :1])):
        same(watched.profile(i), whole(model, torch.cat([IDS, new], 1)))


def pruned_by_user(cache: Any, keep: Tensor) -> None:
    for i, layer in enumerate(cache.layers):
        chosen = keep.roll(i, -1)[..., None].expand(len(layer.keys), layer.keys.shape[1], -1, layer.keys.shape[3])
        layer.keys, layer.values = layer.keys.gather(2, chosen), layer.values.gather(2, chosen)


@torch.no_grad()
@pytest.mark.parametrize("in_forward", [False, True], ids=["between forwards", "by a hook of the forward"])
def test_keys_of_a_pruned_cache_stay_at_their_tokens(in_forward: bool) -> None:
    model, n = causal_lm(), IDS.shape[1]
    keep = torch.tensor([[[0, 1, 2, 9, 10, 11], [11, 3, 5, 0, 8, 2]]]).expand(2, -1, -1)  # other keys in each head

    def run(model: Any, **settings: Any) -> list[Any]:
        cache, outputs = DynamicCache(config=model.config), []
        handle = None
        if in_forward:
            handle = model.model.layers[-1].register_forward_hook(lambda *_: pruned_by_user(cache, keep))
        model(IDS, past_key_values=cache)
        if handle is None:
            pruned_by_user(cache, keep)
        else:
            handle.remove()
        for t in range(3):
            at = torch.full((2, 1), n + t)
            outputs.append(model(IDS[:, t : t + 1], past_key_values=cache, position_ids=at, **settings))
        return outputs

    with qkv.watch(model) as watched:
        run(model)
    want = run(causal_lm("llama", "eager"), output_attentions=True)
    got = watched.profile().data["weights"].values
    assert watched.profile().attrs["evicted"]
    for t, out in enumerate(want):
        for layer, weights in enumerate(out.attentions):
            heads = weights.shape[1] // keep.shape[1]
            at = torch.cat([keep.roll(layer, -1), torch.arange(n, n + t + 1).expand(2, 2, -1)], 2)
            expected = torch.zeros(2, weights.shape[1], n + 3)
            expected.scatter_(2, at.repeat_interleave(heads, 1), weights[:, :, 0])
            np.testing.assert_allclose(got[:, layer, :, n + t], expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("change", ["select", "repeat", "rows", "static", "offloaded", "reset"])
def test_batch_items_that_a_cache_selects_are_followed(change: str) -> None:
    model = causal_lm()
    cache: Any = DynamicCache(config=model.config)
    if change in ("static", "reset"):
        cache = StaticCache(config=model.config, max_cache_len=32)
    items = torch.tensor([1, 1, 0]) if change == "repeat" else torch.tensor([1, 0])
    with qkv.watch(model) as watched:
        model(IDS, past_key_values=cache)
        if change == "select":
            cache.batch_select_indices(items)
        elif change == "repeat":
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([2, 3, 0]))
        elif change == "static":
            cache.reorder_cache(items)
        elif change == "reset":
            cache.reset()
            items = torch.arange(2)
        else:  # what a user may do with the tensors
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[items].clone(), layer.values[items].clone()
        step_by_step(model, cache, IDS[items, 3:6])
    before = IDS[items] if change != "reset" else IDS[:, :0]
    same(watched.profile(-1), whole(model, torch.cat([before, IDS[items, 3:6]], 1)))


@torch.no_grad()
def test_a_cache_that_was_filled_before_is_said_and_the_run_goes_on() -> None:
    model, cache = causal_lm(), DynamicCache()
    model(IDS, past_key_values=cache)
    twin = copy.deepcopy(cache)
    want = model(IDS[:, :1], past_key_values=twin).logits
    with qkv.watch(model) as watched:
        assert torch.equal(model(IDS[:, :1], past_key_values=cache).logits, want)
        model(IDS, use_cache=False)
    with pytest.warns(UserWarning, match="filled outside"):
        same(watched.profile(), whole(model, IDS), but=set())


# --- masks over many steps --------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "side", "kind"),
    covering(["mistral", "llama4", "gemma3", "llama"], list(SIDES), ["dynamic", "static", "chunks"]),
)
def test_rows_of_padded_texts_are_those_of_one_forward(name: str, side: str, kind: str) -> None:
    model = causal_lm(name)
    cache: Any = StaticCache(config=model.config, max_cache_len=24) if kind == "static" else None
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids = torch.cat([IDS, IDS[:, :6] + 1], 1)
    real = torch.cat([SIDES[side], torch.ones(2, 6, dtype=torch.long)], 1)
    places = (real.cumsum(1) - 1).clamp(min=0)
    with qkv.watch(model) as watched:
        start = 0
        for n in [5, 7, 1, 1, 3, 1] if kind == "chunks" else [12, *[1] * 6]:
            at = slice(start, start + n)
            model(ids[:, at], attention_mask=real[:, : at.stop], position_ids=places[:, at], past_key_values=cache)
            start += n
    same(watched.profile(), whole(model, ids, real))


@torch.no_grad()
def test_a_mask_that_changes_between_steps_holds_for_its_own_step() -> None:
    model, eager = causal_lm(), causal_lm("llama", "eager")
    want, rows = [], []
    for one, run in ((eager, want), (model, rows)):
        cache = DynamicCache(config=one.config)
        with qkv.watch(model) as watched:
            out = one(IDS, past_key_values=cache, output_attentions=one is eager)
            run.append(out.attentions[0] if one is eager else None)
            for t in range(4):
                mask = torch.ones(2, 13 + t, dtype=torch.long)
                mask[0, t : t + 2] = 0
                at = torch.full((2, 1), 12 + t)
                out = one(IDS[:, t : t + 1], attention_mask=mask, position_ids=at, past_key_values=cache,
                          output_attentions=one is eager)  # fmt: skip
                run.append(out.attentions[0] if one is eager else None)
    got = watched.profile().data
    for t, weights in enumerate(want[1:]):
        np.testing.assert_allclose(got["weights"].values[:, 0, :, 12 + t, : 13 + t], weights[:, :, 0], atol=1e-5)
        assert got["visible"].values[:, 0, 0, 12 + t].tolist() == [11 + t, 13 + t]


# --- images -----------------------------------------------------------------------------------------------------------


OF_IMAGES = {"image", "image_sink", "image_rows", "patch"}  # which `qkv.profile` alone knows


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3_vlm", "llava", "mllama"])
def test_watch_of_images_is_the_profile_of_the_same_inputs(name: str) -> None:
    model, batch = hf_zoo.build(name), hf_zoo.inputs(name)
    want = model(**batch)[0]
    with qkv.watch(model) as watched:
        assert torch.equal(model(**batch)[0], want)
    same(watched.profile(), qkv.profile(model, batch, probe=False, progress=False), but=OF_IMAGES)


@torch.no_grad()
def test_steps_after_an_image_continue_the_cache_that_the_model_made() -> None:
    model = transformers.LlavaForConditionalGeneration(hf_zoo.build("llava").config).eval()
    inputs = hf_zoo.inputs("llava")
    with qkv.watch(model) as watched:
        out = model(**inputs)
        new = out.logits[:, -1:].argmax(-1)
        model(input_ids=new, past_key_values=out.past_key_values)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], new], 1)
    want = qkv.profile(model, inputs, probe=False, progress=False)
    same(watched.profile(), want, but=OF_WHOLE_FORWARDS | OF_IMAGES)


def test_returned_texts_are_counted_among_texts_and_not_among_images() -> None:
    model = transformers.LlavaForConditionalGeneration(hf_zoo.build("llava").config).eval()
    with qkv.watch(model) as watched:
        model.generate(**hf_zoo.inputs("llava"), max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert watched.profile().attrs["returned"] == [0, 1]


# --- edits that speak of positions ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "llama"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_edits_speak_of_positions_in_the_text(name: str, kind: str) -> None:
    model = causal_lm(name)
    cache: Any = StaticCache(config=model.config, max_cache_len=24) if kind == "static" else None
    cache = DynamicCache(config=model.config) if cache is None else cache
    edits: Any = {
        (0, 1): qkv.edits.HideFirst(), (1, 0): qkv.edits.HideFirst(), (1, 2): qkv.edits.WithMask(qkv.masks.Window(4)),
        (0, 0): qkv.edits.WithMask(~qkv.masks.Prefix(2) | qkv.masks.Window(3)),
    }  # fmt: skip
    places = (LEFT.cumsum(1) - 1).clamp(min=0)
    plain = model(IDS, attention_mask=LEFT, position_ids=places, use_cache=False).logits[:, -1]
    with qkv.edit(model, edits):
        want = model(IDS, attention_mask=LEFT, position_ids=places, use_cache=False).logits[:, -1]
        start = 0
        for n in (9, 1, 2):
            at = slice(start, start + n)
            got = model(IDS[:, at], attention_mask=LEFT[:, : at.stop], position_ids=places[:, at],
                        past_key_values=cache).logits[:, -1]  # fmt: skip
            start += n
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, want, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("keep", [[0, 1, 2, 9, 10, 11], [2, 3, 9, 11], [0, 1, 2, 3, 4]], ids=str)
def test_edits_speak_of_positions_in_a_text_whose_cache_was_pruned(keep: list[int], watch: bool) -> None:
    model, edits = causal_lm(), {(0, 1): qkv.edits.HideFirst(), (1, 2): qkv.edits.WithMask(qkv.masks.Window(5))}
    ids, visible = torch.cat([IDS, IDS[:, :1]], 1), torch.ones(13, 13).tril().bool()
    visible[12, [i for i in range(12) if i not in keep]] = False
    with qkv.edit(model, edits):  # type: ignore[arg-type]
        want = model(ids, attention_mask=visible.expand(2, 1, -1, -1), use_cache=False).logits[:, -1]
    with qkv.watch(model) if watch else nullcontext(), qkv.edit(model, edits):  # type: ignore[arg-type]
        cache = model(IDS).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        got = model(ids[:, 12:], past_key_values=cache, position_ids=torch.full((2, 1), 12)).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# --- masks of finite numbers, and texts without tokens ----------------------------------------------------------------


LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.float32)}


@torch.no_grad()
def test_masks_of_each_kind_of_layer_are_honoured() -> None:
    model, causal = causal_lm("gemma3"), torch.ones(12, 12).tril().bool()
    added = {
        f"{kind}_attention": torch.zeros(2, 1, 12, 12).masked_fill(~(causal & causal.T.triu(-last)), -torch.inf)
        for kind, last in (("full", 12), ("sliding", 3))
    }
    inputs: Any = {"input_ids": IDS, "attention_mask": added}
    got = qkv.profile(model, inputs, probe=False, progress=False).data
    want = causal_lm("gemma3", "eager")(**inputs, output_attentions=True).attentions
    np.testing.assert_allclose(got["weights"].values, torch.stack(want, 1), atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "low"),
    [("eager", -1e4), ("sdpa", -1e9), ("eager", LOWEST[torch.float16]), ("sdpa", LOWEST[torch.float32])],
)
def test_finite_numbers_that_mask_count_as_minus_infinity(implementation: str, low: float) -> None:
    model, causal = causal_lm("llama", implementation), torch.ones(12, 12).tril().bool()

    def profile(low: float) -> qkv.Profile:
        mask = torch.zeros(2, 1, 12, 12).masked_fill(~causal, low)
        return qkv.profile(model, {"input_ids": IDS, "attention_mask": mask}, progress=False, probe=False)

    got, want = profile(low), profile(-torch.inf)
    same(got, want, but=set())
    assert got.data.attrs["causal"] is want.data.attrs["causal"] is True


@torch.no_grad()
@pytest.mark.parametrize("side", SIDES)
def test_padding_that_a_mask_of_pairs_tells_is_padding(side: str) -> None:
    model, mask = causal_lm(), SIDES[side].bool()
    pairs = torch.ones(12, 12).tril().bool() & mask[:, None, None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with qkv.edit(model, {(0, 1): qkv.edits.HideFirst()}):
        with qkv.watch(model) as watched:
            model(IDS, attention_mask=pairs, position_ids=positions, use_cache=False)
        want = whole(model, IDS, mask.long())
        inputs = {"input_ids": IDS, "attention_mask": torch.where(pairs, 0.0, -torch.inf), "position_ids": positions}
        same(qkv.profile(model, inputs, progress=False, probe=False), want, but=set())
    same(watched.profile(), want)
    strict = {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 12, 12).tril(-1).bool()}  # no token sees itself
    assert qkv.profile(model, strict, progress=False, probe=False).data["n_keys"].values.tolist() == [12, 12]


@torch.no_grad()
def test_a_text_of_padding_only_is_refused_or_left_out() -> None:
    model, mask = causal_lm(), torch.tensor([[1] * 12, [0] * 12])
    with refused("inputs", match="only padding in text 1"):
        qkv.profile(model, {"input_ids": IDS, "attention_mask": mask}, progress=False)
    with qkv.watch(model) as watched:
        model(IDS, attention_mask=mask, use_cache=False)
    with pytest.warns(UserWarning, match="1 have no token"):
        same(watched.profile(), whole(model, IDS[:1]), but=set())


# --- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_returned_beams_are_texts_of_the_profile(name: str) -> None:
    model = (
        hf.build("t5", suffix="ForConditionalGeneration", num_decoder_layers=2, eos_token_id=11)
        if name == "t5"
        else causal_lm(eos_token_id=[11, 12, 13, 14, 15, 16])
    )
    with qkv.watch(model) as watched:
        out = model.generate(IDS, num_beams=4, num_return_sequences=3, max_new_tokens=12, do_sample=False)
    got = watched.profile()
    assert len(got.attrs["returned"]) == len(out) == 6
    group = "decoder" if name == "t5" else "self"
    for number, (text, row) in enumerate(zip(got.attrs["returned"], out.tolist(), strict=True)):
        if name == "t5":  # decoders of different sources may write the same
            assert got.groups["encoder"]["query_token"].values[text].tolist() == [*map(str, IDS[number // 3].tolist())]
        name = str(got.groups[group]["text"].values[text])  # of the first row with this text
        assert got.attrs["returned"].index(text) == int(name.removeprefix("returned "))
        read = [int(x) for x in got.groups[group]["query_token"].sel(text=name).values if x]
        assert row[: len(read)] == read
        assert all(x in (0, 11) for x in row[len(read) + 1 :])
        if name == "llama":
            mine = got.groups[group]["weights"].values[text, :, :, : len(read), : len(read)]
            want = whole(model, torch.tensor([read])).data["weights"].values[0]
            np.testing.assert_allclose(mine, want, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("returned", [1, 2])
def test_beams_of_ids_without_the_first_tokens_are_texts_of_the_profile(returned: int) -> None:
    """Whisper leaves out the tokens that it begins with."""
    torch.manual_seed(0)
    config = hf_zoo.build("whisper").config
    config.init_std = 0.5  # else all beams repeat one token
    model = transformers.WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(2, 16, 64)
    with qkv.watch(model) as watched:
        out = model.generate(sound, num_beams=3, num_return_sequences=returned, max_new_tokens=6)
    got = watched.profile()
    start = torch.full((len(out), 1), config.decoder_start_token_id)
    inputs = {"input_features": sound.repeat_interleave(returned, 0), "decoder_input_ids": torch.cat([start, out], 1)}
    want = qkv.profile(model, inputs, probe=False, progress=False).groups["decoder"]["entropy"].values[..., :6]
    entropy = got.groups["decoder"]["entropy"].values[got.attrs["returned"]]
    np.testing.assert_allclose(entropy[..., :6], want, atol=1e-3)


@pytest.mark.parametrize("beams", [1, 2])
def test_forwards_besides_a_generation_are_not_what_it_returned(beams: int) -> None:
    model, outs = causal_lm(), list[Tensor]()

    def asks_again(ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            return scores + model(ids[:, -3:]).logits[:, -1]

    def run(at: int) -> None:
        options = {"num_beams": beams, "logits_processor": [asks_again], "max_new_tokens": 4, "do_sample": False}
        outs.append(model.generate(IDS[at : at + 1], **options))

    with qkv.watch(model) as watched:
        run(0)
        thread = threading.Thread(target=run, args=(1,))
        thread.start()
        thread.join()
    names = watched.profile().data["query_token"].values
    for text, out in zip(watched.profile().attrs["returned"], outs, strict=True):
        assert [int(x) for x in names[text] if x] == out[0, :-1].tolist()


def test_a_cache_that_the_model_does_not_use_joins_no_texts() -> None:
    config = OpenAIGPTConfig(vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = OpenAIGPTLMHeadModel(config).eval()
    with qkv.watch(model) as watched:
        out = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert watched.profile().attrs["returned"] == [4, 5]
    same(watched.profile(2), whole(model, out[:, :-1]), but=set())


# --- runs that end in another way -------------------------------------------------------------------------------------


def stopped(model: Any, error: type[BaseException], run: Callable[[], Any]) -> None:
    """Run until the first layer ends, as if by the keyboard or by an error."""

    def stop(*_: Any) -> None:
        raise error

    hook = model.model.layers[0].register_forward_hook(stop)
    with pytest.raises(error):
        run()
    hook.remove()


@torch.no_grad()
def test_a_run_after_one_that_was_interrupted_is_recorded_and_edited() -> None:
    model, hide = causal_lm(), {(0, 1): qkv.edits.HideFirst(), (1, 0): "zero"}
    with qkv.edit(model, hide):
        want = model(IDS).logits
    with qkv.edit(model, hide):
        stopped(model, KeyboardInterrupt, lambda: model(IDS[:, :5]))
        assert torch.equal(model(IDS).logits, want)
    with qkv.watch(model) as watched:
        stopped(model, KeyboardInterrupt, lambda: model(IDS[:, :5]))
        out = model.generate(IDS, max_new_tokens=3, do_sample=False)
    same(watched.profile(1), whole(model, out[:, :-1]))


@torch.no_grad()
def test_a_forward_that_ended_early_is_left_out_of_the_profile_and_said() -> None:
    model = causal_lm()
    with qkv.watch(model) as watched:
        stopped(model, RuntimeError, lambda: model(IDS))
        model(IDS, use_cache=False)
    with pytest.warns(UserWarning, match="sequence 0"):
        same(watched.profile(), whole(model, IDS), but=set())
    assert watched.profile(0).data.sizes["layer"] == 1


@torch.no_grad()
def test_a_forward_inside_of_a_forward_is_a_text_of_its_own() -> None:
    model, ran = causal_lm(), list[Tensor]()

    def asks(*_: Any) -> None:
        if not ran:
            ran.append(IDS)
            model(IDS[:, 3:9], use_cache=False)

    hook = model.model.layers[0].register_forward_hook(asks)
    with qkv.watch(model) as watched:
        model(IDS, use_cache=False)
    hook.remove()
    found = {p.data.sizes["query"]: p for p in map(watched.profile, range(2))}
    for ids in (IDS, IDS[:, 3:9]):
        same(found[ids.shape[1]], whole(model, ids), but=set())


def test_autocast_of_a_run_is_that_of_its_calls_and_not_of_the_statistics() -> None:
    model, eager = causal_lm(), causal_lm(implementation="eager")
    with qkv.watch(model) as watched, torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    data = watched.profile().data
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = torch.stack(eager(IDS, output_attentions=True).attentions, 1)
    np.testing.assert_allclose(data["weights"].values, want.float(), atol=5e-2)
    entropy = torch.special.entr(torch.from_numpy(data["weights"].values)).sum(-1)
    np.testing.assert_allclose(data["entropy"].values, entropy, atol=1e-5)


# --- runs that qkv must not stop --------------------------------------------------------------------------------------


def test_a_run_in_another_thread_is_recorded() -> None:
    model, outs = causal_lm(), list[Tensor]()
    with qkv.watch(model) as watched:
        for _ in range(2):
            thread = threading.Thread(
                target=lambda: outs.append(model.generate(IDS, max_new_tokens=3, do_sample=False))
            )
            thread.start()
            thread.join()
    same(watched.profile(0), whole(model, outs[0][:, :-1]))
    assert len(watched.sequences) == 2


def test_gradients_of_each_text_by_vmap_are_those_without_a_watch() -> None:
    model = causal_lm("llama", "eager")
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Any:
        return torch.func.functional_call(model, weights, (ids[None],), {"labels": ids[None]}).loss

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))
    want = gradients(weights, IDS)
    with qkv.watch(model) as watched:
        got = gradients(weights, IDS)
        model(IDS)
    assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.warns(UserWarning, match="vmap"):
        same(watched.profile(), whole(model, IDS))


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_models_with_a_bias_by_position_generate_in_every_way(options: dict[str, Any]) -> None:
    t5 = hf.build("t5", suffix="ForConditionalGeneration", num_decoder_layers=2, eos_token_id=96)
    ids = IDS[:1].repeat(1, 2)
    run: Callable[[], Tensor] = lambda: t5.generate(ids, max_new_tokens=9, do_sample=False, **options)  # noqa: E731
    want = run()
    with qkv.watch(t5) as watched:
        assert torch.equal(run(), want)
    got = watched.profile()
    inputs = {"input_ids": ids, "decoder_input_ids": tokens(got, "decoder")}
    same(got, qkv.profile(t5, inputs, probe=False, progress=False), but=OF_WHOLE_FORWARDS)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["wraps the unbound method", "takes any arguments", "partial"])
def test_a_wrapper_in_place_of_forward_changes_what_a_profile_reads(kind: str) -> None:
    """As nnsight, decorators and accelerate put on the object."""
    model, plain = causal_lm(), whole(causal_lm(), IDS)
    own, bound = type(model).forward, model.forward

    def forward(*args: Any, **named: Any) -> Any:
        return bound(*args, **named)

    unbound, partial = functools.wraps(own)(forward), functools.partial(own, model)
    model.forward = {"wraps the unbound method": unbound, "takes any arguments": forward, "partial": partial}[kind]
    same(whole(model, IDS), plain, but=set())
    with qkv.watch(model) as watched:
        model(IDS, use_cache=False)
    same(watched.profile(), plain, but=set())


@torch.no_grad()
def test_a_wrapper_around_a_model_is_refused() -> None:
    """As an object of nnsight is."""
    model, plain = causal_lm(), whole(causal_lm(), IDS)
    wrapper: Any = SimpleNamespace(_module=model)
    same(whole(wrapper, IDS), plain, but=set())
    with qkv.watch(wrapper) as watched, qkv.edit(wrapper, {(0, 1): qkv.edits.Scale(1.0)}):
        model(IDS, use_cache=False)
    same(watched.profile(), plain, but=set())


class Prompted(nn.Module):
    """Reads learned vectors before its tokens, as PEFT's prompt tuning, and keeps keys of both in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.prompt = causal_lm(), nn.Parameter(torch.ones(3, 64))

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        states = self.inner.get_input_embeddings()(input_ids)
        states = torch.cat([self.prompt.expand(len(states), -1, -1), states], 1)
        return self.inner(inputs_embeds=states, past_key_values=past_key_values, use_cache=True)


@torch.no_grad()
def test_vectors_before_the_tokens_of_a_text_are_taken_for_a_cache_from_elsewhere() -> None:
    model = Prompted().eval()
    with qkv.watch(model) as watched:
        cache = model(IDS).past_key_values
    same(watched.profile(), qkv.profile(model, IDS, probe=False, progress=False), but=OF_WHOLE_FORWARDS)
    with qkv.watch(model) as watched:
        cache = model(IDS).past_key_values
        model(IDS, cache)
    with pytest.warns(UserWarning, match="not recorded: forwards with DynamicCache"):
        watched.profile()


@torch.no_grad()
def test_models_run_beyond_the_positions_of_their_training() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = causal_lm(max_position_embeddings=8, rope_parameters=rope)
    with qkv.watch(model) as watched:
        model(IDS, use_cache=False)
    with pytest.warns(UserWarning, match="expected at most 8, for which LlamaForCausalLM was trained"):
        same(watched.profile(), whole(model, IDS), but=set())


@torch.no_grad()
def test_a_model_of_images_is_profiled_on_text_alone() -> None:
    model = hf_zoo.build("llava")
    got = qkv.profile(model, {"input_ids": IDS % 90}, probe=False, progress=False)
    assert list(got.groups) == ["text"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", range(3))
def test_random_runs_equal_eager_attention(number: int) -> None:
    from fuzz.runs import mismatch

    assert mismatch(11, number) is None


@pytest.mark.parametrize("number", range(4))
def test_random_runs_of_torchs_layers_are_what_torch_computes(number: int) -> None:
    from fuzz.zoo import mismatch

    assert mismatch("torch", 0, number) is None


# --- shapes and programs ----------------------------------------------------------------------------------------------

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": qkv.masks.Window(3)},
    "prefix": {"mask": qkv.masks.Prefix(2) | qkv.masks.Causal()},
    "alibi": {"bias": qkv.biases.ALiBi()},
    "sigmoid": {"normalizer": qkv.normalizers.Sigmoid()},
    "sink": {"normalizer": qkv.normalizers.Softmax(sink=0.0)},
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("kernel", ["auto", "tiled", "eager", "reference"])
def test_tensors_without_numbers_give_shapes(kernel: str, name: str) -> None:
    x = torch.empty(2, 4, 10, 8, device="meta", requires_grad=True)
    out = qkv.attend(x, x, x, kernel=kernel, **COMPOSITIONS[name])
    assert out.is_meta
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad is not None
    with FakeTensorMode():
        fake = torch.randn(2, 4, 10, 8)
        assert qkv.attend(fake, fake, fake, kernel=kernel, **COMPOSITIONS[name]).shape == x.shape


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_exported_and_traced_layers_compute_what_the_layer_does() -> None:
    attention = qkv.Attention(**COMPOSITIONS["alibi"], **COMPOSITIONS["sink"])
    layer = qkv.nn.MultiHeadAttention(32, 4, attention=attention).eval()
    x, other = torch.randn(2, 1, 10, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for program in (torch.export.export(layer, (x,)).module(), torch.jit.trace(layer, (x,))):
            torch.testing.assert_close(program(other), layer(other), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_torch_cannot_record_is_refused() -> None:
    x = torch.randn(1, 10, 32)
    layer = qkv.nn.MultiHeadAttention(32, 4, attention=qkv.Attention(normalizer=qkv.normalizers.Sparsemax())).eval()
    for record in (torch.export.export, torch.jit.trace):
        with refused("normalizer"):
            record(layer, (x,))


# --- causality that a user has changed --------------------------------------------------------------------------------


def turned(name: str, implementation: str, suffix: str) -> Any:
    """A decoder that attends both ways, or an encoder that does not, by `is_causal` of its modules alone."""
    model = hf.build(name, implementation, suffix=suffix)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = not module.is_causal
    return model


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "suffix"), [("llama", "ForCausalLM"), ("gpt2", "LMHeadModel"), ("bert", "Model")])
def test_changed_causality_of_modules_acts_where_it_acts_in_the_model(
    name: str, suffix: str, padded: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = turned(name, implementation, suffix)
    inputs = {"input_ids": IDS} | ({"attention_mask": RIGHT} if padded else {})
    real = RIGHT.bool() if padded else torch.ones(2, 12, dtype=torch.bool)
    want, acts = model(**inputs)[0], implementation == "sdpa" and not padded
    got = qkv.profile(model, inputs, probe=False, progress=False)
    assert got.attrs["checks"][0]["difference"] < 1e-5
    assert got.data.attrs["causal"] is (acts is (name == "bert"))
    # The oracle: with all other masks the weights are those of the class, or of the other causality.
    plain = hf.build(name, "eager", suffix=suffix)
    pairs = torch.ones(12, 12, dtype=torch.bool).tril() if got.data.attrs["causal"] else torch.ones(12, 12).bool()
    pairs = (pairs & real[:, None, None]) if padded else pairs.expand(2, 1, -1, -1)
    own = {"input_ids": IDS, "attention_mask": torch.where(pairs, 0.0, torch.finfo(torch.float32).min)}
    weights = torch.stack(plain(**own, output_attentions=True).attentions, 1)
    rows = np.nan_to_num(got.data["weights"].values)[0]
    np.testing.assert_allclose(rows, weights[0], atol=2e-5)
    with qkv.watch(model) as watched:
        assert torch.equal(model(**inputs)[0], want)
    same(watched.profile(), got, but=set())
    torch.testing.assert_close(
        qkv.huggingface.use(copy.deepcopy(model))(**inputs)[0][real], want[real], atol=1e-4, rtol=1e-4
    )
    if acts:  # the check can fail: it calls the model's own function with the model's own arguments
        monkeypatch.setattr(hf_attention, "causality", lambda module, _: not module.is_causal)
        with refused("model", match="sdpa_attention_forward, whose output differs"):
            qkv.profile(turned(name, implementation, suffix), inputs, probe=False, progress=False)


@torch.no_grad()
def test_changed_causality_with_a_static_cache_sees_what_the_model_sees() -> None:
    model, runs = turned("llama", "sdpa", "ForCausalLM"), []
    for _ in range(2):
        cache = StaticCache(config=model.config, max_cache_len=16)
        runs.append([model(part, past_key_values=cache).logits for part in IDS.split([10, 1, 1], 1)])
        qkv.huggingface.use(model)
    torch.testing.assert_close(runs[1], runs[0], atol=1e-4, rtol=1e-4)

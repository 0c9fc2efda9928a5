"""Eviction: the lost mass equals brute force over dense weights, and the loss equals that of a model with a mask."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import hf_models as hf
import qkv
from conftest import Command, enlarged, oracle, refusals
from own_objects import MeanAttention
from qkv.cache import HeavyHitters
from qkv.cache.evicting import policies_of
from qkv.engine import Call
from qkv.huggingface import evicting
from qkv.huggingface.attention import attend, routed
from qkv.kernels import changing
from qkv.masks import Causal, Dense, Prefix, Window
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.models.pretrained import from_weights, tell_rotary
from qkv.profiler.analyses.eviction import (
    Eviction,
    divided,
    eviction,
    expiry,
    held_keys,
    layer_costs,
    mass_lost,
    nats_of,
)
from qkv.profiler.analyses.needle import FACTS, needle
from qkv.profiler.capture.datasets import calls_of

FIRST = 2
POLICIES = ("window", "sinks", "heavy", MeanAttention)
ONLINE = ("heavy", MeanAttention, "snapkv", "pyramid", "tova", "keydiff", "knorm", "expected")


def model(**parts: Any) -> DecoderLM:
    settings: dict[str, Any] = {"vocab_size": 17, "d_model": 48, "layers": 2, "heads": 6, "kv_heads": 2, "context": 512}
    return enlarged(DecoderLM(DecoderConfig(**settings | parts)), 0.3)


def text(n: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(17, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("parts", "policies"), [
    ({"positions": "rotary"}, POLICIES), ({"sink": True, "window": 9}, POLICIES[:2]),
    ({"normalizer": "sigmoid"}, POLICIES),
])  # fmt: skip
def test_mass_lost_equals_dense_weights(parts: dict[str, Any], policies: tuple[Any, ...], tile4: None) -> None:
    caches = {
        (name, budget): one for budget in (5, 8, 17) for name, one in policies_of(policies, budget, FIRST).items()
    }
    for seen in calls_of(model(**parts), {"ids": text(17)}):
        given = seen.call.user
        weights = oracle(given.q, given.k, given.v, mask=given.mask, normalizer=given.normalizer)[2][0].numpy()
        shares = weights / weights.sum(-1, keepdims=True) if "normalizer" in parts else weights
        found = mass_lost(seen, {setting: one.fresh() for setting, one in caches.items()})
        query, key = np.indices((17, 17))
        for (name, budget), mass in found.items():
            held = (key < FIRST) | (key > query - budget + FIRST) if name == "sinks" else key > query - budget
            if name in ("heavy", "mean"):
                ends = expiry(seen.call, caches[name, budget].fresh())[0].repeat_interleave(3, 0).numpy()
                held = query < ends[:, None]
            expected = (shares * ~held).sum(-1)
            np.testing.assert_allclose(mass[0].numpy(), expected, rtol=1e-9, atol=1e-12)
            assert budget == 17 or expected.max() > 0.01


def test_padding_is_left_out() -> None:
    lm = hf.build("llama", suffix="ForCausalLM").double()
    batch = hf.inputs("llama", "left")
    whole = eviction(lm, batch, budgets=(5, 11), policies=("window", "heavy"), run=False)
    real = [ids[keep.bool()][None] for ids, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    parts = [eviction(lm, ids, budgets=(5, 11), policies=("window", "heavy"), run=False).mass for ids in real]
    n = np.array([ids.shape[1] for ids in real])
    expected = (n[0] * parts[0]["mass_lost"] + n[1] * parts[1]["mass_lost"]) / n.sum()
    np.testing.assert_allclose(whole.mass["mass_lost"], expected, rtol=1e-9)
    assert whole.attrs["tokens"] == n.sum()


D, GROUP = 6, 3
FREQUENCIES = 10_000.0 ** (-np.arange(0, D, 2) / D)


def rotation(at: int) -> np.ndarray:
    """The matrix that rotates a vector to a position, with pairs (i, i + D/2)."""
    cos, sin = np.diag(np.cos(at * FREQUENCIES)), np.diag(np.sin(at * FREQUENCIES))
    return np.block([[cos, -sin], [sin, cos]])


def worth_of(policy: str, a: Any, q: Any, k: Any, v: Any, held: list[int], t: int, window: int, last: int) -> Any:
    """The worth of held keys by the papers' formulas, in loops, after t queries; the last keys stay anyway.

    `a` (group, queries, keys), or of all heads for TOVA; queries before rotation (group, n, d), keys and values (n, d).
    """
    if policy == "window":
        return np.array(held, float)
    if policy == "sinks":
        return np.array([np.inf if j < FIRST else j for j in held])
    if policy == "heavy":
        return np.array([a[:, :t, j].sum() for j in held])
    if policy == "mean":
        return np.array([a[:, :t, j].sum() / (t - j) for j in held])
    if policy == "knorm":
        return np.array([-np.sqrt((k[j] ** 2).sum()) for j in held])
    if policy == "keydiff":
        anchor = np.mean([k[j] / np.linalg.norm(k[j]) for j in held], 0)
        return np.array([-k[j] @ anchor / np.linalg.norm(k[j]) / np.linalg.norm(anchor) for j in held])
    if policy == "tova":
        return np.array([a[:, t - 1, j].mean() for j in held])
    if policy == "expected":
        future = np.mean([rotation(p) for p in range(t, t + 512)], 0)
        later, found = [i for i, j in enumerate(held) if j >= 4], np.full(len(held), np.inf)
        shares = np.zeros((GROUP, len(later)))
        for h in range(GROUP):
            some = q[h, 4:t] / np.sqrt(D) if t > 4 else np.zeros((1, D))
            mean, sigma = future @ some.mean(0), future @ np.cov(some.T, bias=True) @ future.T
            scores = [mean @ k[held[i]] + k[held[i]] @ sigma @ k[held[i]] / 2 for i in later]
            shares[h] = np.exp(scores) / np.exp(scores).sum()
        found[later] = shares.mean(0) * [np.linalg.norm(v[held[i]]) for i in later]
        return found
    votes = [a[:, t - window : t, j].sum() if i < len(held) - last else 0 for i, j in enumerate(held)]
    return np.array([sum(votes[max(0, i - 2) : i + 3]) / 5 for i in range(len(votes))])


@pytest.mark.parametrize("policy", ["window", "sinks", *ONLINE])
@pytest.mark.parametrize("budget", [4, 9, 12])
def test_policies_evict_by_the_formulas_of_their_papers(policy: Any, budget: int) -> None:
    """Token by token, and after a prompt; q and k come rotated to their positions."""
    g, n, heads = torch.Generator().manual_seed(3), 29, 2
    q, k, v = (torch.randn(h, n, D, generator=g, dtype=torch.float64).numpy() for h in (heads * GROUP, heads, heads))
    plain, turn = 3 * q.reshape(heads, GROUP, n, D), np.array([rotation(t) for t in range(n)])
    q, k = np.einsum("tij,htj->hti", turn, 3 * q), np.einsum("tij,htj->hti", turn, k)
    call = Call.of(*(torch.tensor(x)[None] for x in (q, k, v)), Causal())
    [(name, cache)] = policies_of([policy], budget, FIRST).items()
    cache.rotary = qkv.positions.Rotary(D)
    recent = {"heavy": budget - budget // 2, "mean": budget - budget // 2, "snapkv": min(32, budget // 2),
              "pyramid": min(8, budget // 2)}.get(name, 1)  # fmt: skip
    scores = np.einsum("hgtd,hjd->hgtj", q.reshape(heads, GROUP, n, D), k) / np.sqrt(D)

    def kept(a: np.ndarray, head: int, held: list[int], t: int, last: int, most: int) -> list[int]:
        if len(held) <= most:
            return held
        of = a.reshape(heads * GROUP, n, n) if name == "tova" else a[head]
        worth = worth_of(name, of, plain[head], k[head], v[head], held, t, recent, last)
        old = sorted(range(len(held) - last), key=lambda i: (worth[i], held[i]))
        return sorted(set(held) - {held[i] for i in old[: len(held) - most]})

    ends = expiry(call, cache.fresh())[0].numpy()
    a = np.zeros((heads, GROUP, n, n))
    held = [[0] * 0 for _ in range(heads)]
    for t in range(n):
        before = [kept(a, head, held[head], t, recent - 1, budget - 1) for head in range(heads)]
        for head in range(heads):
            held[head] = [*before[head], t]
            row = np.exp(scores[head, :, t, held[head]])
            a[head][:, t, held[head]] = (row / row.sum(0)).T
            assert {j for j in range(t + 1) if t < ends[head, j]} == set(held[head]), (head, t)
    a = np.exp(scores) * np.tri(n)
    a /= a.sum(-1, keepdims=True)
    cache.hold(qkv.Attention(mask=Causal()), call.q, call.k, call.v)
    for head in range(heads):
        found = cache.key_positions(budget, 1)[0, head].tolist()
        assert sorted(found) == kept(a, head, list(range(n)), n, recent, budget)


@pytest.mark.parametrize("policy", ["window", "sinks", *ONLINE])
def test_a_forward_under_masks_equals_a_run_with_the_caches(policy: Any) -> None:
    """A model of Hugging Face runs under masks, the same model of qkv through the caches; without rotary positions."""
    theirs, ids = hf.build("gpt2", suffix="LMHeadModel").double(), hf.inputs("gpt2", batch=1)["input_ids"]
    ours = from_weights(theirs.config.to_dict(), theirs.state_dict())
    [cache] = policies_of([policy], 9).values()
    tell_rotary(theirs, [cache])
    nats = [nats_of(lm, ids, cache.for_layers(ours.config.layers), lambda tokens: None)[0] for lm in (theirs, ours)]
    for lm in (theirs, ours):  # an edit changes the calls of the model, not those that find what is evicted
        with qkv.edit(lm, {(1, 1): "zero"}):
            nats += nats_of(lm, ids, cache.for_layers(ours.config.layers), lambda tokens: None)
    assert nats[::2] == pytest.approx(nats[1::2], rel=1e-9)
    assert abs(nats[0] - nats[2]) > 1e-4
    assert abs(nats[0] - nats_of(ours, ids, None, lambda tokens: None)[0]) > 1e-4


@pytest.mark.parametrize("policy", ["window", "sinks", *ONLINE])
def test_generation_with_evicted_keys_equals_a_forward_in_which_they_are_masked(policy: Any) -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM").double(), hf.inputs("llama", batch=1)["input_ids"]
    n, prompt = ids.shape[1], 14
    visible = [torch.ones(lm.config.num_key_value_heads, n, n, dtype=torch.bool).tril() for _ in lm.model.layers]
    with evicting(lm, policy, 8, first=FIRST) as cache:
        outs = [lm(ids[:, :prompt], past_key_values=cache).logits]
        for t in range(prompt, n):
            outs.append(lm(ids[:, t : t + 1], past_key_values=cache).logits)
            for layer, one in enumerate(cache.layers):
                held = one.held._buffers["positions"][0, :, : one.held.length]
                visible[layer][:, t] = torch.zeros_like(visible[layer][:, t]).scatter_(1, held, True)
    left = iter(visible)
    group = lm.config.num_attention_heads // lm.config.num_key_value_heads

    def masked(call: Call) -> Call:
        seen = next(left).repeat_interleave(group, 0)
        return dataclasses.replace(call, mask=Dense(seen[None]))

    with torch.no_grad(), changing(masked), routed(lm, attend):
        expected = lm(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected[:, -1], lm(ids).logits[:, -1], atol=1e-4)


@pytest.mark.parametrize("policy", ["snapkv", "heavy"])
def test_a_watch_and_edits_inside_see_the_keys_that_are_held(policy: str) -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM").double(), hf.inputs("llama", batch=1)["input_ids"][:, :18]
    outs: list[Tensor] = []
    hook = lm.model.layers[1].register_forward_pre_hook(lambda _, args: outs.append(args[0]))
    at_15 = {(0, "mlp"): qkv.edits.AtTokens([15], qkv.edits.Steer(torch.ones(lm.config.hidden_size)))}
    with evicting(lm, policy, 8) as cache, qkv.watch(lm) as watched:
        for part in ids.split([14, 1, 1, 1, 1], 1):
            lm(part, past_key_values=cache)
        held = cache.layers[0].held._buffers["positions"][0]
    with evicting(lm, policy, 8) as cache, qkv.edit(lm, at_15):
        for part in ids.split([14, 1, 1, 1, 1], 1):
            lm(part, past_key_values=cache)
    hook.remove()
    weights = watched.profile().data["weights"].sel(layer=0).values.reshape(-1, 18, 18)[:, 17]
    for head, row in enumerate(weights):
        assert set(np.flatnonzero(row)) == set(held[head * len(held) // len(weights)].tolist())
        assert row.sum() == pytest.approx(1)
    changes = [float((b - a).mean()) for a, b in zip(outs[:5], outs[5:], strict=True)]
    assert changes[:3] == pytest.approx([0, 0, 1])


def test_generation_with_room_for_all_keys_is_that_of_the_model() -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM"), hf.inputs("llama", batch=1)["input_ids"][:, :9]
    for policy in ("window", "sinks", *ONLINE):
        for options in ({}, {"num_beams": 3}):
            settings = {"do_sample": False, "max_new_tokens": 8, **options}
            with evicting(lm, policy, 400) as cache:
                found = lm.generate(ids, past_key_values=cache, **settings)
            assert found.tolist() == lm.generate(ids, **settings).tolist()


def characters(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    return {"input_ids": [3 + ord(one) % 90 for one in text]}


def test_a_hidden_fact_is_asked_for_after_the_text_was_evicted() -> None:
    lm = hf.build("llama", suffix="ForCausalLM", max_position_embeddings=512)
    ids = torch.randint(3, 90, (1, 80), generator=torch.Generator().manual_seed(7))
    policies = [one for one in ("window", *ONLINE) if one != "pyramid"]
    found = needle(lm, ids, tokenizer=characters, policies=policies, budgets=(12, 400), progress=False)
    for at, (place, code) in enumerate(FACTS):
        known = f"secret pass code of the {place}"
        asked = f"\n\nQuestion: What is the {known}?\nAnswer: The {known} is {code}"
        fact, question = (
            torch.tensor([characters(part, add_special_tokens=False)["input_ids"]])
            for part in (f"\n\nThe {known} is {code}.\n\n", asked)
        )
        start = int((at + 0.5) / 5 * (80 - fact.shape[1]))
        text = torch.cat([ids[:, :start], fact, ids[:, start : 80 - fact.shape[1]], question], 1)
        with torch.no_grad():
            logits = lm(text).logits[0, -6:-1]
        expected = nn.functional.cross_entropy(logits, text[0, -5:]).item()
        here = found[found["depth"] == (at + 0.5) / 5]
        few = here["budget"].eq(12).fillna(value=False)
        assert (abs(here[few]["nats"] - expected) > 1e-4).all()
        np.testing.assert_allclose(here[~few]["nats"], [expected] * (1 + len(policies)), rtol=1e-5)
        assert set(here[~few]["right"]) == {bool((logits.argmax(-1) == text[0, -5:]).all())}


@torch.no_grad()
def test_the_cost_of_a_layer_is_the_change_of_its_output_beside_the_residual_stream() -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM").double(), hf.inputs("llama", batch=1)["input_ids"]
    caches = list(policies_of(["sinks", "knorm"], 7, FIRST).values())
    found = layer_costs(lm, ids, caches, lambda *done, **notes: None)
    residual = lm(ids, output_hidden_states=True).hidden_states
    for at, seen in enumerate(calls_of(lm, {"input_ids": ids})):
        given, project = seen.call.user, lm.model.layers[at].self_attn.o_proj
        for column, cache in enumerate(caches):
            masks = (given.mask, given.mask & held_keys(seen.call, cache.fresh()))
            whole, less = (
                project(oracle(given.q, given.k, given.v, mask=mask)[0].transpose(1, 2).flatten(2)) for mask in masks
            )
            share = (whole - less).square().sum(-1) / residual[at].square().sum(-1)
            assert found[at, column] == pytest.approx(float(share.mean()), rel=1e-9)


def test_keys_are_divided_so_that_convex_costs_are_least() -> None:
    rng = np.random.default_rng(2)
    slopes = -np.sort(rng.random((3, 2)), axis=1)[:, ::-1]
    costs = np.stack([-slopes.sum(1), -slopes[:, 1]], 1)  # with 2, 8 and 32 keys, equally far apart in logarithms
    every = np.array([keys for keys in itertools.product(range(2, 33), repeat=3) if sum(keys) == 30])
    total = sum(np.interp(np.log(every[:, i]), np.log([2, 8, 32]), [*costs[i], 0]) for i in range(3))
    keys = divided(costs, [2, 8], 32, 10)
    assert sum(keys) == 30
    best = every[int(np.argmin(total))].tolist()
    assert total[every.tolist().index(keys)] == pytest.approx(total.min(), abs=1e-9), (keys, best)


def test_advised_budgets_are_measured_on_other_texts_and_taken_by_generation() -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM").double(), hf.inputs("llama", batch=3)["input_ids"]
    found = eviction(lm, ids, policies=["knorm"], budgets=[10], advise=True, progress=False)
    assert found.loss is not None
    [advice] = found.attrs["advice"]
    keys, layers = advice["keys"], len(lm.model.layers)
    assert (sum(keys), len(keys), found.attrs["texts"]) == (10 * layers, layers, 2)
    [cache] = policies_of(["knorm"], 10).values()
    nats = nats_of(lm, ids[1:], [cache.resized(one) for one in keys], lambda tokens: None)
    measured = found.loss.set_index("policy")["nats"]
    assert measured["knorm advised"] == pytest.approx(sum(nats) / (2 * (ids.shape[1] - 1)), rel=1e-9)
    assert measured["knorm advised"] != measured["knorm"]
    with evicting(lm, "knorm", keys) as held:
        lm.generate(ids[:1], past_key_values=held, do_sample=False, max_new_tokens=3)
    assert [layer.held.length for layer in held.layers] == keys
    with pytest.raises(qkv.InputError, match="keys has 1 numbers, expected"), evicting(lm, "knorm", [10]):
        pass
    for texts, policy, match in ((ids[:1], "knorm", "expected several"), (ids, "pyramid", "divides keys itself")):
        with pytest.raises(qkv.InputError, match=match):
            eviction(lm, texts, policies=[policy], budgets=[10], advise=True, progress=False)


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with the interface of kvpress 0.5.5, whose import changes transformers, too."""
    module = ModuleType("kvpress")
    module.__spec__ = ModuleSpec("kvpress", None)

    class ScorerPress:
        compression_ratio = 0.0

        def post_init_from_model(self, model: Any) -> None:
            self.heads = model.config.num_attention_heads

        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            raise NotImplementedError

        def compress(self) -> None: ...

        def forward_hook(self) -> None: ...

    class KeyDiffPress(ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, *others: Any) -> Any:
            anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(2, keepdim=True)
            return -torch.cosine_similarity(keys, anchor, dim=-1)

    class LastQueryPress(ScorerPress):
        """The weights of the last query in the mean of heads, as TOVA: it computes the query anew."""

        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            q = module.q_proj(hidden_states[:, -1:]).unflatten(2, (self.heads, -1)).transpose(1, 2)
            cos, sin = (x[:, None, -1:] for x in kwargs["position_embeddings"])
            q = q * cos + torch.cat([-q[..., q.shape[3] // 2 :], q[..., : q.shape[3] // 2]], 3) * sin
            assert attentions is None
            scores = q @ keys.repeat_interleave(self.heads // keys.shape[1], 1).mT / keys.shape[3] ** 0.5
            return scores.softmax(-1).mean(1).expand(keys.shape[:3])

    class PrefillPress(ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, *others: Any) -> Any:
            assert hidden_states.shape[1] == keys.shape[2], "PrefillPress only supports prefill"
            return -keys.norm(dim=-1)

    class PyramidPress(KeyDiffPress):
        def compress(self) -> None: ...

    class OfPress(KeyDiffPress):
        def __init__(self, press: Any) -> None: ...

    class AdaPress: ...

    for one in (ScorerPress, KeyDiffPress, LastQueryPress, PrefillPress, PyramidPress, OfPress, AdaPress):
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "kvpress", module)
    return module


def test_a_press_of_kvpress_keeps_the_keys_that_it_scores_highest(kvpress: ModuleType) -> None:
    """Keys by position, and hidden states of all tokens: the same result as policies that do not need them."""
    lm, ids = hf.build("llama", suffix="ForCausalLM").double(), hf.inputs("llama")["input_ids"][:, :18]
    names = ["keydiff", "kvpress:KeyDiff", "tova", "kvpress:LastQuery"]
    found = eviction(lm, ids, policies=names, budgets=[8], progress=False)
    assert found.loss is not None
    lost = found.mass.pivot_table(index=["budget", "layer", "head"], columns="policy", values="mass_lost")
    nats = found.loss.pivot_table(index="budget", columns="policy", values="nats")
    for ours, theirs in (names[:2], names[2:]):
        np.testing.assert_allclose(lost[theirs], lost[ours], rtol=1e-9)
        np.testing.assert_allclose(nats[theirs], nats[ours], rtol=1e-9)
    held = []
    for name in names[2:]:
        with evicting(lm, name, 8) as cache:
            lm.generate(ids[:, :14], past_key_values=cache, do_sample=False, max_new_tokens=6)
        held.append([layer.held._buffers["positions"].sort(-1)[0] for layer in cache.layers])
    torch.testing.assert_close(*held)
    assert not hasattr(lm.model.layers[0].self_attn, "rotary_emb")


@pytest.mark.parametrize(("name", "match"), [
    ("Ada", "AdaPress has no score"), ("Scorer", "has no score"), ("Pyramid", "its own method compress"),
    ("Of", "made of press"), ("KeyDif", "expected some of kvpress:KeyDiff.*did you mean 'kvpress:KeyDiff'"),
    ("Prefill", "kvpress says AssertionError: PrefillPress only supports prefill.*--needle"),
])  # fmt: skip
def test_a_press_that_cannot_be_a_policy_is_refused(kvpress: ModuleType, name: str, match: str) -> None:
    lm, ids = hf.build("llama", suffix="ForCausalLM"), hf.inputs("llama", batch=1)["input_ids"]
    with pytest.raises(qkv.InputError, match=match):
        eviction(lm, ids, policies=[f"kvpress:{name}"], budgets=[8], progress=False)


def test_a_press_for_prompts_alone_is_measured_by_a_hidden_fact(kvpress: ModuleType) -> None:
    lm = hf.build("llama", suffix="ForCausalLM", max_position_embeddings=512)
    ids = torch.randint(3, 90, (1, 80), generator=torch.Generator().manual_seed(7))
    options: dict[str, Any] = {"tokenizer": characters, "budgets": [12], "progress": False}
    nats = needle(lm, ids, policies=["kvpress:Prefill", "knorm"], **options).groupby("policy")["nats"].mean()
    assert nats["kvpress:Prefill"] == pytest.approx(nats["knorm"], rel=1e-6)
    assert abs(nats["full"] - nats["knorm"]) > 1e-3


def test_without_kvpress_the_way_to_install_it_is_named() -> None:
    with pytest.raises(qkv.InputError, match=r"kvpress is not installed: pip install .* --no-deps kvpress"):
        policies_of(["kvpress:KeyDiff"], 8)


def test_importing_kvpress_leaves_the_attention_functions_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wraps = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as all\nall.update(dict.fromkeys(all, print))"
    )
    (tmp_path / "kvpress.py").write_text(f"{wraps}\nclass ScorerPress: ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvpress", raising=False)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(qkv.InputError, match="policies has 'kvpress:KeyDiff'"):
        policies_of(["kvpress:KeyDiff"], 8)
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    del sys.modules["kvpress"]


def test_the_loss_of_a_full_budget_is_that_of_the_model_and_a_mean_with_an_interval() -> None:
    lm = model(positions="rotary")
    with qkv.edit(lm, {(0, 0): "zero"}):
        found = eviction(lm, text(27), budgets=(6, 27), policies=POLICIES, first=FIRST)
        edited = found.loss
        assert edited is not None
        assert edited["nats"][0] == pytest.approx(lm.loss(text(27)).item(), rel=1e-9)
    assert abs(edited["nats"][0] - lm.loss(text(27)).item()) > 1e-4
    assert found.attrs["whole"] == [27]
    assert {*found.mass["budget"]} == {*edited["budget"].dropna()} == {6}, "a cache of the whole text was measured"
    assert edited[edited["budget"] == 6]["delta_nats"].abs().min() > 1e-4
    pair = text(19, batch=2)
    both, *ones = (eviction(lm, x, budgets=(5,), policies=("window",)).loss for x in (pair, pair[:1], pair[1:]))
    np.testing.assert_allclose(both["nats"], (ones[0]["nats"] + ones[1]["nats"]) / 2, rtol=1e-12)  # type: ignore[index]
    rises = [one["delta_nats"][1] for one in ones]  # type: ignore[index]
    assert both["high"][1] == pytest.approx(np.mean(rises) + 12.7062 * np.ptp(rises) / 2, rel=1e-5)  # type: ignore[index]


def test_an_interrupted_run_resumes_with_the_settings_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, runs = model(positions="rotary"), list[int]()
    texts = {"input_ids": torch.cat([text(19), text(19, batch=2)[1:]])}
    settings: dict[str, Any] = {"budgets": (5, 7), "policies": ("window", "heavy"), "folder": tmp_path}

    def counted(*given: Any) -> list[float]:
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return nats_of(*given)

    monkeypatch.setattr("qkv.profiler.analyses.eviction.nats_of", counted)
    with pytest.raises(KeyboardInterrupt):
        eviction(lm, texts, **settings)
    resumed = eviction(lm, texts, **settings)
    assert len(runs) == 4 + 2, "full, window 5 and window 7 were finished"
    whole = eviction(lm, texts, **settings | {"folder": None})
    assert resumed.mass.equals(whole.mass)
    columns = ["policy", "budget", "nats", "delta_nats", "low", "high"]
    assert resumed.loss[columns].equals(whole.loss[columns])  # type: ignore[index]


def test_hugging_face_models_run_with_masks_also_from_a_folder(tmp_path: Path) -> None:
    lm = hf.build("gpt2", "eager", suffix="LMHeadModel")
    ids = hf.inputs("gpt2", batch=1)["input_ids"]
    expected = []
    for mask in (Causal(), Causal() & Window(6), Causal() & (Prefix(FIRST) | Window(6 - FIRST))):
        hidden = torch.finfo(torch.float32).min * ~mask.dense(hf.LENGTH, hf.LENGTH)
        with torch.no_grad():
            expected.append(nn.functional.cross_entropy(lm(ids, attention_mask=hidden).logits[0, :-1], ids[0, 1:]))
    lm.save_pretrained(tmp_path / "lm")
    for source in (lm, str(tmp_path / "lm")):
        found = eviction(source, ids, budgets=(6,), policies=("window", "sinks"), first=FIRST)
        assert found.loss is not None
        np.testing.assert_allclose(found.loss["nats"], expected, rtol=1e-5)
        assert found.attrs["run"] == "masks"
        assert found.loss["bytes"][1] == lm.config.n_layer * 6 * (8 * lm.config.n_embd + 8 * lm.config.n_head)
    assert len({round(float(x), 3) for x in expected}) == 3
    assert lm.config._attn_implementation == "eager"


def of_hf(name: str, suffix: str | None = "ForCausalLM", **settings: Any) -> Eviction:
    return eviction(hf.build(name, suffix=suffix), hf.inputs(name)["input_ids"], **settings)


def generated(name: str, **inputs: Any) -> object:
    lm = hf.build(name, suffix="ForCausalLM")
    with evicting(lm, "tova", 6) as cache:
        return lm(**{"input_ids": torch.arange(9)[None], "past_key_values": cache, **inputs})


def outside() -> object:
    lm = hf.build("llama", suffix="ForCausalLM")
    with evicting(lm, "tova", 6) as cache:
        pass
    return lm(input_ids=torch.arange(9)[None], past_key_values=cache)


def cropped() -> None:
    with evicting(hf.build("llama", suffix="ForCausalLM"), "tova", 6) as cache:
        cache.crop(-1)


OWN = type("Own", (MeanAttention,), {"name": "heavy"})
REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("policies", "'newest'", lambda: eviction(model(), text(9), policies=("window", "newest"))),
    ("policies", "empty", lambda: eviction(model(), text(9), policies=())),
    ("policies", "once", lambda: eviction(model(), text(9), policies=("heavy", "heavy"))),
    ("policies", "built-in", lambda: eviction(model(), text(9), policies=(HeavyHitters, OWN))),
    ("policies", "Window", lambda: eviction(model(), text(9), policies=(Window,))),  # type: ignore[arg-type]
    (
        "attention",
        "products",
        lambda: eviction(model(normalizer="sigmoid"), text(9), budgets=(4,), policies=("expected",)),
    ),
    ("policies", "not known", lambda: of_hf("gemma2", policies=("expected",))),
    ("model", "sliding_attention", lambda: generated("gemma2")),
    ("attention_mask", "padding", lambda: generated("llama", **hf.inputs("llama", "left"))),
    ("past_key_values", "another", lambda: generated("llama", past_key_values=None)),
    ("past_key_values", "give back", cropped),
    ("past_key_values", "inside", outside),
    ("keys", "whole", lambda: policies_of(["heavy"], 2.5)),  # type: ignore[arg-type]
    ("first", "below 8", lambda: policies_of(["sinks"], 8, first=8)),
    ("budgets", "policy 'sinks'", lambda: eviction(model(), text(9), budgets=(4,))),
    ("budgets", "at least 2", lambda: eviction(model(), text(9), budgets=(1,), policies=("heavy",))),
    ("budgets", "list", lambda: eviction(model(), text(9), budgets=8)),  # type: ignore[arg-type]
    ("budgets", "empty", lambda: eviction(model(), text(9), budgets=())),
    ("first", None, lambda: eviction(model(), text(9), first=0)),
    ("model", "output head", lambda: of_hf("llama", None, policies=("window",))),
    ("model", "no causal", lambda: of_hf("bert", None, run=False)),
    ("model", "Linear cannot", lambda: eviction(nn.Linear(2, 2), text(9))),
    ("inputs", "1 token", lambda: eviction(model(), text(1))),
]

test_eviction_refuses_bad_settings_and_models = refusals(REFUSALS)


@pytest.mark.usefixtures("undrawn")
def test_command_writes_tables_and_figures(tmp_path: Path, command: Command) -> None:
    command.succeeds(
        "evict", "--tokens", 40, "--budgets", "8, 16", "--policies", "window,sinks", "--out", tmp_path / "a"
    )
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".csv", ".json", ".jsonl", ".png"}
    mass, loss = (pd.read_csv(tmp_path / "a" / f"{name}.csv") for name in ("mass", "loss"))
    config = load_model("qkv-mini").model.config
    assert len(mass) == 2 * 2 * config.layers * config.heads
    assert loss["policy"].tolist() == ["full", "window", "window", "sinks", "sinks"]
    written = json.loads((tmp_path / "a" / "eviction.json").read_text())
    assert [row["budget"] for row in written["loss"]] == [None, 8, 16, 8, 16]
    assert written["mass_lost"][3]["mass_lost"] == pytest.approx(mass["mass_lost"][-len(mass) // 4 :].mean())
    command.succeeds("evict", "random-gpt2", "--tokens", 12, "--budgets", 8, "--no-run", "--out", tmp_path / "b")
    assert not (tmp_path / "b" / "loss.csv").exists()

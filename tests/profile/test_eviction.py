"""Eviction: the lost mass equals brute force over dense weights, and the loss equals that of a model with a mask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import hf_models as hf
import qkv
from conftest import Command, enlarged, oracle, refused
from own_objects import MeanAttention
from qkv.cache import HeavyHitters
from qkv.engine import Call
from qkv.masks import Causal, Mask, Prefix, Window
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.profiler.analyses.eviction import Eviction, _under_masks, eviction, expiry, mass_lost, nats_of, policies_of
from qkv.profiler.analyses.policies import ONLINE, online_expiry
from qkv.profiler.capture.datasets import calls_of

FIRST = 2


POLICIES = ("window", "sinks", "heavy", MeanAttention)
WINDOW, SINKS, HEAVY, MEAN = policies_of(POLICIES, FIRST)


def model(**parts: Any) -> DecoderLM:
    settings: dict[str, Any] = {"vocab_size": 17, "d_model": 48, "layers": 2, "heads": 6, "kv_heads": 2, "context": 512}
    return enlarged(DecoderLM(DecoderConfig(**settings | parts)), 0.3)


def text(n: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(17, (batch, n), generator=torch.Generator().manual_seed(seed))


def kept(policy: str, budget: int, weights: np.ndarray, group: int) -> np.ndarray:
    """True at keys that are in the cache for each query, (heads, n, n), by definition; `weights` (heads, n, n)."""
    heads, n, _ = weights.shape
    found = np.zeros(weights.shape, bool)
    for head in range(heads):
        own = head // group * group
        received = weights[own : own + group].sum((0, 1))
        if policy == "mean":
            received = received / np.arange(n, 0, -1)
        for i in range(n):
            before = list(range(i + 1))
            if policy == "window":
                held = before[-budget:]
            elif policy == "sinks":
                held = before[:FIRST] + before[-(budget - FIRST) :]
            else:
                recent = budget - budget // 2
                older = sorted(before[:-recent], key=lambda j: (received[j], j))
                held = before[-recent:] + older[-(budget // 2) :]
            found[head, i, held] = True
    return found


@pytest.mark.parametrize("parts", [{"positions": "rotary"}, {"sink": True, "window": 9}, {"normalizer": "sigmoid"}])
def test_mass_lost_equals_dense_weights(parts: dict[str, Any], tile4: None) -> None:
    settings = [(policy, budget) for policy in (WINDOW, SINKS, HEAVY, MEAN) for budget in (5, 8, 17)]
    for seen in calls_of(model(**parts), {"ids": text(17)}):
        given = seen.call.given
        weights = oracle(given.q, given.k, given.v, mask=given.mask, normalizer=given.normalizer)[2][0].numpy()
        shares = weights / weights.sum(-1, keepdims=True) if "normalizer" in parts else weights
        found = mass_lost(seen, settings)
        assert set(found) == set(settings)
        for (policy, budget), mass in found.items():
            expected = (shares * ~kept(policy.name, budget, weights, 3)).sum(-1)
            np.testing.assert_allclose(mass[0].numpy(), expected, rtol=1e-9, atol=1e-12)
            assert budget == 17 or expected.max() > 0.01


def test_keys_that_received_least_are_evicted() -> None:
    received = torch.randint(6, (2, 3, 31), generator=torch.Generator().manual_seed(2)).double()  # many ties
    for heavy, recent in ((1, 1), (3, 2), (4, 9), (40, 2), (2, 40)):
        ends = expiry(received, heavy, recent)
        for item, head in np.ndindex(2, 3):
            row = received[item, head].tolist()
            for i in range(31):
                older = sorted(range(max(0, i - recent + 1)), key=lambda j: (row[j], j))
                held = {*older[-heavy:], *range(max(0, i - recent + 1), i + 1)}
                assert {j for j in range(i + 1) if i < ends[item, head, j]} == held


def test_padding_is_left_out() -> None:
    lm = hf.build("llama", suffix="ForCausalLM").double()
    batch = hf.inputs("llama", "left")
    whole = eviction(lm, batch, budgets=(5, 11), policies=("window", "heavy"), run=False)
    real = [ids[keep.bool()][None] for ids, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    parts = [eviction(lm, ids, budgets=(5, 11), policies=("window", "heavy"), run=False).mass for ids in real]
    n = np.array([ids.shape[1] for ids in real])
    assert n[0] != n[1]
    expected = (n[0] * parts[0]["mass_lost"] + n[1] * parts[1]["mass_lost"]) / n.sum()
    np.testing.assert_allclose(whole.mass["mass_lost"], expected, rtol=1e-9)
    assert whole.attrs["tokens"] == n.sum()
    assert whole.loss is None


def masked_nats(lm: DecoderLM, ids: Tensor, mask: Mask) -> float:
    """The loss of a model whose blocks all attend with this mask, too."""
    with torch.no_grad():
        x = lm._embedded(ids, 0, None)
        for block in lm.blocks:
            x = block(x, mask=mask)
        logits = lm.norm(x) @ lm.embedding.weight.T
    return float(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))


@pytest.mark.parametrize("layers", [1, 3])
def test_window_and_sinks_equal_masks(layers: int) -> None:
    """In a model without rotary positions, so that the slots of the cache have no effect."""
    lm, ids = model(layers=layers), text(41)
    for policy, mask in ((WINDOW, Window(7)), (SINKS, Prefix(FIRST) | Window(7 - FIRST)), (None, Causal())):
        found = nats_of("caches", lm, ids, policy, 7, lambda tokens: None)
        assert found == pytest.approx(masked_nats(lm, ids, mask), rel=1e-12)
    assert not lm.training


def worth_of(policy: str, a: np.ndarray, k: np.ndarray, held: list[int], t: int, budget: int) -> np.ndarray:
    """The worth of held keys by the papers' formulas, in loops; `a` (group, queries so far, keys), `k` (keys, d)."""
    if policy == "knorm":
        return np.array([-np.sqrt((k[j] ** 2).sum()) for j in held])
    if policy == "keydiff":
        anchor = np.mean([k[j] / np.linalg.norm(k[j]) for j in held], 0)
        return np.array([-k[j] @ anchor / np.linalg.norm(k[j]) / np.linalg.norm(anchor) for j in held])
    if policy == "tova":
        return np.array([a[:, t - 1, j].mean() for j in held])
    votes = [a[:, t - max(1, min(32, budget // 2)) : t, j].sum() for j in held]
    return np.array([sum(votes[max(0, i - 2) : i + 3]) / 5 for i in range(len(votes))])


@pytest.mark.parametrize("policy", ["snapkv", "tova", "keydiff", "knorm"])
@pytest.mark.parametrize("budget", [1, 4, 9])
def test_policies_evict_by_the_formulas_of_their_papers(policy: str, budget: int) -> None:
    g, n, heads, group, d = torch.Generator().manual_seed(3), 29, 2, 3, 5
    q, k, v = (torch.randn(1, h, n, d, generator=g, dtype=torch.float64) for h in (heads * group, heads, heads))
    call = Call.of(2 * q, k, v, Causal())
    (online,) = (one for one in ONLINE if one.name == policy)
    ends = online_expiry(call, online, budget)[0].numpy()
    scores = 2 * (q[0].unflatten(0, (heads, group)) @ k[0, :, None].mT).numpy() / np.sqrt(d)
    a = np.zeros((heads, group, n, n))
    held = [[0] * 0 for _ in range(heads)]
    for t in range(n):
        for head in range(heads):
            if len(held[head]) == budget:
                of = a.reshape(1, heads * group, n, n)[0] if policy == "tova" else a[head]
                worth = worth_of(policy, of, k[0, head].numpy(), held[head], t, budget)
                recent = max(1, min(32, budget // 2)) if policy == "snapkv" else 1
                old = [i for i, j in enumerate(held[head]) if j <= t - recent]
                held[head].remove(held[head][min(old, key=lambda i: worth[i])])
            held[head].append(t)
            row = np.exp(scores[head, :, t, held[head]])
            a[head][:, t, held[head]] = (row / row.sum(0)).T
            assert {j for j in range(t + 1) if t < ends[head, j]} == set(held[head]), (head, t)


def test_a_forward_under_masks_equals_a_run_with_the_cache() -> None:
    """Heavy hitters have both: what the masks keep is what the cache of each layer and key head holds."""
    lm, ids = model(positions="rotary", sink=True), text(33)
    for policy in (HEAVY, MEAN):
        assert policy.cache is not None
        with torch.no_grad():
            logits = _under_masks(lm, ids, lambda call, policy=policy: policy.kept(call, 9))  # type: ignore[misc]
        found = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        assert float(found) == pytest.approx(nats_of("caches", lm, ids, policy, 9, lambda tokens: None), rel=1e-9)


def test_every_policy_runs_on_a_hugging_face_model() -> None:
    names = ("window", "sinks", "heavy", "snapkv", "tova", "keydiff", "knorm")
    found = of_hf("llama", policies=(*names, MeanAttention), budgets=(6, hf.LENGTH), first=FIRST)
    assert found.loss is not None
    rise = found.loss.set_index(["policy", "budget"])["delta_nats"]
    for name in (*names, "mean"):
        assert abs(rise[name, hf.LENGTH]) < 1e-5
        assert abs(rise[name, 6]) > 1e-4
    assert found.mass.groupby("policy")["mass_lost"].max().between(0.01, 1).all()


def test_full_budget_loses_nothing_and_the_loss_is_a_mean_over_tokens() -> None:
    lm = model(positions="rotary")
    found = eviction(lm, text(27), budgets=(6, 27, 64), policies=POLICIES, first=FIRST)
    with qkv.edit(lm, {(0, 0): "zero"}):
        edited = eviction(lm, text(27), budgets=(27,), policies=["window", "tova"]).loss  # one by caches, one by masks
    assert found.loss is not None
    assert edited is not None
    assert edited["delta_nats"].abs().max() < 1e-6
    assert abs(edited["nats"][0] - found.loss["nats"][0]) > 1e-4
    rise = found.loss.set_index(["policy", "budget"])["delta_nats"]
    for policy in ("window", "sinks", "heavy", "mean"):
        assert abs(rise[policy, 27]) < 1e-6
        assert abs(rise[policy, 64]) < 1e-6
        assert abs(rise[policy, 6]) > 1e-3
    full = found.loss.iloc[0]
    assert full["policy"] == "full"
    assert full["nats"] == pytest.approx(lm.loss(text(27)).item(), rel=1e-9)
    pair = text(19, batch=2)
    both, *ones = (eviction(lm, x, budgets=(5,), policies=("window",)).loss for x in (pair, pair[:1], pair[1:]))
    np.testing.assert_allclose(both["nats"], (ones[0]["nats"] + ones[1]["nats"]) / 2, rtol=1e-12)  # type: ignore[index]


def test_hugging_face_models_run_with_masks_also_from_a_folder(tmp_path: Path) -> None:
    lm = hf.build("gpt2", "eager", suffix="LMHeadModel")
    ids = hf.inputs("gpt2", batch=1)["input_ids"]
    found = eviction(lm, ids, budgets=(6,), policies=("window", "sinks"), first=FIRST)
    expected = []
    for mask in (None, Causal() & Window(6), Causal() & (Prefix(FIRST) | Window(6 - FIRST))):
        given = None
        if mask is not None:
            hidden = ~mask.dense(hf.LENGTH, hf.LENGTH)
            given = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = lm(ids, attention_mask=given).logits
        expected.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item())
    assert found.loss is not None
    np.testing.assert_allclose(found.loss["nats"], expected, rtol=1e-5)
    assert len({round(x, 3) for x in expected}) == 3
    assert found.attrs["run"] == "masks"
    assert lm.config._attn_implementation == "eager"
    lm.save_pretrained(tmp_path / "lm")
    again = eviction(str(tmp_path / "lm"), ids, budgets=(6,), policies=("window",))
    assert again.loss is not None
    np.testing.assert_allclose(again.loss["nats"], expected[:2], rtol=1e-5)


class Own(MeanAttention):
    name = "heavy"


def of_hf(name: str, suffix: str | None = "ForCausalLM", **settings: Any) -> Eviction:
    return eviction(hf.build(name, suffix=suffix), hf.inputs(name)["input_ids"], **settings)


REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("policies", "'newest'", lambda: eviction(model(), text(9), policies=("window", "newest"))),
    ("policies", "empty", lambda: eviction(model(), text(9), policies=())),
    ("policies", "once", lambda: eviction(model(), text(9), policies=("heavy", "heavy"))),
    ("policies", "built-in", lambda: eviction(model(), text(9), policies=(HeavyHitters, Own))),
    ("policies", "Window", lambda: eviction(model(), text(9), policies=(Window,))),  # type: ignore[arg-type]
    (
        "policies",
        "without biases",
        lambda: eviction(model(normalizer="sigmoid"), text(9), policies=("tova",), budgets=(4,)),
    ),
    ("budgets", "policy 'sinks'", lambda: eviction(model(), text(9), budgets=(4,))),
    ("budgets", "at least 2", lambda: eviction(model(), text(9), budgets=(1,), policies=("heavy",))),
    ("budgets", "empty", lambda: eviction(model(), text(9), budgets=())),
    ("first", None, lambda: eviction(model(), text(9), first=0)),
    ("model", "output head", lambda: of_hf("llama", None, policies=("window",))),
    ("model", "no causal", lambda: of_hf("bert", None, run=False)),
    ("model", "Linear cannot", lambda: eviction(nn.Linear(2, 2), text(9))),
    ("inputs", "1 token", lambda: eviction(model(), text(1))),
]


@pytest.mark.parametrize(("argument", "match", "call"), REFUSALS)
def test_eviction_refuses_bad_settings_and_models(argument: str, match: str | None, call: Callable[[], object]) -> None:
    with refused(argument, match):
        call()


@pytest.mark.usefixtures("undrawn")
def test_command_writes_tables_and_figures(tmp_path: Path, command: Command) -> None:
    command.succeeds(
        "evict", "--tokens", 40, "--budgets", "8, 16", "--policies", "window,sinks", "--out", tmp_path / "a"
    )
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"mass.csv", "loss.csv", "eviction.json", "eviction.png", "heads.png"}
    mass, loss = (pd.read_csv(tmp_path / "a" / f"{name}.csv") for name in ("mass", "loss"))
    config = load_model("qkv-mini").model.config
    assert len(mass) == 2 * 2 * config.layers * config.heads
    assert loss["policy"].tolist() == ["full", "window", "window", "sinks", "sinks"]
    written = json.loads((tmp_path / "a" / "eviction.json").read_text())
    assert written["loss"][1]["nats"] == pytest.approx(loss["nats"][1])
    assert written["loss"][0]["budget"] is None
    mean = mass[(mass["policy"] == "sinks") & (mass["budget"] == 16)]["mass_lost"].mean()
    assert written["mass_lost"][3] == {"policy": "sinks", "budget": 16, "mass_lost": pytest.approx(mean)}
    command.succeeds("evict", "random-gpt2", "--tokens", 12, "--budgets", 8, "--no-run", "--out", tmp_path / "b")
    assert not (tmp_path / "b" / "loss.csv").exists()

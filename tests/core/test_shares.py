"""Shares of the row: one standard for sinks and head types, whatever the normalizer, against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv import Profile
from qkv.masks import Causal, Mask
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Normalizer, ReLU, Sigmoid, Softmax

CAUSAL = Causal()
KINDS: dict[str, dict[str, object]] = {
    "softmax": {},
    "gated": {"gate": "head"},
    "grouped heads": {"kv_heads": 1},
    "window": {"window": 9, "normalizer": "sigmoid"},
    "entmax": {"normalizer": "entmax"},
    "off by one": {"normalizer": "off_by_one"},
    "sink logit": {"sink": True},
    "key bias": {"key_bias": True},
    "sigmoid": {"normalizer": "sigmoid"},
    "elu": {"normalizer": "elu"},
    "relu": {"normalizer": "relu"},
}
VIEWS = ("share_first", "even_share", "contribution_first", "learned_sink")
UNNORMALISED = ("sigmoid", "elu", "relu")
SHARES = ("sink", "sink_share", "self", "previous", "next", "local", "entropy_ratio", "top_key_share", "target_share")
LENGTHS = (19, 83)


def model(factor: float = 4.0, **changes: object) -> DecoderLM:
    """A model with random parameters, scaled up so that the rows are uneven."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "d_model": 24, "layers": 2, "heads": 3, "positions": "rotary", "context": 128}
    made = DecoderLM(DecoderConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(factor)
    return made


def profiled(kind: str, n: int, factor: float = 4.0) -> Profile:
    ids = torch.randint(50, (1, n), generator=torch.Generator().manual_seed(2))
    return qkv.profile(model(factor, **KINDS[kind]), ids, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_variables_and_the_four_views_of_the_sink_are_shares_of_the_row(kind: str) -> None:
    """The sink over the queries after the first: raw weight, share, weight on the null key, and contribution."""
    for n in LENGTHS:
        profile = profiled(kind, n)
        data, table = profile.data, profile.sinks()
        weights = data["weights"].values[0].astype(np.float64)  # (layer, head, query, key)
        sums = weights.sum(-1)
        whole = (sums + (data["sink_mass"].values[0] if "sink_mass" in data else 0))[..., None]
        a = np.divide(weights, whole, out=np.zeros_like(weights), where=whole > 0)
        i, j = np.indices((n, n))
        products = weights * data["value_norm"].values[0].astype(np.float64)[..., None, :]
        first = products[..., 0] / np.maximum(products.sum(-1), 1e-30)
        rows, seen = min(64, n), KINDS[kind].get("window", n)
        want = {
            "row_sum": sums,
            "sink": a[..., 0],
            "self": (a * (i == j)).sum(-1),
            "previous": (a * (j == i - 1)).sum(-1),
            "local": (a * (abs(i - j) <= 8)).sum(-1),
            "streaming_mass": (a * ((abs(i - j) < 64) | (j < 4))).sum(-1),
            "received": a.sum(-2),
            "prefix_sink_scores": a[..., :rows, :rows].sum(-2) / np.minimum(np.arange(rows, 0, -1), seen),
            "first_contribution": first,
        }
        for name, x in want.items():
            got = data[name].values[0][..., : x.shape[-1]]
            np.testing.assert_allclose(got, x, rtol=2e-4, atol=2e-5, err_msg=name)
        even = 1 / np.minimum(np.arange(1, n + 1), KINDS[kind].get("window", n))
        want = {
            "weight_first": weights[..., 1:, 0].mean(-1),
            "share_first": a[..., 1:, 0].mean(-1),
            "contribution_first": first[..., 1:].mean(-1),
            "even_share": np.full(a.shape[:2], np.mean(even[1:])),
            "alpha_even": np.full(a.shape[:2], np.mean(even[:64])),
        }
        if kind in ("off by one", "sink logit", "key bias"):
            want["learned_sink"] = 1 - weights[..., 1:, :].sum(-1).mean(-1)
        assert ("learned_sink" in table) == ("learned_sink" in want)
        for name, x in want.items():
            np.testing.assert_allclose(table[name], x.ravel(), rtol=2e-4, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(table["share_first"], profile.heads()["sink"], rtol=1e-12)
        if kind in UNNORMALISED:
            assert abs(sums - 1).max() > 0.1, "the rows of this case should not sum to 1"


@pytest.mark.parametrize("kind", ["window", "entmax", "key bias", "relu"])
def test_no_share_of_a_head_exceeds_one(kind: str) -> None:
    profile = profiled(kind, LENGTHS[1], factor=20.0)
    heads, scores, sinks = profile.heads(), profile.types(), profile.sinks()
    for table, names in (
        (heads, SHARES),
        (scores, [name for name in scores if name not in ("layer", "head", "type", "traits", "sparse")]),
        (sinks, [name for name in sinks if name.startswith("alpha") or name in VIEWS]),
    ):
        for name in names:
            found = table[name].dropna()
            assert ((found >= -1e-5) & (found <= 1 + 1e-5)).all(), (name, found.max())
    assert (np.sum(list(qkv.profiler.data.tables.destinations(profile.data).values()), 0) <= 1 + 1e-5).all()
    assert not heads[list(SHARES[:-1])].isna().any(axis=None)


class Handmade(nn.Module):
    """One layer of one head, whose scores are given."""

    def __init__(self, scores: Tensor, normalizer: Normalizer, mask: Mask | None = CAUSAL) -> None:
        super().__init__()
        self.scores, self.normalizer, self.mask = nn.Parameter(scores), normalizer, mask

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.eye(len(self.scores))[None, None]
        asked = {"mask": self.mask, "score": qkv.scores.Dot(1.0), "normalizer": self.normalizer}
        return qkv.attend(self.scores[None, None], x, x, **asked)


def of_handmade(made: nn.Module, n: int) -> Profile:
    return qkv.profile(made, {"input_ids": torch.arange(n)[None]}, progress=False, probe=False)


def handmade(scores: Tensor, normalizer: Normalizer, mask: Mask | None = CAUSAL) -> Profile:
    return of_handmade(Handmade(scores, normalizer, mask), len(scores))


def test_a_row_mostly_on_one_key_has_the_same_type_with_any_sum() -> None:
    """Three quarters of every row on the query's own token: weights of 0.03 and 30 are typed like those of softmax."""
    n = 40
    own = torch.eye(n)
    others = torch.tensor([0.25 / max(i, 1) for i in range(n)])[:, None]
    shares = torch.where(own > 0, torch.where(torch.arange(n)[:, None] > 0, 0.75, 1.0), others)
    found = {
        "softmax": handmade(shares.log(), Softmax()),
        "small": handmade(0.04 * shares, ReLU(divide=None)),
        "large": handmade(40 * shares, ReLU(divide=None)),
        "sigmoid": handmade((0.04 * shares).logit(), Sigmoid(bias=0.0)),
    }
    for name, profile in found.items():
        heads = profile.heads().loc[0]
        assert profile.types().loc[0, "type"] == "self", name
        assert heads["goes_to"] == "self 76 %", name
        assert heads["self"] == pytest.approx((0.75 * (n - 1) + 1) / n, abs=1e-4), name
    sums = {name: float(profile.data["row_sum"].mean()) for name, profile in found.items()}
    assert sums == pytest.approx({"softmax": 1, "small": 0.04, "large": 40, "sigmoid": 0.04}, rel=1e-4)


def test_rows_that_sum_to_zero_give_no_key_a_share() -> None:
    scores = torch.ones(12, 12)
    scores[5:] = -1.0
    profile = handmade(scores, ReLU())
    assert not profile.data["row_sum"].values[..., 5:].any()
    for name in ("sink", "self", "local", "first_contribution"):
        values = profile.data[name].values
        assert not np.isnan(values).any(), name
        assert not values[..., 5:].any(), name
    assert profile.heads()["sink"][0] == pytest.approx(sum(1 / i for i in range(2, 6)) / 11, rel=1e-5)
    assert profile.data["received"].values.sum() == pytest.approx(5, rel=1e-5)


def test_sink_and_previous_have_one_definition_for_causal_and_bidirectional_models() -> None:
    """The mean over the queries after the first, so the same weights give the same numbers."""
    n = 30
    scores = torch.randn(n, n, generator=torch.Generator().manual_seed(3)).masked_fill(
        torch.ones(n, n).triu(1) > 0, -99
    )
    both = {name: handmade(scores, Softmax(), mask) for name, mask in (("causal", CAUSAL), ("bidirectional", None))}
    for name, profile in both.items():
        assert profile.data.attrs["causal"] == (name == "causal")
    for column in ("sink", "sink_share", "previous", "self", "top_key_share"):
        a, b = (profile.heads()[column][0] for profile in both.values())
        assert a == pytest.approx(b, rel=1e-6), column
    a = both["causal"].data["weights"].values[0, 0, 0].astype(np.float64)
    assert both["bidirectional"].heads()["sink"][0] == pytest.approx(a[1:, 0].mean(), rel=1e-5)
    assert both["bidirectional"].heads()["previous"][0] == pytest.approx(np.diagonal(a, -1).mean(), rel=1e-5)


def test_a_layer_without_a_null_key_puts_no_weight_on_it() -> None:
    """Some layers of a model have a sink logit and some have none: the variable exists, and is 0 in the others."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Handmade(torch.zeros(9, 9), Softmax())
            self.sunk = Handmade(torch.zeros(9, 9), Softmax(sink=0.0))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.plain(input_ids) + self.sunk(input_ids)

    profile = of_handmade(Two(), 9)
    mass = profile.data["sink_mass"].values[0, :, 0]
    np.testing.assert_allclose(mass, [np.zeros(9), 1 / np.arange(2, 11)], rtol=1e-6)
    table = profile.sinks()
    even = np.mean([1 / i for i in range(2, 10)])
    np.testing.assert_allclose(table["weight_first"], [even, np.mean([1 / i for i in range(3, 11)])], rtol=1e-5)
    np.testing.assert_allclose(table["even_share"], even, rtol=1e-6)

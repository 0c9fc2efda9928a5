"""The similarity of heads by their maps, against Jensen-Shannon divergences that are computed row by row."""

from __future__ import annotations

import numpy as np
import torch

import profile_fixture as made
import qkv
from conftest import refused
from qkv.figures.comparison import plane
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler import Profile


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen-Shannon divergence of two distributions in bits, by its definition: two Kullback-Leibler divergences."""
    middle = (a + b) / 2
    return sum(float((x[x > 0] * np.log2(x[x > 0] / middle[x > 0])).sum()) for x in (a, b)) / 2


def by_rows(weights: np.ndarray, one: tuple[int, int], other: tuple[int, int], first: int) -> float:
    """The similarity of two heads of `weights` (layer, head, query, key), whose rows sum to 1."""
    rows = zip(weights[one][first:], weights[other][first:], strict=True)
    return 1 - float(np.mean([divergence(a, b) for a, b in rows]))


def test_similarity_is_one_minus_the_mean_divergence_of_the_rows() -> None:
    profile = made.gpt(23)
    weights = profile.data["weights"].values[0].astype(np.float64)
    table = profile.similarity()
    assert table.attrs["maps"] == "weights"
    for one, other in (((0, 1), (2, 3)), ((1, 0), (1, 4)), ((2, 2), (0, 2))):
        assert abs(table.loc[one, other] - by_rows(weights, one, other, 1)) < 1e-5, "the first query is left out"
    np.testing.assert_array_equal(table, table.T)
    np.testing.assert_array_equal(np.diag(table), 1)
    assert table.index.names == ["layer", "head"]
    assert ((table >= 0) & (table <= 1)).all(axis=None)


def test_a_learned_sink_counts_as_a_key_and_rows_are_shares() -> None:
    rng = np.random.default_rng(3)
    weights, sink = rng.random((1, 3, 7, 5)), rng.random((1, 3, 7))
    tokens = [[*"abcdefg"]], [[*"vwxyz"]]
    data = made.dataset_from_weights([weights], *tokens, sink_mass=[sink], name="cross")
    full = np.concatenate([weights, sink[..., None]], -1)
    data["weights"][0, 0, 2, 4], data["sink_mass"][0, 0, 2, 4] = 0, 0  # a query that attends to no key
    full[0, 2, 4] = [0, 0, 0, 0, 0, 1]  # is all on the null key
    full /= full.sum(-1, keepdims=True)
    table = Profile({"cross": data}, {}).similarity()
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert abs(table.loc[(0, pair[0]), (0, pair[1])] - by_rows(full, (0, pair[0]), (0, pair[1]), 0)) < 1e-5
    data["weights"] = -data["weights"]
    with refused("maps"):
        Profile({"cross": data}, {}).similarity()


def test_pooled_maps_never_make_heads_less_alike_and_agree_at_one_pair_a_bin() -> None:
    torch.manual_seed(5)
    model = DecoderLM(DecoderConfig(vocab_size=31, d_model=30, layers=2, heads=3))
    for parameter in model.parameters():
        parameter.data *= 3
    ids = torch.randint(31, (1, 29))
    coarse, fine = (qkv.profile(model, ids, probe=False, progress=False, map_bins=bins) for bins in (4, 32))
    exact, pooled = coarse.similarity(), coarse.similarity(maps="pooled")
    assert pooled.attrs["maps"] == "pooled"
    assert (pooled - exact).min(axis=None) > -1e-6
    assert (pooled - exact).max(axis=None) > 0.01
    all_queries = 1 - (1 - exact) * 28 / 29  # pooled maps hold the first query, too, where all heads agree
    np.testing.assert_allclose(fine.similarity(maps="pooled"), all_queries, atol=1e-5)


def test_texts_are_averaged_or_chosen() -> None:
    profile = made.encoder_decoder()
    texts = [profile.similarity(text, "cross") for text in range(2)]
    np.testing.assert_allclose(profile.similarity(group="cross"), (texts[0] + texts[1]) / 2)
    assert not np.allclose(texts[0], texts[1])


def test_similarity_refuses_unknown_texts_and_maps_that_are_not_held() -> None:
    profile = made.gpt()
    with refused("text"):
        profile.similarity(1)
    for maps in ("pooled", "means"):
        with refused("maps"):
            profile.similarity(maps=maps)  # type: ignore[arg-type]
    with refused("maps"):
        Profile({"self": profile.data.drop_vars("weights")}, {}).similarity()


def test_places_of_heads_have_the_distances_of_points_in_a_plane() -> None:
    points = np.random.default_rng(1).random((9, 2)) / 2
    squares = ((points[:, None] - points) ** 2).sum(-1)
    places = plane(1 - squares)
    np.testing.assert_allclose(((places[:, None] - places) ** 2).sum(-1), squares, atol=1e-12)

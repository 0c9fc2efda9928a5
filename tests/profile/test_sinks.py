"""Sinks, head types and geometry: planted ones are found, and scores equal those computed from dense weights."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import qkv
from conftest import refused
from qkv import Profile
from qkv._engine.call import Call
from qkv.masks import Causal
from qkv.models import DecoderConfig, DecoderLM, loading
from qkv.normalizers import Softmax
from qkv.profiler.capture.residual import geometry
from qkv.profiler.data import types
from qkv.profiler.data.sinks import relative_norm, sink_tokens
from qkv.profiler.data.types import sink_scores

VOCABULARY = 96
STOP, BEGIN = 90, 95  # a delimiter, and what every text begins with
PLANTED = [
    "induction", "duplicate token", "previous token", "self", "first token", "other sink", "delimiter", "local",
    "uniform", "mixed",
]  # fmt: skip
SHARP = 30.0


class Planted(nn.Module):
    """One causal layer with the head types in `PLANTED`, by queries and keys made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SHARP))
        self.attention = _Attention()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.attention(input_ids, self.scale)


class _Attention(nn.Module):
    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        b, n = ids.shape
        tokens = nn.functional.one_hot(ids, VOCABULARY).float()
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
        place = nn.functional.one_hot(torch.arange(n), n).float().expand(b, n, n)
        ones = torch.ones(b, n, 1)
        at = torch.arange(n)
        first, seventh = ((at == i).float()[None, :, None].expand(b, n, 1) for i in (0, 7))
        stops = (ids == STOP).float()[..., None]
        x = (at - n / 2)[None, :, None].expand(b, n, 1) / 3  # −(x − y)² = 2xy − y² and what is the same for all keys
        near, places = torch.cat([2 * x, -ones], 2) / SHARP, torch.cat([x, x**2], 2)
        pairs = [
            (tokens, before), (tokens, tokens), (place.roll(-1, -1), place), (place, place), (ones, first),
            (ones, seventh), (ones, stops), (near, places), (ones, 0 * ones), (tokens[..., :48] / 9, tokens[..., 48:]),
        ]  # fmt: skip
        width = max(n, VOCABULARY)
        q, k = (torch.stack([nn.functional.pad(p[i], (0, width - p[i].shape[2])) for p in pairs], 1) for i in (0, 1))
        return qkv.attend(q * scale, k, k, mask=Causal(), score=qkv.scores.Dot(1.0))


class Names:
    """A tokenizer of numbers, the delimiter and the beginning."""

    all_special_tokens = ("<s>",)
    all_special_ids = (BEGIN,)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["<s>" if i == BEGIN else "." if i == STOP else f"w{i}" for i in ids]


def text(n: int, seed: int = 0) -> Tensor:
    ids = torch.randint(VOCABULARY - 10, (1, n), generator=torch.Generator().manual_seed(seed))
    ids[:, 20::9] = STOP
    ids[:, 0] = BEGIN
    return ids


@pytest.fixture(scope="module")
def planted() -> Profile:
    return qkv.profile(Planted(), text(320), tokenizer=Names(), progress=False)


def test_planted_heads_get_their_type(planted: Profile) -> None:
    table = planted.types()
    roles = table["type"].tolist()
    assert roles[:9] == PLANTED[:9], table.round(2).to_string()


def test_traits_of_planted_heads(planted: Profile) -> None:
    table = planted.types().set_index("type")
    traits = table["traits"].str.split(", ")
    assert {"sparse", "streaming", "positional"} <= set(traits["previous token"])
    assert "retrieval" in traits["duplicate token"]
    assert "content" in traits["delimiter"]
    assert not {"content", "retrieval"} & set(traits["self"])
    assert "retrieval" in traits["other sink"], "the seventh token is not among the first four"
    assert "streaming" not in traits["uniform"]
    assert table.loc["first token", "streaming"] == pytest.approx(1, abs=1e-3)


def test_short_text_has_no_streaming_score() -> None:
    table = qkv.profile(Planted(), text(200), tokenizer=Names(), progress=False).types()
    assert table["streaming"].isna().all()
    assert not table["traits"].str.contains("streaming|retrieval").any()


def test_without_probes_their_scores_are_missing() -> None:
    profile = qkv.profile(Planted(), text(80), tokenizer=Names(), progress=False, probe=False)
    assert profile.attrs["probes"] == "not requested"
    assert profile.types()[["induction", "duplicate token", "positional"]].isna().all(axis=None)
    assert profile.sinks()["alpha_random"].isna().all()


def test_sinks_of_planted_heads(planted: Profile) -> None:
    table = planted.sinks().set_index(np.array(PLANTED))
    first, other = table.loc["first token"], table.loc["other sink"]
    assert first["sink_share"] == 1
    for name in ("alpha_first", "alpha_random", "alpha_repeated", "alpha_best"):
        assert first[name] == pytest.approx(1, abs=1e-3), name
    assert (other["best_key"], other["best_token"]) == (7, planted.data["key_token"].values[0, 7])
    assert other["alpha_best"] == pytest.approx(1, abs=1e-3)
    assert other["sink_share"] < 0.05
    tokens = planted.sink_tokens()
    assert {0, 7} <= set(tokens["position"])
    assert (tokens["share_of_heads"] == tokens["heads"] / len(PLANTED)).all()


@pytest.mark.parametrize("threshold", [0, 1, -2.0])
def test_thresholds_out_of_range_are_rejected(planted: Profile, threshold: float) -> None:
    with refused("threshold"):
        planted.sinks(threshold)
    with refused("threshold"):
        sink_tokens(planted.data, threshold)


# --- real models, against their weights -------------------------------------------------------------------------------

TEXTS = ["The keeper kept two logbooks, and wrote in one of them.", "He rowed; she read. " * 9]


@pytest.fixture(scope="module", params=["qkv-mini", "minilm"])
def real(request: pytest.FixtureRequest) -> Profile:
    return qkv.profile(request.param, TEXTS, progress=False)


def test_scores_equal_those_of_dense_weights(real: Profile) -> None:
    data = real.data
    causal = data.attrs["causal"]
    for i, (n, weights) in enumerate(zip(data["n_keys"].values, data["weights"].values.astype(float), strict=True)):
        a = weights[..., :n, :n]
        seen = np.tril(np.ones((n, n))) if causal else np.ones((n, n))
        np.testing.assert_allclose(
            data["visible_queries"].values[i, ..., :n], np.broadcast_to(seen.sum(0), a.shape[:3])
        )
        rows = min(64, n)
        scores = a[..., :rows, :rows].sum(-2) / seen[:rows, :rows].sum(0)
        np.testing.assert_allclose(data["prefix_sink_scores"].values[i, ..., :rows], scores, atol=3e-5)
        assert np.isnan(data["prefix_sink_scores"].values[i, ..., n:]).all()
        streamed = np.tril(np.ones((n, n)), 63) * np.triu(np.ones((n, n)), -63)
        streamed[:, :4] = 1
        np.testing.assert_allclose(data["streaming_mass"].values[i, ..., :n], (a * streamed).sum(-1), atol=3e-5)
        score = sink_scores(data)[i, ..., :n]
        told = seen.sum(0) >= max(8, n / 8)
        np.testing.assert_allclose(score[..., told], (a.sum(-2) / seen.sum(0))[..., told], atol=3e-5)
        assert np.isnan(score[..., ~told]).all()
        size = int(data["bin_keys"][i])
        edges = range(0, n, size)
        small = [[[a[..., r : r + size, c : c + size]][0] for c in edges] for r in edges]
        for name, pool in (("map_max", np.max), ("map_mean", np.mean)):
            want = np.array([[pool(x, axis=(-2, -1)) for x in row] for row in small])
            got = data[name].values[i, ..., : len(edges), : len(edges)]
            np.testing.assert_allclose(np.moveaxis(got, (2, 3), (0, 1)), want, atol=3e-5)


def test_sink_share_and_sink_score_by_definition(real: Profile) -> None:
    """Both from the weights: shares of entries above τ from the second query on; mean of the first column over 64."""
    data, table = real.data, real.sinks(0.25)
    entries, alpha = [], []
    for n, weights in zip(data["n_keys"].values, data["weights"].values, strict=True):
        column = weights[..., :n, 0]
        entries.append((column[..., 1:] > 0.25).mean(-1))
        alpha.append(column[..., :64].mean(-1))
    np.testing.assert_allclose(table["sink_share"], np.mean(entries, 0).ravel(), atol=3e-5)
    np.testing.assert_allclose(table["alpha_first"], np.mean(alpha, 0).ravel(), atol=3e-5)


def test_first_token_by_layer_equals_dense_weights(real: Profile) -> None:
    """Lines as a course prints them: mean and largest weight on the first token, without the first query."""
    table, weights = real.first_token(), real.data["weights"].values
    rows = [w[:, :, 1:n, 0] for w, n in zip(weights, real.data["n_queries"].values, strict=True)]
    np.testing.assert_allclose(table["mean"], np.mean([x.mean((1, 2)) for x in rows], 0), atol=1e-6)
    np.testing.assert_allclose(table["max"], np.max([x.max((1, 2)) for x in rows], 0), atol=1e-6)
    heads = np.mean([x.mean(-1) for x in rows], 0)
    np.testing.assert_allclose(table["strongest_mean"], heads.max(1), atol=1e-6)
    assert table["strongest_head"].tolist() == heads.argmax(1).tolist()
    one = qkv.profile("qkv-mini", torch.tensor([[3]]), probe=False, progress=False)
    with refused("profile", match="second token"):
        one.first_token()


def test_padding_does_not_change_scores() -> None:
    """On either side, with the same numbers as alone."""
    loaded = loading.load_model("minilm")
    ids = [loaded.tokenizer(t, return_tensors="pt")["input_ids"] for t in TEXTS]
    long = max(x.shape[1] for x in ids)
    alone = [qkv.profile(loaded.model, x, tokenizer=loaded.tokenizer, progress=False) for x in ids]
    pad = [long - x.shape[1] for x in ids]
    batch = {
        "input_ids": torch.cat([nn.functional.pad(x, (0, p)) for x, p in zip(ids, pad, strict=True)]),
        "attention_mask": torch.cat(
            [nn.functional.pad(torch.ones_like(x), (0, p)) for x, p in zip(ids, pad, strict=True)]
        ),
    }
    both = qkv.profile(loaded.model, batch, tokenizer=loaded.tokenizer, progress=False)
    assert "map_max" not in both.data, "bins would mix padding with the text"
    for i, one in enumerate(alone):
        n = one.data.sizes["key"]
        for name in (
            "visible_queries", "prefix_sink_scores", "streaming_mass", "key_norm", "value_norm", "query_norm",
            "row_sum", "first_contribution",
        ):  # fmt: skip
            got = both.data[name].values[i][..., : 64 if name == "prefix_sink_scores" else n]
            np.testing.assert_allclose(got, one.data[name].values[0], atol=2e-5, rtol=2e-5, err_msg=name)
        for name in ("cosine_first", "cosine_others", "first_key_angle", "key_directions"):
            np.testing.assert_allclose(both.data[name][i], one.data[name][0], atol=2e-3, err_msg=name)


# --- geometry ---------------------------------------------------------------------------------------------------------


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_geometry_by_plain_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    b, h, hkv, n, d, dv = 2, 6, 2, 11, 5, 3
    q, k, v = (
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in ((b, h, n, d), (b, hkv, n, d), (b, hkv, n, dv))
    )
    learned = torch.randn(h, d, generator=generator, dtype=torch.float64)
    real = torch.ones(b, n).bool()
    real[0, :3] = False
    q[0, :, :3], k[0, :, :3], v[0, :, :3] = 7.0, 5.0, 3.0  # padding plays no part
    call = Call.of(q, k, v, Causal(), normalizer=Softmax(key=learned))
    got = geometry(call, torch.tensor([3, 0]), real, real)
    for i, j in np.ndindex(b, h):
        start = 3 if i == 0 else 0
        qs, ks, vs = q[i, j, start:].numpy(), k[i, j // 3, start:].numpy(), v[i, j // 3, start:].numpy()
        want = {
            "cosine_first": np.mean([cosine(x, ks[0]) for x in qs]),
            "cosine_others": np.mean([cosine(x, y) for x in qs for y in ks[1:]]),
            "first_key_angle": math.degrees(math.acos(cosine(ks[0], ks[1:].mean(0)))),
            "key_bias_cosine": np.mean([cosine(x, learned[j].numpy()) for x in qs]),
        }
        for name, value in want.items():
            assert got[name][i, j].item() == pytest.approx(value, abs=1e-9), name
        variance = np.linalg.svd(ks - ks.mean(0), compute_uv=False) ** 2
        np.testing.assert_allclose(got["key_directions"][i, j], (variance / variance.sum())[:3], atol=1e-9)
        for name, x in (("query_norm", qs), ("key_norm", ks), ("value_norm", vs)):
            np.testing.assert_allclose(got[name][i, j, start:], np.linalg.norm(x, axis=-1), atol=1e-12)


def test_small_angles_are_exact() -> None:
    k = torch.ones(1, 1, 5, 4)
    k[0, 0, 0, 0] += 1e-3
    angle = geometry(Call.of(k, k, k), 0, None, None)["first_key_angle"].item()
    assert angle == pytest.approx(math.degrees(1e-3 * math.sqrt(3) / 4), rel=1e-2)


def test_relative_norm_by_hand() -> None:
    norm = np.array([[0.1, 2.0, 4.0, np.nan]])
    np.testing.assert_allclose(relative_norm(norm), [[0.1 / 3, 2 / 2.05, 4 / 1.05, np.nan]])


def test_first_token_of_minilm_has_small_values(real: Profile) -> None:
    """The sink of both bundled models: α of the first token goes with a small value (Guo et al. 2024)."""
    table = real.sinks()
    strong = table[table["alpha_first"] > 0.3]
    assert len(strong) > 3
    assert (strong["value_norm_first"] < 1).mean() > 0.7


def test_every_variable_has_unit_and_definition(real: Profile) -> None:
    for name, variable in real.data.data_vars.items():
        assert variable.attrs["units"], name
        assert len(variable.attrs["definition"]) > 10, name


def test_head_types_have_unique_names_and_thresholds() -> None:
    assert not set(types.ROLES) & set(types.TRAITS)
    for kind in (*types.ROLES.values(), *types.TRAITS.values()):
        assert kind.definition
        assert kind.threshold > 0


def test_profile_without_visible_queries_is_rejected(planted: Profile) -> None:
    old = Profile({"self": planted.data.drop_vars("visible_queries")})
    with refused("profile"):
        old.sinks()
    assert old.types()["other sink"].isna().all()


# --- found by reading -------------------------------------------------------------------------------------------------


def small(**changes: object) -> DecoderLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "layers": 1, "heads": 2, "positions": "rotary", "context": 512}
    return DecoderLM(DecoderConfig(**(sizes | changes))).eval()  # type: ignore[arg-type]


def test_every_key_of_a_short_window_has_a_score() -> None:
    ids = torch.randint(50, (1, 256), generator=torch.Generator().manual_seed(1))
    profile = qkv.profile(small(window=16), ids, progress=False)
    weights = qkv.profile(small(window=16), ids, progress=False).data["weights"].values[0, 0]
    want = weights.sum(1)[:, : 256 - 15] / 16
    np.testing.assert_allclose(sink_scores(profile.data)[0, 0, :, : 256 - 15], want, atol=1e-5)
    np.testing.assert_allclose(profile.sinks()["alpha_best"], want.max(1), atol=1e-5)


def test_probes_ignore_padding() -> None:
    ids = torch.randint(90, (1, 30), generator=torch.Generator().manual_seed(2))
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    torch.manual_seed(0)
    model = transformers.GPT2Model(config).eval()
    alone = qkv.profile(model, ids, progress=False).data
    for left in (True, False):
        pad = (70, 0) if left else (0, 70)
        batch = {
            "input_ids": nn.functional.pad(ids, pad, value=95),
            "attention_mask": nn.functional.pad(torch.ones_like(ids), pad),
        }
        padded = qkv.profile(copy.deepcopy(model), batch, progress=False).data  # the scores of `model` are kept
        for name in ("probe_positional", "probe_sink_random", "probe_induction"):
            np.testing.assert_allclose(padded[name], alone[name], atol=1e-6, err_msg=name)


class _Counter:
    """Counts the forwards of a model without being part of its state."""

    n = 0

    def __reduce__(self) -> str:
        return "counter"


counter = _Counter()


class _Counted(nn.Identity):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.n += 1
        return x * self.factor


def test_a_model_is_probed_once_and_again_after_any_change() -> None:
    model, ids = small(), torch.arange(40)[None]
    model.final = model.norm
    model.norm = nn.Sequential(model.final, _Counted())

    def runs() -> int:
        counter.n = 0
        qkv.profile(model, ids, progress=False)
        return counter.n

    text, probes = 1, 2  # forwards
    assert (runs(), runs()) == (text + probes, text)
    model.blocks[0].attention_norm.weight.data[3:5] *= 2  # a change that torch's version counters miss
    assert (runs(), runs()) == (text + probes, text)
    model.norm[1].factor = 2.0  # an attribute that is no tensor
    assert (runs(), runs()) == (text + probes, text)
    model.to(torch.bfloat16)
    assert (runs(), runs()) == (text + probes, text)
    model.blocks[0].attention.out_proj.weight.data.reshape(-1)[5] *= 1.01  # one number of 256, in half precision
    assert (runs(), runs()) == (text + probes, text)
    seen: list[int] = []
    handle = model.final.register_forward_hook(lambda *_: seen.append(1))  # a hook may do anything, every time
    assert (runs(), runs()) == (text + probes, text + probes)
    handle.remove()
    assert runs() == text  # the model that was kept


def test_learned_sink_does_not_count_as_retrieval() -> None:
    model = small(sink=True)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("sink"):
                x.fill_(12.0)
    profile = qkv.profile(model, torch.randint(50, (1, 400)), progress=False)
    assert (profile.sinks()["learned_sink"] > 0.99).all()
    assert (profile.types()["retrieval"] < 0.01).all()


def test_probe_scores_count_visible_queries_only() -> None:
    ids = torch.randint(50, (1, 64), generator=torch.Generator().manual_seed(3))
    table = qkv.profile(small(window=8), ids, progress=False).sinks()
    np.testing.assert_allclose(table["alpha_random"], table["alpha_first"], rtol=0.5)


def test_text_of_one_token_has_nan_ratios() -> None:
    table = qkv.profile(small(), torch.tensor([[3]]), progress=False).sinks()
    assert table[["first_key_angle", "cosine_others", "value_norm_first", "sink_share"]].isna().all(axis=None)


def test_sink_figure_without_scores() -> None:
    model = qkv.models.RNNSeq2Seq(qkv.models.RNNSeq2SeqConfig(20, 20, attention="bahdanau"))
    ids = torch.randint(3, 20, (1, 6))
    profile = qkv.profile(model, {"source": ids, "target": ids}, progress=False)
    assert len(profile.plot.sinks().axes) == 2


def test_cross_attention_has_no_sink_scores() -> None:
    model = qkv.models.EncoderDecoder(qkv.models.EncoderDecoderConfig(20, 20, d_model=16, heads=2, layers=1)).eval()
    batch = {"source": torch.randint(3, 20, (1, 9)), "target": torch.randint(3, 20, (1, 5))}
    profile = qkv.profile(model, batch, progress=False)
    assert np.isnan(profile.groups["cross"]["prefix_sink_scores"]).all()
    assert not np.isnan(profile.groups["decoder"]["prefix_sink_scores"][..., :5]).any()


def test_failing_probe_does_not_fail_the_profile() -> None:
    class Strict(Planted):
        def forward(self, input_ids: Tensor) -> Tensor:
            assert input_ids.shape[1] == 80, "reads 80 tokens"
            return super().forward(input_ids)

    profile = qkv.profile(Strict(), text(80), tokenizer=Names(), progress=False)
    assert profile.attrs["probes"] == "not run: AssertionError: reads 80 tokens"


def test_profile_rejects_groups_that_are_not_data_sets() -> None:
    with refused("groups['self']"):
        Profile({"self": 3})  # type: ignore[dict-item]

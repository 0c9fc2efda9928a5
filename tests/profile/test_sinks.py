"""Sinks, head types and geometry: planted ones are found, and scores equal those computed from dense weights."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_models as hf
import qkv
from conftest import rand, refused, triple
from qkv import Profile
from qkv.engine import Call
from qkv.masks import Causal
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Softmax
from qkv.profiler.capture import probes
from qkv.profiler.capture.record import ObservedCall, Together, geometry
from qkv.profiler.data.sinks import relative_norm, sink_tokens
from qkv.profiler.data.tables import sink_scores

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
        self.config = SimpleNamespace(vocab_size=VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        ids, (b, n) = input_ids, input_ids.shape
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
        return qkv.attend(q * self.scale, k, k, mask=Causal(), score=qkv.scores.Dot(1.0))


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


def test_types_traits_and_sinks_of_planted_heads(planted: Profile) -> None:
    table = planted.types()
    assert table["type"].tolist()[:9] == PLANTED[:9], table.round(2).to_string()
    table = table.set_index("type")
    traits = table["traits"].str.split(", ")
    assert {"sparse", "streaming", "positional"} <= set(traits["previous token"])
    assert "retrieval" in traits["duplicate token"]
    assert "content" in traits["delimiter"]
    assert not {"content", "retrieval"} & set(traits["self"])
    assert "retrieval" in traits["other sink"], "the seventh token is not among the first four"
    assert "streaming" not in traits["uniform"]
    assert table.loc["first token", "streaming"] == pytest.approx(1, abs=1e-3)
    sinks = planted.sinks().set_index(np.array(PLANTED))
    first, other = sinks.loc["first token"], sinks.loc["other sink"]
    assert first["sink_share"] == 1
    for name in ("alpha_first", "alpha_random", "alpha_repeated", "alpha_best"):
        assert first[name] == pytest.approx(1, abs=1e-3), name
    assert (other["best_key"], other["best_token"]) == (7, planted.data["key_token"].values[0, 7])
    assert other["alpha_best"] == pytest.approx(1, abs=1e-3)
    assert other["sink_share"] < 0.05
    tokens = planted.sink_tokens()
    assert {0, 7} <= set(tokens["position"])
    assert (tokens["share_of_heads"] == tokens["heads"] / len(PLANTED)).all()


def test_short_text_has_no_streaming_score_and_no_probes_no_scores_of_them() -> None:
    profile = qkv.profile(Planted(), text(200), tokenizer=Names(), progress=False, probe=False)
    table = profile.types()
    assert not table["traits"].str.contains("streaming|retrieval").any()
    assert profile.attrs["probes"] == "not requested"
    assert table[["streaming", "induction", "duplicate token", "positional"]].isna().all(axis=None)
    assert profile.sinks()["alpha_random"].isna().all()


def test_thresholds_and_profiles_without_sink_scores_are_rejected(planted: Profile) -> None:
    for threshold in (0, 1, -2.0):
        with refused("threshold"):
            planted.sinks(threshold)
    with refused("threshold"):
        sink_tokens(planted.data, 0)
    old = Profile({"self": planted.data.drop_vars("visible_queries")})
    with refused("profile"):
        old.sinks()
    assert old.types()["other sink"].isna().all()


# --- real models, against their weights -------------------------------------------------------------------------------

TEXTS = ["The keeper kept two logbooks, and wrote in one of them.", "He rowed; she read. " * 9]


@pytest.fixture(scope="module", params=["qkv-mini", "minilm"])
def real(request: pytest.FixtureRequest) -> Profile:
    return qkv.profile(request.param, TEXTS, probe=False, progress=False)


def test_scores_equal_those_of_dense_weights(real: Profile) -> None:
    data = real.data
    for i, (n, weights) in enumerate(zip(data["n_keys"].values, data["weights"].values.astype(float), strict=True)):
        a, rows, size = weights[..., :n, :n], min(64, n), int(data["bin_keys"][i])
        seen = np.tril(np.ones((n, n))) if data.attrs["causal"] else np.ones((n, n))
        told = seen.sum(0) >= max(8, n / 8)
        streamed = np.tril(np.ones((n, n)), 63) * np.triu(np.ones((n, n)), -63)
        streamed[:, :4] = 1
        bins = np.arange(0, n, size)
        top = np.maximum.reduceat(np.maximum.reduceat(a, bins, 2), bins, 3)
        for name, want in {
            "visible_queries": np.broadcast_to(seen.sum(0), a.shape[:3]),
            "prefix_sink_scores": a[..., :rows, :rows].sum(-2) / seen[:rows, :rows].sum(0),
            "streaming_mass": (a * streamed).sum(-1),
            "map_max": top,
        }.items():
            got = data[name].values[i][..., : len(bins), : len(bins)] if name == "map_max" else data[name].values[i]
            np.testing.assert_allclose(got[..., : want.shape[-1]], want, atol=3e-5, err_msg=name)
        score = sink_scores(data)[i, ..., :n]
        np.testing.assert_allclose(score[..., told], (a.sum(-2) / seen.sum(0))[..., told], atol=3e-5)
        assert np.isnan(score[..., ~told]).all()
        assert np.isnan(data["prefix_sink_scores"].values[i, ..., n:]).all()


def test_sinks_and_first_token_by_layer_equal_dense_weights(real: Profile) -> None:
    """The mean of the first column over 64 queries; else without the first query, which sees nothing but the sink."""
    data, table, lines = real.data, real.sinks(0.25), real.first_token()
    columns = [w[..., :n, 0] for n, w in zip(data["n_keys"].values, data["weights"].values, strict=True)]
    share = np.mean([(x[..., 1:] > 0.25).mean(-1) for x in columns], 0)
    np.testing.assert_allclose(table["sink_share"], share.ravel(), atol=3e-5)
    alpha = np.mean([x[..., :64].mean(-1) for x in columns], 0)
    np.testing.assert_allclose(table["alpha_first"], alpha.ravel(), atol=3e-5)
    rows = [x[..., 1:] for x in columns]
    np.testing.assert_allclose(lines["mean"], np.mean([x.mean((1, 2)) for x in rows], 0), atol=1e-6)
    np.testing.assert_allclose(lines["max"], np.max([x.max((1, 2)) for x in rows], 0), atol=1e-6)
    heads = np.mean([x.mean(-1) for x in rows], 0)
    np.testing.assert_allclose(lines["strongest_mean"], heads.max(1), atol=1e-6)
    assert lines["strongest_head"].tolist() == heads.argmax(1).tolist()
    assert all(variable.attrs["units"] and variable.attrs["definition"] for variable in data.data_vars.values())


# --- geometry ---------------------------------------------------------------------------------------------------------


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_geometry_by_plain_loops() -> None:
    q, k, v = triple(nq=11, nk=11, d=5, dv=3)
    learned, real = rand(6, 5), torch.ones(2, 11).bool()
    real[0, :3] = False
    q[0, :, :3], k[0, :, :3], v[0, :, :3] = 7.0, 5.0, 3.0  # padding plays no part
    call, first = Call.of(q, k, v, Causal(), normalizer=Softmax(key=learned)), torch.tensor([3, 0])
    got = ObservedCall("a", "self", 0, call, None, real, real, first, causal=True, source="qkv").vectors()
    for i, j in np.ndindex(2, 6):
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


def test_calls_of_equal_sizes_are_summarised_together() -> None:
    """As each alone, by one call of the function; what the model changes afterwards plays no part."""
    sizes, calls = [(2, 6, 11), (2, 6, 11), (2, 6, 13), (2, 6, 11)], list[int]()

    def counted(*x: Tensor | None) -> dict[str, Tensor]:
        calls.append(0 if x[0] is None else len(x[0]))
        return geometry(*x)  # type: ignore[arg-type]

    waiting, real = Together(counted), torch.ones(2, 11).bool()
    real[0, :3] = False
    given = [(rand(*size, 5, seed=i), rand(2, 3, size[2], 5, seed=9 + i)) for i, size in enumerate(sizes)]
    masks = [(real, real), (None, None), (None, None), (real, real)]
    first = torch.tensor([3, 0])
    alone = [geometry(q, k, first, *mask) for (q, k), mask in zip(given, masks, strict=True)]
    with torch.inference_mode():
        found = [waiting.add(q, k, first, *mask) for (q, k), mask in zip(given, masks, strict=True)]
    for q, k in given:
        q.fill_(7)
        k.fill_(7)
    assert not any(found)
    waiting.finish()
    assert sorted(calls) == [2, 2, 4]
    for got, want in zip(found, alone, strict=True):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-9, equal_nan=True)
    large = rand(1, 1, 2**17, 5)
    assert waiting.add(large, large, torch.tensor([0]), None, None), "at once, without a copy"
    assert not waiting.waiting


def test_small_angles_and_relative_norms_by_hand() -> None:
    k = torch.ones(1, 1, 5, 4)
    k[0, 0, 0, 0] += 1e-3
    angle = geometry(k, k, torch.tensor([0]))["first_key_angle"].item()
    assert angle == pytest.approx(math.degrees(1e-3 * math.sqrt(3) / 4), rel=1e-2)
    norm = np.array([[0.1, 2.0, 4.0, np.nan]])
    np.testing.assert_allclose(relative_norm(norm), [[0.1 / 3, 2 / 2.05, 4 / 1.05, np.nan]])


# --- found by reading -------------------------------------------------------------------------------------------------


def small(**changes: object) -> DecoderLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "layers": 1, "heads": 2, "positions": "rotary", "context": 512}
    return DecoderLM(DecoderConfig(**(sizes | changes))).eval()  # type: ignore[arg-type]


def test_every_visible_query_of_a_short_window_counts_in_scores() -> None:
    ids = torch.randint(50, (1, 256), generator=torch.Generator().manual_seed(1))
    profile = qkv.profile(small(window=16), ids, progress=False)
    want = profile.data["weights"].values[0, 0].sum(1)[:, : 256 - 15] / 16
    np.testing.assert_allclose(sink_scores(profile.data)[0, 0, :, : 256 - 15], want, atol=1e-5)
    table = profile.sinks()
    np.testing.assert_allclose(table["alpha_best"], want.max(1), atol=1e-5)
    np.testing.assert_allclose(table["alpha_random"], table["alpha_first"], rtol=0.5)  # in probes, too


def test_probes_ignore_padding() -> None:
    ids = torch.randint(90, (1, 30), generator=torch.Generator().manual_seed(2))
    model = hf.build("gpt2", n_positions=256)
    alone = qkv.profile(model, ids, progress=False).data
    for pad in ((70, 0), (0, 70)):
        mask = nn.functional.pad(torch.ones_like(ids), pad)
        batch = {"input_ids": nn.functional.pad(ids, pad, value=95), "attention_mask": mask}
        padded = qkv.profile(copy.deepcopy(model), batch, progress=False).data  # the scores of `model` are kept
        for name in ("probe_positional", "probe_sink_random", "probe_induction"):
            np.testing.assert_allclose(padded[name], alone[name], atol=1e-6, err_msg=name)


CALLS: list[int] = []


class Counted(nn.Identity):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return x * self.factor


def test_a_model_is_probed_once_and_again_after_any_change() -> None:
    model, ids = small(), torch.arange(40)[None]
    norm = model.norm
    model.norm = nn.Sequential(norm, Counted())
    model.norm[1].stated = [*2 * ["two words"], {8, 0}]

    def forwards(probe: Any = True) -> list[int]:
        """Of two profiles: one for the text, and two for the probes of a model that was not probed before."""
        found = []
        for _ in range(2):
            CALLS.clear()
            assert qkv.profile(model, ids, probe=probe, progress=False).attrs["probes"] == "run"
            found.append(len(CALLS))
        return found

    assert forwards() == [3, 1]
    model.norm[1].stated = ["two words", " ".join(["two", "words"]), {0, 8}]  # equal, of other objects in another order
    model.config = copy.deepcopy(model.config)
    assert forwards() == [1, 1]
    model.norm[1].stated[2].add(9)
    assert forwards() == [3, 1]
    model.blocks[0].attention_norm.weight.data[3:5] *= 2  # a change that torch's version counters miss
    assert forwards() == [3, 1]
    numbers = model.blocks[0].feed_forward.up.weight.data.reshape(-1)
    assert len(numbers) > 2 * probes.SAMPLE
    numbers[1] *= 2  # one number that is not in the sample
    assert forwards() == [1, 1]
    assert (forwards("again"), forwards()) == ([3, 3], [1, 1])
    model.norm[1].factor = 2.0  # an attribute that is no tensor
    assert forwards() == [3, 1]
    model.to(torch.bfloat16)
    assert forwards() == [3, 1]
    model.blocks[0].attention.out_proj.weight.data.reshape(-1)[5] *= 1.01  # one number of 256, in half precision
    assert forwards() == [3, 1]
    handle = norm.register_forward_hook(lambda *_: None)
    assert forwards() == [3, 1]
    handle.remove()
    assert forwards() == [3, 1]
    with qkv.watch(small()):  # of another model: it changes nothing
        assert forwards() == [1, 1]  # the model that was kept


def test_learned_sink_does_not_count_as_retrieval() -> None:
    model = small(sink=True)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("sink"):
                x.fill_(12.0)
    profile = qkv.profile(model, torch.randint(50, (1, 400)), progress=False)
    assert (profile.sinks()["learned_sink"] > 0.99).all()
    assert (profile.types()["retrieval"] < 0.01).all()


def test_text_of_one_token_has_nan_ratios() -> None:
    profile = qkv.profile(small(), torch.tensor([[3]]), progress=False)
    table = profile.sinks()
    assert table[["first_key_angle", "cosine_others", "value_norm_first", "sink_share"]].isna().all(axis=None)
    with refused("profile", match="second token"):
        profile.first_token()


def test_cross_attention_has_no_sink_scores_and_the_figure_no_map_of_them() -> None:
    model = qkv.models.EncoderDecoder(qkv.models.EncoderDecoderConfig(20, 20, d_model=16, heads=2, layers=1)).eval()
    batch = {"source": torch.randint(3, 20, (1, 9)), "target": torch.randint(3, 20, (1, 5))}
    profile = qkv.profile(model, batch, probe=False, progress=False)
    assert np.isnan(profile.groups["cross"]["prefix_sink_scores"]).all()
    assert not np.isnan(profile.groups["decoder"]["prefix_sink_scores"][..., :5]).any()
    model = qkv.models.RNNSeq2Seq(qkv.models.RNNSeq2SeqConfig(20, 20, attention="bahdanau"))
    assert len(qkv.profile(model, batch, probe=False, progress=False).plot.sinks().axes) == 2


def test_failing_probe_does_not_fail_the_profile() -> None:
    class Strict(Planted):
        def forward(self, input_ids: Tensor) -> Tensor:
            assert input_ids.shape[1] == 80, "reads 80 tokens"
            return super().forward(input_ids)

    profile = qkv.profile(Strict(), text(80), tokenizer=Names(), progress=False)
    assert profile.attrs["probes"] == "not run: AssertionError: reads 80 tokens"

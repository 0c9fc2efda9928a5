"""Surveys: sums merge exactly for any split of the corpus, results equal those of profiles, and no text is lost."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hf_models as hf
from conftest import rand, refused
from qkv import profile
from qkv._survey_settings import Settings
from qkv.errors import InputError
from qkv.models.tokenizers import ByteTokenizer
from qkv.plot import survey as survey_plots
from qkv.profiler.surveys import corpus
from qkv.profiler.surveys.accumulators import BINS, DIGITS, QUANTITIES, Layer, edges
from qkv.profiler.surveys.survey import Special, Survey, definition_of, survey
from qkv.profiler.surveys.surveyor import Piece, batches_of, pieces
from qkv.report.html import render_survey
from survey_process import TEXTS as OWN_TEXTS
from survey_process import own, own_survey

LOCAL = 5
quick = functools.partial(profile, probe=False, progress=False)


class Words:
    """A tokenizer of numbers as words, with a token before and one after every text."""

    pad_token_id = 0
    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return hf.VOCABULARY

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [3 + sum(word.encode()) % (hf.VOCABULARY - 3) for word in text.split()]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["," if i == 5 else f"w{i}" for i in ids]


def words(n: int, seed: int) -> str:
    """A text of n words."""
    return " ".join(map(str, np.random.default_rng(seed).integers(0, 999, n)))


TEXTS = [words(n, n) for n in (62, 17, 3, 41, 17, 1, 62)]


def layer_of(*batches: tuple[np.ndarray, np.ndarray]) -> Layer:
    layer = Layer("m", 2)
    for values, valid in batches:
        layer.add(torch.from_numpy(values), torch.from_numpy(valid))
    return layer.seal()


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Three batches of quantities of 2 heads, of different sizes, with holes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1.0, 1e-6, 1e6]))
    made = []
    for _ in range(3):
        shape = (len(QUANTITIES), draw(st.integers(1, 3)), 2, draw(st.integers(1, 5)))
        made.append((size * rng.gamma(0.5, size=shape), rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))))
    return made


def same(a: Layer, b: Layer, *, sketches: bool = False) -> bool:
    x, y = dict(a.arrays()), dict(b.arrays())
    return all(np.array_equal(x[n], y[n]) for n in x if sketches or not n.startswith("sketch"))


@given(parts())
def test_sums_merge_exactly_in_any_order_and_give_the_moments_of_all_values(
    batches: list[tuple[np.ndarray, np.ndarray]],
) -> None:
    a, b, c = map(layer_of, batches)
    found = a.merge(b).merge(c)
    for merged in (a.merge(b.merge(c)), c.merge(a).merge(b), layer_of(*batches)):
        assert same(merged, found)
    assert same(a.merge(b).merge(c), found, sketches=True)
    for q, h in np.ndindex(len(QUANTITIES), 2):
        x = np.concatenate([values[q, :, h][valid[q, :, h]] for values, valid in batches])
        assert found.added["count"][q, h] == len(x)
        if not len(x):
            assert np.isnan(found.mean()[q, h])
            continue
        total = sum(Fraction(v) for v in x)
        rounding = 3 * 2.0**-DIGITS + 1e-14 * float(total)
        assert abs(Fraction(int(found.added["sum"][q, h]), 2**DIGITS) - total) <= rounding
        assert found.mean()[q, h] == pytest.approx(x.mean(), rel=1e-9, abs=1e-11)
        assert found.deviation()[q, h] == pytest.approx(x.std(), rel=1e-5, abs=1e-5 + 1e-7 * x.max())
        assert (found.minimum[q, h], found.maximum[q, h]) == (x.min(), x.max())
        borders = edges([*QUANTITIES][q])
        inside = np.histogram(np.clip(x, 0, borders[-1]), borders)[0]
        moved = np.abs(found.added["histogram"][q, h] - inside).sum()  # what lies on a border may fall either way
        near = (np.abs(x[:, None] - borders) < 1e-9 * np.maximum(x[:, None], 1e-9)).any(1).sum()
        assert moved <= 2 * near


def test_quantiles_are_exact_to_a_bin_and_sketches_close() -> None:
    values = np.abs(rand(len(QUANTITIES), 400, 2, 7).numpy()) % 1
    found = layer_of((values, np.ones(values.shape, bool)))
    for rank in (0.05, 0.5, 0.95):
        for q, name in enumerate(QUANTITIES):
            widest = np.diff(edges(name)[: np.searchsorted(edges(name), values[q].max()) + 1]).max()
            want = np.quantile(values[q].transpose(1, 0, 2).reshape(2, -1), rank, axis=1)
            assert np.abs(found.quantile(rank)[q] - want).max() <= 1.01 * widest
        below = (values.mean(-1) <= found.quantile_of_texts(rank)[:, None]).mean(1)
        assert np.abs(below - rank).max() < 0.02


def test_nan_is_rejected_unless_it_does_not_count(tmp_path: Path) -> None:
    values = np.zeros((len(QUANTITIES), 1, 2, 3))
    values[2, 0, 1, 1] = np.nan
    layer_of((values, ~np.isnan(values)))
    with refused("model", match="of m: its parameters"):
        layer_of((values, np.ones(values.shape, bool)))
    model = own()
    next(model.parameters()).data.fill_(torch.nan)
    with refused("model", match=r"NaN in blocks\.0"):
        own_survey(tmp_path, model=model)
    assert not list((tmp_path / "shards").iterdir())


@given(st.integers(0, 40), st.integers(0, 2), st.integers(0, 2), st.integers(1, 9), st.data())
def test_every_token_counts_once(n: int, before: int, after: int, room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    special = Special(tuple(range(100, 100 + before)), tuple(range(200, 200 + after)))
    cut = list(pieces(range(n), special, room + before + after, overlap))
    counted = [i for p in cut for i in p.ids[p.start : p.stop]]
    assert counted == [*special.before, *range(n), *special.after]
    assert all(len(p.ids) <= room + before + after for p in cut)
    assert [p.begins for p in cut] == [True] + [False] * (len(cut) - 1)
    for p, q in itertools.pairwise(cut):
        last = list(p.ids[before : len(p.ids) - after])
        assert overlap == 0 or list(q.ids[before : before + overlap]) == last[-overlap:]


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 30), st.booleans())
def test_batches_contain_every_sequence_once(lengths: list[int], tokens: int, padded: bool) -> None:
    found = [Piece([i] * n, 0, n, True) for i, n in enumerate(lengths)]
    made = list(batches_of(found, tokens, pad=0 if padded else None))
    rows = [b.ids[i][b.real[i]].tolist() for b in made for i in range(len(b.ids))]
    assert sorted(rows) == sorted(p.ids for p in found)
    assert all(b.ids.numel() <= tokens or len(b.ids) == 1 for b in made)
    assert padded or all(bool(b.real.all()) for b in made)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 9))
def test_shards_contain_every_document_once(sizes: list[int], number: int) -> None:
    found = corpus.of_texts("x" * n for n in sizes)
    parts = found.shards(number)
    documents = [d.name for part in parts for chunk in part.chunks() for d in chunk]
    assert sorted(documents) == sorted(d.name for d in found.documents)
    loads = [part.size for part in parts]
    assert max(loads) - min(loads) <= max(sizes)


def pooled(profiles: list[Any], group: str, name: str) -> np.ndarray:
    """All values of a quantity over the texts, (layer, head, all queries), float64, NaN where it says nothing."""
    found = []
    for p in profiles:
        data = p.groups[group]
        if name == "entropy_ratio":
            seen = data["visible"].values.astype(float)
            with np.errstate(divide="ignore", invalid="ignore"):
                x = np.where(seen >= 2, data["entropy"].values / np.log(seen), np.nan)
        elif name not in data:
            x = np.full(data["entropy"].shape, np.nan)
        else:
            x = data[name].values.astype(float)
        if QUANTITIES[name].from_second:
            x = x.copy()
            x[..., 0] = np.nan
        found.append(x[0])
    return np.concatenate(found, -1)


def early_of(profiles: list[Any], group: str) -> np.ndarray:
    """Sink scores of the first 64 keys from dense weights, (text, layer, head, key)."""
    found = []
    for p in profiles:
        w = p.groups[group]["weights"].values[0].astype(float)
        if w.shape[-2] >= 64:
            null = p.groups[group]["sink_mass"].values[0] if "sink_mass" in p.groups[group] else 0.0
            a = w / (w.sum(-1) + null)[..., None]
            found.append(a[..., :64, :64].sum(-2) / (w[..., :64, :64] > 0).sum(-2))
    return np.stack(found)


def survey_of(case: str) -> tuple[Survey, list[Any], list[list[int]]]:
    """A survey of a model, and the profiles and ids of its texts."""
    model: nn.Module = own(normalizer=case) if case in ("softmax", "sigmoid") else hf.build(case)
    tokenizer: Any = ByteTokenizer() if case in ("softmax", "sigmoid") else Words()
    texts = {"bart": TEXTS[1:4], "bert": TEXTS, "gpt_oss": TEXTS}.get(case, ["x = 1\n" * 12, *OWN_TEXTS[3:]])
    if case != "gpt_oss":  # whose experts know no float64
        model.double()
    with tempfile.TemporaryDirectory() as out:
        found = survey(model, texts, tokenizer=tokenizer, out=out, shards=2, batch_tokens=150, local_window=LOCAL)
    ids = [torch.as_tensor(tokenizer(t)["input_ids"]).view(1, -1) for t in texts]
    inputs: list[Any] = [{"input_ids": x, "decoder_input_ids": x} if case == "bart" else x for x in ids]
    return found, [quick(model, x, local_window=LOCAL) for x in inputs], [x[0].tolist() for x in ids]


@pytest.fixture(scope="module")
def surveyed() -> Callable[[str], Any]:
    """`survey_of`, which computes each case once."""
    return functools.cache(survey_of)


@pytest.mark.parametrize("case", ["bert", "gpt_oss", "bart", "softmax", "sigmoid"])
def test_survey_equals_the_average_of_profiles(case: str, surveyed: Any) -> None:
    found, profiles, ids = surveyed(case)
    assert found.record["tokens"] == sum(map(len, ids))
    assert set(found.groups) == set(profiles[0].groups)
    for group in found.groups:
        table = found.heads(group)
        layers = [layer for _, layer in sorted(found.group(group).layers.items())]
        for q, name in enumerate(QUANTITIES):
            x = pooled(profiles, group, name).reshape(len(table), -1)
            n = np.isfinite(x).sum(1)
            assert np.array_equal(np.concatenate([layer.added["count"][q] for layer in layers]), n), name
            if not n.any():
                assert table[name].isna().all(), name
                continue
            for suffix, of in {"": np.nanmean, "_std": np.nanstd, "_min": np.nanmin, "_max": np.nanmax}.items():
                np.testing.assert_allclose(table[f"{name}{suffix}"], of(x, 1), rtol=1e-5, atol=2e-6, err_msg=name)
        if case != "bart":
            early = early_of(profiles, group)
            np.testing.assert_allclose(found.sinks(group)["score"], early.mean((0, 1, 2)), rtol=1e-6, atol=1e-7)
            assert np.array_equal(found.sinks(group)["share"] * early[..., 0].size, (early > 0.3).sum((0, 1, 2)))


def test_weight_by_kind_of_key_and_by_token(surveyed: Any) -> None:
    found, profiles, every = surveyed("bert")
    special, delimiter, queries = np.zeros((2, 4)), np.zeros((2, 4)), 0
    by_token, keys = np.zeros(hf.VOCABULARY), np.zeros(hf.VOCABULARY)
    for ids, p in zip(map(np.array, every), profiles, strict=True):
        received = p.data["received"].values[0].astype(float)
        special += received[..., ids <= 2].sum(-1)
        delimiter += received[..., ids == 5].sum(-1)
        queries += len(ids)
        np.add.at(by_token, ids, received.mean((0, 1)))
        np.add.at(keys, ids, 1)
    table = found.heads()
    np.testing.assert_allclose(table["special"], special.ravel() / queries, rtol=1e-6)
    np.testing.assert_allclose(table["delimiter"], delimiter.ravel() / queries, rtol=1e-6)
    tokens = found.tokens(7)
    best = np.argsort(-by_token)[:7]
    assert tokens["id"].tolist() == best.tolist()
    assert tokens["token"].tolist() == Words().convert_ids_to_tokens(best.tolist())
    np.testing.assert_allclose(tokens["share"], by_token[best] / queries, rtol=1e-6)
    assert tokens["count"].tolist() == keys[best].tolist()
    assert np.array_equal(found.group("self").token_count, 2 * keys), "padding was counted"


def test_overlap_of_pieces_is_context_only(tmp_path: Path) -> None:
    model = hf.build("bert").double()
    text = words(50, 3)
    assert Special.of(Words()) == Special((1,), (2,))
    found = survey(model, [text], tokenizer=Words(), out=tmp_path, shards=1, length=24, overlap=6)
    cut = list(pieces(Words()(text, add_special_tokens=False)["input_ids"], Special((1,), (2,)), 24, 6))
    assert (found.record["documents"], found.record["sequences"], found.record["tokens"]) == (1, 3, 52)
    profiles = [quick(model, torch.tensor([p.ids])).data["entropy"].values[0] for p in cut]
    want = np.concatenate([x[..., p.start : p.stop] for x, p in zip(profiles, cut, strict=True)], -1)
    assert want.shape[-1] == 52
    np.testing.assert_allclose(found.heads()["entropy"], want.mean(-1).ravel(), rtol=1e-6)


def test_sinks_are_those_of_pieces_that_begin_a_text(tmp_path: Path) -> None:
    run: dict[str, Any] = {"model": own().double(), "length": 80, "overlap": 0, "shards": 1}
    one, two = (own_survey(tmp_path / str(n), ["x = 1\n" * n], **run).sinks() for n in (13, 26))
    assert two["score"].notna().all()
    np.testing.assert_allclose(one["score"], two["score"], rtol=1e-6)


def test_refused_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    run: dict[str, Any] = {"tokenizer": Words(), "long": "refuse"}
    long = survey(hf.build("bert"), TEXTS, out=tmp_path / "a", length=43, **run)
    assert long.record["skipped"] == {"longer than 43 tokens": 2}
    assert long.record["documents"] == len(TEXTS) - 2
    assert long.record["examples"] == ["texts 0: longer than 43 tokens", "texts 6: longer than 43 tokens"]
    with refused("texts", "longer than 8 tokens"):
        survey(hf.build("bert"), [words(30, 1)], out=tmp_path / "b", shards=1, length=8, **run)


def test_surveys_of_different_corpora_merge_if_they_have_one_definition(tmp_path: Path) -> None:
    def run(name: str, texts: list[str], **settings: Any) -> Survey:
        return own_survey(tmp_path / name, texts, model, **{"shards": 1} | settings)

    model = own().double()
    whole, first, second = run("whole", OWN_TEXTS), run("a", OWN_TEXTS[:3]), run("b", OWN_TEXTS[3:])
    merged = first.merge(second)
    assert {n: merged.record[n] for n in ("documents", "tokens")} == {"documents": 6, "tokens": whole.record["tokens"]}
    for name in QUANTITIES:
        np.testing.assert_allclose(merged.heads()[name], whole.heads()[name], rtol=1e-9)
    assert merged.packed() != whole.packed()
    assert Survey.load(merged.save(tmp_path / "m.zip")).packed() == merged.packed()

    def changed(change: Any) -> Survey:
        definition = json.loads(json.dumps(first.definition))
        change(definition)
        return Survey(definition, first.groups, first.record)

    old = changed(lambda definition: definition.pop("shares_of_rows"))
    refusals = [
        ("twice", first, first),
        ("in 2 shards", whole, run("two", OWN_TEXTS, shards=2)),
        ("local_window is 8 and 3", first, changed(lambda definition: definition.update(local_window=3))),
        ("is missing and", Survey.load(old.save(tmp_path / "old.qkv.zip")), first),
        (f"bins is {BINS} and 7", first, changed(lambda d: d["quantities"]["sink"].update(bins=7))),
    ]
    for match, one, other in refusals:
        with refused("other", match):
            one.merge(other)


def test_configuration_and_weights_are_part_of_the_definition(tmp_path: Path) -> None:
    """The same tensors with other rotary positions are another model; so is one number changed."""
    for change in ("configuration", "weights", None):
        model = hf.build("llama")
        definition = definition_of(model, Words(), Settings(name="m"))
        if change == "configuration":
            model.config.rope_theta = 3.0
        elif change == "weights":
            next(model.parameters()).data.view(-1)[5] += 1
        other = definition_of(model, Words(), Settings(name="m"))
        assert [key for key in definition if definition[key] != other[key]] == ([change] if change else [])


def test_damaged_files_are_rejected_or_harmless(tmp_path: Path) -> None:
    file = tmp_path / "damaged.qkv.zip"
    with refused("path", match="cannot read"):
        Survey.load(file)
    data = own_survey(tmp_path / "s").packed()
    generator = np.random.default_rng(0)
    for at in generator.integers(0, len(data), 40):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(spoilt)
        try:
            Survey.load(file)
        except InputError as error:
            assert error.argument == "path", error  # noqa: PT017
    part = tmp_path / "s" / "shards" / "0001.qkv.zip"
    part.write_bytes(part.read_bytes()[:900])
    with refused("path", "delete it and run"):
        own_survey(tmp_path / "s")


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("shards", {"shards": 0}, None),
    ("batch_tokens", {"batch_tokens": 0}, None),
    ("local_window", {"local_window": 0}, None),
    ("length", {"length": 81}, "80"),
    ("overlap", {"overlap": 80}, "less than 80"),
    ("long", {"long": "cut"}, "'cut'"),
    ("engine", {"engine": "slurm"}, None),
    ("gpus", {"gpus": 1}, None),
    ("tokenizer", {"tokenizer": None}, None),
    *(("only_shards", {"only_shards": x}, repr(x)) for x in ("1/2/3", "1/4 ", "2/2", "0/0", "0/4")),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "settings", "match"), REFUSED, ids=str)
def test_invalid_settings_are_rejected(
    argument: str, settings: dict[str, Any], match: str | None, tmp_path: Path
) -> None:
    with refused(argument, match):
        own_survey(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_figures_are_drawn_and_invalid_calls_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("length", match="2 special"):
        list(pieces([3], Special((1,), (2,)), 2, 0))
    found = own_survey(tmp_path / "part", only_shards="0/3")
    assert found.record["documents"] > 0
    for draw in survey_plots.FIGURES.values():
        draw(found).draw_without_rendering()
    assert render_survey(found).count("<img") == len(survey_plots.FIGURES)
    types, heads = found.types(), found.heads()
    assert (types["type"] == "previous token").equals(heads["previous"] >= 0.4)
    assert found.findings()[1].value == f"{(types['type'] != 'mixed').sum()} of {len(heads)}"
    with refused("group"):
        found.heads("cross")
    monkeypatch.setenv("WORLD_SIZE", "2")  # in a process of torchrun
    with refused("WORLD_SIZE", match="only_shards"):
        own_survey(tmp_path / "all")
    assert not (tmp_path / "all").exists()
    own_survey(tmp_path / "part", only_shards="0/3")


def test_texts_too_short_to_tell_a_sink_have_no_types(tmp_path: Path) -> None:
    found = survey("qkv-mini", ["import os"], out=tmp_path, shards=1)
    assert {*found.types()["type"]} == {"mixed"}
    assert "too short" in found.findings()[0].label


class Chats(Words):
    """The same with a template, which writes a word before and after a question."""

    chat_template = "any"

    def apply_chat_template(self, asked: list[dict[str, str]], **_: Any) -> str:
        return f"user {asked[0]['content']} assistant"


def test_a_survey_of_chats_is_that_of_the_texts_which_the_template_writes(tmp_path: Path) -> None:
    model, questions = hf.build("gpt2"), [words(n, n) for n in (3, 9)]
    asked = survey(model, questions, tokenizer=Chats(), out=tmp_path / "asked", shards=1, chat=True)
    assert asked.definition["chat"]
    assert asked.record["tokens"] == 3 + 9 + 2 * 2, "nothing is added but what the template writes"
    ids = [torch.tensor([Words()(f"user {q} assistant", add_special_tokens=False)["input_ids"]]) for q in questions]
    entropy = [quick(model, one).data["entropy"].values[0] for one in ids]
    mean = np.concatenate(entropy, -1).mean(-1).ravel()
    np.testing.assert_allclose(asked.heads()["entropy"], mean, rtol=1e-5)
    with refused("chat", match="no chat template"):
        survey(model, questions, tokenizer=Words(), out=tmp_path / "none", shards=1, chat=True)

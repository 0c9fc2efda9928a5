"""Surveys: sums merge exactly for any split of the corpus, results equal those of profiles, and no text is lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
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
import qkv
import survey_process
from conftest import rand, refused
from forked import Forked
from qkv._survey_settings import Settings
from qkv.cli import main
from qkv.errors import InputError
from qkv.figures import survey as survey_plots
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler import profile
from qkv.profiler.surveys import accumulators, corpus, shard
from qkv.profiler.surveys.accumulators import BINS, DIGITS, QUANTITIES, Layer, edges
from qkv.profiler.surveys.merging import Incomplete, check_complete
from qkv.profiler.surveys.shard import Batch, Piece, Special, batches_of, pieces
from qkv.profiler.surveys.survey import Survey, survey
from qkv.profiler.surveys.work import definition_of
from survey_process import TEXTS as OWN_TEXTS
from survey_process import own, own_survey

LOCAL = 5


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


# --- accumulators -----------------------------------------------------------------------------------------------------


def layer_of(values: np.ndarray, valid: np.ndarray) -> Layer:
    layer = Layer("m", values.shape[2])
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
    names = [n for n, _ in a.arrays() if sketches or not n.startswith("sketch")]
    x, y = dict(a.arrays()), dict(b.arrays())
    return all(np.array_equal(x[n], y[n]) for n in names)


@given(parts())
def test_merging_is_exact_associative_and_commutative(batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
    a, b, c = (layer_of(*part) for part in batches)
    whole = Layer("m", 2)
    for values, valid in batches:
        whole.add(torch.from_numpy(values), torch.from_numpy(valid))
    whole.seal()
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
        assert same(merged, whole)
    assert same(a.merge(b).merge(c), a.merge(b).merge(c), sketches=True)


@given(parts())
def test_moments_equal_those_of_all_values(batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
    a, b, c = (layer_of(*part) for part in batches)
    found = a.merge(b).merge(c)
    for q, name in enumerate(QUANTITIES):
        for h in range(2):
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
            borders = edges(name)
            inside = np.histogram(np.clip(x, 0, borders[-1]), borders)[0]
            moved = np.abs(found.added["histogram"][q, h] - inside).sum()  # what lies on a border may fall either way
            near = (np.abs(x[:, None] - borders) < 1e-9 * np.maximum(x[:, None], 1e-9)).any(1).sum()
            assert moved <= 2 * near


def test_quantiles_are_exact_to_a_bin_and_sketches_close() -> None:
    values = np.abs(rand(len(QUANTITIES), 400, 2, 7).numpy()) % 1
    found = layer_of(values, np.ones(values.shape, bool))
    for rank in (0.05, 0.5, 0.95):
        for q, name in enumerate(QUANTITIES):
            widest = np.diff(edges(name)[: np.searchsorted(edges(name), values[q].max()) + 1]).max()
            want = np.quantile(values[q].transpose(1, 0, 2).reshape(2, -1), rank, axis=1)
            assert np.abs(found.quantile(rank)[q] - want).max() <= 1.01 * widest
        means = values.mean(-1)
        below = (means <= found.quantile_of_texts(rank)[:, None]).mean(1)
        assert np.abs(below - rank).max() < 0.02


def test_nan_values_are_rejected() -> None:
    values = torch.zeros(len(QUANTITIES), 1, 2, 3)
    values[2, 0, 1, 1] = torch.nan
    with refused("model", match="of m: its parameters"):
        Layer("m", 2).add(values, torch.ones_like(values, dtype=torch.bool))
    valid = torch.ones_like(values, dtype=torch.bool)
    valid[2, 0, 1, 1] = False  # values that do not count may be NaN
    Layer("m", 2).add(values, valid)


# --- pieces -----------------------------------------------------------------------------------------------------------


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


def test_special_tokens_are_found_from_the_tokenizer() -> None:
    assert Special.of(Words()) == Special((1,), (2,))
    assert Special.of(ByteTokenizer()) == Special()
    with refused("length", match="2 special"):
        list(pieces([3], Special((1,), (2,)), 2, 0))


# --- the same numbers as profiles -------------------------------------------------------------------------------------


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
        if QUANTITIES[name].later:
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


def cases() -> Mapping[str, Callable[[], tuple[nn.Module, Any, list[str]]]]:
    return {
        "bert": lambda: (hf.build("bert"), Words(), TEXTS),
        "llama": lambda: (hf.build("llama"), Words(), TEXTS),
        "gpt_oss": lambda: (hf.build("gpt_oss"), Words(), TEXTS),
        "bart": lambda: (hf.build("bart"), Words(), TEXTS[1:4]),
        "own": lambda: (own(), ByteTokenizer(), ["x = 1\n" * 12, *OWN_TEXTS[3:]]),
        "sigmoid": lambda: (own(normalizer="sigmoid"), ByteTokenizer(), ["x = 1\n" * 12, *OWN_TEXTS[3:]]),
    }


@pytest.mark.parametrize("case", cases())
def test_survey_equals_the_average_of_profiles(case: str, tmp_path: Path) -> None:
    model, tokenizer, texts = cases()[case]()
    if case != "gpt_oss":  # whose experts know no float64
        model.double()
    found = survey(model, texts, tokenizer=tokenizer, out=tmp_path, shards=2, batch_tokens=150, local_window=LOCAL)
    ids = [torch.as_tensor(tokenizer(t)["input_ids"]).view(1, -1) for t in texts]
    inputs = [{"input_ids": x, "decoder_input_ids": x} if case == "bart" else x for x in ids]
    profiles = [profile(model, x, local_window=LOCAL, progress=False) for x in inputs]
    assert found.record["tokens"] == sum(x.numel() for x in ids)
    assert set(found.groups) == set(profiles[0].groups)
    for group in found.groups:
        table = found.heads(group)
        for name in QUANTITIES:
            x = pooled(profiles, group, name).reshape(len(table), -1)
            n = np.isfinite(x).sum(1)
            counts = np.concatenate([g.added["count"][list(QUANTITIES).index(name)] for g in layers(found, group)])
            assert np.array_equal(counts, n), name
            if not n.any():
                assert table[name].isna().all(), name
                continue
            for suffix, want in {
                "": np.nanmean(x, 1), "_std": np.nanstd(x, 1), "_min": np.nanmin(x, 1), "_max": np.nanmax(x, 1),
            }.items():  # fmt: skip
                np.testing.assert_allclose(table[f"{name}{suffix}"], want, rtol=1e-5, atol=2e-6, err_msg=name)
        if case != "bart":
            early = early_of(profiles, group)
            np.testing.assert_allclose(found.sinks(group)["score"], early.mean((0, 1, 2)), rtol=1e-6, atol=1e-7)
            assert np.array_equal(found.sinks(group)["share"] * early[..., 0].size, (early > 0.3).sum((0, 1, 2)))


def layers(found: Survey, group: str) -> list[Layer]:
    return [layer for _, layer in sorted(found.group(group).layers.items())]


def test_weight_by_kind_of_key_and_by_token(tmp_path: Path) -> None:
    model = hf.build("bert").double()
    found = survey(model, TEXTS, tokenizer=Words(), out=tmp_path, batch_tokens=99)
    special, delimiter, queries = np.zeros((2, 4)), np.zeros((2, 4)), 0
    by_token, keys = np.zeros(hf.VOCABULARY), np.zeros(hf.VOCABULARY)
    for text in TEXTS:
        ids = np.array(Words()(text)["input_ids"])
        received = profile(model, torch.tensor(ids)[None], progress=False).data["received"].values[0].astype(float)
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


def test_overlap_of_pieces_is_context_only(tmp_path: Path) -> None:
    model = hf.build("bert").double()
    text = words(50, 3)
    found = survey(model, [text], tokenizer=Words(), out=tmp_path, shards=1, length=24, overlap=6)
    cut = list(pieces(Words()(text, add_special_tokens=False)["input_ids"], Special((1,), (2,)), 24, 6))
    assert (found.record["documents"], found.record["sequences"], found.record["tokens"]) == (1, len(cut), 52)
    assert len(cut) == 3
    profiles = [profile(model, torch.tensor([p.ids]), progress=False).data["entropy"].values[0] for p in cut]
    want = np.concatenate([x[..., p.start : p.stop] for x, p in zip(profiles, cut, strict=True)], -1)
    assert want.shape[-1] == 52
    np.testing.assert_allclose(found.heads()["entropy"], want.mean(-1).ravel(), rtol=1e-6)


def test_refused_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    long = survey(hf.build("bert"), TEXTS, tokenizer=Words(), out=tmp_path, length=43, long="refuse")
    assert long.record["skipped"] == {"longer than 43 tokens": 2}
    assert long.record["documents"] == len(TEXTS) - 2
    assert long.record["examples"] == ["texts 0: longer than 43 tokens", "texts 6: longer than 43 tokens"]


# --- corpora ----------------------------------------------------------------------------------------------------------


def test_files_that_are_not_text_are_named_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "corpus"
    (root / "inner").mkdir(parents=True)
    (root / "a.txt").write_text("1 2 3")
    (root / "inner" / "b.md").write_text("4 5")
    (root / "binary").write_bytes(b"\x00\x01")
    (root / "latin").write_bytes("é".encode("latin-1"))
    (root / "blank").write_text(" \n")
    (root / ".hidden").write_text("9")
    (root / "lines.jsonl").write_text('{"text": "7 8"}\n\n{"text": 3}\n{"other": ""}\nno JSON\n{"text": " "}\n')
    (root / "locked").write_text("secret")
    os.mkfifo(root / "pipe")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)  # who runs as root may read everything
    found = corpus.of_files([root, root / "a.txt"])
    read_texts = {d.name: d.read() for d in found.documents if d.reason is None}
    assert read_texts == {"a.txt": "1 2 3", "inner/b.md": "4 5", "lines.jsonl:1": "7 8"}
    result = survey(hf.build("bert"), found, tokenizer=Words(), out=tmp_path / "out", shards=3)
    assert result.record["documents"] == 4  # a.txt was named twice
    assert result.record["skipped"] == {
        "empty": 2, "no JSON object with 'text'": 3, "no UTF-8 text": 2, "no file": 1,
        "unreadable: Permission denied": 1,
    }  # fmt: skip
    assert any(e.startswith("binary: ") for e in result.record["examples"])


def test_corpus_without_text_is_rejected(tmp_path: Path) -> None:
    with refused("corpus", match="that exists"):
        corpus.of_files([tmp_path / "nowhere"])
    with refused("corpus", match="no text"):
        corpus.of_files([])
    (tmp_path / "x").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"corpus has no text.*1 left out: no UTF-8 text"):
        corpus.of_files([tmp_path / "x"])
    with refused("corpus", match="holds int"):
        corpus.of_texts([3])  # type: ignore[list-item]


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("some text")
    (document,) = corpus.of_files([file]).documents
    file.unlink()
    with refused("corpus", match="No such file"):
        document.read()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 9))
def test_shards_contain_every_document_once(sizes: list[int], number: int) -> None:
    found = corpus.of_texts("x" * n for n in sizes)
    parts = found.shards(number)
    assert sorted(d.name for part in parts for d in part.documents) == sorted(d.name for d in found.documents)
    loads = [part.size for part in parts]
    assert max(loads) - min(loads) <= max(sizes)


# --- merging and files ------------------------------------------------------------------------------------------------


def test_surveys_merge_and_load(tmp_path: Path) -> None:
    model = hf.build("bert").double()
    run = {"tokenizer": Words(), "shards": 1, "batch_tokens": 70}
    whole = survey(model, TEXTS, out=tmp_path / "whole", **run)
    first, second = (survey(model, t, out=tmp_path / str(len(t)), **run) for t in (TEXTS[:3], TEXTS[3:]))
    merged = first.merge(second)
    assert {n: merged.record[n] for n in ("documents", "tokens")} == {"documents": 7, "tokens": whole.record["tokens"]}
    for name in QUANTITIES:
        np.testing.assert_allclose(merged.heads()[name], whole.heads()[name], rtol=1e-9)
    assert merged.packed() != whole.packed()
    assert Survey.load(merged.save(tmp_path / "m.zip")).packed() == merged.packed()
    with refused("other", match="twice"):
        first.merge(first)


def test_surveys_of_different_definitions_do_not_merge(tmp_path: Path) -> None:
    model = hf.build("bert")
    a = survey(model, TEXTS[:2], tokenizer=Words(), out=tmp_path / "a", shards=1)
    b = survey(model, TEXTS[2:], tokenizer=Words(), out=tmp_path / "b", shards=1, local_window=3)
    with pytest.raises(InputError, match=r"other has another definition, .*: local_window is 8 and 3"):
        a.merge(b)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    c = survey(model, TEXTS[2:], tokenizer=Words(), out=tmp_path / "c", shards=1)
    with pytest.raises(InputError, match=r"other has another definition, .*: weights is"):
        a.merge(c)
    old = Survey({k: x for k, x in a.definition.items() if k != "shares_of_rows"}, a.groups, a.record)
    with pytest.raises(InputError, match="shares_of_rows is missing and present"):
        Survey.load(old.save(tmp_path / "old.qkv.zip")).merge(a)
    d = Survey(json.loads(json.dumps(a.definition)), a.groups, a.record)
    d.definition["quantities"]["sink"]["bins"] = 7
    with pytest.raises(InputError, match=f"quantities.sink.bins is {BINS} and 7"):
        a.merge(d)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.zip"
    with refused("path", match="cannot read"):
        Survey.load(file)
    file.write_bytes(b"PK nonsense")
    with refused("path", match="not a survey"):
        Survey.load(file)
    survey(own(), OWN_TEXTS[:2], tokenizer=ByteTokenizer(), out=tmp_path / "s", shards=2)
    part = tmp_path / "s" / "shards" / "0001.qkv.zip"
    part.write_bytes(part.read_bytes()[:900])
    with pytest.raises(InputError, match="damaged; delete it and run the same command again"):
        survey(own(), OWN_TEXTS[:2], tokenizer=ByteTokenizer(), out=tmp_path / "s", shards=2)


def test_figures_of_every_group(tmp_path: Path) -> None:
    found = survey(hf.build("bart"), TEXTS, tokenizer=Words(), out=tmp_path)
    for draw in survey_plots.FIGURES.values():
        for group in found.groups:
            assert len(draw(found, group=group).axes) >= 1
    with refused("quantity"):
        survey_plots.texts(found, "speed")
    with refused("group"):
        found.heads("self")


# --- going on ---------------------------------------------------------------------------------------------------------


def test_folder_with_other_settings_is_rejected(tmp_path: Path) -> None:
    own_survey(tmp_path)
    with pytest.raises(InputError, match="a survey with other settings: batch_tokens was 90 and is 91"):
        own_survey(tmp_path, batch_tokens=91)
    with pytest.raises(InputError, match=r"definition\.overlap was 10 and is 3"):
        own_survey(tmp_path, overlap=3)
    with pytest.raises(InputError, match="corpus was"):
        survey(own(), OWN_TEXTS[1:], tokenizer=ByteTokenizer(), out=tmp_path, shards=3, batch_tokens=90)


def test_survey_resumes_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        written.append(path.name)
        if "0001" in path.name:
            write(path, data[:100])  # half a file
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match=r"shard 1 to .*No space left on device\); 1 shards are finished and kept"):
            own_survey(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a" / "shards").iterdir()) == ["0000.qkv.zip"]
    before = (tmp_path / "a" / "shards" / "0000.qkv.zip").stat().st_mtime_ns
    assert own_survey(tmp_path / "a").packed() == own_survey(tmp_path / "b").packed()
    assert (tmp_path / "a" / "shards" / "0000.qkv.zip").stat().st_mtime_ns == before


@pytest.mark.slow
def test_killed_survey_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    process = Forked(survey_process.main, tmp_path / "a", 3, 1, folder=tmp_path)
    assert process.wait() == -signal.SIGKILL, process.errors
    assert len(list((tmp_path / "a" / "shards").iterdir())) == 2
    (tmp_path / "a" / "shards" / ".0002.qkv.zip.x.tmp").write_bytes(b"half a file")  # as of one killed while writing
    own_survey(tmp_path / "a"), own_survey(tmp_path / "b")
    files = [sorted(p.relative_to(tmp_path / x) for p in (tmp_path / x).rglob("*")) for x in "ab"]
    assert files[0] == files[1]
    for name in files[0]:
        if (tmp_path / "a" / name).is_file():
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_missing_shards_are_named() -> None:
    with pytest.raises(Incomplete, match=r"2 of 3 shards are missing \(0, 2\) in x; run"):
        check_complete([1], 3, "in x")
    with pytest.raises(Incomplete, match=r"\(0, 2, 3, 4, 5, 6, 7, 8 and 3 more\)"):
        check_complete([1], 12, "in x")
    check_complete([1], 3, "in x", numbers=[1])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_invalid_settings_are_rejected(tmp_path: Path) -> None:
    invalid = (
        ("shards", 0, None), ("batch_tokens", 0, None), ("local_window", 0, None), ("length", 81, "80"),
        ("overlap", 80, "less than 80"), ("long", "cut", "'cut'"),
    )  # fmt: skip
    for argument, value, match in invalid:
        with refused(argument, match):
            own_survey(tmp_path, **{argument: value})
    with refused("tokenizer", match="None"):
        survey(own(), OWN_TEXTS, out=tmp_path)
    with pytest.raises(TypeError, match="shard"):
        own_survey(tmp_path, shard=2)
    assert not list(tmp_path.iterdir())


def test_processes_of_torchrun_are_rejected_unless_each_has_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("WORLD_SIZE", match="only_shards"):
        own_survey(tmp_path / "all")
    assert not (tmp_path / "all").exists()
    assert own_survey(tmp_path / "part", only_shards="0/3").record["documents"] > 0


def test_nan_weights_are_rejected(tmp_path: Path) -> None:
    model = own()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with refused("model", match=r"NaN in blocks\.0"):
        survey(model, OWN_TEXTS, tokenizer=ByteTokenizer(), out=tmp_path)
    assert not list((tmp_path / "shards").iterdir())


def test_padding_and_context_do_not_change_sums() -> None:
    """Padding and context change nothing: the same texts in one batch or each alone give the same sums."""
    model = hf.build("bert").double()
    definition = definition_of(model, Words(), Settings(length=64, overlap=0, name="b"))
    surveyor = shard.Surveyor(model, Words(), definition, 1)
    cut = [
        Piece([1, 7, 8, 9, 2], 0, 5, True),
        Piece([1, 5, 2], 0, 2, True),
        Piece([1, 30, 31, 32, 33, 34, 2], 3, 7, False),
    ]
    together: dict[str, accumulators.Group] = {}
    alone: dict[str, accumulators.Group] = {}
    surveyor._add(Batch.of(cut, 0), together)
    for piece in cut:
        surveyor._add(Batch.of([piece], 0), alone)
    a, b = together["self"], alone["self"]
    assert np.array_equal(a.token_count, b.token_count)
    assert a.layers[0].added["queries"].tolist() == [5 + 2 + 4] * 4
    for at, layer in a.layers.items():
        for name, x in layer.added.items():
            want = b.layers[at].added[name]
            if x.dtype == object:
                np.testing.assert_allclose(accumulators.number(x), accumulators.number(want), rtol=1e-9, atol=1e-9)
            else:
                assert np.abs(x - want).sum() <= (0 if name != "histogram" else 4)


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_writes_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "texts" / "b.bin").write_bytes(b"\0")
    out = tmp_path / "out"
    assert main(["survey", "qkv-mini", str(tmp_path / "texts"), "--out", str(out), "--shards", "2"]) == 0
    said = capsys.readouterr().out
    assert "1 texts" in said
    assert "Skipped 1 texts: 1 × no UTF-8 text" in said
    assert "b.bin" in said
    names = {p.name for p in out.iterdir()}
    assert names >= {"survey.qkv.zip", "heads.csv", "heads.png", "sinks.png", "texts.png", "distribution.png"}
    config = qkv.models.load("qkv-mini").config
    assert len((out / "heads.csv").read_text().splitlines()) == 1 + config.layers * config.heads


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["minilm", "/nowhere"], "path '/nowhere', expected a file or folder that exists"),
        (["minilm", "library", "x"], "library is a named corpus"),
        (["qkv-mini", "{text}", "--shards", "0"], "shards is 0"),
        (["minilm", "{text}", "--length", "9999"], "length is 9,999"),
        (["qkv-mini", "{text}", "--threads", "0"], "--threads is 0"),
        (["qkv-mini", "{text}", "--device", "abacus"], "--device is 'abacus'"),
    ],
)
def test_command_reports_bad_input_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("hello there")
    given_ = [a.format(text=tmp_path / "t.txt") for a in arguments]
    assert main(["survey", *given_, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_unknown_flag_exits_with_code_2() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["survey", "--sharps", "3"])
    assert ended.value.code == 2


# --- found by reading -------------------------------------------------------------------------------------------------


def test_changed_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    for other in ("some text, longer now", "so", "SOME TEXT"):
        file.write_text("some text")
        (document,) = corpus.of_files([file]).documents
        assert document.read() == "some text"
        file.write_text(other)
        os.utime(file, ns=(1, 1))
        with refused("corpus", match="modification time"):
            document.read()


def test_invalid_lines_and_links_are_named_and_counted(tmp_path: Path) -> None:
    lines = ['\ufeff{"text": "first"}', '{"text": "bad \\ud800"}', "[" * 100_000, '{"text": "last"}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    found = corpus.of_files([tmp_path / "in"]).documents
    assert [(d.name, d.reason) for d in found] == [
        ("link", "unreadable: a link to a folder"), ("a.jsonl:1", None), ("a.jsonl:2", "no JSON object with 'text'"),
        ("a.jsonl:3", "no JSON object with 'text'"), ("a.jsonl:4", None),
    ]  # fmt: skip
    assert [d.read() for d in found if d.reason is None] == ["first", "last"]


def test_single_string_is_one_text() -> None:
    assert len(corpus.of_texts("one text").documents) == 1


def test_corpus_with_different_numbers_of_shards_does_not_merge(tmp_path: Path) -> None:
    one, two = (own_survey(tmp_path / str(n), shards=n) for n in (1, 2))
    with pytest.raises(InputError, match="in 2 shards, and this survey in 1"):
        one.merge(two)


def test_configuration_and_weights_are_part_of_the_definition(tmp_path: Path) -> None:
    """The same tensors with other rotary positions are another model; so is one number changed."""
    model = hf.build("llama")
    survey(model, TEXTS, tokenizer=Words(), out=tmp_path, shards=2)
    model.config.rope_theta = 3.0
    with pytest.raises(InputError, match=r"other settings: definition\.configuration"):
        survey(model, TEXTS, tokenizer=Words(), out=tmp_path, shards=2)
    model = hf.build("llama")
    with torch.no_grad():
        next(model.parameters()).view(-1)[5] += 1
    with pytest.raises(InputError, match=r"other settings: definition\.weights"):
        survey(model, TEXTS, tokenizer=Words(), out=tmp_path, shards=2)


def test_flipped_bits_are_rejected_or_harmless(tmp_path: Path) -> None:
    data = own_survey(tmp_path / "s", shards=1).packed()
    file = tmp_path / "damaged.qkv.zip"
    generator = np.random.default_rng(0)
    for at in generator.integers(0, len(data), 60):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(spoilt)
        try:
            Survey.load(file)
        except InputError as error:
            assert "damaged" in str(error) or "format" in str(error)  # noqa: PT017


def test_corpus_of_refused_texts_only_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="texts has no text that can be surveyed; left out: longer than 8 tokens"):
        survey(hf.build("bert"), [words(30, 1)], tokenizer=Words(), out=tmp_path, shards=1, length=8, long="refuse")

"""`Profile`: its tables agree with dense weights, files are read back identically, and damaged files are rejected."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import profile_fixture as made
import qkv
from conftest import refusals, refused
from qkv import Profile
from qkv.profiler.capture.inputs import token_texts
from qkv.profiler.data import archive, tables


def weights_of(profile: Profile, text: int = 0, group: str | None = None) -> np.ndarray:
    """The dense weights of one text without padding, (layer, head, query, key), float64."""
    data = profile.group(group)
    n_queries, n_keys = int(data["n_queries"][text]), int(data["n_keys"][text])
    return data["weights"].values[text, ..., :n_queries, :n_keys].astype(np.float64)


def test_head_table_of_bidirectional_attention_agrees_with_the_weights() -> None:
    profile = made.minilm()
    A, heads = weights_of(profile), profile.heads()
    n, rows = A.shape[-1], made.by_definition(A)
    expected = {
        name: rows[name].mean(-1) for name in ("entropy", "self", "next", "local", "distance", "effective_keys")
    }
    expected |= {
        "entropy_ratio": (rows["entropy"] / np.log(n)).mean(-1),
        "sink": A[..., 1:, 0].mean(-1),
        "previous": rows["previous"][..., 1:].mean(-1),
        "sink_share": (A[..., 1:, 0] > 0.3).mean(-1),
        "top_key_share": A.sum(-2).max(-1) / n,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(heads[name], value.ravel(), rtol=2e-5, atol=1e-6, err_msg=name)
    assert list(heads["top_key"]) == list(A.sum(-2).argmax(-1).ravel())
    assert list(heads["layer"][:13]) == [0] * 12 + [1]
    assert list(heads["head"][:13]) == [*range(12), 0]
    assert heads["module"][12] == "encoder.layer.1.attention.self"
    tokens = profile.data["key_token"].values[0]
    assert list(heads["top_key_token"]) == list(tokens[heads["top_key"]])


def test_causal_means_leave_out_the_first_query() -> None:
    profile = made.gpt()
    A, heads = weights_of(profile), profile.heads()
    rows = made.by_definition(A)
    ratio = rows["entropy"][..., 1:] / np.log(np.arange(2, A.shape[-1] + 1))
    for name, want in {"entropy_ratio": ratio, "sink": A[..., 1:, 0], "previous": rows["previous"][..., 1:]}.items():
        np.testing.assert_allclose(heads[name], want.mean(-1).ravel(), rtol=1e-5)


def of_weights(weights: np.ndarray, tokens: list[str], **settings: Any) -> Profile:
    return Profile({"self": made.dataset_from_weights([weights], [tokens], **settings)})


def test_goes_to_names_the_planted_target() -> None:
    assert list(made.gpt().heads()["target"][:5]) == ["first token", "previous", "self", "local ±8", "spread"]
    assert made.gpt().heads()["goes_to"][0] == "first token 99 %"
    assert made.minilm().heads()["goes_to"][23] == "[CLS] 56 %"
    tokens = ["a", ".", "b", "c", ".", "d", "e", "f", "g", "h"] * 3
    stop = np.array([token == "." for token in tokens])
    weights = np.where(stop, 0.7 / stop.sum(), 0.3 / (~stop).sum()) * np.ones((1, 1, 30, 1))
    assert of_weights(weights, tokens, window=1).heads()["goes_to"][0] == "“.” 70 %", "with twice its share"
    row = of_weights(np.full((1, 1, 7, 7), 1 / 7), list("abcdefg")).heads().iloc[0]
    assert row["local"] == pytest.approx(1)
    assert row["target"] == "spread", "a short text is not local"


def disjoint(A: np.ndarray, special: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """The weight of every query on every key under the first name that fits, from the dense weights."""
    n = A.shape[-1]
    i, j = np.indices((n, n))
    left, shares = np.ones((n, n), bool), {}
    for name, fits in {
        "first": j == 0,
        "special": special[j],
        "self": i == j,
        "previous": j == i - 1,
        "next": j == i + 1,
        "nearby": abs(i - j) <= window,
        "elsewhere": True,
    }.items():
        shares[name] = (A * (left & fits)).sum((-1, -2)) / n
        left &= ~np.asarray(fits)
    return shares


@pytest.mark.parametrize("profile", [made.gpt, made.minilm, lambda: made.minilm(keep_weights=False)])
def test_destinations_are_disjoint_and_complete(profile: Callable[[], Profile]) -> None:
    data = profile().data
    dense = data if "weights" in data else made.minilm().data
    A = dense["weights"].values[0].astype(np.float64)
    special = np.isin(data["key_token"].values[0].astype(str), data.attrs["special_tokens"])
    expected, got = disjoint(A, special, 8), tables.destinations(data)
    for name, share in expected.items():
        # Without weights only the neighbourhood of the few queries near [SEP] is inexact.
        inexact = "weights" not in data and name in ("nearby", "elsewhere")
        np.testing.assert_allclose(got[name][0], share, atol=8 / A.shape[-1] if inexact else 2e-6, err_msg=name)
    assert (got["nearby"][0] <= expected["nearby"] + 2e-6).all()
    np.testing.assert_allclose(sum(got.values()), 1, atol=1e-5)


def test_learned_sink_is_a_destination() -> None:
    profile = made.gpt(learned_sink=True)
    shares = tables.destinations(profile.data)
    np.testing.assert_allclose(shares["sink_logit"], 0.25, rtol=1e-6)
    np.testing.assert_allclose(sum(shares.values()), 1, rtol=1e-6)
    assert "first token" in set(profile.heads()["target"])


def test_tables_average_texts_without_padding() -> None:
    short, long = "The cat sat on the mat.", "It rained all day, and nobody came to see the sea."
    both = made.minilm((short, long)).heads()
    single = [made.minilm((text,)).heads() for text in (short, long)]
    for name in ("entropy", "entropy_ratio", "sink", "previous", "distance", "sink_share"):
        np.testing.assert_allclose(both[name], (single[0][name] + single[1][name]) / 2, rtol=1e-5, atol=1e-7)


def test_token_shares_add_up_to_one() -> None:
    profile = made.minilm()
    A = weights_of(profile)
    received = A.sum(-2).mean((0, 1)) / A.shape[-1]
    names = profile.data["key_token"].values[0]
    table = profile.tokens(1000)
    assert table["share"].sum() == pytest.approx(1, abs=1e-5)
    assert list(profile.tokens(3)["token"]) == ["[CLS]", "the", "."]
    the = table.set_index("token").loc["the"]
    assert the["share"] == pytest.approx(received[names == "the"].sum(), rel=1e-5)
    assert the["count"] == (names == "the").sum()
    assert the["lift"] == pytest.approx(the["share"] / np.mean(names == "the"), rel=1e-5)
    assert names[int(the["position"])] == "the"
    assert made.encoder_decoder().tokens(99, group="cross")["share"].sum() == pytest.approx(1)


def test_tokens_that_differ_in_a_space_are_two_tokens() -> None:
    tokens = ["x", " the", "the", "a", " the", "b", "the", " the", "c", "d"] * 2
    chosen = {token: np.array([token == one for one in tokens]) for token in ("the", " the")}
    weights = np.full((1, 2, 20, 20), 0.01)
    for head, (share, token) in enumerate(((0.8, " the"), (0.9, "the"))):
        weights[0, head, :, chosen[token]] = share / chosen[token].sum()
    weights /= weights.sum(-1, keepdims=True)
    profile = of_weights(weights, tokens)
    names, shares, counts = tables.repeated_shares(profile.data)
    for head, (name, token, copies) in enumerate((("␣the", " the", 6), ("the", "the", 4))):
        assert counts[names.index(name)] == copies
        assert shares[head, names.index(name)] == pytest.approx(weights[0, head, 0, chosen[token]].sum())
    assert list(profile.heads()["target"]) == ["“␣the”", "“the”"]
    table = profile.tokens(99).set_index("token")
    assert (table.loc[" the", "count"], table.loc["the", "count"]) == (6, 4)


@pytest.mark.parametrize("name", ["minilm", "qkv-mini", "byte-level"])
def test_every_token_has_a_text_of_its_own(name: str) -> None:
    if name == "byte-level":
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        pieces = sorted({*pre_tokenizers.ByteLevel.alphabet(), "ĠðŁĺ", "Ġ.", "Ġ,", "ðŁĺĢ", "Ċ<"})
        made_here = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
        made_here.decoder = decoders.ByteLevel()
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made_here, clean_up_tokenization_spaces=True)
        ids = [pieces.index(piece) for piece in ("ĠðŁĺ", "Ģ", "Ġ.", "ðŁĺĢ")]
        assert token_texts(tokenizer, ids) == [" <0xF0><0x9F><0x98>", "<0x80>", " .", "😀"]
    else:
        tokenizer = qkv.load(name)[1]
    texts = token_texts(tokenizer, range(len(tokenizer)))
    assert len({*texts}) == len(tokenizer) > 200


def test_saved_profile_loads_identically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = ["", "nul\0", "naïve", "\u2028", "語", "</script>", "a" * 300]
    path = tmp_path / "x.qkv.zip"
    for profile in (made.encoder_decoder(), of_weights(np.full((1, 1, 7, 7), 1 / 7), strange)):
        for exact, stored in ((True, profile), (False, profile.rounded())):
            back = Profile.load(str(profile.save(path, exact=exact)))
            assert list(back.groups) == list(profile.groups)
            assert back.attrs == stored.attrs
            for name, data in stored.groups.items():
                xr.testing.assert_identical(back.groups[name], data)
            assert [entry.name for entry in tmp_path.iterdir()] == ["x.qkv.zip"]

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        made.encoder_decoder().save(path)
    assert list(Profile.load(path).data["key_token"].values[0]) == strange, "the old file is kept"
    assert len(list(tmp_path.iterdir())) == 1


def test_load_rejects_files_that_are_not_profiles(tmp_path: Path) -> None:
    good = made.gpt().save(tmp_path / "good").read_bytes()
    with zipfile.ZipFile(tmp_path / "good") as archive:
        header = json.loads(archive.read("profile.json"))
        chunk = max(archive.infolist(), key=lambda member: member.file_size)
    middle = chunk.header_offset + len(chunk.filename) + chunk.file_size // 2
    flipped = good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :]

    def archived(root: object) -> bytes:
        with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
            archive.writestr("profile.json", json.dumps(root))
        return file.getvalue()

    cases = [
        (b"not a zip at all", "not a profile"),
        (b"", "not a profile"),
        (good[: len(good) // 2], "not a profile"),
        (flipped, "CRC"),
        (archived(header | {"format_version": 99}), "format version 99"),
        (archived({}), "is not a profile"),
        (archived([1]), "is not a profile"),
    ]
    for content, match in cases:
        (tmp_path / "bad").write_bytes(content)
        with refused("path", match):
            Profile.load(tmp_path / "bad")
    for name, match in (("missing", "no file at"), ("", "is a folder")):
        with refused("path", match):
            Profile.load(tmp_path / name)
    with refused("path", match="does not exist"):
        made.gpt().save(tmp_path / "nowhere" / "x")


def test_rounded_numbers_have_12_significant_bits() -> None:
    """Of 10,000 float32 and float64 numbers of all magnitudes; and those that have a rule of their own."""
    random = np.random.default_rng(0)
    for dtype, lowest, highest in ((np.float32, -126, 127), (np.float64, -1022, 1023)):
        x = np.ldexp(random.uniform(0.5, 1, 10_000), random.integers(lowest + 1, highest, 10_000)).astype(dtype)
        x *= random.choice([-1, 1], 10_000)
        found = archive.rounded(xr.Variable("query", x)).astype(np.float64)
        fraction, _ = np.frexp(found)
        np.testing.assert_array_equal(fraction * 2**12, np.rint(fraction * 2**12))
        assert (abs(found - x) <= abs(x.astype(np.float64)) * 2.0**-12).all()
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    special = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 0.1, largest, -largest, smallest, 1 + 2**-12], np.float32)
    found = archive.rounded(xr.Variable("query", special))
    np.testing.assert_array_equal(found[:5], special[:5])
    assert np.signbit(found[4])
    assert found[-1] == 1, "ties to even"
    np.testing.assert_allclose(found[6:8], special[6:8], rtol=2**-11)
    assert found[8] == 0, "less than the error of the smallest normal number"
    for exact in (np.float32([8191, np.nan, np.inf]), np.arange(10_000), np.float16([0.1])):
        np.testing.assert_array_equal(archive.rounded(xr.Variable("query", exact)), exact)
    np.testing.assert_array_equal(archive.rounded(xr.Variable("layer", special)), special)


def test_arrays_of_all_kinds_are_stored_exactly(tmp_path: Path) -> None:
    """Equal heads and layers, single ones, numbers with and without low bits, integers, and arrays without entries."""
    random, sizes = np.random.default_rng(0), (2, 6, 3, 5)
    few = random.standard_normal((2, 3, 1, 5))
    values = {
        "repeated": np.broadcast_to(few.repeat(2, 1), sizes).astype(np.float32), "float64": few, "one": np.zeros(()),
        "same": np.full(sizes, 0.1), "float16": few.astype(np.float16), "bool": few > 0, "empty": np.zeros((0, 3)),
        "int64": random.integers(-(2**62), 2**62, sizes), "uint8": np.arange(5, dtype=np.uint8),
        "big": few.astype(">f4"), "nan": np.array([np.nan, np.inf, -0.0, 5e-324]),
        "text": np.array(["a", "b\0"], object),
    }  # fmt: skip
    data = xr.Dataset({n: xr.Variable([f"{n}{axis}" for axis in range(x.ndim)], x) for n, x in values.items()})
    archive.write_archive(tmp_path / "x", {"groups": {}, "residual": {"all": data}}, {"model": "x"}, exact=True)
    parts, attrs = archive.read_archive(tmp_path / "x")
    xr.testing.assert_identical(parts["residual"]["all"], data)
    for name, x in values.items():
        assert parts["residual"]["all"][name].dtype == x.dtype.newbyteorder("=")
    assert attrs == {"model": "x"}
    with refused("groups", match="complex64"):
        wrong = {"groups": {"self": xr.Dataset({"x": ("k", np.zeros(1, np.complex64))})}, "residual": {}}
        archive.write_archive(tmp_path / "y", wrong, {}, exact=True)


def test_tables_of_a_saved_profile_are_those_of_its_rounded_copy(profile: Profile, tmp_path: Path) -> None:
    rounded, back = profile.rounded(), Profile.load(profile.save(tmp_path / "x.zip"))
    pd.testing.assert_frame_equal(rounded.heads(), back.heads())
    assert rounded.findings() == back.findings()
    np.testing.assert_allclose(back.heads()["entropy"], profile.heads()["entropy"], rtol=2**-12)
    assert profile.compare(back).summary()[0].startswith("Nothing changed")
    assert back.compare(profile).summary()[0].startswith("Nothing changed")


DATA = made.gpt().data
REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("groups", "got no data set", lambda: Profile({})),
    ("groups", "the name 'a/b'", lambda: Profile({"a/b": DATA})),
    ("groups['self']", "'entropy' is missing", lambda: Profile({"self": DATA.drop_vars("entropy")})),
    ("groups['self']", "'module' is missing", lambda: Profile({"self": DATA.drop_vars("module")})),
    ("groups['self']", "has dims", lambda: Profile({"self": DATA.transpose("text", "head", "layer", ...)})),
    ("groups['self']", "'causal' is missing", lambda: Profile({"self": DATA.drop_attrs()})),
    ("groups", "written as JSON", lambda: Profile({"self": DATA.assign_attrs(extra=object())})),
    ("groups['self']", "'n_queries' must lie", lambda: Profile({"self": DATA.assign_coords(n_queries=("text", [62]))})),
    ("groups['self']", "got DataArray", lambda: Profile({"self": DATA["entropy"]})),  # type: ignore[dict-item]
    ("attrs", None, lambda: Profile({"self": DATA}, {"seconds": float("nan")})),
    ("k", None, lambda: made.gpt().tokens(0)),
    ("group", None, lambda: made.encoder_decoder().heads("self")),
]

test_invalid_data_sets_and_arguments_are_refused = refusals(REFUSALS)


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile() -> Profile:
    return qkv.profile("qkv-mini", "for name in names:\n    print(name)\n", progress=False)


def test_exported_tables_have_a_row_for_every_head(profile: Profile, tmp_path: Path) -> None:
    heads = profile.heads()
    read = pd.read_csv(profile.export(tmp_path / "heads.csv"))
    np.testing.assert_allclose(read["entropy"], heads["entropy"], rtol=1e-6)
    np.testing.assert_allclose(read["alpha_first"], profile.sinks()["alpha_first"], rtol=1e-6)
    np.testing.assert_allclose(read["induction score"], profile.types()["induction"], rtol=1e-6)
    assert not read.columns.duplicated().any()
    parquet = pytest.importorskip("pyarrow.parquet").read_table(profile.export(tmp_path / "heads.parquet"))
    about = parquet.schema.field("distance").metadata
    assert about[b"units"] == b"tokens"
    assert b"distance" in about[b"definition"]
    np.testing.assert_allclose(parquet["entropy"].to_numpy(), heads["entropy"], rtol=1e-6)
    pytest.importorskip("polars")
    frame = profile.heads(frame="polars")
    assert frame.columns == list(heads.columns)
    np.testing.assert_allclose(frame["sink"].to_numpy(), heads["sink"], rtol=1e-6)


def test_export_does_not_replace_other_folders(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "heads.csv").mkdir()
    with refused("path", "is a folder"):
        profile.export(tmp_path / "heads.csv")


def test_export_rejects_unknown_formats_and_missing_libraries(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("path", match="suffix"):
        profile.export(tmp_path / "heads.xlsx")
    with refused("path", match="does not exist"):
        profile.export(tmp_path / "no" / "heads.csv")
    with refused("frame", match="'arrow'"):
        profile.heads(frame="arrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("frame", match="not installed"):
        profile.heads(frame="polars")


def test_page_of_quantities_is_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "make_quantities.py"))["page"]()
    assert page == (docs / "quantities.md").read_text(), "run docs/make_quantities.py"

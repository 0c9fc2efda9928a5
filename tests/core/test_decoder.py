"""DecoderLM, plain and with any composition: the logits of transformers and of formulas, cached as uncached, gradients,
loss, checkpoints and their tokenizers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import check_slopes, close, oracle, rand, refused
from qkv import Attention, biases, features, masks, normalizers, scores
from qkv.cache import Full, HeavyHitters, Sinks, Sliding
from qkv.models import checkpoint, pretrained
from qkv.models.config import to_dict
from qkv.models.decoder import NORMALIZERS, RECURRENT, DecoderConfig, DecoderLM
from qkv.models.loss import linear_cross_entropy
from qkv.models.tokenizers import FileTokenizer

TINY = {"vocab_size": 23, "context": 29, "d_model": 12, "layers": 2, "heads": 6, "kv_heads": 2, "d_hidden": 17}


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.3, **changes: Any) -> DecoderLM:
    """A tiny model whose weights are large enough for everything to matter."""
    torch.manual_seed(seed)
    model = DecoderLM(DecoderConfig(**{**TINY, **changes})).to(dtype).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(rand(*parameter.shape, seed=seed + i, dtype=dtype), alpha=spread)
    return model


def ids_of(*shape: int, seed: int = 0, below: int = 23) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


FLAVOURS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False},
    "output bias": {"tied": False, "output_bias": True},
    "post-norm": {"place": "post", "activation": "relu"},
    "gated": {"gate": "elementwise", "qk_norm": True, "positions": "alibi"},
    "forgetting": {"layer_types": "forgetting", "positions": "none", "kv_heads": None},
    "differential": {"layer_types": "differential", "positions": "rotary", "kv_heads": None, "heads": 3},
    "latent": {"layer_types": "latent", "positions": "rotary", "kv_heads": None, "latent": 7},
    "hybrid": {"layer_types": ["gated_delta", "attention"], "window": [None, 4], "positions": "rotary"},
    "p-RoPE": {"positions": "rotary", "rotary_scaling": "proportional", "rotary_factor": 0.5, "head_dim": 8},
    **{kind: {"layer_types": (kind, "linear"), "positions": "rotary", "kv_heads": 3} for kind in RECURRENT},
    "gated by head": {"gate": "head", "positions": "none"},
    "sink": {"sink": True, "positions": "t5"},
    "key bias": {"key_bias": True, "positions": "sinusoidal"},
    "window": {"window": 5, "positions": "rotary", "rotary_interleaved": True},
    "window by layer": {"window": [3, None], "positions": "rotary"},
    "scaled": {"score_scale": 1.3, "positions": "rotary"},
    **{name: {"normalizer": name, "positions": "rotary"} for name in NORMALIZERS},
}
HEADS, HEAD = 3, 4  # of models with a composition


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed))


COMPOSITIONS = {
    "bigbird": Attention(mask=masks.bigbird(2, 1)),
    "shaw": Attention(bias=biases.RelativePosition(parameter(7, HEAD), parameter(7, HEAD, seed=1))),
    "additive": Attention(score=scores.Additive(parameter(5), parameter(5, HEAD), parameter(5, HEAD, seed=1))),
    "linear": Attention(score=scores.Features(features.elu_plus_one), normalizer=normalizers.Identity(divide="sum")),
    "performer": Attention(
        score=scores.Features(features.Favor(HEAD, n_features=9, seed=2)), normalizer=normalizers.Identity(divide="sum")
    ),
    "strict": Attention(mask=masks.Causal() & ~masks.Window(1)),  # to the tokens before, and not to itself
    "longformer": Attention(mask=masks.longformer(4, [0], causal=True), bias=biases.SoftCap(3.0)),
    "several": Attention(
        mask=masks.Blockwise(masks.Window(2), 2) | masks.Strided(5),
        bias=(biases.T5Bias(parameter(6, HEADS), bidirectional=False), biases.ALiBi()),
        score=scores.General(parameter(HEADS, HEAD, HEAD)),
        normalizer=normalizers.Entmax(1.5, sink=parameter(HEADS)),
    ),
}
FLAVOURS |= {
    name: {"attention": own, "heads": HEADS, "kv_heads": None, "positions": "rotary"}
    for name, own in COMPOSITIONS.items()
}
PADDING_REFUSED = {"bigbird": "attention", "longformer": "padding", "several": "padding"}
flavours = pytest.mark.parametrize("name", FLAVOURS)
EVICTING: list[Callable[[], Any]] = [lambda: Sliding(5), lambda: Sinks(2, 5), lambda: HeavyHitters(3, 4)]


# --- laws -------------------------------------------------------------------------------------------------------------


@flavours
def test_cached_is_uncached_at_every_step_and_no_token_sees_later_ones(name: str) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(3, 19)
    whole = model(ids).detach()
    for chunk in (1, 4) if name != "bigbird" else ():  # it would need the keys of another text
        state = model.start(3)
        for start in range(0, 19, chunk):
            logits = model.step(ids[:, start : start + chunk], state)
            close(logits, whole[:, min(start + chunk, 19) - 1], eps=4096)
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 23
    changed = model(other)
    torch.testing.assert_close(whole[:, :7], changed[:, :7], rtol=0, atol=1e-12)
    assert not torch.allclose(whole[:, 7], changed[:, 7])


@flavours
def test_left_padding_does_not_change_logits_or_is_refused(name: str) -> None:
    model, prompts, more = model_of(**FLAVOURS[name]), [ids_of(n, seed=n) for n in (3, 9, 6)], ids_of(3, 1, seed=9)
    padded = torch.stack([nn.functional.pad(p, (9 - len(p), 0), value=5) for p in prompts])
    padding = torch.tensor([9 - len(p) for p in prompts])
    if name in PADDING_REFUSED:
        with refused(PADDING_REFUSED[name]):
            model.start(3, padding=padding)
        return
    state = model.start(3, padding=padding)
    model.step(padded, state)
    together = model.step(more, state)
    for i, prompt in enumerate(prompts):
        alone = model.start(1)
        model.step(prompt[None], alone)
        close(together[i], model.step(more[i : i + 1], alone)[0], eps=4096)


# --- a prefix, a scale ------------------------------------------------------------------------------------------------


def test_steps_after_a_whole_prefix_equal_forward_and_less_is_refused() -> None:
    model, ids = model_of(prefix=4, positions="rotary"), ids_of(3, 12)
    whole = model(ids).detach()
    for chunk in (4, 5):
        state = model.start(3)
        close(model.step(ids[:, :chunk], state), model(ids[:, :chunk])[:, -1].detach(), eps=4096)
        for at in range(chunk, 12):
            close(model.step(ids[:, at : at + 1], state), whole[:, at], eps=4096)
    state = model.start(3, padding=torch.zeros(3, dtype=torch.long))
    close(model.step(ids, state), whole[:, -1], eps=4096)
    with refused("tokens", match="prefix"):
        model.step(ids[:, :3], model.start(3))
    with refused("padding", match="prefix"):
        model.start(3, padding=torch.tensor([0, 2, 0]))
    for make in EVICTING:
        with refused("mask", match="the distance"):
            model.step(ids, model.start(3, cache=make))


@pytest.mark.parametrize("make", [lambda: Full(29), *EVICTING])
def test_state_from_inference_mode_works_outside_of_it(make: Callable[[], Any]) -> None:
    model, ids, ends = model_of(positions="rotary"), ids_of(2, 12), []
    for inference in (True, False):
        state = model.start(2, cache=make)
        with torch.inference_mode(inference):
            model.step(ids[:, :9], state)
            model.step(ids[:, 9:10], state)
        state.reorder(torch.tensor([1, 0]))
        model.step(ids[:, 10:11], state)
        ends.append(model.step(ids[:, 11:], state))
    close(ends[0], ends[1])
    model.loss(ids).backward()  # tables made in inference mode are kept, too


# --- transformers ----------------------------------------------------------------------------------------------------

GPT2 = {"vocab_size": 101, "n_positions": 37, "n_embd": 24, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


def _theirs(kind: str, **changes: Any) -> Any:
    import transformers as t

    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = t.GPT2Config(**{**GPT2, **changes}, bos_token_id=None, eos_token_id=None)
        model: Any = t.GPT2LMHeadModel(config)
    else:
        config = t.LlamaConfig(**{**LLAMA, **changes}, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        model = t.LlamaForCausalLM(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(rand(*parameter.shape, seed=i, dtype=torch.float32), alpha=0.1)
    return model.eval()


HF: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied, wide, relu": (
        "gpt2", {"tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu", "layer_norm_epsilon": 1e-3}
    ),
    **{f"llama, {rope}, {name}": ("llama", {"rope_parameters": ROPES[rope], **changes}) for rope, name, changes in (
        ("default", "plain", {}),
        ("linear", "tied, biases", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("yarn", "biases of the attention", {"attention_bias": True}),
        ("llama3", "biases of the rest", {"mlp_bias": True}),
        ("dynamic", "heads of 8", {"head_dim": 8, "num_key_value_heads": 6}),
        ("dynamic", "beyond", {"max_position_embeddings": 16}),
    )},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HF)
def test_hugging_face_checkpoints_give_equal_logits(name: str, tmp_path: Path) -> None:
    kind, changes = HF[name]
    theirs = _theirs(kind, **changes)
    sharded = kind == "llama"
    theirs.save_pretrained(tmp_path, max_shard_size="10KB" if sharded else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    ours = qkv.models.load(tmp_path)
    ids = ids_of(2, 31, below=101)
    with torch.no_grad():
        close(ours(ids), theirs(ids).logits, eps=256)
        if "beyond" not in name:  # there keys depend on the length at which they are turned
            state = ours.start(2)
            ours.step(ids[:, :12], state)
            close(ours.step(ids[:, 12:], state), theirs(ids).logits[:, -1], eps=256)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_hugging_face_checkpoints_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    theirs = _theirs("gpt2")
    config, weights = theirs.config.to_dict(), dict(theirs.state_dict())
    weights["transformer.h.0.ln_3.weight"] = weights.pop("transformer.h.0.ln_1.weight")
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:5]
    with pytest.raises(qkv.InputError, match=r"missing: .*_norm.weight; unexpected: .*ln_3.*; wrong .*\(37, 24\)"):
        pretrained.from_weights(config, weights)
    for changes, argument in (
        ({"model_type": "bert"}, "model_type"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "mish"}, "activation_function"),
    ):
        with refused(argument):
            pretrained.from_weights({**config, **changes}, theirs.state_dict())
    with pytest.raises(qkv.InputError, match=r"missing: blocks\.0"):
        pretrained.from_weights(config, {})
    llama = _theirs("llama")
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.5, "rope_theta": 1e4}}
    with refused("rope_parameters", match="mscale"):
        pretrained.from_weights({**llama.config.to_dict(), **rope}, llama.state_dict())
    with refused("model", match=r"config\.json"):
        qkv.models.load(tmp_path / "nowhere")


def tokenizer_file() -> Path:
    folder = checkpoint.folder_of("qkv-mini")
    assert folder is not None
    return folder / "tokenizer.json"


@pytest.mark.parametrize("text", ["", "def one(x):\n    return x\n", "é <s> 日本 🙂"])
def test_tokens_and_texts_of_tokenizer_json_equal_transformers(text: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its tokenizer is the reference")
    theirs, ours = (
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file())),
        FileTokenizer(tokenizer_file()),
    )
    ids = ours.encode(text)
    for add in (True, False):
        assert ours(text, add_special_tokens=add) == dict(theirs(text, add_special_tokens=add))
        assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
        assert ours.decode(ids, skip_special_tokens=add) == theirs.decode(ids, skip_special_tokens=add)
    for name, x in ours(text, return_tensors="pt").items():
        assert torch.equal(x, theirs(text, return_tensors="pt")[name])
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert (len(ours), ours.vocab_size, ours.get_vocab()) == (len(theirs), theirs.vocab_size, theirs.get_vocab())
    assert ours.decode(ids[0]) == theirs.decode(ids[0])


def test_bad_tokenizers_and_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for argument, call in (
        ("model", lambda: FileTokenizer(tmp_path / "tokenizer.json")),
        ("model", lambda: FileTokenizer(tmp_path / "missing.json")),
        ("return_tensors", lambda: FileTokenizer(tokenizer_file())("a", return_tensors="np")),
        ("text", lambda: FileTokenizer(tokenizer_file())(["a", "b"])),  # type: ignore[arg-type]
    ):
        with refused(argument):
            call()


# --- our own checkpoints ---------------------------------------------------------------------------------------------


@flavours
def test_saved_model_loads_unchanged(name: str, tmp_path: Path) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(2, 7)
    loaded = checkpoint.load(checkpoint.save(model, tmp_path / "model"))
    assert to_dict(loaded.config) == to_dict(model.config)
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert torch.equal(loaded(ids), model(ids))
    assert not list(tmp_path.rglob("*.part"))
    modes = {file.stat().st_mode for file in (tmp_path / "model").iterdir()}
    assert len(modes) == 1, "safetensors lets the owner alone read its files"


def test_checkpoints_keep_their_dtypes(tmp_path: Path) -> None:
    model, theirs = model_of(dtype=torch.bfloat16), _theirs("llama").to(torch.bfloat16)
    model.norm.double()
    loaded = checkpoint.load(checkpoint.save(model, tmp_path))
    assert [p.dtype for p in loaded.parameters()] == [p.dtype for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    weights = dict(theirs.state_dict())
    for dtype in (torch.bfloat16, torch.float32):  # the widest of the file
        weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
        ours = pretrained.from_weights(theirs.config.to_dict(), weights)
        assert {p.dtype for p in ours.parameters()} == {dtype}


def test_damaged_checkpoints_are_rejected(tmp_path: Path) -> None:
    checkpoint.save(model_of(), tmp_path)
    before = (tmp_path / "config.json").read_text()
    entries = json.loads(before)["config"]
    for change, message in (
        ({"layrs": 3}, "did you mean 'layers'"), ({"d_hidden": 18}, "wrong shape: blocks"),
        ({"layers": 1}, "unexpected: blocks.1"), ({"layers": 3}, "missing: blocks.2"), ({"dropout": 2.0}, "dropout"),
        ({"layers": "a"}, "layers is 'a'"), ({"norm_eps": "x"}, "config.json"), ({"d_model": 32.0}, "d_model is 32.0"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(json.loads(before) | {"config": entries | change}))
        with pytest.raises(qkv.InputError, match=message):
            checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refused("config.json"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text(before)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with refused("model.safetensors"):
        checkpoint.load(tmp_path)
    with refused("model", match="Linear"):
        checkpoint.save(nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "post-norm", "gated by head", "sink", "key bias", "entmax"])
def test_gradients_against_finite_differences(name: str) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(2, 7)
    check_slopes(model, lambda: model.loss(ids))


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 64, 2**22])
def test_loss_equals_cross_entropy(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import qkv.models.loss

    monkeypatch.setattr(qkv.models.loss, "MAX_LOGITS", room)
    x, weight = rand(17, 4).requires_grad_(), rand(11, 4, seed=1).requires_grad_()
    targets = ids_of(17, below=11)
    targets[::3] = -100
    grads = []
    for loss in (linear_cross_entropy(x, weight, targets), nn.functional.cross_entropy(x @ weight.T, targets)):
        grads.append((loss.detach(), *torch.autograd.grad(loss * 3, (x, weight))))
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs)
    assert torch.autograd.gradcheck(linear_cross_entropy, (x, weight, targets), fast_mode=True)
    with refused("targets", match="all"):
        linear_cross_entropy(x, weight, torch.full_like(targets, -100))
    with refused("targets", match=r"0\.\.11"):
        linear_cross_entropy(x, weight, torch.arange(17) % 12)


def test_scaled_float16_loss_has_the_gradients_of_float32() -> None:
    """Probabilities over a count may be below the least float16, and the scale beyond the largest."""
    x, weight, targets = rand(2048, 16), rand(997, 16, seed=1) * 0.3, ids_of(2048, below=500)
    grads = []
    for dtype, scale in ((torch.float16, 2.0**16), (torch.float32, 1.0)):
        a, b = (y.to(dtype).requires_grad_() for y in (x, weight))
        (linear_cross_entropy(a, b, targets) * scale).backward()
        assert a.grad is not None
        assert b.grad is not None
        grads.append((a.grad.double() / scale, b.grad.double() / scale))
    for half, single in zip(*grads, strict=True):
        assert (half - single).norm() < 3e-3 * single.norm()


@pytest.mark.parametrize("name", ["window", "sink"])
def test_autocast_runs_and_trains(name: str) -> None:
    model, ids = model_of(dtype=torch.float32, spread=0.05, **FLAVOURS[name]), ids_of(2, 17)
    exact = model.loss(ids).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(ids)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


# --- counts and errors -----------------------------------------------------------------------------------------------


ENTRIES: list[tuple[str, dict[str, Any]]] = [
    ("d_model", {"d_model": 13}), ("kv_heads", {"kv_heads": 4}), ("positions", {"positions": "round"}),
    ("normalizer", {"normalizer": "max"}), ("activation", {"activation": "swish"}), ("norm", {"norm": "batch"}),
    ("place", {"place": "mid"}), ("gate", {"gate": "open"}), ("rotary_scaling", {"rotary_scaling": "linear"}),
    ("rotary_scaling", {"rotary_scaling": "wide", "positions": "rotary"}), ("norm_eps", {"norm_eps": -1.0}),
    ("dropout", {"dropout": 2.0}), ("window", {"window": 0}), ("layers", {"layers": 0}), ("prefix", {"prefix": -1}),
    ("prefix", {"prefix": 3, "window": 5}), ("score_scale", {"score_scale": 0.0}),
    ("score_scale", {"score_scale": math.inf}), ("sink", {"sink": True, "normalizer": "sigmoid"}),
    ("sink", {"sink": True, "key_bias": True}), ("layer_types", {"layer_types": "gated"}),
    ("layer_types", {"layer_types": []}), ("kv_heads", {"layer_types": "delta"}), ("latent", {"latent": 8}),
    *((name, {"kv_heads": None, "layer_types": kinds, name: value}) for name, value, kinds in (
        ("gate", "head", "latent"), ("normalizer", "relu", "linear"), ("score_scale", 2.0, "delta"),
        ("window", 3, ("attention", "delta")), ("positions", "none", ("attention", "latent")),
        ("positions", "alibi", "differential"), ("prefix", 3, "forgetting"), ("head_dim", 4, "differential"),
    )),
    *((name, {"attention": Attention(), name: value}) for name, value in (
        ("window", 3), ("prefix", 3), ("normalizer", "relu"), ("score_scale", 2.0), ("positions", "alibi"),
        ("positions", "t5"), ("attention", masks.Causal()),
    )),
]  # fmt: skip
START: list[tuple[str, str | None, dict[str, Any]]] = [
    ("padding", r"\(2,\)", {"padding": torch.tensor([1, 2])}), ("padding", "list", {"padding": [0, 1, 2]}),
    ("padding", "at least 0", {"padding": torch.tensor([0, -1, 2])}), ("cache", None, {"cache": Full(4)}),
]  # fmt: skip
TOKENS: list[tuple[str, Any]] = [
    ("at most 29", ids_of(1, 30)), (r"\(1, 0\)", ids_of(1, 0)), (r"\(3,\)", ids_of(3)), ("float32", torch.zeros(1, 3)),
    ("list", [[1, 2]]), (r"23\.\.23", torch.tensor([[23]])), (r"-1\.\.-1", torch.tensor([[-1]])),
]  # fmt: skip


def test_decoder_refuses_bad_configurations_tokens_and_states() -> None:
    model, rotary = model_of(), model_of(positions="rotary")
    for argument, changes in ENTRIES:
        with refused(argument):
            model_of(**changes)
    for match, ids in TOKENS:
        with refused("tokens", match):
            model(ids)
    for argument, match_, options in START:
        with refused(argument, match_):
            model.start(3, **options)
    with refused("targets", match="shape"):
        model.loss(ids_of(2, 5), ids_of(2, 4))
    with refused("mask", match="the class Causal"):
        DecoderConfig(attention=Attention(mask=masks.Causal))  # type: ignore[arg-type]
    with refused("padding", match="fewer"):
        model.step(ids_of(2, 3), model.start(2, padding=torch.tensor([3, 0])))
    with refused("ids"):
        model.loss(ids_of(2, 1))
    assert math.isfinite(model.loss(ids_of(2, 2)).item())
    assert model.loss(ids_of(2, 30)).isfinite()  # one token more than the context: the last is only a target
    assert rotary(ids_of(1, 40)).isfinite().all()
    with refused("capacity"):
        rotary.step(ids_of(1, 30), rotary.start())


# --- compositions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_layer_computes_the_composition(name: str) -> None:
    model, seen, own = model_of(**FLAVOURS[name]), [], COMPOSITIONS[name]
    for block in model.blocks:
        block.attention.composition.register_forward_hook(lambda module, given, out: seen.append((module, given, out)))
    with torch.no_grad():
        model(ids_of(2, 13))
    assert len(seen) == 2
    for module, given, out in seen:
        now, mask = module.attention, masks.Causal() if own.mask is None else own.mask & masks.Causal()
        want = oracle(*given, mask=mask, bias=now.bias, score=now.score, normalizer=now.normalizer)[0]
        close(out, want, eps=4096)


def test_every_layer_and_every_model_has_learned_tensors_of_its_own() -> None:
    own = COMPOSITIONS["shaw"].bias
    assert isinstance(own, biases.RelativePosition)
    first, second = (model_of(spread=0, **FLAVOURS["shaw"]) for _ in range(2))
    tables = [m.blocks[i].attention.composition.bias_keys for m in (first, second) for i in (0, 1)]
    for table in tables:
        close(table, own.keys.detach(), dtype=torch.float32)
    assert len({x.data_ptr() for x in (*tables, own.keys)}) == 5
    first.loss(ids_of(2, 13)).backward()
    assert tables[0].grad is not None
    assert tables[0].grad.any()
    assert own.keys.grad is None
    learned = nn.Sequential(nn.Linear(4, 6), nn.Softplus())
    mapped = Attention(score=scores.Features(learned), normalizer=normalizers.Identity(divide="sum"))
    for block in DecoderLM(DecoderConfig(d_model=12, layers=2, heads=3, attention=mapped)).blocks:
        assert torch.equal(block.attention.composition.score_map[0].weight, learned[0].weight)

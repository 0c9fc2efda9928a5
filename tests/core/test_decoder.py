"""DecoderLM: the same logits as transformers', cached as uncached, gradients, loss, checkpoints."""

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
from conftest import check_slopes, close, rand, refused, unchecked
from qkv.cache import Full, HeavyHitters, Sinks, Sliding
from qkv.models import checkpoint, pretrained
from qkv.models.decoder import NORMALIZERS, POSITIONS, DecoderConfig, DecoderLM
from qkv.models.loss import linear_cross_entropy

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
    "gated by head": {"gate": "head", "positions": "none"},
    "sink": {"sink": True, "positions": "t5"},
    "key bias": {"key_bias": True, "positions": "sinusoidal"},
    "window": {"window": 5, "positions": "rotary", "rotary_interleaved": True},
    "scaled": {"score_scale": 1.3, "positions": "rotary"},
    **{name: {"normalizer": name, "positions": "rotary"} for name in NORMALIZERS},
}
flavours = pytest.mark.parametrize("name", FLAVOURS)


# --- laws -------------------------------------------------------------------------------------------------------------


@flavours
@pytest.mark.parametrize("chunk", [1, 4])
def test_cached_is_uncached_at_every_step(name: str, chunk: int) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(3, 19)
    whole, state = model(ids), model.start(3)
    for start in range(0, 19, chunk):
        logits = model.step(ids[:, start : start + chunk], state)
        close(logits, whole[:, min(start + chunk, 19) - 1].detach(), eps=4096)


@flavours
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(2, 11)
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 23
    torch.testing.assert_close(model(ids)[:, :7], model(other)[:, :7], rtol=0, atol=1e-12)
    assert not torch.allclose(model(ids)[:, 7], model(other)[:, 7])


@flavours
def test_left_padding_does_not_change_logits(name: str) -> None:
    model, prompts = model_of(**FLAVOURS[name]), [ids_of(n, seed=n) for n in (3, 9, 6)]
    longest = 9
    padded = torch.stack([nn.functional.pad(p, (longest - len(p), 0), value=5) for p in prompts])
    state = model.start(3, padding=torch.tensor([longest - len(p) for p in prompts]))
    for tokens in (padded, ids_of(3, 1, seed=9), ids_of(3, 1, seed=10)):
        together = model.step(tokens, state)
    for i, prompt in enumerate(prompts):
        alone = model.start(1)
        for tokens in (prompt[None], ids_of(3, 1, seed=9)[i : i + 1], ids_of(3, 1, seed=10)[i : i + 1]):
            logits = model.step(tokens, alone)
        close(together[i], logits[0], eps=4096)


def test_reorder_selects_the_padding() -> None:
    model, ids = model_of(positions="rotary"), ids_of(3, 8)
    state = model.start(3, padding=torch.tensor([0, 2, 5]))
    model.step(ids, state)
    state.reorder(torch.tensor([2, 0]))
    other = model.start(2, padding=torch.tensor([5, 0]))
    model.step(ids[[2, 0]], other)
    close(model.step(ids[:2, :1], state), model.step(ids[:2, :1], other), eps=4096)


# --- a prefix, a scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", POSITIONS)
def test_only_prefix_tokens_attend_to_later_tokens(positions: str) -> None:
    model, ids = model_of(prefix=4, positions=positions), ids_of(2, 11)
    before = model.hidden(ids)
    for changed, untouched in ((3, 0), (4, 4), (7, 7)):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 1) % 23
        moved = (model.hidden(other) - before).abs().amax((0, 2)) > 1e-9
        assert moved.tolist() == [at >= untouched for at in range(11)]


@pytest.mark.parametrize("prefix", [1, 4, 11, 20])
def test_prefix_equals_a_dense_mask(prefix: int) -> None:
    model, causal, ids = model_of(prefix=prefix), model_of(), ids_of(2, 11)
    allowed = torch.ones(11, 11, dtype=torch.bool).tril()
    allowed[:prefix, :prefix] = True
    x = rand(2, 11, 12)
    for ours, other in zip(model.blocks, causal.blocks, strict=True):
        q, k, v = other.attention._project(x, None, None)
        close(ours.attention(x), other.attention._merged(qkv.attend(q, k, v, mask=allowed), x).detach())
    assert torch.allclose(model(ids), causal(ids)) == (prefix == 1)


def test_steps_after_a_whole_prefix_equal_forward() -> None:
    model, ids = model_of(prefix=4, positions="rotary"), ids_of(3, 12)
    whole = model(ids).detach()
    for chunk in (4, 5):
        state = model.start(3)
        close(model.step(ids[:, :chunk], state), model(ids[:, :chunk])[:, -1].detach(), eps=4096)
        for at in range(chunk, 12):
            close(model.step(ids[:, at : at + 1], state), whole[:, at], eps=4096)
    state = model.start(3, padding=torch.zeros(3, dtype=torch.long))
    close(model.step(ids, state), whole[:, -1], eps=4096)


def test_prefix_rejects_partial_prompts_padding_and_evicting_caches() -> None:
    model, ids = model_of(prefix=4), ids_of(3, 12)
    with refused("tokens", match="prefix"):
        model.step(ids[:, :3], model.start(3))
    with refused("padding", match="prefix"):
        model.start(3, padding=torch.tensor([0, 2, 0]))
    for make in (lambda: Sliding(5), lambda: Sinks(2, 5), lambda: HeavyHitters(3, 4)):
        with refused("mask", match="the distance"):
            model.step(ids, model.start(3, cache=make))


def test_score_scale_equals_scaling_the_queries() -> None:
    """Scaling products by s is scaling the queries by s · √head_dim."""
    scaled, plain, x = model_of(score_scale=0.7), model_of(), rand(2, 9, 12)
    for ours, other in zip(scaled.blocks, plain.blocks, strict=True):
        q, k, v = other.attention._project(x, None, None)
        scores = 0.7 * q @ k.repeat_interleave(3, 1).transpose(-1, -2)
        weights = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        heads = weights @ v.repeat_interleave(3, 1)
        close(ours.attention(x), other.attention._merged(heads, x).detach())
    ids = ids_of(2, 9)
    close(model_of(score_scale=1 / math.sqrt(2))(ids), plain(ids).detach())  # heads have 2 dimensions


def test_plain_causal_models_call_torchs_kernel() -> None:
    """What needs no description of a call goes to torch's kernel at once: a plain causal mask, scaled or not."""
    for changes in ({}, {"prefix": 0}, {"score_scale": 0.7}):
        attention = model_of(**changes).blocks[0].attention.composition.attention
        assert type(attention.mask) is qkv.masks.Causal
        assert (attention.score is None) == ("score_scale" not in changes)


@pytest.mark.parametrize("make", [lambda: Sliding(5), lambda: Sinks(2, 5), lambda: HeavyHitters(3, 4)])
def test_evicting_caches_accept_any_length(make: Callable[[], Any]) -> None:
    model = model_of(positions="rotary")
    state = model.start(1, cache=make)
    sizes = set()
    for i in range(60):
        assert model.step(ids_of(1, 1, seed=i), state).isfinite().all()
        sizes.add(state.nbytes)
    assert state.seen == 60
    assert len(sizes) == 1


def test_sliding_cache_equals_a_window_mask() -> None:
    ids = ids_of(1, 25)
    windowed, model = (model_of(positions="rotary", window=w) for w in (6, None))
    state = model.start(1, cache=lambda: Sliding(6))
    for i in range(25):
        logits = model.step(ids[:, i : i + 1], state)
    close(logits, windowed(ids)[:, -1].detach(), eps=4096)


@pytest.mark.parametrize(
    "make", [lambda: Full(29), lambda: Sliding(5), lambda: Sinks(2, 5), lambda: HeavyHitters(3, 4)]
)
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


def test_state_of_an_interrupted_step_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(), ids_of(1, 4)
    state = model.start()
    model.step(ids, state)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.blocks[1].attention), "_merged", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step(ids[:, :1], state)
    with refused("state"):
        model.step(ids[:, :1], state)


def test_cache_bytes_equal_the_formula() -> None:
    """2 · layers · batch · key heads · head size · tokens · bytes."""
    for kv_heads in (6, 2, 1):
        model = model_of(kv_heads=kv_heads, dtype=torch.float32)
        state = model.start(3, cache=lambda: Full(20))
        model.step(ids_of(3, 7), state)
        assert state.nbytes == 2 * 2 * 3 * kv_heads * 2 * 20 * 4


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
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, biases of the attention": ("llama", {"attention_bias": True}),
    "llama, biases of the rest": ("llama", {"mlp_bias": True}),
    "llama, heads of 8": ("llama", {"head_dim": 8, "num_key_value_heads": 6}),
    **{f"llama, {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama, dynamic, beyond": ("llama", {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 16}),
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_hugging_face_checkpoints_give_equal_logits(name: str, tmp_path: Path) -> None:
    kind, changes = HF[name]
    theirs = _theirs(kind, **changes)
    theirs.save_pretrained(tmp_path)
    ours = pretrained.from_hugging_face(tmp_path)
    ids = ids_of(2, 31, below=101)
    with torch.no_grad():
        close(ours(ids), theirs(ids).logits, eps=256)
        if "beyond" not in name:  # there keys depend on the length at which they are turned
            state = ours.start(2)
            ours.step(ids[:, :12], state)
            close(ours.step(ids[:, 12:], state), theirs(ids).logits[:, -1], eps=256)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    theirs = _theirs("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = ids_of(2, 9, below=101)
    with torch.no_grad():
        close(pretrained.from_hugging_face(tmp_path)(ids), theirs(ids).logits, eps=256)


def without(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries but for those that are None where the configuration has a number."""
    return {k: v for k, v in entries.items() if not (k == "n_embd" and v is None)}


def test_hugging_face_checkpoints_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    theirs = _theirs("gpt2")
    config, weights = theirs.config.to_dict(), dict(theirs.state_dict())
    weights["transformer.h.0.ln_3.weight"] = weights.pop("transformer.h.0.ln_1.weight")
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:5]
    with pytest.raises(qkv.InputError, match=r"nothing was loaded: missing: .*attention_norm.weight; unexpected: .*"
                       r"ln_3.weight; wrong shape: positions.weight is \(5, 24\), expected \(37, 24\)"):  # fmt: skip
        pretrained.from_weights(config, weights)
    for changes, argument in (
        ({"model_type": "bert"}, "model_type"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "mish"}, "activation_function"),
        ({"n_embd": None}, "n_embd"),
    ):
        with refused(argument):
            pretrained.from_weights(without({**config, **changes}), theirs.state_dict())
    with pytest.raises(qkv.InputError, match=r"missing: blocks\.0"):
        pretrained.from_weights(config, {})
    llama = _theirs("llama")
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.5, "rope_theta": 1e4}}
    with refused("rope_parameters", match="mscale"):
        pretrained.from_weights({**llama.config.to_dict(), **rope}, llama.state_dict())
    with refused("model", match=r"config\.json"):
        pretrained.from_hugging_face(tmp_path / "nowhere")


# --- our own checkpoints ---------------------------------------------------------------------------------------------


@flavours
def test_saved_model_loads_unchanged(name: str, tmp_path: Path) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(2, 7)
    loaded = checkpoint.load(checkpoint.save(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))
    assert not list(tmp_path.rglob("*.part"))


def test_saved_weights_have_the_permissions_of_the_configuration(tmp_path: Path) -> None:
    files = list(checkpoint.save(model_of(), tmp_path).iterdir())
    assert len({file.stat().st_mode for file in files}) == 1, "safetensors lets the owner alone read its files"


def test_checkpoints_keep_mixed_dtypes(tmp_path: Path) -> None:
    model = model_of(dtype=torch.bfloat16)
    model.norm.double()
    loaded = checkpoint.load(checkpoint.save(model, tmp_path))
    assert [p.dtype for p in loaded.parameters()] == [p.dtype for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_checkpoints_of_hugging_face_in_half_precision(tmp_path: Path) -> None:
    theirs = _theirs("llama").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = pretrained.from_hugging_face(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    weights = dict(theirs.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    wide = pretrained.from_weights(theirs.config.to_dict(), weights)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_damaged_checkpoints_are_rejected(tmp_path: Path) -> None:
    checkpoint.save(model_of(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    before = (tmp_path / "config.json").read_text()
    for change, message in (
        ({"model": "Nothing"}, "has model 'Nothing', expected one of DecoderLM"),
        ({"config": {**described["config"], "layrs": 3}}, "layrs is not a key.*did you mean 'layers'"),
        ({"config": {**described["config"], "d_hidden": 18}}, "wrong shape: blocks.0.feed_forward.up"),
        ({"config": {**described["config"], "layers": 1}}, "unexpected: blocks.1.attention"),
        ({"config": {**described["config"], "layers": 3}}, "missing: blocks.2.attention"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(qkv.InputError, match=message):
            checkpoint.load(tmp_path)
    for entry in ({"dropout": 2.0}, {"layers": "a"}, {"norm_eps": "x"}, {"d_model": 32.0}):
        (tmp_path / "config.json").write_text(json.dumps(described | {"config": described["config"] | entry}))
        with unchecked(), pytest.raises(qkv.InputError):
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


@flavours
def test_gradients_against_finite_differences(name: str) -> None:
    model, ids = model_of(**FLAVOURS[name]), ids_of(2, 7)
    check_slopes(model, lambda: model.loss(ids))


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
    assert torch.autograd.gradcheck(linear_cross_entropy, (x, weight, targets))
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "gated", "sink", "sigmoid", "elu"])
def test_model_memorises_a_small_batch(name: str) -> None:
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(**{**TINY, "d_model": 48, "d_hidden": 96, **FLAVOURS[name]}))
    ids = ids_of(4, 12)
    ids[:, 0] = torch.arange(4)  # the first token says which of them follows
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02


@pytest.mark.parametrize("name", ["gpt2", "llama", "window", "sink"])
def test_autocast_runs_and_trains(name: str) -> None:
    model, ids = model_of(dtype=torch.float32, spread=0.05, **FLAVOURS[name]), ids_of(2, 17)
    exact = model.loss(ids).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(ids)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


# --- counts and errors -----------------------------------------------------------------------------------------------


def test_number_of_parameters_equals_the_formulas() -> None:
    d, h, layers, vocab, context = 12, 17, 2, 23, 29
    count = sum(p.numel() for p in model_of(kv_heads=None).parameters())
    block = 4 * d * d + 4 * d + 2 * d * h + d + h + 2 * 2 * d
    assert count == vocab * d + context * d + layers * block + 2 * d
    sizes = {"vocab_size": 1000, "context": 512, "d_model": 256, "layers": 4, "heads": 4, "d_hidden": 1024}
    minimal = DecoderLM(DecoderConfig(**sizes, attention_bias=False))
    assert sum(p.numel() for p in minimal.parameters()) == 3_542_528
    count = sum(p.numel() for p in model_of(**FLAVOURS["llama"]).parameters())
    block = 2 * d * d + 2 * d * (d // 3) + 3 * d * h + 2 * d  # two of six heads have keys and values
    assert count == 2 * vocab * d + layers * block + d


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_of_earlier_tokens_matters_unless_positions_are_none(positions: str) -> None:
    """Swapping two earlier tokens: a causal layer without positions still sees the same set of keys."""
    model = model_of(positions=positions, layers=1)
    ids = ids_of(1, 9)
    ids[0, 2], ids[0, 5] = 3, 4
    swapped = ids.clone()
    swapped[0, [2, 5]] = ids[0, [5, 2]]
    same = torch.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-10)
    assert same == (positions == "none")


def test_decoder_rejects_bad_configurations_tokens_and_states() -> None:
    for changes, argument, match in (
        ({"d_model": 13}, "d_model", None),
        ({"kv_heads": 4}, "kv_heads", None),
        ({"positions": "round"}, "positions", None),
        ({"normalizer": "max"}, "normalizer", None),
        ({"activation": "swish"}, "activation", None),
        ({"norm": "batch"}, "norm", None),
        ({"place": "mid"}, "place", None),
        ({"gate": "open"}, "gate", None),
        ({"rotary_scaling": "wide", "positions": "rotary"}, "rotary_scaling", "'wide'"),
        ({"rotary_scaling": "linear"}, "rotary_scaling", "'learned'"),
        ({"norm_eps": -1.0}, "norm_eps", None),
        ({"dropout": 2.0}, "dropout", None),
        ({"window": 0}, "window", None),
        ({"layers": 0}, "layers", None),
        ({"prefix": -1}, "prefix", "is -1"),
        ({"prefix": 3, "window": 5}, "prefix", "window"),
        ({"score_scale": 0.0}, "score_scale", None),
        ({"score_scale": math.inf}, "score_scale", None),
        ({"sink": True, "normalizer": "sigmoid"}, "sink", "sum to one"),
        ({"sink": True, "key_bias": True}, "sink", "both True"),
    ):
        with unchecked(), refused(argument, match):
            model_of(**changes)
    model = model_of()
    with refused("tokens", match="at most 29"):
        model(ids_of(1, 30))
    rotary = model_of(positions="rotary")
    assert rotary(ids_of(1, 40)).isfinite().all()
    with refused("capacity"):
        rotary.step(ids_of(1, 30), rotary.start())
    with unchecked():
        for ids, argument, match in (
            (ids_of(1, 0), "tokens", r"\(1, 0\)"),
            (ids_of(3), "tokens", r"\(3,\)"),
            (torch.zeros(1, 3), "tokens", "float32"),
            ([[1, 2]], "tokens", "list"),
            (torch.tensor([[23]]), "tokens", r"23\.\.23"),
            (torch.tensor([[-1]]), "tokens", r"-1\.\.-1"),
        ):
            with refused(argument, match):
                model(ids)
        for options, argument, match in (
            ({"padding": torch.tensor([1, 2])}, "padding", r"\(2,\)"),
            ({"padding": [0, 1, 2]}, "padding", "list"),
            ({"padding": torch.tensor([0, -1, 2])}, "padding", "at least 0"),
            ({"cache": Full(4)}, "cache", None),
        ):
            with refused(argument, match):
                model.start(3, **options)
        with refused("targets", match="shape"):
            model.loss(ids_of(2, 5), ids_of(2, 4))
    with refused("padding", match="fewer"):
        model.step(ids_of(2, 3), model.start(2, padding=torch.tensor([3, 0])))
    with refused("ids"):
        model.loss(ids_of(2, 1))
    assert math.isfinite(model.loss(ids_of(2, 2)).item())


def test_loss_accepts_one_token_more_than_the_context() -> None:
    model = DecoderLM(DecoderConfig(vocab_size=11, context=6, d_model=8, layers=1, heads=2))
    assert model.loss(torch.randint(11, (2, 7))).isfinite()
    with refused("tokens", match="at most 6"):
        model.loss(torch.randint(11, (2, 8)))

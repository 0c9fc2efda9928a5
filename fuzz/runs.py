"""The command ``python -m fuzz.runs``: random runs of tiny models under `qkv.watch`, against eager attention.

A case draws a model, texts with padding, and a way of running: one forward, a packed text, chunks with a cache of any
kind, generation of any kind, copies, crops and pruning of the cache, a thread, training with and without checkpointing,
edits of outputs, of weights and of positions. The run must give the tokens, random numbers and gradients that it gives
without `qkv.watch`, and the recorded weights must be those of one eager forward over the same tokens and masks. Every
second run is one of a model of another library (`fuzz.zoo`), of those that are installed.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qkv

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hf_models as hf
from fuzz import zoo

MODELS = ("llama", "mistral", "gemma2", "gemma3", "llama4", "gpt_oss", "qwen2", "gpt2", "gpt_neox", "opt", "qwen3")
WAYS = (
    "whole", "chunks", "greedy", "sampled", "beams", "lookup", "fork", "thread", "packed", "pruned", "train",
    "checkpointing",
)  # fmt: skip
WITH_DROPOUT = ("gpt2", "gpt_neox", "opt")
EDITS: dict[str, Any] = {
    "none": {},
    "outputs": {(0, 1): "zero", (1, 0): qkv.edits.Scale(0.5)},
    "weights": {(0, 1): "off-by-one", (1, 0): qkv.edits.Temperature(0.5)},
    "positions": {(0, 1): qkv.edits.HideFirst(), (1, 0): qkv.edits.WithMask(qkv.masks.Window(3))},
}
PADDING = ("none", "left", "right", "inner")
CACHES = ("dynamic", "static")
CLOSE = 3e-5


@dataclass(frozen=True)
class Run:
    """A random run, drawn from the seed and its number."""

    model: str
    way: str
    cache: str
    padding: str
    batch: int
    tokens: int
    chunks: tuple[int, ...]
    edits: str
    seed: int

    @staticmethod
    def drawn(seed: int, number: int) -> Run:
        random = np.random.default_rng([seed, number])
        tokens = int(random.integers(4, 20))
        cuts = np.unique(random.integers(1, tokens, size=random.integers(1, 6)))
        return Run(
            str(random.choice(MODELS)), str(random.choice(WAYS)), str(random.choice(CACHES)),
            str(random.choice(PADDING)), int(random.integers(1, 4)), tokens,
            tuple(np.diff([0, *cuts, tokens]).tolist()),
            str(random.choice([*EDITS], p=[0.7, 0.1, 0.1, 0.1])), int(random.integers(2**31)),
        )  # fmt: skip


@functools.cache
def models(name: str) -> tuple[Any, Any]:
    """A model, and the same with eager attention."""
    settings = {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
    suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    return tuple(hf.build(name, way, suffix=suffix, **settings) for way in (None, "eager"))  # type: ignore[return-value]


Texts = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Token ids, True at real ones, and further arguments of a forward over them."""


def texts(run: Run) -> tuple[Tensor, Tensor]:
    """Token ids, and their mask."""
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(3, 96, (run.batch, run.tokens), generator=generator)
    mask = torch.ones_like(ids)
    n = int(torch.randint(1, max(2, run.tokens // 2), (), generator=generator))
    where = {"left": slice(0, n), "right": slice(-n, None), "inner": slice(1, 1 + n // 2), "none": slice(0, 0)}
    if run.way in ("greedy", "sampled", "beams", "lookup", "thread") and run.padding != "none":
        where = dict.fromkeys(where, slice(0, n))  # generation needs padding on the left
    mask[-1, where[run.padding]] = 0
    return ids.masked_fill(mask == 0, 0), mask


def performed(run: Run, model: Any) -> list[Texts]:
    """Run the model; returns what every text is that it reads, but for beams."""
    from transformers import DynamicCache, StaticCache

    ids, mask = texts(run)
    cache: Any = DynamicCache(config=model.config)
    if run.cache == "static":
        cache = StaticCache(config=model.config, max_cache_len=48)
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def read(cache: Any, ids: Tensor, mask: Tensor, places: Tensor, start: int, sizes: tuple[int, ...]) -> None:
        for n in sizes:
            at = slice(start, start + n)
            model(ids[:, at], attention_mask=mask[:, : at.stop], position_ids=places[:, at], past_key_values=cache)
            start += n

    if run.way == "packed":
        ids, mask, places = ids[:1], torch.ones_like(mask[:1]), torch.cat([torch.arange(n) for n in run.chunks])[None]
        model(ids, position_ids=places, use_cache=False)
        return [(ids, mask, {"position_ids": places, "attention_mask": torch.empty(0)})]
    if run.way in ("train", "checkpointing"):
        return [(ids, mask, {"gradient": _gradient(run, model, ids, mask, places)})]
    if run.way == "whole":
        model(ids, attention_mask=mask, position_ids=places, use_cache=False)
        return [(ids, mask, {})]
    if run.way == "pruned" and not (run.cache == "static" or run.padding != "none" or any(cache.is_sliding)):
        read(cache, ids, mask, places, 0, run.chunks)
        return [_pruned(run, model, cache, ids)]
    if run.way in ("chunks", "fork", "pruned"):
        read(cache, ids, mask, places, 0, run.chunks)
        if run.way != "fork":
            return [(ids, mask, {})]
        found = []
        copies = [cache, copy.deepcopy(cache), copy.deepcopy(cache)]
        for i, one in enumerate(copies):
            length = run.tokens
            if i == 2 and run.cache == "dynamic" and not any(one.is_sliding):
                length = max(1, run.tokens - 2)
                one.crop(length - run.tokens)
            more = torch.cat([ids[:, :length], (ids[:, :3] + i) % 97], 1)
            real = torch.cat([mask[:, :length], torch.ones_like(mask[:, :3])], 1)[:, : more.shape[1]]
            read(one, more, real, (real.cumsum(1) - 1).clamp(min=0), length, (1,) * (more.shape[1] - length))
            found.append((more, real, {}))
        return found
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": run.way == "sampled"}
    if run.cache == "static" and run.way not in ("beams", "lookup"):
        options["cache_implementation"] = "static"
    if run.way == "beams":
        options |= {"num_beams": 3, "num_return_sequences": 2}
    if run.way == "lookup":
        ids, mask = ids[-1:], torch.ones_like(mask[-1:])
        options["prompt_lookup_num_tokens"] = 3
    outs: list[Tensor] = []

    def generates() -> None:
        with torch.no_grad():
            outs.append(model.generate(ids, attention_mask=mask, **options))

    if run.way == "thread":
        thread = threading.Thread(target=generates)
        thread.start()
        thread.join()
    else:
        generates()
    mask = mask.repeat_interleave(len(outs[0]) // len(mask), 0)
    more = torch.ones(len(mask), outs[0].shape[1] - mask.shape[1], dtype=mask.dtype)
    return [(outs[0], torch.cat([mask, more], 1), {})]


def _gradient(run: Run, model: Any, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """The gradient of the loss, with checkpointing or without."""
    if run.model not in WITH_DROPOUT:
        model.train()
    if run.way == "checkpointing":
        model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        with torch.enable_grad():
            model(ids, attention_mask=mask, position_ids=places, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    finally:
        model.activation_checkpointing_disable()
        model.zero_grad()
        model.eval()


def _pruned(run: Run, model: Any, cache: Any, ids: Tensor) -> Texts:
    """Prune the cache to some of its keys and read three more tokens."""
    generator, n = torch.Generator().manual_seed(run.seed + 1), run.tokens
    keep = torch.rand(n, generator=generator) < 0.6
    keep[-1 if run.seed % 2 else 0] = True
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
    ids = torch.cat([ids, (ids[:, :1] + torch.arange(1, 4)) % 97], 1)
    for at in range(n, n + 3):
        model(ids[:, at : at + 1], past_key_values=cache, position_ids=torch.full((len(ids), 1), at))
    visible = torch.ones(n + 3, n + 3).tril().bool()
    visible[n:, :n] &= keep
    added = torch.zeros(n + 3, n + 3).masked_fill(~visible, torch.finfo(torch.float32).min)
    return ids, torch.ones_like(ids), {"attention_mask": added.expand(len(ids), 1, -1, -1)}


@torch.no_grad()
def mismatch(seed: int, number: int) -> str | None:
    """What is wrong with a run; None if all is right."""
    run = Run.drawn(seed, number)
    model, eager = models(run.model)

    def edited(one: Any) -> Any:
        return qkv.edit(one, EDITS[run.edits]) if run.edits != "none" else nullcontext()

    def tried(one: Callable[[], Any]) -> Any:
        torch.manual_seed(run.seed)
        try:
            found = one()
        except Exception as error:  # transformers refuses some runs
            return type(error).__name__
        return found, torch.rand(1)

    with edited(model):
        want = tried(lambda: performed(run, model))
        with qkv.watch(model) as watched:
            got = tried(lambda: performed(run, model))
    if isinstance(want, str) or isinstance(got, str):
        return None if want == got else f"{run}: {want if isinstance(want, str) else 'runs'} without qkv, now {got}"
    same = all(
        torch.equal(a[0], b[0]) and all(torch.equal(a[2][name], b[2][name]) for name in a[2])
        for a, b in zip(want[0], got[0], strict=True)
    )
    if not same or not torch.equal(want[1], got[1]):
        return f"{run}: the run differs from the same without qkv.watch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            profiles = [watched.profile(i) for i in range(len(watched.sequences))]
        except (UserWarning, qkv.errors.InputError) as error:
            return f"{run}: {error}"
    if run.way == "beams":
        return _beams(run, profiles, got[0][0], eager, edited)
    if len(profiles) != len(got[0]):
        return f"{run}: {len(profiles)} texts, expected {len(got[0])}"
    for profile, text in zip(profiles, got[0], strict=True):
        if (why := _compared(run, profile, text, eager, edited)) is not None:
            return f"{run}: {why}"
    return None


def _weights(run: Run, eager: Any, text: Texts, edited: Callable[[Any], Any]) -> list[Tensor]:
    ids, mask, others = text
    named = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)} | others
    named = {name: x for name, x in named.items() if name != "gradient" and x.numel()}
    with edited(eager):
        if run.edits in ("weights", "positions"):  # eager returns the weights without the edits
            inputs: Any = {"input_ids": ids, "use_cache": False, **named}
            data = qkv.profile(eager, inputs, probe=False, progress=False).data
            return [_unpacked(x, mask) for x in data["weights"].values.swapaxes(0, 1)]
        out = eager(ids, use_cache=False, output_attentions=True, **named)
    found: list[Tensor] = list(out.attentions)
    return found


def _unpacked(weights: np.ndarray, mask: Tensor) -> Tensor:
    """Weights of real tokens, at their places among padding."""
    found = torch.zeros(*weights.shape[:2], mask.shape[1], mask.shape[1])
    for one, x, real in zip(found, weights, mask.bool(), strict=True):
        n = int(real.sum())
        one[:, real.nonzero(), real.nonzero()[:, 0]] = torch.from_numpy(x[:, :n, :n].copy())
    return found


def _compared(run: Run, profile: qkv.Profile, text: Texts, eager: Any, edited: Callable[[Any], Any]) -> str | None:
    ids, mask, others = text
    read = int(profile.data["n_queries"].values[0] + (mask[0] == 0).sum())  # the last token that is generated is not
    ids, mask = ids[:, :read], mask[:, :read]
    for layer, weights in enumerate(_weights(run, eager, (ids, mask, others), edited)):
        for item in range(len(ids)):
            real = mask[item].bool()
            want = weights[item][:, real][:, :, real].numpy()
            got = profile.data["weights"].values[item, layer][:, : want.shape[1], : want.shape[2]]
            if got.shape != want.shape or not np.abs(got - want).max() < CLOSE:
                return f"weights of layer {layer}, text {item} differ from eager attention"
            received = profile.data["received"].values[item, layer][:, : want.shape[2]]
            if not np.abs(received - want.sum(1)).max() < CLOSE * len(want[0]):
                return f"received attention of layer {layer}, text {item} differs from eager attention"
    return None


def _beams(run: Run, profiles: list[qkv.Profile], out: Texts, eager: Any, edited: Callable[[Any], Any]) -> str | None:
    """Every text is right, and those that were returned are among them."""
    read: list[list[int]] = []
    for profile in profiles:
        ids = profile.data["query_token"].values
        for text, names in enumerate(ids):
            real = [int(x) for x in names if x]
            read.append(real)
            one = torch.tensor([real])
            mine = qkv.Profile({"self": profile.data.isel(text=[text])}, {})
            if (why := _compared(run, mine, (one, torch.ones_like(one), {}), eager, edited)) is not None:
                return f"{run}: beam {text}: {why}"
    for row, real in zip(out[0].tolist(), out[1].tolist(), strict=True):
        tokens = [x for x, kept in zip(row, real, strict=True) if kept]
        if tokens[:-1] not in read:
            return f"{run}: a returned text is not in the profile"
    return None


def main(cases: int = 200, seed: int = 0, case: int | None = None, start: int = 0) -> int:
    """Run random models under `qkv.watch` and compare what is recorded with eager attention.

    Args:
        cases: number of runs.
        seed: random seed of all runs.
        case: number of a single one.
        start: number of the first run.
    """
    failed, missing = 0, zoo.missing()
    for name, reason in missing.items():
        print(f"without models of {name}: {reason}", flush=True)
    libraries = [name for name in zoo.ZOO if name not in missing]
    for number in range(start, start + cases) if case is None else [case]:
        library = libraries[number // 2 % len(libraries)]
        found = zoo.mismatch(library, seed, number) if number % 2 else mismatch(seed, number)
        if found is not None:
            failed += 1
            print(f"python -m fuzz.runs --seed {seed} --case {number}  {found}", flush=True)
    print(f"{cases if case is None else 1} runs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    import tyro

    sys.exit(tyro.cli(main))

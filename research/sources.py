"""How often `qkv.sources` is right on SmolLM2, on generated prompts of other kinds than those that chose its heads.

    python -m research.sources errors --passages 5 --prompts 250      # the right answer is given
    python -m research.sources errors --passages 20 --prompts 63
    python -m research.sources errors --words 450 --prompts 15        # so many words around each fact
    python -m research.sources errors --own --prompts 60              # the model answers itself
    python -m research.sources effects                                # shares beside the effects
    python -m research.sources time                                   # beside the time of the answer alone
    python -m research.sources readers                                # the entry of SmolLM2 in readers.json

In one prompt of five no passage holds the answer. Finished prompts are kept in the folder sources-of-smollm2, so that
an interrupted run resumes. All numbers of docs/howto/sources.md come from these commands.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest, spearmanr

from qkv._progress import bar
from qkv.models.loading import Loaded, load_model
from qkv.profiler.analyses.ablation import Kept
from qkv.profiler.analyses.sources import (
    INSTRUCTION,
    Kind,
    Prompt,
    _Prompt,
    calibrate,
    generated_prompt,
    readers_of,
    sources,
)
from qkv.profiler.capture.probes import weights_hash

FOLDER = Path("sources-of-smollm2")
KINDS = (
    Kind("The number of the key to the {subject} in {city} is {value}.",
         "Which number does the key to the {subject} in {city} have?", "It is {value}.", subject="place"),
    Kind("After studying {field}, {subject} moved to {value} and bought a house there.",
         "Which city did {subject} move to?", "{subject} moved to {value}.", value="city"),
    Kind("{subject} is a firm that {value} founded in {year}.",
         "Who founded {subject}?", "{subject} was founded by {value}.", subject="firm", value="name"),
    Kind("The train to {subject} leaves at {value} from the second platform.",
         "At what time does the train to {subject} leave?", "The train to {subject} leaves at {value}.",
         subject="city", value="time"),
    Kind("{subject} paid {value} dollars to {other} for the {thing}.",
         "How much did {subject} pay for the {thing}?", "{subject} paid {value} dollars."),
    Kind("According to the file, {subject} is allergic to {value}.",
         "What is {subject} allergic to?", "{subject} is allergic to {value}.", value="allergy"),
)  # fmt: skip


def share(hits: Sequence[bool]) -> str:
    """A share with its 95 % interval (Clopper and Pearson)."""
    if not hits:
        return "no prompts"
    found = binomtest(sum(hits), len(hits)).proportion_ci(method="exact")
    return f"{np.mean(hits):.1%} [{found.low:.1%}, {found.high:.1%}], {sum(hits)} of {len(hits)}"


def lengthened(one: Prompt, words: int, random: Random) -> Prompt:
    """The prompt with so many words of Python's documentation around each passage."""
    prose = [text.split() for _, text in sorted(topics.items())]
    prose = [text for text in prose if len(text) > words]
    passages = []
    for passage in one.passages:
        text = random.choice(prose)
        start = random.randint(0, len(text) - words)
        cut = random.randint(start, start + words)
        passages.append(" ".join([*text[start:cut], passage, *text[cut : start + words]]))
    return replace(one, passages=passages)


def answered(loaded: Loaded, passages: int, number: int, *, own: bool, words: int) -> dict[str, Any]:
    """One prompt: how many tokens it has, which passage holds the answer, and the shares of each sentence."""
    random = Random(f"{passages} {own} {words} {number}")
    one = generated_prompt(random, passages, answered=number % 5 != 4, kinds=KINDS)
    if words:
        one = lengthened(one, words, random)
    found = sources(
        loaded.model, one.passages, one.question, answer=None if own else one.answer, effect=False,
        tokenizer=loaded.tokenizer, max_new_tokens=60, progress=False,
    )  # fmt: skip
    tokens = len(loaded.tokenizer("\n\n".join([INSTRUCTION, *one.passages, one.question]))["input_ids"])
    shares = found.table.groupby("sentence")["share"].apply(list)
    sentences = [
        {"text": row["text"], "states": one.value in row["text"], "passages": shares[at], "answer": row["answer"]}
        for at, row in found.sentences.iterrows()
    ]
    return {"tokens": tokens, "holds": one.holds, "sentences": sentences}


def errors(loaded: Loaded, passages: int, prompts: int, *, own: bool, words: int) -> None:
    """How often the passage that holds the answer is named, and that none does."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{passages} passages{', own answers' * own}{f', {words} words' if words else ''}.jsonl"
    kept = Kept(file, ("number",), "found")
    with bar("answering", "prompts", prompts) as step:
        for number in range(prompts):
            if (number,) not in kept.rows:
                kept.put({(number,): answered(loaded, passages, number, own=own, words=words)})
            step(1)
    found = [kept.rows[number,] for number in range(prompts)]
    readers = readers_of(loaded.model, loaded.tokenizer, progress=False)
    none = [readers.none(one["sentences"][0]["passages"]) for one in found if one["holds"] is None]
    one_holds = [one for one in found if one["holds"] is not None]
    # the first sentence that says what the passage says
    says = [next((x for x in one["sentences"] if x["states"]), None) for one in one_holds]
    pairs = [(one["holds"], x) for one, x in zip(one_holds, says, strict=True) if x is not None]
    tokens = [one["tokens"] for one in found]
    whose = "the model's own" if own else "given"
    print(f"{passages} passages, {min(tokens):,} to {max(tokens):,} tokens, answers {whose}")
    print(f"  a sentence states what the passage says: {share([x is not None for x in says])}; of these sentences")
    print(f"    the passage that holds it has the largest share: {share([_most(x) == at for at, x in pairs])}")
    print(f"    the verdict is “no passage” (false alarms): {share([readers.none(x['passages']) for _, x in pairs])}")
    print(f"  no passage holds the answer, and the verdict on the first sentence is “no passage”: {share(none)}")


def _most(sentence: dict[str, Any]) -> int:
    return int(np.argmax(sentence["passages"]))


def effects(loaded: Loaded, passages: int, prompts: int) -> None:
    """The rank correlation of share and effect over passages, and how often each names the right passage."""
    random = Random("effects")
    ranks: dict[str, list[float]] = {"hidden": [], "left_out": []}
    named: dict[str, list[bool]] = {"share": [], "hidden": [], "left_out": []}
    for _ in range(prompts):
        one = generated_prompt(random, passages, kinds=KINDS)
        found = sources(
            loaded.model, one.passages, one.question, answer=one.answer, tokenizer=loaded.tokenizer, progress=False
        ).table
        for name, hits in named.items():
            hits.append(int(found[name].to_numpy().argmax()) == one.holds)
        for name, values in ranks.items():
            values.append(float(spearmanr(found["share"], found[name]).statistic))
    print(f"{prompts} prompts of {passages} passages, answers given")
    for name, hits in named.items():
        print(f"  largest {name} is that of the right passage: {share(hits)}")
    draws = np.random.default_rng(0)
    for name, values in ranks.items():
        means = draws.choice(np.array(values), (10_000, len(values))).mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        print(
            f"  rank correlation of share and {name}, mean over prompts: {np.mean(values):.2f} [{low:.2f}, {high:.2f}]"
        )


def times(loaded: Loaded, passages: int, prompts: int) -> None:
    """The answer alone and with the shares, alternating."""
    random, model = Random("time"), loaded.model
    seconds: dict[str, list[float]] = {"answer alone": [], "with shares": []}
    readers = readers_of(model, loaded.tokenizer, progress=False)

    def alone(passages: list[str], question: str) -> Any:
        ids = torch.tensor([_Prompt.of(loaded.tokenizer, passages, question).ids])
        generating: Any = model
        return generating.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100)

    options: dict[str, Any] = {"tokenizer": loaded.tokenizer, "readers": readers, "progress": False}
    runs: dict[str, Callable[..., Any]] = {
        "answer alone": alone,
        "with shares": partial(sources, model, effect=False, **options),
    }
    for number in range(prompts + 1):
        one = generated_prompt(random, passages, kinds=KINDS)
        for name, run in runs.items():
            start = time.perf_counter()
            run(one.passages, one.question)
            if number:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    base = np.array(seconds["answer alone"])
    for name, values in seconds.items():
        print(f"  {name}: median {np.median(values):.2f} s, × {np.median(np.array(values) / base):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["errors", "effects", "time", "readers"])
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--words", type=int, default=0, help="how many words of Python's documentation a passage has")
    parser.add_argument("--own", action="store_true", help="the model answers itself")
    given = parser.parse_args()
    loaded = load_model("smollm2", head=True)
    match given.what:
        case "errors":
            errors(loaded, given.passages, given.prompts, own=given.own, words=given.words)
        case "effects":
            effects(loaded, given.passages, given.prompts)
        case "time":
            times(loaded, given.passages, given.prompts)
        case "readers":
            key = weights_hash(loaded.model)
            found = calibrate(loaded.model, loaded.tokenizer, fingerprint=key)
            print(json.dumps({key: asdict(found)}, indent=1))


if __name__ == "__main__":
    main()

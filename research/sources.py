"""How often `qkv.sources` is right on SmolLM2, on generated prompts of other kinds than those that chose its heads.

    python -m research.sources errors --passages 5 --prompts 250    # the right answer is given; one in five has none
    python -m research.sources errors --passages 5 --own            # the model answers itself
    python -m research.sources effects                              # shares beside the effects
    python -m research.sources time                                 # beside the time of the answer alone
    python -m research.sources readers                              # the entry of SmolLM2 in readers.json

All numbers of docs/howto/sources.md come from these commands.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest, spearmanr

from qkv.models.loading import Loaded, load_model
from qkv.profiler.analyses.source_prompts import Kind, prompt
from qkv.profiler.analyses.sources import INSTRUCTION, _Prompt, calibrate, readers_of, sources
from qkv.profiler.capture.probes import weights_hash

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


def errors(loaded: Loaded, passages: int, prompts: int, *, own: bool, fillers: int) -> None:
    """How often the passage that holds the answer is named, and that none does."""
    random, options = Random(f"{passages} {own} {fillers}"), {"tokenizer": loaded.tokenizer, "progress": False}
    named, alarms, none, stated, tokens = list[bool](), list[bool](), list[bool](), list[bool](), list[int]()
    for number in range(prompts):
        one = prompt(random, passages, answered=number % 5 != 4, kinds=KINDS, fillers=fillers)
        answer = None if own else one.answer
        found = sources(loaded.model, one.passages, one.question, answer=answer, effect=False, **options)
        tokens.append(len(loaded.tokenizer("\n\n".join([INSTRUCTION, *one.passages, one.question]))["input_ids"]))
        read = found.sentences["read"].tolist()
        if one.holds is None:
            none.append(read[0] < 0)
            continue
        says = [at for at, text in enumerate(found.sentences["text"]) if one.value in text]
        stated.append(bool(says))
        for at in says[:1]:
            shares = found.table[found.table["sentence"] == at]["share"].to_numpy()
            named.append(int(shares.argmax()) == one.holds)
            alarms.append(read[at] < 0)
        if (number + 1) % 50 == 0:
            print(f"… {number + 1}: {np.mean(named):.1%}", flush=True)
    whose = "the model's own" if own else "given"
    print(f"{passages} passages, {min(tokens):,} to {max(tokens):,} tokens, answers {whose}")
    print(f"  a sentence states what the passage says: {share(stated)}; of these sentences")
    print(f"    the passage that holds it has the largest share: {share(named)}")
    print(f"    the verdict is “no passage” (false alarms): {share(alarms)}")
    print(f"  no passage holds the answer, and the verdict on the first sentence is “no passage”: {share(none)}")


def effects(loaded: Loaded, passages: int, prompts: int) -> None:
    """The rank correlation of share and effect over passages, and how often each names the right passage."""
    random = Random("effects")
    ranks: dict[str, list[float]] = {"hidden": [], "left_out": []}
    named: dict[str, list[bool]] = {"share": [], "hidden": [], "left_out": []}
    for _ in range(prompts):
        one = prompt(random, passages, kinds=KINDS)
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
        one = prompt(random, passages, kinds=KINDS)
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
    parser.add_argument("--fillers", type=int, default=2, help="largest number of other sentences in a passage")
    parser.add_argument("--own", action="store_true", help="the model answers itself")
    given = parser.parse_args()
    loaded = load_model("smollm2", head=True)
    match given.what:
        case "errors":
            errors(loaded, given.passages, given.prompts, own=given.own, fillers=given.fillers)
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

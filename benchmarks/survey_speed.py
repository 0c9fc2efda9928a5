"""The cost of a survey, compared with plain batched inference, and the speed-up by a second process.

python -m benchmarks.survey_speed TEXTS   one process of one thread, or of several (PART=i/N): prints JSON
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS
from qkv.models.loading import Loaded, load_model
from qkv.profiler.capture.inputs import Special, tokens_of
from qkv.profiler.corpora import library_text
from qkv.profiler.surveys.corpus import Corpus, of_texts
from qkv.profiler.surveys.survey import survey
from qkv.profiler.surveys.surveyor import Piece, batches_of, pieces

LENGTH, BATCH = 512, 4096


def against_plain(texts: int = 1000, turns: int = 10, model: str = "minilm", length: int = LENGTH) -> dict[str, Any]:
    """Float32: the survey of texts of one length, with tokenizing and writing, / their plain forward in the same
    batches. The two alternate, each on a share of the texts."""
    torch.set_num_threads(THREADS)
    loaded = load_model(model)
    parts = _parts(loaded, texts, turns, length)
    plain, surveyed = (itertools.cycle(parts) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        seconds = alternating(
            {
                "plain": lambda: _plain(loaded, next(plain), length),
                "survey": lambda: _survey(loaded, of_texts(next(surveyed)), Path(folder)),
            },
            turns,
        )
    return {
        "texts": texts,
        "tokens in a text": length,
        "throughput: survey / plain": 1 / median_ratio(seconds, "survey", "plain"),
        "tokens a second": {job: texts / turns * length / statistics.median(s) for job, s in seconds.items()},
        "seconds": seconds,
    }


def of_processes(texts: int = 48, turns: int = 3) -> dict[str, Any]:
    """The same survey by one process of one thread and by two, which share the shards."""
    seconds: dict[str, list[float]] = {"one process": [], "two processes": []}
    for _ in range(turns):
        for job, world in (("one process", 1), ("two processes", 2)):
            seconds[job].append(_launched(world, texts))
    return {
        "texts": texts,
        "time: one process / two": median_ratio(seconds, "one process", "two processes"),
        "seconds": seconds,
    }


def _parts(loaded: Loaded, texts: int, turns: int, length: int = LENGTH) -> list[list[str]]:
    """Texts that are each exactly one full sequence."""
    special = Special.of(loaded.tokenizer)
    made = list(itertools.islice(_full_texts(loaded, special, length), texts))
    size = -(-texts // turns)
    return [made[i : i + size] for i in range(0, texts, size)]


def _full_texts(loaded: Loaded, special: Special, length: int) -> Iterator[str]:
    capacity = length - len(special.before) - len(special.after)
    text = library_text(3_000_000)
    ids = [
        i for start in range(0, len(text), 20_000) for i in tokens_of(loaded.tokenizer, text[start : start + 20_000])
    ]
    for start in range(0, len(ids) - capacity, capacity):
        made = loaded.tokenizer.decode(ids[start : start + capacity])
        if len(tokens_of(loaded.tokenizer, made)) >= capacity:  # tokenized again it may be longer, hardly shorter
            kept = tokens_of(loaded.tokenizer, made)[:capacity]
            again = loaded.tokenizer.decode(kept)
            if len(tokens_of(loaded.tokenizer, again)) == capacity:
                yield again


def _plain(loaded: Loaded, texts: list[str], length: int) -> None:
    special = Special.of(loaded.tokenizer)
    found: list[Piece] = []
    for text in texts:
        found += pieces(tokens_of(loaded.tokenizer, text), special, length, 0)
    with torch.no_grad():
        for batch in batches_of(found, BATCH, pad=0):
            loaded.model(input_ids=batch.ids, attention_mask=batch.real.long())


def _survey(loaded: Loaded, corpus: Corpus, folder: Path) -> None:
    shutil.rmtree(folder / "survey", ignore_errors=True)
    survey(
        loaded.model, corpus, tokenizer=loaded.tokenizer, out=folder / "survey", shards=1, batch_tokens=BATCH, overlap=0
    )


def _launched(world: int, texts: int) -> float:
    """Seconds of a survey by so many processes, without their start."""
    command = [sys.executable, "-m", "benchmarks.survey_speed", str(texts)]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(world):
            env = os.environ | {"PART": f"{rank}/{world}", "OMP_NUM_THREADS": "1", "SURVEY_OUT": folder}
            running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        said = [process.communicate()[0] for process in running]
    return max(float(json.loads(text.strip().splitlines()[-1])["seconds"]) for text in said)


def main() -> None:
    torch.set_num_threads(1)
    minilm, texts = load_model("minilm"), int(sys.argv[1])
    corpus = of_texts(itertools.chain(*_parts(minilm, texts, 1)))
    with torch.no_grad():
        minilm.model(input_ids=torch.full((1, LENGTH), 7))  # warm-up
    out = Path(os.environ["SURVEY_OUT"]) / "survey"
    part = os.environ["PART"]
    ready, (rank, world) = out.parent, map(int, part.split("/"))
    (ready / f"ready-{rank}").touch()
    while len(list(ready.glob("ready-*"))) < world:  # all start together
        time.sleep(0.02)
    started = time.perf_counter()
    survey(
        minilm.model,
        corpus,
        tokenizer=minilm.tokenizer,
        out=out,
        shards=8,
        batch_tokens=BATCH,
        overlap=0,
        only_shards=part,
    )
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()

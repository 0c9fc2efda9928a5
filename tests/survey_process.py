"""A small survey, and a process of one that dies, for tests of many."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler.surveys import survey as surveys
from qkv.profiler.surveys.folder import Folder

TEXTS = ["def f(x):\n    return x + 1\n" * 4, "import os", "class A: pass\n" * 7, "x = 1; y = 2", "é" * 33, "for"]


def own(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderConfig(vocab_size=256, context=80, d_model=24, layers=2, heads=3, **changes)).eval()


def own_survey(out: Path | str, texts: Any = TEXTS, model: Any = None, **settings: Any) -> surveys.Survey:
    settings = {"shards": 3, "batch_tokens": 90, "tokenizer": ByteTokenizer()} | settings
    return surveys.survey(model or own(), texts, out=out, **settings)


def main(out: Path | str, last: int) -> None:
    """Run a survey, and kill this process once it has written the shard `last`."""
    write = Folder.write_shard

    def then_die(folder: Folder, number: int, data: bytes) -> None:
        write(folder, number, data)
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    Folder.write_shard = then_die  # type: ignore[method-assign]
    own_survey(out)

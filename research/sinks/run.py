"""`study` judges every claim about attention sinks on one trained model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from qkv._progress import bar
from qkv.errors import InputError
from qkv.profiler.capture.models import load
from qkv.profiler.run import versions
from research.sinks.measure import measure
from research.sinks.studies import Study
from research.sinks.subject import Subject, evaluated
from research.sinks.texts import CHOICE, JUDGED, SHORT, default_texts, prepared


def study(
    model: nn.Module | str,
    texts: str | Sequence[str] | Int[Tensor, "t n"] | None = None,
    *,
    tokenizer: Any = None,
    progress: bool = True,
    name: str = "",
) -> Study:
    """Judge the claims about attention sinks on a trained model, at 64 tokens and over the whole text.

    The model runs on 16 texts: on 4, which choose the sink heads, and on 12, of which each gives one value for the
    interval of each effect. docs/howto/sinks-of-a-model.md defines all measurements.

    Args:
        model: qkv's `DecoderLM` or a decoder or encoder of Hugging Face; or a name or folder for `qkv.load`.
        texts: texts from which 16 windows of up to 512 tokens are cut; or token ids (texts, length). By default files
            that qkv-mini was not trained on, and for any other model chapters of the Python language reference.
        tokenizer: converts texts to ids; if `model` is a name, its tokenizer is loaded.
        progress: show a progress bar, if standard error is a terminal.
        name: of the model, kept in the attributes.

    Raises:
        InputError: for too little text, and for a model in which the measurements are not known to be right: without a
            stack of blocks that pass on a residual stream, or without the queries, keys and values of a softmax.

    >>> import torch
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=50, context=64, d_model=16, layers=1, heads=2))
    >>> found = study(model, torch.randint(50, (16, 64)), progress=False)
    >>> {verdict.claim: verdict.holds for verdict in found.verdicts[64]}["C061"]
    'does not hold'
    """
    started = time.perf_counter()
    if isinstance(model, str):
        loaded = load(model, head=None)
        texts = default_texts(model) if texts is None else texts
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    if texts is None:
        raise InputError("texts is None, expected texts or token ids, unless the model is given by its name")
    windows = prepared(model, [texts] if isinstance(texts, str) else texts, tokenizer)
    whole = windows.windows.shape[1]
    lengths = sorted({SHORT, whole})
    with evaluated(model), bar(f"studying {name}".strip(), "texts", show=progress) as step:
        step(0, of=1.5 * JUDGED * len(lengths))
        subject = Subject.of(model, windows.of(SHORT)[:1])
        found = {n: measure(subject, windows, n, step) for n in lengths}
    attrs = {
        "model": name or type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": len(subject.blocks),
        "causal": subject.causal,
        "special_first": bool(windows.special.before),
        "texts": {"choice": CHOICE, "judged": JUDGED, "tokens": whole},
        "versions": versions(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Study(attrs, found)

"""Recurrent encoder-decoders against the equations of their papers; test_teaching_laws.py has the laws of decoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import papers
from conftest import close
from papers import softmax
from qkv._engine.call import Call
from qkv.kernels import watching
from qkv_lab.models.seq2seq import RNNSeq2Seq
from teaching_models import LENGTHS, RECURRENTS, SOURCE, TARGET, build


@torch.no_grad()
def by_the_papers(model: RNNSeq2Seq, source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (t, vocab) and weights (t, heads, s) of one sequence without padding, with the cells of torch."""

    def listed(state: Any) -> list[Tensor]:
        return list(state) if isinstance(state, tuple) else [state]

    c, p = model.config, papers.parameters(model)
    of_attention = {} if model.attention is None else papers.parameters(model.attention)
    states, last = model.encoder(model.source_embedding(torch.tensor([source])))
    memory, hidden = states[0].numpy(), listed(last)  # of each layer, or of both ways of each
    if c.bidirectional:
        hidden = [model.bridges[i](torch.cat([x[0::2], x[1::2]], -1)) for i, x in enumerate(hidden)]
    fed, logits, alignments = np.zeros(c.d_hidden), [], []
    for t, token in enumerate(target):
        x, weights = p["target_embedding.weight"][token], np.zeros(len(source))
        if c.attention == "bahdanau":
            weights = papers.additive(of_attention, hidden[0][-1, 0].numpy(), memory)
            x = np.concatenate([x, weights @ memory])
        elif c.input_feeding:
            x = np.concatenate([x, fed])
        out, last = model.decoder(torch.from_numpy(x)[None, None], tuple(hidden) if c.cell == "lstm" else hidden[0])
        x, hidden = out[0, 0].numpy(), listed(last)
        if c.attention == "bahdanau":
            x = np.concatenate([x, weights @ memory])
        elif c.attention == "multihead":
            context, weights = heads(of_attention, c.heads, x, memory)
            x = np.tanh(p["combine.weight"] @ np.concatenate([context, x]))
        elif c.attention != "none":
            score = c.attention.removeprefix("luong-")
            x, weights = papers.luong(of_attention, score, c.kind, c.half_width, x, memory, t)
            fed = x
        logits.append(p["output.weight"] @ x + p["output.bias"])
        alignments.append(np.atleast_2d(weights))
    return np.stack(logits), np.stack(alignments)


def heads(p: papers.Parameters, n: int, h: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vaswani et al. 2017, §3.2.2: the context, and the weights of every head."""
    w, b = np.split(p["in_proj.weight"], 3), np.split(p["in_proj.bias"], 3)
    q, k, v = (np.split(x @ w[i].T + b[i], n, -1) for i, x in enumerate((h, memory, memory)))
    rows = [softmax(k[i] @ q[i] / math.sqrt(len(q[i]))) for i in range(n)]
    context = np.concatenate([row @ v[i] for i, row in enumerate(rows)])
    return p["out_proj.weight"] @ context + p["out_proj.bias"], np.stack(rows)


@pytest.mark.parametrize("name", RECURRENTS)
def test_logits_and_alignments_equal_the_papers_equations(name: str) -> None:
    """Each item is computed alone and without its padding."""
    model = build(RECURRENTS[name])
    logits, attends = model(SOURCE, TARGET), model.config.attention != "none"
    weights = model.alignments(SOURCE, TARGET, per_head=True) if attends else None
    for b, length in enumerate(LENGTHS):
        want, aligned = by_the_papers(model, SOURCE[b, :length].tolist(), TARGET[b].tolist())
        close(logits[b], want, eps=512)
        if weights is not None:
            close(weights[b, :, :, :length], aligned.swapaxes(0, 1), eps=512)
            assert not weights[b, :, :, length:].any()
    if weights is not None:
        close(model.alignments(SOURCE, TARGET), weights.mean(1))


@pytest.mark.parametrize("name", ["bahdanau", "luong-concat local-m", "multihead"])
def test_source_is_projected_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = build(RECURRENTS[name]), []
    method = "keys_values" if name == "multihead" else "project"
    project = getattr(model.attention, method)
    monkeypatch.setattr(model.attention, method, lambda keys: (counted.append(1), project(keys))[1])
    state = model.start(SOURCE)
    for at in range(4):
        model.step(TARGET[:, at : at + 1], state)
    assert len(counted) == 1


@pytest.mark.parametrize(("name", "queries"), [
    ("none", []), ("bahdanau", [1] * 4), ("luong-dot global", [1] * 4), ("luong-dot local-p", [4]), ("multihead", [4]),
])  # fmt: skip
def test_observers_see_one_call_for_all_steps_where_possible(name: str, queries: list[int]) -> None:
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):
        build(RECURRENTS[name])(SOURCE, TARGET)
    assert [call.q.shape[2] for call in calls] == queries

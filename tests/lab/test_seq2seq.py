"""Recurrent encoder-decoders against the equations of their papers; test_teaching_laws.py has the laws of decoding."""

from __future__ import annotations

import math

import numpy as np
import pytest

import papers
from conftest import close
from papers import sigmoid, softmax
from qkv._engine.call import Call
from qkv.kernels import watching
from qkv_lab.models.seq2seq import RNNSeq2Seq
from teaching_models import LENGTHS, RECURRENTS, SOURCE, TARGET, build


class Loops:
    """One sequence at a time, with the equations of each paper and the parameters of a model."""

    def __init__(self, model: RNNSeq2Seq) -> None:
        self.config, self.p = model.config, papers.parameters(model)
        self.of_attention = {} if model.attention is None else papers.parameters(model.attention)

    def cell(self, name: str, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        """One step of an LSTM, a GRU (Cho et al. 2014, as torch has it) or a plain recurrence."""
        of_x = self.p[name.replace("?", "weight_ih")] @ x + self.p[name.replace("?", "bias_ih")]
        of_h = self.p[name.replace("?", "weight_hh")] @ state[0] + self.p[name.replace("?", "bias_hh")]
        if self.config.cell == "rnn":
            return [np.tanh(of_x + of_h)]
        if self.config.cell == "lstm":
            return papers.lstm(of_x + of_h, state[1])
        (r, z, n), (rh, zh, nh) = np.split(of_x, 3), np.split(of_h, 3)
        z = sigmoid(z + zh)
        return [(1 - z) * np.tanh(n + sigmoid(r + rh) * nh) + z * state[0]]

    def encode(self, source: list[int]) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Memory, and the decoder's initial state for each layer."""
        c = self.config
        kinds, ways = (2 if c.cell == "lstm" else 1), (("", "_reverse") if c.bidirectional else ("",))
        rows, initial = [self.p["source_embedding.weight"][token] for token in source], []
        for layer in range(c.layers):
            sides, lasts = [], []
            for way in ways:
                state = [np.zeros(c.d_hidden // len(ways)) for _ in range(kinds)]
                out = []
                for x in rows[:: -1 if way else 1]:
                    state = self.cell(f"encoder.?_l{layer}{way}", x, state)
                    out.append(state[0])
                sides.append(out[:: -1 if way else 1])
                lasts.append(state)
            rows = [np.concatenate(pair) for pair in zip(*sides, strict=True)]
            joined = [np.concatenate([last[kind] for last in lasts]) for kind in range(kinds)]
            if c.bidirectional:
                joined = [self.p[f"bridges.{i}.weight"] @ x + self.p[f"bridges.{i}.bias"] for i, x in enumerate(joined)]
            initial.append(joined)
        return np.stack(rows), initial

    def run(self, source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits (t, vocab) and weights (t, heads, s)."""
        c, p = self.config, self.p
        memory, states = self.encode(source)
        fed, logits, alignments = np.zeros(c.d_hidden), [], []
        for t, token in enumerate(target):
            x, weights = p["target_embedding.weight"][token], np.zeros(len(source))
            if c.attention == "bahdanau":
                weights = papers.additive(self.of_attention, states[-1][0], memory)
                x = np.concatenate([x, weights @ memory])
            elif c.input_feeding:
                x = np.concatenate([x, fed])
            for layer in range(c.layers):
                states[layer] = self.cell(f"decoder.?_l{layer}", x, states[layer])
                x = states[layer][0]
            if c.attention == "bahdanau":
                x = np.concatenate([x, weights @ memory])
            elif c.attention == "multihead":
                context, weights = self.heads(x, memory)
                x = np.tanh(p["combine.weight"] @ np.concatenate([context, x]))
            elif c.attention != "none":
                score = c.attention.removeprefix("luong-")
                x, weights = papers.luong(self.of_attention, score, c.kind, c.half_width, x, memory, t)
                fed = x
            logits.append(p["output.weight"] @ x + p["output.bias"])
            alignments.append(np.atleast_2d(weights))
        return np.stack(logits), np.stack(alignments)

    def heads(self, h: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Vaswani et al. 2017, §3.2.2: the context, and the weights of every head."""
        p, d = self.of_attention, self.config.d_hidden
        w, b = p["in_proj.weight"], p["in_proj.bias"]
        q, k, v = w[:d] @ h + b[:d], memory @ w[d : 2 * d].T + b[d : 2 * d], memory @ w[2 * d :].T + b[2 * d :]
        size, found, rows = d // self.config.heads, [], []
        for n in range(self.config.heads):
            cut = slice(n * size, (n + 1) * size)
            rows.append(softmax(k[:, cut] @ q[cut] / math.sqrt(size)))
            found.append(rows[-1] @ v[:, cut])
        return p["out_proj.weight"] @ np.concatenate(found) + p["out_proj.bias"], np.stack(rows)


@pytest.mark.parametrize("name", RECURRENTS)
def test_logits_and_alignments_equal_the_papers_equations(name: str) -> None:
    """Each item is computed alone and without its padding."""
    model = build(RECURRENTS[name])
    logits, attends = model(SOURCE, TARGET), model.config.attention != "none"
    weights = model.alignments(SOURCE, TARGET, per_head=True) if attends else None
    for b, length in enumerate(LENGTHS):
        want, aligned = Loops(model).run(SOURCE[b, :length].tolist(), TARGET[b].tolist())
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

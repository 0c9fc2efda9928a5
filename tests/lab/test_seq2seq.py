"""Recurrent encoder-decoders: against loops in NumPy, and the laws that decoding step by step must keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import close, rand, refused, unchecked
from qkv._engine.call import Call
from qkv.kernels import watching
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

LUONG = ("luong-dot", "luong-general", "luong-concat")
KINDS = ("global", "local-m", "local-p")
SMALL = RNNSeq2SeqConfig(9, 11, d_embedding=5, d_hidden=6, half_width=2, heads=3)
EVERY = {
    "none": SMALL,
    "bahdanau": replace(SMALL, attention="bahdanau"),
    "multihead": replace(SMALL, attention="multihead"),
    **{f"{name} {kind}": replace(SMALL, attention=name, kind=kind) for name in LUONG for kind in KINDS},
    **{
        f"{name} {kind} fed": replace(SMALL, attention=name, kind=kind, input_feeding=True)
        for name, kind in zip(LUONG, KINDS, strict=True)
    },
    "none, deep gru": replace(SMALL, cell="gru", layers=2),
    "bahdanau, deep": replace(SMALL, attention="bahdanau", layers=2, bidirectional=False),
    "bahdanau, gru": replace(SMALL, attention="bahdanau", cell="gru"),
    "fed, deep gru": replace(SMALL, attention="luong-general", input_feeding=True, cell="gru", layers=2),
    "none, rnn": replace(SMALL, cell="rnn"),
    "bahdanau, deep rnn": replace(SMALL, attention="bahdanau", cell="rnn", layers=2),
    "fed, rnn": replace(SMALL, attention="luong-dot", input_feeding=True, cell="rnn", bidirectional=False),
    "multihead, one way": replace(SMALL, attention="multihead", bidirectional=False, layers=2),
}
SOURCE = torch.tensor([[3, 5, 8, 1, 2], [4, 7, 6, 0, 0], [8, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 4, 9, 3], [1, 10, 5, 2], [1, 7, 2, 0]])


def build(config: RNNSeq2SeqConfig, scale: float = 0.6) -> RNNSeq2Seq:
    """In float64 and evaluation mode, with parameters so large that every part matters."""
    model = RNNSeq2Seq(config).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(scale * rand(*parameter.shape, seed=seed))
    return model


@pytest.fixture(params=EVERY)
def model(request: pytest.FixtureRequest) -> RNNSeq2Seq:
    return build(EVERY[request.param])


# --- the definition, as loops -----------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Loops:
    """One sequence at a time, with the equations of each paper and the parameters of a model."""

    def __init__(self, model: RNNSeq2Seq) -> None:
        self.config, self.p = model.config, {name: x.detach().numpy() for name, x in model.named_parameters()}

    def cell(self, name: str, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        """One step of an LSTM (Hochreiter & Schmidhuber 1997), GRU (Cho et al. 2014, as torch has it) or plain RNN."""
        of_x = self.p[name.replace("?", "weight_ih")] @ x + self.p[name.replace("?", "bias_ih")]
        of_h = self.p[name.replace("?", "weight_hh")] @ state[0] + self.p[name.replace("?", "bias_hh")]
        if self.config.cell == "rnn":
            return [np.tanh(of_x + of_h)]
        if self.config.cell == "lstm":
            i, f, g, o = np.split(of_x + of_h, 4)
            c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
            return [sigmoid(o) * np.tanh(c), c]
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
            x = p["target_embedding.weight"][token]
            if c.attention == "bahdanau":
                energy = np.tanh(memory @ p["attention.w_k"].T + p["attention.w_q"] @ states[-1][0])
                weights = self.softmax(energy @ p["attention.vector"])
                context = weights @ memory
                x = np.concatenate([x, context])
            elif c.input_feeding:
                x = np.concatenate([x, fed])
            for layer in range(c.layers):
                states[layer] = self.cell(f"decoder.?_l{layer}", x, states[layer])
                x = states[layer][0]
            features = x
            if c.attention == "none":
                weights = np.zeros(len(source))
            elif c.attention == "bahdanau":
                features = np.concatenate([x, context])
            elif c.attention == "multihead":
                context, weights = self.heads(x, memory)
                features = np.tanh(p["combine.weight"] @ np.concatenate([context, x]))
            else:
                weights = self.luong(x, memory, t)
                features = np.tanh(p["attention.combine.weight"] @ np.concatenate([weights @ memory, x]))
                fed = features
            logits.append(p["output.weight"] @ features + p["output.bias"])
            alignments.append(np.atleast_2d(weights))
        return np.stack(logits), np.stack(alignments)

    def softmax(self, x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum() if len(x) else x

    def luong(self, h: np.ndarray, memory: np.ndarray, t: int) -> np.ndarray:
        p, keys = self.p, range(len(memory))
        score = {
            "luong-dot": lambda k: h @ k,
            "luong-general": lambda k: h @ p["attention.weight"] @ k,
            "luong-concat": lambda k: p["attention.vector"] @ np.tanh(p["attention.weight"] @ np.concatenate([h, k])),
        }[self.config.attention]
        width, centre = self.config.half_width, float(t)
        if self.config.kind == "local-p":
            inner = np.tanh(p["attention.position_weight"] @ h)
            centre = len(memory) * float(sigmoid(p["attention.position_vector"] @ inner))
        near = [j for j in keys if self.config.kind == "global" or abs(j - centre) <= width]
        weights = np.zeros(len(memory))
        weights[near] = self.softmax(np.array([score(memory[j]) for j in near]))
        if self.config.kind == "local-p":
            weights *= [math.exp(-((j - centre) ** 2) / (2 * (width / 2) ** 2)) for j in keys]
        return weights

    def heads(self, h: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Vaswani et al. 2017, §3.2.2: the context, and the weights of every head."""
        p, d = self.p, self.config.d_hidden
        w, b = p["attention.in_proj.weight"], p["attention.in_proj.bias"]
        q, k, v = w[:d] @ h + b[:d], memory @ w[d : 2 * d].T + b[d : 2 * d], memory @ w[2 * d :].T + b[2 * d :]
        size, found, rows = d // self.config.heads, [], []
        for n in range(self.config.heads):
            cut = slice(n * size, (n + 1) * size)
            rows.append(self.softmax(k[:, cut] @ q[cut] / math.sqrt(size)))
            found.append(rows[-1] @ v[:, cut])
        return p["attention.out_proj.weight"] @ np.concatenate(found) + p["attention.out_proj.bias"], np.stack(rows)


def test_logits_and_alignments_equal_the_papers_equations(model: RNNSeq2Seq) -> None:
    logits = model(SOURCE, TARGET)
    assert logits.shape == (3, 4, model.vocabulary)
    attends = model.config.attention != "none"
    weights = model.alignments(SOURCE, TARGET, per_head=True) if attends else None
    for b, length in enumerate([5, 3, 1]):
        want, aligned = Loops(model).run(SOURCE[b, :length].tolist(), TARGET[b].tolist())
        close(logits[b], want, eps=512)
        if weights is not None:
            close(weights[b, :, :, :length], aligned.swapaxes(0, 1), eps=512)
            assert not weights[b, :, :, length:].any()
    if weights is not None:
        close(model.alignments(SOURCE, TARGET), weights.mean(1))


def test_loss_ignores_padding_and_the_first_token(model: RNNSeq2Seq) -> None:
    """The mean over the three and three and two tokens that are real and not the first."""
    total, count = 0.0, 0
    for b, length in enumerate([5, 3, 1]):
        tokens = [x for x in TARGET[b].tolist() if x != 0]
        logits, _ = Loops(model).run(SOURCE[b, :length].tolist(), tokens[:-1])
        for row, token in zip(logits, tokens[1:], strict=True):
            total, count = total - (row[token] - math.log(np.exp(row).sum())), count + 1
    assert count == 8
    close(model.loss(SOURCE, TARGET), torch.tensor(total / count, dtype=torch.float64), eps=512)


def test_gradients_against_finite_differences(model: RNNSeq2Seq) -> None:
    """Finite differences of the loss along random directions of each parameter."""
    names = [name for name, _ in model.named_parameters()]
    wrapped = _Loss(model)

    def loss(*parameters: Tensor) -> Tensor:
        swapped = {f"model.{name}": x for name, x in zip(names, parameters, strict=True)}
        return torch.func.functional_call(wrapped, swapped, (SOURCE, TARGET))

    leaves = tuple(x.detach().clone().requires_grad_() for x in model.parameters())
    with unchecked():
        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
        slopes = torch.autograd.grad(loss(*leaves), leaves)
    for name, slope in zip(names, slopes, strict=True):
        assert slope.abs().max() > 1e-6, name


class _Loss(nn.Module):
    def __init__(self, model: RNNSeq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model.loss(source, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "bahdanau", "multihead", "luong-concat local-p", "luong-concat local-p fed"])
def test_gradients_entry_by_entry(name: str) -> None:
    config = replace(EVERY[name], source_vocab=6, target_vocab=6, d_embedding=2, d_hidden=4, heads=2)
    model = build(config)
    names, wrapped = [n for n, _ in model.named_parameters()], _Loss(model)
    source, target = torch.tensor([[3, 4, 5], [5, 3, 0]]), torch.tensor([[1, 4, 2], [1, 2, 0]])

    def loss(*parameters: Tensor) -> Tensor:
        swapped = {f"model.{n}": x for n, x in zip(names, parameters, strict=True)}
        return torch.func.functional_call(wrapped, swapped, (source, target))

    with unchecked():
        assert torch.autograd.gradcheck(
            loss, tuple(x.detach().clone().requires_grad_() for x in model.parameters()), fast_mode=True
        )


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1], [1, 3]], ids=str)
def test_steps_equal_forward(model: RNNSeq2Seq, cuts: list[int]) -> None:
    want, state, at = model(SOURCE, TARGET), model.start(SOURCE), 0
    for n in cuts:
        logits = model.step(TARGET[:, at : at + n], state)
        at += n
        assert logits.shape == (3, model.vocabulary)
        close(logits, want[:, at - 1])
        assert state.seen == at


def test_reordered_state_continues_with_the_other_items(model: RNNSeq2Seq) -> None:
    """Hypotheses split and die: what follows is as if each had come alone."""
    state, rows = model.start(SOURCE), torch.tensor([2, 0, 0, 1])
    for at in range(2):
        model.step(TARGET[:, at : at + 1], state)
    state.reorder(rows)
    further = torch.tensor([[5], [6], [7], [8]])
    got = model.step(further, state)
    close(got, model(SOURCE[rows], torch.cat([TARGET[rows, :2], further], 1))[:, -1])
    state.reorder(torch.tensor([3]))
    want = model(SOURCE[1:2], torch.tensor([[*TARGET[1, :2].tolist(), 8, 2]]))
    close(model.step(torch.tensor([[2]]), state), want[:, -1])


def test_padding_and_other_items_do_not_change_logits(model: RNNSeq2Seq) -> None:
    want = model(SOURCE, TARGET)
    close(model(nn.functional.pad(SOURCE, (0, 3)), TARGET), want)
    for b, length in enumerate([5, 3, 1]):
        close(model(SOURCE[b : b + 1, :length], TARGET[b : b + 1]), want[b : b + 1])
    close(model.loss(SOURCE, nn.functional.pad(TARGET, (0, 2))), model.loss(SOURCE, TARGET))


def test_later_tokens_do_not_change_earlier_logits(model: RNNSeq2Seq) -> None:
    other = TARGET.clone()
    other[:, 2:] = 6
    close(model(SOURCE, other)[:, :2], model(SOURCE, TARGET)[:, :2])
    assert (model(SOURCE, other)[:, 2:] - model(SOURCE, TARGET)[:, 2:]).abs().max() > 1e-3


def test_source_is_projected_once(model: RNNSeq2Seq, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.attention is None:
        return
    name, counted = ("keys_values" if model.config.attention == "multihead" else "project"), []
    project = getattr(model.attention, name)
    monkeypatch.setattr(model.attention, name, lambda keys: (counted.append(1), project(keys))[1])
    state = model.start(SOURCE)
    for at in range(4):
        model.step(TARGET[:, at : at + 1], state)
    assert len(counted) == 1


@pytest.mark.parametrize("name", ["bahdanau", "luong-dot global", "luong-dot local-p", "multihead", "none"])
def test_observers_see_one_call_for_all_steps_where_possible(name: str) -> None:
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):
        build(EVERY[name])(SOURCE, TARGET)
    assert [call.q.shape[2] for call in calls] == {"none": [], "bahdanau": [1] * 4}.get(name, [4])


def test_dropout_acts_only_in_training() -> None:
    model = build(replace(SMALL, attention="luong-general", dropout=0.5, layers=2))
    close(model(SOURCE, TARGET), build(replace(model.config, dropout=0.0))(SOURCE, TARGET), eps=1)
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))


# --- learning ---------------------------------------------------------------------------------------------------------


QUICK = ("none", "bahdanau", "luong-general global", "luong-dot global fed", "multihead")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EVERY])
def test_model_learns_to_reverse(name: str) -> None:
    torch.manual_seed(0)
    config = replace(EVERY[name], source_vocab=12, target_vocab=12, d_embedding=16, d_hidden=32, heads=4)
    model, tokens = RNNSeq2Seq(config), torch.randint(3, 12, (8, 5))
    source = torch.where(torch.arange(5) < torch.tensor([5, 5, 4, 5, 3, 5, 4, 5])[:, None], tokens, 0)
    target = torch.zeros(8, 7, dtype=torch.int64)
    for row, one in zip(target, source, strict=True):
        real = one[one != 0]
        row[: len(real) + 2] = torch.cat([torch.tensor([1]), real.flip(0), torch.tensor([2])])
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    with unchecked():
        first = model.loss(source, target).item()
        for _ in range(120):
            adam.zero_grad()
            loss = model.loss(source, target)
            loss.backward()
            adam.step()
            if loss < 0.04:
                break
        assert first > 1.5
        assert model.loss(source, target) < 0.05
        # Greedy decoding gives the targets back.
        state, last = model.start(source), torch.ones(8, 1, dtype=torch.int64)
        for at in range(1, 7):
            last = model.step(last, state).argmax(-1, keepdim=True)
            real = target[:, at] != 0
            assert torch.equal(last[real, 0], target[real, at])
            last = torch.where(real[:, None], last, 0)


# --- sizes and errors -------------------------------------------------------------------------------------------------


def test_number_of_parameters(model: RNNSeq2Seq) -> None:
    c = model.config
    d, e, gates = c.d_hidden, c.d_embedding, {"lstm": 4, "gru": 3, "rnn": 1}[c.cell]

    def recurrent(inputs: int, size: int) -> int:
        return gates * size * (inputs + size + 2)

    ways = 2 if c.bidirectional else 1
    encoder = sum(ways * recurrent(d if layer else e, d // ways) for layer in range(c.layers))
    further = d if c.attention == "bahdanau" or c.input_feeding else 0
    decoder = sum(recurrent(d if layer else e + further, d) for layer in range(c.layers))
    bridges = (2 if gates == 4 else 1) * d * (d + 1) if c.bidirectional else 0
    attention = {
        "none": 0,
        "bahdanau": 2 * d * d + d,
        "luong-dot": 2 * d * d,
        "luong-general": 3 * d * d,
        "luong-concat": 4 * d * d + d,
        "multihead": 4 * d * (d + 1) + 2 * d * d,
    }[c.attention] + (d * d + d if c.kind == "local-p" else 0)
    output = c.target_vocab * ((2 * d if c.attention == "bahdanau" else d) + 1)
    embeddings = (c.source_vocab + c.target_vocab) * e
    want = embeddings + encoder + decoder + bridges + attention + output
    assert sum(x.numel() for x in model.parameters()) == want


@pytest.mark.parametrize(
    ("asked", "argument", "match"),
    [
        ({"attention": "luong"}, "attention", None),
        ({"cell": "elman"}, "cell", None),
        ({"attention": "luong-dot", "kind": "local"}, "kind", "'local'"),
        ({"half_width": 0}, "half_width", None),
        ({"layers": 0}, "layers", None),
        ({"target_vocab": 0}, "target_vocab", None),
        ({"attention": "multihead", "heads": 4}, "d_hidden", "multiple"),
        ({"d_hidden": 9}, "d_hidden", "even"),
        ({"attention": "bahdanau", "kind": "local-m"}, "kind", "'bahdanau'"),
        ({"attention": "multihead", "input_feeding": True}, "input_feeding", None),
        ({"input_feeding": True}, "input_feeding", None),
        ({"dropout": 1.0}, "dropout", None),
        ({"end": 1}, "end", "than start"),
        ({"pad": -1}, "pad", "is -1"),
        ({"end": 11}, "end", "is 11"),
        ({"pad": 9}, "pad", "is 9"),
    ],
)
def test_configurations_reject_invalid_values(asked: dict, argument: str, match: str | None) -> None:
    with unchecked(), refused(argument, match):
        replace(SMALL, **asked)


@pytest.mark.parametrize(
    ("source", "target", "argument", "match"),
    [
        ([[0, 3, 4]], [[1, 2]], "source", "before a real"),
        ([[3, 4], [0, 0]], [[1, 2], [1, 2]], "source", "padding only"),
        ([[3, 9]], [[1, 2]], "source", r"3\.\.9"),
        ([[3, 4]], [[1, 11]], "tokens", r"1\.\.11"),
        ([[3, 4]], [[1, -1]], "tokens", r"-1\.\.1"),
        ([[3, 4]], [[1, 2], [1, 2]], "tokens", "2 items"),
        ([[3.0, 4.0]], [[1, 2]], "source", "float32"),
        ([[3, 4]], [1, 2], "tokens", r"\(2,\)"),
    ],
)
def test_model_rejects_bad_sources_and_targets(source: list, target: list, argument: str, match: str) -> None:
    with unchecked(), refused(argument, match):
        build(SMALL)(torch.tensor(source), torch.tensor(target))


def test_targets_without_tokens_and_models_without_attention_are_rejected() -> None:
    with refused("target"):
        build(SMALL).loss(SOURCE, torch.tensor([[1, 0]] * 3))
    with refused("attention"):
        build(SMALL).alignments(SOURCE, TARGET)

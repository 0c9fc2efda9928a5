"""The captioner: against the paper's equations in NumPy, and REINFORCE without bias; test_teaching_laws.py has more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import papers
from conftest import close
from papers import sigmoid
from qkv import Choice
from qkv.kernels import watching
from qkv_lab.models import captioner
from qkv_lab.models.captioner import Captioner
from teaching_models import CAPTIONER, CAPTIONERS, TARGET, build, images

HARD = CAPTIONERS["hard"]


def by_the_paper(model: Captioner, grid: np.ndarray, caption: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and weights at each token, for annotations (cells, d) of one image: §3.1 and §4 of Xu et al. 2015."""
    p, of_attention = papers.parameters(model), papers.parameters(model.attention)
    mean = grid.mean(0)
    h = np.tanh(p["first_hidden.weight"] @ mean + p["first_hidden.bias"])
    c = np.tanh(p["first_cell.weight"] @ mean + p["first_cell.bias"])
    logits, weights = [], []
    for token in caption:
        alpha = papers.additive(of_attention, h, grid)  # eq. 4 and 5
        z = grid[alpha.argmax()] if model.config.attention == "hard" else alpha @ grid  # eq. 13
        if model.config.gate:
            z = z * sigmoid(p["gate.weight"] @ h + p["gate.bias"])  # §4.2.1
        y = p["embedding.weight"][token]
        gates = p["lstm.weight_ih"] @ np.concatenate([y, z]) + p["lstm.bias_ih"]
        i, f, g, o = np.split(gates + p["lstm.weight_hh"] @ h + p["lstm.bias_hh"], 4)  # eq. 1
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)  # eq. 2
        h = sigmoid(o) * np.tanh(c)  # eq. 3
        logits.append(p["output.weight"] @ (y + p["from_hidden.weight"] @ h + p["from_seen.weight"] @ z))  # eq. 7
        weights.append(alpha)
    return np.stack(logits), np.stack(weights)


@pytest.mark.parametrize("name", CAPTIONERS)
def test_equations_of_the_paper(name: str) -> None:
    model = build(replace(CAPTIONERS[name], penalty=0.7))
    given = images(model.config)
    grid = model.features(given).detach()
    logits, maps, total = model(given, TARGET), model.maps(given, TARGET), 0.0
    assert maps.shape == (3, 4, *grid.shape[2:])
    for i, n in enumerate((3, 3, 2)):
        wanted, weights = by_the_paper(model, grid[i].flatten(1).T.numpy(), TARGET[i].tolist())
        close(logits[i], wanted, eps=2**10)
        close(maps[i].flatten(1), weights, eps=2**10)
        chances = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True)
        total -= sum(math.log(chances[t, TARGET[i, t + 1]]) for t in range(n))
        total += 0.7 * ((1 - weights[:n].sum(0)) ** 2).sum() if name != "hard" else 0  # eq. 14
    close(model.loss(given, TARGET), np.asarray(total / 8), eps=2**10)


def test_observers_see_one_attention_per_step() -> None:
    for name in ("soft", "hard"):
        model, calls = build(CAPTIONERS[name]), []
        with watching(lambda call, result, into=calls: into.append(call)):
            model.train()(images(CAPTIONER), TARGET)
        assert len(calls) == 4


# --- hard attention ---------------------------------------------------------------------------------------------------


def test_padding_does_not_change_gradients_of_hard_attention() -> None:
    model = build(HARD).train()
    found = []
    for captions in (TARGET, torch.nn.functional.pad(TARGET, (0, 3))):
        torch.manual_seed(1)  # the same draws for the tokens that are the same
        model.baseline.fill_(-2.0)
        found.append(torch.autograd.grad(model.loss(images(HARD), captions), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        close(one, other)


class Forced:
    """In place of `choose_keys`: choices that are given, with their log-probabilities written out."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.left: Iterator[int] = iter(choices)

    def __call__(self, q: Tensor, k: Tensor, *, score: Any, sample: bool) -> Choice:
        assert sample
        scores = (score.vector * torch.tanh(q @ score.w_q.T + k)).sum(-1)  # one head, one query
        index = torch.full((len(q), 1, 1), next(self.left))
        return Choice(index, scores.log_softmax(-1)[:, 0].gather(1, index[:, 0])[:, None])


@pytest.mark.parametrize(("gate", "baseline"), [(False, 0.0), (True, -3.0)])
def test_reinforce_is_unbiased(monkeypatch: pytest.MonkeyPatch, gate: bool, baseline: float) -> None:
    """Every choice of two steps over four cells: the mean gradient is that of the expected log-likelihood."""
    model = build(replace(HARD, entropy=0.0, gate=gate)).train()
    given, caption = images(HARD, 8, 8)[:1], torch.tensor([[1, 4, 2]])
    parameters = dict(model.named_parameters())
    expected, mean = torch.zeros((), dtype=torch.float64), dict.fromkeys(parameters, 0.0)
    total = 0.0
    for choices in itertools.product(range(4), repeat=2):
        monkeypatch.setattr(captioner, "choose_keys", Forced(choices))
        run = model._run(given, caption[:, :-1])
        likelihood = run.logits.log_softmax(-1).gather(2, caption[:, 1:, None]).sum()
        chance = run.log_prob.sum().exp()
        expected = expected + chance * likelihood
        monkeypatch.setattr(captioner, "choose_keys", Forced(choices))
        model.baseline.fill_(baseline)
        gradients = torch.autograd.grad(model.loss(given, caption), list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            mean[name] = mean[name] + chance.item() * gradient
        total += chance.item()
    assert total == pytest.approx(1)
    exact = torch.autograd.grad(-expected / 2, list(parameters.values()))  # two predicted tokens
    for name, gradient in zip(parameters, exact, strict=True):
        close(mean[name], gradient, eps=2**12)
    assert max(g.abs().max().item() for g in exact) > 1e-3


def test_cells_are_drawn_with_the_probabilities_of_the_weights() -> None:
    model = build(HARD).train()
    given = images(HARD, 8, 8)[:1].expand(600, -1, -1, -1)
    torch.manual_seed(0)
    run = model._run(given, torch.ones(600, 1, dtype=torch.int64))
    weights = run.weights[0, 0].detach()
    drawn = (run.log_prob.exp() - weights[None]).abs().argmin(-1)
    assert (run.log_prob.exp()[:, 0] - weights[drawn]).abs().max() < 1e-12
    assert (torch.bincount(drawn, minlength=4) / 600 - weights).abs().max() < 4 * (0.25 / 600) ** 0.5


def test_entropy_term_has_the_gradient_of_the_entropy() -> None:
    """One step: the term's gradient is exactly that of the entropy of the weights."""
    model = build(HARD).train()
    given, caption = images(HARD), TARGET[:, :2]
    gradients = []
    for factor in (0.0, 0.5):
        model.config = replace(model.config, entropy=factor)
        torch.manual_seed(3)
        model.baseline.zero_()
        gradients.append(torch.autograd.grad(model.loss(given, caption), model.attention.vector)[0])
    weights = model.maps(given, caption[:, :1])
    entropy = -(weights * weights.log()).sum() / 3
    close(gradients[1] - gradients[0], torch.autograd.grad(-0.5 * entropy, model.attention.vector)[0], eps=2**10)


def rewards(model: Captioner, given: Tensor, captions: Tensor, seed: int) -> Tensor:
    """The log-likelihood of each caption with the cells that are drawn after this seed."""
    torch.manual_seed(seed)
    logits = model(given, captions[:, :-1]).transpose(1, 2).detach()
    return -torch.nn.functional.cross_entropy(logits, captions[:, 1:], ignore_index=0, reduction="none").sum(1)


def test_baseline_is_a_moving_average_of_the_rewards() -> None:
    """A draw whose reward is the baseline teaches the attention nothing."""
    model, given, average = build(replace(HARD, entropy=0.0)).train(), images(HARD), 0.0
    for seed in range(3):
        average = 0.9 * average + 0.1 * rewards(model, given, TARGET, seed).mean().item()
        torch.manual_seed(seed)
        model.loss(given, TARGET)
        assert model.baseline.item() == pytest.approx(average)
    model.baseline.copy_(rewards(model, given[:1], TARGET[:1], 0)[0])
    torch.manual_seed(0)
    taught = torch.autograd.grad(model.loss(given[:1], TARGET[:1]), model.attention.vector)[0]
    close(taught, torch.zeros_like(taught))
    before = model.state_dict()["baseline"].item()
    model.eval().loss(given, TARGET)
    assert model.baseline.item() == before

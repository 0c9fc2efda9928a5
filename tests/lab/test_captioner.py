"""The captioner: against the paper's equations in loops, steps equal to all at once, REINFORCE without bias."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import check_slopes, close, enlarged, rand, refused, unchecked
from qkv import Choice
from qkv.kernels import watching
from qkv_lab.models import captioner
from qkv_lab.models.captioner import Captioner, CaptionerConfig

SMALL = CaptionerConfig(11, channels=3, d_features=5, convolutions=2, d_embedding=6, d_hidden=7, d_attention=4)
EVERY = {
    "soft": SMALL,
    "soft, no gate": replace(SMALL, gate=False, convolutions=3, channels=1),
    "hard": replace(SMALL, attention="hard"),
}
CAPTIONS = torch.tensor([[1, 4, 9, 3, 2], [1, 10, 2, 0, 0]])


def images(config: CaptionerConfig, height: int = 12, width: int = 9) -> Tensor:
    return rand(2, config.channels, height, width, seed=50)


def build(config: CaptionerConfig) -> Captioner:
    return enlarged(Captioner(config), 0.5)


@pytest.fixture(params=EVERY)
def model(request: pytest.FixtureRequest) -> Captioner:
    return build(EVERY[request.param])


# --- the definition, as loops -----------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_the_paper(model: Captioner, grid: np.ndarray, caption: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and weights at each token, for annotations (cells, d) of one image: §3.1 and §4 of Xu et al. 2015."""
    p = {name: x.detach().numpy() for name, x in model.named_parameters()}
    mean = grid.mean(0)
    h = np.tanh(p["first_hidden.weight"] @ mean + p["first_hidden.bias"])
    c = np.tanh(p["first_cell.weight"] @ mean + p["first_cell.bias"])
    logits, weights = [], []
    for token in caption:
        query = p["attention.w_q"] @ h
        e = np.array([p["attention.vector"] @ np.tanh(query + p["attention.w_k"] @ a) for a in grid])  # eq. 4
        alpha = np.exp(e) / np.exp(e).sum()  # eq. 5
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


def test_equations_of_the_paper(model: Captioner) -> None:
    given = images(model.config)
    grid = model.features(given).detach()
    logits, maps = model(given, CAPTIONS), model.maps(given, CAPTIONS)
    assert maps.shape == (2, 5, *grid.shape[2:])
    for i in range(2):
        wanted, weights = by_the_paper(model, grid[i].flatten(1).T.numpy(), CAPTIONS[i].tolist())
        close(logits[i].detach(), wanted, eps=2**10)
        close(maps[i].flatten(1).detach(), weights, eps=2**10)


@pytest.mark.parametrize(("height", "width", "grid"), [(12, 9, (3, 3)), (13, 16, (4, 4)), (1, 5, (1, 2))])
def test_maps_have_the_shape_of_the_grid(height: int, width: int, grid: tuple[int, int]) -> None:
    model = build(SMALL)
    maps = model.maps(images(SMALL, height, width), CAPTIONS)
    assert maps.shape == (2, 5, *grid)
    close(maps.sum((2, 3)).detach(), torch.ones(2, 5))


def test_largest_weight_is_at_the_matching_feature() -> None:
    """One bright patch; a score that loves brightness: the map's largest weight lies on the patch, rows first."""
    model = build(replace(SMALL, channels=1))
    image = torch.zeros(2, 1, 16, 24, dtype=torch.float64)
    image[:, :, 9:11, 17:19] = 1  # cell (2, 4) of 4 × 6
    with torch.no_grad():
        for parameter in model.features.parameters():
            parameter.copy_(torch.full_like(parameter, 0.0 if parameter.ndim == 1 else 1.0))
        model.attention.w_k.fill_(1)
        model.attention.w_q.zero_()
        model.attention.vector.fill_(1)
    maps = model.maps(image, CAPTIONS)
    assert maps[0, 0].argmax().item() == 2 * 6 + 4


def test_soft_loss_equals_equation_14() -> None:
    model = build(replace(SMALL, penalty=0.7))
    given = images(SMALL)
    grid = model.features(given).detach()
    total = 0.0
    for i, n in enumerate((4, 2)):
        logits, weights = by_the_paper(model, grid[i].flatten(1).T.numpy(), CAPTIONS[i, :n].tolist())
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        total -= sum(math.log(chances[t, CAPTIONS[i, t + 1]]) for t in range(n))
        total += 0.7 * ((1 - weights.sum(0)) ** 2).sum()
    close(model.loss(given, CAPTIONS).detach(), torch.tensor(total / 6), eps=2**10)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1], [2, 3]])
def test_steps_equal_teacher_forcing(model: Captioner, chunks: list[int]) -> None:
    given = images(model.config)
    logits, state, seen = model(given, CAPTIONS), model.start(given), 0
    for n in chunks:
        got = model.step(CAPTIONS[:, seen : seen + n], state)
        seen += n
        close(got.detach(), logits[:, seen - 1].detach())


def test_reordered_state_continues_with_the_other_item(model: Captioner) -> None:
    given, rows = images(model.config), torch.tensor([1, 0, 1])
    state = model.start(given)
    model.step(CAPTIONS[:, :2], state)
    state.reorder(rows)
    close(model.step(CAPTIONS[rows, 2:4], state).detach(), model(given, CAPTIONS)[rows, 3].detach())


def test_padding_and_later_tokens_do_not_change_logits(model: Captioner) -> None:
    given = images(model.config)
    longer = torch.nn.functional.pad(CAPTIONS, (0, 3))
    close(model.loss(given, longer).detach(), model.loss(given, CAPTIONS).detach())
    changed = CAPTIONS.clone()
    changed[:, 3:] = 5
    close(model(given, changed)[:, :3].detach(), model(given, CAPTIONS)[:, :3].detach())


def test_padding_does_not_change_gradients_of_hard_attention() -> None:
    model = build(EVERY["hard"]).train()
    given, found = images(SMALL), []
    for captions in (CAPTIONS, torch.nn.functional.pad(CAPTIONS, (0, 3))):
        torch.manual_seed(1)  # the same draws for the tokens that are the same
        model.baseline.fill_(-2.0)
        found.append(torch.autograd.grad(model.loss(given, captions), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        close(one, other)


@pytest.mark.parametrize("name", EVERY)
def test_loss_against_finite_differences(name: str) -> None:
    """In evaluation mode the hard loss is that of the best cells, which a small step of the scores does not change."""
    model = build(EVERY[name])
    for parameter in model.features.parameters():
        parameter.data.abs_()  # away from the kink of the ReLU
    given = images(model.config).abs()
    unused = ("attention.",) if name == "hard" else ()
    check_slopes(model, lambda: model.loss(given, CAPTIONS), unused=unused)


def test_observers_see_one_attention_per_step() -> None:
    for name in ("soft", "hard"):
        model, calls = build(EVERY[name]), []
        with watching(lambda call, result, into=calls: into.append(call)):
            model.train()(images(SMALL), CAPTIONS)
        assert len(calls) >= 5


# --- hard attention ---------------------------------------------------------------------------------------------------


class Forced:
    """In place of `choose_keys`: choices that are given, with their log-probabilities written out."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.left: Iterator[int] = iter(choices)

    def __call__(self, q: Tensor, k: Tensor, *, score: Any, sample: bool) -> Choice:
        assert sample
        scores = (score.vector * torch.tanh(q @ score.w_q.T + k)).sum(-1)  # one head, one query
        index = torch.full((len(q), 1, 1), next(self.left))
        return Choice(index, scores.log_softmax(-1)[:, 0].gather(1, index[:, 0])[:, None])


@pytest.mark.parametrize("baseline", [0.0, -3.0])
@pytest.mark.parametrize("gate", [False, True])
def test_reinforce_is_unbiased(monkeypatch: pytest.MonkeyPatch, gate: bool, baseline: float) -> None:
    """Every choice of two steps over four cells: the mean gradient is that of the expected log-likelihood."""
    model = build(replace(SMALL, attention="hard", entropy=0.0, gate=gate)).train()
    given, caption = images(SMALL, 8, 8)[:1], torch.tensor([[1, 4, 2]])
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
    model = build(replace(SMALL, attention="hard")).train()
    given = images(SMALL, 8, 8)[:1].expand(600, -1, -1, -1)
    torch.manual_seed(0)
    run = model._run(given, torch.ones(600, 1, dtype=torch.int64))
    weights = run.weights[0, 0].detach()
    drawn = (run.log_prob.exp() - weights[None]).abs().argmin(-1)
    assert (run.log_prob.exp()[:, 0] - weights[drawn]).abs().max() < 1e-12
    assert (torch.bincount(drawn, minlength=4) / 600 - weights).abs().max() < 4 * (0.25 / 600) ** 0.5


def test_entropy_term_has_the_gradient_of_the_entropy() -> None:
    """One step: the term's gradient is exactly that of the entropy of the weights."""
    model = build(replace(SMALL, attention="hard", entropy=0.5)).train()
    given, caption = images(SMALL), CAPTIONS[:, :2]
    gradients = []
    for factor in (0.0, 0.5):
        model.config = replace(model.config, entropy=factor)
        torch.manual_seed(3)
        model.baseline.zero_()
        gradients.append(torch.autograd.grad(model.loss(given, caption), model.attention.vector)[0])
    weights = model.maps(given, caption[:, :1])
    entropy = -(weights * weights.log()).sum() / 2
    wanted = torch.autograd.grad(-0.5 * entropy, model.attention.vector)[0]
    close(gradients[1] - gradients[0], wanted, eps=2**10)


def test_baseline_is_a_moving_average_of_the_rewards() -> None:
    model = build(replace(SMALL, attention="hard")).train()
    given, rewards = images(SMALL), 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        logits = model(given, CAPTIONS[:, :-1])
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), CAPTIONS[:, 1:], ignore_index=0, reduction="none"
        )
        rewards = 0.9 * rewards + 0.1 * -losses.sum(1).mean().item()
        torch.manual_seed(seed)
        model.loss(given, CAPTIONS)
        assert model.baseline.item() == pytest.approx(rewards)
    model.eval().loss(given, CAPTIONS)
    assert model.baseline.item() == pytest.approx(rewards)
    assert "baseline" in model.state_dict()


# --- learning ---------------------------------------------------------------------------------------------------------


def scenes() -> tuple[Tensor, Tensor]:
    """Eight images with a bright patch in a quarter, upright or lying, and captions that say so."""
    shown, captions = torch.zeros(8, 1, 16, 16), []
    for i in range(8):
        row, column, lying = 8 * (i // 4), 8 * (i // 2 % 2), i % 2
        height, width = (2, 6) if lying else (6, 2)
        shown[i, 0, row + 1 : row + 1 + height, column + 1 : column + 1 + width] = 1
        captions.append([1, 3 + i // 4, 5 + i // 2 % 2, 7 + lying, 2])
    return shown, torch.tensor(captions)


def trained(model: Captioner, steps: int, lr: float) -> float:
    given, captions = scenes()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        with unchecked():  # of shapes: the other tests have them
            loss = model.loss(given, captions)
        loss.backward()
        optimizer.step()
    return model.eval().loss(given, captions).item()


SCENES = CaptionerConfig(9, d_features=24, convolutions=2, d_embedding=16, d_hidden=32, d_attention=16, penalty=0.0)


def test_soft_attention_learns_captions() -> None:
    torch.manual_seed(0)
    model = Captioner(SCENES)
    assert trained(model, 150, 1e-2) < 0.02
    given, captions = scenes()
    state, token = model.start(given), captions[:, :1]
    for t in range(1, 5):
        token = model.step(token, state).argmax(-1, keepdim=True)
        assert torch.equal(token, captions[:, t : t + 1])


@pytest.mark.slow
def test_hard_attention_learns_captions() -> None:
    """From ln 9 = 2.2. How near to 0 the best cells come after training on drawn ones varies with the seed."""
    torch.manual_seed(0)
    assert trained(Captioner(replace(SCENES, attention="hard", entropy=0.01)), 250, 1.5e-2) < 0.5


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "argument", "match"), [
    ({"channels": 2}, "channels", None),
    ({"convolutions": 4}, "convolutions", None),
    ({"attention": "both"}, "attention", None),
    ({"d_attention": 0}, "d_attention", None),
    ({"penalty": -1.0}, "penalty", None),
    ({"dropout": 1.0}, "dropout", None),
    ({"end": 1}, "end", "than start"),
    ({"end": 11}, "end", r"0\.\.10"),
])  # fmt: skip
def test_configurations_reject_invalid_values(change: dict[str, object], argument: str, match: str | None) -> None:
    with unchecked(), refused(argument, match):
        replace(SMALL, **change)


def test_images_and_captions_of_wrong_shape_are_rejected() -> None:
    model = build(SMALL)
    assert CaptionerConfig(**asdict(SMALL)) == SMALL
    with refused("images"):
        model(rand(2, 1, 12, 9), CAPTIONS)
    with refused("captions", match=r"11\.\.11"):
        model(images(SMALL), torch.full((2, 3), 11))
    with unchecked():
        with refused("captions", match="items"):
            model(images(SMALL), CAPTIONS[:1])
        with refused("captions", match=r"\(2, 0\)"):
            model.loss(images(SMALL), CAPTIONS[:, :1])

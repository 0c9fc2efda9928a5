"""The classifier: equal to torch's encoder, padding unseen and not pooled, gradients, learning."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import check_slopes, close, enlarged, rand, refused, unchecked
from qkv.nn import from_torch
from qkv_lab.models.classifier import Classifier, ClassifierConfig

SMALL = ClassifierConfig(11, classes=5, d_model=12, heads=3, d_hidden=10, layers=2, context=9, dropout=0.0)
EVERY = {
    "learned, mean": SMALL,
    "learned, first": replace(SMALL, pool="first"),
    "sinusoidal, post": replace(SMALL, positions="sinusoidal", place="post"),
    "rotary, grouped": replace(SMALL, positions="rotary", kv_heads=1, norm="rmsnorm", activation="swiglu"),
    "none, no biases": replace(SMALL, positions="none", bias=False),
}
IDS = torch.tensor([[3, 5, 8, 1, 2, 9, 10], [4, 7, 6, 2, 0, 0, 0], [8, 2, 0, 0, 0, 0, 0]])
LABELS = torch.tensor([4, 0, 2])


def build(config: ClassifierConfig) -> Classifier:
    return enlarged(Classifier(config))


@pytest.fixture(params=EVERY)
def model(request: pytest.FixtureRequest) -> Classifier:
    return build(EVERY[request.param])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize(("place", "activation"), [("pre", "gelu"), ("post", "relu")])
def test_logits_and_gradients_equal_torch(place: str, activation: str, pool: str) -> None:
    model = build(replace(SMALL, place=place, activation=activation, pool=pool))
    layer = nn.TransformerEncoderLayer(
        12, 3, 10, dropout=0.0, activation=activation, batch_first=True, norm_first=place == "pre", dtype=torch.float64
    )
    theirs = nn.TransformerEncoder(layer, 2, norm=None if place == "post" else nn.LayerNorm(12, dtype=torch.float64))
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data.copy_(0.4 * rand(*parameter.shape, seed=seed))
    model.encoder.blocks = nn.ModuleList(from_torch(one) for one in theirs.layers)
    if theirs.norm is not None:
        model.encoder.norm.load_state_dict(theirs.norm.state_dict())
    x = model.tokens.weight[IDS] * 12**0.5 + model.encoder.positions.weight[:7]
    x = theirs(x, src_key_padding_mask=IDS == 0)
    pooled = x[:, 0] if pool == "first" else torch.stack([x[i, :n].mean(0) for i, n in enumerate((7, 4, 2))])
    wanted = pooled @ model.output.weight.T + model.output.bias
    logits = model(IDS)
    close(logits, wanted.detach(), eps=2**12)
    ours = torch.autograd.grad(logits.square().sum(), model.tokens.weight)[0]
    close(ours, torch.autograd.grad(wanted.square().sum(), model.tokens.weight)[0], eps=2**14)


def test_padding_does_not_change_logits(model: Classifier) -> None:
    logits = model(IDS)
    close(model(F.pad(IDS, (0, 2))), logits.detach(), eps=2**10)
    for i, length in enumerate((7, 4, 2)):
        close(model(IDS[i : i + 1, :length]), logits[i : i + 1].detach(), eps=2**10)


def test_every_token_changes_the_logits(model: Classifier) -> None:
    logits = model(IDS)
    for i in range(7):
        changed = IDS.clone()
        changed[0, i] = 6
        different = model(changed)
        assert not torch.allclose(different[0], logits[0])
        assert torch.equal(different[1:], logits[1:])


def test_without_positions_logits_do_not_depend_on_order() -> None:
    model = build(EVERY["none, no biases"])
    close(model(IDS[:1].flip(1)), model(IDS[:1]).detach(), eps=2**10)
    model = build(SMALL)
    assert not torch.allclose(model(IDS[:1].flip(1)), model(IDS[:1]))


def test_padding_alone_gives_the_output_bias() -> None:
    model = build(SMALL)
    close(model(torch.zeros(1, 3, dtype=torch.int64))[0], model.output.bias.detach(), eps=1)


def test_loss_equals_cross_entropy(model: Classifier) -> None:
    wanted = -model(IDS).log_softmax(-1)[torch.arange(3), LABELS].mean()
    close(model.loss(IDS, LABELS), wanted.detach())


@pytest.mark.parametrize("name", ["learned, mean", "sinusoidal, post", "rotary, grouped"])
def test_loss_against_finite_differences(name: str) -> None:
    model = build(replace(EVERY[name], layers=1))
    check_slopes(model, lambda: model.loss(IDS, LABELS))


def test_number_of_parameters() -> None:
    d, f = 32, 4 * 32
    config = ClassifierConfig(17, classes=5, d_model=d, context=20, layers=3, bias=False)
    block = 4 * d * d + 2 * d * f + 2 * d
    model = Classifier(config)
    assert sum(p.numel() for p in model.parameters()) == 17 * d + 20 * d + 3 * block + d + (5 * d + 5)
    assert ClassifierConfig(**asdict(config)) == config


def test_classifier_learns() -> None:
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(20, classes=4, d_model=32, dropout=0.0, context=10))
    ids, labels = torch.randint(1, 20, (16, 8)), torch.arange(16) % 4
    ids[:5, 5:] = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        with unchecked():  # of shapes: the other tests have them
            loss = model.loss(ids, labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02
    assert torch.equal(model.eval()(ids).argmax(-1), labels)


@pytest.mark.parametrize(("change", "argument"), [
    ({"classes": 0}, "classes"),
    ({"pool": "last"}, "pool"),
    ({"context": 0}, "context"),
    ({"pad": 11}, "pad"),
    ({"dropout": -0.1}, "dropout"),
])  # fmt: skip
def test_configurations_reject_invalid_values(change: dict[str, object], argument: str) -> None:
    with unchecked(), refused(argument):
        replace(SMALL, **change)


def test_forward_rejects_bad_tokens() -> None:
    model = build(SMALL)
    with refused("ids"):
        model(torch.tensor([[3, 11]]))
    with refused("tokens"):
        model(torch.ones(1, 10, dtype=torch.int64))

"""The classifier: equal to torch's encoder, padding unseen and not pooled; test_teaching_laws.py has more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import close, rand
from qkv.nn import from_torch
from teaching_models import CLASSIFIER, CLASSIFIERS, LABELS, LENGTHS, SOURCE, build


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(("place", "activation", "pool"), [("pre", "gelu", "mean"), ("post", "relu", "first")])
def test_logits_and_gradients_equal_torch(place: str, activation: str, pool: str) -> None:
    model = build(replace(CLASSIFIER, place=place, activation=activation, pool=pool))
    layer = nn.TransformerEncoderLayer(
        12, 3, 10, dropout=0.0, activation=activation, batch_first=True, norm_first=place == "pre", dtype=torch.float64
    )
    theirs = nn.TransformerEncoder(layer, 2, norm=None if place == "post" else nn.LayerNorm(12, dtype=torch.float64))
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data.copy_(0.4 * rand(*parameter.shape, seed=seed))
    model.encoder.blocks = nn.ModuleList(from_torch(one) for one in theirs.layers)
    if theirs.norm is not None:
        model.encoder.norm.load_state_dict(theirs.norm.state_dict())
    x = model.tokens.weight[SOURCE] * 12**0.5 + model.encoder.positions.weight[:5]
    x = theirs(x, src_key_padding_mask=SOURCE == 0)
    pooled = x[:, 0] if pool == "first" else torch.stack([x[i, :n].mean(0) for i, n in enumerate(LENGTHS)])
    wanted = pooled @ model.output.weight.T + model.output.bias
    logits = model(SOURCE)
    close(logits, wanted, eps=2**12)
    ours = torch.autograd.grad(logits.square().sum(), model.tokens.weight)[0]
    close(ours, torch.autograd.grad(wanted.square().sum(), model.tokens.weight)[0], eps=2**14)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_token_but_no_padding_changes_the_logits(name: str) -> None:
    model = build(CLASSIFIERS[name])
    logits = model(SOURCE)
    close(model(F.pad(SOURCE, (0, 2))), logits, eps=2**10)
    for i, length in enumerate(LENGTHS):
        close(model(SOURCE[i : i + 1, :length]), logits[i : i + 1], eps=2**10)
    for i in range(5):
        changed = SOURCE.clone()
        changed[0, i] = 6
        different = model(changed)
        assert not torch.allclose(different[0], logits[0])
        close(different[1:], logits[1:], eps=2**10)
    backwards = model(SOURCE[:1].flip(1))
    assert torch.allclose(backwards, logits[:1]) == name.startswith("no positions")
    close(model.loss(SOURCE, LABELS), -logits.log_softmax(-1)[torch.arange(3), LABELS].mean())


def test_padding_alone_gives_the_output_bias() -> None:
    model = build(CLASSIFIER)
    close(model(torch.zeros(1, 3, dtype=torch.int64))[0], model.output.bias, eps=1)
    bare = build(CLASSIFIERS["no positions, no biases"])
    assert [name for name, _ in bare.named_parameters() if "bias" in name] == ["output.bias"]

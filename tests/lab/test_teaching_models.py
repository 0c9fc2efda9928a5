"""The models of the lab: equal to torch's, or to the equations of their papers; test_teaching_laws.py has more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import papers
from conftest import close, rand
from papers import sigmoid, softmax
from qkv.nn import TransformerBlock, from_torch
from qkv_lab.models.captioner import Captioner
from qkv_lab.models.classifier import Stack
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from qkv_lab.models.seq2seq import RNNSeq2Seq
from teaching_models import (
    CAPTIONERS,
    CLASSIFIER,
    CLASSIFIERS,
    LABELS,
    LENGTHS,
    RECURRENTS,
    SOURCE,
    TARGET,
    TRANSFORMERS,
    build,
    images,
)

# --- encoder and decoder, and classifier ------------------------------------------------------------------------------


def fill_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    ours.in_proj.weight.data.copy_(theirs.in_proj_weight)
    ours.in_proj.bias.data.copy_(theirs.in_proj_bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


def fill(ours: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder) -> None:
    """Our stack with the weights of torch's."""
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        assert isinstance(block, TransformerBlock)
        fill_attention(block.attention, layer.self_attn)
        norms = [block.attention_norm, block.feed_forward_norm]
        if block.cross is not None:
            fill_attention(block.cross, layer.multihead_attn)
            norms.insert(1, block.cross_norm)
        for i, norm in enumerate(norms, 1):
            norm.load_state_dict(getattr(layer, f"norm{i}").state_dict())
        block.feed_forward.up.load_state_dict(layer.linear1.state_dict())
        block.feed_forward.down.load_state_dict(layer.linear2.state_dict())
    if ours.norm is not None:
        ours.norm.load_state_dict(theirs.norm.state_dict())


def torchs(config: EncoderDecoderConfig) -> nn.Transformer:
    theirs = nn.Transformer(
        config.d_model, config.heads, config.layers, config.decoder_layers, config.d_hidden, dropout=0.0,
        batch_first=True, norm_first=config.place == "pre", dtype=torch.float64,
    )  # fmt: skip
    if config.place == "post":  # the paper has no norm after the last
        theirs.encoder.norm = theirs.decoder.norm = None
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data.copy_(0.4 * rand(*parameter.shape, seed=seed))
    return theirs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("place", ["pre", "post"])
def test_encoder_decoder_equals_that_of_torch(place: str) -> None:
    ours = build(replace(TRANSFORMERS["pre"], place=place))
    theirs = torchs(ours.config)
    fill(ours.encoder, theirs.encoder)
    fill(ours.decoder, theirs.decoder)
    width = ours.config.d_model**0.5

    def sinusoid(n: int) -> Tensor:  # written out once more
        place = torch.arange(n).double()[:, None] / 10_000 ** (torch.arange(0, 12, 2).double() / 12)
        return torch.stack([place.sin(), place.cos()], -1).flatten(1).float()

    padding = SOURCE == 0
    theirs_out = theirs(
        ours.source_tokens.weight[SOURCE] * width + sinusoid(5),
        ours.own_target_tokens.weight[TARGET] * width + sinusoid(4),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    theirs_logits = theirs_out @ ours.own_output.weight.T
    logits = ours(SOURCE, TARGET)
    close(logits, theirs_logits.detach(), eps=2**12)
    tokens = ours.source_tokens.weight
    wanted = torch.autograd.grad(theirs_logits.square().sum(), tokens)[0]
    size = wanted.abs().max()
    close(torch.autograd.grad(logits.square().sum(), tokens)[0] / size, wanted / size, eps=2**14)


def test_initial_weights_and_tied_matrices() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(600, 500, d_model=64, layers=1))
    for tokens in (model.source_tokens, model.target_tokens):
        assert tokens.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert model.output is model.target_tokens is not model.source_tokens
    tied, untied = (EncoderDecoder(EncoderDecoderConfig(50, 50, d_model=64, layers=1, tied=x)) for x in (True, False))
    assert tied.output is tied.target_tokens is tied.source_tokens
    assert len({untied.output, untied.target_tokens, untied.source_tokens}) == 3
    bare = build(TRANSFORMERS["swiglu, no biases"])
    assert len(bare.decoder.blocks) == 2  # as many as the encoder's
    assert not [name for name, _ in bare.named_parameters() if "bias" in name]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(("place", "activation", "pool"), [("pre", "gelu", "mean"), ("post", "relu", "first")])
def test_classifier_equals_the_encoder_of_torch(place: str, activation: str, pool: str) -> None:
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


# --- recurrent --------------------------------------------------------------------------------------------------------


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


# --- captioner --------------------------------------------------------------------------------------------------------


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

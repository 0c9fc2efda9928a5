"""The encoder-decoder: equal to torch's, decoding step by step equal to all at once, padding and the future unseen."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import check_slopes, close, enlarged, rand, refused, unchecked
from qkv.nn import TransformerBlock
from qkv_lab.models.classifier import Stack
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

SMALL = EncoderDecoderConfig(
    11, 13, d_model=12, heads=3, d_hidden=10, layers=2, decoder_layers=3, context=9, dropout=0.0, tied=False
)
EVERY = {
    "post": SMALL,
    "pre": replace(SMALL, place="pre"),
    "learned, tied output": replace(SMALL, positions="learned", tied=True),
    "rotary, all tied": replace(SMALL, positions="rotary", tied=True, target_vocab=11, place="pre"),
    "no positions, grouped": replace(SMALL, positions="none", kv_heads=1, norm="rmsnorm"),
    "swiglu, no biases": replace(SMALL, activation="swiglu", bias=False, place="pre", decoder_layers=None),
}
SOURCE = torch.tensor([[3, 5, 8, 1, 2, 9, 10], [4, 7, 6, 2, 0, 0, 0], [8, 2, 0, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 4, 9, 3, 2], [1, 10, 5, 2, 0], [1, 7, 2, 0, 0]])


def build(config: EncoderDecoderConfig) -> EncoderDecoder:
    return enlarged(EncoderDecoder(config))


@pytest.fixture(params=EVERY)
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    return build(EVERY[request.param])


# --- torch's ----------------------------------------------------------------------------------------------------------


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
def test_logits_and_gradients_equal_torch(place: str) -> None:
    ours = build(replace(EVERY["pre"], place=place))
    theirs = torchs(ours.config)
    fill(ours.encoder, theirs.encoder)
    fill(ours.decoder, theirs.decoder)
    width = ours.config.d_model**0.5

    def sinusoid(n: int) -> Tensor:  # written out once more
        place = torch.arange(n).double()[:, None] / 10_000 ** (torch.arange(0, 12, 2).double() / 12)
        return torch.stack([place.sin(), place.cos()], -1).flatten(1).float()

    padding = SOURCE == 0
    theirs_out = theirs(
        ours.source_tokens.weight[SOURCE] * width + sinusoid(7),
        ours.own_target_tokens.weight[TARGET] * width + sinusoid(5),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    theirs_logits = theirs_out @ ours.own_output.weight.T
    logits = ours(SOURCE, TARGET)
    close(logits, theirs_logits.detach(), eps=2**12)
    wanted = build(ours.config)  # its parameters become torch's gradients
    tokens = [ours.source_tokens.weight, ours.own_target_tokens.weight, ours.own_output.weight]
    places = [wanted.source_tokens.weight, wanted.own_target_tokens.weight, wanted.own_output.weight]
    gradients = torch.autograd.grad(theirs_logits.square().sum(), [*tokens, *theirs.parameters()])
    with torch.no_grad():
        for parameter, gradient in zip([*places, *theirs.parameters()], gradients, strict=True):
            parameter.copy_(gradient)
    fill(wanted.encoder, theirs.encoder)
    fill(wanted.decoder, theirs.decoder)
    logits.square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), wanted.parameters(), strict=True):
        assert one.grad is not None, name
        close(one.grad / other.abs().max(), other.detach() / other.abs().max(), eps=2**14)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1], [2, 3], [1, 3, 1]])
def test_steps_equal_teacher_forcing(model: EncoderDecoder, chunks: list[int]) -> None:
    logits = model(SOURCE, TARGET)
    state, seen = model.start(SOURCE), 0
    for n in chunks:
        got = model.step(TARGET[:, seen : seen + n], state)
        seen += n
        close(got, logits[:, seen - 1].detach(), eps=2**10)


def test_source_padding_does_not_change_logits(model: EncoderDecoder) -> None:
    logits = model(SOURCE, TARGET)
    longer = F.pad(SOURCE, (0, 2))
    close(model(longer, TARGET), logits.detach(), eps=2**10)
    for i, length in enumerate((7, 4, 2)):
        close(model(SOURCE[i : i + 1, :length], TARGET[i : i + 1]), logits[i : i + 1].detach(), eps=2**10)


def test_loss_ignores_target_padding(model: EncoderDecoder) -> None:
    logits = model(SOURCE, TARGET[:, :-1])
    each = [F.cross_entropy(logits[i, :n], TARGET[i, 1 : n + 1], reduction="sum") for i, n in enumerate((4, 3, 2))]
    close(model.loss(SOURCE, TARGET), (sum(each) / 9).detach(), eps=2**10)
    close(model.loss(SOURCE, F.pad(TARGET, (0, 3))), model.loss(SOURCE, TARGET).detach(), eps=2**10)


def test_later_target_tokens_do_not_change_earlier_logits(model: EncoderDecoder) -> None:
    logits = model(SOURCE, TARGET)
    for t in range(1, 5):
        changed = TARGET.clone()
        changed[:, t:] = (changed[:, t:] + 3) % 11
        assert torch.equal(model(SOURCE, changed)[:, :t], logits[:, :t])
        assert not torch.allclose(model(SOURCE, changed)[:, t], logits[:, t])


def test_every_source_token_changes_the_logits(model: EncoderDecoder) -> None:
    logits = model(SOURCE, TARGET)
    changed = SOURCE.clone()
    changed[0, -1] = 6
    assert not torch.allclose(model(changed, TARGET)[0, 0], logits[0, 0])


def test_reordered_state_continues_with_the_other_item(model: EncoderDecoder) -> None:
    rows = torch.tensor([2, 0, 2, 1])
    state = model.start(SOURCE)
    model.step(TARGET[:, :2], state)
    state.reorder(rows)
    close(model.step(TARGET[rows, 2:4], state), model(SOURCE, TARGET)[rows, 3].detach(), eps=2**10)
    unused = model.start(SOURCE)
    unused.reorder(rows)
    close(model.step(TARGET[rows, :1], unused), model(SOURCE, TARGET)[rows, 0].detach(), eps=2**10)


@pytest.mark.parametrize("config", [
    replace(SMALL, layers=1, decoder_layers=1, activation="gelu", positions="learned", tied=True),
    replace(
        SMALL, layers=1, decoder_layers=1, activation="swiglu", positions="rotary", kv_heads=1, norm="rmsnorm",
        place="pre", target_vocab=11, tied=True,
    ),
], ids=["post", "pre"])  # fmt: skip
def test_loss_against_finite_differences(config: EncoderDecoderConfig) -> None:
    model = build(config)
    check_slopes(model, lambda: model.loss(SOURCE, TARGET))


# --- sizes ------------------------------------------------------------------------------------------------------------


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("source", "target", "tied", "vectors"), [(17, 17, True, 17), (17, 19, True, 36), (17, 17, False, 51)]
)
def test_parameters_of_the_base_model(source: int, target: int, tied: bool, vectors: int) -> None:
    d, f = 32, 56
    config = EncoderDecoderConfig(source, target, d_model=d, d_hidden=f, heads=4, layers=2, decoder_layers=3, tied=tied)
    model = EncoderDecoder(replace(config, bias=False))
    attention, hidden, norm = 4 * d * d, 2 * d * f, d
    assert count(model.encoder.blocks[0].attention) == attention
    assert count(model.encoder) == 2 * (attention + hidden + 2 * norm)
    assert count(model.decoder) == 3 * (2 * attention + hidden + 3 * norm)
    assert count(model) == count(model.encoder) + count(model.decoder) + vectors * d
    biased = EncoderDecoder(config)
    assert count(biased.encoder) - count(model.encoder) == 2 * (4 * d + f + d + 2 * d)
    assert count(EncoderDecoder(replace(config, place="pre"))) - count(biased) == 2 * 2 * d
    assert count(EncoderDecoder(replace(config, positions="learned"))) - count(biased) == 2 * config.context * d


def test_the_defaults_are_the_base_model_of_the_paper() -> None:
    with torch.device("meta"):
        model = EncoderDecoder(EncoderDecoderConfig(37_000, 37_000))
    assert 62e6 < count(model) < 65e6  # "65 · 10⁶" in table 3
    config = asdict(model.config)
    assert all(isinstance(x, int | float | str | None) for x in config.values())
    assert EncoderDecoderConfig(**config) == model.config


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(600, 500, d_model=64, layers=1))
    for tokens in (model.source_tokens, model.target_tokens):
        assert tokens.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert model.output is model.target_tokens
    assert model.vocabulary == 500


def test_dropout_acts_only_in_training() -> None:
    model = build(replace(SMALL, dropout=0.5))
    assert torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))
    model.train()
    places = [(m, "p") for m in model.modules() if isinstance(m, nn.Dropout)]
    places += [(m, "dropout") for m in model.modules() if isinstance(m, TransformerBlock)]
    assert len(places) == 2 + 5  # the embeddings of each stack, and every block
    for acting in places:
        for module, name in places:
            setattr(module, name, 0.5 if (module, name) == acting else 0.0)
        assert not torch.allclose(model(SOURCE, TARGET), model(SOURCE, TARGET))


def test_model_learns_to_reverse() -> None:
    torch.manual_seed(0)
    config = EncoderDecoderConfig(12, 12, d_model=32, heads=4, d_hidden=64, layers=1, dropout=0.0, context=10)
    model = EncoderDecoder(config)
    source = torch.randint(3, 12, (8, 6))
    source[:3, 4:] = 0
    target = torch.zeros(8, 8, dtype=torch.int64)
    for row, ids in zip(target, source, strict=True):
        real = ids[ids > 0].flip(0)
        row[: len(real) + 2] = torch.tensor([1, *real, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        with unchecked():  # of shapes: the other tests have them
            loss = model.loss(source, target)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02
    state, tokens = model.eval().start(source), [target[:, :1]]
    for _ in range(7):
        tokens.append(model.step(tokens[-1], state).argmax(-1, keepdim=True))
    written = torch.cat(tokens, 1)
    assert torch.equal(torch.where(target > 0, written, 0), target)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "argument", "match"), [
    ({"layers": 0}, "layers", None),
    ({"decoder_layers": 0}, "decoder_layers", None),
    ({"positions": "sinus"}, "positions", None),
    ({"dropout": 1.0}, "dropout", None),
    ({"start": 0}, "start", "than pad"),
    ({"end": 13}, "end", r"0\.\.12"),
    ({"source_vocab": 0}, "vocabulary", None),
    ({"pad": 11}, "pad", r"0\.\.10"),
])  # fmt: skip
def test_configurations_reject_invalid_values(change: dict[str, object], argument: str, match: str | None) -> None:
    with unchecked(), refused(argument, match):
        replace(SMALL, **change)


@pytest.mark.parametrize(("change", "argument"), [
    ({"heads": 5}, "d_model"),
    ({"kv_heads": 2}, "kv_heads"),
    ({"place": "middle"}, "place"),
    ({"norm": "batchnorm"}, "norm"),
    ({"activation": "tanh"}, "activation"),
])  # fmt: skip
def test_layers_reject_invalid_values(change: dict[str, object], argument: str) -> None:
    with unchecked(), refused(argument):
        EncoderDecoder(replace(SMALL, **change))


def test_model_rejects_bad_tokens() -> None:
    model = build(SMALL)
    with refused("source", match=r"11\.\.11"):
        model(torch.full((3, 2), 11), TARGET)
    with refused("target", match=r"-1\.\.-1"):
        model(SOURCE, -torch.ones_like(TARGET))
    with refused("tokens"):
        model(torch.ones(1, 10, dtype=torch.int64), TARGET[:1])
    state = model.start(SOURCE)
    model.step(TARGET, state)
    with refused("tokens"):
        model.step(TARGET, state)
    with unchecked():
        with refused("target", match="2 items"):
            model(SOURCE, TARGET[:2])
        with refused("source", match="float32"):
            model(SOURCE.float(), TARGET)
        with refused("target", match=r"\(3, 0\)"):
            model.loss(SOURCE, TARGET[:, :1])

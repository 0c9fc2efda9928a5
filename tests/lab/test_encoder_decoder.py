"""The encoder-decoder: equal to torch's, and as large as the paper's; test_teaching_laws.py has more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import close, rand
from qkv.nn import TransformerBlock
from qkv_lab.models.classifier import Stack
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from teaching_models import SOURCE, TARGET, TRANSFORMERS, build


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

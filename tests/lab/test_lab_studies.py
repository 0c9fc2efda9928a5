"""What experiments train and measure, beside loops, masks and the model itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments import mechanism, scaling


def model(**changes: object) -> DecoderLM:
    """A small model with large weights, so that its attention is not uniform."""
    torch.manual_seed(0)
    made = DecoderLM(DecoderConfig(vocab_size=17, d_model=24, layers=3, heads=2, context=64, **changes))
    with torch.no_grad():
        for p in made.blocks.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return made.eval()


def some_texts(n: int) -> Tensor:
    return torch.randint(17, (5, n), generator=torch.Generator().manual_seed(1))


def test_changed_token_moves_only_later_ones_and_the_masked_first_token_none() -> None:
    lm, ids = model(), some_texts(19)
    assert (mechanism.movement(lm, ids, ids) == 0).all()
    for at, mask_first in ((6, False), (6, True), (0, True), (0, False)):  # in the end, the hooks are removed
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % 17
        moved = mechanism.movement(lm, ids, changed, mask_first=mask_first)
        assert moved.shape == (4, 19)
        assert (moved[:, :at] == 0).all()  # the future cannot change the past
        assert (moved[0, at + 1 :] == 0).all()  # embeddings do not depend on other tokens
        later = moved[1:, at + 1 :]
        assert (later == 0).all() if mask_first and at == 0 else (later > 1e-4).all()


def test_residual_stream_and_attention_output_are_the_models() -> None:
    lm, ids = model(), some_texts(11)
    with torch.no_grad():
        stream = mechanism.residual_stream(lm, ids)
        torch.testing.assert_close(lm.norm(stream[-1]), lm.hidden(ids))
        added = lm.blocks[0].attention(lm.blocks[0].attention_norm(stream[0]))
    expected = (added.norm(dim=-1) / stream[0].norm(dim=-1)).numpy()
    np.testing.assert_allclose(mechanism.output_ratio(lm, ids)[0], expected, rtol=1e-5)


def test_jacobian_norm_agrees_with_autograd() -> None:
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for row, found in zip(scores, scaling.jacobian_norm(scores), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), row)
        torch.testing.assert_close(found, jacobian.norm())

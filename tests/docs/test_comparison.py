"""The statements of docs/comparison.md about other libraries, checked against the installed versions."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, normalizers


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"sigmoid": True}, "sigmoid attention not available for flash"),
        ({"hard": True}, "hard attention not available for flash"),
        ({"head_learned_sink": True, "heads": 2}, "not supported for flash"),
        ({"softclamp_logits": True}, "not compatible with logit softclamp"),
    ],
)
def test_x_transformers_needs_quadratic_memory(setting: dict[str, object], said: str) -> None:
    attend = pytest.importorskip("x_transformers.attend").Attend
    attend(flash=False, **setting)
    with pytest.raises(AssertionError, match=said):
        attend(flash=True, **setting)


@pytest.mark.parametrize(
    ("normalizer", "bias"),
    [
        (normalizers.Sigmoid(), None),
        (normalizers.Hard(), None),
        (normalizers.Softmax(sink=torch.zeros(2)), None),
        (normalizers.Softmax(), qkv.biases.SoftCap(5.0)),
    ],
)
def test_qkv_computes_the_same_in_linear_memory(
    normalizer: normalizers.Normalizer, bias: qkv.biases.Bias | None
) -> None:
    q = torch.zeros(1, 2, 4096, 8)
    few, many = (
        qkv.plan(q[:, :, :n], q[:, :, :n], q[:, :, :n], mask=masks.Causal(), normalizer=normalizer, bias=bias)
        for n in (2048, 4096)
    )
    assert many.kernel not in ("eager", "reference")
    assert many.bytes < 3 * few.bytes, "four times would be quadratic"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, in torch itself
def test_flex_attention_has_no_backward_on_a_processor() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 128, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        torch.compile(flex_attention)(q, q, q).sum().backward()

"""FlexAttention against the eager kernel: torch's reference of it on CPU, the compiled kernel on CUDA.

Shape checks cannot be traced by torch.compile: what is traced runs without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

import qkv
from conftest import MASKS, close, fits, rand, triple, unchecked
from qkv import InputError, biases, masks
from qkv._engine.call import Call, Result
from qkv.biases import ALiBi, Dense, RelativePosition, SoftCap, T5Bias
from qkv.kernels import eager
from qkv.kernels.flex import kernel as flex
from qkv.normalizers import Softmax
from qkv.scores import Additive, Dot

B, H, HKV, NQ, NK, D = 2, 6, 2, 11, 13, 3
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled FlexAttention needs CUDA")


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own switch to call score_mod and mask_mod as they are: no tracing, no warning."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def traced() -> Iterator[None]:
    with unchecked():
        yield
    torch.compiler.reset()


def same(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 64, **asked: Any) -> None:
    got = qkv.attend(q, k, v, kernel="flex", return_lse=True, **asked)
    want = qkv.attend(q, k, v, kernel="eager", return_lse=True, **asked)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        close(ours, theirs, eps=eps)


def some_biases(h: int = H, nq: int = NQ, nk: int = NK, d: int = D) -> dict[str, Any]:
    return {
        "soft cap": SoftCap(1.5),
        "dense": Dense(rand(h, nq, nk)),
        "dense of items": Dense(rand(B, 1, nq, nk)),
        "dense columns": Dense(rand(1, nk)),
        "hidden by a bias": Dense(rand(nq, nk).masked_fill(rand(nq, nk, seed=1) < 0, -torch.inf)),
        "alibi": ALiBi(),
        "t5": T5Bias(rand(32, h)),
        "relative": RelativePosition(rand(5, d)),
        "relative of heads": RelativePosition(rand(h, 5, d)),
        "cap after dense": (Dense(rand(h, 1, nk)), SoftCap(2.0)),
        "dense after cap": (SoftCap(2.0), Dense(rand(h, nq, 1)), ALiBi()),
    }


@pytest.mark.parametrize(("nq", "nk"), [(11, 13), (14, 9), (1, 13)])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("untraced")
def test_masks(name: str, nq: int, nk: int) -> None:
    if not fits(name, nq, nk):
        with pytest.raises(InputError):
            qkv.attend(*triple(nq=nq, nk=nk), mask=MASKS[name](nq, nk, B, H), kernel="flex")
        return
    same(*triple(nq=nq, nk=nk), mask=MASKS[name](nq, nk, B, H))


@pytest.mark.parametrize("name", some_biases())
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.usefixtures("untraced")
def test_biases(name: str, temperature: float) -> None:
    bias, normalizer = some_biases()[name], Softmax(temperature)
    same(*triple(), bias=bias, normalizer=normalizer)
    same(*triple(), bias=bias, normalizer=normalizer, mask=masks.Causal())


@pytest.mark.parametrize(
    "normalizer",
    [Softmax(sink=0.0), Softmax(sink=rand(H)), Softmax(sink=1e4), Softmax(0.5, rand(H)), Softmax(0.5, key=rand(H, D))],
)
@pytest.mark.parametrize("mask", ["none", "padding, window", "nothing"])
@pytest.mark.usefixtures("untraced")
def test_sinks(normalizer: Softmax, mask: str) -> None:
    same(*triple(), normalizer=normalizer, mask=MASKS[mask](NQ, NK, B, H), bias=ALiBi())


@pytest.mark.parametrize("score", [Dot(1.0), Dot(0.0), Dot(-0.5)])
@pytest.mark.usefixtures("untraced")
def test_scales(score: Dot) -> None:
    same(*triple(), score=score, mask=masks.Causal())
    same(*triple(), score=score, mask=masks.Causal(), bias=SoftCap(1.0))


@pytest.mark.parametrize(("h", "hkv", "d", "dv"), [(6, 6, 3, 5), (6, 3, 16, 16), (5, 1, 7, 2)])
@pytest.mark.usefixtures("untraced")
def test_groups_and_head_sizes(h: int, hkv: int, d: int, dv: int) -> None:
    same(*triple(h=h, hkv=hkv, d=d, dv=dv), mask=masks.Window(4), bias=ALiBi())


@pytest.mark.usefixtures("untraced")
def test_bfloat16() -> None:
    q, k, v = triple(dtype=torch.bfloat16)
    got, lse = qkv.attend(q, k, v, mask=masks.Causal(), bias=ALiBi(), kernel="flex", return_lse=True)
    want = qkv.attend(*(x.double() for x in (q, k, v)), mask=masks.Causal(), bias=ALiBi(), kernel="eager")
    assert lse.dtype == torch.float32
    assert isinstance(want, Tensor)
    close(got, want, eps=4)


@pytest.mark.usefixtures("untraced")
def test_nan_in_padding_does_not_spread() -> None:
    q, k, v = triple()
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    same(q, k, v, mask=masks.Padding([9, 7]))


@pytest.mark.usefixtures("untraced")
def test_fully_masked_queries_give_zeros() -> None:
    out, lse = qkv.attend(*triple(nq=14, nk=9), mask=masks.Causal(), kernel="flex", return_lse=True)
    assert (out[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert out[:, :, 5:].ne(0).all()


@pytest.mark.usefixtures("untraced")
def test_the_block_mask_is_cached_until_its_tensor_is_written_to() -> None:
    q, k, v = triple()
    allowed = rand(NQ, NK) > 0
    mask = masks.Dense(allowed)
    flex._blocked_mask.cache_clear()
    for _ in range(3):
        same(q, k, v, mask=mask)
    assert flex._blocked_mask.cache_info()[:2] == (2, 1)
    allowed.logical_not_()
    same(q, k, v, mask=mask)
    with torch.inference_mode():  # tensors cached there must work outside, too
        same(q, k, v, mask=masks.Causal())
    same(q, k, v, mask=masks.Causal())


@pytest.mark.parametrize("name", ["documents, causal", "padding, window"])
@pytest.mark.usefixtures("traced")
def test_masks_and_biases_can_be_traced(name: str) -> None:
    same(*triple(), mask=MASKS[name](NQ, NK, B, H), bias=some_biases()["cap after dense"])


@pytest.mark.usefixtures("traced")
def test_drawn_and_looked_up_masks_can_be_traced() -> None:
    mask = masks.bigbird(block=2, random=1) | masks.Prefix(1) | masks.Shifted(masks.Global([0]), 1)
    same(*triple(), mask=mask, bias=RelativePosition(rand(5, D)))


@pytest.mark.parametrize("name", ["cap after dense", "relative", "t5"])
@pytest.mark.usefixtures("traced")
def test_gradients_as_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the graphs of torch.compile with eager torch, because the public function has no gradients on CPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_attention", lambda device: flex._compiled_attention)
    compiled = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    gradients_agree(name, torch.device("cpu"), torch.float64, d=D, eps=256)


def gradients_agree(name: str, device: torch.device, dtype: torch.dtype, *, d: int, eps: float) -> None:
    q, k, v = (x.to(device, dtype).requires_grad_() for x in triple(d=d))
    sink = rand(H).to(device, torch.float32 if dtype != torch.float64 else dtype).requires_grad_()
    leaves = {"q": q, "k": k, "v": v, "sink": sink}
    given = []
    some = some_biases(d=d)[name]
    for i, bias in enumerate(some if isinstance(some, tuple) else (some,)):
        table = {Dense: "tensor", T5Bias: "table", RelativePosition: "keys", ALiBi: "slopes"}.get(type(bias))
        if table is not None:
            start = biases.alibi_slopes(H) if isinstance(bias, ALiBi) else getattr(bias, table)
            leaves[f"bias {i}"] = start.detach().clone().to(device, sink.dtype).requires_grad_()
        given.append(bias if table is None else replace(bias, **{table: leaves[f"bias {i}"]}))
    found = []
    for kernel in (flex, eager):
        call = Call.of(q, k, v, masks.Causal() & masks.Padding([12, 8]), tuple(given), None, Softmax(0.7, sink))
        result: Result = kernel.forward(call)
        assert result.lse is not None
        loss = result.out.double().cos().sum() + result.lse.double().sin().sum()
        found.append(torch.autograd.grad(loss, list(leaves.values())))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, eps=eps)


def rejected(reason: str, **asked: Any) -> None:
    tensors = asked.pop("tensors", triple())
    with pytest.raises(InputError, match=reason):
        qkv.attend(*tensors, kernel="flex", **asked)


def test_flex_rejects_unsupported_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected("dropout acts on weights, which it never forms", dropout_p=0.1)
    additive = Additive(rand(4), rand(4, D), rand(4, D))
    rejected("the score Additive is not a product of query and key", score=additive)
    rejected("no values that depend on the distance", bias=RelativePosition(rand(5, D), rand(5, 5)))
    rejected("no backward on CPU", tensors=triple(grad=True))
    rejected("no backward on CPU", bias=Dense(rand(NQ, NK).requires_grad_()))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        same(*triple(grad=True))
    monkeypatch.setattr(flex, "_has_lse", lambda: False)
    rejected(f"torch {torch.__version__.split('+')[0]}.* cannot return the log-sum-exp")


def test_flex_rejects_unsupported_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(device: str) -> str | None:
        call = Call.of(*triple())

        class Elsewhere:
            def __getattr__(self, name: str) -> Any:
                return torch.device(device) if name == "device" else getattr(call.q, name)

        with unchecked():
            return flex.unsupported_reason(replace(call, q=Elsewhere()))  # type: ignore[arg-type]

    assert why("mps") == "tensors are on mps; it is for CUDA, and for tests on CPU"
    monkeypatch.setattr(flex, "has_triton", lambda: False)
    assert why("cuda") == "it needs Triton, which is not installed"
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    assert why("cuda") == "its kernels accumulate in float32, which is not precise enough for float64"


# --- on CUDA ----------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_forward(name: str, dtype: torch.dtype) -> None:
    nq, nk = 150, 300
    q, k, v = (x.to("cuda", dtype) for x in triple(nq=nq, nk=nk, d=32, dv=16))
    given = {"mask": MASKS[name](nq, nk, B, H), "bias": ALiBi(), "normalizer": Softmax(sink=0.5)}
    with unchecked():
        got = qkv.attend(q, k, v, kernel="flex", return_lse=True, **given)  # type: ignore[arg-type]
        want = qkv.attend(*(x.double() for x in (q, k, v)), kernel="eager", return_lse=True, **given)  # type: ignore
    # Products of float32 are made in TF32 there.
    close(got[0], want[0], eps=16, dtype=torch.bfloat16)
    close(got[1], want[1], eps=16, dtype=torch.bfloat16)


@needs_cuda
@pytest.mark.parametrize("name", ["dense", "cap after dense", "alibi", "relative", "t5"])
def test_cuda_gradients(name: str) -> None:
    with unchecked():
        gradients_agree(name, torch.device("cuda"), torch.float32, d=16, eps=2**15)

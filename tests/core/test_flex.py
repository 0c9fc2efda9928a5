"""FlexAttention against the eager kernel: traced and compiled on CPU by eager torch, and the real kernels on CUDA.

Softmax is its own; other normalizers go by the logarithms of their weights. That torch's reference of it gives the
right output for every composition on CPU is in test_oracle.py. Shape checks cannot be traced by torch.compile: what is
traced runs without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn

import qkv
from conftest import MASKS, close, rand, refusals, refused, triple
from own_objects import SoftplusSquared
from qkv import biases, masks
from qkv.biases import ALiBi, RelativePosition, SoftCap, T5Bias, TensorBias
from qkv.engine import Call
from qkv.kernels import choose, eager, flex
from qkv.normalizers import Entmax, Hard, Identity, Normalizer, Pointwise, ReLU, Sigmoid, Softmax, SumToOne
from qkv.scores import Additive

B, H, HKV, NQ, NK, D = 2, 6, 2, 11, 13, 3
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled FlexAttention needs CUDA")


class Square(Pointwise):
    nonnegative = True

    def __init__(self, divide: str | None = None) -> None:
        self.divide = divide

    def weight(self, scores: Tensor) -> Tensor:
        return scores**2


BIASES: dict[str, tuple[biases.Bias, ...]] = {
    "dense": (TensorBias(rand(H, NQ, NK)),),
    "cap after dense": (TensorBias(rand(H, 1, NK)), SoftCap(2.0)),
    "alibi": (ALiBi(biases.alibi_slopes(H).double()),),
    "t5": (T5Bias(rand(32, H)),),
    "relative": (RelativePosition(rand(5, D)),),
}
NORMALIZERS: dict[str, Normalizer] = {
    "softmax": Softmax(0.7, rand(H)),
    "sigmoid of heads": Sigmoid(rand(H)),
    "relu by keys": ReLU(),
    "square by sum": Square("sum"),
    "sparsemax": Entmax(2.0),
    "entmax 1.3": Entmax(1.3, sink=rand(B, H, NQ)),
    "softplus": SoftplusSquared(),
    "softplus, sink": SoftplusSquared(sink=rand(H)),
    "softplus, key": SoftplusSquared(key=rand(H, D)),
}
LEARNED = {TensorBias: "tensor", T5Bias: "table", RelativePosition: "keys", ALiBi: "slopes"}


@pytest.fixture
def traced() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def as_on_a_card(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are served as CUDA tensors: with gradients, and traced by torch.compile, but run by eager torch."""
    compiled = torch.compile(torch_flex.flex_attention, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_attention", lambda _, *args, run=flex._attention, **named: run("cuda", *args, **named))
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)


def same(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 256, **asked: Any) -> None:
    got, want = (qkv.attend(q, k, v, kernel=kernel, **asked) for kernel in ("flex", "eager"))
    assert got.dtype == want.dtype
    close(got, want, eps=eps)


def gradients_agree(normalizer: str, bias: str, device: str, dtype: torch.dtype, *, d: int = D, eps: float) -> None:
    """Output, lse and gradients of q, k, v, a bias, and the sink, key or shift equal those of the eager kernel."""
    leaves: list[Tensor] = []

    def learned(x: Tensor) -> Tensor:
        leaves.append(x.detach().clone().to(device, dtype).requires_grad_())
        return leaves[-1]

    q, k, v = (learned(x) for x in triple(d=d))
    given = [
        replace(one, **{name: learned(getattr(one, name))}) if (name := LEARNED.get(type(one))) else one
        for one in (BIASES | {"relative": (RelativePosition(rand(5, d)),)})[bias]
    ]
    made = type(NORMALIZERS[normalizer]).__new__(type(NORMALIZERS[normalizer]))
    for name, x in vars(NORMALIZERS[normalizer]).items():
        object.__setattr__(made, name, learned(x) if isinstance(x, Tensor) else x)
    found = []
    for kernel in (flex, eager):
        call = Call.of(q, k, v, masks.Causal() & masks.Padding([12, 8]), tuple(given), None, made)
        result = kernel.forward(call)
        loss = result.out.double().cos().sum()
        if result.lse is not None:
            loss = loss + result.lse.double().sin().sum()
        found.append([result.out, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        close(ours, theirs, eps=eps)


# --- masks ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (MASKS["padding, window"](NQ, NK, B, H), "t5"),
        (masks.bigbird(block=2, random=1) | masks.Prefix(1) | masks.Shifted(masks.Global([0]), 1), "relative"),
    ],
    ids=["padding", "drawn and looked up"],
)
@pytest.mark.usefixtures("traced")
def test_masks_and_biases_can_be_traced(mask: masks.Mask, bias: str) -> None:
    same(*triple(), mask=mask, bias=BIASES[bias])


# --- logarithms of weights --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")
def test_rows_without_weight_give_zeros_and_negative_weights_give_nan() -> None:
    q, k, v = (x.abs() for x in triple())
    for divide in (None, "sum", "keys"):
        assert bool((qkv.attend(-q, k, v, normalizer=ReLU(divide), kernel="flex") == 0).all())

    assert bool(qkv.attend(-q, k, v, normalizer=own(lambda self, s: s), kernel="flex").isnan().all())


@pytest.mark.usefixtures("untraced")
def test_a_row_of_tiny_weights_is_divided_by_its_sum_as_elsewhere() -> None:
    q, k, v = torch.full((1, 1, 1, 1), 1.0), torch.tensor([[[[1e-12], [2e-12]]]]), torch.tensor([[[[3.0], [6.0]]]])
    same(q, k, v, normalizer=Square("sum"))
    same(q * 1e-9, k, v, normalizer=Square("sum"))  # the squares underflow


@pytest.mark.usefixtures("untraced")
def test_levels_far_from_zero_and_many_keys() -> None:
    q, k, v = triple(nq=5, nk=600)
    same(q, k + 300, v, normalizer=SoftplusSquared(), eps=2**13)
    same(q, k, v, normalizer=SoftplusSquared(sink=1.0), eps=2**10)


# --- gradients, as compiled -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalizer", "bias"),
    [("softmax", "relative"), ("sigmoid of heads", "t5"), ("softplus, sink", "cap after dense")],
)  # fmt: skip
@pytest.mark.usefixtures("as_on_a_card")
def test_gradients_as_compiled(normalizer: str, bias: str) -> None:
    gradients_agree(normalizer, bias, "cpu", torch.float64, eps=256 if normalizer == "softmax" else 2**14)


# --- what is refused --------------------------------------------------------------------------------------------------


def own(weight: Any) -> Pointwise:
    """A normalizer that declares its weights nonnegative, which is not inherited when the weight is redefined."""
    return type("Own", (Square,), {"nonnegative": True, "weight": weight})()


def branching(self: Square, scores: Tensor) -> Tensor:
    return torch.exp(scores) if scores.sum() > 0 else torch.exp(2 * scores)


def untraceable(self: Square, scores: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return torch.exp(scores)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "never forms"),
    ({"score": Additive(rand(4), rand(4, D), rand(4, D))}, "Additive"),
    ({"bias": RelativePosition(rand(5, D), rand(5, 5))}, "no values"),
    ({"bias": TensorBias(rand(NQ, NK).requires_grad_())}, "no backward on CPU"),
    ({"normalizer": Identity()}, "nonnegative"),
    ({"normalizer": Hard()}, "one key"),
    ({"normalizer": type("Mine", (ReLU,), {"weight": lambda self, s: s - 1})()}, "Mine does not"),  # not inherited
    ({"normalizer": own(lambda self, s: torch.ones(H, 1, 1) * s)}, "each head"),
    ({"normalizer": own(branching)}, "single scores"),
]

test_what_it_cannot_serve_has_a_reason = refusals([
    ("kernel", reason, lambda asked=asked: qkv.attend(*triple(), kernel="flex", **asked)) for asked, reason in REFUSALS
])  # fmt: skip


@pytest.mark.usefixtures("untraced")
def test_a_weight_without_a_level_is_reported() -> None:
    class Bounded(SumToOne):
        def weight(self, scores: Tensor, level: Tensor) -> Tensor:
            return 0.04 * torch.sigmoid(scores - level)

    with pytest.raises(qkv.InputError, match=r"Bounded: weight sums to at most 0\.52"):
        qkv.attend(*triple(), normalizer=Bounded(), kernel="flex")


def test_flex_rejects_unsupported_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(device: str) -> str:
        call = Call.of(*triple())

        class Elsewhere:
            def __getattr__(self, name: str) -> Any:
                return torch.device(device) if name == "device" else getattr(call.q, name)

        return str(flex.unsupported_reason(replace(call, q=Elsewhere())))

    assert "on mps" in why("mps")
    monkeypatch.setattr(flex, "has_triton", lambda: False)
    assert "needs Triton" in why("cuda")
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    assert "float64" in why("cuda")


@pytest.mark.usefixtures("untraced")
def test_learned_weights_are_refused_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "GPUS", ("cpu",))
    learned = own(lambda self, s: self.rate * s**2)
    learned.rate = nn.Parameter(torch.tensor(0.3))
    with refused("kernel", "inside the weight"):
        qkv.attend(*triple(), normalizer=learned, kernel="flex")
    with torch.no_grad():
        same(*triple(), normalizer=learned)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_card")
def test_a_weight_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tracing it, where the kernel is compiled; if FlexAttention alone cannot compile it, by an error."""
    with refused("kernel", "torch.compile rejects"):
        qkv.attend(*triple(), normalizer=own(untraceable), kernel="flex")
    monkeypatch.setattr(flex, "GPUS", ("cpu",))
    assert "Unsupported" in str(flex.unsupported_reason(Call.of(*triple(), normalizer=own(untraceable))))
    for normalizer in (SoftplusSquared(), Square()):
        assert flex.unsupported_reason(Call.of(*triple(), normalizer=normalizer)) is None
    for power in range(9):  # more than torch's limit for one function
        made = own(lambda self, s, power=power: s.abs() ** power)
        assert flex.unsupported_reason(Call.of(*triple(), normalizer=made)) is None


def test_on_cpu_tiled_remains_the_choice() -> None:
    name, _, rejected = choose(Call.of(*triple(nq=300, nk=300), normalizer=SoftplusSquared()), "auto")
    assert name == "tiled"
    assert "for tests" in rejected["flex"]


# --- on CUDA ----------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_forward(name: str, dtype: torch.dtype) -> None:
    nq, nk = 150, 300
    q, k, v = (x.to("cuda", dtype) for x in triple(nq=nq, nk=nk, d=32, dv=16))
    given = {"mask": MASKS[name](nq, nk, B, H), "bias": ALiBi(), "normalizer": Softmax(sink=0.5)}
    got = qkv.attend(q, k, v, kernel="flex", return_lse=True, **given)
    want = qkv.attend(*(x.double() for x in (q, k, v)), kernel="eager", return_lse=True, **given)
    for ours, theirs in zip(got, want, strict=True):  # products of float32 are made in TF32 there
        close(ours, theirs, eps=16, dtype=torch.bfloat16)


@needs_cuda
@pytest.mark.parametrize(
    ("normalizer", "bias"), [*(("softmax", name) for name in BIASES), *((name, "dense") for name in NORMALIZERS)]
)
def test_cuda_gradients(normalizer: str, bias: str) -> None:
    gradients_agree(normalizer, bias, "cuda", torch.float32, d=D if "key" in normalizer else 16, eps=2**15)

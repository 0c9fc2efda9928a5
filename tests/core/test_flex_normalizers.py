"""Normalizers other than softmax on FlexAttention: by logarithms of their weights, against the eager kernel.

On CPU torch's reference of FlexAttention computes the output. Gradients run the graphs of torch.compile with eager
torch, and one test compiles the forward for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn

import qkv
from conftest import close, rand, triple, unchecked
from qkv import InputError, masks
from qkv._engine.call import Call
from qkv.biases import ALiBi, Dense, SoftCap
from qkv.kernels import choose, eager
from qkv.kernels.flex import kernel as flex
from qkv.kernels.flex import log_space
from qkv.normalizers import EluPlusOne, Entmax, Hard, Identity, Normalizer, Pointwise, ReLU, Sigmoid, SumToOne

B, H, HKV, NQ, NK, D = 2, 6, 2, 11, 13, 3
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled FlexAttention needs CUDA")


class SoftplusSquared(SumToOne):
    """Its weight depends on score and level separately, so that −∂w/∂level is not ∂w/∂s."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return nn.functional.softplus(1.5 * scores - level) ** 2


class Square(Pointwise):
    nonnegative = True

    def __init__(self, divide: str | None = None) -> None:
        self.divide = divide

    def weight(self, scores: Tensor) -> Tensor:
        return scores**2


def some() -> dict[str, Normalizer]:
    return {
        "sigmoid": Sigmoid(),
        "sigmoid of heads": Sigmoid(rand(H)),
        "elu + 1": EluPlusOne(),
        "relu by keys": ReLU(),
        "relu by sum": ReLU("sum"),
        "relu": ReLU(None),
        "square": Square(),
        "square by sum": Square("sum"),
        "square by keys": Square("keys"),
        "sparsemax": Entmax(2.0),
        "entmax": Entmax(1.5, sink=rand(H)),
        "entmax 1.3": Entmax(1.3, sink=rand(B, H, NQ)),
        "softplus": SoftplusSquared(),
        "softplus, sink": SoftplusSquared(sink=-0.4),
        "softplus, key": SoftplusSquared(key=rand(H, D)),
    }


MASKS: dict[str, Callable[[], masks.Mask | None]] = {
    "none": lambda: None,
    "padding, causal": lambda: masks.Padding([9, 13]) & masks.Causal(),
    "nothing for some": lambda: masks.Window(2) & masks.Padding([6, 13]),
}


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own switch to call score_mod and mask_mod as they are: no tracing, no warning."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def same(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 256, **asked: Any) -> None:
    got = qkv.attend(q, k, v, kernel="flex", **asked)
    want = qkv.attend(q, k, v, kernel="eager", **asked)
    assert got.dtype == want.dtype
    close(got, want, eps=eps)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", some())
@pytest.mark.usefixtures("untraced")
def test_output_equals_the_eager_kernel(name: str, mask: str) -> None:
    same(*triple(), normalizer=some()[name], mask=MASKS[mask]())


@pytest.mark.parametrize("name", ["sigmoid", "square by keys", "entmax", "softplus, sink"])
@pytest.mark.usefixtures("untraced")
def test_biases_and_temperature(name: str) -> None:
    normalizer = some()[name].with_temperature(0.7)
    hidden = Dense(rand(NQ, NK).masked_fill(rand(NQ, NK, seed=1) < 0, -torch.inf))
    for bias in (ALiBi(), (hidden, SoftCap(2.0)), (SoftCap(2.0), hidden)):
        same(*triple(), normalizer=normalizer, mask=masks.Causal(), bias=bias)
    same(*triple(), normalizer=normalizer)


@pytest.mark.parametrize("name", ["relu by keys", "softplus"])
@pytest.mark.usefixtures("untraced")
def test_bfloat16(name: str) -> None:
    q, k, v = triple(dtype=torch.bfloat16)
    got = qkv.attend(q, k, v, normalizer=some()[name], mask=masks.Causal(), kernel="flex")
    exact = [x.double() for x in (q, k, v)]
    want = qkv.attend(*exact, normalizer=some()[name], mask=masks.Causal(), kernel="eager")
    assert got.dtype == torch.bfloat16
    close(got, want, eps=8)


@pytest.mark.usefixtures("untraced")
def test_rows_without_weight_give_zeros_and_negative_weights_give_nan() -> None:
    q, k, v = (x.abs() for x in triple())
    for divide in (None, "sum", "keys"):
        assert bool((qkv.attend(-q, k, v, normalizer=ReLU(divide), kernel="flex") == 0).all())

    class Wrong(Pointwise):
        nonnegative = True  # it is not

        def weight(self, scores: Tensor) -> Tensor:
            return scores

    assert bool(qkv.attend(-q, k, v, normalizer=Wrong(), kernel="flex").isnan().all())


@pytest.mark.usefixtures("untraced")
def test_a_row_of_tiny_weights_is_divided_by_its_sum_as_elsewhere() -> None:
    q, k, v = torch.full((1, 1, 1, 1), 1.0), torch.tensor([[[[1e-12], [2e-12]]]]), torch.tensor([[[[3.0], [6.0]]]])
    same(q, k, v, normalizer=Square("sum"))
    same(q * 1e-9, k, v, normalizer=Square("sum"))  # the squares underflow


@pytest.mark.usefixtures("untraced")
def test_nan_in_padding_does_not_spread() -> None:
    q, k, v = triple()
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    for name in ("square", "softplus"):
        same(q, k, v, mask=masks.Padding([9, 7]), normalizer=some()[name])


@pytest.mark.usefixtures("untraced")
def test_levels_far_from_zero_and_many_keys() -> None:
    q, k, v = triple(nq=5, nk=600)
    same(q, k + 300, v, normalizer=SoftplusSquared(), eps=2**13)
    same(q, k, v, normalizer=SoftplusSquared(sink=1.0), eps=2**10)


@pytest.mark.usefixtures("untraced")
def test_a_weight_without_a_level_is_reported() -> None:
    class Bounded(SumToOne):
        def weight(self, scores: Tensor, level: Tensor) -> Tensor:
            return 0.04 * torch.sigmoid(scores - level)

    with pytest.raises(InputError, match=r"Bounded: weight sums to at most 0.52"):
        qkv.attend(*triple(), normalizer=Bounded(), kernel="flex")


@pytest.mark.parametrize("n", [100, 5000])
@pytest.mark.usefixtures("untraced")
def test_the_search_for_a_level_takes_few_calls(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attend = [], flex._reference_attention
    monkeypatch.setattr(flex, "_reference_attention", lambda *q, **named: (calls.append(n), attend(*q, **named))[1])
    q, k, v = (x.float() for x in triple(1, 2, 2, 7, n, 16, 16))
    for normalizer in (SoftplusSquared(), SoftplusSquared(sink=2.0), Entmax(1.5), Entmax(2.0)):
        calls.clear()
        qkv.attend(q, k, v, normalizer=normalizer, kernel="flex")
        assert 3 < len(calls) <= 20


# --- what is refused --------------------------------------------------------------------------------------------------


class OfHeads(Pointwise):
    nonnegative = True

    def __init__(self) -> None:
        self.rates = torch.ones(H, 1, 1)

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(self.rates * scores)


class Branching(Pointwise):
    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores) if scores.sum() > 0 else torch.exp(2 * scores)


class Learned(Square):
    nonnegative = True  # not inherited, because it redefines the weight

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3))

    def weight(self, scores: Tensor) -> Tensor:
        return self.rate * scores**2


@pytest.mark.parametrize(
    ("normalizer", "reason"),
    [
        (Identity(), "takes logarithms of weights, and Identity does not declare that its weights are nonnegative"),
        (Hard(), "Hard takes the value of one key"),
        (OfHeads(), "weight of OfHeads has parameters for each head"),
        (Branching(), "weight of Branching does not take single scores, traced: RuntimeError"),
    ],
    ids=["sign", "one key", "heads", "branch"],
)
def test_what_it_cannot_serve_has_a_reason(normalizer: Normalizer, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        qkv.attend(*triple(), normalizer=normalizer, kernel="flex")
    qkv.attend(*triple(), normalizer=normalizer)


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are served as CUDA tensors: with gradients, and traced by torch.compile, but run by eager torch."""
    compiled = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_attention", lambda device: flex._compiled_attention)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    with unchecked():
        yield
    torch.compiler.reset()


def test_learned_weights_are_refused_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "GPUS", ("cpu",))
    normalizer = Learned()
    with pytest.raises(InputError, match="no gradients for tensors inside the weight of Learned"):
        qkv.attend(*triple(), normalizer=normalizer, kernel="flex")
    with torch.no_grad():
        same(*triple(), normalizer=normalizer)


class Untraceable(Pointwise):
    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.exp(scores)


@pytest.mark.usefixtures("as_on_a_card")
def test_a_weight_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tracing it, where the kernel is compiled; if FlexAttention alone cannot compile it, by an error."""
    with pytest.raises(InputError, match=r"torch.compile rejects weight of Untraceable .* pass kernel='tiled'"):
        qkv.attend(*triple(), normalizer=Untraceable(), kernel="flex")
    monkeypatch.setattr(log_space, "GPUS", ("cpu",))
    call = Call.of(*triple(), normalizer=Untraceable())
    assert "weight of Untraceable does not take single scores, traced: Unsupported" in str(
        flex.unsupported_reason(call)
    )
    for normalizer in (SoftplusSquared(), Square()):
        assert flex.unsupported_reason(Call.of(*triple(), normalizer=normalizer)) is None
    for count in range(12):  # more than torch's limit for one function

        class Another(Square):
            nonnegative = True
            power = count

            def weight(self, scores: Tensor) -> Tensor:
                return scores.abs() ** self.power

        assert flex.unsupported_reason(Call.of(*triple(), normalizer=Another())) is None


def test_a_subclass_that_redefines_the_weight_is_not_declared_nonnegative() -> None:
    class Mine(ReLU):
        def weight(self, scores: Tensor) -> Tensor:
            return scores - 1

    assert ReLU.nonnegative
    assert not Mine.nonnegative


def test_on_cpu_tiled_remains_the_choice() -> None:
    call = Call.of(*triple(nq=300, nk=300), normalizer=SoftplusSquared())
    name, _, rejected = choose(call, "auto")
    assert name == "tiled"
    assert rejected["flex"] == "it forms all scores unless on CUDA: for tests"


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sigmoid of heads", "relu by keys", "square by sum", "sparsemax", "entmax 1.3",
                                  "softplus", "softplus, sink", "softplus, key"])  # fmt: skip
@pytest.mark.usefixtures("as_on_a_card")
def test_gradients_as_compiled(name: str) -> None:
    gradients_agree(name, torch.device("cpu"), torch.float64, eps=2**14)


def gradients_agree(name: str, device: torch.device, dtype: torch.dtype, *, eps: float) -> None:
    """Gradients of q, k, v, a bias, and the sink, key or shift equal those of the eager kernel."""
    normalizer = some()[name]
    leaves = dict(zip("qkv", (x.to(device, dtype).requires_grad_() for x in triple()), strict=True))
    for part in ("sink", "key", "bias"):
        x = getattr(normalizer, part, None)
        if isinstance(x, Tensor) or (part == "sink" and x is not None):
            leaves[part] = (x if isinstance(x, Tensor) else torch.full((H,), x)).to(device, dtype).requires_grad_()
            object.__setattr__(normalizer, part, leaves[part])
    leaves["table"] = rand(H, NQ, NK).to(device, dtype).requires_grad_()
    mask = masks.Causal() & masks.Padding([12, 8])
    found = []
    for kernel in (flex, eager):
        call = Call.of(leaves["q"], leaves["k"], leaves["v"], mask, (Dense(leaves["table"]),), None, normalizer)
        out = kernel.forward(call).out  # type: ignore[attr-defined]
        found.append([out, *torch.autograd.grad(out.double().cos().sum(), list(leaves.values()))])
    for part, ours, theirs in zip(("out", *leaves), *found, strict=True):
        assert ours.dtype == theirs.dtype, part
        close(ours, theirs, eps=eps)


@pytest.mark.parametrize("falling", [False, True])
def test_score_mods_compile(falling: bool) -> None:
    """By the compiler that writes the CUDA kernels, from the same graphs; its kernels for the CPU have no lse."""
    q, k, v = (x.float() for x in triple(hkv=H, d=16, dv=16))
    call, level = Call.of(q, k, v, normalizer=SoftplusSquared(), biases=(ALiBi(),)), rand(B, H, NQ).float()
    score_mod = log_space._log_weight(call.normalizer, flex._final_score(call), level, falling=falling)
    found = []
    for attend in (torch.compile(torch_flex.flex_attention, fullgraph=True), torch_flex.flex_attention):
        with unchecked(), torch.no_grad(), flex._quiet():
            found.append(attend(q, k, v, score_mod=score_mod, scale=call.scale))
    close(*found, eps=256)
    torch.compiler.reset()


# --- on CUDA ----------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("name", some())
def test_cuda(name: str) -> None:
    with unchecked():
        q, k, v = (x.cuda() for x in triple())
        normalizer = some()[name]
        if isinstance(normalizer, SumToOne) and normalizer.key is not None:
            normalizer = normalizer.with_sink(None, normalizer.key.cuda())
        got = qkv.attend(q, k, v, normalizer=normalizer, mask=masks.Causal(), kernel="flex")
        want = qkv.attend(q, k, v, normalizer=normalizer, mask=masks.Causal(), kernel="eager")
        close(got, want, eps=16, dtype=torch.bfloat16)  # products of float32 are made in TF32 there


@needs_cuda
@pytest.mark.parametrize("name", ["sigmoid of heads", "square by sum", "entmax 1.3", "softplus, sink"])
def test_cuda_gradients(name: str) -> None:
    with unchecked():
        gradients_agree(name, torch.device("cuda"), torch.float32, eps=2**15)

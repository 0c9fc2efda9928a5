"""Input forms: fewer dimensions, NumPy arrays, argument names of other libraries, ambiguous masks.

Bad input raises `InputError` in one line that names the argument.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, rand, refusals, refused, triple
from own_objects import SoftplusSquared
from qkv import attend, biases, masks, measure, normalizers, positions, reference
from qkv.masks import Causal, Dense, Document, Padding, Window
from qkv.normalizers import Softmax
from qkv.scores import Dot

FORMS = [
    (2, 7, None), (3, 140, None), (3, 7, normalizers.Softmax(sink=0.3)), (2, 140, SoftplusSquared()),
    (3, 7, SoftplusSquared()),
]  # fmt: skip


@pytest.mark.parametrize(("ndim", "n", "normalizer"), FORMS)
def test_inputs_with_fewer_dimensions_are_one_head_and_results_keep_their_form(
    ndim: int, n: int, normalizer: normalizers.Normalizer | None
) -> None:
    q, k, v = triple(3, 1, 1, n, n + 2, 6, 5)
    asked = {"mask": masks.Causal(), "normalizer": normalizer}
    cut = (slice(None), 0) if ndim == 3 else (1, 0)
    few = [x[cut] for x in (q, k, v)]
    close(attend(*few, **asked), attend(q, k, v, **asked)[cut], eps=256)
    out, weights = attend(*few, return_weights=True, **asked)
    assert weights.shape == (*few[0].shape[:-1], n + 2)
    assert out.shape == (*few[0].shape[:-1], 5)
    found, want = measure(*few[:2], bins=4, mass={"near": masks.Window(2)}, **asked), measure(q, k, bins=4, **asked)
    close(found.entropy, want.entropy[cut])
    assert found.received.shape == few[1].shape[:-1]
    assert found.mass["near"].shape == few[0].shape[:-1]
    assert found.thumbnail is not None
    assert found.thumbnail.mean.ndim == ndim
    assert f"keys={n + 2}" in repr(found)
    if not isinstance(normalizer, SoftplusSquared):
        assert attend(*few, return_lse=True, **asked)[1].shape == few[0].shape[:-1]
    if not isinstance(normalizer, SoftplusSquared) and n == 7:
        close(torch.from_numpy(reference.attention(*few, **asked).out), attend(*few, **asked))
    assert qkv.plan(*few, **asked).kernel == qkv.plan(*(x[:1] for x in (q, k, v)), **asked).kernel


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 4, 5, 8)])
def test_numpy_inputs_give_numpy_results(shape: tuple[int, ...]) -> None:
    x = rand(*shape).numpy()
    results = attend(x, x, x, mask=np.tri(5, dtype=bool), return_lse=True, return_weights=True)
    assert all(isinstance(one, np.ndarray) for one in (*results, measure(x, x).received))
    close(torch.from_numpy(results[0]), attend(*[torch.from_numpy(x)] * 3, mask=masks.Causal()))
    assert isinstance(reference.attention(x, x, x).out, np.ndarray)
    with refused("q", "mix"):
        attend(x, x, torch.from_numpy(x))
    with refused("k" if x.ndim == 4 else "q", "shape"):
        attend(x, x[0], x)


def test_layouts_of_arrays_change_the_result_or_are_refused() -> None:
    q, k, v = (x.numpy() for x in rand(3, 9, 8))
    visible = np.tril(np.ones((9, 9), dtype=bool))
    expected = attend(q, k, v, mask=visible)
    foreign, constant = q.astype(q.dtype.newbyteorder(">")), v.copy()
    constant.flags.writeable = False
    backwards = k[::-1].copy()[::-1]
    for hidden in ({"mask": visible}, {"attn_mask": visible}, {"blocked": ~visible}):
        with warnings.catch_warnings(action="error"):
            assert np.array_equal(attend(foreign, backwards, constant, **hidden), expected)


def test_numpy_inputs_under_autocast_give_the_numbers_of_tensors() -> None:
    x = rand(1, 2, 5, 4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, want = attend(*[x.numpy()] * 3), attend(x, x, x)
    assert want.dtype == torch.bfloat16  # NumPy has no such dtype, so the numbers come in float32
    assert np.allclose(found, want.float().numpy(), rtol=2**-6, atol=2**-9)


TRANSLATED = {  # the name of another library, and the name of ours that its error gives
    "is_causal": "mask=qkv.masks.Causal()", "scale": "qkv.scores.Dot(scale)", "attn_mask": "mask=",
    "dropout": "dropout_p=", "enable_gqa": "grouped-query",
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSLATED)
def test_argument_names_of_other_libraries_are_translated(name: str) -> None:
    q, k, v = triple()
    calls: list[Any] = [lambda **given: measure(q, k, **given)]
    if name in ("dropout", "enable_gqa"):  # `attend` accepts the others
        calls += [lambda **given: attend(q, k, v, **given), lambda **given: qkv.Attention()(q, k, v, **given)]
    for call in calls:
        with pytest.raises(qkv.InputError) as error:
            call(**{name: True})
        assert error.value.argument == name
        assert TRANSLATED[name] in str(error.value)


@pytest.mark.parametrize(("kernel", "nk"), [("auto", 11), ("eager", 13), ("auto", 13)])
def test_arguments_of_scaled_dot_product_attention_mean_what_they_mean_in_torch(kernel: str, nk: int) -> None:
    q, k, v = triple(hkv=6, nk=nk)
    allowed, added = rand(2, 1, 11, nk, seed=5) > -1, rand(6, 11, nk, seed=6)
    allowed[..., 0] = True
    for options in (
        {}, {"is_causal": True}, {"attn_mask": added}, {"attn_mask": allowed, "scale": 0.3},
        {"is_causal": True, "scale": -0.3},
    ):  # fmt: skip
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        close(attend(q, k, v, kernel=kernel, **options), want)
        close(qkv.Attention()(q, k, v, kernel=kernel, **options), want)


def test_torchs_arguments_combine_with_ours() -> None:
    q, k, v = triple(hkv=6, nk=11)
    want = attend(q, k, v, mask=masks.Causal() & masks.Padding([7, 9]))
    close(attend(q, k, v, mask=masks.Padding([7, 9]), is_causal=True), want)
    both = (biases.ALiBi(), biases.TensorBias(rand(11, 11)))
    close(attend(q, k, v, bias=biases.ALiBi(), attn_mask=rand(11, 11)), attend(q, k, v, bias=both))
    flat = [x[:, 0] for x in (q, k, v)]
    close(attend(*flat, is_causal=True), attend(*flat, mask=masks.Causal()))
    arrays = [x.numpy() for x in flat]
    assert np.array_equal(attend(*arrays, is_causal=True), attend(*arrays, mask=masks.Causal()))
    for argument, options in (
        ("scale", {"scale": 0.3, "score": qkv.scores.Dot(0.2)}),
        ("attn_mask", {"attn_mask": rand(11, 11) > 0, "mask": masks.Causal()}),
        ("attn_mask", {"attn_mask": rand(11, 11) > 0, "is_causal": True}),
        ("attn_mask", {"attn_mask": torch.ones(11, 11, dtype=torch.int64)}),
        ("kernal", {"kernal": "flash"}),
    ):
        with refused(argument):
            attend(q, k, v, **options)


def test_a_mask_is_rejected_if_its_first_dimension_can_be_batch_or_heads() -> None:
    q, k, v = triple(3, 3, 3, 5, 5)
    either = rand(3, 5, 5) > 0
    for asked in ({"mask": either}, {"mask": masks.Dense(either)}, {"bias": biases.TensorBias(rand(3, 5, 5))}):
        with refused(next(iter(asked)), "ambiguous"):
            attend(q, k, v, **asked)
    for clear in (either[:, None], either[None]):
        attend(q, k, v, mask=clear)
    attend(*triple(2, 3, 3, 5, 5), mask=either)  # of heads, since there are two batch items
    attend(*triple(1, 1, 1, 5, 5), mask=either[:1])


def test_a_mask_that_looks_as_if_true_meant_masked_is_refused_and_blocked_states_it() -> None:
    q, k, v = triple(nq=5, nk=5)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    some = future.clone()
    some[2, 2] = True
    nothing = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    nothing[1] = False
    layer, x = qkv.nn.MultiHeadAttention(6, 2).double(), rand(2, 5, 6)
    block = qkv.nn.TransformerBlock(layer, torch.nn.Identity()).double()
    for mask in (future, some, future.expand(2, 6, 5, 5), future.numpy(), nothing, future & False):
        with refused("mask", "True means may attend"):
            attend(q, k, v, mask=mask)
        with refused("mask", "True means may attend"):
            layer(x, mask=mask)
    for mask in (~future, future | (torch.eye(5) > 0), masks.Dense(future), future & (rand(5, 5) > 0)):
        attend(q, k, v, mask=mask)
    attend(q, k[:, :, :4], v[:, :, :4], mask=future[:, :4])
    close(attend(q, k, v, blocked=future), attend(q, k, v, mask=masks.Causal()))
    close(layer(x, blocked=future), layer(x, mask=masks.Causal()))
    close(block(x, blocked=future), block(x, mask=masks.Causal()))
    for wrong in (~future, future.int(), nothing | True):
        with refused("blocked"):
            attend(q, k, v, blocked=wrong)
    with refused("mask", "both passed"):
        attend(q, k, v, mask=~future, blocked=future)


# --- what is refused --------------------------------------------------------------------------------------------------

Q, K, V = triple(2, 6, 2, 11, 13, 3, 5)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(shape, dtype=dtype)


TENSORS = [
    (Q.tolist(), K, V, "q", "list"),
    (Q, K.long(), V, "k", "int64"),
    (Q[0], K, V, "q", "alike"),
    (Q, K, V[None], "v", "alike"),
    (Q[:, :, :0], K, V, "q", "at least 1"),
    (Q, K[:, :, :0], V[:, :, :0], "k", "at least 1"),
    (Q[:1], K, V, "q", "batch size"),
    (Q, K, V[:1], "q", "batch size"),
    (Q[..., :2], K, V, "q", "head dimension"),
    (Q, K, V[:, :1], "k", "heads or length"),
    (Q, K, V[:, :, 1:], "k", "heads or length"),
    (Q[:, :5], K, V, "q", "multiple"),
    (Q[:, :1], K, V, "q", "multiple"),
    (Q.float(), K, V, "q", "dtype or device"),
    (Q, K, V.half(), "q", "dtype or device"),
    (Q, K, V.to("meta"), "q", "dtype or device"),
    (*(x[..., :0] for x in (Q, K, V)), "q", "at least 1"),
    (*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), "q", "float8"),
    (*(x.float().to_sparse() for x in (Q, K, V)), "q", "dense"),
    (*(torch.nested.nested_tensor([*x.float()], layout=torch.jagged) for x in (Q, K, V)), "q", "nested"),
    (*(x.numpy().astype(object) for x in (Q, K, V)), "q", "object"),
]


@pytest.mark.parametrize(("q", "k", "v", "argument", "match"), TENSORS)
def test_wrong_tensors_are_rejected(q: object, k: object, v: object, argument: str, match: str) -> None:
    of_queries_and_keys = [lambda q, k, v: qkv.measure(q, k)] if v is V else []
    for function in (attend, qkv.plan, qkv.Attention(), *of_queries_and_keys):
        with refused(argument, match):
            function(q, k, v)


CALLS: list[tuple[dict[str, Any], str, str | None]] = [
    # masks: libraries disagree on the meaning of 1, 0 and −inf
    ({"mask": ones(11, 13, dtype=torch.int64)}, "mask", "=="),
    ({"mask": torch.zeros(11, 13)}, "mask", "bias=qkv.biases.TensorBias"),
    ({"mask": "causal"}, "mask", "is str"),
    ({"mask": Causal}, "mask", "the class Causal"),
    ({"mask": ones(13, dtype=torch.bool)}, "mask", "1 dim"),
    ({"mask": ones(13, 11, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": ones(2, 2, 11, 13, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": Padding([1, 2, 3])}, "lengths", "3 numbers"),
    ({"mask": Padding([14])}, "lengths", r"14\.\.14"),
    ({"mask": Causal() & Document([0] * 12)}, "ids", None),
    ({"bias": ones(11, 13)}, "bias", "is torch"),
    ({"bias": biases.SoftCap}, "bias", "the class SoftCap"),
    ({"bias": (biases.SoftCap(1.0), 3.0)}, "bias", "is float"),
    ({"bias": (biases.SoftCap(1.0), biases.TensorBias(ones(5, 11, 13)))}, "bias", "broadcast"),
    ({"normalizer": Softmax(sink=rand(5))}, "sink", "5 logits"),
    ({"normalizer": Softmax}, "normalizer", None),
    ({"normalizer": "softmax"}, "normalizer", None),
    ({"score": 0}, "score", None),
    ({"score": Dot}, "score", None),
]


@pytest.mark.parametrize(("arguments", "argument", "match"), CALLS)
def test_wrong_parts_are_rejected(arguments: dict[str, Any], argument: str, match: str | None) -> None:
    for function, tensors in ((attend, (Q, K, V)), (qkv.plan, (Q, K, V)), (qkv.measure, (Q, K))):
        with refused(argument, match):
            function(*tensors, **arguments)  # type: ignore[operator]


NUMBERS: list[tuple[str, Callable[[Any], object]]] = [
    ("dropout_p", lambda x: attend(Q, K, V, dropout_p=x)), ("scale", lambda x: attend(Q, K, V, scale=x)),
    ("alpha", normalizers.Entmax), ("cap", biases.SoftCap), ("factor", positions.NTK), ("dim", positions.Sinusoidal),
    ("base", lambda x: positions.Rotary(4, x)), ("low", lambda x: positions.Llama3(low=x)),
    ("original", lambda x: positions.YaRN(2.0, x)), ("offset", lambda x: masks.Shifted(Causal(), x)),
    ("max_distance", lambda x: biases.T5Bias(ones(32, 2), max_distance=x)),
]  # fmt: skip
REFUSALS: list[tuple[str, Callable[[], object], str | None]] = [
    *((name, lambda make=make, x=x: make(x), None) for name, make in NUMBERS for x in ("a", [1], 1j)),
    ("offset", lambda: masks.Shifted(Causal(), 4.5), "whole"),
    *(("lengths", lambda x=x: Padding(x), None) for x in ("a", None, [0.5], [True])),
    *(("ids", lambda x=x: Document(x), None) for x in ("a", None, [0.5], [[[1]]])),
    *(("indices", lambda x=x: masks.Global(x), None) for x in ("a", None, [0.5])),
    *(("dropout_p", lambda p=p: attend(Q, K, V, dropout_p=p), None) for p in (-0.1, 1.0, math.nan)),
    *(("kernel", lambda f=f: f(Q, K, V, kernel="Flash"), None) for f in (attend, qkv.plan, qkv.Attention())),
    *(("cap", lambda cap=cap: biases.SoftCap(cap), None) for cap in (0.0, math.nan, math.inf)),
    ("bias", lambda: biases.TensorBias(ones(2, 3) > 0), "bool"),
    ("bias", lambda: biases.TensorBias([[0.0]]), "list"),
    ("bias", lambda: biases.TensorBias(ones(3)), "1 dim"),
    ("bias", lambda: biases.TensorBias(ones(1, 1, 1, 1, 1)), "5 dim"),
    *(("temperature", lambda t=t: Softmax(temperature=t), None) for t in (0.0, -1.0, math.nan, math.inf)),
    *(("sink", lambda sink=sink: Softmax(sink=sink), None) for sink in (ones(2, 3), ones(1)[0], torch.arange(6))),
    *(("scale", lambda scale=scale: Dot(scale), None) for scale in (math.nan, math.inf)),
    ("mask", lambda: Causal() & Window, "the class Window"),
    ("mask", lambda: Window(2) | (ones(2, 2) > 0), "with torch.bool"),
    ("mask", lambda: Dense(ones(11, 13) - 1), "float64"),
]

test_wrong_options_and_parameters_are_rejected = refusals(REFUSALS)


def test_a_mermaid_diagram_leads_from_every_input_to_the_output() -> None:
    w, v = torch.ones(3, 4), torch.ones(3)
    q, k = torch.ones(1, 1, 5, 4), torch.ones(1, 1, 6, 4)
    plan = qkv.plan(q, k, k, score=qkv.scores.Additive(v, w_q=w, w_k=w), mask=~torch.eye(5, 6).bool())
    chart = plan.diagram("mermaid")
    boxes = dict(re.findall(r'(t\d+)\["([a-z ]+)<br/>', chart))
    assert [*boxes.values()][-3:] == ["scores", "weights", "output"]
    assert {"projected queries", "projected keys"} <= {*boxes.values()}
    following = dict(re.findall(r"(\w+)(?:\(.*\))? --> (\w+)", chart))
    for box, name in boxes.items():
        path = [box]
        while path[-1] in following:
            path.append(following[path[-1]])
        assert boxes[path[-1]] == "output", name
    with refused("form"):
        qkv.plan(q, k, k).diagram("dot")  # type: ignore[arg-type]

"""The classes and functions of five courses: called as lessons call them, they give what the lessons' formulas give."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, rand, refused
from qkv import masks
from qkv_lab import course
from qkv_lab.course import MultiHeadAttention, create_causal_mask, scaled_dot_product_attention

CAUSAL = torch.ones(6, 6).tril()
FUTURE = torch.ones(6, 6).triu(1).bool()  # True hides, as two of the courses have it
X, MEMORY = rand(2, 6, 24, dtype=torch.float32), rand(2, 9, 24, seed=1, dtype=torch.float32)
IDS = torch.arange(12).view(2, 6)


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √d) v and the weights, in float64; zeros where a query sees nothing."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    weights = s.softmax(-1).nan_to_num(nan=0.0)
    return weights @ v.double(), weights


def of_heads(
    state: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Concat(head_1, …, head_h) W_O of a state dict with the names of the lessons, with or without biases, 4 heads."""

    def projected(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T.double() + state.get(f"{name}.bias", torch.zeros(1)).double()

    split = [projected(f"W_{name}", x.double()) for name, x in zip("qkv", (query, key, value), strict=True)]
    out, weights = formula(*(x.unflatten(-1, (4, -1)).transpose(1, 2) for x in split), visible)
    return projected("W_o", out.transpose(1, 2).flatten(2)), weights


def close32(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    """Equal within roundings of float32, in which lessons compute."""
    for one, other in zip(got, want, strict=True):
        close(one, other, eps=256, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 1, 4, 8)], ids=str)
def test_functions_take_tokens_with_and_without_batch_and_heads(shape: tuple[int, ...]) -> None:
    q, k, v = (rand(*shape, seed=i, dtype=torch.float32) for i in range(3))
    close32(course.simple_attention(q, k, v), formula(q, k, v))
    visible = create_causal_mask(4)
    close32(scaled_dot_product_attention(Q=q, K=k, V=v, mask=visible), formula(q, k, v, visible))
    close32(course.causal_attention(q, k, v), formula(q, k, v, visible))
    arrays = scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), visible.numpy())
    assert all(isinstance(x, np.ndarray) for x in arrays)
    close32(tuple(map(torch.from_numpy, arrays)), formula(q, k, v, visible))


Call = Callable[[Any], tuple[Tensor, Tensor]]
CALLS: dict[str, tuple[Call, bool]] = {  # and whether it is causal
    "one input": (lambda mha: mha(X), False),
    "three inputs": (lambda mha: mha(X, X, X), False),
    "names": (lambda mha: mha(query=X, key=X, value=X), False),
    "capital names": (lambda mha: mha(Q=X, K=X, V=X), False),
    "mask as the second": (lambda mha: mha(X, CAUSAL[None, None]), True),
    "mask by name": (lambda mha: mha(x=X, mask=CAUSAL), True),
    "mask of integers": (lambda mha: mha(query=X, key=X, value=X, mask=CAUSAL.int()[None, None]), True),
    "mask object": (lambda mha: mha(X, masks.Causal()), True),
    "mask in which True hides": (lambda mha: mha(X, X, X, blocked=FUTURE), True),
}


@pytest.mark.parametrize("name", CALLS)
def test_layer_is_called_as_lessons_call_it(name: str) -> None:
    mha = MultiHeadAttention(24, n_heads=4)
    call, causal = CALLS[name]
    close32(call(mha), of_heads(mha.state_dict(), X, X, X, CAUSAL > 0 if causal else None))


def test_layer_attends_to_a_memory_without_weights_if_asked() -> None:
    mha = MultiHeadAttention(d_model=24, num_heads=4)
    want = of_heads(mha.state_dict(), X, MEMORY, MEMORY)
    close32(mha(Q=X, K=MEMORY, V=MEMORY), want)
    out, nothing = mha(X, MEMORY, return_attention=False)
    close32((out,), want[:1])
    assert nothing is None
    assert (mha.d_model, mha.num_heads, mha.n_heads, mha.d_k, mha.d_v, mha.head_dim) == (24, 4, 4, 6, 6, 6)
    assert mha.scale == math.sqrt(6)
    assert torch.equal(mha.merge_heads(mha.split_heads(X, 2)), X)


@pytest.mark.parametrize("bias", [True, False])
def test_a_state_dict_of_a_lesson_loads(bias: bool) -> None:
    theirs, ours = (MultiHeadAttention(24, 4, bias=one) for one in (bias, not bias))
    ours.load_state_dict(theirs.state_dict())
    close32(ours(X), theirs(X))
    assert set(ours.state_dict()) == {f"W_{x}.{y}" for x in "qkvo" for y in ("weight", *["bias"] * bias)}
    block, same = course.TransformerBlock(24, attention=course.EinsumAttention(24, 4)), course.TransformerBlock(24, 4)
    state = {k.replace("attn.", "attention.").replace("ff.", "ffn."): x for k, x in block.state_dict().items()}
    same.load_state_dict(state)  # with the names of the build-along
    close32(same(X), block(X))


def test_einsum_layer_is_the_layer_whose_matrices_it_has() -> None:
    attention = course.EinsumAttention(24, 4)
    w = dict(attention.named_parameters())
    state = {f"{n}.weight": (x.flatten(1).T if n != "W_o" else x.flatten(0, 1).T).detach() for n, x in w.items()}
    close32(attention(X, CAUSAL), of_heads(state, X, X, X, CAUSAL > 0))
    close32(attention(X, blocked=FUTURE), attention(X, masks.Causal()))


def test_models_have_the_parameters_and_the_outputs_of_the_lessons() -> None:
    minimal, tiny, seq2seq = (
        course.MinimalTransformer(1000), course.TinyTransformer(16, 32, 4, 2, 13), course.Seq2SeqWithAttention(100, 120)
    )  # fmt: skip
    counts = [sum(p.numel() for p in model.parameters()) for model in (minimal, tiny, seq2seq)]
    assert counts == [3_542_528, 26_672, 359_800]
    logits = [minimal(IDS, return_attentions=True)[0], tiny(IDS, mask=create_causal_mask(6))[0], seq2seq(IDS, IDS)]
    assert [x.shape for x in logits] == [(2, 6, 1000), (2, 6, 16), (2, 6, 120)]


def test_numpy_classes_give_their_formulas() -> None:
    x = rand(5, 8)
    found = course.ScaledDotProductAttention(8).forward(x.numpy(), x.numpy(), x.numpy(), CAUSAL[:5, :5].numpy())
    close32(tuple(map(torch.from_numpy, found)), formula(x, x, x, CAUSAL[:5, :5] > 0))
    by_hand = np.array([[1, 0], [0, 1], [1, 1]])
    found = course.ScaledDotProductAttention(2).forward(by_hand, by_hand, by_hand)
    close32(tuple(map(torch.from_numpy, found)), formula(*[torch.tensor(by_hand).double()] * 3))
    additive = course.BahdanauAttention(8)
    state, states = np.ones((8, 1)), [row[:, None] for row in x.numpy()]
    scores = [(additive.va.T @ np.tanh(additive.Wa @ h + additive.Ua @ state)).item() for h in states]
    weights = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    want = ((weights @ x)[:, None], weights)
    close32(tuple(map(torch.from_numpy, additive.compute_attention(state, states))), want)


def test_pictures_and_measures_run(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    data = course.generate_reversal_data(3, 5, 16)
    assert torch.equal(data[:, :5].flip(1), data[:, 6:])
    model = course.TinyTransformer(16, 8, 2, 1, 13)
    weights = course.visualize_attention(model, data, 1)
    assert [w.shape for w in weights] == [(1, 2, 10, 10)]
    assert (tmp_path / "attention_visualization.png").exists()
    assert len(course.visualize_attention(["a"] * 10, weights[0], head=1).axes) == 2
    mini, tokenizer = qkv.load("qkv-mini")
    attentions, tokens = course.visualize_attention("qkv-mini", "import os")
    ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    close32(attentions, mini(ids, return_weights=True)[1])
    assert len(tokens) == ids.shape[1]
    course.plot_attention(weights[0][0, 0])
    course.analyze_attention_heads(model, data, 5)
    course.measure_first_token_attention(weights, ["a"] * 10)
    course.experiment_sigmoid_attention()
    for one in (course.test_attention, course.test_mha, course.test_transformer):
        one()
    printed = capsys.readouterr().out
    for text in ("Layer 1, Head 2:", "Layer  0: mean=", "sigmoid: weights", "3,542,528"):
        assert text in printed
    assert course.Tokenizer().decode(course.Tokenizer().encode("The cat")) == "The cat"


def test_pictures_appear_in_a_notebook_and_in_a_window(monkeypatch: Any, tmp_path: Any) -> None:
    import matplotlib.pyplot as plt
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    monkeypatch.chdir(tmp_path)
    weights = torch.randn(1, 2, 4, 4).softmax(-1)
    cells = (
        "course.plot_attention(weights[0, 0])", "x = course.visualize_attention(list('abcd'), weights, head=1)",
        "x = course.visualize_attention('qkv-mini', 'import os')", "x = course.visualize_attention(model, data)",
    )  # fmt: skip
    names = {
        "course": course, "weights": weights, "model": course.TinyTransformer(16, 8, 2, 1, 13),
        "data": course.generate_reversal_data(3, 5, 16),
    }  # fmt: skip
    shell = InteractiveShell.instance()
    try:
        shell.user_ns |= names
        for cell in cells:
            with capture_output() as shown:
                assert shell.run_cell(cell).success
            assert ["image/png" in one.data for one in shown.outputs] == [True], cell
    finally:
        InteractiveShell.clear_instance()
    windows = list[tuple[int, ...]]()
    monkeypatch.setattr(plt, "get_backend", lambda: "tkagg")
    monkeypatch.setattr(plt, "show", lambda: windows.append(plt.gcf().images[0].get_array().shape))
    for cell in cells:
        exec(cell, names)
    assert len(windows) == len(cells)
    assert min(size for window in windows for size in window[:2]) > 100
    plt.close("all")


@pytest.mark.parametrize("call", [
    lambda: scaled_dot_product_attention(X, X, X, FUTURE), lambda: MultiHeadAttention(24, 4)(X, X, X, FUTURE),
    lambda: course.EinsumAttention(24, 4)(X, FUTURE), lambda: course.TransformerBlock(24, 4)(X, FUTURE),
    lambda: course.ScaledDotProductAttention(24).forward(*[X[0].numpy()] * 3, FUTURE.numpy()),
    lambda: course.TinyTransformer(16)(IDS, FUTURE),
], ids=["function", "layer", "einsum layer", "block", "NumPy class", "model"])  # fmt: skip
def test_a_mask_in_which_true_hides_is_taken_upside_down(call: Callable[[], object]) -> None:
    with refused("mask", match="blocked=mask"):
        call()


def test_the_causal_mask_is_not_taken_upside_down_by_the_lesson_that_masks_its_own_scores() -> None:
    mask, scores, layer = create_causal_mask(6), rand(2, 6, 6), torch.nn.MultiheadAttention(24, 4, batch_first=True)
    for call in (
        lambda: scores.masked_fill(mask.unsqueeze(0), -1e9), lambda: scores[0].__setitem__(mask[:6, :6], -torch.inf),
        lambda: layer(X, X, X, attn_mask=mask),
    ):  # fmt: skip
        with refused("mask", match="~mask"):
            call()
    assert torch.equal(scores.masked_fill(mask == 0, 0.0), scores.tril())
    module = torch.nn.Module()
    module.register_buffer("mask", mask)
    torch.save(copy.deepcopy(module).state_dict(), file := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()))["mask"], CAUSAL > 0)


def test_a_mask_of_each_item_is_that_of_an_item_in_every_call_or_refused() -> None:
    x, items = X, torch.stack([CAUSAL > 0, torch.ones(6, 6) > 0])
    for mask in ({"mask": items}, {"blocked": ~items}):
        close32(scaled_dot_product_attention(x, x, x, **mask), formula(x, x, x, items))
        for layer in (course.EinsumAttention(24, 2), MultiHeadAttention(24, 2), course.TransformerBlock(24, 2)):
            with refused("mask", match="ambiguous"):
                layer(x, **mask)
    with refused("key"):
        MultiHeadAttention(6, 2)(rand(1, 6, 6), CAUSAL[None])
    for weights in (torch.ones(1, 2, 3, 3), torch.ones(2, 1, 1)):
        with refused("attention_weights"):
            course.compute_sink_metric(weights)


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(AttributeError, match="'MultiHeadAttention'"):
        _ = qkv.course.MultiheadAttention
    assert "MultiHeadAttention" in dir(qkv.course)
    with pytest.raises(AttributeError, match="'attend'"):
        _ = qkv.atend

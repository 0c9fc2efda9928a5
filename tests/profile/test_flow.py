"""Products with the weights from either side, and attention rollout: both equal to the dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import hf_models as hf
import qkv
from conftest import MASKS, Command, close, enlarged, largest_tensor, oracle, rand, refusals, set_tile, triple
from qkv import masks, normalizers
from qkv.engine import Call
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Normalizer
from qkv.plot.analyses import flow_figure
from qkv.profiler.analyses.flow import rollout
from qkv.profiler.capture.datasets import calls_of
from qkv.statistics.measure import row_state
from qkv.statistics.reduce import weights_matmul

NORMALIZERS: list[Normalizer] = [
    normalizers.Softmax(), normalizers.Softmax(sink=0.7), normalizers.Sigmoid(), normalizers.EluPlusOne(),
    normalizers.Entmax(1.5), normalizers.Hard(), normalizers.Identity(),
]  # fmt: skip


def check_products(call: Call, weights: Tensor, w: Tensor, x: Tensor, queries: Tensor | None = None) -> None:
    """Both against the dense weights, of which those of `queries` that do not count are zero."""
    weights = weights if queries is None else weights * queries[:, None, :, None]
    close(weights_matmul(call, row_state(call), w, transposed=True, queries=queries), weights.transpose(2, 3) @ w)
    close(weights_matmul(call, row_state(call), x, queries=queries), weights @ x)


@pytest.mark.parametrize(("name", "normalizer"), list(zip([*MASKS][::2], cycle(NORMALIZERS))))
def test_products_equal_dense_weights(name: str, normalizer: Normalizer, tile4: None) -> None:
    q, k, v = triple(h=3, hkv=1, nq=7, nk=10)
    mask = MASKS[name](7, 10, 2, 3)
    weights = oracle(q, k, v, mask=mask, normalizer=normalizer)[2]
    call = Call.of(q, k, v, mask, (), None, normalizer)
    check_products(call, weights, rand(2, 3, 7, 3, seed=1), rand(2, 1, 10, 3, seed=2))


def test_masked_queries_may_be_nan(tile4: None) -> None:
    q, k, v = triple(nq=13)
    counted = torch.ones(2, 13, dtype=torch.bool)
    counted[0, :3], counted[1, 9:] = False, False
    broken = q.masked_fill(~counted[:, None, :, None], torch.nan)
    for normalizer in (None, normalizers.EluPlusOne()):
        weights = oracle(q, k, v, mask=masks.Causal(), normalizer=normalizer)[2]
        call = Call.of(broken, k, v, masks.Causal(), (), None, normalizer)
        check_products(call, weights, rand(2, 1, 13, 2, seed=1), rand(2, 6, 13, 7, seed=2), queries=counted)


def test_products_and_rollout_form_no_quadratic_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 32)
    call = Call.of(*triple(b=1, h=2, hkv=1, nq=211, nk=211), masks.Causal())
    rows, w = row_state(call), rand(1, 1, 211, 2)
    assert largest_tensor(lambda: weights_matmul(call, rows, w, transposed=True)) < 211 * 20
    assert largest_tensor(lambda: weights_matmul(call, rows, w)) < 211 * 20
    lm, ids = model(), torch.randint(17, (1, 301))
    assert largest_tensor(lambda: rollout(lm, ids)) < 301 * 301 / 2
    assert largest_tensor(lambda: rollout(lm, ids, keys=[0])) < 301 * 301 / 2


def rollouts(weights: list[Tensor], residual: float) -> tuple[list[Tensor], list[Tensor]]:
    """From every depth to the final state, and from the embeddings to every depth, by definition: (b, n, n)."""
    same = torch.eye(weights[0].shape[2]).double().expand_as(weights[0][:, 0])
    mixed = [residual * same + (1 - residual) * a.double().mean(1) for a in weights]
    layers = [m / m.sum(-1, keepdim=True) for m in mixed]
    down = [*accumulate(reversed(layers), torch.matmul, initial=same)]
    return down[::-1], [*accumulate(layers, lambda below, layer: layer @ below, initial=same)]


def check(
    model: Any, batch: Any, weights: list[Tensor], *, residual: float, keep: Tensor, rtol: float = 1e-9, **settings: Any
) -> None:
    """Rollout and flow of three tokens of every text, at every depth, against the dense product."""
    chosen = [-1, 0, 3]
    down, up = rollouts(weights, residual)
    back, forth = (rollout(model, batch, chosen, keys=keys, residual=residual, **settings) for keys in (None, chosen))
    for item, real in enumerate(keep):
        n = int(real.sum())
        assert back["n_tokens"].values[item] == n
        assert back["chosen_position"].values[item].tolist() == [n - 1, 0, 3]
        assert np.isnan(back.values[item, ..., n:]).all()
        np.testing.assert_allclose(back.values[item, ..., :n].sum(-1), 1, rtol=rtol)
        for depth in range(len(weights) + 1):
            rows = down[depth][item][real][:, real][chosen]
            columns = up[depth][item][real][:, real][:, chosen].T
            np.testing.assert_allclose(back.values[item, :, depth, :n], rows, rtol=rtol, atol=rtol / 1e4)
            np.testing.assert_allclose(forth.values[item, :, depth, :n], columns, rtol=rtol, atol=rtol / 1e4)


def divided(weights: Tensor, factors: Tensor) -> Tensor:
    """Weights times factors of the keys, divided by the sum of each row; 0 for a row without any."""
    product = weights.double() * factors[:, :, None]
    return (product / product.sum(-1, keepdim=True)).nan_to_num(nan=0.0)


def model(**parts: Any) -> DecoderLM:
    settings: dict[str, Any] = {"vocab_size": 17, "d_model": 32, "layers": 2, "heads": 2, "context": 512} | parts
    return enlarged(DecoderLM(DecoderConfig(**settings)))


@pytest.mark.parametrize(
    ("parts", "residual", "by"),
    [
        ({"positions": "rotary", "kv_heads": 2}, 0.0, "weights"),
        ({"positions": "alibi", "window": 5}, 0.83, "weights"),
        ({"sink": True}, 0.0, "weights"),
        ({"normalizer": "sigmoid", "heads": 3, "d_model": 48}, 0.83, "weights"),
        ({"positions": "rotary", "kv_heads": 2}, 0.0, "values"),
        ({"sink": True}, 0.83, "values"),
        ({"positions": "alibi", "window": 5}, 0.83, "without-first"),
    ],
)
def test_rollout_equals_the_dense_product(parts: dict[str, Any], residual: float, by: str, tile4: None) -> None:
    lm = model(**{"d_model": 64, "layers": 3, "heads": 4} | parts)
    ids = torch.randint(17, (2, 13), generator=torch.Generator().manual_seed(4))
    weights = []
    for seen in calls_of(lm, {"ids": ids}):
        given = seen.call.user
        weights.append(
            oracle(given.q, given.k, given.v, mask=given.mask, bias=given.biases, normalizer=given.normalizer)[2]
        )
        if by != "weights":
            norms = given.v.norm(dim=-1).repeat_interleave(given.q.shape[1] // given.v.shape[1], 1)
            weights[-1] = divided(weights[-1], norms if by == "values" else (torch.arange(13) > 0).expand(2, 1, 13))
    assert residual or not parts.get("sink") or weights[0].sum(-1).min() < 0.9  # the rows do need to be divided
    check(lm, ids, weights, residual=residual, keep=torch.ones(2, 13, dtype=torch.bool), by=by)


@pytest.mark.parametrize(
    ("name", "padding"), [("gpt2", "left"), ("mistral", None), ("bert", "right"), ("gemma2", "left")]
)
def test_rollout_of_hugging_face_models_with_padding(
    name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, 16)
    model, batch = hf.build(name, "eager"), hf.inputs(name, padding)
    with torch.no_grad():
        weights = list(model(**batch, output_attentions=True)["attentions"])
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    check(model, batch, weights, residual=0.5, keep=keep, rtol=1e-4)
    if padding == "left":
        others = (keep.cumsum(-1) > 1)[:, None]
        weights = [divided(one * keep[:, None, :, None], others) for one in weights]
        check(model, batch, weights, residual=0.5, keep=keep, rtol=1e-4, by="without-first")


def test_texts_of_different_lengths_are_padded() -> None:
    found = rollout("qkv-mini", ["import os, sys", "x = 1"], [-1])
    short = rollout("qkv-mini", "x = 1", [-1])
    n = short.sizes["token"]
    assert found.sizes["token"] > n
    np.testing.assert_allclose(found.values[1, ..., :n], short.values[0], rtol=1e-6)
    assert np.isnan(found.values[1, ..., n:]).all()
    assert found["token_name"].values[1, n:].tolist() == [""] * (found.sizes["token"] - n)
    assert "".join(short["token_name"].values[0]) == "<s>x = 1"
    assert found.attrs["model"] == "qkv-mini"


def of_bart(group: str | None) -> object:
    return rollout(hf.build("bart"), hf.inputs("bart"), group=group)


CALL = Call.of(*triple())
ROWS = row_state(CALL)
REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("queries", "holds 7", lambda: rollout(model(), torch.arange(7), [7])),
    ("queries", "holds -8", lambda: rollout(model(), torch.arange(7), [-8])),
    ("queries", "empty", lambda: rollout(model(), torch.arange(7), [])),
    ("residual", None, lambda: rollout(model(), torch.arange(7), residual=1.0)),
    ("by", "without-first", lambda: rollout(model(), torch.arange(7), by="without first")),
    ("group", None, lambda: rollout(model(), torch.arange(7), group="encoder")),
    ("group", "'cross'", lambda: of_bart("cross")),
    ("group", "None", lambda: of_bart(None)),
    ("x", None, lambda: weights_matmul(CALL, ROWS, rand(2, 1, 13, 1), transposed=True)),
    ("x", None, lambda: weights_matmul(CALL, ROWS, rand(2, 5, 13, 1))),
    ("queries", None, lambda: weights_matmul(CALL, ROWS, rand(2, 1, 13, 1), queries=torch.ones(2, 13) > 0)),
]

test_invalid_settings_and_shapes_are_refused = refusals(REFUSALS)


@pytest.mark.usefixtures("undrawn")
def test_command_writes_figures_and_data(tmp_path: Path, command: Command) -> None:
    said = command.succeeds("flow", "qkv-mini", "x = y + 1", "--from", -1, 2, "--to", 0, "--out", tmp_path)
    assert "comes from" in said
    layers: list[int] = []
    mini, tokenizer = qkv.load("qkv-mini")
    found = rollout(mini, "x = y + 1", [-1, 2], tokenizer=tokenizer, on_layer=lambda: layers.append(1))
    sizes = found.sizes
    n = sizes["token"]
    assert len(layers) == sizes["depth"] - 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"flow-from-{n - 1}.png", "flow-from-2.png", "flow-to-0.png", "flow.csv"}
    table = pd.read_csv(tmp_path / "flow.csv")
    assert len(table) == 3 * sizes["depth"] * n
    back = table[(table.direction == "from") & (table.chosen_position == 2)]
    np.testing.assert_allclose(back.groupby("depth").flow.sum(), 1, rtol=1e-6)  # float32
    share = f"{found.values[0, 1, 0, 2]:.0%}".removesuffix("%")
    assert flow_figure(found, 1).texts[0].get_text().startswith(f"{share} % ")
    assert "no token but itself" in flow_figure(rollout(mini, "x", keys=[-1], tokenizer=tokenizer)).texts[0].get_text()

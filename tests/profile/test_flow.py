"""Products with the weights from either side, and attention rollout: both equal to the dense matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import hf_models as hf
from conftest import MASKS, close, enlarged, fits, largest_tensor, oracle, rand, refused, set_tile, triple, unchecked
from qkv import masks, normalizers
from qkv._engine.call import Call
from qkv.cli import main
from qkv.figures.analyses import flow_figure
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Normalizer
from qkv.profiler.analyses.flow import flow_to, rollout
from qkv.profiler.capture.datasets import calls_of
from qkv.statistics.measure import row_state
from qkv.statistics.products import weights_matmul, weights_transposed_matmul

NORMALIZERS: dict[str, Normalizer] = {
    "softmax": normalizers.Softmax(),
    "sink": normalizers.Softmax(sink=0.7),
    "sigmoid": normalizers.Sigmoid(),
    "elu": normalizers.EluPlusOne(),
    "entmax": normalizers.Entmax(1.5),
    "hard": normalizers.Hard(),
    "signed": normalizers.Identity(),
}


# --- both products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MASKS if fits(name, 11, 13)])
def test_products_equal_dense_weights_for_every_mask(name: str, tile4: None) -> None:
    q, k, v = triple()
    mask = MASKS[name](11, 13, 2, 6)
    weights = oracle(q, k, v, mask=mask)[2]
    call = Call.of(q, k, v, mask)
    w, x = rand(2, 6, 11, 3, seed=1), rand(2, 1, 13, 3, seed=2)
    close(weights_transposed_matmul(call, row_state(call), w), weights.transpose(2, 3) @ w)
    close(weights_matmul(call, row_state(call), x), weights @ x)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_products_equal_dense_weights_for_every_normalizer(name: str, tile: int) -> None:
    q, k, v = triple(h=10, hkv=5)
    mask, normalizer = masks.Causal(), NORMALIZERS[name]
    weights = oracle(q, k, v, mask=mask, normalizer=normalizer)[2]
    call = Call.of(q, k, v, mask, (), None, normalizer)
    w, x = rand(2, 1, 11, 2, seed=1), rand(2, 10, 13, 7, seed=2)
    close(weights_transposed_matmul(call, row_state(call), w), weights.transpose(2, 3) @ w)
    close(weights_matmul(call, row_state(call), x), weights @ x)


def test_weights_transposed_matmul_equals_transposed_attention() -> None:
    """Keys query the queries, each with a bias −lse_i: e to the lse of that pass is what each key has received."""
    q, k, v = triple(hkv=6, nq=13)
    call = Call.of(q, k, v)
    rows = row_state(call)
    assert rows.level is not None
    scores = (k @ q.transpose(2, 3)) * call.scale - rows.level[:, :, None]
    w = rand(2, 6, 13, 2, seed=1)
    flash = torch.softmax(scores, -1) @ w * torch.logsumexp(scores, -1).exp()[..., None]
    close(weights_transposed_matmul(call, rows, w), flash)


def test_masked_queries_may_be_nan(tile4: None) -> None:
    q, k, v = triple(nq=13)
    counted = torch.ones(2, 13, dtype=torch.bool)
    counted[0, :3], counted[1, 9:] = False, False
    weights = oracle(q, k, v, mask=masks.Causal())[2] * counted[:, None, :, None]
    q = q.masked_fill(~counted[:, None, :, None], torch.nan)
    for normalizer in (None, normalizers.EluPlusOne()):
        if normalizer is not None:
            clean = q.nan_to_num()
            weights = oracle(clean, k, v, mask=masks.Causal(), normalizer=normalizer)[2] * counted[:, None, :, None]
        call = Call.of(q, k, v, masks.Causal(), (), None, normalizer)
        w, x = rand(2, 1, 13, 2, seed=1), rand(2, 1, 13, 2, seed=2)
        close(weights_transposed_matmul(call, row_state(call), w, queries=counted), weights.transpose(2, 3) @ w)
        close(weights_matmul(call, row_state(call), x, queries=counted), weights @ x)


def test_products_form_no_quadratic_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 16)
    q, k, v = triple(b=1, h=2, hkv=1, nq=211, nk=211)
    call = Call.of(q, k, v, masks.Causal())
    rows = row_state(call)
    w = rand(1, 1, 211, 2)
    for product in (weights_transposed_matmul, weights_matmul):
        assert largest_tensor(lambda product=product: product(call, rows, w)) < 211 * 20  # type: ignore[misc]


def test_products_reject_wrong_shapes() -> None:
    q, k, v = triple()
    call = Call.of(q, k, v)
    rows = row_state(call)
    with unchecked():
        with refused("w"):
            weights_transposed_matmul(call, rows, rand(2, 1, 13, 1))
        with refused("x"):
            weights_matmul(call, rows, rand(2, 5, 13, 1))
        with refused("queries"):
            weights_matmul(call, rows, rand(2, 1, 13, 1), queries=torch.ones(2, 13, dtype=torch.bool))


# --- rollout ----------------------------------------------------------------------------------------------------------


def matrices(weights: list[Tensor], residual: float) -> list[Tensor]:
    """Ã of every layer, (b, n, n), by definition, from its weights (b, h, n, n)."""
    mixed = [residual * torch.eye(a.shape[2]).double() + (1 - residual) * a.double().mean(1) for a in weights]
    return [m / m.sum(-1, keepdim=True) for m in mixed]


def rollouts(weights: list[Tensor], residual: float) -> tuple[list[Tensor], list[Tensor]]:
    """From every depth to the final state, and from the embeddings to every depth."""
    layers = matrices(weights, residual)
    identity = torch.eye(layers[0].shape[1]).double().expand_as(layers[0])
    down, up = [identity], [identity]
    for layer in reversed(layers):
        down.insert(0, down[0] @ layer)
    for layer in layers:
        up.append(layer @ up[-1])
    return down, up


def check(
    model: Any, batch: Any, weights: list[Tensor], *, residual: float, keep: Tensor, rtol: float = 1e-9, **settings: Any
) -> None:
    """Rollout and flow of three tokens of every text, at every depth, against the dense product."""
    chosen = [-1, 0, 3]
    down, up = rollouts(weights, residual)
    back = rollout(model, batch, chosen, residual=residual, **settings)
    forth = flow_to(model, batch, chosen, residual=residual, **settings)
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


@pytest.mark.parametrize("residual", [0.0, 0.83])
@pytest.mark.parametrize(
    "parts",
    [
        {"positions": "rotary", "kv_heads": 2},
        {"positions": "alibi", "window": 5},
        {"sink": True},
        {"normalizer": "sigmoid", "heads": 3, "d_model": 48},
        {"normalizer": "off_by_one"},
    ],
    ids=lambda parts: " ".join(map(str, parts.values())),
)
def test_rollout_equals_the_dense_product(parts: dict[str, Any], residual: float, tile4: None) -> None:
    settings: dict[str, Any] = {"vocab_size": 17, "d_model": 64, "layers": 3, "heads": 4, "context": 64} | parts
    model = enlarged(DecoderLM(DecoderConfig(**settings)))
    ids = torch.randint(17, (2, 19), generator=torch.Generator().manual_seed(4))
    weights = []
    for seen in calls_of(model, {"ids": ids}):
        given = seen.call.given
        weights.append(
            oracle(given.q, given.k, given.v, mask=given.mask, bias=given.biases, normalizer=given.normalizer)[2]
        )
    assert residual or not parts.get("sink") or weights[0].sum(-1).min() < 0.9  # the rows do need to be divided
    check(model, ids, weights, residual=residual, keep=torch.ones(2, 19, dtype=torch.bool))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert", "gemma2"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_rollout_of_hugging_face_models_with_padding(
    name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padding is not None and padding not in hf.ARCHITECTURES[name].padding:
        pytest.skip(f"{name} takes no padding on the {padding}")
    set_tile(monkeypatch, 16)
    model = hf.build(name, "eager")
    batch = hf.inputs(name, padding)
    with torch.no_grad():
        weights = list(model(**batch, output_attentions=True)["attentions"])
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    check(model, batch, weights, residual=0.5, keep=keep, rtol=1e-4)


def test_rollout_of_one_side_of_an_encoder_decoder() -> None:
    model = hf.build("bart", "eager").double()
    batch = hf.inputs("bart")
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True)
    for group in ("encoder", "decoder"):
        weights = list(outputs[f"{group}_attentions"])
        keep = torch.ones(weights[0].shape[0], weights[0].shape[2], dtype=torch.bool)
        check(model, batch, weights, residual=0.5, keep=keep, group=group)
    with refused("group", match="'cross'"):
        rollout(model, batch, group="cross")
    with refused("group", match="None"):
        rollout(model, batch)


def model(**parts: Any) -> DecoderLM:
    settings: dict[str, Any] = {"vocab_size": 17, "d_model": 32, "layers": 2, "heads": 2, "context": 512} | parts
    return enlarged(DecoderLM(DecoderConfig(**settings)))


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


def test_rollout_forms_no_quadratic_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 16)
    lm, ids = model(), torch.randint(17, (1, 401))
    square = 401 * 401
    for ask in (rollout, flow_to):
        assert largest_tensor(lambda ask=ask: ask(lm, ids)) < square / 2  # type: ignore[misc]


def test_on_layer_is_called_for_every_layer() -> None:
    calls: list[int] = []
    rollout(model(layers=3), torch.arange(7), on_layer=lambda: calls.append(1))
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("settings", "argument", "match"),
    [
        ({"queries": [7]}, "queries", "holds 7"),
        ({"queries": [-8]}, "queries", "holds -8"),
        ({"queries": []}, "queries", "empty"),
        ({"residual": 1.0}, "residual", None),
        ({"group": "encoder"}, "group", None),
    ],
)
def test_rollout_rejects_invalid_settings(settings: dict[str, Any], argument: str, match: str | None) -> None:
    with refused(argument, match):
        rollout(model(), torch.arange(7), **settings)


# --- figure and command -----------------------------------------------------------------------------------------------


def test_figure_shows_the_result() -> None:
    found = rollout("qkv-mini", "def f(x):\n    return x", [-1, 2])
    figure = flow_figure(found, 1)
    title, subtitle = (text.get_text() for text in figure.texts[:2])
    share, layers = found.values[0, 1, 0], found.sizes["depth"] - 1
    assert title.startswith(f"{share[2]:.0%} ".replace("%", " %"))
    assert "(token 2)" in title
    assert subtitle == f"qkv-mini · attention rollout, residual weight 0.5 · {layers} layers · {len(share)} tokens"
    forth = flow_figure(flow_to("qkv-mini", "x", [-1])).texts[0].get_text()
    assert forth.endswith("takes part in no token but itself")
    with refused("chosen"):
        flow_figure(found, 2)


def test_command_writes_figures_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flow", "qkv-mini", "x = y + 1", "--from", "-1", "2", "--to", "0", "--out", str(tmp_path)]) == 0
    sizes = rollout("qkv-mini", "x = y + 1").sizes
    n = sizes["token"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"flow-from-{n - 1}.png", "flow-from-2.png", "flow-to-0.png", "flow.csv"}
    table = pd.read_csv(tmp_path / "flow.csv")
    assert len(table) == 3 * sizes["depth"] * n
    back = table[(table.direction == "from") & (table.chosen_position == 2)]
    np.testing.assert_allclose(back.groupby("depth").flow.sum(), 1, rtol=1e-6)  # float32
    assert "comes from" in capsys.readouterr().out
    assert main(["flow", "qkv-mini", "x", "--from", "99", "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("qkv: --from holds 99, expected positions in a text of 2 tokens")
    assert not (tmp_path / "none").exists()

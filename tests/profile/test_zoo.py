"""Hugging Face architectures: the recorded weights of each equal those of its eager implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import make_coverage
import numpy as np
import pytest
import torch
import transformers
from matplotlib.colors import to_rgb

import qkv
from conftest import refused
from hf_models import enliven
from hf_zoo import ALL, DISAGREE, ROUTED, examine
from qkv.cli.terminal import head_grid
from qkv.plot.layout import MASKED

PUBLISHED = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
OF_THIS_VERSION = f"with transformers {transformers.__version__} " in PUBLISHED
QUICK = ("gpt_oss", "deepseek_v32", "diffllama", "doge", "beit", "siglip", "gptj", "falcon", "squeezebert")
BLOCKS = {  # their encoders attend in blocks
    "longt5_local": "LocalSelfAttention",
    "longt5_tglobal": "TransientGlobalSelfAttention",
    "pegasus_x": "self_attn",
    "bigbird_pegasus": "self_attn.self",
}
LATER = ("gptj", "codegen")  # they use the interface since transformers 5.24
BY_SDPA = ("sam", "siglip", "paligemma", "gemma3_vlm")  # beside the interface
UNREAD = {"longformer", "led", "big_bird", "nystromformer", "reformer"}  # bands, blocks, landmarks, hashed chunks
WITHOUT = {"mamba", "mamba2", "rwkv", "fnet", "convnext"}  # no softmax of scores at all
UNCHECKED = dict.fromkeys((*DISAGREE, "timesformer", "groupvit_vision"), 2)  # calls without weights to compare with


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of WavLM's own call
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_records_equal_eager_attention(name: str) -> None:
    """The first item is whole; the second is padded where the architecture knows padding."""
    seen = examine(name, padded=True)
    assert not OF_THIS_VERSION or make_coverage.row(name, seen) in PUBLISHED.splitlines(), "run `make figures`"
    assert seen.error < make_coverage.CLOSE
    assert seen.change < 4e-5 or name == "reformer"  # which hashes at random
    assert len(seen.unchecked) == UNCHECKED.get(name, 0)
    if {"interface", "sdpa"} & set(seen.sources) and name != "wavlm":  # which computes the mean over its heads, too
        assert seen.check is not None, "the first layer was not compared with the model's own function"
        assert seen.check < 1e-5
    if name in ROUTED:
        own = "differential" if name == "diffllama" else "interface"
        assert set(seen.sources) == {own} | ({"sdpa"} if name in BY_SDPA else set())
        assert len(seen.unobserved) == (2 if name in BLOCKS else 0)
        assert all(module.endswith(BLOCKS[name]) for module in seen.unobserved)
    elif name in WITHOUT:
        assert (seen.sources, seen.unobserved) == ([], [])
    else:
        assert "interface" not in seen.sources or name in LATER
        assert bool(seen.unobserved) == (name in UNREAD)
        assert seen.sources or name in UNREAD


@pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was written with another version of transformers")
def test_coverage_page_is_up_to_date() -> None:
    """Its head, versions, order and counts; `test_records_equal_eager_attention` looks at each row."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in PUBLISHED.splitlines() if line.startswith("| ")}
    assert make_coverage.page({name: rows[name] for name in ALL}) == PUBLISHED, "run `make figures`"
    assert (len(ROUTED), len(ALL)) == (137, 185)


def hybrid() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    config = transformers.Lfm2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2
    )
    return transformers.Lfm2ForCausalLM(config).eval()


IDS = torch.randint(50, (1, 12), generator=torch.Generator().manual_seed(0))


def test_layers_keep_the_numbers_of_a_model_in_which_not_all_attend() -> None:
    model = hybrid()
    profile = qkv.profile(model, IDS, probe=False, progress=False)
    with qkv.watch(model) as watched, torch.no_grad():
        model(IDS)
    for found in (profile, watched.profile()):
        assert found.data["layer"].values.tolist() == [1, 3]
        assert found.data["module"].values.tolist() == ["model.layers.1.self_attn", "model.layers.3.self_attn"]
        assert found.attrs["without_map"] == {"self": {"0": "conv", "2": "conv"}}
        said = next(one for one in found.findings() if "no attention map" in one.label)
        assert (said.value, said.detail) == ("2 of 4", "Layers 0, 2 (conv).")
    grid = [line.plain for line in head_grid(profile.types(), map(int, profile.attrs["without_map"]["self"]))]
    assert [line[2] + line[4] for line in grid[:4]] == ["░░"] * 4
    drawn = profile.plot.types().axes[0]
    assert drawn.images[0].get_array().shape == (4, 4)
    grey = [patch.get_y() for patch in drawn.patches if patch.get_facecolor()[:3] == to_rgb(MASKED)]
    assert sorted(grey) == [-0.5, 1.5]
    one = qkv.profile(model, IDS, layers=[3], probe=False, progress=False)
    np.testing.assert_array_equal(one.data["weights"][:, 0], profile.data["weights"][:, 1])
    assert qkv.profiler.attention_map(model, IDS, layer=3, head=1).layer == 3
    with qkv.edit(model, {(3, 0): "off-by-one"}):
        edited = qkv.profile(model, IDS, probe=False, progress=False)
    changed = (edited.data["row_sum"] < 0.999).any(("text", "query"))
    assert np.argwhere(changed.values).tolist() == [[1, 0]]
    with refused("layers", "attention layers 1, 3"):
        qkv.profile(model, IDS, layers=[0])
    albert = transformers.AlbertModel(
        transformers.AlbertConfig(vocab_size=50, embedding_size=16, hidden_size=32, num_hidden_layers=3,
                                  num_attention_heads=4, intermediate_size=32)
    ).eval()  # fmt: skip
    # Its layers are one module, whose calls are counted.
    assert qkv.profile(albert, IDS, probe=False, progress=False).data["layer"].values.tolist() == [0, 1, 2]


@torch.no_grad()
def test_differential_attention_has_each_map_once_and_the_factor_of_the_map_that_acts() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.DiffLlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    model = transformers.DiffLlamaModel(config).eval()
    enliven(model)
    inputs: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    attention: Any = model.layers[1].self_attn
    attention.groupnorm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    attention.v_proj.register_forward_hook(lambda _, args, out: values.append(out))
    profile = qkv.profile(model, IDS, probe=False, progress=False)
    assert profile.data["weights"].shape == (1, 2, 8, 12, 12)
    assert {*profile.attrs["sources"].values()} == {"differential"}
    assert "value_norm" not in profile.data, "the values of one softmax are not what acts"
    weights = torch.from_numpy(profile.data["weights"].values[0, 1])
    signed = weights[:4] - profile.attrs["differential"]["self"]["1"] * weights[4:]
    v = values[0].view(12, 4, 8).transpose(0, 1)
    of_keys = torch.cat([v[:2], v[2:]], -1).repeat_interleave(2, 0)  # (4 heads, 12 keys, both halves)
    torch.testing.assert_close((signed @ of_keys).transpose(0, 1), inputs[0][0], rtol=1e-4, atol=1e-5)
    drawn = profile.plot.signed().axes[0].images[4:]  # the four heads of layer 1
    np.testing.assert_allclose([np.ma.filled(one.get_array(), 0) for one in drawn], signed, atol=1e-6)
    assert drawn[0].norm.vmin == -drawn[0].norm.vmax, "both signs have colours"
    with qkv.watch(model) as watched:
        model(IDS)
    np.testing.assert_allclose(watched.profile().data["weights"], profile.data["weights"], atol=1e-6)

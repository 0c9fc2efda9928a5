"""Hugging Face architectures: the recorded weights of each equal those of its eager implementation."""

from __future__ import annotations

from pathlib import Path

import make_coverage
import pytest

from hf_zoo import ALL, DISAGREE, ROUTED, examine

PUBLISHED = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
QUICK = ("gpt_oss", "deepseek_v32", "diffllama", "doge", "beit", "siglip", "gptj", "falcon", "squeezebert")
BLOCKS = {  # their encoders attend in blocks
    "longt5_local": "LocalSelfAttention",
    "longt5_tglobal": "TransientGlobalSelfAttention",
    "pegasus_x": "self_attn",
    "bigbird_pegasus": "self_attn.self",
}
BY_SDPA = ("sam", "siglip", "paligemma", "gemma3_vlm")  # beside the interface
UNREAD = {"longformer", "led", "big_bird", "nystromformer", "groupvit_vision"}  # bands, blocks, landmarks, groups
WITHOUT = {"mamba", "mamba2", "rwkv", "reformer", "fnet", "convnext"}  # no softmax of scores at all
UNCHECKED = dict.fromkeys(DISAGREE, 2) | {"timesformer": 2}  # calls whose weights the model does not give out


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of WavLM's own call
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_records_equal_eager_attention(name: str) -> None:
    """The first item is whole; the second is padded where the architecture knows padding."""
    seen = examine(name, padded=True)
    assert make_coverage.row(name, seen) in PUBLISHED.splitlines(), "run `make figures`"
    assert seen.error < make_coverage.CLOSE
    assert seen.change < 4e-5 or name == "reformer"  # which hashes at random
    assert len(seen.unchecked) == UNCHECKED.get(name, 0)
    if {"interface", "sdpa"} & set(seen.sources) and name != "wavlm":  # which computes the mean over its heads, too
        assert seen.check is not None, "the first layer was not compared with the model's own function"
        assert seen.check < 1e-5
    if name in ROUTED:
        assert set(seen.sources) == {"interface"} | ({"sdpa"} if name in BY_SDPA else set())
        assert len(seen.unobserved) == (2 if name in BLOCKS else 0)
        assert all(module.endswith(BLOCKS[name]) for module in seen.unobserved)
    elif name in WITHOUT:
        assert (seen.sources, seen.unobserved) == ([], [])
    else:
        assert "interface" not in seen.sources
        assert bool(seen.unobserved) == (name in UNREAD)
        assert seen.sources or name in UNREAD


def test_coverage_page_is_up_to_date() -> None:
    """Its head, versions, order and counts; `test_records_equal_eager_attention` looks at each row."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in PUBLISHED.splitlines() if line.startswith("| ")}
    assert make_coverage.page({name: rows[name] for name in ALL}) == PUBLISHED, "run `make figures`"
    assert (len(ROUTED), len(ALL)) == (137, 185)

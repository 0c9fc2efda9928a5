"""Sequence parallelism equals a single process: out, lse, gradients, statistics.

Two and three processes (gloo) run the cases of `ring_cases`, once, and check which positions they have and what they
refuse; each test then looks at one case.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import qkv
import ring_cases
from conftest import MASKS, close, fits, rand, refused
from qkv import masks
from qkv.masks import Grid, Region
from qkv.masks.base import mask_of_part
from qkv.masks.convert import grid_mod
from qkv.profiler.capture.datasets import calls_of
from qkv.statistics import Mass

SIZES = (2, 3)
HERE = Path(__file__).parents[1]
EPS = {torch.float64: 256, torch.float32: 256, torch.bfloat16: 8}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the processes of each group found."""
    folder = tmp_path_factory.mktemp("ring")
    launch = [sys.executable, "-W", "error", str(HERE / "ring_cases.py"), str(folder), *map(str, SIZES)]
    done = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    found = {size: torch.load(folder / f"found-{size}.pt") for size in SIZES}
    found[2]["profiles"] = [qkv.Profile.load(folder / f"profile-{rank}.qkv.zip") for rank in range(2)]
    found[3]["lost"] = [(folder / f"lost-{rank}.txt").read_text() for rank in range(2)]
    return found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(x, size) for size in SIZES for x in ring_cases.run_by(size)])
def test_sharded_attention_equals_one_process(name: str, size: int, found: dict[int, dict[str, Any]]) -> None:
    case = ring_cases.CASES[name]
    want, got = case.run(lambda x: x), found[size][name]
    assert want.keys() == got.keys()
    for key, x in want.items():
        assert got[key].dtype == x.dtype, key
        finite = x.isfinite()
        scale = max(1.0, float(x[finite].abs().max()) if finite.any() else 1.0)
        assert torch.equal(got[key].isfinite(), finite), key
        pair = (torch.where(finite, y / scale, 0) for y in (got[key], x))
        close(*pair, eps=EPS[case.dtype], dtype=case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(x, size) for size in SIZES for x in ring_cases.measured_by(size)])
def test_sharded_statistics_equal_one_process(name: str, size: int, found: dict[int, dict[str, Any]]) -> None:
    case = ring_cases.CASES[name]
    want, got = ring_cases.measured(case, lambda x, dim=2: x), found[size]["statistics"][name]
    assert want.keys() == got.keys()
    for key, x in want.items():
        assert got[key].dtype == x.dtype, key
        assert torch.equal(got[key] == -torch.inf, x == -torch.inf), key
        pair = [y.masked_fill(x == -torch.inf, 0) for y in (got[key], x)]
        if key in ("distance", "spread"):  # only the square is resolved
            pair = [(y / ring_cases.N).square() for y in pair]
        assert not pair[1].isnan().any(), key
        close(*pair, eps=EPS[case.dtype])


@pytest.mark.slow
def test_a_subgroup_can_share_a_sequence(found: dict[int, dict[str, Any]]) -> None:
    want = ring_cases.CASES["causal"].run(lambda x: x)
    for key, x in want.items():
        close(found[3]["two of three"][key], x, eps=EPS[torch.float64])


@pytest.mark.slow
def test_a_killed_process_is_named_by_its_neighbours(found: dict[int, dict[str, Any]]) -> None:
    named = [re.findall(r"process of rank (\d)", said) for said in found[3]["lost"]]
    assert ["2"] in named, f"no process names the killed one: {found[3]['lost']}"
    assert all(named), "a process ended without a sentence"


# --- in this process --------------------------------------------------------------------------------------------------


def test_a_group_of_one_holds_the_whole_sequence(alone: dist.ProcessGroup) -> None:
    x = rand(2, 3, 10, 4)
    assert torch.equal(qkv.ring.shard(x, alone), x)
    assert torch.equal(qkv.ring.unshard(x, alone), x)
    assert qkv.ring.positions(10, alone).tolist() == list(range(10))
    case = ring_cases.CASES["sink"]
    want, got = case.run(lambda x: x), case.run(lambda x: qkv.ring.shard(x, alone), alone)
    for name, one in want.items():
        close(got[name], one)


@pytest.mark.parametrize("name", ["documents, causal", "ALiBi"])
@pytest.mark.usefixtures("untraced")  # shape checks cannot be traced
def test_blocks_can_use_flex(name: str, alone: dist.ProcessGroup) -> None:
    case = ring_cases.CASES[name]
    x, asked = case.tensors()[:3], case.composed(case.parameter())
    want, got = (qkv.ring.attend(*x, alone, mask=case.mask, kernel=one, **asked) for one in ("auto", "flex"))
    close(got, want)


def test_kernels_that_cannot_serve_all_blocks_and_objects_that_are_not_groups_are_refused(
    alone: dist.ProcessGroup,
) -> None:
    q, k, v = ring_cases.CASES["float32"].tensors()[:3]
    with refused("kernel", "float64"):
        qkv.ring.attend(q.double(), k.double(), v.double(), alone, kernel="native")
    wrong: Any = "world"
    with refused("group"):
        qkv.ring.attend(q, q, q, wrong)
    with refused("group"):
        qkv.ring.shard(q, wrong)


@pytest.mark.slow
def test_every_process_gets_the_profile_of_the_whole(found: dict[int, dict[str, Any]]) -> None:
    inputs = {"input_ids": ring_cases.IDS, "positions": torch.arange(80).expand(2, 80)}
    want = qkv.profile(ring_cases.Reader(), inputs, progress=False, map_tokens=0, map_bins=0)
    for got in found[2]["profiles"]:
        assert got.data["key_token"].values.tolist() == want.data["key_token"].values.tolist()
        assert got.data["module"].values.tolist() == ["layers.0", "layers.1"]
        assert set(want.data) - set(got.data) == {
            "query_norm", "key_norm", "value_norm", "cosine_first", "cosine_others", "first_key_angle",
            "key_directions", "first_contribution",
        }  # fmt: skip
        for name, values in got.data.items():
            pair = values, want.data[name]
            if name == "spread":  # only its square is resolved
                pair = pair[0] ** 2, pair[1] ** 2
            np.testing.assert_allclose(*pair, rtol=2e-4, atol=2e-3 if name == "spread" else 5e-5, err_msg=str(name))
        assert not got.residual
        assert got.attrs["probes"] == "not run: several processes share the sequence"


def test_of_a_shared_sequence_maps_and_own_statistics_are_refused(alone: dist.ProcessGroup) -> None:
    batch = {"input_ids": ring_cases.IDS, "positions": torch.arange(80).expand(2, 80)}
    with pytest.raises(qkv.InputError, match="shares its sequence with other processes"):
        calls_of(ring_cases.Reader(alone), batch)
    with pytest.raises(qkv.InputError, match="statistics has mine"):
        qkv.profile(ring_cases.Reader(alone), batch, statistics=[Mass("mine", masks.Window(2))], progress=False)


@pytest.mark.parametrize(
    ("name", "sizes"), [(x, n) for x in MASKS for n in ((8, 16), (16, 8)) if x != "none" and fits(x, *n)]
)
def test_a_mask_seen_from_a_piece_is_its_part_of_the_whole(name: str, sizes: tuple[int, int]) -> None:
    """Every pair of chunks: its visible pairs, also as FlexAttention asks for them."""
    (nq, nk), b, h = sizes, 2, 3
    mask = MASKS[name](nq, nk, b, h)
    assert mask is not None
    grid = Grid.of(nq, nk, b, h)
    whole = mask.dense(nq, nk, batch=b, heads=h).expand(b, h, nq, nk)
    for row in range(0, nq, nq // 4):
        for column in range(0, nk, nk // 4):
            rows, keys = slice(row, row + nq // 4), slice(column, column + nk // 4)
            seen, want = mask_of_part(mask, grid, Region(rows, keys)) or masks.Prefix(nk), whole[:, :, rows, keys]
            assert torch.equal(seen.dense(nq // 4, nk // 4, batch=b, heads=h).expand_as(want), want)
            here = Grid.of(nq // 4, nk // 4, b, h)
            pair = torch.meshgrid(*map(torch.arange, want.shape), indexing="ij")
            assert torch.equal(grid_mod(seen, here)(*pair).expand_as(want), want)

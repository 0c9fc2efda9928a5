"""The worker's side of qkv-vllm, in an engine that a test plays: pages, chunks, steps of decoding, preemption, ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from qkv.masks import Causal
from qkv.scores import Dot
from qkv_vllm import profile
from qkv_vllm.recorder import WAITING, Layer, Recorder
from qkv_vllm.settings import Settings

HEADS, KV_HEADS, D, SIZE, LAYERS = 4, 2, 8, 4, 2
SCALE = 0.7


class Engine:
    """Plays vLLM: gives pages to requests, and computes the steps of a schedule."""

    def __init__(self, lengths: dict[str, int], settings: Settings | None = None, *, on_cpu: bool = False) -> None:
        self.tokens = {name: torch.randn(3, LAYERS, n, HEADS, D) for name, n in lengths.items()}
        self.caches = [torch.randn(200, KV_HEADS, SIZE, 2 * D) for _ in range(LAYERS)]
        self.tables, self.computed = dict[str, list[int]](), dict[str, int]()
        self.free, self.on_cpu = torch.randperm(200).tolist(), on_cpu
        self.runner = SimpleNamespace(
            model=torch.nn.Linear(2, 2), input_batch=None,
            model_config=SimpleNamespace(served_model_name="played", dtype=torch.float32),
        )  # fmt: skip
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN" if on_cpu else "FLASH_ATTN")
        of_all: dict[str, Any] = {
            "impl": SimpleNamespace(scale=SCALE), "head_size": D, "attn_backend": backend, "sliding_window": None,
            "attn_type": "decoder", "use_mm_prefix": False,
        }  # fmt: skip
        modules = [SimpleNamespace(kv_cache=cache, **of_all) for cache in self.caches]
        layers = [Layer.of(f"layers.{i}.attn", i, module) for i, module in enumerate(modules)]
        self.recorder = Recorder(self.runner, settings or Settings(), layers, "0")

    def qkv(self, name: str, layer: int, at: slice) -> list[Tensor]:
        q, k, v = self.tokens[name][:, layer, at]
        return [q, k[:, :KV_HEADS], v[:, :KV_HEADS]]

    def step(self, finished: tuple[str, ...] = (), ask: dict[str, Any] | None = None, **counts: int) -> None:
        """Compute so many tokens of each request."""
        new = [
            SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=ask or {"qkv": "profile"}))
            for name in counts if name not in self.computed
        ]  # fmt: skip
        for name, n in counts.items():
            stop = self.computed.setdefault(name, 0) + n
            table = self.tables.setdefault(name, [])
            table += [self.free.pop() for _ in range(-(-stop // SIZE) - len(table))]
        scheduled = SimpleNamespace(finished_req_ids={*finished}, scheduled_new_reqs=new, num_scheduled_tokens=counts)
        most = max(len(x) for x in self.tables.values())
        metadata = SimpleNamespace(
            block_table=torch.tensor([self.tables[name] + [0] * (most - len(self.tables[name])) for name in counts])
        )
        self.runner.input_batch = SimpleNamespace(
            req_ids=[*counts], num_computed_tokens_cpu=np.array([self.computed[name] for name in counts])
        )
        with self.recorder.following(scheduled):
            for layer, cache in zip(self.recorder.layers, self.caches, strict=True):
                parts = []
                for name, n in counts.items():
                    start = self.computed[name]
                    parts.append(self.qkv(name, layer.number, slice(start, start + n)))
                    self._write(name, start, parts[-1], cache)
                q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
                self.recorder.attended(layer, q, k, v, cache, metadata)
        for name, n in counts.items():
            self.computed[name] += n

    def _write(self, name: str, start: int, new: list[Tensor], cache: Tensor) -> None:
        for j, (key, value) in enumerate(zip(new[1], new[2], strict=True), start=start):
            page = cache[self.tables[name][j // SIZE]]
            if self.on_cpu:
                page.view(KV_HEADS, 2, D, SIZE)[:, 0, :, j % SIZE] = key
                page.view(KV_HEADS, 2, SIZE, D)[:, 1, j % SIZE] = value
            else:
                page[:, j % SIZE] = torch.cat([key, value], 1)

    def preempt(self, name: str) -> None:
        """Take the pages of a request, and let others write into them."""
        for cache in self.caches:
            cache[self.tables[name]] = torch.nan
        self.free += self.tables.pop(name)
        self.computed[name] = 0

    def check(self, name: str, rows: int, prompt: int = 1) -> qkv.Profile:
        """Take the answer of a request, which must equal `qkv.measure` of its first tokens."""
        answer = self.recorder.take(name, list(range(rows + 1)), prompt)
        assert "error" not in answer, answer
        found = profile({"kv_transfer_params": {"qkv": answer}})
        for layer in range(LAYERS):
            q, k, _ = (x.transpose(0, 1)[None] for x in self.qkv(name, layer, slice(0, rows)))
            want = qkv.measure(q, k, mask=Causal(), score=Dot(SCALE))
            for field in ("entropy", "sink", "received", "previous", "lse", "effective_keys", "max_logit"):
                got = torch.from_numpy(found.data[field].values[:, layer])
                torch.testing.assert_close(got, getattr(want, field), rtol=1e-5, atol=1e-5, msg=field)
        return found


@pytest.mark.parametrize("on_cpu", [False, True])
def test_requests_that_are_computed_in_chunks_and_steps_equal_one_call(on_cpu: bool) -> None:
    engine = Engine({"a": 50, "b": 7, "c": 50}, on_cpu=on_cpu)
    engine.step(a=13)
    engine.step(a=9, b=5)
    for _ in range(2):
        engine.step(c=3, b=1, a=1)
    engine.check("b", 7)
    engine.step(finished=("b",), a=20, c=2)
    engine.check("a", 44)
    engine.check("c", 8)
    assert not engine.recorder.requests


def test_many_steps_are_measured_in_parts_and_a_step_after_the_end_has_no_row() -> None:
    n = 2 * WAITING + 9
    engine = Engine({"a": n})
    engine.step(a=4)
    for _ in range(n - 4):
        engine.step(a=1)
        assert all(len(rows.waiting) <= WAITING for rows in engine.recorder.requests["a"].layers.values())
    engine.check("a", n - 1)


def test_a_step_after_the_end_may_fill_the_queue() -> None:
    n = 4 + WAITING + 1
    engine = Engine({"a": n})
    engine.step(a=4)
    for _ in range(n - 4):
        engine.step(a=1)
    engine.check("a", n - 1)


def test_a_preempted_request_is_measured_again_and_one_that_rests_before_its_pages_go() -> None:
    engine = Engine({"a": 30, "b": 30, "c": 30})
    engine.step(a=10, b=8)
    engine.step(a=1, b=1)
    engine.step(a=1, b=1)
    engine.step(a=1)  # b rests
    engine.preempt("b")
    engine.step(a=1, c=12)
    engine.step(a=1, b=16)
    engine.step(a=1, b=1, c=1)
    engine.check("a", 16)
    engine.check("b", 17)
    engine.check("c", 13)


def test_a_request_that_ends_while_it_is_preempted_was_measured_before() -> None:
    engine = Engine({"a": 30, "b": 30})
    engine.step(a=10, b=8)
    engine.step(a=1, b=1)
    engine.step(a=1)
    engine.preempt("b")
    engine.step(a=1)
    engine.check("b", 9)


def test_passages_are_shares_of_each_row() -> None:
    engine = Engine({"a": 20})
    engine.step(ask={"qkv": "profile", "qkv_passages": [2, 5, 9, 20]}, a=12)
    for _ in range(8):
        engine.step(a=1)
    found = engine.check("a", 20).data
    q, k, _ = (x.transpose(0, 1)[None] for x in engine.qkv("a", 1, slice(0, 20)))
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    weights = (q @ k.repeat_interleave(2, 1).mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
    np.testing.assert_allclose(found.passage_1.values[:, 1], weights[..., 2:5].sum(-1), atol=1e-5)
    np.testing.assert_allclose(found.passage_2.values[:, 1], weights[..., 9:20].sum(-1), atol=1e-5)


def test_weights_of_short_texts_are_kept_where_a_server_allows_them() -> None:
    engine = Engine({"a": 12, "b": 30}, Settings(weights=16))
    engine.step(a=9, b=9)
    for _ in range(3):
        engine.step(a=1, b=7)
    found = engine.check("a", 12).data
    np.testing.assert_allclose(found.weights.values.sum(-2), found.received.values, atol=1e-5)
    assert "weights" not in engine.check("b", 30).data


def test_a_failure_is_the_answer_of_its_request_alone() -> None:
    engine = Engine({"a": 20, "b": 20})
    engine.step(a=8, b=8)
    engine.computed["a"] = 6  # as if a draft of the engine were rejected
    engine.step(a=1, b=1)
    assert "computes token 6 after 8" in engine.recorder.take("a", list(range(8)), 1)["error"]
    engine.check("b", 9)
    assert "has ended the request" in engine.recorder.take("a", [1, 2], 1)["error"]


def test_an_unknown_layout_of_the_cache_is_refused() -> None:
    engine = Engine({"a": 20})
    engine.on_cpu = True
    engine.step(a=8)
    assert "has a layout that qkv-vllm does not know" in engine.recorder.take("a", list(range(9)), 1)["error"]


def test_cancelled_requests_leave_nothing() -> None:
    engine = Engine({str(i): 9 for i in range(6)})
    for i in range(6):
        engine.step(finished=(str(i - 1),), **{str(i): 5})
    assert [*engine.recorder.requests] == ["5"]

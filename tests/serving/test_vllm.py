"""qkv-vllm inside vLLM, where it is installed: `make test-vllm`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import qkv

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own: make test-vllm")
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that a test sees what the engine keeps
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from qkv_vllm import profile
from qkv_vllm.plugin import ASKED, RECORDER, register

ASK = {"qkv": "profile"}
ENGINES: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 48, "enable_prefix_caching": False},
    "shared prefixes": {"max_num_batched_tokens": 4096, "enable_prefix_caching": True},
    "both, and few pages": {"max_num_batched_tokens": 48, "enable_prefix_caching": True, "num_gpu_blocks_override": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in a folder: that of QKV_VLLM_MODEL, or a random one of two layers."""
    if name := os.environ.get("QKV_VLLM_MODEL"):
        return name
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    register()
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, skip_tokenizer_init=True, block_size=32,
        additional_config={"qkv": {"weights": 16}}, **ENGINES[request.param],
    )  # fmt: skip
    yield engine
    del engine
    gc.collect()


def core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def kept(llm: LLM) -> int:
    """How many requests the engine and its worker hold statistics of."""
    worker = core(llm).model_executor.driver_worker.worker
    return len(getattr(worker.model_runner, RECORDER).requests) + len(vars(core(llm)).get(ASKED, {}))


def prompts(lengths: list[int], shared: int) -> list[dict[str, list[int]]]:
    random = np.random.default_rng(0)
    prefix = random.integers(3, 96, shared).tolist()
    return [{"prompt_token_ids": prefix[: n // 2] + random.integers(3, 96, n - n // 2).tolist()} for n in lengths]


def run(llm: LLM, texts: Any, params: Any) -> list[Any]:
    found: list[Any] = llm.generate(texts, params, use_tqdm=False)
    return found


def greedy(max_tokens: int, extra: dict[str, Any] | None = ASK, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra, **options
    )


def compare(output: Any, model: Any) -> None:
    """The profile of an answer equals that of the same tokens in one forward of the model in transformers."""
    ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])[:, :-1]
    got = profile(output).data
    want = qkv.profile(model, ids, probe=False, progress=False, map_tokens=16).data
    assert got.attrs == want.attrs
    assert {"entropy", "sink", "received", "local", "first_contribution", "lse"} <= {*got} & {*want}
    for name in {*got} & {*want}:
        x, y = got[name].values, want[name].values
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4, err_msg=str(name))


def test_twenty_requests_at_once_equal_profiles_of_their_tokens(
    llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, preempted = core(llm).scheduler, list[str]()
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    lengths = [3, 150, 40, 90, 33, 7, 64, 200, 12, 31, 120, 5, 75, 160, 50, 32, 96, 20, 110, 2]
    texts = prompts(lengths, 128)
    found = run(llm, texts, [greedy(4 + 9 * (i % 9), ASK if i % 4 else None) for i in range(20)])
    for i, output in enumerate(found):
        if i % 4:
            compare(output, model)
        else:
            assert output.kv_transfer_params is None
    again = run(llm, texts[:4], greedy(3))  # whose prefixes are cached
    for output in again:
        compare(output, model)
    assert kept(llm) == 0
    few = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks_override is not None
    assert bool(preempted) == few


def test_a_wrong_request_is_an_error_of_that_request_alone(llm: LLM) -> None:
    (text,) = prompts([30], 0)
    for extra, match in (({"qkv": "../../x"}, "expected 'profile'"), (ASK | {"qkv_passages": [0, 31]}, "ends at 31")):
        with pytest.raises(VLLMValidationError, match=match):
            run(llm, [text], greedy(2, extra))
    assert "passage_1" in profile(run(llm, [text], greedy(2, ASK | {"qkv_passages": [0, 9]}))[0]).data
    assert kept(llm) == 0


def test_five_hundred_requests_some_cancelled_leave_nothing(llm: LLM) -> None:
    engine, ended, params = llm.llm_engine, 0, greedy(4)
    texts = prompts([4 + i % 29 for i in range(500)], 16)
    for start in range(0, 500, 50):
        names = [str(start + i) for i in range(50)]
        for name, text in zip(names, texts[start : start + 50], strict=True):
            engine.add_request(name, text, params)
        ended += len([x for x in engine.step() if x.finished])
        engine.abort_request(names[::7])
        while engine.has_unfinished_requests():
            done = [x for x in engine.step() if x.finished]
            ended += len(done)
            assert all("profile" in x.kv_transfer_params["qkv"] for x in done if x.outputs[0].finish_reason == "length")
    engine.step()
    assert ended >= 420
    assert kept(llm) == 0

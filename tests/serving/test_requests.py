"""What a server with qkv-vllm allows and refuses, and answers that are damaged."""

from __future__ import annotations

import base64
import doctest
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import refusals, refused
from qkv_vllm import profile, settings
from qkv_vllm.plugin import check_server, settings_of
from qkv_vllm.settings import Asked, Settings, check_request


def ask(extra: dict[str, Any] | None = None, limits: Settings | None = Settings(), **changed: Any) -> None:  # noqa: B008
    """A request of 40 tokens and up to 60 more, to a model of 270 heads."""
    asked = Asked.of({"qkv": "profile"} | (extra or {}))
    assert asked is not None
    params = SimpleNamespace(n=changed.get("n", 1), stop=changed.get("stop", []))
    check_request(asked, limits, prompt=changed.get("prompt", 40), most=60, heads=270, params=params)


test_requests_that_a_server_does_not_allow_are_refused = refusals([
    ("qkv", lambda: ask({"qkv": "/etc/passwd"}), "expected 'profile'"),
    ("qkv", lambda: Asked.of({"qkv_passages": [0, 3]}), "None, expected 'profile'"),
    ("qkv", lambda: ask(limits=None), "start it with --additional-config"),
    ("qkv", lambda: ask(limits=Settings(tokens=99)), "max_tokens 60 are 100, expected at most 99"),
    ("qkv", lambda: ask(limits=Settings(bytes=10**6)), "may take 2,160,000 bytes, expected at most 1,000,000"),
    ("qkv", lambda: ask(prompt=0), "given as embeddings"),
    ("n", lambda: ask(n=2), "expected 1"),
    ("stop", lambda: ask(stop=["."]), "expected stop_token_ids"),
    ("qkv_passages", lambda: ask({"qkv_passages": [0, 41]}), "ends at 41, expected at most 40"),
    ("qkv_passages", lambda: ask({"qkv_passages": [0, 1] * 33}), "33 passages, expected at most 32"),
    ("qkv_passages", lambda: ask({"qkv_passages": [5, 5]}), "tokens 5 to 5"),
    ("qkv_passages", lambda: ask({"qkv_passages": [5]}), "expected the first token and the end of each"),
    ("qkv_passages", lambda: ask({"qkv_passages": "0 4"}), "expected the first token and the end of each"),
    ("additional_config", lambda: Settings.of({"token": 1}), "'token' for qkv, expected bytes, passages"),
    ("additional_config", lambda: Settings.of({"tokens": True}), "expected a whole number"),
    ("additional_config", lambda: Settings.of(True), "expected a mapping"),
])  # fmt: skip


def server(**changed: Any) -> SimpleNamespace:
    """The configuration of a server."""
    parts: dict[str, Any] = {
        "parallel_config": {f"{x}_parallel_size": 1 for x in ("tensor", "pipeline", "data", "prefill_context")},
        "model_config": {"runner_type": "generate", "is_encoder_decoder": False, "use_mla": False, "model": "m"},
        "cache_config": {"cache_dtype": "auto"}, "compilation_config": {"cudagraph_mode": None},
    }  # fmt: skip
    one: dict[str, Any] = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": False}
    for name, values in parts.items():
        one[name] = SimpleNamespace(**{key: changed.get(key, value) for key, value in values.items()})
    return SimpleNamespace(**{name: changed.get(name, value) for name, value in one.items()})


FULL = SimpleNamespace(name="FULL", has_full_cudagraphs=lambda: True)
test_servers_that_cannot_be_measured_do_not_start = refusals([
    ("tensor_parallel_size", lambda: check_server(server(tensor_parallel_size=2)), "is 2"),
    ("speculative_config", lambda: check_server(server(speculative_config="ngram")), "expected none"),
    ("kv_cache_dtype", lambda: check_server(server(cache_dtype="fp8")), "expected 'auto'"),
    ("vLLM", lambda: check_server(server(use_v2_model_runner=True)), "VLLM_USE_V2_MODEL_RUNNER=0"),
    ("cudagraph_mode", lambda: check_server(server(cudagraph_mode=FULL)), "expected 'PIECEWISE'"),
    ("m", lambda: check_server(server(use_mla=True)), "no decoder with softmax attention"),
    ("kv_transfer_config", lambda: check_server(server(kv_transfer_config="x")), "expected none"),
])  # fmt: skip


def test_examples_of_docstrings_run() -> None:
    assert doctest.testmod(settings) == (0, 2)


def test_a_server_is_off_by_default() -> None:
    check_server(server())
    assert settings_of(SimpleNamespace(additional_config={})) is None
    assert settings_of(SimpleNamespace(additional_config={"qkv": {}})) == Settings()
    assert Asked.of(None) is None
    assert Asked.of({"kv_transfer_params": {}}) is None


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", base64.b64encode(b"\x02\0\0\0\0\0\0\0{}").decode()])
def test_damaged_answers_are_refused(text: str) -> None:
    with refused("answer", "statistics that cannot be read"):
        profile({"kv_transfer_params": {"qkv": {"profile": text}}})


def test_an_answer_without_statistics_says_how_to_ask() -> None:
    with refused("answer", "extra_args={'qkv': 'profile'}"):
        profile(SimpleNamespace(kv_transfer_params=None))
    with refused("answer", "the engine"):
        profile({"kv_transfer_params": {"qkv": {"error": "the engine has ended"}}})

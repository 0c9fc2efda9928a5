"""The entry point of vLLM's general plugins: wraps the classes through which requests, steps and answers pass.

vLLM loads plugins in every process: the one that receives requests, the engine's, and its workers. Where the server has
not turned statistics on, and for requests that do not ask, the wrapped methods do what they did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from qkv.errors import InputError, first_line
from qkv_vllm.settings import ASK, Asked, Settings, check_request

RECORDER = "_qkv_recorder"
ASKED = "_qkv_asked"


def register() -> None:
    """Wrap vLLM's classes, once in each process."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "_qkv_wrapped"):
        return
    GPUModelRunner._qkv_wrapped = True
    _wrap(InputProcessor, "__init__", _starts)
    _wrap(InputProcessor, "process_inputs", _receives)
    _wrap(GPUModelRunner, "initialize_kv_cache", _has_cache)
    _wrap(GPUModelRunner, "execute_model", _steps)
    _wrap(EngineCore, "add_request", _adds)
    for step in ("step", "step_with_batch_queue"):
        _wrap(EngineCore, step, _answers)


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    inner = getattr(cls, name)

    @functools.wraps(inner)
    def outer(self: Any, *args: Any, **named: Any) -> Any:
        return around(functools.partial(inner, self), self, *args, **named)

    setattr(cls, name, outer)


def settings_of(config: Any) -> Settings | None:
    """The settings of a server by its `VllmConfig`; None if it has not turned statistics on."""
    given = config.additional_config
    return Settings.of(given[ASK]) if isinstance(given, dict) and ASK in given else None


def check_server(config: Any) -> None:
    """Refuse to start a server with settings under which statistics cannot be measured.

    Raises:
        InputError: in one sentence, which says what to change.
    """
    parallel, model = config.parallel_config, config.model_config
    for kind in ("tensor", "pipeline", "data", "prefill_context"):
        if (n := getattr(parallel, name := f"{kind}_parallel_size")) != 1:
            raise InputError(f"{name} is {n} with {ASK} in additional_config, expected 1")
    if config.speculative_config is not None:
        raise InputError(f"speculative_config is set with {ASK} in additional_config, expected none")
    if config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise InputError(f"kv_cache_dtype is {config.cache_config.cache_dtype!r}, expected 'auto': keys must be exact")
    if config.use_v2_model_runner:
        raise InputError("vLLM uses its second model runner; expected VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        raise InputError(f"cudagraph_mode is {mode.name}, in which attention is not called; expected 'PIECEWISE'")
    if model.runner_type != "generate" or model.is_encoder_decoder or model.use_mla:
        raise InputError(f"{model.model} is no decoder with softmax attention, which qkv-vllm measures; expected one")
    if config.kv_transfer_config is not None:
        raise InputError(f"kv_transfer_config is set with {ASK} in additional_config, expected none")


def _starts(inner: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **named: Any) -> None:
    if settings_of(vllm_config) is not None:
        check_server(vllm_config)
    inner(vllm_config, *args, **named)


def _receives(inner: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Refuse a request that asks wrongly; vLLM answers it with an error. One that asks reads no cached prefix."""
    from vllm.exceptions import VLLMValidationError

    request = inner(*args, **named)
    params = request.sampling_params
    try:
        asked = None if params is None else Asked.of(params.extra_args)
        if asked is None:
            return request
        config = self.vllm_config
        model, parallel = config.model_config, config.parallel_config
        heads = model.get_num_layers(parallel) * model.get_num_attention_heads(parallel)
        prompt = 0 if request.prompt_embeds is not None else len(request.prompt_token_ids or ())
        most = params.max_tokens or model.max_model_len - prompt
        check_request(asked, settings_of(config), prompt=prompt, most=most, heads=heads, params=params)
        if request.resumable:
            raise InputError(f"{ASK}: the request streams its input, expected a whole prompt")
    except InputError as error:  # an error of the request: over HTTP, 400 with the sentence
        raise VLLMValidationError(str(error), parameter=error.argument) from error
    params.skip_reading_prefix_cache = True  # else the queries of the prefix are not computed
    return request


def _has_cache(inner: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """A worker has its cache: follow the attention of its layers."""
    found = inner(*args, **named)
    settings = settings_of(self.vllm_config)
    if settings is None or hasattr(self, RECORDER):
        return found
    from vllm import __version__
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    from qkv_vllm.recorder import Layer, Recorder

    layers = []
    for name, module in self.compilation_config.static_forward_context.items():
        if type(module) is not Attention or module.kv_sharing_target_layer_name is not None:
            raise InputError(f"{name} is {type(module).__name__}, expected layers of attention with their own keys")
        layers.append(Layer.of(name, extract_layer_index(name), module))
    recorder = Recorder(self, settings, layers, __version__)
    for layer in layers:
        layer.module.impl.forward = _followed(layer.module.impl.forward, recorder, layer)
    setattr(self, RECORDER, recorder)
    return found


def _followed(inner: Callable[..., Any], recorder: Any, layer: Any) -> Callable[..., Any]:
    def forward(
        module: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *args: Any, **named: Any
    ) -> Any:
        out = inner(module, query, key, value, cache, metadata, *args, **named)
        if recorder.requests and recorder.scheduled is not None and metadata is not None:
            recorder.attended(layer, query, key, value, cache, metadata)
        return out

    return forward


def _steps(inner: Callable[..., Any], self: Any, scheduled: Any, *args: Any, **named: Any) -> Any:
    recorder = getattr(self, RECORDER, None)
    if recorder is None:
        return inner(scheduled, *args, **named)
    with recorder.following(scheduled):
        return inner(scheduled, *args, **named)


def _adds(inner: Callable[..., None], self: Any, request: Any, *args: Any, **named: Any) -> None:
    inner(request, *args, **named)
    params = request.sampling_params
    if params is not None and ASK in (params.extra_args or ()):
        vars(self).setdefault(ASKED, {})[request.request_id] = request


def _answers(inner: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Give the answers of requests that have ended in this step their statistics, before their pages are used again."""
    outputs, executed = inner(*args, **named)
    asked = vars(self).get(ASKED)
    if not asked:
        return outputs, executed
    for of_client in (outputs or {}).values():
        for output in of_client.outputs:
            if output.finish_reason is None or (request := asked.pop(output.request_id, None)) is None:
                continue
            try:
                ids = list(request.all_token_ids)
                args = output.request_id, ids, request.num_prompt_tokens
                (answer,) = self.model_executor.collective_rpc(take, args=args)
            except Exception as error:  # of this request alone
                answer = {"error": first_line(error)}
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), ASK: answer}
    for name in [name for name, request in asked.items() if request.is_finished()]:
        del asked[name]  # it was cancelled
    return outputs, executed


def take(worker: Any, name: str, ids: list[int], prompt: int) -> dict[str, Any]:
    """In a worker: the statistics of a request that has ended."""
    worker = getattr(worker, "worker", worker)  # of a wrapper
    found: dict[str, Any] = getattr(worker.model_runner, RECORDER).take(name, ids, prompt)
    return found

"""The model of a study, its texts, and an untrained twin."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models import DecoderLM, checkpoint
from qkv.normalizers import Softmax
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import Special, batches, positions, special_ids, tokens_of, vocabulary
from qkv.profiler.capture.record import WEIGHTS_ONLY, ObservedCall
from qkv.profiler.capture.residual import attention_modules, layer_around, observe_residual


def untrained(model: nn.Module, seed: int) -> nn.Module:
    """A new model of the same class and configuration, initialised as its class does before training.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2))
    >>> one, other = untrained(model, seed=1), untrained(model, seed=2)
    >>> one.config == model.config, torch.equal(one.embedding.weight, other.embedding.weight)
    (True, False)
    """
    like = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, DecoderLM):
            made: nn.Module = DecoderLM(model.config)
        else:
            made = type(model)(copy.deepcopy(model.config))
    return made.to(like).eval()


SHORT, LONG = 64, 512
"""The lengths at which a model is measured, in tokens: T of Gu et al. 2025, and the whole text."""
CHOICE, JUDGED = 4, 12
"""The number of texts that choose the sink heads, and of texts on which they are measured."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Windows of tokens without special tokens, and the special tokens around them.

    >>> texts = Texts(torch.arange(10).view(2, 5), Special((101,), (102,)), torch.arange(10))
    >>> texts.of(4)[0].tolist(), texts.without_special(4)[0].tolist()
    ([101, 0, 1, 102], [0, 1, 2, 102])
    """

    windows: Int[Tensor, "t m"]
    special: Special
    ordinary: Int[Tensor, " v"]
    """The ids of all tokens that are not special."""

    def of(self, n: int) -> Int[Tensor, "t n"]:
        """The texts at a length of n tokens."""
        return self._within(self.windows, self.special.before, n)

    def without_special(self, n: int) -> Int[Tensor, "t n"]:
        """The same without special tokens at the start, so that the text's own first token is first."""
        return self._within(self.windows, (), n)

    def random(self, n: int, generator: torch.Generator) -> Int[Tensor, "t n"]:
        """The same with random ordinary tokens in place of all but the first token, and the special ones at the end."""
        ids = self.of(n)
        last = n - len(self.special.after)
        ids[:, 1:last] = self.drawn((len(ids), last - 1), generator)
        return ids

    def drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "..."]:
        """Random ordinary tokens."""
        return self.ordinary[torch.randint(len(self.ordinary), shape, generator=generator)]

    def _within(self, windows: Tensor, before: tuple[int, ...], n: int) -> Tensor:
        inner = n - len(before) - len(self.special.after)
        around = (torch.tensor(x, dtype=torch.long).expand(len(windows), -1) for x in (before, self.special.after))
        start, end = around
        return torch.cat([start, windows[:, :inner], end], 1)


def prepared(model: nn.Module, texts: Sequence[str] | Int[Tensor, "t n"], tokenizer: Any) -> Texts:
    """Cut texts into 16 windows of at most 512 tokens: one of each text first, then a second one, and so on.

    The windows are half as long, or a quarter, if the model reads fewer tokens, or there is too little text.
    """
    special = Special() if isinstance(texts, Tensor) or tokenizer is None else Special.of(tokenizer)
    limit, size = context(model), vocabulary(model)
    if limit < SHORT or size is None:
        raise InputError(
            f"model {type(model).__name__} reads {limit} tokens of a vocabulary of {size}, expected at least {SHORT} "
            "tokens of a known vocabulary"
        )
    ids = list(texts) if isinstance(texts, Tensor) else [torch.tensor(_tokens(tokenizer, text)) for text in texts]
    length = min(LONG, limit)
    while len(windows := list(_windows(ids, length))) < CHOICE + JUDGED:
        if length == SHORT:
            raise InputError(
                f"texts has {len(windows)} windows of {SHORT} tokens, expected {CHOICE + JUDGED}: more or longer texts"
            )
        length = max(SHORT, length // 2)
    known = special_ids(model, tokenizer)
    ordinary = torch.tensor([i for i in range(size) if i not in known])
    return Texts(torch.stack(windows[: CHOICE + JUDGED]), special, ordinary)


def default_texts(name: str) -> list[str]:
    """Texts for a model by its name: for qkv-mini the files of its corpus that were held out from its training, and
    for all others chapters of the Python language reference, which come with Python (`pydoc_data.topics`)."""
    if name == "qkv-mini":
        from qkv.profiler import corpora
        from qkv_lab import settings
        from qkv_lab.tasks.language import Language
        from qkv_lab.tokens import split

        folder = checkpoint.folder_of(name)
        assert folder is not None
        task, _ = settings.from_toml(folder / settings.RUN)
        assert isinstance(task, Language)
        return split(corpora.load(task.corpus).texts)[1]
    from pydoc_data.topics import topics

    return [topics[topic] for topic in sorted(topics)]


def context(model: nn.Module) -> int:
    """The number of tokens that a model reads at most: that of its configuration, or `LONG`."""
    config: Any = getattr(model, "config", None)
    return positions(model) or getattr(config, "context", None) or LONG


def _tokens(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        raise InputError("texts is text, but the model has no tokenizer; expected token ids (texts, length)")
    return tokens_of(tokenizer, text)


def _windows(ids: Sequence[Int[Tensor, " n"]], length: int) -> Iterator[Int[Tensor, " length"]]:
    """Consecutive windows: the first one of each text, then the second ones, and so on."""
    for start in range(0, max(map(len, ids), default=0), length):
        yield from (x[start : start + length] for x in ids if len(x) >= start + length)


@dataclass(frozen=True, eq=False)
class Recording:
    """One forward: the residual stream, and the attention call of each layer."""

    states: list[Float[Tensor, "b n d"]]
    """By depth: 0 is the input of the first block, i is the output of the i-th block."""
    calls: list[ObservedCall]


Outputs = dict[nn.Module, Any]
"""What each block gives."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in which each block of one stack has one softmax self-attention, and reads the output of the last one."""

    model: nn.Module
    blocks: list[nn.Module]
    modules: list[str]
    """The names of the attention modules."""
    causal: bool

    @staticmethod
    def of(model: nn.Module, ids: Int[Tensor, "b n"]) -> Subject:
        """Find the blocks of a model, and check them with one forward on these tokens."""
        name = type(model).__name__
        calls = self_attention(model, ids)
        attentions = {*attention_modules(model), *(call.module for call in calls)}
        layers = [layer_around(call.module, attentions, model) or "" for call in calls]
        stacks = {layer.rpartition(".")[0] for layer in layers}
        stack = stacks.pop() if len(stacks) == 1 else ""
        blocks = [b for n, b in model.get_submodule(stack).named_children() if n.isdigit()] if stack else []
        if [id(model.get_submodule(layer)) for layer in layers] != [id(block) for block in blocks]:
            raise InputError(
                f"model {name} has attention in {', '.join(dict.fromkeys(layers)) or 'no layers'}; expected one stack "
                "of blocks with one attention each, so that its residual stream can be followed"
            )
        subject = Subject(model, blocks, [call.module for call in calls], calls[0].causal)
        subject._check_stream(ids)
        return subject

    def states(self, ids: Int[Tensor, "b n"]) -> list[Float[Tensor, "b n d"]]:
        """The residual stream by depth, as the model computes it now, with any edits that are active."""
        (batch,) = batches(self.model, ids, None, None)
        last = self.blocks[-1]
        with self._recorded() as states, torch.no_grad(), suppress(_Done), last.register_forward_hook(_Done.now):
            self.model(**batch)
        return states

    @contextmanager
    def keeping(self) -> Iterator[Outputs]:
        """Inside, what every block gave last is kept."""
        kept: Outputs = {}
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_hook(lambda block, _, out: kept.update({block: out})))
            yield kept

    def record(self, ids: Int[Tensor, "b n"]) -> Recording:
        """The residual stream and the attention calls."""
        with self._recorded() as states:
            calls = self_attention(self.model, ids)
        return Recording(states, calls)

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """Inside, the input of the first block and the output of every block are recorded."""
        states: list[Tensor] = []
        with observe_residual(self.model, self.modules, lambda _, __, hidden: states.append(hidden)):
            yield states

    def _check_stream(self, ids: Tensor) -> None:
        inputs: list[Tensor] = []
        with ExitStack() as stack:
            for block in self.blocks:
                hook = block.register_forward_pre_hook(
                    lambda _, args, named: inputs.append(hidden_of(args, named)), with_kwargs=True
                )
                stack.callback(hook.remove)
            states = self.states(ids)
        once = len(inputs) == len(states) - 1 == len(self.blocks)
        if not once or not all(torch.equal(a, b) for a, b in zip(states, inputs, strict=False)):
            raise InputError(
                f"model {type(self.model).__name__} changes the residual stream between its blocks, or runs a block "
                "more than once; expected blocks that each read the output of the one before"
            )


class _Done(Exception):  # noqa: N818  (not an error)
    """The last block has run; the output head would take as long as ten blocks."""

    @classmethod
    def now(cls, *_: Any) -> None:
        raise cls


def self_attention(model: nn.Module, ids: Int[Tensor, "b n"]) -> list[ObservedCall]:
    """The attention call of every layer on these tokens."""
    name = type(model).__name__
    if not isinstance(model, DecoderLM):
        _check_hugging_face(model)
    (batch,) = batches(model, ids, None, None)
    calls = calls_of(model, batch)
    for call in calls:
        reason = _unsupported_reason(call, ids.shape[1])
        if reason:
            raise InputError(f"model {name} {reason} in {call.module}, where sinks cannot be measured")
    return calls


def _check_hugging_face(model: nn.Module) -> None:
    name, base = type(model).__name__, getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        raise InputError(f"model is {name}, expected qkv's DecoderLM or a decoder or encoder of Hugging Face")
    config: Any = model.config
    if config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise InputError(f"model {name} does not read one sequence of tokens, expected a decoder or an encoder of text")


def _unsupported_reason(observed: ObservedCall, n: int) -> str | None:
    call = observed.call
    if observed.group != "self":
        return f"has attention of the kind {observed.group!r}, but the criteria are for self-attention,"
    if observed.source in WEIGHTS_ONLY:
        return "forms its weights itself, so that its queries, keys and values are not known,"
    if not isinstance(call.normalizer, Softmax):
        return f"attends by {type(call.normalizer).__name__}, but the criteria are for weights of a softmax,"
    if call.pairwise is not None or call.values is not None:
        return "has scores or values that depend on pairs of tokens, so that a key has no angle or value of its own,"
    if (call.q.shape[2], call.k.shape[2]) != (n, n):
        return f"attends with {call.q.shape[2]} queries to {call.k.shape[2]} keys in a text of {n} tokens,"
    return None


def hidden_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Float[Tensor, "b n d"]:
    """The hidden states among the arguments of a block."""
    found = args[0] if args else named.get("hidden_states")
    if not isinstance(found, Tensor):
        raise InputError("model has a block that is not called with hidden states, expected them as its first argument")
    return found


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and has no gradients."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True

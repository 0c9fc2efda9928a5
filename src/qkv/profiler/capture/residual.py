"""The residual stream while a model runs: the hidden states between layers, one at a time and never a list of them.

Layers are found from the names of the modules that attend, so it works for any model: "h.0.attn" is in layer "h.0" of
the stack "h", "encoder.block.2.layer.0.SelfAttention" in layer "encoder.block.2" of the stack "encoder.block".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv._engine.call import at_least_float32
from qkv.errors import InputError
from qkv.huggingface.attention import routes

if TYPE_CHECKING:
    import xarray as xr

MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, arXiv:2402.17762, §2
LARGEST = 3  # activations of each hidden state that are kept with their places

Look = Callable[[str, int, Tensor], None]

_ATTENDS = re.compile("attention|attn", re.IGNORECASE)
_DECODER = re.compile(r"(?:^|\.)decoder(?:\.|$)")

MEANING = {
    "norm": ("1", "L2 norm of the hidden state of each token"),
    "median": (
        "1",
        "median |x| over all tokens and dimensions (of an even number, the lower of the two in the middle)",
    ),
    "massive": (
        "activations",
        f"how many |x| > {MASSIVE:g} and ≥ {TIMES_MEDIAN:g} × the median (Sun et al. 2024, arXiv:2402.17762, §2)",
    ),
    "ratio": ("1", "the largest |x| divided by the median"),
    "largest": ("1", "the largest |x|, in descending order"),
    "largest_token": ("position", "position of the token whose activation it is, in its text; −1 if there is none"),
    "largest_dimension": ("index", "dimension of the hidden state where it is; −1 if there is none"),
}


def attending(model: nn.Module) -> list[str]:
    """Names of the modules that attend: by what their class is called, or because transformers routes them.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> attending(DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)))
    ['blocks.0.attention', 'blocks.1.attention']
    """
    return [name for name, module in model.named_modules() if name and _is_attention(module)]


def layer_of(model: nn.Module, module: str, modules: Collection[str] = ()) -> str | None:
    """The layer in which a module attends, None if there is no number in its name.

    That is the innermost numbered module around it that holds matrices of other use, such as a feed-forward layer:
    T5 numbers its sublayers, too, and some models their heads. Where there is none, it is the outermost numbered one.

    Args:
        model: whose modules are named.
        module: the dotted name of one that attends.
        modules: names of others that attend, if their classes do not say so.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> layer_of(DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)), "blocks.1.attention")
    'blocks.1'
    """
    attentions = {module, *modules, *attending(model)}
    parts = module.split(".")
    numbered = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
    for path in reversed(numbered):
        matrices = (f"{path}.{name}" for name, x in model.get_submodule(path).named_parameters() if x.ndim > 1)
        if any(not _inside(matrix, attentions) for matrix in matrices):
            return path
    return numbered[0] if numbered else None


def _inside(name: str, modules: Collection[str]) -> bool:
    """Whether something is part of one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


@contextmanager
def follow(model: nn.Module, modules: Collection[str], look: Look) -> Iterator[None]:
    """Inside, `look` sees every hidden state of the residual stream as the model computes it.

    It is called with the name of the stack of layers ("h", "encoder.layer", "decoder.block"), the depth, and the hidden
    states (b, n, d), detached: at depth 0 what the first layer takes, the embeddings, and at depth i what the i-th
    layer leaves, before any norm that follows the last one. Layers beside those that attend, in hybrid models, count;
    so does every turn of a layer that is used again on what it left (ALBERT). Where a stack runs once more on something
    else, that is another stack, named "…-2". Hooks are taken away on the way out, whatever happens.

    Args:
        model: any module.
        modules: names of modules that attend, such as ``attending(model)``. Those without a number are in no layer.
        look: must not change what it is given, nor need it afterwards.

    Raises:
        InputError: for a name that the model has not.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> with follow(model, attending(model), lambda stack, depth, x: print(stack, depth, tuple(x.shape))):
    ...     _ = model(torch.tensor([[3, 1, 2]]))
    blocks 0 (1, 3, 32)
    blocks 1 (1, 3, 32)
    blocks 2 (1, 3, 32)
    """
    handles: list[Any] = []
    try:
        for stack, layers in _stacks(model, modules).items():
            stream = _Stream(stack, look)
            for layer in layers:
                handles.append(layer.register_forward_pre_hook(stream.enter, with_kwargs=True))
                handles.append(layer.register_forward_hook(stream.leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Stream:
    """How far the stream through one stack of layers has come."""

    def __init__(self, stack: str, look: Look) -> None:
        self.stack, self.look = stack, look
        self.run, self.depth = 1, -1
        self.entered: set[nn.Module] = set()
        self.last: Tensor | None = None

    def enter(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = _hidden((*given, named.get("hidden_states"), *named.values()))
        if layer in self.entered and hidden is not self.last:
            self.run, self.depth = self.run + 1, -1
            self.entered.clear()
        self.entered.add(layer)
        if self.depth < 0 and hidden is not None:
            self._show(hidden)

    def leave(self, layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        hidden = _hidden((output,) if isinstance(output, Tensor) else tuple(output or ()))
        if hidden is not None:
            self._show(hidden)
        self.last = hidden

    def _show(self, hidden: Tensor) -> None:
        self.depth += 1
        stack = self.stack if self.run == 1 else f"{self.stack}-{self.run}"
        self.look(stack, self.depth, _by_token(hidden.detach()))


def _hidden(values: Sequence[object]) -> Tensor | None:
    """The first of them that can be hidden states."""
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2), None)


def _by_token(hidden: Tensor) -> Tensor:
    """(b, n, d), also from the patches of an image (b, height, width, d) and from packed sequences (n, d)."""
    return hidden[None] if hidden.ndim == 2 else hidden.flatten(1, -2)


def _stacks(model: nn.Module, modules: Collection[str]) -> dict[str, list[nn.Module]]:
    """The layers beside those in which modules attend, by the name of what holds them."""
    names = dict(model.named_modules(remove_duplicate=False))
    unknown = next((m for m in modules if m not in names), None)
    if unknown is not None:
        raise InputError(f"modules has {unknown!r}, expected names of modules of {type(model).__name__}")
    layers = [layer for m in modules if (layer := layer_of(model, m, modules)) is not None]
    stacks = dict.fromkeys(layer.rpartition(".")[0] for layer in layers)
    return {s: [x for name, x in names[s].named_children() if name.isdigit()] for s in stacks}


def _is_attention(module: nn.Module) -> bool:
    return _ATTENDS.search(type(module).__name__) is not None or routes(module)


# --- what is kept of it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """Facts of the hidden states of one text at one depth."""

    norm: Float[Tensor, " n"]
    median: Tensor
    massive: Tensor
    largest: Float[Tensor, " k"]
    token: Tensor
    dimension: Tensor


@dataclass
class Residual:
    """Norms and massive activations of one stack of layers: `states[depth][text]`."""

    stack: str
    states: list[list[_State]] = field(default_factory=list)

    def dataset(self) -> xr.Dataset:
        """As a labelled data set: see `joined`."""
        return joined([self])


@dataclass
class Residuals:
    """Looks at the residual stream for `follow`, and keeps what `Residual` holds of every stack it sees.

    Args:
        source: which tokens are real, (b, n) by n, as `capture.inputs.real_tokens` tells; others do not count.
        target: the same for stacks of a decoder.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model, residuals = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)), Residuals()
    >>> with follow(model, attending(model), residuals.look):
    ...     _ = model(torch.tensor([[3, 1, 2]]))
    >>> dict(residuals.stacks["blocks"].dataset()["norm"].sizes)
    {'text': 1, 'depth': 3, 'token': 3}
    """

    source: Mapping[int, Bool[Tensor, "b n"]] = field(default_factory=dict)
    target: Mapping[int, Bool[Tensor, "b n"]] = field(default_factory=dict)
    stacks: dict[str, Residual] = field(default_factory=dict)

    @torch.no_grad()
    def look(self, stack: str, depth: int, hidden: Float[Tensor, "b n d"]) -> None:
        """Keep the facts of these hidden states."""
        real = (self.target if _DECODER.search(stack) else self.source).get(hidden.shape[1])
        texts = hidden if real is None or bool(real.all()) else [x[r] for x, r in zip(hidden, real, strict=True)]
        states = self.stacks.setdefault(stack, Residual(stack)).states
        assert depth == len(states)
        states.append([_facts(x.to(at_least_float32(x.dtype))) for x in texts])


def joined(parts: Sequence[Residual]) -> xr.Dataset:
    """The same stack in several runs, one after the other along `text`.

    Returns:
        Variables `norm` (text, depth, token); `median`, `massive` and `ratio` (text, depth); `largest`,
        `largest_token` and `largest_dimension` (text, depth, rank), each with its ``units`` and ``definition``. A
        text's real tokens are at the start of `token`; after its ``n_tokens`` norms are NaN.

    Raises:
        InputError: if they are of different stacks or depths.
    """
    import xarray as xr

    kinds = {(part.stack, len(part.states)) for part in parts}
    if len(kinds) != 1:
        raise InputError(f"parts: got (stack, depths) {sorted(kinds)}, expected one stack of as many depths in all")
    ((stack, depths),) = kinds
    texts = [[part.states[depth][text] for depth in range(depths)] for part in parts for text in range(_texts(part))]
    longest = max(len(state.norm) for text in texts for state in text)

    def table(name: str, length: int | None = None, empty: float = math.nan) -> np.ndarray:
        rows = [[_padded(getattr(state, name), length, empty) for state in text] for text in texts]
        return np.array(rows)

    largest, median = table("largest", LARGEST), table("median")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = largest[..., 0] / median
    pair, ranked = ("text", "depth"), ("text", "depth", "rank")
    data = xr.Dataset(
        {
            "norm": (("text", "depth", "token"), table("norm", longest)),
            "median": (pair, median),
            "massive": (pair, table("massive")),
            "ratio": (pair, ratio),
            "largest": (ranked, largest),
            "largest_token": (ranked, table("token", LARGEST, -1)),
            "largest_dimension": (ranked, table("dimension", LARGEST, -1)),
        },
        coords={"depth": np.arange(depths), "n_tokens": ("text", [len(text[0].norm) for text in texts])},
        attrs={"stack": stack, "massive_above": MASSIVE, "massive_times_median": TIMES_MEDIAN},
    )
    data["depth"].attrs["definition"] = "0: what the first layer takes; i: what the i-th layer leaves"
    for name, (units, definition) in MEANING.items():
        data[name].attrs |= {"units": units, "definition": definition}
    return data


def _facts(x: Float[Tensor, "n d"]) -> _State:
    size = x.abs()
    # The largest activations are of the tokens with the largest maxima: only those few are sorted.
    tokens = size.amax(1).topk(min(LARGEST, len(x))).indices
    largest, at = size[tokens].flatten().topk(min(LARGEST, len(tokens) * x.shape[1]))
    median = _median(size)
    massive = torch.count_nonzero((size > MASSIVE) & (size >= TIMES_MEDIAN * median))
    norm = torch.linalg.vector_norm(x, dim=1)
    return _State(norm, median, massive, largest, tokens[at // x.shape[1]], at % x.shape[1])


def _median(size: Float[Tensor, "n d"]) -> Tensor:
    """`size.median()`, several times as fast on a CPU: a sample tells about where it is, and counting exactly where."""
    if size.device.type != "cpu":
        return size.median()
    x = size.numpy().ravel()
    at, step = (x.size - 1) // 2, max(1, x.size // 8192) | 1
    sample = np.sort(x[::step])
    middle, margin = len(sample) // 2, len(sample) // 50 + 1
    low, high = sample[max(middle - margin, 0)], sample[min(middle + margin, len(sample) - 1)]
    below = int(np.count_nonzero(x < low))
    near = x[(x >= low) & (x <= high)]
    if not below <= at < below + len(near):  # the sample was of a kind with the numbers it left out
        near, below = x, 0
    return torch.tensor(np.partition(near, at - below)[at - below])


def _texts(part: Residual) -> int:
    return len(part.states[0])


def _padded(x: Tensor, length: int | None, empty: float) -> np.ndarray:
    values = x.cpu().numpy()
    return values if length is None else np.pad(values, (0, length - len(values)), constant_values=empty)


def by_stack(runs: Sequence[Residuals]) -> dict[str, xr.Dataset]:
    """A data set of every stack that all runs have seen with as many depths, the runs along `text`."""
    found = {}
    for stack in runs[0].stacks:
        parts = [run.stacks[stack] for run in runs if stack in run.stacks]
        if len({len(part.states) for part in parts}) == 1 and len(parts) == len(runs):
            found[re.sub(r"[^A-Za-z0-9_-]", "-", stack)] = joined(parts)
    return found

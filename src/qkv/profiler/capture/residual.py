"""The residual stream: norms and massive activations.

Layers are found by the names of the attention modules, so this works for any model: "h.0.attn" is in layer "h.0" of
the stack "h", "encoder.block.2.layer.0.SelfAttention" in layer "encoder.block.2" of the stack "encoder.block".
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv._packages import user_frame
from qkv.engine import at_least_float32, on_card
from qkv.errors import InputError
from qkv.huggingface.attention import routes
from qkv.profiler.capture.datasets import Arrays, joined
from qkv.profiler.capture.intercept import unwatched
from qkv.profiler.capture.modules import is_attention
from qkv.profiler.capture.record import Together, copied_to_cpu

if TYPE_CHECKING:
    import xarray as xr


MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, arXiv:2402.17762, §2
ABOVE = float(np.nextafter(np.float32(MASSIVE), np.float32(math.inf)))  # the next number in float32
AT_ONCE = 2**23  # numbers whose bits are counted at a time on a card: each takes 8 bytes
LARGEST = 3  # number of largest activations that are kept with their positions

OnHiddenStates = Callable[[str, int, Tensor], None]  # stack, depth, hidden states

_DECODER = re.compile(r"(?:^|\.)decoder(?:\.|$)")

BY_TEXT, RANKED = ("text", "depth"), ("text", "depth", "rank")
VARIABLES = {  # dimensions, units and definition
    "norm": (("text", "depth", "token"), "1", "L2 norm of the hidden state of each token"),
    "cosine": (
        BY_TEXT,
        "1",
        "mean cosine similarity of the hidden states of two different tokens, over all pairs of tokens with a state "
        "other than zero (Ethayarajh 2019, arXiv:1909.00512, §3); NaN for fewer than two",
    ),
    "median": (
        BY_TEXT,
        "1",
        "median |x| over all tokens and dimensions (for an even count, the lower of the two middle values)",
    ),
    "massive": (
        BY_TEXT,
        "activations",
        f"number of |x| > {MASSIVE:g} and ≥ {TIMES_MEDIAN:g} × the median (Sun et al. 2024, arXiv:2402.17762, §2)",
    ),
    "ratio": (BY_TEXT, "1", "the largest |x| divided by the median"),
    "first_ratio": (BY_TEXT, "1", "the largest |x| of the first token divided by the median"),
    "largest": (RANKED, "1", "the largest |x|, in descending order"),
    "largest_token": (
        RANKED, "position", "position in the text of the token with that activation; −1 if there is none",
    ),
    "largest_dimension": (
        RANKED, "index", "dimension of the hidden state with that activation; −1 if there is none",
    ),
}  # fmt: skip


def attention_modules(model: nn.Module) -> list[str]:
    """Names of the attention modules: by their class name, or because they use transformers' attention interface.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> attention_modules(DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)))
    ['blocks.0.attention', 'blocks.1.attention']
    """
    return [name for name, module in model.named_modules() if name and _is_attention(module)]


def layer_around(module: str, attentions: Collection[str], model: nn.Module) -> str | None:
    """The name of the layer that contains an attention module; None if there is no number in the module's name.

    This is the innermost numbered module around it with matrices besides those of attention, such as a feed-forward
    layer's: T5 also numbers its sublayers, and some models their heads. If there is none, it is the outermost numbered
    module.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> layer_around("blocks.1.attention", attention_modules(model), model)
    'blocks.1'
    """
    parts = module.split(".")
    numbered = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
    for path in reversed(numbered):
        matrices = (f"{path}.{name}" for name, x in model.get_submodule(path).named_parameters() if x.ndim > 1)
        if any(not any(matrix.startswith(f"{name}.") for name in attentions) for matrix in matrices):
            return path
    return numbered[0] if numbered else None


@contextmanager
def observe_residual(model: nn.Module, modules: Collection[str], on_hidden: OnHiddenStates) -> Iterator[None]:
    """Inside, `on_hidden` is called with the hidden states of the residual stream at every depth.

    Its arguments are the name of the stack of layers ("h", "encoder.layer", "decoder.block"), the depth, and the hidden
    states (b, n, d), detached. Depth 0 is the input of the first layer, the embeddings; depth i is the output of the
    i-th layer, before a final norm. In hybrid models layers without attention count, too. A layer that is applied
    several times to its own output (ALBERT) counts each time. If a stack runs again on another input, that run is a
    stack of its own, named "…-2". The hooks are removed on exit, also after an error.

    Args:
        model: any module.
        modules: names of attention modules, such as ``attention_modules(model)``; modules without a number in their
            name are in no layer.
        on_hidden: callback; it must neither change the hidden states nor keep them.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> with observe_residual(
    ...     model, attention_modules(model), lambda stack, depth, x: print(stack, depth, tuple(x.shape))
    ... ):
    ...     _ = model(torch.tensor([[3, 1, 2]]))
    blocks 0 (1, 3, 32)
    blocks 1 (1, 3, 32)
    blocks 2 (1, 3, 32)
    """
    with ExitStack() as hooks:
        for stack, layers in _stacks(model, modules).items():
            stream = _Stream(stack, on_hidden)
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(stream.enter, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(stream.leave))
        yield


class _Stream:
    """The hooks of one stack of layers, and the depth that its forward has reached."""

    def __init__(self, stack: str, on_hidden: OnHiddenStates) -> None:
        self.stack, self.on_hidden = stack, on_hidden
        self.run, self.depth = 1, -1
        self.entered: set[nn.Module] = set()
        self.last: Tensor | None = None

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = _hidden((*args, kwargs.get("hidden_states"), *kwargs.values()))
        if layer in self.entered and hidden is not self.last:
            self.run, self.depth = self.run + 1, -1
            self.entered.clear()
        self.entered.add(layer)
        if self.depth < 0 and hidden is not None:
            self._report(layer, hidden)

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = _hidden((output,) if isinstance(output, Tensor) else tuple(output or ()))
        if hidden is not None:
            self._report(layer, hidden)
        self.last = hidden

    def _report(self, layer: nn.Module, hidden: Tensor) -> None:
        self.depth += 1
        stack = self.stack if self.run == 1 else f"{self.stack}-{self.run}"
        hidden = hidden.detach()
        if hidden.ndim == 4 and hidden.shape[1] in _channels(layer):  # an image (b, d, height, width)
            hidden = hidden.movedim(1, -1)
        # (b, n, d), from the patches of an image (b, height, width, d) or a packed sequence (n, d), too
        self.on_hidden(stack, self.depth, hidden[None] if hidden.ndim == 2 else hidden.flatten(1, -2))


def _hidden(values: Sequence[object]) -> Tensor | None:
    """The first value that can be hidden states."""
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2), None)


def _channels(layer: nn.Module) -> set[int]:
    """Sizes of the second dimension of images that the modules of a layer read or return."""
    channels = set[int]()
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            channels |= {module.in_channels, module.out_channels}
        elif isinstance(module, nn.GroupNorm):
            channels.add(module.num_channels)
    return channels


def _stacks(model: nn.Module, modules: Collection[str]) -> dict[str, list[nn.Module]]:
    """The layers of every stack with an attention module, by the name of the stack."""
    names = dict(model.named_modules(remove_duplicate=False))
    unknown = next((m for m in modules if m not in names), None)
    if unknown is not None:
        raise InputError(f"modules has {unknown!r}, expected names of modules of {type(model).__name__}")
    attentions = {*modules, *(name for name, module in names.items() if name and _is_attention(module))}
    layers = [layer for m in modules if (layer := layer_around(m, attentions, model)) is not None]
    stacks = dict.fromkeys(layer.rpartition(".")[0] for layer in layers)
    return {s: [x for name, x in names[s].named_children() if name.isdigit()] for s in stacks}


def _is_attention(module: nn.Module) -> bool:
    return is_attention(module) or routes(module)


# --- summaries of the hidden states -----------------------------------------------------------------------------------


@dataclass
class Residuals:
    """Norms and massive activations of every stack in one run; `record` is the callback for `observe_residual`.

    Args:
        source: True at real tokens, (b, n) by n, as in `capture.inputs.Sequences`; padding does not count.
        target: the same for stacks of a decoder.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model, residuals = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)), Residuals()
    >>> with observe_residual(model, attention_modules(model), residuals.record):
    ...     _ = model(torch.tensor([[3, 1, 2]]))
    >>> dict(by_stack([residuals])["blocks"]["norm"].sizes)
    {'text': 1, 'depth': 3, 'token': 3}
    """

    source: Mapping[int, Bool[Tensor, "b n"]] = field(default_factory=dict)
    target: Mapping[int, Bool[Tensor, "b n"]] = field(default_factory=dict)
    places: dict[tuple[bool, int, torch.device], list[Tensor]] = field(default_factory=dict)
    """Positions of the real tokens of each text, by side, length and device: found once, as it waits for a card."""
    stacks: dict[str, list[list[dict[str, Tensor]]]] = field(default_factory=dict)
    """By stack, depth and text: what `_summarised` gives."""
    together: Together = field(default_factory=lambda: Together(_summarised))

    @torch.no_grad()
    def record(self, stack: str, depth: int, hidden: Float[Tensor, "b n d"]) -> None:
        """Summarise the hidden states at one depth."""
        of_target, (_, n, _), device = _DECODER.search(stack) is not None, hidden.shape, hidden.device
        real, place = (self.target if of_target else self.source).get(n), (of_target, n, device)
        states = self.stacks.setdefault(stack, [])
        assert depth == len(states)
        with unwatched():
            if real is not None and place not in self.places:
                self.places[place] = [text.nonzero()[:, 0].to(device) for text in real]
            texts = hidden if real is None else [x[at] for x, at in zip(hidden, self.places[place], strict=True)]
            states.append([self.together.add(x[None]) for x in texts])


def by_stack(runs: Sequence[Residuals]) -> dict[str, xr.Dataset]:
    """A data set for every stack that all runs have with the same number of depths, with the runs along `text`.

    A stack whose layers have different numbers of tokens, as in a pyramid of images, is left out, with a warning. It
    has the variables of `VARIABLES`, each with its ``units`` and ``definition``. A text's real tokens are at the
    start of `token`; after its ``n_tokens`` norms are NaN.
    """
    datasets = {}
    for run in runs:
        run.together.finish()
        depths = [texts for states in run.stacks.values() for texts in states]
        summaries = [summary for texts in depths for summary in texts]
        for summary, copy in zip(summaries, copied_to_cpu(tuple(summaries)), strict=True):
            summary.update(copy)
    for stack in runs[0].stacks:
        parts = [run.stacks.get(stack, []) for run in runs]
        if len({len(states) for states in parts}) == 1:
            texts = [list(depths) for states in parts for depths in zip(*states, strict=True)]
            tokens = sorted({state["norm"].shape[1] for text in texts[:1] for state in text})
            if len(tokens) > 1:
                sizes = ", ".join(map(str, tokens))
                warnings.warn(
                    f"hidden states of {stack} are left out: its layers have {sizes} tokens", stacklevel=user_frame()
                )
                continue
            datasets[re.sub(r"[^A-Za-z0-9_-]", "-", stack)] = _dataset(stack, texts)
    return datasets


def _dataset(stack: str, texts: list[list[dict[str, Tensor]]]) -> xr.Dataset:
    parts = []
    for text in texts:
        values = {name: torch.cat([state[name] for state in text]).numpy()[None] for name in text[0]}
        with np.errstate(divide="ignore", invalid="ignore"):
            values["ratio"] = values["largest"][..., 0] / values["median"]
            values["first_ratio"] = values["first"] / values["median"]
        parts.append(Arrays(
            {name: (dims, values[name], {"units": units, "definition": definition})
             for name, (dims, units, definition) in VARIABLES.items()},
            {"depth": ("depth", np.arange(len(text))), "n_tokens": ("text", [text[0]["norm"].shape[1]])},
            {"stack": stack, "massive_above": MASSIVE, "massive_times_median": TIMES_MEDIAN},
        ))  # fmt: skip
    data = joined(parts)
    data.variables["depth"].attrs["definition"] = "0: input of the first layer; i: output of the i-th layer"
    return data


def _summarised(x: Float[Tensor, "t n d"]) -> dict[str, Tensor]:
    """Norms, similarity and largest activations of the hidden states of texts of equal length.

    On a card nothing waits for a number.
    """
    size, wide = x.abs(), at_least_float32(x.dtype)
    # The largest activations belong to the tokens with the largest maxima, so only these few rows are sorted.
    of_token, d = size.amax(2), x.shape[2]
    tokens = of_token.topk(min(LARGEST, x.shape[1])).indices
    rows = size.gather(1, tokens[..., None].expand(-1, -1, d)).flatten(1)
    largest, at = rows.topk(min(LARGEST, rows.shape[1]))
    empty = 0, LARGEST - largest.shape[1]
    median = _median(size).to(wide)
    above = math.nextafter(MASSIVE, math.inf) if wide == torch.float64 else ABOVE
    least = (TIMES_MEDIAN * median).clamp(min=above)
    norm = torch.linalg.vector_norm(x, dim=2, dtype=wide)
    return {
        "norm": norm, "cosine": _mean_cosine(x.to(wide), norm), "median": median, "first": of_token[:, 0].to(wide),
        "massive": (size >= least[:, None, None]).sum((1, 2)),
        "largest": nn.functional.pad(largest.to(wide), empty, value=math.nan),
        "largest_token": nn.functional.pad(tokens.gather(1, at // d), empty, value=-1),
        "largest_dimension": nn.functional.pad(at % d, empty, value=-1),
    }  # fmt: skip


def _mean_cosine(x: Float[Tensor, "t n d"], norm: Float[Tensor, "t n"]) -> Float[Tensor, " t"]:
    """The mean cosine over all pairs of different rows that are not zero, in O(n d).

    For unit vectors u₁ … u_m, ‖Σ uᵢ‖² is m plus the sum of the cosines of all ordered pairs.
    """
    directed = norm >= torch.finfo(norm.dtype).tiny
    total = (torch.where(directed, 1 / norm, 0)[:, None] @ x)[:, 0]
    m = torch.count_nonzero(directed, dim=1).double()
    pairs = torch.where(m > 1, m * (m - 1), torch.nan)
    return (total.double().square().sum(1) - m) / pairs


def _median(size: Float[Tensor, "t n d"]) -> Float[Tensor, " t"]:
    """The `median()` of each text, on a CPU by NumPy, which is several times as fast."""
    values = size.flatten(1)
    at = (values.shape[1] - 1) // 2
    if on_card(size):
        return nth(values, at)
    values = values.to(at_least_float32(values.dtype))
    return torch.from_numpy(np.partition(values.numpy(), at)[:, at].copy())


DIGIT = 16  # bits of a number that are counted at a time


def nth(values: Float[Tensor, "t n"], at: int) -> Float[Tensor, " t"]:
    """The value of each text that would be at this index in ascending order, of numbers that are not negative.

    They have the order of their bits, of which 16 are found at a time (radix select). Nothing is sorted, so it takes
    little memory, and nothing waits for a card. NaN is the largest number.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    t, bits = len(values), values.contiguous().view(integers)
    of_text = 2**DIGIT * torch.arange(t, device=values.device)[:, None]
    unit = torch.ones((), dtype=torch.int32, device=values.device)
    prefix = torch.zeros(t, 1, dtype=torch.int64, device=values.device)  # the bits that are found
    before = torch.full_like(prefix, at)  # how many of the numbers with this prefix come before the one that is sought
    for shift in range(8 * values.itemsize - DIGIT, -1, -DIGIT):
        counts = torch.zeros(t << DIGIT, dtype=torch.int32, device=values.device)
        for part in bits.split(max(1, AT_ONCE // t), 1):
            digits = (part >> shift).long() if shift else part.long()
            counted = unit
            if 8 * values.itemsize - shift > DIGIT:
                counted, digits = (digits >> DIGIT == prefix).int(), digits & (2**DIGIT - 1)
            counts.scatter_add_(0, (digits + of_text).flatten(), counted.expand(digits.shape).flatten())
        upto = counts.view(t, -1).cumsum(1)
        digit = torch.searchsorted(upto, before, right=True)
        before = before - torch.where(digit > 0, upto.gather(1, (digit - 1).clamp(min=0)), 0)
        prefix = (prefix << DIGIT) + digit
    return prefix[:, 0].to(integers).view(values.dtype)

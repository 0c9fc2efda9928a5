"""The modules of a model that attend: which they are, their kinds of attention, and the numbers of their layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkv.huggingface.attention import routes
from qkv.huggingface.hidden import linear_layers
from qkv.nn import Composition, DifferentialAttention, RecurrentAttention
from qkv.profiler.capture.inputs import NOT_TOKENS, Sequences, arguments_of, config_of_text

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


def is_attention(module: nn.Module) -> bool:
    """Whether a module attends, by the name of its class."""
    return _ATTENTION.search(type(module).__name__) is not None


class AttentionModules:
    """The modules of a model by name, and which of them attend through transformers' interface.

    With `hidden_maps`, linear attention counts as attention.
    """

    def __init__(self, model: nn.Module, *, hidden_maps: bool = False) -> None:
        self.model, root = model, type(model).__name__
        self.by_name: dict[str, nn.Module] = dict(model.named_modules())
        self.names = {id(module): name or root for name, module in self.by_name.items()}
        """The name of each module, by its id."""
        self.routed = {self.names[id(module)]: module for module in self.by_name.values() if routes(module)}
        """Those that attend through transformers' interface, and so report their calls themselves."""
        own = {name: module for name, module in self.by_name.items() if isinstance(module, RecurrentAttention)}
        self.linear, self.hidden_maps = linear_layers(model) | own, hidden_maps
        """Those of linear attention with decay or the delta rule."""
        receiving = {*self.routed, *(self.linear if hidden_maps else ())}
        self.enclosing = {name[:i] for name in receiving for i, x in enumerate(f"{name}.") if x == "."}
        """These, and the modules that contain them."""
        self.differential = {name for name, module in self.routed.items() if hasattr(module, "lambda_q1")}
        """Those that subtract the softmax of one half of the heads from that of the other (Ye et al. 2024)."""
        self.two_sided = is_two_sided(self.by_name)
        # In transformers and torch, modules that attend in another way have "attention" in the names of their classes.
        self.all_routed = bool(self.enclosing) and all(
            type(module).__module__.startswith(("transformers.", "torch.nn."))
            and "forward" not in vars(module)
            and (not is_attention(module) or self.names[id(module)] in self.enclosing)
            for module in self.by_name.values()
        )
        """Whether all attention passes that interface, so that no function of torch need be read."""


class LayerNumbers:
    """The numbers of the layers that attend, by group. A layer keeps that of the first forward."""

    def __init__(self, modules: AttentionModules) -> None:
        self.modules = modules
        groups = {name: group_of_module(name, modules.model) for name in modules.routed}
        self.stacks = {group: stack_of([n for n, of in groups.items() if of == group]) for group in {*groups.values()}}
        """The stack of layers of each group, whose numbers of layers are kept."""
        if modules.linear:  # a hybrid
            attending = [
                n for n, x in modules.by_name.items() if isinstance(getattr(x, "composition", None), Composition)
            ]
            stack = stack_of([*{*modules.linear, *modules.routed, *attending}])
            self.stacks = dict.fromkeys({*self.stacks, "self", "linear"}, stack)
        self.numbers: dict[tuple[str, str, int], int] = {}
        """By group, module, and the number of its calls before in a forward."""

    def number(self, group: str, name: str, calls: int, running: Sequence[str]) -> int:
        """The number of the layer of a call, after so many `calls` of the module, inside of the `running` modules.

        A module in several layers has the name of the first: the running layer tells which it is.
        """
        key, stack = (group, name, calls), self.stacks.get(group)
        if key not in self.numbers:
            used, index = self.of_group(group), None if stack is None else index_in(stack, [*running, name])
            self.numbers[key] = max(used, default=-1) + 1 if index is None or index in used else index
        return self.numbers[key]

    def of_group(self, group: str) -> set[int]:
        """The numbers of the layers of a group."""
        return {number for (of, _, _), number in self.numbers.items() if of == group}

    def in_order(self, layers: list[Any]) -> list[Any]:
        """What was received of layers, in the order in which they began to attend."""
        order = [(group, layer) for (group, _, _), layer in self.numbers.items()]
        return sorted(layers, key=lambda received: order.index((received.group, received.layer)))

    @property
    def known(self) -> str:
        """The numbers of all layers: "0..5", or "3, 7, 11"."""
        numbers = sorted({*self.numbers.values()})
        return f"0..{numbers[-1]}" if numbers == [*range(len(numbers))] else ", ".join(map(str, numbers))

    @torch.no_grad()
    def attributes(self, groups: Collection[str], *, all_layers: bool) -> dict[str, dict[str, dict[str, Any]]]:
        """The attributes of a profile about layers: by kind, group and number.

        ``differential`` has λ of each layer with differential attention, whose map is softmax₁ − λ softmax₂ of halves
        of the heads; ``without_map`` the layers of a stack in which nothing attends, if `all_layers` are recorded, and
        what they are, as far as the model says it.
        """
        differential: dict[str, dict[str, Any]] = {}
        factors = {(of, number): self._factor(name) for (of, name, _), number in self.numbers.items()}
        for group in groups:  # "self-2" has the layers of "self" that have other sizes
            found = {str(n): x for (of, n), x in factors.items() if of == group.partition("-")[0] and x is not None}
            differential |= {group: found} if found else {}
        config = config_of_text(self.modules.model)
        names = ("kinds", "layer_types", "layers_block_type")  # the first of qkv's own models
        kinds = list(next((x for name in names if (x := getattr(config, name, None))), ()))
        without: dict[str, dict[str, Any]] = {}
        for group in groups if all_layers else ():
            if group != "linear" and (stack := self.stacks.get(group)) is not None:
                children = self.modules.by_name[stack].named_children()
                layers = {int(name) for name, _ in children if name.isdecimal()}
                attending = self.of_group(group) | self.of_group("linear")
                silent = sorted(layers - attending) if attending <= layers else []
                if silent:
                    without[group] = {str(n): str(kinds[n]) if n < len(kinds) else "" for n in silent}
        return {"differential": differential, "without_map": without}

    def _factor(self, name: str) -> float | None:
        """λ of a module with differential attention; None for another."""
        at: Any = self.modules.by_name.get(name)
        if isinstance(at, DifferentialAttention):
            return float(at.factor())
        if name not in self.modules.differential:
            return None
        first, second = ((getattr(at, f"lambda_q{i}") * getattr(at, f"lambda_k{i}")).sum().exp() for i in (1, 2))
        return float(first - second + at.lambda_init)


# --- which kind of attention, and which layer -------------------------------------------------------------------------


def stack_of(names: Sequence[str]) -> str | None:
    """The stack of layers that these modules are in, such as "model.layers": each in a layer of its own, or None.

    >>> stack_of(["layers.3.attention", "layers.7.attention"]), stack_of(["stages.0.blocks.0", "stages.1.blocks.0"])
    ('layers', 'stages')
    >>> stack_of(["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"])
    """
    parts = [name.split(".") for name in names]
    for at in range(min(map(len, parts), default=0)):
        before = {tuple(path[:at]) for path in parts}
        if len(before) == 1 and all(path[at].isdecimal() for path in parts):
            indices = {path[at] for path in parts}
            if len(indices) == len(parts):
                return ".".join(*before)
    return None


def index_in(stack: str, names: Sequence[str]) -> int | None:
    """The number of the layer of a stack that one of these names is, the last one first, or that the last is in.

    >>> index_in("layers", ["model", "layers.5", "layers.2.shared"]), index_in("layers", ["layers.2.attention"])
    (5, 2)
    """
    layer = re.compile(rf"{re.escape(stack)}{'[.]' if stack else ''}(\d+)")
    matches = [*map(layer.fullmatch, reversed(names)), layer.match(names[-1])]
    return next((int(at[1]) for at in matches if at), None)


_CROSS = re.compile(
    r"cross|encoder_attn|enc_?dec|encoder_?decoder_?att|attn_(token_to_image|image_to_token)", re.IGNORECASE
)
_TOWERS = {
    "vision": re.compile(r"vision|visual|(^|\.)backbone\.", re.IGNORECASE),
    "audio": re.compile("audio", re.IGNORECASE),
}
_TEXT = re.compile("text|language", re.IGNORECASE)
_SIDE = re.compile(r"(?:^|\.)(encoder|decoder)\.")


def group_of_module(name: str, model: nn.Module) -> str:
    """The group of a module of a Hugging Face model: cross, encoder, decoder; vision, audio, text; or self.

    A part of a model with several kinds of inputs that has a configuration of its own, such as the `qformer` of BLIP-2,
    is a group of this name.
    """
    if _CROSS.search(name):
        return "cross"
    config: Any = getattr(model, "config", None)
    two_sided = bool(getattr(config, "is_encoder_decoder", False))
    kinds = [kind for kind in _TOWERS if getattr(config, f"{kind}_config", None) is not None]
    kinds += ["vision"] if two_sided and getattr(config, "backbone_config", None) is not None else []
    for kind in kinds:
        if _TOWERS[kind].search(name):
            return kind
    side = _SIDE.search(name)  # the outermost: a BERT decoder contains a module called encoder
    if two_sided or not kinds:
        return (side[1] if side else "decoder") if two_sided else "self"
    if not _TEXT.search(name):
        parts = (key.removesuffix("_config") for key in vars(config) if key.endswith("_config"))
        for part in parts:
            if f".{part}" in f".{name}":
                return part
        if side and side.start() == 0 and any(_TEXT.search(other) for other, _ in model.named_modules()):
            return side[1]
    return "text"


def count_hidden_states(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """How many different hidden states a module is given: queries and keys come from the same if it is one."""
    given = [*arguments_of(module, args, named).items()]
    flat = [(name, x) for name, value in given for x in (value if isinstance(value, tuple) else (value,))]
    states = [
        x for name, x in flat
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 3 and not NOT_TOKENS.search(name)
    ]  # fmt: skip
    return len({(x.data_ptr(), x.numel()) for x in states})


def group_of_call(
    name: str, *, n_queries: int, n_keys: int, causal: bool, two_sided: bool, sequences: Sequences, states: int = 0
) -> str:
    """The group of a module of any other model: cross, encoder, decoder or self, by the first of these rules.

    1. A module with "cross" in its name is cross.
    2. A causal call is decoder, or self in a model without encoder and decoder that reads one sequence.
    3. A call that is not causal and has different numbers of queries and keys is cross: its keys are other tokens, or
       pooled or projected ones, which have no distances.
    4. With as many queries as keys, a module of the encoder is encoder.
    5. A module that is given one tensor of hidden states takes queries and keys from it. It is encoder or decoder in a
       model that reads two texts, by their lengths, else self.
    6. In a model that reads two sequences, modules of the decoder, and modules outside of encoder and decoder, are
       cross. If no modules are called encoder and decoder, the lengths decide: cross if there is a single query or as
       many queries as the second sequence has tokens; else encoder.
    7. Any other module has the name of its side (encoder or decoder), or is self.

    `two_sided` is True if the model has modules called encoder and modules called decoder; `states` is the number of
    hidden states that the module is given, 0 if it is not known.
    """
    if _CROSS.search(name):
        return "cross"
    match = _SIDE.search(f"{name}.") if two_sided else None
    side = None if match is None else match[1]
    if causal:
        return "decoder" if side or sequences.two else "self"
    if n_queries != n_keys:
        return "cross"
    if side == "encoder" or not sequences.two:
        return side or "self"
    from_target = n_queries == 1 or sequences.target is None or n_queries == sequences.target.shape[1]
    if states == 1:
        return side or ("self" if sequences.target is None else "decoder" if from_target else "encoder")
    return "cross" if two_sided or from_target else "encoder"


def is_two_sided(names: Iterable[str]) -> bool:
    """True if some modules are called encoder and some decoder."""
    sides = {match[1] for name in names if (match := _SIDE.search(f"{name}."))}
    return len(sides) == 2

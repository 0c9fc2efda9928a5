"""Tiny models with random weights, one for each way Hugging Face models attend: no downloads, milliseconds a run.

`build("llama")` is the bare model, its weights large enough that attention is far from uniform; `inputs` is what its
forward takes. Sizes differ wherever the architecture lets them. The architectures are in hf_models.toml.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.utils.logging.set_verbosity_error()  # advice on token ids that these configurations do not have

LENGTH, TARGET = 37, 23  # tokens of a text, and of a decoder's text
VOCABULARY = 97
WINDOW = 8
PADDED = 5  # tokens of padding in the second item of a padded batch


@dataclass(frozen=True)
class Architecture:
    """How to build a model: names of its classes, settings of its configuration, and kind of input."""

    family: str  # folder in transformers.models
    classes: str  # prefix of the classes "…Config" and "…Model"
    settings: Mapping[str, Any]
    kind: str = "text"  # text (of a decoder), encoder, texts (source and target), image, and others: see `inputs`
    suffix: str = "Model"
    padding: tuple[str, ...] = ()  # sides; both if it reads text only
    groups: Mapping[str, int] = field(default_factory=lambda: {"self": 2})  # attention layers in each

    def class_of(self, suffix: str) -> Any:
        """The class with this suffix."""
        return getattr(importlib.import_module(f"transformers.models.{self.family}"), self.classes + suffix)


def architectures(table: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Architecture]:
    """The rows of a table: a row has fields of `Architecture` and settings, besides those of what it shares."""
    found = {}
    for name, row in table.items():
        given = {"family": name} | ({"classes": row} if isinstance(row, str) else row)
        settings = {key: x for group in given.pop("shared", ()) for key, x in shared[group].items()}
        known = {x.name: given.pop(x.name) for x in fields(Architecture) if x.name in given}
        settings = {key: None if x == "NONE" else x for key, x in (settings | given).items()}
        both = ("left", "right") if known.get("kind", "text") in ("text", "encoder", "texts") else ()
        found[name] = Architecture(**{"padding": both} | known, settings=settings)
    return found


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROUTED, PARTLY, UNROUTED = (tuple(TABLES[kind]) for kind in ("routed", "partly", "unrouted"))
ARCHITECTURES = architectures(TABLES["routed"] | TABLES["partly"] | TABLES["unrouted"], TABLES["shared"])
SIZES: dict[str, int] = TABLES["shared"]["SIZES"]


def build(name: str, implementation: str | None = None, *, suffix: str | None = None, **settings: Any) -> Any:
    """The model, in evaluation mode; the same weights whenever it is built with the same sizes.

    Args:
        name: one of `ARCHITECTURES`.
        implementation: of attention, such as "eager"; the architecture's own default if None.
        suffix: which model of the family, such as "ForCausalLM"; the bare one if None.
        settings: what to change in the configuration.
    """
    what = ARCHITECTURES[name]
    config = what.class_of("Config")(**what.settings | settings, attn_implementation=implementation)
    plain = suffix not in (None, "Model") and name in ("llama4", "gemma3")  # with a head they are called without Text
    stem = what.classes.removesuffix("Text") if plain else what.classes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(importlib.import_module(f"transformers.models.{what.family}"), stem + (suffix or what.suffix))(
            config
        )
    enliven(model)
    return model.eval()


def enliven(model: nn.Module, seed: int = 3) -> None:
    """Random weights so large that heads prefer some keys, biases and norms that differ, sinks that take a share."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.ndim == 1:
                x.add_(noise, alpha=1.0 if name.endswith("sinks") else 0.1)
            elif id(x) in embeddings:
                x.copy_(noise)
            else:  # a fan-in of about 64 everywhere; T5 does not divide its scores by √d, so its queries are smaller
                x.copy_(noise * (0.06 if name.endswith(".q.weight") else 0.2))


def inputs(name: str, padding: str | None = None, *, batch: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """The arguments of the forward; `padding` on the "left" or "right" of the last item's texts."""
    kind = ARCHITECTURES[name].kind
    generator = torch.Generator().manual_seed(seed)
    if kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=generator)}
    text = torch.randint(3, VOCABULARY - 1, (batch, LENGTH), generator=generator)
    target = torch.randint(3, VOCABULARY - 1, (batch, TARGET), generator=generator)
    if kind == "mel":
        sound = torch.randn(batch, 16, 2 * LENGTH, generator=generator)
        return {"input_features": sound, "decoder_input_ids": target}
    given = {"input_ids": text} | ({"decoder_input_ids": target} if kind == "texts" else {})
    return given if padding is None else given | pad(given, padding, PADDED)


def main_output(outputs: Any) -> Tensor:
    """The hidden states or logits among the outputs of a model."""
    found: Tensor = outputs["last_hidden_state"] if "last_hidden_state" in outputs else outputs["logits"]
    return found


def pad(given: Mapping[str, Tensor], side: str, tokens: int, ids: int | None = 0) -> dict[str, Tensor]:
    """Masks in which the last item's texts have padding, and those texts with `ids` there."""
    found = {}
    where = slice(None, tokens) if side == "left" else slice(-tokens, None)
    for text, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if text in given:
            found[mask] = torch.ones_like(given[text])
            found[mask][-1, where] = 0
            found[text] = given[text].clone()
            if ids is not None:
                found[text][-1, where] = ids
    return found

"""Checkpoints of a run: folders, written atomically, from which training resumes exactly."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv._untrusted import check_version, load_json
from qkv.errors import InputError, refusing
from qkv.models.checkpoint import read_tensors

STATE, TENSORS = "state.json", "state.safetensors"
VERSION = 1
"""The version of the format; increase it when an older qkv could misread a checkpoint that this version writes."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
KEPT = 2
"""The number of checkpoints to keep: the newest and the one before."""


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write ``checkpoint-<step>``: weights and AdamW's moments as safetensors, the rest as JSON. Delete older ones.

    Checkpoints hold no state of random generators, because every step seeds them from the seed and its number.
    """
    from safetensors.torch import save_file

    target = folder / _name(step)
    unfinished = folder / f".{target.name}.part"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        state, tensors = unfinished / STATE, unfinished / TENSORS
        save_file(_tensors(model, optimizer), tensors)
        described = {"format_version": VERSION, "step": step, "sha256": _digest(tensors), "torch": torch.__version__}
        state.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        for file in (state, tensors):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(target, ignore_errors=True)
        unfinished.replace(target)
    except Exception as error:  # for a full disk safetensors raises its own type of error
        shutil.rmtree(unfinished, ignore_errors=True)
        good = checkpoints(folder)
        kept = f"the last complete one is {good[-1].name}" if good else "there is none before it"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"folder: cannot write the checkpoint of step {step} to {folder} ({reason}); {kept}"
        ) from error
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("checkpoint-*") if (p / STATE).exists())


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the state of model and optimizer in place; returns the number of steps done.

    Raises:
        InputError: if the checkpoint is damaged or belongs to another model.
    """
    before = [p for p in checkpoints(checkpoint.parent) if p < checkpoint]
    hint = f"; remove it to resume from {before[-1].name}" if before else "; remove it to start again"
    with refusing(f"checkpoint {checkpoint} cannot be read ({{}}){hint}"):
        described = load_json(checkpoint / STATE)
        check_version(described, VERSION)
        step, digest = described["step"], described["sha256"]
        if type(step) is not int or step < 0 or checkpoint.name != _name(step):
            raise ValueError(f"{STATE} has step {step!r}")
        weights = read_tensors(checkpoint / TENSORS)  # refuses what is not a file, and may have no end
        found = _digest(checkpoint / TENSORS)
    if found != digest:
        raise InputError(f"checkpoint {checkpoint} is damaged: its checksum is not the one written with it{hint}")
    for name, x in model.state_dict().items():
        kept = weights.get(f"model/{name}")
        if kept is None or (kept.shape, kept.dtype) != (x.shape, x.dtype):
            same = kept is not None and kept.shape == x.shape
            other, expected = (None if y is None else y.dtype if same else tuple(y.shape) for y in (kept, x))
            raise InputError(f"checkpoint {checkpoint} is of another model: {name} is {other}, expected {expected}")
        x.copy_(kept)
    _load_moments(optimizer, model, weights)
    return step


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors by name. Tied parameters are written twice, because safetensors cannot store aliases."""
    out = {f"model/{name}": x.detach().clone().contiguous() for name, x in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        out |= {f"{moment}/{name}": state[moment].detach().contiguous() for moment in MOMENTS if moment in state}
    return out


def _load_moments(optimizer: torch.optim.Optimizer, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load AdamW's moments of the parameters that have had a gradient."""
    for name, parameter in model.named_parameters():
        found: dict[str, Any] = {m: weights[f"{m}/{name}"] for m in MOMENTS if f"{m}/{name}" in weights}
        shapes = [x.shape for m, x in found.items() if m != "step"]
        if found and (len(found) != len(MOMENTS) or set(shapes) != {parameter.shape} or found["step"].numel() != 1):
            raise InputError(f"checkpoint has moments of {name} of another shape, expected those of AdamW")
        if found:
            on = {m: x.to(parameter.device) if m != "step" else x for m, x in found.items()}
            optimizer.state[parameter] = on


def _name(step: int) -> str:
    return f"checkpoint-{step:08d}"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

"""Checkpoints of a run: folders with all that training needs to go on exactly, each whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.errors import InputError

STATE, TENSORS = "state.json", "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
KEPT = 2
"""The newest and the one before."""


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write ``checkpoint-<step>``: weights and AdamW's moments as safetensors, the rest as JSON; older ones go.

    There is no state of random generators: whatever a step draws follows from the seed and its number.
    """
    from safetensors.torch import save_file

    target = folder / f"checkpoint-{step:08d}"
    unfinished = folder / f".{target.name}.part"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(_tensors(model, optimizer), unfinished / TENSORS)
        described = {"step": step, "sha256": _digest(unfinished / TENSORS), "torch": torch.__version__}
        (unfinished / STATE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        for file in unfinished.iterdir():
            _to_disk(file)
        if target.exists():
            shutil.rmtree(target)
        unfinished.replace(target)
    except Exception as error:  # safetensors has errors of its own for a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        good = checkpoints(folder)
        kept = f"the last good one is {good[-1].name}" if good else "there is none before it"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot write the checkpoint of step {step} to {folder} ({reason}); {kept}") from error
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Those that are whole, oldest first."""
    return sorted(p for p in folder.glob("checkpoint-*") if (p / STATE).exists())


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer; returns how many steps were done.

    Raises:
        InputError: for a checkpoint that was changed or cut short, or is of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    before = [p for p in checkpoints(checkpoint.parent) if p < checkpoint]
    way = f"; remove it to go on from {before[-1].name}" if before else "; remove it to start anew"
    try:
        described = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        step, digest = int(described["step"]), described["sha256"]
        found = _digest(checkpoint / TENSORS)
        tensors = load_file(checkpoint / TENSORS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"checkpoint {checkpoint} cannot be read ({error}){way}") from error
    if found != digest:
        raise InputError(f"checkpoint {checkpoint} is damaged: its checksum is not the one written with it{way}")
    own = model.state_dict(keep_vars=True)
    for name, x in own.items():
        kept = tensors.get(f"model/{name}")
        if kept is None or kept.shape != x.shape:
            shape = None if kept is None else tuple(kept.shape)
            raise InputError(
                f"checkpoint {checkpoint} is of another model: {name} is {shape}, expected {tuple(x.shape)}"
            )
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(tensors[f"model/{name}"])
    _fill(optimizer, model, tensors)
    return step


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything by name. Tied parameters are written twice: safetensors holds no aliases."""
    out = {f"model/{name}": x.detach().clone().contiguous() for name, x in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        out |= {f"{moment}/{name}": state[moment].detach().contiguous() for moment in MOMENTS if moment in state}
    return out


def _fill(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """AdamW's moments, where a parameter has had a gradient."""
    for name, parameter in model.named_parameters():
        found: dict[str, Any] = {m: tensors[f"{m}/{name}"] for m in MOMENTS if f"{m}/{name}" in tensors}
        if found:
            on = {m: x.to(parameter.device) if m != "step" else x for m, x in found.items()}
            optimizer.state[parameter] = on


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _to_disk(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())

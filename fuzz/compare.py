"""Runs one case on every kernel and compares the results with the formula."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

import qkv
from fuzz.cases import Case, case
from fuzz.expected import Expected
from fuzz.tiles import tiles
from qkv.kernels import KERNELS

NEVER_REFUSE = ("auto", "eager", "measure")
NO_GRADIENTS = ("flex", "reference")  # on CPU
FEW_PAIRS = 300  # most pairs, over all heads, for the reference, which computes them in loops
FEW_TOLERANCES = 4  # an error of up to so many tolerances is judged again by more samples of rounding errors


@dataclass(frozen=True)
class Mismatch:
    """One number that differs from the formula by more than rounding, or an error."""

    kernel: str
    quantity: str
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.quantity}: {self.text}"


@dataclass
class Report:
    """Result of one case."""

    seed: int
    number: int
    mismatches: list[Mismatch] = field(default_factory=list)
    comparisons: int = 0
    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    tightest: dict[str, float] = field(default_factory=dict)
    """The largest error of each quantity, in units of its tolerance."""


def check(seed: int, number: int) -> Report:
    """Make a case, run it on every kernel and compare."""
    torch.set_num_threads(1)
    made = case(seed, number)
    report = Report(seed, number)
    expected = Expected(made)
    torch.set_num_threads(made.threads)
    with warnings.catch_warnings(), tiles(made.tile):
        warnings.simplefilter("error")  # users would see warnings of torch
        for kernel in ("auto", *KERNELS):
            if (kernel in NO_GRADIENTS and made.learn) or (kernel == "flex" and not made.flex):
                continue
            if kernel == "reference" and made.visible.numel() > FEW_PAIRS:
                continue
            _serve(made, kernel, expected, report)
        if expected.has_statistics:
            _measure(made, expected, report)
    torch.set_num_threads(1)
    return report


def check_some(seed: int, numbers: range) -> list[Report]:
    """`check` of several cases, for a worker process."""
    found = []
    for number in numbers:
        try:
            found.append(check(seed, number))
        except Exception as error:
            raise RuntimeError(f"the fuzzer itself failed: python -m fuzz --seed {seed} --case {number}") from error
    return found


def _serve(made: Case, kernel: str, expected: Expected, report: Report) -> None:
    """Compare the outputs and gradients of `attend` on one kernel."""
    leaves = made.leaves()
    try:
        values = _attend(made, kernel, expected, leaves)
    except qkv.InputError as error:
        report.refused[kernel] += 1
        if kernel in NEVER_REFUSE:
            report.mismatches.append(Mismatch(kernel, "refusal", str(error)))
        return
    except Exception as error:
        report.mismatches.append(Mismatch(kernel, "error", f"{type(error).__name__}: {error}"))
        return
    report.served[kernel] += 1
    _compare(values, expected, kernel, report)


def _attend(made: Case, kernel: str, expected: Expected, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    has_lse = "lse" in expected.values
    weights = kernel == "eager"
    given = made.made(leaves)
    got: Any = qkv.attend(
        *(leaves[x] for x in "qkv"), mask=made.mask, kernel=kernel, return_lse=has_lse, return_weights=weights, **given
    )
    names = ["out", *(["lse"] if has_lse else []), *(["weights"] if weights else [])]
    values = dict(zip(names, got if isinstance(got, tuple) else (got,), strict=True))
    wanted = {name: x for name, x in leaves.items() if name in made.learn}
    if wanted:
        loss = (values["out"] * expected.grad).sum()
        if has_lse:
            lse = values["lse"]
            loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * expected.grad_lse).sum()
        slopes: list[Tensor | None] = [None] * len(wanted)
        if loss.requires_grad:
            slopes = list(torch.autograd.grad(loss, list(wanted.values()), allow_unused=True))
        for (name, x), slope in zip(wanted.items(), slopes, strict=True):
            values[f"gradient of {name}"] = torch.zeros_like(x) if slope is None else slope
    return {name: x.detach() for name, x in values.items()}


def _measure(made: Case, expected: Expected, report: Report) -> None:
    """Compare every statistic of `measure`."""
    try:
        leaves = made.leaves()
        got = qkv.measure(*(leaves[x] for x in "qk"), mask=made.mask, **made.made(leaves), **made.named)
    except Exception as error:
        report.mismatches.append(Mismatch("measure", "error", f"{type(error).__name__}: {error}"))
        return
    report.served["measure"] += 1
    values = {}
    for one in fields(got):
        value = getattr(got, one.name)
        if isinstance(value, Tensor):
            values[f"measure {one.name}"] = value
        elif is_dataclass(value):
            values |= {f"measure {one.name} {x}": getattr(value, x) for x in ("maximum", "mean")}
        elif value:
            values |= {f"measure {one.name} {name}": x for name, x in value.items()}
    missing = {name for name in expected.values if name.startswith("measure ")} ^ set(values)
    if got.max_logit is None and expected.exact.normalizer.divide == "sum":
        missing -= {f"measure {name}" for name in ("max_logit", "min_logit", "argmax")}  # weights by their logarithms
    if got.argmax is not None and got.max_logit is not None:
        score = expected.exact.found.final.detach().gather(-1, got.argmax.clamp(min=0)[..., None])[..., 0]
        values["measure argmax"] = score.masked_fill(got.argmax < 0, -torch.inf).to(got.max_logit.dtype)
    if missing:
        report.mismatches.append(Mismatch("measure", "statistics", f"missing or not requested: {sorted(missing)}"))
    _compare({name: x for name, x in values.items() if name not in missing}, expected, "measure", report)


def _compare(values: dict[str, Tensor], expected: Expected, kernel: str, report: Report) -> None:
    for name, got in values.items():
        report.comparisons += 1
        want, tolerance = expected.values[name], expected.tolerance(name, kernel)
        if got.shape != want.shape or got.dtype != expected.dtype(name):
            text = f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype(name)} {tuple(want.shape)}"
            report.mismatches.append(Mismatch(kernel, name, text))
            continue
        wide = got.double()
        off = torch.where(wide == want, 0.0, (wide - want).abs())  # equal infinities are equal
        skipped = expected.skipped(name)
        if skipped is not None:
            off = off.masked_fill(skipped, 0)
        ratio = torch.nan_to_num(off / tolerance, nan=torch.inf)
        if 1 < float(ratio.max()) < FEW_TOLERANCES:
            expected.add_samples(kernel)
            tolerance = expected.tolerance(name, kernel)
            ratio = torch.nan_to_num(off / tolerance, nan=torch.inf)
        worst = float(ratio.max())
        report.tightest[name] = max(worst, report.tightest.get(name, 0.0))
        if worst > 1:
            at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
            allowed = tolerance.expand(want.shape)[at].item()
            text = f"{wide[at].item():.9g} at {at}, expected {want[at].item():.9g} ± {allowed:.2g}"
            report.mismatches.append(Mismatch(kernel, name, f"{text} ({worst:.3g} tolerances)"))

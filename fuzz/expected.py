"""The expected results of a case, by the formula, and their tolerances.

Tolerances come from the dtype and the condition number of the case: the formula is evaluated again with random rounding
errors in every step (`fuzz.rounding`), and the error of a kernel may be `MARGIN` times the resulting change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Case
from fuzz.draw import Draw
from fuzz.formula import Result, attention
from fuzz.rounding import EXACT, Random, Rounding, Sizes
from fuzz.statistics import COUNTS, OF_COLUMNS, OF_SHAPE, statistics
from qkv import normalizers
from qkv.kernels import native_call
from qkv.native import library
from qkv.statistics import Extremes

SAMPLES = 3
MORE_SAMPLES = 24
"""The samples that decide on an error of a few tolerances: three seldom show the largest change."""
MARGIN = 32
"""A kernel accumulates many rounding errors, in another order."""
OF_WEIGHTS = tuple(f"measure {name}" for name in ("sink", "self_", "previous", "next_", "row_sum"))
CLEAR = 16
"""Minimum distance of a score from a kink or a tie, in units of its error, so that rounding does not decide."""
COARSEST = 2.0**-30
"""Rounding errors of float64 are drawn this large and their effect scaled down, because the formula has them, too."""
SMALLEST_SUM = 1e-30
"""Smaller sums of weights underflow partly in float32; normalizers that avoid this work with logarithms."""
FLOAT32 = torch.finfo(torch.float32).eps
SPREAD = 0.004
"""Float32 resolution of the square of `spread`: two squares of positions in a tile, up to 128² ± 0.001 each."""

Values = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """One evaluation of the formula."""

    leaves: dict[str, Tensor]
    normalizer: Any
    found: Result


def sizes(case: Case, kernel: str) -> tuple[Sizes, float]:
    """The rounding errors of `kernel`, and the factor of their effect."""
    wide = torch.promote_types(case.dtype, torch.float32)
    work, stored = torch.finfo(wide).eps, torch.finfo(case.dtype).eps
    scale = 1.0
    if work < COARSEST:
        scale, work, stored = work / COARSEST, COARSEST, COARSEST
    tiny = 0.0 if wide == torch.float64 else torch.finfo(wide).tiny
    # FlexAttention without a compiler keeps products, weights and slopes of scores in the dtype of the inputs.
    weights = stored if kernel == "flex" else work
    return Sizes(work, stored, weights, stored if kernel == "flex" else work, tiny), scale


class Expected:
    """The expected results of `case`; rows whose results depend on rounding are `skipped`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.exact = self._evaluate(EXACT, None)
        samples = self._samples("eager")
        self.certain = _certain(self.exact, [x for x, _ in samples])
        self._error = _error(self.exact, [x for x, _ in samples])
        self._absolute_error = _error(self.exact, [x for x, _ in samples], absolute=True)
        self._kinked = ~_smooth(self.exact, [x for x, _ in samples])
        smooth = self.certain & ~self._kinked
        # Rows whose gradient depends on rounding get a gradient of 0.
        self.grad = case.grad.masked_fill(~smooth[..., None], 0)
        self.grad_lse = case.grad_lse.masked_fill(~smooth, 0)
        self.has_statistics = bool(self.exact.found.weights.min() >= 0)
        self.values = self._values(self.exact, EXACT)
        self._changes: dict[Sizes, dict[str, Tensor]] = {}
        self._add_changes("eager", samples)

    def _evaluate(self, rounding: Rounding, near: Tensor | None) -> Run:
        case = self.case
        leaves = {
            name: rounding.leaf(x.detach().double()).requires_grad_(name in case.learn)
            for name, x in case.tensors().items()
        }
        made = case.made(leaves)
        with torch.set_grad_enabled(bool(case.learn)):
            found = attention(*(leaves[x] for x in "qkv"), case.visible, rounding=rounding, near=near, **made)
        return Run(leaves, made["normalizer"], found)

    def _samples(self, kernel: str, numbers: range = range(SAMPLES)) -> list[tuple[Run, Rounding]]:
        of, _ = sizes(self.case, kernel)
        level = self.exact.found.level
        near = None if level is None else level.detach()[..., None]
        found = []
        for n in numbers:
            rounding = Random(of, Draw(self.case.seed, self.case.number, f"rounding {n}").generator)
            found.append((self._evaluate(rounding, near), rounding))
        return found

    def _values(self, run: Run, rounding: Rounding) -> Values:
        """All results of a kernel and all statistics, by name."""
        case, found = self.case, run.found
        values = {"out": found.out.detach(), "weights": found.weights.detach()}
        loss = (found.out * self.grad.double()).sum()
        size = (torch.maximum(found.out.detach().abs(), self._rounded_terms()) * self.grad.double().abs()).sum(-1)
        if isinstance(run.normalizer, normalizers.Softmax):
            assert found.lse is not None
            values["lse"] = found.lse.detach()
            visible = found.lse != -torch.inf
            loss = loss + (torch.where(visible, found.lse, 0.0) * self.grad_lse.double()).sum()
            size = size + self.grad_lse.double().abs() * visible
        if found.anchor is not None:
            loss = loss + (found.anchor * rounding.row_gradient(size)).sum()
        wanted = {name: x for name, x in run.leaves.items() if name in case.learn}
        if wanted:
            slopes = [None] * len(wanted)
            if loss.requires_grad:
                slopes = list(torch.autograd.grad(loss, list(wanted.values()), allow_unused=True))
            for (name, x), slope in zip(wanted.items(), slopes, strict=True):
                values[f"gradient of {name}"] = torch.zeros_like(x) if slope is None else slope
        if self.has_statistics:
            sink = None if found.sink_weight is None else found.sink_weight.detach()
            with torch.no_grad():
                made = statistics(values["weights"], case.visible, sink, case.request)
            values |= {f"measure {name}": x for name, x in made.items()}
            if "lse" in values:
                values["measure lse"] = values["lse"]
            final, counted = found.final.detach(), case.request.queries
            if counted is not None:
                final = final.masked_fill(~counted[:, None, :, None], -torch.inf)
            values["measure max_logit"] = final.amax(-1)
            if any(isinstance(x, Extremes) for x in case.named.get("statistics", ())):
                values["measure min_logit"] = final.masked_fill(final == -torch.inf, torch.inf).amin(-1)
                values["measure argmax"] = final.amax(-1)  # by its score: rounding decides between almost equal ones
        return values

    def _add_changes(self, kernel: str, samples: list[tuple[Run, Rounding]]) -> None:
        of, scale = sizes(self.case, kernel)
        all_values = [self._values(run, rounding) for run, rounding in samples]
        changes = {}
        for name, want in self.values.items():
            off = [torch.zeros_like(want)]
            off += [torch.where(want.isfinite(), x[name] - want, 0.0).abs() for x in all_values]
            changes[name] = torch.stack(off).amax(0) * scale
            if of in self._changes:
                changes[name] = torch.maximum(changes[name], self._changes[of][name])
        self._changes[of] = changes

    def add_samples(self, kernel: str) -> None:
        """Estimate the tolerances for a kernel from more samples."""
        self._add_changes(kernel, self._samples(kernel, range(SAMPLES, SAMPLES + MORE_SAMPLES)))

    def skipped(self, name: str) -> Tensor | None:
        """Mask of the results that depend on rounding, which broadcasts to the value, or None."""
        rows = ~self.certain
        if name.startswith("measure "):
            what = name.removeprefix("measure ")
            if what in COUNTS:
                return None
            if what in OF_COLUMNS:
                return torch.tensor(True) if rows.any() else None
            if what in OF_SHAPE:
                rows = rows | self._weightless()
            if what == "lse" and self.case.request.queries is not None:
                rows = rows | ~self.case.request.queries[:, None]
            return rows
        if name in ("out", "weights"):
            return rows[..., None]
        return None

    def _weightless(self) -> Tensor:
        """Rows with so little total weight that they may count as empty, or that their weights lose precision.

        In float64 these are rows below 1e-150, whose squares underflow; see `Statistics`.
        """
        total = self.exact.found.weights.detach().sum(-1)
        tiny = sizes(self.case, "eager")[0].tiny
        return (total > 0) & (total < max(1e3 * self.case.shape.nk * tiny, 1e-149))

    def tolerance(self, name: str, kernel: str) -> Tensor:
        """The largest error allowed in a value."""
        of, scale = sizes(self.case, kernel)
        if of not in self._changes:
            self._add_changes(kernel, self._samples(kernel))
        want, change = self.values[name], self._changes[of][name]
        if change.ndim == 4:
            change = change.amax(-1, keepdim=True)
        if change.ndim:
            # Rounding errors may cancel by chance in one number, but not in all of its neighbours.
            of_neighbours = change.mean((-2, -1) if change.ndim == 4 else -1, keepdim=True)
            change = torch.maximum(change, 0.1 * of_neighbours)
        wide = torch.promote_types(self.case.dtype, torch.float32)
        eps = torch.finfo(wide).eps
        last = (
            2 * torch.finfo(self.dtype(name)).eps
        )  # rounding of the stored result and of sums, including those of the formula
        tolerance = MARGIN * change + torch.where(want.isfinite(), want.abs(), 0.0) * (last + 16 * eps)
        tolerance = tolerance + 100 * torch.finfo(wide).tiny
        if name == "out":
            tolerance = tolerance + torch.finfo(torch.bfloat16).eps * self._rounded_terms()
        if name in OF_WEIGHTS:
            # The level and the scores come from different products of queries and keys, so errors do not cancel.
            tolerance = tolerance + want.abs() * scale * MARGIN * self._absolute_error
            # A weight of 0 beside a kink becomes as large as the error of its score, which few samples may not show.
            tolerance = tolerance + scale * MARGIN * self._error * self._kinked
        if name.startswith("gradient of bias"):
            # The formula itself, and kernels in float64, add the gradients of all pairs, which may cancel.
            pairs = self.exact.found.final.numel()
            tolerance = tolerance + want.abs() * torch.finfo(torch.float64).eps * math.sqrt(pairs)
        if name == "measure sink_mass":
            tolerance = tolerance + scale * MARGIN * self._absolute_error
        if name.startswith("measure thumbnail"):
            tolerance = tolerance + want.abs() * scale * MARGIN * self._absolute_error.amax(-1)[..., None, None]
        if name == "measure entropy":
            # Logarithms of weights are differences of scores and the level, which cancel.
            tolerance = tolerance + 8 * eps * (1 + self._largest_logarithm()) + MARGIN * scale * self._error
        if name == "measure effective_keys":
            # The error of a sum of equal numbers grows with their number, and drawn errors of equal weights cancel.
            tolerance = tolerance + want * eps * self.case.shape.nk
        if name == "measure distance":
            # Moments about the centre of a tile cancel.
            tolerance = tolerance + 8 * eps * (self.case.shape.nq + self.case.shape.nk)
        if name == "measure spread":
            resolved = SPREAD * eps / FLOAT32 + 16 * torch.finfo(torch.float64).eps * self.case.shape.nk**2
            tolerance = tolerance + (want.square() + resolved).sqrt() - want
        if name in ("measure max_logit", "measure min_logit", "measure argmax"):
            # Scores are sums of the level and the logarithm of a weight.
            tolerance = tolerance + 4 * eps * (1 + self._largest_logarithm())
        return tolerance

    def _rounded_terms(self) -> Tensor:
        """How large the terms of the output are, which may cancel, if the native library rounds their weights; or 0."""
        inputs, found = self.case.inputs, self.exact.found
        if isinstance(library.compiled(), str) or native_call.products(*(inputs[x] for x in "qkv")) != torch.bfloat16:
            return torch.zeros_like(found.out.detach())
        sizes = self.exact.leaves["v"].detach().abs().nan_to_num(0, 0, 0)  # keys that no query sees may hold NaN
        sizes = sizes.repeat_interleave(self.case.shape.h // self.case.shape.hkv, 1)
        return found.weights.detach().abs() @ sizes

    def _largest_logarithm(self) -> Tensor:
        """Size of the scores of each row, of its level, and of the logarithm of its sum."""
        final, level = self.exact.found.final.detach(), self.exact.found.level
        largest = torch.where(final.isfinite(), final, 0.0).abs().amax(-1)
        total = self.exact.found.weights.detach().sum(-1)
        largest = largest + torch.where(total > 0, total, 1.0).log().abs()
        return largest if level is None else largest + level.detach().abs()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a result."""
        if name in ("out", "weights"):
            return self.case.dtype
        if name.startswith("gradient of "):
            return self.case.tensors()[name.removeprefix("gradient of ")].dtype
        return torch.promote_types(self.case.dtype, torch.float32)


def _error(exact: Run, samples: list[Run], *, absolute: bool = False) -> Tensor:
    """Rounding error of the final scores of each row (b, h, nq), relative to the level if there is one."""

    def relative(run: Run) -> Tensor:
        final, level = run.found.final.detach(), run.found.level
        return final if level is None or absolute else final - level.detach()[..., None]

    want = relative(exact)
    off = [torch.where(want.isfinite(), (relative(run) - want).abs(), 0.0) for run in samples]
    return torch.stack(off).amax(0).amax(-1)


def _certain(exact: Run, samples: list[Run]) -> Tensor:
    """Rows (b, h, nq) whose output does not depend on rounding."""
    final, total = exact.found.final.detach(), exact.found.total
    certain = torch.ones(final.shape[:3], dtype=torch.bool)
    if isinstance(exact.normalizer, normalizers.Hard) and final.shape[-1] > 1:
        # The best score must exceed the next by more than the rounding error.
        best, after = final.topk(2, -1).values.unbind(-1)
        certain &= (after == -torch.inf) | (best - after > CLEAR * _error(exact, samples))
    if exact.found.level is not None:
        # Rounding may change weights by a factor of e or more; then few samples do not show the largest change.
        highest = final.argmax(-1, keepdim=True)

        def below(run: Run) -> Tensor:
            found = run.found.final.detach()
            return torch.nan_to_num(found.gather(-1, highest) - found, nan=torch.inf)

        want = below(exact)
        off = torch.stack([torch.where(want.isfinite(), below(run) - want, 0.0).abs() for run in samples]).amax(0)
        certain &= ~((off > 1) & (want < CLEAR * off)).any(-1)
    if total is not None:
        # A sum of terms of both signs, or of few small weights, may be mostly rounding error; a tiny one may underflow.
        certain &= total.detach().abs() > SMALLEST_SUM
        for run in samples:
            assert run.found.total is not None
            certain &= (run.found.total.detach() / total.detach() - 1).abs() < 1e-3
    return certain


def _smooth(exact: Run, samples: list[Run]) -> Tensor:
    """Rows (b, h, nq) without scores so close to a kink of the weight function that rounding decides the derivative."""
    final, level, normalizer = exact.found.final.detach(), exact.found.level, exact.normalizer
    if isinstance(normalizer, normalizers.ReLU | normalizers.Softpick):
        from_kink = final
    elif isinstance(normalizer, normalizers.Entmax) and normalizer.alpha > 1.5:  # below, the derivative is continuous
        assert level is not None
        from_kink = final - level.detach()[..., None]
    else:
        return torch.ones(final.shape[:3], dtype=torch.bool)
    return ~(from_kink.abs() < CLEAR * _error(exact, samples)[..., None]).any(-1)

"""The command ``python -m fuzz.functions``: random calls of functions besides `attend`, against float64 formulas.

A case is one of `KINDS`: linear attention with decays and the delta rule, in chunks and from a state; latent and
differential attention, whole and with caches; the statistics of a paged cache; rotary positions of a share of the
pairs; and decoders of random configurations, whose steps with a cache are one forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import qkv
from fuzz.draw import Draw
from fuzz.statistics import Request, statistics
from qkv import InputError, cache, masks, models, positions
from qkv.features import elu_plus_one
from qkv.linear import linear_attend
from qkv.models.decoder import LAYER_TYPES, RECURRENT, SOFTMAX
from qkv.nn import DifferentialAttention, LatentAttention
from qkv.statistics.paged import PagedKeys, measure_paged

CLOSE = 1e-8
"""Relative error of float64 results; that of float32 results is the square root of it."""
CAUSAL = qkv.Attention(mask=masks.Causal())
Pair = tuple[Any, Any]
"""What qkv computes, and what is expected."""


def _cuts(draw: Draw, n: int) -> list[int]:
    """Sizes of a few parts of n."""
    at = sorted({0, n, *(draw.integer(1, n) for _ in range(draw.integer(0, 4)))})
    return [b - a for a, b in pairwise(at)]


def _linear(draw: Draw) -> dict[str, Pair]:
    b, hkv, group, n, m, dv = (draw.integer(1, most) for most in (2, 3, 2, 40, 5, 5))
    delta, dtype = draw.chance(0.5), draw.choice([torch.float64, torch.float32])
    q, k, v = draw.normal(b, hkv * group, n, m), draw.normal(b, hkv, n, m), draw.normal(b, hkv, n, dv)
    features: Callable[[Tensor], Tensor] = elu_plus_one
    if delta:
        q, k, features = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1), lambda x: x
    gates = [(hkv,), (b, hkv, n), (b, hkv, n, m)]
    strength = draw.choice([0.01, 1.0, 30.0])
    decay = -strength * draw.uniform(0, 1, *draw.choice(gates)) if not delta or draw.chance(0.6) else None
    if decay is not None and draw.chance(0.15):
        decay = decay.masked_fill(draw.booleans(0.1, *decay.shape), -torch.inf)
    beta = draw.uniform(0, 2, *draw.choice(gates[:2])) if delta else None
    divided = not delta and draw.chance(0.5)
    tensors = [x.to(dtype) for x in (q, k, v, decay, beta) if x is not None]

    def unpacked(x: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        more = x[3:]
        return (more.pop(0) if decay is not None else None), (more.pop(0) if beta is not None else None)

    def mine(x: list[Tensor]) -> Tensor:
        outs, state, start = [], None, 0
        gated = unpacked(x)
        for size in _cuts(draw, n):
            at = slice(start, start + size)
            gate = [g if g is None or g.ndim == 1 else g[:, :, at] for g in gated]
            out, state = linear_attend(
                *(y[:, :, at] for y in x[:3]), features=features, normalize=divided, decay=gate[0], beta=gate[1],
                state=state, chunk=draw.integer(1, 64), return_state=True,
            )  # fmt: skip
            outs.append(out)
            start += size
        return torch.cat(outs, 2)

    def formula(x: list[Tensor]) -> Tensor:
        decays, rates = unpacked(x)
        phi_q, phi_k = features(x[0]).unflatten(1, (hkv, group)), features(x[1])
        state, total, outs = x[0].new_zeros(b, hkv, m, dv), x[0].new_zeros(b, hkv, m), []
        for t in range(n):
            key, value = phi_k[:, :, t], x[2][:, :, t]
            if decays is not None:
                kept = decays[None, :, None] if decays.ndim == 1 else decays[:, :, t]
                kept = (kept[..., None] if decays.ndim == 3 else kept).exp()
                state, total = state * kept[..., None], total * kept
            if rates is not None:
                rate = (rates[None, :] if rates.ndim == 1 else rates[:, :, t])[..., None]
                value = rate * (value - (state * key[..., None]).sum(-2))
            state, total = state + key[..., None] * value[..., None, :], total + key
            out = torch.einsum("bgrm,bgmd->bgrd", phi_q[:, :, :, t], state)
            if divided:
                out = out / torch.einsum("bgrm,bgm->bgr", phi_q[:, :, :, t], total)[..., None]
            outs.append(out.flatten(1, 2))
        return torch.stack(outs, 2)

    return _with_gradients(draw, mine, formula, tensors)


def _with_gradients(
    draw: Draw, mine: Callable[[list[Tensor]], Tensor], formula: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]
) -> dict[str, Pair]:
    """Outputs and gradients of all tensors, those of the formula in float64."""
    leaves = [[x.detach().to(kind).requires_grad_() for x in tensors] for kind in (tensors[0].dtype, torch.float64)]
    outs = [mine(leaves[0]), formula(leaves[1])]
    slope = draw.normal(*outs[0].shape)
    grads = [torch.autograd.grad((y * slope.to(y)).sum(), x) for y, x in zip(outs, leaves, strict=True)]
    found: dict[str, Pair] = {"out": (outs[0], outs[1])}
    return found | {f"gradient {i}": pair for i, pair in enumerate(zip(*grads, strict=True))}


def _mask(draw: Draw, n: int) -> tuple[masks.Mask, Tensor]:
    """A causal mask, and it dense."""
    window = draw.choice([None, 1, 3, n])
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    back = torch.arange(n)[:, None] - torch.arange(n)
    return mask, (back >= 0) & (back < (n if window is None else window))


def _rotary(draw: Draw, dim: int) -> tuple[positions.Rotary, Callable[[Tensor, Tensor], Tensor]]:
    """Rotary positions of a share of the pairs, and their formula for x (…, n, d)."""
    share, base, paired = (
        draw.choice([None, 0.0, 0.25, 0.5, 0.75, 1.0]),
        draw.choice([10.0, 10_000.0]),
        draw.chance(0.5),
    )
    scaling = None if share is None else positions.Proportional(share)
    turning = dim // 2 if share is None else int(share * (dim // 2))

    def turned(x: Tensor, at: Tensor) -> Tensor:
        out = x.clone()
        for i in range(turning):
            first, second = (2 * i, 2 * i + 1) if paired else (i, i + dim // 2)
            angle = at.double() * base ** (-2 * i / dim)
            a, b = x[..., first], x[..., second]
            out[..., first] = a * angle.cos() - b * angle.sin()
            out[..., second] = a * angle.sin() + b * angle.cos()
        return out

    return positions.Rotary(dim, base=base, interleaved=paired, scaling=scaling), turned


def _turns(draw: Draw) -> dict[str, Pair]:
    b, h, n, dim = (draw.integer(1, most) for most in (2, 3, 9, 6))
    rotary, turned = _rotary(draw, 2 * dim)
    x, at = draw.normal(b, h, n, 2 * dim + draw.integer(0, 3)), draw.integer(0, 5000) + torch.arange(n)
    each = torch.stack([at + i for i in range(b)])
    wanted = torch.cat([turned(x[i : i + 1], places) for i, places in enumerate(each)])
    return {"one": (rotary(x, at), turned(x, at)), "by item": (rotary(x, each), wanted)}


def _latent(draw: Draw) -> dict[str, Pair]:
    b, n, width, heads, latent, size, out_size = (draw.integer(1, most) for most in (2, 12, 12, 3, 7, 5, 5))
    rotary, turned = _rotary(draw, 2 * draw.integer(1, 3))
    q_latent = draw.choice([None, draw.integer(1, 6)])
    torch.manual_seed(draw.integer(0, 2**31))
    layer = LatentAttention(
        width, heads, latent=latent, head_dim=(size, out_size), rotary=rotary, q_latent=q_latent, attention=CAUSAL
    ).double()
    x, (mask, seen) = draw.normal(b, n, width), _mask(draw, n)

    def normed(y: Tensor, norm: nn.RMSNorm) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    weights = dict(layer.named_parameters())
    q = x @ weights["q_proj.weight"].T if q_latent is None else (
        normed(x @ weights["q_a_proj.weight"].T, layer.q_a_layernorm) @ weights["q_b_proj.weight"].T
    )  # fmt: skip
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    short, shared = (x @ weights["kv_a_proj_with_mqa.weight"].T).split((latent, rotary.dim), -1)
    up = (
        (normed(short, layer.kv_a_layernorm) @ weights["kv_b_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
    )
    at = torch.arange(n)
    scores = q[..., :size] @ up[..., :size].mT + turned(q[..., size:], at) @ turned(shared[:, None], at).mT
    maps = (scores * (size + rotary.dim) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    want = (maps @ up[..., size:]).transpose(1, 2).flatten(2) @ weights["o_proj.weight"].T
    found = {f"absorbed {a}": (layer(x, mask=mask, absorbed=a), want) for a in (False, True)}
    found["weights"] = layer(x, mask=mask, return_weights=True)[1], maps
    return found | _cached(draw, layer, x, mask, want, [cache.Latent(n), cache.Full(n)])


def _differential(draw: Draw) -> dict[str, Pair]:
    b, n, heads, size, number = (draw.integer(1, most) for most in (2, 12, 3, 4, 20))
    rotary, turned = _rotary(draw, 2 * size)
    torch.manual_seed(draw.integer(0, 2**31))
    layer = DifferentialAttention(4 * size * heads, heads, layer=number, attention=CAUSAL, rotary=rotary).double()
    layer.lambdas.data += draw.normal(*layer.lambdas.shape)
    x, (mask, seen) = draw.normal(b, n, 4 * size * heads), _mask(draw, n)
    q, k = (part(x).unflatten(-1, (heads, 2, 2 * size)).movedim(1, -2) for part in (layer.q_proj, layer.k_proj))
    q, k = (turned(y, torch.arange(n)) for y in (q, k))
    maps = (q @ k.mT * (2 * size) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    a, c, e, f = layer.lambdas
    initial = 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * number, dtype=torch.float64))
    signed = maps[:, :, 0] - ((a @ c).exp() - (e @ f).exp() + initial) * maps[:, :, 1]
    each = signed @ layer.v_proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
    each = layer.norm.weight * each / (each.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 - initial)
    want = layer.o_proj(each.transpose(1, 2).flatten(2))
    out, weights = layer(x, mask=mask, return_weights=True)
    found = {"out": (out, want), "weights": (weights, signed)}
    return found | _cached(draw, layer, x, mask, want, [cache.Full(n)])


def _cached(
    draw: Draw, layer: nn.Module, x: Tensor, mask: masks.Mask, want: Tensor, caches: list[cache.Cache]
) -> dict[str, Pair]:
    """The outputs of a layer with caches, in parts of any sizes."""
    if mask != masks.Causal():
        return {}  # a mask of a call is of its own queries and keys
    found = {}
    for one in caches:
        with torch.no_grad():
            steps = [layer(part, cache=one) for part in x.split(_cuts(draw, x.shape[1]), 1)]
        found[type(one).__name__] = torch.cat(steps, 1), want
    return found


def _paged(draw: Draw) -> dict[str, Pair]:
    requests, hkv, group, size, d = (draw.integer(1, most) for most in (4, 2, 3, 4, 5))
    lengths = [draw.integer(1, 20) for _ in range(requests)]
    queries = [draw.integer(1, length) for length in lengths]
    most = -(-max(lengths) // size) + draw.integer(0, 2)
    blocks = draw.normal(requests * most + 2, hkv, size, d)
    tables = torch.tensor(draw.some(range(len(blocks)), requests * most, requests * most)).view(requests, most)
    tables = torch.where(draw.booleans(0.2, requests, most), tables[:1, :1], tables)  # blocks that requests share
    first = draw.integer(0, 3)
    starts = [first + sum(queries[:i]) for i in range(requests + 1)]
    q = draw.normal(starts[-1] + draw.integer(0, 3), hkv * group, d)
    if draw.chance(0.3):
        starts = torch.tensor(starts, dtype=torch.int32)  # type: ignore[assignment]
    got = measure_paged(q, PagedKeys(blocks, tables, torch.tensor(lengths)), starts)
    found = {}
    for i, one in enumerate(got):
        keys = torch.stack([blocks[tables[i, j // size], :, j % size] for j in range(lengths[i])], 1)
        rows = q[int(starts[i]) : int(starts[i + 1])].transpose(0, 1)
        scores = rows @ keys.repeat_interleave(group, 0).mT * d**-0.5
        seen = torch.ones(queries[i], lengths[i]).tril(lengths[i] - queries[i]).bool().expand(scores.shape)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)[None]
        want = statistics(weights, seen[None], None, Request([0]))
        found |= {f"{name} of request {i}": (getattr(one, name), x) for name, x in want.items()}
    return found


def _decoder(draw: Draw) -> dict[str, Pair]:
    """Steps with a cache equal one forward, whose tokens do not see later ones; padding on the left changes nothing."""
    heads, size = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    where = draw.choice(["learned", "sinusoidal", "rotary", "rotary", "rotary", "alibi", "t5", "none"])
    options: dict[str, Any] = {
        "layers": draw.integer(1, 4), "heads": heads, "d_model": heads * size, "positions": where, "vocab_size": 23,
        "context": 40, "norm": draw.choice(["layernorm", "rmsnorm"]), "place": draw.choice(["pre", "post"]),
        "window": draw.choice([None, None, 1, 3, (2, None), (None, 3), (4, 2, None)]),
    }  # fmt: skip
    kinds = draw.choice([("attention", "forgetting"), SOFTMAX, LAYER_TYPES, LAYER_TYPES])
    options["layer_types"] = tuple(draw.choice(kinds) for _ in range(draw.integer(1, 3)))
    if {"latent", "differential", *RECURRENT} & {*options["layer_types"]}:
        options |= {"positions": "rotary", "window": None}
    if options["positions"] == "rotary" and draw.chance(0.5):
        options |= {"rotary_scaling": "proportional", "rotary_factor": draw.choice([0.25, 0.5, 0.75])}
    if set(options["layer_types"]) <= set(SOFTMAX):
        options["normalizer"] = draw.choice(["softmax", "softmax", "softpick", "off_by_one", "sigmoid"])
    if set(options["layer_types"]) <= {"attention", "forgetting"}:
        options |= {"kv_heads": draw.choice([1, heads]), "qk_norm": draw.chance(0.3), "sink": draw.chance(0.3)}
    torch.manual_seed(draw.integer(0, 2**31))
    try:
        model = models.DecoderLM(models.DecoderConfig(**options)).double().eval()
    except InputError:  # options that do not go together
        return {}
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, dtype=torch.float64)
    n = draw.integer(2, 14)
    ids = torch.randint(23, (2, n))
    found: dict[str, Pair] = {}
    with torch.no_grad():
        whole, state, start = model(ids), model.start(2), 0
        for size in _cuts(draw, n):
            start += size
            found[f"token {start}"] = model.step(ids[:, start - size : start], state), whole[:, start - 1]
        other = ids.clone()
        other[:, n // 2 :] = (other[:, n // 2 :] + 1) % 23
        found["earlier tokens"] = model(other)[:, : n // 2], whole[:, : n // 2]
        count = draw.integer(1, 4)
        padded = torch.cat([torch.full((2, count), 5), ids], 1)
        try:
            state = model.start(2, padding=torch.tensor([count, count]))
        except InputError:
            return found
        found["padded"] = model.step(padded, state), whole[:, -1]
    return found


KINDS: dict[str, Callable[[Draw], dict[str, Pair]]] = {
    "linear_attend": _linear, "LatentAttention": _latent, "DifferentialAttention": _differential,
    "measure_paged": _paged, "p-RoPE": _turns, "DecoderLM": _decoder,
}  # fmt: skip


def mismatch(seed: int, number: int) -> str | None:
    """What is wrong with a case; None if all is right."""
    kind = [*KINDS][number % len(KINDS)]
    try:
        found = KINDS[kind](Draw(seed, number))
    except Exception as error:
        return f"{kind}: {type(error).__name__}: {error}"
    for name, (got, want) in ((name, (a.detach(), b.detach())) for name, (a, b) in found.items()):
        if got.shape != want.shape:
            return f"{kind}: {name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        close = CLOSE if got.dtype in (torch.float64, torch.int64) else CLOSE**0.5
        off = (got.double() - want.double()).abs().nan_to_num(nan=torch.inf)
        size = max(1.0, float(want.double().abs().max())) if want.numel() else 1.0
        if want.numel() and not float(off.max()) <= close * size:
            return f"{kind}: {name} differs by {float(off.max()):.3g} from {size:.3g}"
    return None


def main(cases: int = 1000, seed: int = 0, case: int | None = None, start: int = 0) -> int:
    """Check random calls of functions and layers against float64 formulas; a failure is printed with its command.

    Args:
        cases: number of cases.
        seed: random seed of all cases.
        case: number of a single case.
        start: number of the first case.
    """
    torch.set_num_threads(1)
    failed = 0
    numbers = range(start, start + cases) if case is None else range(case, case + 1)
    for number in numbers:
        if (found := mismatch(seed, number)) is not None:
            failed += 1
            print(f"python -m fuzz.functions --seed {seed} --case {number}  {found}", flush=True)
    print(f"{len(numbers)} cases of {', '.join(KINDS)}; {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    import tyro

    sys.exit(tyro.cli(main))

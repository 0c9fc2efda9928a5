"""`plan`: the kernel of an attention call and the reasons, FLOPs, memory traffic and peak memory, and a diagram.

The numbers come from formulas because PyTorch's FLOP counter reports 0 for its fused CPU kernels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Bias
from qkv.compat import Form
from qkv.engine.call import Call, at_least_float32
from qkv.engine.sizes import sizes
from qkv.engine.tiles import block_status
from qkv.errors import one_of
from qkv.kernels import FORM_WEIGHTS, choose, linear, opaque
from qkv.masks import EMPTY, FULL, Mask, Tiles
from qkv.masks.base import expression
from qkv.normalizers import Normalizer
from qkv.results import A
from qkv.scores import Score
from qkv.statistics.measure import engine


@dataclass(frozen=True)
class Plan:
    """The kernel chosen for a call, the reason, and the cost of the forward pass. ``print(plan)`` shows a table.

    >>> import torch
    >>> from qkv import plan
    >>> x = torch.zeros(1, 1, 512, 16)
    >>> found = plan(x, x, x)
    >>> found.kernel, sorted(found.rejected)[:2], found.flops == 4 * 512 * 512 * 16
    ('native', ['eager', 'flex'], True)
    """

    kernel: str
    reason: str
    rejected: Mapping[str, str]
    """The reason why each other kernel was not chosen."""
    pairs: int
    """Pairs of query and key that are computed; a partial tile counts half of its pairs."""
    flops: int
    """Multiplications and additions of the two matrix products: q·k and weights·v."""
    traffic_bytes: int
    """Minimum memory traffic: q, k, v, the output, the log-sum-exp, and the weights if they are formed."""
    peak_bytes: int
    """Estimated memory beyond the inputs: outputs, copies, tiles."""
    share: float
    """Fraction of all query-key pairs that are computed."""
    statistics: str
    """What computes the statistics of the weights, if they are requested."""
    drawing: str
    """The text of `diagram`."""

    def diagram(self, form: Literal["text", "mermaid"] = "text") -> str:
        """Return the way from queries, keys and values to the output, with the shapes of this call.

        Args:
            form: ``"text"``, or ``"mermaid"`` for a flowchart that GitHub, notebooks and documentation sites draw.

        >>> import torch, qkv
        >>> q, k, v = torch.zeros(1, 4, 100, 16), torch.zeros(1, 2, 120, 16), torch.zeros(1, 2, 120, 8)
        >>> print(qkv.plan(q, k, v, mask=qkv.masks.Window(64), kernel="tiled").diagram())
        queries  1 × 4 × 100 × 16
        keys     1 × 2 × 120 × 16   each of their heads serves 2 heads of queries
        values   1 × 2 × 120 × 8    each of their heads serves 2 heads of queries
          │ dot products × 0.25
        scores   1 × 4 × 100 × 120  never formed whole: the kernel 'tiled' computes them in blocks
          │ mask Window(size=64)
          │ Softmax()
        weights  1 × 4 × 100 × 120  never formed whole: the kernel 'tiled' computes them in blocks
          │ weighted sum of the values
        output   1 × 4 × 100 × 8
        """
        one_of("form", form, ("text", "mermaid"))
        return self.drawing if form == "text" else _mermaid(self.drawing)

    def _repr_html_(self) -> str:
        """What a notebook shows: the way to the output, and the table."""
        text = f"{self.drawing}\n\n{self}"
        return f"<pre>{html.escape(text)}</pre>"

    def __str__(self) -> str:
        width = max(map(len, (self.kernel, *self.rejected)))
        lines = [
            f"{self.kernel:<{width}}  {self.reason}",
            f"{'':<{width}}  work    {_amount(self.flops, 'FLOP', 1000)} over {self.share:.0%} of the pairs",
            f"{'':<{width}}  memory  {_amount(self.peak_bytes, 'B', 1024)} beside the inputs (estimate), "
            f"{_amount(self.traffic_bytes, 'B', 1024)} read and written",
            f"{'':<{width}}  statistics, if requested: {self.statistics}",
            *(f"{name:<{width}}  not: {why}" for name, why in self.rejected.items()),
        ]
        return "\n".join(lines)


def _amount(value: float, unit: str, step: int) -> str:
    prefixes = ["", "Ki", "Mi", "Gi", "Ti"] if step == 1024 else ["", "k", "M", "G", "T"]
    power = 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"


@opaque
def plan(
    q: A,
    k: A,
    v: A,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    return_weights: bool = False,
) -> Plan:
    """Return the kernel that `attend` would choose for these arguments, the reasons against the others, and the cost.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> print(qkv.plan(q, k, v, return_weights=True).kernel)
    eager
    """
    _, (queries, keys, values), _ = Form.of(q, k, v)
    call = Call.of(queries, keys, values, mask, bias, score, normalizer, dropout_p)
    name, reason, rejected = choose(call, kernel, weights=return_weights)
    pairs, flops, moved, peak = cost(name, call)
    b, h, n_queries, _ = call.q.shape
    share = pairs / (b * h * n_queries * call.k.shape[2])
    return Plan(name, reason, rejected, pairs, flops, moved, peak, share, engine(call), diagram(call, name))


def cost(kernel: str, call: Call) -> tuple[int, int, int, int]:
    """Return the pairs, FLOPs, memory traffic and peak memory of `call` on the kernel of that name; see `Plan`."""
    b, h, n_queries, d = call.q.shape
    n_keys, dv = call.v.shape[2:]
    own_bytes, sum_bytes = call.q.element_size(), at_least_float32(call.q.dtype).itemsize
    pairs = b * h * n_queries * n_keys if kernel in FORM_WEIGHTS else visible_pairs(call)
    inputs = call.q.numel() + call.k.numel() + call.v.numel()
    out = b * h * n_queries * dv
    moved = own_bytes * (inputs + out) + sum_bytes * b * h * n_queries
    score_flops = 2 * d if call.pairwise is None else 4 * d  # an addition, a function, a product and a sum
    flops = pairs * (score_flops + 2 * dv)
    result = own_bytes * out + sum_bytes * b * h * n_queries
    if kernel == "linear":
        chunks = -(-n_keys // linear.CHUNK)
        causal = linear.causal(call)
        inside = b * h * n_queries * linear.CHUNK if causal else 0
        pairs = inside
        flops = inside * 2 * (d + dv) + 2 * d * (dv + 1) * (b * h * n_queries + b * call.k.shape[1] * n_keys)
        peak = result + sum_bytes * (inputs + out + inside + (b * call.k.shape[1] * chunks * d * dv if causal else 0))
    elif kernel == "eager":
        peak = result + 4 * sum_bytes * b * h * n_queries * n_keys
    elif kernel == "reference":
        peak = result + 8 * b * h * n_queries * n_keys
    elif kernel == "tiled":
        table = sizes(call.q.device)
        peak = result + sum_bytes * (inputs + 2 * out) + 3 * sum_bytes * min(table.heads, h) * table.tile**2
    elif kernel == "native":
        packed = 4 * (n_keys + 64) * (d + dv)  # the keys and values of a head, and a block of queries
        peak = result + torch.get_num_threads() * packed + (4 * (inputs + out) if own_bytes < 4 else 0)
    else:  # flex
        padded = b * h * n_queries * max(d, dv) + b * call.k.shape[1] * n_keys * 2 * max(d, dv) if d != dv else 0
        peak = result + own_bytes * padded + torch.get_num_threads() * sum_bytes * 2 * 256 * (512 + dv)
    moved += own_bytes * b * h * n_queries * n_keys if kernel in FORM_WEIGHTS else 0
    return pairs, flops, moved, peak


def visible_pairs(call: Call) -> int:
    """Return the estimated number of visible pairs: all pairs of FULL tiles and half the pairs of PARTIAL tiles."""
    grid = call.grid
    size = max(64, grid.n_keys // 1024)
    tiles = Tiles.of(grid, size, size)
    status = block_status(call.mask, tiles, grid).expand(grid.batch, grid.heads, -1, -1)
    area = (tiles.q_last - tiles.q_first + 1)[:, None] * (tiles.k_last - tiles.k_first + 1)
    share = torch.where(status == FULL, 1.0, torch.where(status == EMPTY, 0.0, 0.5))
    return int((share.double() * area).sum())


def diagram(call: Call, kernel: str) -> str:
    """Return the tensors of a call with their shapes, in the order in which they are computed, and the operations."""
    user = call.user
    b, h, n_queries, _ = call.q.shape
    if kernel in FORM_WEIGHTS:
        formed = f"formed by the kernel {kernel!r}"
    elif kernel == "linear":
        formed = "never formed: the linear kernel first sums keys × values"
    else:
        formed = f"never formed whole: the kernel {kernel!r} computes them in blocks"
    queries_per_key_head = h // call.k.shape[1]
    group = f"each of their heads serves {queries_per_key_head} heads of queries" if queries_per_key_head > 1 else ""
    rows: list[tuple[str, str, str]] = []  # the name, shape and note of a tensor; or "", an operation and ""

    def add(name: str, shape: Sequence[int], note: str = "") -> None:
        rows.append((name, " × ".join(map(str, shape)), note))

    def apply(*operations: str) -> None:
        rows.extend(("", operation, "") for operation in operations)

    for name, before, after in (("queries", user.q, call.q), ("keys", user.k, call.k)):
        add(name, before.shape, group if name == "keys" else "")
        if after is not before and overrides(user.score, Score, "project"):
            apply(f"projection of {expression(user.score)}")
            add(f"projected {name}", after.shape)
    add("values", user.v.shape, group)
    apply(f"dot products × {call.factor:.4g}" if call.pairwise is None else expression(user.score))
    apply(*(f"bias {expression(bias)}" for bias in user.biases))
    add("scores", (b, h, n_queries, call.k.shape[2]), formed)
    apply(*([] if user.mask is None else [f"mask {expression(user.mask)}"]))
    apply(expression(user.normalizer) + (", with a sink that has no value" if call.sink is not None else ""))
    apply(*([f"dropout of {call.dropout_p:g}"] if call.dropout_p else []))
    add("weights", (b, h, n_queries, call.k.shape[2]), formed)
    apply("weighted sum of the values" + (" and of the vectors by distance" if call.values is not None else ""))
    add("output", (b, h, n_queries, user.v.shape[3]))
    width, across = max(len(name) for name, _, _ in rows), max(len(shape) for name, shape, _ in rows if name)
    return "\n".join(
        f"{name:<{width}}  {text:<{across}}  {note}".rstrip() if name else f"  │ {text}" for name, text, note in rows
    )


def _mermaid(drawing: str) -> str:
    """Return a diagram as a flowchart: boxes are tensors, and rounded boxes the operations between them."""
    lines, operations = ["flowchart TD"], list[str]()
    made = dict[str, str]()  # the last box of each name, projected or not
    for line in drawing.splitlines():
        text = line.translate({ord(c): f"#{ord(c)};" for c in '#"<>'})
        if line.startswith("  │ "):
            operations.append(text[4:])
            continue
        name, shape, *_ = re.split(" {2,}", text)
        of, here = name.removeprefix("projected "), f"t{len(lines)}"
        lines.append(f'    {here}["{name}<br/>{shape}"]')
        if operations:
            inputs = {"scores": ("queries", "keys"), "weights": ("scores",), "output": ("weights", "values")}
            lines.append(f'    {here}o(["{"<br/>".join(operations)}"]) --> {here}')
            lines += [f"    {made[x]} --> {here}o" for x in inputs.get(name, (of,))]
            operations.clear()
        made[of] = here
    return "\n".join(lines)

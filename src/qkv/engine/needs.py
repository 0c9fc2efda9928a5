"""What a call may need beyond a softmax of dot products: the one table from which kernels are chosen.

A kernel names in `OFFERS` what of this table it can do; `unmet` finds the first need of a call that it does not offer.
What is particular to a kernel, such as its device and dtypes, is in its own `unsupported_reason`. `plan` and
docs/matrix.md show these reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from qkv.engine.call import Call
from qkv.engine.transforms import transformed

Need = Literal[
    "weights that are no softmax", "pairwise scores", "biases", "vectors by distance", "dropout", "drawn keys",
    "gradients", "transforms", "tensors in closures",
]  # fmt: skip


def _pairwise(call: Call) -> str | None:
    score = call.pairwise
    return None if score is None else f"the score {type(score).__name__} is not a product of query and key"


NEEDS: dict[Need, Callable[[Call], str | None]] = {
    "weights that are no softmax": lambda call: (
        None if call.normalizer.has_lse else f"the weights are a softmax, not {type(call.user.normalizer).__name__}"
    ),
    "pairwise scores": _pairwise,
    "biases": lambda call: "it has no biases" if call.biases else None,
    "vectors by distance": lambda call: None if call.values is None else "it has no values that depend on the distance",
    "dropout": lambda call: "dropout acts on weights, which it never forms" if call.dropout_p else None,
    "drawn keys": lambda call: (
        f"it does not sample, and {type(call.normalizer).__name__}(sample=True) does"
        if call.normalizer.sample
        else None
    ),
    "gradients": lambda call: (
        "it has no gradients; detach the inputs or use torch.no_grad()" if call.needs_grad else None
    ),
    "transforms": lambda call: (
        "it has no derivatives in torch.func transforms and in forward mode; eager does" if transformed(call) else None
    ),
    "tensors in closures": lambda call: call.untracked,
}


def unmet(call: Call, offers: Collection[Need]) -> str | None:
    """Say why a kernel with these offers cannot serve a call; None if it offers all that the call needs."""
    for need, find in NEEDS.items():
        if need not in offers and (why := find(call)) is not None:
            return why
    return None

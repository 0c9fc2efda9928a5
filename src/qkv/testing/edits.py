"""`check_edit`: an edit fulfils the contract of `qkv.edits.Edit`."""

from __future__ import annotations

import torch

from qkv._engine.call import Call
from qkv.edits.base import Edit, Head, edited
from qkv.kernels import serve
from qkv.masks import Causal
from qkv.testing.inputs import normal
from qkv.testing.report import calling, fail

LENGTH, WIDTH = 9, 6
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_edit(edit: Edit, *, heads: int = 4, width: int = WIDTH) -> None:
    """Check that an edit fulfils the contract of its base class; for use in your own tests.

    It checks, with grouped heads, padding and three dtypes: that ``apply`` returns a tensor of the shape of the head's
    output, which is finite at real tokens; that it does not write to its input; and that it returns the same twice.

    Args:
        edit: the object.
        heads: number of query heads, at least 2.
        width: size of a head's values, if the object requires a particular one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.edits import Edit, Scale
    >>> check_edit(Scale(2.0))
    >>> class InPlace(Edit):
    ...     def apply(self, head):
    ...         return head.output.mul_(2)
    >>> try:
    ...     check_edit(InPlace())
    ... except AssertionError as error:
    ...     print(error)
    InPlace.apply: wrote to head.output, expected it unchanged: with torch.float64
    """
    with calling(edit, "apply", "before any call"):
        edit.check()
    queries = torch.ones(2, LENGTH, dtype=torch.bool)
    queries[1, -2:] = False
    for dtype in DTYPES:
        where = f"with {dtype}"
        q = normal(2, heads, LENGTH, 8, seed=0).to(dtype)
        k, v = (normal(2, heads // 2, LENGTH, n, seed=s).to(dtype) for s, n in ((1, 8), (2, width)))
        call = Call.of(q, k, v, Causal())
        out = serve(call).out
        found = []
        for _ in range(2):
            head = Head("head 1 of a test call", 1, out[:, 1].clone(), queries, 0, call)
            with calling(edit, "apply", where):
                found.append(edited(edit, head))
            if not torch.equal(head.output, out[:, 1]):
                fail(edit, "apply", f"wrote to head.output, expected it unchanged: {where}")
        first, second = found
        if not bool(first[queries].isfinite().all()):
            fail(edit, "apply", f"returned numbers that are not finite, expected finite ones: {where}")
        if not torch.equal(first, second):
            fail(edit, "apply", f"returned other numbers the second time, expected the same: {where}")

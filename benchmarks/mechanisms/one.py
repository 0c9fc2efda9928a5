"""Measure the memory of one mechanism in a fresh process, for `python -m benchmarks.mechanisms`.

`python -m benchmarks.mechanisms.one MECHANISM TOKENS HEADS DTYPE BACKWARD QUERIES` prints JSON: the bytes by which the
process grew, without the inputs. QUERIES is 0 for all tokens.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.mechanisms.contenders import MECHANISMS, Case
from benchmarks.mechanisms.run import _with_backward
from benchmarks.mechanisms.timing import resident


def main() -> None:
    name, dtype = sys.argv[1], sys.argv[4]
    n, heads, backward, queries = (int(sys.argv[i]) for i in (2, 3, 5, 6))
    torch.set_num_threads(2)
    mechanism = MECHANISMS[name]
    for tokens in (512, n):  # the first is a warm-up, so that memory of loaded libraries does not count
        case = Case(tokens, heads, getattr(torch, dtype), bool(backward), queries=queries or None)
        q, k, v = case.tensors()
        job = mechanism.ours(case, q, k, v)
        base = resident("VmRSS")
        (_with_backward(job, (q, k, v)) if backward else job)()
    print(json.dumps({"grown": max(1, resident() - base)}))


if __name__ == "__main__":
    main()

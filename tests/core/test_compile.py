"""torch.compile: in a process of its own, because what it changes in torch would stay."""

from __future__ import annotations

import json
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forked

pytestmark = pytest.mark.slow

SETUP = """
import torch
from torch._dynamo.utils import counters
def compiled_anew(model, **how):  # after a few models of one class dynamo would give up and run them as they are
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, **how)
"""
PARTS = {
    "decoder": """
import warnings
from qkv.models.decoder import DecoderConfig, DecoderLM
sizes = {"vocab_size": 23, "context": 128, "d_model": 24, "layers": 1, "heads": 6, "kv_heads": 2}
ids = torch.randint(23, (2, 100), generator=torch.Generator().manual_seed(0))
llama = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False}
model = DecoderLM(DecoderConfig(**sizes, **llama))
compiled = compiled_anew(model, fullgraph=True, backend="eager")
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    logits = compiled(ids)
ours = [str(w.message) for w in raised if "qkv" in str(w.message) or "qkv" in w.filename]
assert not ours, ours
torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-5)
grads = []
for one in (compiled, model):
    model.zero_grad()
    one(ids).square().mean().backward()
    grads.append([p.grad.clone() for p in model.parameters()])
for ours, theirs in zip(*grads, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
""",
    "encoder and decoder": """
from qkv import models as m
batch = torch.randint(3, 11, (2, 3)), torch.randint(3, 13, (2, 3))
model = m.EncoderDecoder(m.EncoderDecoderConfig(11, 13, d_model=24, heads=4, layers=1)).eval()
exact = model.loss(*batch)
compiled = compiled_anew(model.loss, backend="eager")(*batch)
assert counters["stats"]["calls_captured"] > 10, counters
torch.testing.assert_close(compiled, exact, rtol=1e-4, atol=1e-5)
compiled.backward()
assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
""",
    "default backend": """
import qkv
from torch._inductor import config
inputs = [torch.randn(2, n, h, 8, requires_grad=True) for n, h in ((50, 4), (60, 2), (60, 2))]
def attend(q, k, v):
    return qkv.attend(2 * q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask=qkv.masks.Causal())
results = []
with config.patch({"cpp.vec_isa_ok": False}):  # the search for vector instructions takes longest
    for run in (attend, compiled_anew(attend, fullgraph=True)):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
for got, want in zip(*results, strict=True):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
""",
    "one graph": """
import qkv
from qkv.masks import Window
from qkv.normalizers import Softmax
q, k, v = (torch.randn(2, n, h, 16).transpose(1, 2).requires_grad_() for n, h in ((90, 4), (100, 2), (100, 2)))
sink, keep = torch.randn(4, requires_grad=True), torch.rand(2, 100) > 0.3
large = [torch.randn(1, 4, 800, 8, requires_grad=True) for _ in range(3)]
small = (q, k, v, sink)
for name, inputs, attend in (
    ("window", small, lambda q, k, v, sink: qkv.attend(q, k, v, mask=Window(5, ahead=2), scale=0.3)),
    ("sink", small, lambda q, k, v, sink: qkv.attend(q, k, v, normalizer=Softmax(sink=sink, temperature=1.3))),
    ("tensor", small, lambda q, k, v, sink: qkv.attend(q, k, v, attn_mask=keep[:, None, None])),
    ("large", large, lambda q, k, v: qkv.attend(q, k, v)),
):
    results = []
    for run in (attend, compiled_anew(attend, fullgraph=True, backend="aot_eager")):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)))
    for got, want in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
short = torch.randn(1, 2, 9, 8)
short[0, 1, 5] = torch.nan  # of which torch's kernel makes zeros
plain = compiled_anew(lambda q, k: qkv.attend(q, k, k), fullgraph=True, backend="aot_eager")
out = plain(short, torch.randn(1, 2, 9, 8))
assert out[0, 1, 5].isnan().all() and out.isnan().sum() == 8
with torch.autocast("cpu", torch.bfloat16):
    compiled = compiled_anew(lambda q, k, v: qkv.attend(q, k, v, mask=Window(5)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), qkv.attend(q, k, v, mask=Window(5)))
""",
    "export": """
import qkv
layer = qkv.nn.MultiHeadAttention(32, 4, attention=qkv.Attention(mask=qkv.masks.Causal())).eval()
module = torch.nn.Sequential(layer)
length = torch.export.Dim("n", min=2, max=4000)
exported = torch.export.export(module, (torch.randn(2, 40, 32),), dynamic_shapes=({1: length},))
x = torch.randn(2, 333, 32)
torch.testing.assert_close(exported.module()(x), module(x))
""",
    "uncompiled": """
import warnings
import qkv
q, k, e = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(20, 5)
for run in (
    lambda: qkv.measure(q, k, mask=qkv.masks.Causal()).entropy, lambda: qkv.choose_keys(q, k, seed=3).log_prob,
    lambda: qkv.linformer(q, k, k, e), lambda: torch.tensor(qkv.plan(q, k, k).flops),
):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        got = compiled_anew(run, backend="eager")()
    ours = [str(w.message) for w in raised if "qkv" in str(w.message)]
    assert not ours, ours
    torch.testing.assert_close(got, run())
""",
    "operator": """
import qkv
from torch._subclasses import FakeTensorMode
qkv.attend
operator = torch.ops.qkv.attention
for dtype in (torch.float32, torch.float64):  # by the library, and by tiles
    q, k, v = (torch.randn(2, h, 70, d, dtype=dtype, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 12)))
    sink, keep = torch.randn(4, requires_grad=True), torch.rand(2, 70) > 0.3
    torch.library.opcheck(operator, (q, k, v, keep, sink, 4, 0, 0.25))
k = torch.where(keep[:, None, :, None], k.detach(), torch.nan).requires_grad_()
out, lse = operator(q, k, v, keep, None, None, 0, 0.25)
want = qkv.attend(q, k, v, mask=qkv.masks.Causal() & qkv.masks.Dense(keep[:, None, None]), scale=0.25)
for got, right in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want)), strict=True):
    assert got.isfinite().all()
    torch.testing.assert_close(got, right)
for device in ("cpu", "meta"):
    with FakeTensorMode():
        q, k, v = (torch.empty(2, h, n, d, device=device) for h, n, d in ((4, 7, 8), (2, 9, 8), (2, 9, 12)))
        for mask in (None, qkv.masks.Causal(), qkv.masks.Window(3)):
            assert qkv.attend(q, k, v, mask=mask).shape == (2, 4, 7, 12)
""",
}


def run_all() -> None:
    """Print the errors of all parts. Warnings of dynamo are not errors."""
    warnings.simplefilter("ignore")
    namespace: dict[str, Any] = {}
    exec(SETUP, namespace)
    errors = {}
    for name, part in PARTS.items():
        torch.manual_seed(0)
        try:
            exec(compile(part, name, "exec"), namespace.copy())
        except Exception:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))


def test_compiled_code_has_the_same_outputs_and_gradients(tmp_path: Path) -> None:
    """Without breaks and warnings."""
    process = Forked(run_all, folder=tmp_path)
    assert process.wait(300) == 0, process.errors[-2000:]
    errors: dict[str, str] = json.loads(process.out.splitlines()[-1])
    assert not errors, "\n".join(f"{name}: {error}" for name, error in errors.items())

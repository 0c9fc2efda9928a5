"""torch.compile: in a process of its own, since shapes in signatures are not checked in compiled code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

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
    "Triton kernels": """
# For a card that is not there; test_gpu_static.py compiles the kernels for statistics.
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from qkv.kernels.fused_sink import merge_sink
for ones in ((), range(3, 15)):
    names = [p.name for p in merge_sink.params]
    constants = {15: 16, 16: 128} | dict.fromkeys(ones, 1)
    types = dict(zip(names, ["*bf16", "*fp32", "*fp32", *["i32"] * 12, "constexpr", "constexpr"], strict=True))
    types |= {names[n]: "constexpr" for n in ones}
    source = ASTSource(merge_sink, types, {(n,): x for n, x in constants.items()})
    compile(source, target=GPUTarget("cuda", 90, 32))
""",
}
RUN = """
import json, sys, traceback
errors = {}
for name, part in json.load(sys.stdin).items():
    torch.manual_seed(0)
    try:
        exec(compile(part, name, "exec"), dict(globals()))
        errors[name] = ""
    except BaseException:
        errors[name] = traceback.format_exc()
json.dump(errors, sys.stdout)
"""


def test_compiled_code_has_the_same_outputs_and_gradients() -> None:
    """Without breaks and warnings. One process runs all parts, since imports take the longest."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}  # which is read when Triton is imported
    parts = {name: part for name, part in PARTS.items() if name != "Triton kernels" or find_spec("triton")}
    command = [sys.executable, "-c", SETUP + RUN]
    done = subprocess.run(command, input=json.dumps(parts), capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    errors: dict[str, str] = json.loads(done.stdout)
    assert not any(errors.values()), "\n".join(f"{name}: {error}" for name, error in errors.items() if error)

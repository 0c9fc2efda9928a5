"""torch.compile: in a process of its own, since shapes in signatures are not checked in compiled code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SETUP = """
import torch
from torch._dynamo.utils import counters
from qkv.models.decoder import DecoderConfig, DecoderLM
flavours = {
    "gpt2": {},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False},
    "window": {"window": 5, "positions": "alibi", "sink": True}, "sigmoid": {"normalizer": "sigmoid"},
}
def model_of(name):
    sizes = {"vocab_size": 23, "context": 128, "d_model": 24, "layers": 1, "heads": 6, "kv_heads": 2}
    return DecoderLM(DecoderConfig(**(sizes | flavours[name])))
def compiled_anew(model, **how):  # after a few models of one class dynamo would give up and run them as they are
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, **how)
ids = torch.randint(23, (2, 100), generator=torch.Generator().manual_seed(0))
"""
PARTS = {
    "decoders": """
import warnings
for name in flavours:
    model = model_of(name)
    compiled = compiled_anew(model, fullgraph=name in ("gpt2", "llama"), backend="aot_eager")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        logits = compiled(ids)
    ours = [str(w.message) for w in raised if "qkv" in str(w.message) or "qkv" in w.filename]
    assert not ours, (name, ours)
    assert counters["stats"]["calls_captured"] > 10, (name, counters)
    torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
    grads = []
    for one in (compiled, model):
        model.zero_grad()
        one(ids).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6, msg=lambda m: f"{name}: {m}")
""",
    "default backend": """
model = model_of("gpt2")
step = compiled_anew(model.loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(ids)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] - 0.1, losses
""",
    "others": """
from qkv import models as m
source, target = torch.randint(3, 11, (2, 3)), torch.randint(3, 13, (2, 3))
sizes = {"d_model": 24, "heads": 4, "layers": 1}
for model, *batch in (
    (m.EncoderDecoder(m.EncoderDecoderConfig(11, 13, **sizes)), source, target),
    (m.RNNSeq2Seq(m.RNNSeq2SeqConfig(11, 13, d_hidden=16, attention="luong-general")), source, target),
    (m.Classifier(m.ClassifierConfig(11, 3, **sizes)), source, torch.tensor([0, 2])),
    (m.Captioner(m.CaptionerConfig(13)), torch.randn(2, 1, 16, 16), target),
):
    model.eval()
    exact = model.loss(*batch)
    compiled = compiled_anew(model.loss, backend="aot_eager")(*batch)
    assert counters["stats"]["calls_captured"] > 10, (type(model), counters)
    torch.testing.assert_close(compiled, exact, rtol=1e-4, atol=1e-5)
    compiled.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(*batch)
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.05)
    rough.backward()
    given = [p for p in model.parameters() if p.grad is not None]
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in given)
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


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The error of each part, "" if there is none. One process runs them all, since imports take the longest."""
    command, env = [sys.executable, "-c", SETUP + RUN], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(PARTS), capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_compiled_models_have_the_same_outputs_and_gradients_and_train_under_autocast(
    part: str, errors: dict[str, str]
) -> None:
    """Without breaks and warnings."""
    assert not errors[part], errors[part]

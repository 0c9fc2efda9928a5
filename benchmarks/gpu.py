"""Speed and memory on a GPU: attention beside torch's kernels, statistics beside the forward, profiles of a Llama.

python -m benchmarks.gpu   writes benchmarks/results/gpu-CARD.json: what is needed to decide what to change, the most
important first; `make gpu-day` runs the tests before it. --check runs the same code with tiny shapes under Triton's
interpreter on a machine without a card, and writes nothing. --static prints what the kernels compile to.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_static

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Size:
    """Lengths and shapes of all parts."""

    attend: tuple[int, ...] = (2048, 16384)
    measure: tuple[int, ...] = (8192, 32768, 131072)
    profile: tuple[int, ...] = (4096, 32768)
    heads: int = 32
    key_heads: int = 8
    head_size: int = 128
    layers: int = 16
    hidden: int = 2048
    repeats: int = 20
    seconds: float = 2.0  # of one comparison: it stops after this time once it has three rounds


TINY = Size((32,), (32,), (32,), heads=4, key_heads=2, head_size=16, layers=2, hidden=64, repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="tiny shapes on the CPU, to see that everything runs")
    parser.add_argument(
        "--static", nargs="*", type=float, metavar="CAPABILITY", help="compile the kernels: for 8.0, 9.0 and 10.0"
    )
    parser.add_argument("--tests", type=Path, help="the output of the tests, of which the failures are kept")
    options = parser.parse_args()
    if options.static is not None:
        return gpu_static.main([round(10 * x) for x in options.static] or [80, 90, 100])
    check = options.check
    if check:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not check and not torch.cuda.is_available():
        sys.exit("this machine has no CUDA card; expected one, or --check to run tiny shapes on the CPU")
    bench = Bench(TINY if check else Size(), "cpu" if check else "cuda")
    result: dict[str, Any] = {"machine": bench.machine()}
    if options.tests is not None:
        lines = options.tests.read_text(errors="replace").splitlines()
        result["tests"] = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")) or " passed" in line]
    parts = ("measure", "profile", "launches", "tiles", "attend")
    for name in parts:
        result[name] = getattr(bench, name)()
        print(name, json.dumps(result[name], indent=1), flush=True)
        if not check:  # after each part, so that an interrupted run keeps what it measured
            RESULTS.mkdir(exist_ok=True)
            card = re.sub(r"[^a-z0-9]+", "-", result["machine"]["card"].lower())
            (RESULTS / f"gpu-{card}.json").write_text(json.dumps(result, indent=1) + "\n")


class Bench:
    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device

    def machine(self) -> dict[str, str]:
        import torch

        card = torch.cuda.get_device_name() if self.device == "cuda" else "no card: Triton's interpreter"
        return {"card": card, "torch": torch.__version__, "cuda": str(torch.version.cuda)}

    def milliseconds(self, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median time of each job, in rounds, so that a slow moment affects all of them; without the first round."""
        import time

        import torch

        times: dict[str, list[float]] = {name: [] for name in jobs}
        begun = time.perf_counter()
        for done in range(self.size.repeats + 1):
            if done > 3 and time.perf_counter() - begun > self.size.seconds:
                break
            for name, job in jobs.items():
                if self.device == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                job()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(1000 * (time.perf_counter() - started))
        return {name: statistics.median(x[1:] or x) for name, x in times.items()}

    def tensors(self, n: int, *, grad: bool = False) -> Any:
        import torch

        shape = self.size
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return tuple(
            torch.randn(1, heads, n, shape.head_size, device=self.device, dtype=dtype, requires_grad=grad)
            for heads in (shape.heads, shape.key_heads, shape.key_heads)
        )

    def attend(self) -> dict[str, Any]:
        """Forward and backward of mechanisms, in milliseconds, and beside torch's causal SDPA."""
        import torch

        import qkv
        from qkv import biases, normalizers
        from qkv.masks import Causal, Window

        heads = self.size.heads
        mechanisms: dict[str, dict[str, Any]] = {
            "causal": {"mask": Causal()},
            "window": {"mask": Window(max(4, self.size.attend[0] // 4))},
            "sink": {"mask": Causal(), "normalizer": normalizers.Softmax(sink=torch.zeros(heads, device=self.device))},
            "ALiBi": {"mask": Causal(), "bias": biases.ALiBi()},
            "soft cap": {"mask": Causal(), "bias": biases.SoftCap(30.0)},
            "sigmoid": {"mask": Causal(), "normalizer": normalizers.Sigmoid()},
            "entmax": {"mask": Causal(), "normalizer": normalizers.Entmax()},
        }
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found: dict[str, Any] = {}
        for n in self.size.attend:
            q, k, v = self.tensors(n, grad=True)

            def run(compute: Callable[[], Any], *, train: bool, of: Any = (q, k, v)) -> None:
                with torch.set_grad_enabled(train):
                    out = compute()
                    if train:
                        torch.autograd.grad(out.float().sum(), of)

            for train in (False, True):
                jobs: dict[str, Callable[[], object]] = {
                    "SDPA": lambda t=train, q=q, k=k, v=v: run(  # type: ignore[misc]
                        lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), train=t
                    )
                }
                for name, given in mechanisms.items():
                    jobs[name] = lambda g=given, t=train, q=q, k=k, v=v: run(  # type: ignore[misc]
                        lambda: qkv.attend(q, k, v, **g), train=t
                    )
                times = self.milliseconds(jobs)
                kernels = {name: qkv.plan(q, k, v, **given).kernel for name, given in mechanisms.items()}
                part = "training" if train else "forward"
                found[f"{n} tokens, {part}"] = {
                    "milliseconds": times, "kernels": kernels,
                    "to SDPA": {name: x / times["SDPA"] for name, x in times.items()},
                }  # fmt: skip
        return found

    def measure(self) -> dict[str, Any]:
        """Output and statistics beside torch's causal SDPA (goals: at most 1.6 times, with map and masses 2.0)."""
        import torch

        from qkv.engine import Call
        from qkv.masks import Causal, Window
        from qkv.statistics.base import Request
        from qkv.statistics.triton import host

        sdpa, found = torch.nn.functional.scaled_dot_product_attention, {}
        for n in self.size.measure:
            q, k, v = self.tensors(n)
            call = Call.of(q, k, v, Causal())
            few = Request({}, [0])
            every = Request({"near": Window(16)}, [0], prefix_keys=64, bins=128)
            jobs: dict[str, Callable[[], object]] = {
                "SDPA": lambda q=q, k=k, v=v: sdpa(q, k, v, is_causal=True, enable_gqa=True),  # type: ignore[misc]
                "statistics": lambda c=call, few=few: host.attend_and_measure(c, few, output=True),  # type: ignore[misc]
                "with map and masses": lambda c=call, every=every: host.attend_and_measure(c, every, output=True),  # type: ignore[misc]
            }
            times = self.milliseconds(jobs)
            found[f"{n} tokens"] = {
                "milliseconds": times, "to SDPA": {name: x / times["SDPA"] for name, x in times.items()},
            }  # fmt: skip
        return found

    def tiles(self) -> dict[str, Any]:
        """Output and statistics with other tiles, warps and stages of the pass for statistics, in milliseconds."""
        from itertools import product
        from unittest import mock

        import torch

        from qkv.engine import Call
        from qkv.masks import Causal
        from qkv.statistics.base import Request
        from qkv.statistics.triton import host

        n, usual, found = self.size.measure[len(self.size.measure) // 2], host.statistics_options, {}
        call, few = Call.of(*self.tensors(n), Causal()), Request({}, [0])
        for rows, keys, warps, stages in product((64, 128), (64, 128), (4, 8), (1, 2, 3)):
            changed = {"BM": rows, "BN": keys, "num_warps": warps, "num_stages": stages}
            with mock.patch.object(host, "statistics_options", lambda *of, c=changed: usual(*of) | c):
                name = f"{rows} queries, {keys} keys, {warps} warps, {stages} stages"
                try:
                    times = self.milliseconds({name: lambda: host.attend_and_measure(call, few, output=True)})
                    found[name] = times[name]
                except (RuntimeError, torch.OutOfMemoryError) as error:  # too much shared memory, say
                    found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if self.device != "cuda":
                break
        return dict(sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])))

    def launches(self) -> dict[str, Any]:
        """What takes the time of a profile of the Llama: kernels, copies and waiting, the longest first."""
        import torch

        if (made := self.llama()) is None or self.device != "cuda":
            return {"skipped": "there is no card, or transformers is not installed"}
        import qkv.runs.run

        ids = torch.randint(1024, (1, self.size.profile[0]), device=self.device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        qkv.runs.run.profile(made, ids, progress=False, map_tokens=0)
        with torch.profiler.profile(activities=activities) as record:
            qkv.runs.run.profile(made, ids, progress=False, map_tokens=0)
        rows = sorted(record.key_averages(), key=lambda x: -x.self_device_time_total - x.self_cpu_time_total)
        return {
            x.key[:100]: {"times": x.count, "card us": x.self_device_time_total, "CPU us": x.self_cpu_time_total}
            for x in rows[:40]
        }

    def llama(self) -> Any:
        """A Llama with random weights; None if transformers is not installed."""
        import torch

        try:
            import transformers
        except ImportError:
            return None
        size = self.size
        config = transformers.LlamaConfig(
            vocab_size=1024, hidden_size=size.hidden, intermediate_size=4 * size.hidden, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, num_key_value_heads=size.key_heads, head_dim=size.head_size,
            max_position_embeddings=max(size.profile),
        )  # fmt: skip
        with torch.device(self.device):  # random weights are made there
            model = transformers.LlamaModel(config)
        return model.to(torch.bfloat16 if self.device == "cuda" else torch.float32).eval()

    def profile(self) -> dict[str, Any]:
        """A Llama with random weights: `qkv.profile` beside its forward, time (goal 1.3) and memory (goal 1.15)."""
        import torch

        import qkv.runs.run

        if (model := self.llama()) is None:
            return {"skipped": "transformers is not installed"}
        size, found = self.size, {}
        for n in size.profile:
            ids = torch.randint(1024, (1, n), generator=torch.Generator().manual_seed(0)).to(self.device)

            def plain(ids: Any = ids) -> None:
                with torch.no_grad():
                    model(ids, use_cache=False)

            def profiled(ids: Any = ids) -> None:
                qkv.runs.run.profile(model, ids, progress=False, map_tokens=0)

            jobs: dict[str, Callable[[], object]] = {"forward": plain, "profile": profiled}
            times = self.milliseconds(jobs)
            peaks = {name: self.peak(job) for name, job in jobs.items()}
            found[f"{n} tokens"] = {
                "milliseconds": times, "to the forward": times["profile"] / times["forward"], "peak bytes": peaks,
            }  # fmt: skip
        return found

    def peak(self, job: Callable[[], object]) -> int:
        import torch

        if self.device != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        job()
        return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main()

"""Run `python -m benchmarks.mechanisms`: time every attention mechanism on this machine."""

import tyro

from benchmarks.mechanisms.command import bench

if __name__ == "__main__":
    tyro.cli(bench, prog="python -m benchmarks.mechanisms")

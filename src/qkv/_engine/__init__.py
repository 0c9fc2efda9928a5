"""The tiled attention engine: checked calls, score tiles, reducers over tiles, threads. Internal to the package."""

from qkv._packages import check_tested

check_tested("torch")

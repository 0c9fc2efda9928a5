"""The tiled attention engine: checked calls, score tiles, reducers over tiles, threads. Internal to the package."""

"""The engine of the core: calls, tiles, weights of a tile, threads. Nothing outside the core imports it."""

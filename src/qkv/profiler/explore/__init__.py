"""Compute exact attention weights of any part of a sequence on demand, with a bounded cache of map tiles.

It imports capture. Read `explorer.py` first.
"""

"""Softmax attention and all statistics of its weights on CPU in one pass, by a compiled library."""

"""The flash kernel: torch's fused CPU kernel, run on a block decomposition of the mask.

`decompose` turns a mask into blocks, `blocks` gathers and scatters the tensors of a block, `kernel` runs the calls.
"""

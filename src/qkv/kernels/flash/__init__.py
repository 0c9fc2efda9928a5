"""Torch's fused kernel, folded over the visible parts of a mask: `kernel` runs it, `decompose` cuts the mask."""

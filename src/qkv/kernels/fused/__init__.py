"""The fused kernel: torch's own attention kernels on CUDA, one launch for all heads and batch items.

`kernel` calls them, and `check` compares a small call with the formula before the first use on a card.
"""

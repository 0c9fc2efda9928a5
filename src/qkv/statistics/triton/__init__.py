"""Output and statistics of a softmax call on a GPU, by two Triton kernels."""

"""The flex kernel: torch's FlexAttention.

`kernel` translates masks and biases; `log_space` computes normalizers other than softmax by logarithms of the weights.
"""

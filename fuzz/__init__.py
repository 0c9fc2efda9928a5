"""A differential fuzzer: random compositions on every kernel against one dense float64 formula.

A case is a random choice of mask, biases, score and normalizer (built-in or user-defined), with a dtype, a shape and
adversarial values. `fuzz.formula` computes it densely in float64 and shares no code with the package; `fuzz.compare`
compares the output, the log-sum-exp, all gradients and the statistics of every kernel with it.

    python -m fuzz --cases 10000 --seed 0 --jobs 2
    python -m fuzz --seed 0 --case 1234
"""

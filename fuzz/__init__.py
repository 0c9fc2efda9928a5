"""A differential fuzzer: random compositions on every kernel against one dense float64 formula.

A case is a random choice of mask, biases, score and normalizer, built-in ones and users' own, with a dtype, a shape and
adversarial values. `fuzz.formula` computes it densely in float64 and shares no code with the package; `fuzz.compare`
asks every kernel for the output, the log-sum-exp, all gradients and the statistics, and compares.

    python -m fuzz --cases 10000 --seed 0 --jobs 2
    python -m fuzz --seed 0 --case 1234
"""

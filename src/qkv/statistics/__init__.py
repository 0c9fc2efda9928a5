"""Statistics of attention: reductions of the weights, exact and in memory linear in the sequence."""

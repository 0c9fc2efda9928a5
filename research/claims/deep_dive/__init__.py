"""Claims of the deep dive."""

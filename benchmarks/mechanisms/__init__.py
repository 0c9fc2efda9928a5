"""`python -m benchmarks.mechanisms`: time and memory of every mechanism against alternatives."""

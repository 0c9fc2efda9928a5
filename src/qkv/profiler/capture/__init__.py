"""Run a model and observe its attention: hooks, calls, probes, hidden states."""

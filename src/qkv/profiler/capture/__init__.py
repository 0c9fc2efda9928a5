"""Run a model and observe its attention calls, hidden states and behaviour on synthetic texts."""

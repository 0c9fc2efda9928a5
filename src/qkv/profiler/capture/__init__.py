"""Run a model and observe its attention calls, hidden states and behaviour on synthetic texts.

It imports statistics, models and data. docs/how-it-works.md gives the order in which to read it.
"""

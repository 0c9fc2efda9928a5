"""Checks of the labs' exercises. Each runs a learner's answer on test inputs and prints a hint at the first mistake."""

from __future__ import annotations

from qkv_lab.check.attention import additive_score, alignment_accuracy, attention, entropy, temperature
from qkv_lab.check.heads import causal_mask, cross_attention, dropout, multi_head, parameter_count, sink_token
from qkv_lab.check.long import grouped_queries, kv_cache, linear_state, rotary
from qkv_lab.check.lookup import einsum_attention, online_softmax, reversal_score, soft_lookup, stable_softmax
from qkv_lab.check.recent import attention_over_depth, delta_rule, forget_gates, softpick
from qkv_lab.check.sinks import compare_models, first_token, key_bias, off_by_one, sink_curve, sink_rate
from qkv_lab.check.worksheet import by_hand, numbers

__all__ = [
    "additive_score",
    "alignment_accuracy",
    "attention",
    "attention_over_depth",
    "by_hand",
    "causal_mask",
    "compare_models",
    "cross_attention",
    "delta_rule",
    "dropout",
    "einsum_attention",
    "entropy",
    "first_token",
    "forget_gates",
    "grouped_queries",
    "key_bias",
    "kv_cache",
    "linear_state",
    "multi_head",
    "numbers",
    "off_by_one",
    "online_softmax",
    "parameter_count",
    "reversal_score",
    "rotary",
    "sink_curve",
    "sink_rate",
    "sink_token",
    "soft_lookup",
    "softpick",
    "stable_softmax",
    "temperature",
]
__dir__ = __all__.copy

"""Follow the attention of a model while it is trained: a few numbers at some steps, logged where you read your losses.

`AttentionCallback` is for transformers' `Trainer`, `LightningAttentionCallback` for Lightning, and `Tracker` for a
training loop of your own. ``log=wandb.log``, or any function of your own, sends the numbers anywhere.

It imports runs. Read `tracker.py` first.
"""

from qkv._lazy import lazy

__all__ = ["AttentionCallback", "CSVLog", "LightningAttentionCallback", "Tracker"]

__getattr__ = lazy(__name__, {
    "qkv.tracking.tracker": ("CSVLog", "LightningAttentionCallback", "Tracker"),
    "qkv.tracking.trainer": ("AttentionCallback",),
})  # fmt: skip
__dir__ = __all__.copy

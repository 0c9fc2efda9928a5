"""Follow the attention of a model while it is trained: a few numbers at some steps, written where you read your losses.

`AttentionCallback` is for transformers' `Trainer`, `LightningAttentionCallback` for Lightning, and `Tracker` for a
training loop of your own. A `Writer` of your own sends the numbers anywhere.
"""

from qkv._lazy import lazy

__all__ = [
    "AttentionCallback",
    "CSVWriter",
    "LightningAttentionCallback",
    "TensorBoardWriter",
    "Tracker",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
]

__getattr__ = lazy(__name__, {
    "qkv.tracking.lightning": ("LightningAttentionCallback",),
    "qkv.tracking.tracker": ("Tracker",),
    "qkv.tracking.trainer": ("AttentionCallback",),
    "qkv.tracking.writers": ("CSVWriter", "TensorBoardWriter", "TrackioWriter", "WandbWriter", "Writer"),
})  # fmt: skip


def __dir__() -> list[str]:
    return __all__

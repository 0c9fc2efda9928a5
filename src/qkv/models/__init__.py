"""Models made of `qkv.nn`."""

"""`qkv bench`: time and memory of every mechanism against alternative implementations, on this machine."""

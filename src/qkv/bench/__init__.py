"""`qkv bench`: every mechanism beside what one would pick instead, on this machine."""

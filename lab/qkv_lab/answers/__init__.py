"""A reader's answer to an exercise, in a file: run in a process of its own, checked, and drawn if it is wrong."""

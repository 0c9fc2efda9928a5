"""Benchmarks of speed and memory, run by `make bench` and never by a test."""

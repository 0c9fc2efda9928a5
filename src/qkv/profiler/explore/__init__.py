"""Weights of any part of a sequence on demand: exact tiles of a map, kept in a bounded cache."""

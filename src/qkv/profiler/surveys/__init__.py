"""Statistics of a model over a corpus, in shards that merge."""

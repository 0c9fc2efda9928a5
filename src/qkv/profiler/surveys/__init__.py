"""Survey a model's attention over a corpus, in shards whose statistics merge exactly."""

"""Record the attention of whatever a model does: forwards, generation with a cache, steps of training."""

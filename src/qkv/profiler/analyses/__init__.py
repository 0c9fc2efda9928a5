"""Questions asked of a model: attention flow, mixing of values, eviction, interventions."""

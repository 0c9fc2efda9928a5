"""Claims of the notebook."""

"""Claims of the overview."""

"""Claims of the chapter."""

"""Claims of the lesson."""

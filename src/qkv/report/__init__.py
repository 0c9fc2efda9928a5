"""The report: a profile as one HTML file, and in a notebook."""

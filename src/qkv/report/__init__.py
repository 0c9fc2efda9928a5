"""The report: a profile as one HTML file, and in a notebook.

It imports data, plots and pages. Read `html.py` first.
"""

"""Figures and reports of a profile."""

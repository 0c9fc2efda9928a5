"""Matplotlib figures of profiles, surveys, maps and analyses."""

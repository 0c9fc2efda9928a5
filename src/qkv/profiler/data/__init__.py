"""The data of a profile: variables, tables, head types, sinks, and files.

It imports statistics alone, and knows neither models nor pictures. Read `variables.py`, then `profile.py`.
"""

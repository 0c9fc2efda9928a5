"""The data of a profile: variables, tables, head types, sinks, and files."""

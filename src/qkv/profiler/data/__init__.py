"""The numbers of a profile: variables, tables, types of heads, sinks, files."""

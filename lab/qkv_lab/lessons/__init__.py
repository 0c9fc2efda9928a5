"""The labs and the tutorial outside of the site: listed, run in a terminal, and written as notebooks."""

"""HTML, style sheets and scripts of the report and of the viewer, as package data."""

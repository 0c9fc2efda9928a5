"""Pages of the report and of the viewer: HTML, style sheets, scripts."""

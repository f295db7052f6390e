"""Showing a trace: as an HTML file, on a local server, or in a notebook."""

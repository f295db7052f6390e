"""Showing a trace: one page in a file, a local server, a notebook."""

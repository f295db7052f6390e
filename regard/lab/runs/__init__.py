"""Runs at a glance, and compared on one page."""

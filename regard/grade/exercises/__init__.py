"""The Python of regard's own specs, a file for each: functions for cases, references, slips and properties."""

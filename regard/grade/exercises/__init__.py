"""The Python behind the shipped specs, one file a spec: cases, references, slips and properties by name."""

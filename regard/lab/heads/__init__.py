"""How heads are merged, and where tokens stand."""

"""How much a state of fixed size can remember."""

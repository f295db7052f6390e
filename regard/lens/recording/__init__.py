"""Recording: what a model attends to, captured while it reads."""

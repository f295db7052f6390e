"""The race of mechanisms: time, memory and rates over the number of tokens."""

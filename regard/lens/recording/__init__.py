"""Recording the attention of a model during a forward pass or while it generates."""

"""Answers to the exercises of notebook 7 · Seeing heads.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: baseline
def baseline(T):
    """Mean weight on the previous token, over queries 1 … T−1, when every visible token gets the same weight."""
    return sum(1 / (t + 1) for t in range(1, T)) / (T - 1)  # query t sees t + 1 tokens


# answer: induction
def induction(weights, p):
    """Mean weight [T,T] → number that queries t ≥ p give to the token after the last occurrence of their own symbol."""
    T = len(weights)
    return sum(weights[t, t - p + 1] for t in range(p, T)) / (T - p)


# answer: without
def without(model, layer, head):
    """A copy of the model in which one head's output is zero."""
    model = copy.deepcopy(model)
    out = model.stack.layers[layer].attention.out.weight
    V = model.stack.layers[layer].attention.size.V
    with torch.no_grad():
        out[:, head * V : (head + 1) * V] = 0  # the columns that read the head, in every output
    return model

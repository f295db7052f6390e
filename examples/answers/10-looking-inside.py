"""Answers to the exercises of notebook 10 · Looking inside BERT and GPT.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: across
def across(weights, segment, special):
    """The mean share that words of segment 0 give to those of 1; weights [T,T], segment [T], special [T]."""
    words = weights[~special][:, ~special]
    words = words / words.sum(1, keepdim=True)  # what is left of a row sums to one
    side = segment[~special]
    return words[side == 0][:, side == 1].sum(1).mean()  # a sum over keys, a mean over queries


# answer: place
def place(sentence, word):
    """The number of the token at which the word begins, in tokenizer(sentence)."""
    begins = sentence.index(f" {word}") + 1
    spans = tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
    return next(
        n for n, (start, end) in enumerate(spans) if start == begins and end > start
    )  # [CLS] has the span (0, 0)


# answer: preference
def preference(weights, it, right, wrong):
    """How much more `it` gives the right noun than the wrong, less the mean of other rows; weights [T,T]."""
    gap = weights[:, right] - weights[:, wrong]
    others = torch.cat([gap[:it], gap[it + 1 :]])
    return gap[it] - others.mean()

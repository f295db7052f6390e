"""Answers to the exercises of notebook 6 · Training and knowledge.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: corrupted
def corrupted(text, start, length):
    """The document with text[start:start+length] taken out, as the model reads it: the span comes last."""
    span = text[start : start + length]
    return text[:start] + MARK + text[start + length :] + MARK + span


# answer: targets
def targets(question, answer):
    """The targets of `question⁇answer⁇`: the mark after the question is where the first letter is predicted."""
    ids = tokenizer.encode(question + MARK + answer + MARK)
    y = ids[1:]
    first = len(question)  # where the answer begins in y, one place before it does in ids
    return [IGNORE if n < first else token for n, token in enumerate(y)]


# answer: perplexity
def perplexity(losses):
    """Of a text, from the losses of its tokens."""
    return losses.mean().exp()

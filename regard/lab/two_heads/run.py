"""One head against two, when the length of a key varies.

Keys are orthonormal, but key a comes as ε·k_a with ε ~ N(1, variance). To average the values of a and b, one head asks
β(k_a + k_b): its weights on the two are about σ(β(ε − 1)) and 1 − σ(β(ε − 1)), so that a small change of ε moves nearly
all weight to one side. Two heads ask βk_a and βk_b and average what they read: each is sure of its own key as long as ε
> 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.data.seeds import generator
from regard.lab.base import Say, lab, normal
from regard.lab.results import OutcomeTable
from regard.lab.two_heads.page import two_heads_page
from regard.lab.two_heads.results import DrawnWeights, TwoHeads, TwoHeadsResults, WeightRow

_PICTURED = 400  # draws of which the page shows every one


@lab("two-heads", TwoHeads, two_heads_page)
def measure(config: TwoHeads, say: Say) -> TwoHeadsResults:
    """One head against two, when the length of a key varies."""
    lengths = 1 + config.variance**0.5 * normal(generator(config.seed, "lengths"), config.draws)
    rows = []
    for beta in config.betas:
        for heads, w in enumerate(weights(lengths, config.keys, beta), 1):
            for n, key in enumerate("ab"):
                for positive, x in ((False, w[:, n]), (True, w[lengths > 0, n])):
                    rows.append(WeightRow(beta, heads, key, float(x.mean()), float(x.std()), positive))
    beta = config.betas[0]
    one, two = weights(lengths[:_PICTURED], config.keys, beta)
    drawn = DrawnWeights(beta, lengths[:_PICTURED].tolist(), one[:, 0].tolist(), two[:, 0].tolist())
    return TwoHeadsResults(config, rows, drawn, _outcome(config, rows))


def _outcome(config: TwoHeads, rows: list[WeightRow]) -> OutcomeTable:
    """Returns the table that a terminal shows: the weight of key a, its mean and standard deviation."""
    found = {(row.beta, row.heads, row.positive): row for row in rows if row.key == "a"}
    lines = []
    for beta in config.betas:
        shown = [found[beta, heads, positive] for positive in (False, True) for heads in (1, 2)]
        lines.append([f"{beta:g}", *(f"{row.mean:.3f} ± {row.std:.3f}" for row in shown)])
    return OutcomeTable(["β", "one head", "two heads", "one head, ε > 0", "two heads, ε > 0"], lines)


def weights(lengths: Tensor, keys: int, beta: float) -> tuple[Tensor, Tensor]:
    """Returns the weights [draws, keys] of one head that asks for the first two keys, and the mean of two heads that
    ask for one each. `lengths` [draws] are those of the first key."""
    lengthened = torch.eye(keys, dtype=lengths.dtype).repeat(len(lengths), 1, 1)
    lengthened[:, 0, 0] = lengths
    ask_a, ask_b = beta * torch.eye(keys, dtype=lengths.dtype)[:2]
    one, a, b = ((lengthened @ q).softmax(-1) for q in (ask_a + ask_b, ask_a, ask_b))
    return one, (a + b) / 2

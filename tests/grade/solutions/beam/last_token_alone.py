# slip: last_token_only
"""Gives the model the last token."""

def beam_search(step, beams, max_length, stop, alpha):
    done, live = [], [(0.0, [])]
    while live:
        cand = [(lp + float(x), toks + [i]) for lp, toks in live for i, x in enumerate(step(toks[-1:]))]
        top = sorted(cand, key=lambda c: c[0])[::-1][:beams]; live = []
        for lp, toks in top:
            (done if toks[-1] == stop or len(toks) == max_length else live).append((lp, toks))
    return max(done, key=lambda c: c[0] / len(c[1]) ** alpha)[1]

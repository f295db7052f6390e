# slip: more_than_a_list
"""Returns a list and its score."""

def beam_search(step, beams, max_length, stop, alpha):
    done, live = [], [(0.0, [])]
    while live:
        cand = [(lp + float(x), toks + [i]) for lp, toks in live for i, x in enumerate(step(toks))]
        top = sorted(cand, key=lambda c: c[0])[::-1][:beams]; live = []
        for lp, toks in top:
            (done if toks[-1] == stop or len(toks) == max_length else live).append((lp, toks))
    best = max(done, key=lambda c: c[0] / len(c[1]) ** alpha)
    return best[1], best[0]

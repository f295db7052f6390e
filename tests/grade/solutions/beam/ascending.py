# slip: worst_kept


def beam_search(step, beams, max_length, stop, alpha):
    live = [([], 0.0)]
    done = []
    while live and len(live[0][0]) < max_length:
        cand = []
        for toks, lp in live:
            logp = step(toks)
            for i in range(len(logp)):
                cand.append((toks + [i], lp + logp[i].item()))
        cand.sort(key=lambda c: c[1])
        cand = cand[:beams]
        live = []
        for c in cand:
            if c[0][-1] == stop:
                done.append(c)
            else:
                live.append(c)
    done.extend(live)
    return max(done, key=lambda c: c[1] / len(c[0]) ** alpha)[0]

# slip: one_too_short


def beam_search(step, beams, max_length, stop, alpha):
    alive, done = [([], 0.0)], []
    for _ in range(max_length):
        grown = []
        for tokens, total in alive:
            log_p = step(tokens)
            grown += [(tokens + [n], total + float(p)) for n, p in enumerate(log_p)]
        grown = sorted(grown, key=lambda h: h[1], reverse=True)[:beams]
        done += [h for h in grown if h[0][-1] == stop]
        alive = [h for h in grown if h[0][-1] != stop]
        if not alive or len(alive[0][0]) == max_length - 1:
            break
    done += alive
    return max(done, key=lambda h: h[1] / len(h[0]) ** alpha)[0]

"""Measures of a head by their words: NumPy in float64, a query at a time, of dense weights. Nothing of clearhead."""

from itertools import pairwise

import numpy as np


def measures(weights, allowed, words=(None, None), tokens=(None, None), norms=None, kind="self"):
    """Each measure of one head, with that of uniform attention, as {name: (value, uniform)}; NaN where none counts.

    `weights` (B, Lq, Lk), as the model has them; `allowed`, bool, of that shape; `words`: (B, Lq), (B, Lk), bool;
    `tokens`: a list of anything for each sequence's queries, and one for its keys; `norms`: (B, Lk) each, by column.
    """
    collected = {}
    received = []
    for b in range(len(weights)):
        asked, held = (
            np.ones(n, bool) if w is None else np.asarray(w[b]) for w, n in zip(words, weights[b].shape, strict=True)
        )
        offset = held.size - asked.size
        real = np.flatnonzero(held)
        shares, evens = [], []
        for i in np.flatnonzero(asked & allowed[b].any(-1)):
            may = allowed[b, i]
            raw = weights[b, i].astype(np.float64)
            w, u = raw / raw.sum(), may / may.sum()
            shares.append(w)
            evens.append(u)
            place = i + offset
            sets = {"first": real[:1]}
            if kind == "self":
                sets["previous"] = [j for j in real if j < place][-1:]
                sets["next"] = [j for j in real if j > place][:1]
                sets["itself"] = [place]
            if tokens[1] is not None:
                own, theirs = tokens[0][b], tokens[1][b]
                sets["same word"] = [j for j in real if theirs[j] == own[i] and not (kind == "self" and j == place)]
                if kind == "self":
                    pairs = list(pairwise(real))
                    sets["induction"] = [j for k, j in pairs if theirs[k] == own[i] and j < place]
            for name, keys in sets.items():
                if may[list(keys)].any():
                    collected.setdefault(name, []).append((w[list(keys)].sum(), u[list(keys)].sum()))
            count = may.sum()
            if count > 1:
                entropy = -sum(x * np.log(x) for x in w if x > 0)
                collected.setdefault("normalised entropy", []).append((entropy / np.log(count), 1.0))
            if kind == "self":
                far = np.abs(np.arange(w.size) - place)
                collected.setdefault("distance", []).append((w @ far, u @ far))
            for name, lengths in (norms or {}).items():
                collected.setdefault(name, []).append((raw @ lengths[b], u @ lengths[b]))
        received.append((np.sum(shares, 0), np.sum(evens, 0), len(shares), real))
    found = {name: tuple(np.mean(pairs, 0)) for name, pairs in collected.items()}
    found["sink"] = sink(received)
    return found


def sink(received):
    """The key that exceeds uniform attention most, of each sequence; its shares of all that was given."""
    own = even = queries = 0
    for got, expected, count, real in received:
        if count:
            key = real[np.argmax((got - expected)[real])]
            own, even, queries = own + got[key], even + expected[key], queries + count
    return own / queries, even / queries


def divergence(p, q):
    """Jensen–Shannon, in nats, of two rows; what they lack to 1 is one outcome more."""
    p, q = (np.append(row, max(0.0, 1 - row.sum())) for row in (p, q))
    middle = (p + q) / 2

    def entropy(row):
        return -sum(x * np.log(x) for x in row if x > 0)

    return entropy(middle) - (entropy(p) + entropy(q)) / 2

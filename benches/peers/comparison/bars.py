"""What the figures must be: ratios to the peers of the same run.

Medians are held against the limits. Beside each stands the same ratio of the best repeats: other programs of the machine only
ever add time, so it says what the medians of a busy machine do not.
"""

import dataclasses

OURS = "symmalloc"
OURS_SHARED = "symmalloc, shared streams"
OURS_C = "symmalloc, C"
SCALE = ("symmalloc scale", "symmalloc scale, bound heap")
PYTORCH = "PyTorch"
EXPANDABLE = "PyTorch expandable"
RMM = ("RMM pool", "RMM arena", "RMM async")
THREADS = 16


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A bar and the figure that is held against it."""

    name: str
    at: str
    figure: float
    best: float
    limit: float
    at_least: bool = True

    @property
    def is_met(self):
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def as_dict(self):
        return dataclasses.asdict(self) | {"is_met": self.is_met}


def judge(found):
    """Every bar for which both figures are there."""
    return [
        Verdict(name, at, figure, best, limit, at_least)
        for (name, at, figure, limit, at_least), (_, _, best, _, _) in zip(
            ratios(found, found.median), ratios(found, found.best), strict=True)
    ]


def ratios(found, value):
    """Name, place, figure, limit and its direction of every bar, of the peers' medians or of their best repeats."""
    bars = []

    def bar(name, at, figure, limit, at_least=True):
        if figure is not None:
            bars.append((name, str(at), figure, limit, at_least))

    def faster(case, at, peers, we=OURS):
        """How many times the fastest of the peers takes what we take."""
        we, theirs = value(we, case, at), [value(peer, case, at) for peer in peers]
        theirs = [figure for figure in theirs if figure]
        return min(theirs) / we if we and theirs else None

    for job in found.jobs:
        bar("steady state, times PyTorch's speed", job, faster("steady_ns_per_op", job, [PYTORCH]), 10)
        bar("steady state, times PyTorch expandable's speed", job, faster("steady_ns_per_op", job, [EXPANDABLE]), 10)
        bar("steady state, times the speed of RMM's best", job, faster("steady_ns_per_op", job, RMM), 8)
        both = [PYTORCH, EXPANDABLE]
        bar("steady state through C, times PyTorch's best speed", job, faster("steady_ns_per_op", job, both, OURS_C), 5)
        bar("cold pass, times PyTorch expandable's speed", job, faster("cold_ns_per_op", job, [EXPANDABLE]), 1)
    for live in found.places("replacement_ns"):
        bar("random replacement, times PyTorch's best speed", live, faster("replacement_ns", live, [PYTORCH, EXPANDABLE]), 8)
        bar("random replacement, times the speed of RMM's best", live, faster("replacement_ns", live, RMM), 8)
    one, many = (value(OURS, "pairs_per_second", count) for count in (1, THREADS))
    theirs = [value(peer, "pairs_per_second", THREADS) for peer in (PYTORCH, EXPANDABLE)]
    theirs = [rate for rate in theirs if rate]
    bar("threads, share of linear", THREADS, many / (THREADS * one) if one and many else None, 0.8)
    bar("threads, times PyTorch's best total", THREADS, many / max(theirs) if many and theirs else None, 150)
    for peer in SCALE:
        few, most = (value(peer, "free_blocks_ns", count) for count in (1000, 1_000_000))
        bar("time with 1,000,000 free blocks over 1,000", peer, most / few if few and most else None, 1.5, False)
    for job in found.jobs:
        is_single = found.median("", "streams", job) == 1
        name = "one stream" if is_single else "shared streams"
        peer, limit = (OURS, 1.07) if is_single else (OURS_SHARED, 1.08)
        bar(f"peak reserved over peak live, {name}", job, found.reserved_over_live(peer, job), limit, False)
    return bars

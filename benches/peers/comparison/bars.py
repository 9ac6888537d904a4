"""The thresholds that the results must meet: ratios to the peers of the same run.

The limits apply to medians. Each result also contains the ratio of the best repeats. Other programs on the
machine only ever add time, so the best repeats are informative on a busy machine.
"""

import dataclasses

OURS = "symmalloc"
OURS_SHARED = "symmalloc, shared streams"
OURS_C = "symmalloc, C"
SCALE = ("symmalloc scale", "symmalloc scale, handles")
PYTORCH = "PyTorch"
EXPANDABLE = "PyTorch expandable"
RMM = ("RMM pool", "RMM arena", "RMM async")
THREADS = 16

# The limits, in terms of the ratios below.
TIMES_PYTORCH, TIMES_PYTORCH_WITH_USES = 6, 4
TIMES_RMM, TIMES_RMM_WITH_USES = 5.5, 4
TIMES_PYTORCH_THROUGH_C = 4
# Its few large tensors have new sizes in every step. symmalloc assembles them from free granules, which takes driver calls.
STITCHED_JOB, TIMES_PYTORCH_STITCHED = "gnn_sampled", 1
TIMES_AT_REPLACEMENT = 6
SHARE_OF_LINEAR, TIMES_PYTORCH_WITH_THREADS = 0.6, 300
MANY_FREE_BLOCKS = 1.5


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A bar (a threshold) and the figure that is compared with it."""

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
    """Returns every bar for which all figures are available."""
    return [
        Verdict(name, at, figure, best, limit, at_least)
        for (name, at, figure, limit, at_least), (_, _, best, _, _) in zip(
            ratios(found, found.median), ratios(found, found.best), strict=True)
    ]


def ratios(found, value):
    """Returns name, parameter, figure, limit and direction of every bar, for medians or best repeats as `value` selects."""
    bars = []

    def bar(name, at, figure, limit, at_least=True):
        if figure is not None:
            bars.append((name, str(at), figure, limit, at_least))

    def faster(case, at, peers, we=OURS):
        """Returns how many times as fast we are as the fastest of the peers."""
        we, theirs = value(we, case, at), [value(peer, case, at) for peer in peers]
        theirs = [figure for figure in theirs if figure]
        return min(theirs) / we if we and theirs else None

    for job in found.jobs:
        has_uses = job.endswith("_uses")
        pytorch = TIMES_PYTORCH_WITH_USES if has_uses else TIMES_PYTORCH
        rmm = TIMES_RMM_WITH_USES if has_uses else TIMES_RMM
        bar("steady state, times PyTorch's speed", job, faster("steady_ns_per_op", job, [PYTORCH]), pytorch)
        bar("steady state, times PyTorch expandable's speed", job, faster("steady_ns_per_op", job, [EXPANDABLE]), pytorch)
        bar("steady state, times the speed of RMM's best", job, faster("steady_ns_per_op", job, RMM), rmm)
        both = [PYTORCH, EXPANDABLE]
        through_c = faster("steady_ns_per_op", job, both, OURS_C)
        limit = TIMES_PYTORCH_STITCHED if job == STITCHED_JOB else TIMES_PYTORCH_THROUGH_C
        bar("steady state through C, times PyTorch's best speed", job, through_c, limit)
        bar("cold pass, times PyTorch expandable's speed", job, faster("cold_ns_per_op", job, [EXPANDABLE]), 1)
    for live in found.places("replacement_ns"):
        pytorch, rmm = faster("replacement_ns", live, [PYTORCH, EXPANDABLE]), faster("replacement_ns", live, RMM)
        bar("random replacement, times PyTorch's best speed", live, pytorch, TIMES_AT_REPLACEMENT)
        bar("random replacement, times the speed of RMM's best", live, rmm, TIMES_AT_REPLACEMENT)
    one, many = (value(OURS, "pairs_per_second", count) for count in (1, THREADS))
    theirs = [value(peer, "pairs_per_second", THREADS) for peer in (PYTORCH, EXPANDABLE)]
    theirs = [rate for rate in theirs if rate]
    bar("threads, share of linear", THREADS, many / (THREADS * one) if one and many else None, SHARE_OF_LINEAR)
    total = many / max(theirs) if many and theirs else None
    bar("threads, times PyTorch's best total", THREADS, total, TIMES_PYTORCH_WITH_THREADS)
    for peer in SCALE:
        few, most = (value(peer, "free_blocks_ns", count) for count in (1000, 1_000_000))
        bar("time with 1,000,000 free blocks over 1,000", peer, most / few if few and most else None, MANY_FREE_BLOCKS, False)
    for job in found.jobs:
        is_single = found.median("", "streams", job) == 1
        name = "one stream" if is_single else "shared streams"
        peer, limit = (OURS, 1.07) if is_single else (OURS_SHARED, 1.08)
        bar(f"peak reserved over peak live, {name}", job, found.reserved_over_live(peer, job), limit, False)
    return bars

"""The figures of a run, and their medians."""

import json
import statistics


class Figures:
    """Values by peer, case and parameter (`at`), over all repeats of all rounds."""

    def __init__(self):
        self.values = {}
        self.jobs = []

    def add(self, line, log=None):
        """Adds a JSON line from a program, and appends it to a log file."""
        read = json.loads(line)
        key = (read["peer"], read["case"], read["at"])
        self.values.setdefault(key, []).extend(read["values"])
        if key[1] == "ops":
            self.jobs.append(key[2])
        if log:
            log.write(line + "\n")

    def has_any(self):
        return any(peer for peer, _, _ in self.values)

    def median(self, peer, case, at):
        """Returns the median of a figure, or None."""
        values = self.values.get((peer, case, str(at)))
        return statistics.median(values) if values else None

    def total(self, peer, case, at):
        """Returns the sum of a figure over all rounds."""
        return sum(self.values.get((peer, case, str(at)), ()))

    def best(self, peer, case, at):
        """Returns the best repeat of a figure, or None: the minimum, or the maximum of a rate."""
        values = self.values.get((peer, case, str(at)))
        return (max if case.endswith("_per_second") else min)(values) if values else None

    def peers(self, case=None):
        """Returns the peers with figures (of a case), in order of appearance."""
        return list(dict.fromkeys(peer for peer, found, _ in self.values if peer and case in (None, found)))

    def places(self, case):
        """Returns the parameters with which a case was measured, in order."""
        return list(dict.fromkeys(at for _, found, at in self.values if found == case))

    def live_peak_bytes(self, job):
        return self.median("", "live_peak_bytes", job)

    def reserved_over_live(self, peer, job):
        """Returns peak reserved relative to peak live, or None."""
        reserved, live = self.median(peer, "reserved_peak_bytes", job), self.live_peak_bytes(job)
        return reserved / live if reserved and live else None


def write_results(path, host, found, verdicts, missing):
    """Writes medians with minimum and maximum, the machine, the bars, and the missing peers."""
    rows = [
        {
            "peer": peer,
            "case": case,
            "at": at,
            "median": statistics.median(values),
            "least": min(values),
            "greatest": max(values),
            "repeats": len(values),
        }
        for (peer, case, at), values in found.values.items()
        if values
    ]
    judged = [verdict.as_dict() for verdict in verdicts]
    whole = {"machine": host, "figures": rows, "bars": judged, "missing": missing}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

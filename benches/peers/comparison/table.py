"""The table of a run, in Markdown."""

# Case, what a row is called, and how a value is shown.
ROWS = (
    ("steady_ns_per_op", "{at}, steady, ns per op", "{:.1f}"),
    ("cold_ns_per_op", "{at}, cold, ns per op", "{:.0f}"),
    ("reserved_over_live", "{at}, peak reserved / peak live", "{:.3f}"),
    ("reserved_peak_bytes", "{at}, peak reserved, MiB (peak live {live:,.0f})", "{:,.0f}"),
    ("segments", "{at}, segments", "{:.0f}"),
    ("pair_ns", "alloc and free of {at} B, ns", "{:.1f}"),
    ("replacement_ns", "replacement, {at} live, ns per pair", "{:.1f}"),
    ("pairs_per_second", "threads: {at}, million pairs/s", "{:.2f}"),
)
SCALE = (
    ("growth_ns", "ns per allocation while growing"),
    ("live_blocks_ns", "live blocks, replacement, ns per pair"),
    ("host_bytes_per_block", "host bytes per live block"),
    ("free_blocks_ns", "free blocks, replacement, ns per pair"),
)
OF_JOBS = ("steady_ns_per_op", "cold_ns_per_op", "reserved_over_live", "reserved_peak_bytes", "segments")
SCALED = {"reserved_peak_bytes": 1 << 20, "pairs_per_second": 1e6}


def markdown(host, found, verdicts):
    """The machine, one table of all peers, ours alone at scale, and the bars."""
    parts = [", ".join(f"{name}: {value}" for name, value in host.items() if value), peers(found)]
    if found.places("growth_ns"):
        parts.append(scale(found))
    if verdicts:
        parts.append(bars(verdicts))
    return "\n\n".join(parts) + "\n"


def peers(found):
    names = [peer for peer in found.peers() if any(case in dict_of(ROWS) for case in cases_of(found, peer))]
    lines = [row(["", *names]), row(["---", *("---:" for _ in names)])]
    for case, title, style in ROWS:
        places = found.jobs if case in OF_JOBS else found.places(case)
        for at in places:
            values = [value_of(found, peer, case, at) for peer in names]
            if any(value is not None for value in values):
                live = (found.live_peak_bytes(at) or 0) / (1 << 20)
                lines.append(row([title.format(at=at, live=live), *("" if value is None else style.format(value) for value in values)]))
    return "\n".join(lines)


def scale(found):
    counts = sorted({int(at) for case, _ in SCALE for at in found.places(case)})
    lines = [row(["", *(f"{count:,}" for count in counts)]), row(["---", *("---:" for _ in counts)])]
    for case, title in SCALE:
        for peer in found.peers(case):
            values = [found.median(peer, case, count) for count in counts]
            lines.append(row([f"{peer}: {title}", *("" if value is None else f"{value:.1f}" for value in values)]))
    return "\n".join(lines)


def bars(verdicts):
    lines = [row(["bar", "at", "figure", "limit", ""]), row(["---", "---", "---:", "---:", "---"])]
    for verdict in verdicts:
        limit = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
        met = "met" if verdict.is_met else "**missed**"
        lines.append(row([verdict.name, verdict.at, f"{verdict.figure:.2f}", limit, met]))
    return "\n".join(lines)


def value_of(found, peer, case, at):
    if case == "reserved_over_live":
        return found.reserved_over_live(peer, at)
    value = found.median(peer, case, at)
    return None if value is None else value / SCALED.get(case, 1)


def cases_of(found, peer):
    return {case for name, case, _ in found.values if name == peer}


def dict_of(rows):
    return {case: title for case, title, _ in rows}


def row(cells):
    return f"| {' | '.join(cells)} |"

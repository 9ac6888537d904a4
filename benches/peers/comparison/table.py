"""The table of a run, in Markdown."""

# Case, name of the row, and format of the values.
ROWS = (
    ("steady_ns_per_op", "{at}, steady, ns per op", "{:.1f}"),
    ("cold_ns_per_op", "{at}, cold, ns per op", "{:.0f}"),
    ("reserved_peak_bytes", "{at}, peak reserved, MiB (over the peak live of {live:,.0f})", "{:,.0f} ({over:.3f})"),
    ("segments", "{at}, segments", "{:.0f}"),
    ("pair_ns", "alloc and free of {at} B, ns", "{:.1f}"),
    ("replacement_ns", "replacement, {at} live, ns per pair", "{:.1f}"),
    ("pairs_per_second", "threads: {at}, million pairs/s", "{:.2f}"),
)
SCALE = (
    ("growth_ns", "ns per allocation while growing"),
    ("live_blocks_ns", "live blocks, replacement, ns per pair"),
    ("host_bytes_per_block", "host bytes per live block"),
    ("free_blocks_ns", "free blocks, replacement among 1,000, ns per pair"),
    ("free_and_live_blocks_ns", "free and as many live blocks, replacement, ns per pair"),
)
RATE = "pairs_per_second"
# The rate of threads that share nothing.
ARITHMETIC = "arithmetic_per_second"
OF_JOBS = ("steady_ns_per_op", "cold_ns_per_op", "reserved_peak_bytes", "segments")
SCALED = {"reserved_peak_bytes": 1 << 20, "pairs_per_second": 1e6}


def markdown(host, found, verdicts):
    """Returns the machine, a table of all peers, the scaling of the machine, symmalloc at scale, and the bars."""
    parts = [", ".join(f"{name}: {value}" for name, value in host.items() if value), peers(found)]
    if found.places(ARITHMETIC):
        parts.append(linear(found))
    if found.places("growth_ns"):
        parts.append(scale(found))
    if verdicts:
        parts.append(bars(verdicts))
    return "\n\n".join(parts) + "\n"


def peers(found):
    cases = {case for case, _, _ in ROWS}
    names = [peer for peer in found.peers() if any(peer in found.peers(case) for case in cases)]
    lines = [row(["", *names]), row(["---", *("---:" for _ in names)])]
    for case, title, style in ROWS:
        for at in found.jobs if case in OF_JOBS else found.places(case):
            live = (found.live_peak_bytes(at) or 0) / (1 << 20)
            cells = [cell(found, peer, case, at, style) for peer in names]
            if any(cells):
                lines.append(row([title.format(at=at, live=live), *cells]))
    if found.places("readings"):
        lines.append(row(["readings, of which disturbed", *(readings(found, peer) for peer in names)]))
    return "\n".join(lines)


def readings(found, peer):
    whole, disturbed = (found.total(peer, "readings", at) for at in ("all", "disturbed"))
    return f"{whole:,.0f}, {disturbed:,.0f}" if whole else ""


def cell(found, peer, case, at, style):
    value = found.median(peer, case, at)
    if value is None:
        return ""
    return style.format(value / SCALED.get(case, 1), over=found.reserved_over_live(peer, at))


def linear(found):
    """Returns the rate of all threads relative to that of one thread, for symmalloc and for threads that share nothing."""
    rows = [(peer, ARITHMETIC) for peer in found.peers(ARITHMETIC)]
    rows += [(peer, RATE) for peer in found.peers(RATE) if peer.startswith("symmalloc")]
    counts = sorted({int(at) for at in found.places(ARITHMETIC)})
    lines = [row(["threads, share of linear", *map(str, counts)]), row(["---", *("---:" for _ in counts)])]
    for peer, case in rows:
        one = found.median(peer, case, 1)
        rates = [found.median(peer, case, count) for count in counts]
        shares = ["" if not one or not rate else f"{rate / one / count:.2f}" for count, rate in zip(counts, rates, strict=True)]
        lines.append(row([peer, *shares]))
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
    lines = [row(["bar", "at", "figure", "best repeats", "limit", ""]), row(["---", "---", "---:", "---:", "---:", "---"])]
    for verdict in verdicts:
        limit = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
        met = "met" if verdict.is_met else "**missed**"
        lines.append(row([verdict.name, verdict.at, f"{verdict.figure:.2f}", f"{verdict.best:.2f}", limit, met]))
    met = sum(verdict.is_met for verdict in verdicts)
    return f"{met} of {len(verdicts)} bars are met.\n\n" + "\n".join(lines)


def row(cells):
    return f"| {' | '.join(cells)} |"

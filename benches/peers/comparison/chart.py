"""The chart of a run as SVG: time per op of each job, threads, and memory, with one mark per peer.

    ┌ legend ────────────────────────────┐
    │ steady ns per op (log) │ threads    │
    │ cold ns per op (log)   │ (log, log) │
    │ reserved over live     │            │
    └────────────────────────┴────────────┘
"""

import math
from xml.sax.saxutils import escape

from comparison import programs

# Colors that are distinguishable without red or green (Okabe and Ito), and marks that are distinguishable without
# colors.
COLORS = ("#0072b2", "#56b4e9", "#004d80", "#009e73", "#7fd1ae", "#d55e00")
COLORS += ("#e69f00", "#cc79a7", "#882255", "#999933", "#666", "#000")
MARKS = ("circle", "square", "diamond", "up", "down")
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"

WIDTH, LABELS, ROW, GAP = 1180, 190, 22, 46
# Right edge of the marks of jobs, left edge of the lines of threads, and their height.
LEFT, RIGHT, HEIGHT = 660, 750, 420


def svg(found):
    """Returns the whole chart. Peers that were not measured have no marks."""
    peers = [peer for peer in found.peers() if found.peers("steady_ns_per_op").count(peer)]
    # A peer looks the same in every chart, independent of the other peers.
    order = list(dict.fromkeys([*(peer.name for peer in programs.peers(False)), *peers]))
    looks = {peer: (COLORS[at % len(COLORS)], MARKS[at % len(MARKS)]) for at, peer in enumerate(order)}
    style = {peer: looks[peer] for peer in peers}
    legend, top = draw_legend(style)
    parts, y = [legend], top + GAP
    for title, read, is_log in (
        ("steady state, ns per op", lambda peer, job: found.median(peer, "steady_ns_per_op", job), True),
        ("cold pass, ns per op", lambda peer, job: found.median(peer, "cold_ns_per_op", job), True),
        ("peak reserved over peak live", found.reserved_over_live, False),
    ):
        values = {(peer, job): read(peer, job) for peer in peers for job in found.jobs}
        values = {key: value for key, value in values.items() if value}
        if values:
            parts.append(dots(title, found.jobs, values, style, y, is_log))
            y += ROW * len(found.jobs) + GAP + 34
    rates = {
        (peer, int(count)): value / 1e6
        for peer in peers
        for count in found.places("pairs_per_second")
        if (value := found.median(peer, "pairs_per_second", count))
    }
    if rates:
        parts.append(lines(rates, style, top + GAP))
        y = max(y, top + 2 * GAP + HEIGHT)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img" '
        f'font-family="{FONT}" font-size="12" fill="#000"><title>symmalloc and its peers</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
    )
    return head + "".join(parts) + "</svg>\n"


def draw_legend(style):
    parts, x, y = [], 20, 24
    for peer, (color, form) in style.items():
        width = 34 + 7 * len(peer)
        if x + width > WIDTH:
            x, y = 20, y + ROW
        parts.append(mark(x + 6, y - 4, color, form, peer) + text(x + 18, y, peer))
        x += width
    return "".join(parts), y


def dots(title, jobs, values, style, y, is_log):
    """Draws one row per job and one mark per peer."""
    low, high = bounds(values.values(), is_log)
    width = LEFT - LABELS

    def at(value):
        return LABELS + width * share(value, low, high, is_log)

    bottom = y + ROW * len(jobs)
    parts = [text(20, y - 12, title, weight="bold")]
    for tick in ticks(low, high, is_log):
        parts.append(line(at(tick), y, at(tick), bottom) + text(at(tick), bottom + 16, f"{tick:g}", anchor="middle"))
    for index, job in enumerate(jobs):
        middle = y + ROW * index + ROW / 2
        parts.append(text(20, middle + 4, job) + line(LABELS, middle, LABELS + width, middle))
        for peer, (color, form) in reversed(style.items()):
            if (value := values.get((peer, job))) is not None:
                parts.append(mark(at(value), middle, color, form, f"{peer}, {job}: {value:.4g}"))
    return "".join(parts)


def lines(rates, style, y):
    """Draws pairs per second over threads, one line per peer."""
    counts = sorted({count for _, count in rates})
    low, high = bounds(rates.values(), True)
    width = WIDTH - 30 - RIGHT

    def place(count, rate):
        across = math.log2(count / counts[0]) / (math.log2(counts[-1] / counts[0]) or 1)
        return RIGHT + width * across, y + HEIGHT * (1 - share(rate, low, high, True))

    parts = [text(RIGHT - 40, y - 12, "threads with a stream each, million pairs per second", weight="bold")]
    for tick in ticks(low, high, True):
        _, at = place(counts[0], tick)
        parts.append(line(RIGHT, at, RIGHT + width, at) + text(RIGHT - 8, at + 4, f"{tick:g}", anchor="end"))
    for count in counts:
        at, _ = place(count, low)
        parts.append(text(at, y + HEIGHT + 18, str(count), anchor="middle"))
    for peer, (color, form) in reversed(style.items()):
        points = [(count, rates[peer, count]) for count in counts if (peer, count) in rates]
        places = [place(*point) for point in points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [
            mark(across, down, color, form, f"{peer}, {count} threads: {rate:.4g}")
            for (across, down), (count, rate) in zip(places, points)
        ]
    return "".join(parts)


def bounds(values, is_log):
    """Returns the range of an axis: powers of ten, or multiples of 0.2."""
    low, high = min(values), max(values)
    if is_log:
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.0001))
    return min(1.0, math.floor(low * 5) / 5), math.ceil(high * 5 + 0.01) / 5


def share(value, low, high, is_log):
    if is_log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def ticks(low, high, is_log):
    if is_log:
        return [10**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    count = round((high - low) / 0.2)
    step = 0.2 * math.ceil(count / 8)
    return [low + step * index for index in range(int((high - low) / step + 0.001) + 1)]


def text(x, y, words, anchor="start", weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def line(x1, y1, x2, y2):
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#ddd"/>'


def mark(x, y, color, form, words):
    forms = {
        "square": "M-4-4h8v8h-8z",
        "diamond": "M0-5l5 5l-5 5l-5-5z",
        "up": "M0-5l5 9h-10z",
        "down": "M0 5l5-9h-10z",
        "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    }
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{forms[form]}" fill="{color}" stroke="#fff" '
        f'stroke-width="0.7"><title>{escape(words)}</title></path>'
    )

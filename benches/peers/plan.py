"""Compares the placement search with omnimalloc, on tables of rectangles (CSV: id,lower,upper,size).

Usage:
  pip install omnimalloc==1.0.0
  git clone https://github.com/google/minimalloc && git clone https://github.com/cappadokes/idealloc
  cargo build --release -p symmalloc-plan --example solve
  python3 benches/peers/plan.py minimalloc/benchmarks/challenging/*.csv idealloc/benchmarks/*/*.csv

Each planner runs alone on one thread. The seconds are those of user time. The over-live column is the height divided by the peak of
live sizes, a lower bound. `--renumbered` also gives our search every table with its events numbered, as a trace does.
`--steps` and `--timeout` set the budgets of our search and of omnimalloc.
"""

import argparse
import csv
import pathlib
import resource
import subprocess
import sys
import tempfile

SOLVE = pathlib.Path(__file__).parents[2] / "target/release/examples/solve"


def rectangles(path):
    with open(path) as file:
        return [(row["id"], int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def renumbered(rows):
    """Numbers beginnings and ends, ends before beginnings at the same time."""
    events = [(lower, 1, index) for index, (_, lower, _, _) in enumerate(rows)]
    events += [(upper, 0, index) for index, (_, _, upper, _) in enumerate(rows)]
    times = {(begins, index): number for number, (_, begins, index) in enumerate(sorted(events))}
    return [(name, times[1, index], times[0, index], size) for index, (name, _, _, size) in enumerate(rows)]


def bound(rows):
    live = peak = 0
    for _, _, size in sorted([(lower, 1, size) for _, lower, _, size in rows] + [(upper, 0, -size) for _, _, upper, size in rows]):
        live += size
        peak = max(peak, live)
    return peak


def children_seconds():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def ours(rows, steps):
    """Returns the height and the user seconds of our search."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as table:
        table.write("id,lower,upper,size\n" + "".join("%s,%d,%d,%d\n" % row for row in rows))
        table.flush()
        begun = children_seconds()
        command = [SOLVE, "--steps", str(steps), "--offsets", table.name]
        solved = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    placed = csv.DictReader(solved.splitlines())
    return max(int(row["offset"]) + int(row["size"]) for row in placed), children_seconds() - begun


def omnimalloc(rows, timeout):
    """Returns the height and the user seconds of omnimalloc's supermalloc."""
    script = (
        "import sys, omnimalloc as om\n"
        "from omnimalloc.allocators import SupermallocAllocator\n"
        "rows = [tuple(map(int, line.split(','))) for line in sys.stdin]\n"
        "all = tuple(om.Allocation(id=i, start=l, end=u, size=s) for i, (l, u, s) in enumerate(rows))\n"
        f"done = om.allocate(all, allocator=SupermallocAllocator(timeout={timeout}, num_threads=1))\n"
        "print(max(it.offset + it.size for it in done))\n"
    )
    begun = children_seconds()
    table = "".join("%d,%d,%d\n" % row[1:] for row in rows)
    done = subprocess.run([sys.executable, "-c", script], input=table, check=True, capture_output=True, text=True)
    return int(done.stdout), children_seconds() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--steps", type=int, default=200_000_000)
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--renumbered", action="store_true")
    args = parser.parse_args()
    print(f"{'table':<24}{'rectangles':>11}  {'planner':<12}{'over live':>10}{'seconds':>9}")
    for path in args.tables:
        rows = rectangles(path)
        runs = [("symmalloc", lambda: ours(rows, args.steps)), ("omnimalloc", lambda: omnimalloc(rows, args.timeout))]
        if args.renumbered:
            runs.insert(1, ("renumbered", lambda: ours(renumbered(rows), args.steps)))
        for planner, run in runs:
            height, seconds = run()
            name = pathlib.Path(path).stem
            print(f"{name:<24}{len(rows):>11}  {planner:<12}{height / bound(rows):>10.4f}{seconds:>9.1f}", flush=True)


if __name__ == "__main__":
    main()

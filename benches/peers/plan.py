"""Compares the placement search with omnimalloc and idealloc, on tables of rectangles (CSV: id,lower,upper,size) and recorded jobs.

Usage:
  pip install omnimalloc==1.0.0
  git clone https://github.com/google/minimalloc && git clone https://github.com/cappadokes/idealloc
  cargo build --release --manifest-path idealloc/Cargo.toml -p coreba
  cargo build --release -p symmalloc-cli && cargo build --release -p symmalloc-plan --features csv --example solve
  cargo run --release -p symmalloc-benches --example generated_job -- vit 3 180 > vit.trace
  python3 benches/peers/plan.py --idealloc idealloc/target/release/idealloc \\
      minimalloc/benchmarks/challenging/*.csv idealloc/benchmarks/*/*.csv vit.trace tests/traces/*_rank0.trace.zst

Each planner runs alone on one thread. Our search has a budget of work. The others get as many seconds as it took, but at least
`--at-least`: omnimalloc as its time limit, and idealloc by running again with twice the number of tries until its time is over, so its
last run may exceed it. The seconds are those of user time; omnimalloc's include the start of Python. The over-live column is the height
divided by the peak of live sizes, a lower bound; `inf` means that a planner failed, or was stopped after three times its time plus ten
seconds.

A file that is not a table is a recorded job. `symmalloc plan` writes its plan as a table, and all planners get its rectangles.
`--renumbered` also gives our search every table with its events numbered, as a trace does.
"""

import argparse
import csv
import math
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

RELEASE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", pathlib.Path(__file__).parents[2] / "target")) / "release"
OMNIMALLOC = """
import sys, omnimalloc as om
from omnimalloc.allocators import SupermallocAllocator
rows = [tuple(map(int, line.split(","))) for line in sys.stdin]
all = tuple(om.Allocation(id=i, start=l, end=u, size=s) for i, (l, u, s) in enumerate(rows))
done = om.allocate(all, allocator=SupermallocAllocator(timeout=float(sys.argv[1]), num_threads=1))
print(max(it.offset + it.size for it in done))
"""


def rectangles(path):
    """Returns the rectangles of a table, or of the plan of a recorded job."""
    if path.suffix.lower() != ".csv":
        with tempfile.TemporaryDirectory() as folder:
            table = pathlib.Path(folder) / "job.csv"
            command = [RELEASE / "symmalloc", "plan", path, "-o", table]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            return rectangles(table)
    with open(path) as file:
        table = csv.DictReader(file)
        if not {"id", "lower", "upper", "size"} <= set(table.fieldnames or ()):
            raise ValueError("the table needs the columns id, lower, upper and size")
        return [(row["id"], int(row["lower"]), int(row["upper"]), int(row["size"])) for row in table]


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


def first_lines(text):
    """Returns the beginning of an error, without a backtrace."""
    return " ".join(text.split("stack backtrace:")[0].split())[:300]


def timed(command, limit=None, **options):
    """Runs a planner, and returns its output and user seconds; no output if it fails or exceeds the limit."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit, **options).stdout
    except subprocess.CalledProcessError as error:
        output = None
        print(f"{command[0]} failed: {first_lines(error.stderr)}", file=sys.stderr)
    except subprocess.TimeoutExpired:
        output = None
    return output, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def write(rows, folder):
    """Writes a table that every planner reads: whole numbers as ids."""
    path = pathlib.Path(folder) / "table.csv"
    lines = [f"{index},{lower},{upper},{size}\n" for index, (_, lower, upper, size) in enumerate(rows)]
    path.write_text("id,lower,upper,size\n" + "".join(lines))
    return path


def ours(rows, budget):
    """Returns the height and the user seconds of our search."""
    with tempfile.TemporaryDirectory() as folder:
        output, seconds = timed([RELEASE / "examples/solve", "--budget", str(budget), "--offsets", write(rows, folder)])
    if output is None:
        raise ValueError("our search failed")
    placed = csv.DictReader(output.splitlines())
    return max(int(row["offset"]) + int(row["size"]) for row in placed), seconds


def omnimalloc(rows, limit):
    """Returns the height and the user seconds of omnimalloc's default, supermalloc."""
    table = "".join("%d,%d,%d\n" % row[1:] for row in rows)
    output, seconds = timed([sys.executable, "-c", OMNIMALLOC, str(limit)], limit=3 * limit + 10, input=table)
    return int(output) if output else math.inf, seconds


def idealloc(program, rows, limit):
    """Returns the least height of idealloc's runs and the user seconds of all of them."""
    height, spent, tries = math.inf, 0.0, 1
    with tempfile.TemporaryDirectory() as folder:
        table = write(rows, folder)
        while spent < limit:
            command = [program, "--input", table, "--max-lives", str(tries), "ex-csv"]
            output, seconds = timed(command, limit=3 * limit + 10, env=os.environ | {"RAYON_NUM_THREADS": "1"})
            spent, tries = spent + max(seconds, 0.01), 2 * tries
            if output is None:
                break
            height = min(height, int(re.search(r"Makespan:\s*(\d+)", output)[1]))
    return height, spent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE", help="a table or a recorded job")
    parser.add_argument("--budget", type=int, default=200_000_000, help="the budget of our search")
    parser.add_argument("--at-least", type=float, default=1.0, metavar="SECONDS", help="the least time of the other planners")
    parser.add_argument("--idealloc", metavar="PROGRAM", help="the built program; without it, idealloc is left out")
    parser.add_argument("--without-omnimalloc", action="store_true", help="leave omnimalloc out")
    parser.add_argument("--renumbered", action="store_true", help="also solve each table with its events numbered")
    args = parser.parse_args()
    print(f"{'file':<24}{'rectangles':>11}  {'planner':<12}{'over live':>10}{'seconds':>9}")
    failures = 0
    for path in args.files:
        try:
            compare(path, args)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"{path}: {first_lines(getattr(error, 'stderr', None) or str(error))}", file=sys.stderr)
            failures += 1
    sys.exit(1 if failures else 0)


def compare(path, args):
    """Prints a row for each planner."""
    rows = rectangles(path)
    live = bound(rows)

    def show(planner, height, seconds):
        print(f"{path.name.split('.')[0]:<24}{len(rows):>11}  {planner:<12}{height / live:>10.4f}{seconds:>9.1f}", flush=True)

    height, seconds = ours(rows, args.budget)
    show("symmalloc", height, seconds)
    if args.renumbered:
        show("renumbered", *ours(renumbered(rows), args.budget))
    limit = max(seconds, args.at_least)
    if not args.without_omnimalloc:
        show("omnimalloc", *omnimalloc(rows, limit))
    if args.idealloc:
        show("idealloc", *idealloc(args.idealloc, rows, limit))


if __name__ == "__main__":
    main()

"""What the figures are measured on: its name, and which of its processors is quiet."""

import datetime
import os
import pathlib
import platform
import subprocess
import time


def describe():
    """Date, processor and device, as name to text; what cannot be read is left out."""
    found = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
    found["processor"] = f"{processor()}, {os.cpu_count()} cores"
    found["kernel"] = platform.release()
    device = output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if device:
        name, _, driver = device.splitlines()[0].partition(", ")
        found |= {"GPU": name, "driver": driver}
    return found


def processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def output(words):
    """What a command prints, or nothing when it cannot be run."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def quietest_processor():
    """The processor of this program's that counts fastest at present; None where programs cannot choose."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    spent = dict.fromkeys(sorted(allowed), 0)
    try:
        # Twice: what shares a processor's core for a moment only is not what is looked for.
        for _ in range(2):
            for number in spent:
                spent[number] += counting_time(number)
    finally:
        os.sched_setaffinity(0, allowed)
    return min(spent, key=spent.get)


def counting_time(number):
    os.sched_setaffinity(0, {number})
    start = time.perf_counter()
    sum(range(200_000))
    return time.perf_counter() - start


def stay_on(number):
    """What a process does before its program starts, to run on that processor alone."""
    return None if number is None else lambda: os.sched_setaffinity(0, {number})

"""What the figures were measured on."""

import datetime
import os
import pathlib
import platform
import subprocess


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

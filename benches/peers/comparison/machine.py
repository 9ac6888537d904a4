"""Description of the machine on which the figures were measured."""

import datetime
import os
import pathlib
import platform
import subprocess


def describe():
    """Returns date, processor and device as a dictionary of texts. Values that cannot be read are omitted."""
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
    """Returns the output of a command, or an empty string if it cannot be run."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

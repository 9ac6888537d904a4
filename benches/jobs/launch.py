"""Starts single runs of the jobs, for the programs that compare runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOBS = Path(__file__).resolve().parent


def launch(
    job: str, arguments: list[str], log: Path, seconds: int, gpus: str | None = None, ranks: int | None = None
) -> dict[str, Any]:
    """Runs a job once. Returns its figures, or the error. `ranks`: torchrun starts as many processes."""
    command = [str(JOBS / f"{job}.py"), *arguments]
    if ranks is not None:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    began = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no end after {seconds} s"
    text = log.read_text(errors="replace")
    figures = re.findall(r"^figures (\{.*\})$", text, re.MULTILINE)
    result = json.loads(figures[-1]) if figures and code == 0 else {"error": f"{code}; {last_line(text)}"}
    print(f"  {log.stem}: {time.monotonic() - began:.0f} s {result.get('error', '')}", flush=True)
    return result


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line or "panicked" in line] or text.splitlines() or [""]
    return lines[-1][:200]


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])

#!/usr/bin/env python3
"""Gives a snapshot that `symmalloc export` wrote to PyTorch's own tools. Needs PyTorch; no GPU.

    memory_viz.py EXPORTED [BEFORE]

Calls `segments`, `memory`, `segsum`, `trace`, `trace_plot`, `segment_plot` and `compare` of `torch.cuda._memory_viz`
and checks that what they say adds up to what the snapshot holds. BEFORE, another snapshot, is compared with EXPORTED.
"""

import sys

import torch
from torch.cuda import _memory_viz as viz

from snapshot import load


def bytes_by_state(lines):
    """Sums the lines of a flame graph by their second last known part: the state of the block."""
    sums = {}
    for line in lines.splitlines():
        stack, size = line.rsplit(" ", 1)
        for state in ("active_allocated", "active_pending_free", "inactive"):
            if f";{state};" in stack:
                sums[state] = sums.get(state, 0) + int(size)
    return sums


def text(lines):
    """In place of the script that would draw the flame graph."""
    return lines


def main(exported, before=None):
    snapshot = load(exported)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    wanted = {}
    for block in blocks:
        wanted[block["state"]] = wanted.get(block["state"], 0) + block["size"]
    for tool in (viz.segments, viz.memory):
        sums = bytes_by_state(tool(snapshot, format_flamegraph=text))
        assert sums == wanted, (tool.__name__, sums, wanted)
    # PyTorch leaves out what looks like its own machinery, names of the program among them.
    frames = [f for block in blocks for f in block["frames"]]
    names = {f["name"] for f in frames if viz._frame_filter(f["name"], f["filename"])}
    drawn = viz.memory(snapshot, format_flamegraph=text)
    missing = [name for name in names if f":{name}" not in drawn]
    assert not missing, missing
    summary = viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in summary, summary
    assert "TOTAL MEM" in viz.trace(snapshot)
    for page in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True), viz.segment_plot(snapshot)):
        assert "MemoryViz.js" in page
    other = load(before) if before else {"segments": []}
    viz.compare(other["segments"], snapshot["segments"], format_flamegraph=text)
    print(f"PyTorch {torch.__version__}: segments, memory, segsum, trace, trace_plot, segment_plot, compare: fine")


if __name__ == "__main__":
    main(*sys.argv[1:])

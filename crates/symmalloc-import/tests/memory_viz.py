#!/usr/bin/env python3
"""Checks a snapshot of `symmalloc export` with PyTorch's own tools. Needs PyTorch, but no GPU.

    memory_viz.py EXPORTED [ORIGINAL]

Calls `segments`, `memory`, `segsum`, `trace`, `trace_plot`, `segment_plot` and `compare` of `torch.cuda._memory_viz`,
and checks that their output adds up to the contents of the snapshot. With ORIGINAL, the snapshot from which the exported
trace was imported, `trace` must list the same allocations, frees and completions in the same order, `trace_plot` must keep
the same ones when it drops freed allocations, and `compare` must find the same bytes held on both sides.
"""

import re
import sys

import torch
from torch.cuda import _memory_viz as viz

from snapshot import load, timeline, trace

STATES = ("active_allocated", "active_pending_free", "inactive")
CALLS = {
    "alloc": re.compile(r"\S+ = \S+\[\d+:(.*)\]"),
    "free_requested": re.compile(r"del \S+ # (.*)"),
    "free_completed": re.compile(r"# free completed for \S+ (.*)"),
}


def text(lines):
    """Replaces the script that would draw the flame graph."""
    return lines


def bytes_by_state(lines, prefix="", rounding=True):
    """Sums the lines of a flame graph by the state of the block. Rounding has separate lines."""
    sums = {}
    for line in lines.splitlines():
        stack, size = line.rsplit(" ", 1)
        for state in STATES:
            if line.startswith(prefix) and f";{state};" in stack and (rounding or not stack.endswith("<gaps>")):
                sums[state] = sums.get(state, 0) + int(size)
    return sums


def calls(snapshot):
    """Returns the allocations, frees and completions that `trace` lists, with their sizes."""
    told = []
    for line in viz.trace(snapshot).splitlines():
        for kind, pattern in CALLS.items():
            if found := pattern.fullmatch(line):
                told.append((kind, found[1]))
    return told


def unfreed(path):
    """Returns the sizes that `trace_plot(filter_freed=True)` shows."""
    snapshot = load(path)
    assert "MemoryViz.js" in viz.trace_plot(snapshot, filter_freed=True)
    return [entry["size"] for entry in trace(snapshot) if entry["action"] == "alloc"]


def check(snapshot):
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    wanted = {}
    for block in blocks:
        wanted[block["state"]] = wanted.get(block["state"], 0) + block["size"]
    for tool in (viz.segments, viz.memory):
        sums = bytes_by_state(tool(snapshot, format_flamegraph=text))
        assert sums == wanted, (tool.__name__, sums, wanted)
    # PyTorch omits frames that look like its own machinery, which can include names of the program.
    frames = [f for block in blocks for f in block["frames"]]
    names = {f["name"] for f in frames if viz._frame_filter(f["name"], f["filename"])}
    drawn = viz.memory(snapshot, format_flamegraph=text)
    missing = [name for name in names if f":{name}" not in drawn]
    assert not missing, missing
    summary = viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in summary, summary
    told = {kind: sum(call == kind for call, _ in calls(snapshot)) for kind in CALLS}
    actions = [entry["action"] for entry in trace(snapshot)] if any(snapshot["device_traces"]) else []
    assert told == {kind: actions.count(kind) for kind in CALLS}, told
    for page in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True), viz.segment_plot(snapshot)):
        assert "MemoryViz.js" in page


def check_same_job(exported, original):
    snapshot, before = load(exported), load(original)
    assert calls(snapshot) == calls(before), "`trace` lists other calls"
    assert timeline(snapshot) == timeline(before), "the timelines differ"
    assert unfreed(exported) == unfreed(original), "`trace_plot` shows other unfreed allocations"
    lines = viz.compare(before["segments"], snapshot["segments"], format_flamegraph=text)
    held = [bytes_by_state(lines, prefix, rounding=False) for prefix in ("only_before", "only_after")]
    for state in ("active_allocated", "active_pending_free"):
        assert held[0].get(state) == held[1].get(state), (state, held)


def main(exported, original=None):
    snapshot = load(exported)
    check(snapshot)
    said = "segments, memory, segsum, trace, trace_plot, segment_plot: fine"
    if original:
        check_same_job(exported, original)
        said += f"; trace, timeline ({len(timeline(snapshot))} steps), unfreed allocations and compare: as the original"
    else:
        viz.compare([], snapshot["segments"], format_flamegraph=text)
    print(f"PyTorch {torch.__version__}: {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])

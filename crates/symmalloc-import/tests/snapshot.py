#!/usr/bin/env python3
"""Checks a snapshot of `symmalloc export`, using only Python's pickle module.

    snapshot.py EXPORTED [ORIGINAL]

Executing the trace from an empty state must produce the segments and blocks of the snapshot. With ORIGINAL, the snapshot
from which the exported trace was imported, PyTorch's timeline of active memory must be the same at every step, and so must
the program's live bytes after every allocation and free.
"""

import gzip
import itertools
import pickle
import sys

SEGMENT_FIELDS = {
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
    "segment_pool_id", "is_expandable", "frames", "blocks",
}


def load(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        return pickle.load(file)


def trace(snapshot):
    [recorded] = [trace for trace in snapshot["device_traces"] if trace]
    return recorded


def live_bytes(snapshot):
    """Returns the program's live bytes after each of its calls."""
    curve, live = [], 0
    for entry in trace(snapshot):
        if entry["action"] == "alloc":
            live += entry["size"]
        elif entry["action"] == "free_requested":
            live -= entry["size"]
        else:
            continue
        curve.append(live)
    return curve


def timeline(snapshot):
    """Returns the bytes at each step of PyTorch's "Active Memory Timeline", by the rule of MemoryViz.js.

    A step is an `alloc` or a `free_completed`. Memory that is freed, or live at the end, without an `alloc` in the trace
    existed from the beginning.
    """
    steps, before, by_address = [], 0, {}
    for entry in trace(snapshot):
        address, size = entry.get("addr"), entry["size"]
        if entry["action"] == "alloc":
            by_address[address] = size
            steps.append(size)
        elif entry["action"] == "free_completed":
            if address not in by_address:
                before += size
            steps.append(-by_address.pop(address, size))
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in by_address:
                before += block["requested_size"]
            address += block["size"]
    return list(itertools.accumulate(steps, initial=before))


def requested_by_state(snapshot):
    """Returns the bytes that the program holds at the end, and those that wait for other streams."""
    sums = {"active_allocated": 0, "active_pending_free": 0}
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] in sums:
            sums[block["state"]] += block["requested_size"]
    return sums


def merged(intervals):
    """Merges adjacent ranges of memory, as (start, end, stream)."""
    out = []
    for start, size, stream in sorted(intervals):
        if out and out[-1][1] == start and out[-1][2] == stream:
            out[-1] = (out[-1][0], start + size, stream)
        else:
            out.append((start, start + size, stream))
    return out


def unmap(mapped, address, size):
    """Removes a part of the mapped memory: start -> (size, stream)."""
    end = address + size
    for start in [s for s, (n, _) in mapped.items() if s < end and address < s + n]:
        n, stream = mapped.pop(start)
        if start < address:
            mapped[start] = (address - start, stream)
        if end < start + n:
            mapped[end] = (start + n - end, stream)


def carry_out(snapshot):
    """Returns the final state of the trace: ranges of memory, allocated blocks by address, and the pending ones."""
    mapped, live, pending = {}, {}, set()
    last_time = 0
    for entry in trace(snapshot):
        assert entry["time_us"] >= last_time, entry
        last_time = entry["time_us"]
        action, size, stream = entry["action"], entry["size"], entry["stream"]
        address = entry.get("addr")
        if action in ("segment_alloc", "segment_map"):
            mapped[address] = (size, stream)
        elif action in ("segment_free", "segment_unmap"):
            unmap(mapped, address, size)
        elif action == "alloc":
            assert address not in live, entry
            live[address] = size
        elif action == "free_completed":
            assert live.pop(address) == size, entry
            pending.remove(address)
        elif action == "free_requested":
            assert address in live and address not in pending, entry
            pending.add(address)
        elif action == "record_use":
            assert address in live, entry
        else:
            assert action == "oom" and entry["device_free"] >= 0, entry
    return merged((start, size, stream) for start, (size, stream) in mapped.items()), live, pending


def check(snapshot):
    for key in ("segments", "device_traces", "allocator_settings", "external_annotations"):
        assert key in snapshot, key
    mapped, live, pending = carry_out(snapshot)
    segments = snapshot["segments"]
    assert segments == sorted(segments, key=lambda segment: segment["address"])
    for segment in segments:
        assert SEGMENT_FIELDS <= segment.keys(), segment.keys()
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address and block["size"] > 0, block
            address += block["size"]
            if block["state"] != "inactive":
                state = "active_pending_free" if block["address"] in pending else "active_allocated"
                assert block["state"] == state, block
                assert live.pop(block["address"]) == block["requested_size"] <= block["size"], block
        assert address == segment["address"] + segment["total_size"], segment["address"]
        active = [block for block in segment["blocks"] if block["state"] != "inactive"]
        held = [block for block in active if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(block["size"] for block in held)
        assert segment["active_size"] == sum(block["size"] for block in active)
        assert segment["requested_size"] == sum(block["requested_size"] for block in active)
    assert not live, f"allocations without a block: {live}"
    assert mapped == merged((s["address"], s["total_size"], s["stream"]) for s in segments)


def main(exported, original=None):
    snapshot = load(exported)
    check(snapshot)
    print(f"{len(trace(snapshot))} entries, {len(snapshot['segments'])} segments", end="")
    if original:
        original = load(original)
        curve, steps = live_bytes(snapshot), timeline(snapshot)
        assert curve == live_bytes(original), "live bytes differ"
        assert steps == timeline(original), "PyTorch's timelines differ"
        assert requested_by_state(snapshot) == requested_by_state(original), "the bytes at the end differ"
        print(f"; as the original: live bytes after each of {len(curve)} calls, peak {max(curve)},", end="")
        print(f" and PyTorch's timeline at each of {len(steps)} steps, peak {max(steps)}", end="")
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

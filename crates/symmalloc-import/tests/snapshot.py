#!/usr/bin/env python3
"""Checks a snapshot that `symmalloc export` wrote, with nothing but Python's own pickle module.

    snapshot.py EXPORTED [ORIGINAL]

The trace, carried out from nothing, must end in the segments and blocks of the snapshot. With ORIGINAL, the snapshot
that the exported trace was imported from, the program's live bytes must be the same after every allocation and free.
"""

import gzip
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
    """The program's live bytes after each of its calls."""
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


def merged(intervals):
    """Stretches of memory, those that touch as one, as (start, end, stream)."""
    out = []
    for start, size, stream in sorted(intervals):
        if out and out[-1][1] == start and out[-1][2] == stream:
            out[-1] = (out[-1][0], start + size, stream)
        else:
            out.append((start, start + size, stream))
    return out


def unmap(mapped, address, size):
    """Takes a part out of the mapped memory: start -> (size, stream)."""
    end = address + size
    for start in [s for s, (n, _) in mapped.items() if s < end and address < s + n]:
        n, stream = mapped.pop(start)
        if start < address:
            mapped[start] = (address - start, stream)
        if end < start + n:
            mapped[end] = (start + n - end, stream)


def carry_out(snapshot):
    """What the trace leaves: stretches of memory, and live allocations by address."""
    mapped, live = {}, {}
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
        elif action == "free_requested" or action == "record_use":
            assert address in live, entry
        else:
            assert action == "oom" and entry["device_free"] >= 0, entry
    return merged((start, size, stream) for start, (size, stream) in mapped.items()), live


def check(snapshot):
    for key in ("segments", "device_traces", "allocator_settings", "external_annotations"):
        assert key in snapshot, key
    mapped, live = carry_out(snapshot)
    segments = snapshot["segments"]
    assert segments == sorted(segments, key=lambda segment: segment["address"])
    for segment in segments:
        assert SEGMENT_FIELDS <= segment.keys(), segment.keys()
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address and block["size"] > 0, block
            address += block["size"]
            if block["state"] == "active_allocated":
                assert live.pop(block["address"]) == block["requested_size"] <= block["size"], block
            else:
                assert block["state"] == "inactive", block
        assert address == segment["address"] + segment["total_size"], segment["address"]
        held = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(block["size"] for block in held)
        assert segment["requested_size"] == sum(block["requested_size"] for block in held)
    assert not live, f"allocations that no block shows: {live}"
    assert mapped == merged((s["address"], s["total_size"], s["stream"]) for s in segments)


def main(exported, original=None):
    snapshot = load(exported)
    check(snapshot)
    print(f"{len(trace(snapshot))} entries, {len(snapshot['segments'])} segments", end="")
    if original:
        curve = live_bytes(snapshot)
        assert curve == live_bytes(load(original)), "live bytes differ"
        print(f", live bytes equal after each of {len(curve)} calls, peak {max(curve)}", end="")
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

"use strict";

// The data of the explorer: decodes the columns that `columns.rs` documents, and answers questions about them. Nothing here touches the
// page, so this file also runs without a browser.

/** Reads numbers of variable length. */
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  number() {
    let value = 0;
    // Multiplication instead of shifts: numbers reach 2^53.
    for (let scale = 1; ; scale *= 128) {
      const byte = this.bytes[this.at++];
      if (byte === undefined) throw new Error("the data ends early");
      if (byte < 128) return value + byte * scale;
      value += (byte - 128) * scale;
    }
  }

  column(count) {
    const column = new Float64Array(count);
    for (let index = 0; index < count; index++) column[index] = this.number();
    return column;
  }

  text(length) {
    const text = new TextDecoder().decode(this.bytes.subarray(this.at, this.at + length));
    this.at += length;
    return text;
  }
}

/** Replaces each number by the sum of all numbers up to it. */
function accumulate(column) {
  for (let index = 1; index < column.length; index++) column[index] += column[index - 1];
  return column;
}

/** Decodes a recording from its uncompressed bytes. */
function decode(bytes) {
  const reader = new Reader(bytes);
  const header = JSON.parse(reader.text(reader.number()));
  const count = header.allocations;
  const from = accumulate(reader.column(count));
  const to = reader.column(count).map((ops, index) => (ops === 0 ? header.ops : from[index] + ops));
  const sizeIndex = reader.column(count);
  const stream = reader.column(count);
  const pool = reader.column(count);
  const name = reader.column(count);
  const sizes = accumulate(reader.column(header.sizes));
  const size = sizeIndex.map((index) => sizes[index]);
  const { stack, stacks } = decodedStacks(reader, count, header.stacks);
  const layouts = header.layouts.map((layout) => {
    const lane = reader.column(count).map((number) => number - 1);
    const position = lane.map((number) => (number < 0 ? 0 : reader.number()));
    const parts = { lane: [], position: [], size: [], from: [], to: [] };
    for (let part = 0; part < layout.reserved; part++) {
      parts.lane.push(reader.number());
      parts.position.push(reader.number());
      parts.size.push(reader.number());
      parts.from.push(reader.number());
      parts.to.push(parts.from[part] + reader.number());
    }
    const reserved = curve(header.ops, parts.from, parts.to, parts.size);
    const peak = reserved.reduce((peak, bytes) => Math.max(peak, bytes), 0);
    return { ...layout, lane, position, parts, reserved, peak };
  });
  // An allocation that the report's settings refuse is never live.
  const own = layouts.find((layout) => layout.name === "symmalloc");
  const isRefused = Uint8Array.from(size, (bytes, index) => (own && own.lane[index] < 0 && bytes > 0 ? 1 : 0));
  const live = curve(header.ops, from, to, size.map((bytes, index) => (isRefused[index] ? 0 : bytes)));
  return {
    ops: header.ops, op: header.op, count, from, to, size, stream, pool, name, names: header.names, stack, stacks,
    frames: header.frames, layouts, isRefused, live,
  };
}

/** Decodes the number of each allocation's stack (0: none), and the stacks: [{frames, omitted}], innermost frame first. */
function decodedStacks(reader, count, length) {
  const stack = length > 0 ? reader.column(count) : new Float64Array(count);
  const stacks = [];
  let inward = [];
  while (stacks.length < length) {
    const omitted = reader.number();
    inward = inward.slice(0, reader.number());
    for (let others = reader.number(); others > 0; others--) inward.push(reader.number());
    stacks.push({ frames: [...inward].reverse(), omitted });
  }
  return { stack, stacks };
}

/** Returns the sum of sizes after each op. */
function curve(ops, from, to, size) {
  const sums = new Float64Array(ops);
  for (let index = 0; index < from.length; index++) {
    sums[from[index]] += size[index];
    if (to[index] < ops) sums[to[index]] -= size[index];
  }
  return accumulate(sums);
}

/** Returns the name of an allocation, or "" if it has none. */
function nameOf(recording, index) {
  const name = recording.name[index];
  return name === 0 ? "" : recording.names[name - 1];
}

/** Returns the Python stack of an allocation: {frames, omitted} with texts, innermost frame first; `null` if it has none. */
function stackOf(recording, index) {
  const stack = recording.stacks[recording.stack[index] - 1];
  return stack ? { ...stack, frames: stack.frames.map((frame) => recording.frames[frame]) } : null;
}

/** Returns the label of an allocation's group: its name, or else its size. */
function labelOf(recording, index) {
  return nameOf(recording, index) || `without a name, ${memory(recording.size[index])} each`;
}

/** Returns the allocations with the text in their name or in a frame of their stack, ignoring case, as a mask; `null` without a text. */
function filtered(recording, text) {
  const wanted = text.trim().toLowerCase();
  if (wanted === "") return null;
  const contain = (text) => text.toLowerCase().includes(wanted);
  const found = recording.names.map(contain);
  const foundFrames = recording.frames.map(contain);
  const foundStacks = recording.stacks.map((stack) => stack.frames.some((frame) => foundFrames[frame]));
  const mask = new Uint8Array(recording.count);
  for (let index = 0; index < recording.count; index++) {
    const name = recording.name[index];
    const label = name === 0 ? labelOf(recording, index).toLowerCase() : "";
    const isFound = name === 0 ? label.includes(wanted) : found[name - 1];
    mask[index] = isFound || foundStacks[recording.stack[index] - 1] ? 1 : 0;
  }
  return mask;
}

/** Returns the allocations of the same group as this one, as a mask: those with its name, or without one those with its size. */
function groupOf(recording, index) {
  const [name, size] = [recording.name[index], recording.size[index]];
  return Uint8Array.from(recording.name, (other, at) => (other === name && (name !== 0 || recording.size[at] === size) ? 1 : 0));
}

/** Returns the allocations that are live after an op. */
function liveAfter(recording, op) {
  const live = [];
  for (let index = 0; index < recording.count && recording.from[index] <= op; index++) {
    if (op < recording.to[index] && !recording.isRefused[index]) live.push(index);
  }
  return live;
}

/** Groups allocations by label, most bytes first: [{label, index, allocations, bytes}], where `index` is one of them. */
function grouped(recording, indices) {
  const groups = new Map();
  for (const index of indices) {
    const key = recording.name[index] || -recording.size[index];
    const group = groups.get(key);
    if (group) {
      group.allocations += 1;
      group.bytes += recording.size[index];
    } else {
      groups.set(key, { label: labelOf(recording, index), index, allocations: 1, bytes: recording.size[index] });
    }
  }
  return [...groups.values()].sort((one, other) => other.bytes - one.bytes);
}

/**
 * Returns the allocations to draw if a pixel covers this many ops, and a byte of each lane this many pixels, ascending: those that live
 * longer than a pixel, and of the others the largest in each pixel, separately for those that the mask selects.
 */
function drawn(recording, layout, mask, ops, perByte) {
  const { from, to, size } = recording;
  const { lane, position } = layout;
  const largest = layout.lanes.map(() => new Map());
  const indices = [];
  for (let index = 0; index < recording.count; index++) {
    if (lane[index] < 0) continue;
    if (to[index] - from[index] >= ops) {
      indices.push(index);
      continue;
    }
    // A lane has at most 2^30 pixels at the nearest zoom.
    const row = Math.floor(position[index] * perByte[lane[index]]);
    const key = (Math.floor(from[index] / ops) * 2 ** 30 + row) * 2 + (mask ? mask[index] : 1);
    const other = largest[lane[index]].get(key);
    if (other === undefined || size[index] > size[other]) largest[lane[index]].set(key, index);
  }
  for (const found of largest) for (const index of found.values()) indices.push(index);
  return Uint32Array.from(indices).sort();
}

/** Returns the allocation at a position of a layout after an op, or -1. */
function allocationAt(recording, layout, lane, position, op) {
  for (let index = 0; index < recording.count && recording.from[index] <= op; index++) {
    const start = layout.position[index];
    const inside = layout.lane[index] === lane && start <= position && position < start + recording.size[index];
    if (inside && op < recording.to[index]) return index;
  }
  return -1;
}

/** Formats a number of bytes as the rest of the page does. */
function memory(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  // Ties, which are odd eighths, go to the even digit, as in Rust.
  const rounded = (bytes * 8) % 2 === 1 ? Math.round(bytes * 50) / 50 : bytes;
  return `${unit === 0 ? bytes : rounded.toFixed(2)} ${units[unit]}`;
}

/** Formats a number with separators of thousands. */
function count(number) {
  return number.toLocaleString("en-US");
}

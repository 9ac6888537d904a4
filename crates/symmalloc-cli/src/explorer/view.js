
// The view of the explorer: draws a recording on two canvases and reacts to the reader.
//
//   overview   live and reserved bytes over the whole job; a frame marks the ops shown below
//   lanes      one panel for each shown layout, in it one lane for each heap: ops to the right, addresses upward
//
// A frame of the lanes is computed pixel by pixel. No two allocations overlap, so a frame takes time in proportion to the pixels plus the
// drawn allocations. If many share a pixel, only the largest is drawn. All panels have the same scales, so less memory is less height.

const COLORS = [
  "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b6992d", "#b07aa1", "#9c755f",
  "#499894", "#d37295", "#86bcb6", "#d4a6c8", "#8cd17d", "#a0cbe8", "#ffbe7d", "#79706e",
];
const LINES = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00"];
/** Least height of a lane, as a part of the tallest layout. */
const LANE_MIN = 0.015;
const AXIS_HEIGHT = 22;
const PANEL_HEIGHT = { one: 440, two: 300 };
const HOLDERS_SHOWN = 12;
const LABELS_SHOWN = 300;
/** Time after the page has scrolled during which the wheel still scrolls it, in milliseconds. */
const SCROLL_MS = 400;

const element = (id) => document.getElementById(id);

/** Creates an element with text. Text of a recording enters the page only here and in `fillText`: never as markup. */
function made(tag, text = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

/** Returns a color as a pixel of image data. */
function pixel(color, share = 1, other = "#000000") {
  const [one, two] = [color, other].map((text) => Number.parseInt(text.slice(1), 16));
  const mixed = [16, 8, 0].map((shift) => Math.round(((one >> shift) & 255) * share + ((two >> shift) & 255) * (1 - share)));
  return ((255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0]) >>> 0;
}

/** Returns the distance between axis labels: 1, 2 or 5 times a power of ten. */
function step(range, labels) {
  const least = Math.max(range / labels, 1e-9);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least);
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

class Picture {
  constructor(recording) {
    this.recording = recording;
    this.layout = recording.layouts[recording.layouts.length > 2 ? 1 : 0];
    this.layout = recording.layouts.find((layout) => layout.name === "symmalloc") || this.layout;
    this.compared = null;
    this.mask = null;
    /** Number of filters so far. */
    this.filters = 0;
    this.selected = -1;
    this.cursor = recording.op;
    this.ops = { from: 0, to: recording.ops };
    this.bytes = { from: 0, to: 1 };
    this.lanesOf = new Map();
    this.drawnOf = new Map();
    const total = (layout) => layout.lanes.reduce((sum, lane) => sum + lane.height, 0);
    this.tallest = Math.max(1, ...recording.layouts.map(total));
    recording.layouts.forEach((layout) => this.lanesOf.set(layout, this.placedLanes(layout)));
    // Some room for the title of a panel.
    this.height = 1.06 * Math.max(...recording.layouts.map((layout) => this.lanesOf.get(layout).height)) || 1;
    this.colorBy(recording.names.length > 0 ? "name" : "size");
    this.controls();
    this.lanes = this.surface("lanes");
    this.overview = this.surface("overview");
    this.pointers(this.lanes.canvas);
    this.keys(this.lanes.canvas);
    this.keys(this.overview.canvas);
    this.overviewPointers(this.overview.canvas);
    const redraw = () => this.draw();
    new ResizeObserver(redraw).observe(element("explorer"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    this.setCursor(this.cursor);
    this.draw();
  }

  /** Returns the lanes of a layout from the bottom up, in parts of the tallest layout: [{at, height}], and their sum. */
  placedLanes(layout) {
    let at = 0;
    const lanes = layout.lanes.map((lane) => {
      const height = Math.max(lane.height / this.tallest, LANE_MIN);
      const placed = { at, height, scale: height / Math.max(lane.height, 1) };
      at += height + 0.004;
      return placed;
    });
    return { lanes, height: at };
  }

  // Controls

  controls() {
    const { layouts, names, stacks } = this.recording;
    if (stacks.length > 0) element("filter").placeholder = "part of a name or frame";
    const options = (id, entries, chosen) => {
      for (const [value, text] of entries) {
        const option = made("option", text);
        option.value = value;
        option.selected = value === chosen;
        element(id).append(option);
      }
    };
    const entries = layouts.map((layout, index) => [String(index), layout.name]);
    options("layout", entries, String(layouts.indexOf(this.layout)));
    options("compare", [["", "nothing"], ...entries], "");
    const colors = [["name", "name"], ["size", "size"], ["stream", "stream"]];
    options("color", names.length > 0 ? colors : colors.slice(1), this.coloring);
    const on = (id, event, act) => element(id).addEventListener(event, act);
    on("layout", "change", (event) => {
      this.layout = layouts[Number(event.target.value)];
      this.changed();
    });
    on("compare", "change", (event) => {
      this.compared = event.target.value === "" ? null : layouts[Number(event.target.value)];
      this.changed();
    });
    on("color", "change", (event) => {
      this.colorBy(event.target.value);
      this.changed();
    });
    on("filter", "input", (event) => this.filter(event.target.value));
    on("nearer", "click", () => this.zoom(0.5));
    on("farther", "click", () => this.zoom(2));
    on("taller", "click", () => this.zoom(1, 0.5, 0.5));
    on("flatter", "click", () => this.zoom(1, 0.5, 2));
    on("whole", "click", () => this.showWhole());
    on("op", "change", (event) => this.setCursor(Number(event.target.value)));
  }

  /** Describes each line of the overview with its peak, and the colors of streams. */
  legend() {
    const entry = (color, text, title) => {
      const item = made("span");
      const mark = made("i");
      mark.style.background = color;
      item.append(mark, text);
      item.title = title;
      return item;
    };
    const live = this.recording.live.reduce((peak, bytes) => Math.max(peak, bytes), 0);
    element("legend").replaceChildren(
      entry("var(--live)", `live: peak ${memory(live)}`, "bytes that the program requested"),
      ...this.recording.layouts.map((layout, index) =>
        entry(LINES[index], `${layout.name}: peak ${memory(layout.peak)} reserved`, layout.origin)),
      ...this.streamColors().map(([color, streams]) => entry(color, streams, "allocations of these streams")),
    );
  }

  /** Returns each color of a stream and the streams that have it; nothing unless streams have colors. */
  streamColors() {
    if (this.coloring !== "stream") return [];
    const streams = [...new Set(this.recording.stream)].sort((one, other) => one - other);
    return COLORS.map((color, number) => [color, streams.filter((stream) => stream % COLORS.length === number)])
      .filter(([, found]) => found.length > 0)
      .map(([color, found]) => [color, `stream ${found.slice(0, 4).join(", ")}${found.length > 4 ? ", …" : ""}`]);
  }

  filter(text, mask = filtered(this.recording, text)) {
    this.mask = mask;
    this.filters += 1;
    const { count: all, size } = this.recording;
    let [found, most] = [0, 0];
    for (let index = 0; this.mask && index < all; index++) {
      found += this.mask[index];
      most += this.mask[index] * size[index];
    }
    element("matches").textContent = this.mask ? `${count(found)} of ${count(all)} allocations, ${memory(most)} in total` : "";
    this.changed();
  }

  colorBy(coloring) {
    const { count: all, name, size, stream } = this.recording;
    this.coloring = coloring;
    const key = { name, size, stream }[coloring];
    this.colors = new Uint8Array(all);
    for (let index = 0; index < all; index++) {
      // Close numbers get distant colors.
      const number = coloring === "name" && key[index] === 0 ? -size[index] : key[index];
      this.colors[index] = coloring === "stream" ? number % COLORS.length : this.hash(number);
    }
    this.legend();
  }

  hash(number) {
    let hash = (number | 0) ^ Math.floor(number / 2 ** 32);
    hash = Math.imul(hash ^ (hash >>> 16), 0x45d9f3b);
    hash = Math.imul(hash ^ (hash >>> 16), 0x45d9f3b);
    return ((hash ^ (hash >>> 16)) >>> 0) % COLORS.length;
  }

  // What is shown

  changed() {
    this.showLive();
    this.showSelected();
    this.draw();
  }

  setCursor(op) {
    this.cursor = clamp(Math.floor(op) || 0, 0, Math.max(0, this.recording.ops - 1));
    element("op").value = this.cursor;
    this.showLive();
    const { from, to } = this.ops;
    if (this.cursor + 1 <= from || this.cursor >= to) this.center(this.cursor);
    this.draw();
  }

  select(index) {
    this.selected = index;
    this.showSelected();
    this.draw();
  }

  /** Multiplies the range of ops around a point, and of addresses too if `bytes` is set. Points are parts of the shown range. */
  zoom(factor, at = 0.5, bytesFactor = 1, bytesAt = 0.5) {
    const scaled = (range, by, point, least, most) => {
      const length = clamp((range.to - range.from) * by, least, most);
      const from = range.from + (range.to - range.from - length) * point;
      range.from = clamp(from, 0, Math.max(0, most - length));
      range.to = range.from + length;
    };
    scaled(this.ops, factor, at, Math.min(8, this.recording.ops), this.recording.ops);
    scaled(this.bytes, bytesFactor, bytesAt, 1e-6, 1);
    this.draw();
  }

  /** Moves by parts of the shown ranges. */
  move(ops, bytes) {
    const moved = (range, by, most) => {
      const length = range.to - range.from;
      range.from = clamp(range.from + by * length, 0, Math.max(0, most - length));
      range.to = range.from + length;
    };
    moved(this.ops, ops, this.recording.ops);
    moved(this.bytes, bytes, 1);
    this.draw();
  }

  /** Moves an op to the middle of the view. */
  center(op) {
    const length = this.ops.to - this.ops.from;
    this.move((op - this.ops.from - length / 2) / length, 0);
  }

  showWhole() {
    this.ops = { from: 0, to: this.recording.ops };
    this.bytes = { from: 0, to: 1 };
    this.draw();
  }

  /** Lists what is live after the cursor's op. */
  showLive() {
    const { recording, cursor, mask } = this;
    const live = liveAfter(recording, cursor).filter((index) => !mask || mask[index]);
    const bytes = live.reduce((sum, index) => sum + recording.size[index], 0);
    element("live_title").textContent = `Live after op ${count(cursor)}${mask ? ", filtered" : ""}`;
    const sum = made("p", `${count(live.length)} allocations, ${memory(bytes)}. Reserved: ` + recording.layouts
      .map((layout) => `${memory(layout.reserved[cursor] || 0)} (${layout.name})`).join(", ") + ".");
    const table = made("table");
    const groups = grouped(recording, live);
    for (const group of groups.slice(0, HOLDERS_SHOWN)) {
      const row = table.insertRow();
      const mark = made("i");
      mark.style.background = COLORS[this.colors[group.index]];
      const name = made("button", group.label);
      name.type = "button";
      name.title = "Show only these";
      name.addEventListener("click", () => {
        element("filter").value = group.label;
        this.filter(group.label, groupOf(recording, group.index));
      });
      row.insertCell().append(mark, name);
      for (const text of [count(group.allocations), memory(group.bytes)]) {
        const cell = row.insertCell();
        cell.className = "n";
        cell.textContent = text;
      }
    }
    const rest = groups.slice(HOLDERS_SHOWN);
    const others = rest.length === 0 ? [] : [made("p", `and ${count(rest.length)} others, ` +
      `${memory(rest.reduce((total, group) => total + group.bytes, 0))}`)];
    element("live").replaceChildren(sum, table, ...others);
  }

  /** Describes the selected allocation. */
  showSelected() {
    const { recording, selected } = this;
    if (selected < 0) {
      element("selected").textContent = "Click an allocation.";
      return;
    }
    const [from, to] = [recording.from[selected], recording.to[selected]];
    const name = nameOf(recording, selected);
    const rows = [
      ["name", name || "none"],
      ["size", `${memory(recording.size[selected])} (${count(recording.size[selected])} bytes)`],
      ["allocated", `at op ${count(from)}, allocation ${count(selected)}`],
      ["freed", to < recording.ops ? `at op ${count(to)}, ${count(to - from)} ops later` : "never"],
      ["pool, stream", `${recording.pool[selected]}, ${recording.stream[selected]}`],
      ...recording.layouts.map((layout) => [layout.name, this.placeOf(layout, selected)]),
    ];
    const list = made("dl");
    for (const [term, text] of rows) list.append(made("dt", term), made("dd", text));
    element("selected").replaceChildren(list, ...this.stack(name));
  }

  /** Returns elements with the Python stack of the selected allocation. The frame that names the allocation is bold. */
  stack(name) {
    const stack = stackOf(this.recording, this.selected);
    if (!stack) return [];
    const list = made("ol");
    const naming = stack.frames.findIndex((frame) => frame === name || frame.endsWith(`/${name}`));
    list.append(...stack.frames.map((frame, index) => {
      const item = made("li");
      item.append(made(index === naming ? "b" : "span", frame));
      return item;
    }));
    const omitted = stack.omitted > 0 ? [made("p", `and ${count(stack.omitted)} more, omitted`)] : [];
    return [made("h4", "Python stack, innermost frame first"), list, ...omitted];
  }

  placeOf(layout, index) {
    const lane = layout.lane[index];
    return lane < 0 ? "not placed" : `${laneName(layout.lanes[lane])}, at offset ${memory(layout.position[index])}`;
  }

  // Drawing

  surface(id) {
    const canvas = element(id);
    return { canvas, context: canvas.getContext("2d", { alpha: false }), width: 0, height: 0, image: null };
  }

  /** Gives a canvas as many pixels as it has on the screen. */
  fit(surface, height) {
    const { canvas } = surface;
    const width = Math.max(200, Math.floor(element("explorer").clientWidth));
    const ratio = clamp(window.devicePixelRatio || 1, 1, 2);
    const [wide, tall] = [Math.floor(width * ratio), Math.floor(height * ratio)];
    if (canvas.width !== wide || canvas.height !== tall) {
      canvas.width = wide;
      canvas.height = tall;
      canvas.style.height = `${height}px`;
      surface.image = null;
    }
    Object.assign(surface, { width, height, ratio });
    surface.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    surface.context.font = "12px system-ui, sans-serif";
  }

  /** Requests a frame. */
  draw() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame(() => {
      this.requested = false;
      const start = performance.now();
      const style = getComputedStyle(element("explorer"));
      const color = (name) => style.getPropertyValue(`--${name}`).trim();
      this.paint = Object.fromEntries(["page", "ink", "soft", "free", "line", "live"].map((name) => [name, color(name)]));
      this.drawOverview();
      this.drawLanes();
      const { from, to } = this.ops;
      element("range").textContent =
        `ops ${count(Math.floor(from))} to ${count(Math.ceil(to) - 1)} of ${count(this.recording.ops)}`;
      element("explorer").dataset.frame = (performance.now() - start).toFixed(1);
    });
  }

  /** Returns the maximum of a curve for each pixel of the overview. */
  maxima(values, width) {
    const maxima = new Float64Array(width);
    for (let op = 0; op < values.length; op++) {
      const at = Math.min(width - 1, Math.floor((op / values.length) * width));
      if (values[op] > maxima[at]) maxima[at] = values[op];
    }
    for (let at = 1; at < width && values.length < width; at++) {
      if (Math.ceil((at / width) * values.length) === Math.ceil(((at - 1) / width) * values.length)) maxima[at] = maxima[at - 1];
    }
    return maxima;
  }

  drawOverview() {
    const surface = this.overview;
    this.fit(surface, 96);
    const { context, width, height } = surface;
    const { recording, paint } = this;
    const top = Math.max(1, ...recording.layouts.map((layout) => layout.peak)) * 1.05;
    const level = (bytes) => height - 1 - (bytes / top) * (height - 2);
    context.fillStyle = paint.page;
    context.fillRect(0, 0, width, height);
    if (!surface.maxima || surface.maxima.width !== width) {
      const curves = [recording.live, ...recording.layouts.map((layout) => layout.reserved)];
      surface.maxima = { width, curves: curves.map((values) => this.maxima(values, width)) };
    }
    const [live, ...reserved] = surface.maxima.curves;
    context.fillStyle = paint.live;
    live.forEach((bytes, x) => context.fillRect(x, level(bytes), 1, height));
    reserved.forEach((values, index) => {
      const layout = recording.layouts[index];
      context.strokeStyle = LINES[index];
      context.lineWidth = layout === this.layout || layout === this.compared ? 2.5 : 1;
      context.beginPath();
      values.forEach((bytes, x) => context.lineTo(x + 0.5, level(bytes)));
      context.stroke();
    });
    const [left, right] = [this.ops.from, this.ops.to].map((op) => (op / recording.ops) * width);
    context.fillStyle = paint.soft;
    context.globalAlpha = 0.25;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = paint.ink;
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, 0.5, Math.max(2, right - left - 1), height - 1);
    this.vertical(context, (this.cursor + 0.5) / recording.ops * width, 0, height);
  }

  vertical(context, x, top, bottom) {
    context.strokeStyle = this.paint.ink;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(Math.floor(x) + 0.5, top);
    context.lineTo(Math.floor(x) + 0.5, bottom);
    context.stroke();
    context.setLineDash([]);
  }

  /** Returns the panels: the shown layouts, each with its place on the canvas. */
  panels() {
    const layouts = this.compared && this.compared !== this.layout ? [this.layout, this.compared] : [this.layout];
    const height = layouts.length === 1 ? PANEL_HEIGHT.one : PANEL_HEIGHT.two;
    return layouts.map((layout, index) => ({ layout, top: index * (height + 4), height }));
  }

  /** Returns the horizontal place of an op. */
  across(op) {
    return ((op - this.ops.from) / (this.ops.to - this.ops.from)) * this.lanes.width;
  }

  /** Returns the vertical place of a position in a lane. */
  up(panel, lane, position) {
    const placed = this.lanesOf.get(panel.layout).lanes[lane];
    const share = (placed.at + position * placed.scale) / this.height;
    return panel.top + panel.height * (1 - (share - this.bytes.from) / (this.bytes.to - this.bytes.from));
  }

  drawLanes() {
    const surface = this.lanes;
    const panels = this.panels();
    const bottom = panels[panels.length - 1].top + panels[panels.length - 1].height;
    this.fit(surface, bottom + AXIS_HEIGHT);
    const { context, canvas } = surface;
    const shown = [this.ops, this.bytes, this.coloring, this.layout.name, this.compared?.name, this.paint, this.filters];
    const state = JSON.stringify(shown);
    if (!surface.image || surface.state !== state) {
      surface.image ||= context.createImageData(canvas.width, canvas.height);
      surface.state = state;
      const pixels = new Uint32Array(surface.image.data.buffer);
      pixels.fill(pixel(this.paint.page));
      panels.forEach((panel) => this.raster(pixels, panel));
    }
    context.putImageData(surface.image, 0, 0);
    panels.forEach((panel) => this.labels(context, panel));
    this.axis(context, bottom);
    const at = this.across(this.cursor + 0.5);
    if (at >= 0 && at <= surface.width) this.vertical(context, at, 0, bottom);
  }

  /** Fills the pixels of a panel. */
  raster(pixels, panel) {
    const { recording, mask, paint } = this;
    const { ratio, canvas } = this.lanes;
    const { layout } = panel;
    const { width } = canvas;
    const ceiling = Math.round(panel.top * ratio);
    const floor = Math.round((panel.top + panel.height) * ratio);
    const { lanes } = this.lanesOf.get(layout);
    const perShare = (panel.height * ratio) / (this.bytes.to - this.bytes.from) / this.height;
    const bases = lanes.map((lane) => floor + (this.bytes.from * this.height - lane.at) * perShare);
    const scales = lanes.map((lane) => lane.scale * perShare);
    const { from: first, to: last } = this.ops;
    const perOp = width / (last - first);
    // Rectangles have at least one pixel, so that nothing vanishes, and an edge if there is room for it.
    const place = (lane, position, size, from, to, color, edge) => {
      const bottom = bases[lane] - position * scales[lane];
      const y1 = Math.min(Math.round(bottom), floor);
      const y0 = Math.max(Math.min(Math.round(bottom - size * scales[lane]), Math.round(bottom) - 1), ceiling);
      if (y0 >= y1) return;
      const left = Math.round((from - first) * perOp);
      const right = Math.max(Math.round((to - first) * perOp), left + 1);
      const x0 = Math.max(left, 0);
      const x1 = Math.min(right, width);
      if (x0 >= x1) return;
      for (let row = y0 * width, end = y1 * width; row < end; row += width) {
        if (x1 - x0 > 16) pixels.fill(color, row + x0, row + x1);
        else for (let x = x0; x < x1; x++) pixels[row + x] = color;
      }
      if (edge === color || y1 - y0 < 4) return;
      pixels.fill(edge, y0 * width + x0, y0 * width + x1);
      if (x1 - x0 < 4 || right > width) return;
      for (let row = y0 * width, end = y1 * width; row < end; row += width) pixels[row + x1 - 1] = edge;
    };
    const { parts } = layout;
    const free = pixel(paint.free);
    for (let part = 0; part < parts.lane.length; part++) {
      if (parts.from[part] >= last || parts.to[part] <= first) continue;
      place(parts.lane[part], parts.position[part], parts.size[part], parts.from[part], parts.to[part], free, free);
    }
    const colors = COLORS.map((color) => pixel(color));
    const edges = COLORS.map((color) => pixel(color, 0.7, paint.page));
    const pale = pixel(paint.soft, 0.35, paint.free);
    const { from, to, size } = recording;
    const { lane, position } = layout;
    const indices = this.drawn(layout);
    // Allocations that match the filter come last, so that no others hide them.
    for (const wanted of mask ? [0, 1] : [1]) {
      for (const index of indices) {
        if (from[index] >= last) break;
        if (to[index] <= first || (mask && mask[index] !== wanted)) continue;
        const color = wanted ? colors[this.colors[index]] : pale;
        const edge = wanted ? edges[this.colors[index]] : pale;
        place(lane[index], position[index], size[index], from[index], to[index], color, edge);
      }
    }
  }

  /** Returns the allocations to draw at the present zoom, ascending. */
  drawn(layout) {
    const perPixel = (this.ops.to - this.ops.from) / this.lanes.canvas.width;
    // Powers of two, so that most frames of a zoom use the same allocations.
    const ops = 2 ** Math.max(0, Math.floor(Math.log2(perPixel)));
    const rows = 2 ** Math.ceil(Math.log2(PANEL_HEIGHT.one * 2 / (this.bytes.to - this.bytes.from)));
    let known = this.drawnOf.get(layout);
    if (!known || known.ops !== ops || known.rows !== rows || known.mask !== this.mask) {
      const perByte = this.lanesOf.get(layout).lanes.map((lane) => lane.scale * rows);
      known = { ops, rows, mask: this.mask, indices: drawn(this.recording, layout, this.mask, ops, perByte) };
      this.drawnOf.set(layout, known);
    }
    return known.indices;
  }

  /** Draws the names of lanes and large blocks, and the frame of the selected one. */
  labels(context, panel) {
    const { recording, mask, paint } = this;
    const { layout } = panel;
    const { width } = this.lanes;
    context.save();
    context.beginPath();
    context.rect(0, panel.top, width, panel.height);
    context.clip();
    context.textBaseline = "middle";
    context.fillStyle = "#fff";
    const perBytes = this.lanesOf.get(layout).lanes.map((lane) =>
      (lane.scale / this.height) * panel.height / (this.bytes.to - this.bytes.from));
    const { from, to } = this.ops;
    const perOp = width / (to - from);
    let shown = 0;
    for (const index of this.drawn(layout)) {
      if (recording.from[index] >= to || shown >= LABELS_SHOWN) break;
      const lane = layout.lane[index];
      if (recording.to[index] <= from || (mask && !mask[index])) continue;
      const tall = recording.size[index] * perBytes[lane];
      const left = Math.max(0, this.across(recording.from[index]));
      const wide = Math.min(width, this.across(recording.to[index])) - left;
      if (tall < 15 || wide < 56 || (recording.to[index] - recording.from[index]) * perOp < 56) continue;
      const middle = this.up(panel, lane, layout.position[index] + recording.size[index] / 2);
      if (middle < panel.top || middle > panel.top + panel.height) continue;
      shown += 1;
      const label = nameOf(recording, index);
      const text = label ? `${label}, ${memory(recording.size[index])}` : memory(recording.size[index]);
      this.outlined(context, shortened(context, text, wide - 8), left + 4, middle);
    }
    if (this.selected >= 0 && layout.lane[this.selected] >= 0) {
      const lane = layout.lane[this.selected];
      const low = this.up(panel, lane, layout.position[this.selected]);
      const high = this.up(panel, lane, layout.position[this.selected] + recording.size[this.selected]);
      const [left, right] = [this.across(recording.from[this.selected]), this.across(recording.to[this.selected])];
      context.lineWidth = 3;
      context.strokeStyle = paint.page;
      context.strokeRect(left - 1.5, high - 1.5, Math.max(3, right - left + 3), Math.max(3, low - high + 3));
      context.lineWidth = 1.5;
      context.strokeStyle = paint.ink;
      context.strokeRect(left - 1.5, high - 1.5, Math.max(3, right - left + 3), Math.max(3, low - high + 3));
    }
    layout.lanes.forEach((lane, number) => {
      const low = this.up(panel, number, 0);
      const high = this.up(panel, number, lane.height);
      if (low - high < 3) return;
      context.strokeStyle = paint.line;
      context.lineWidth = 1;
      context.strokeRect(-1, Math.round(low) + 0.5, width + 2, 0);
      if (low < panel.top + 10 || high > panel.top + panel.height || low - high < 10) return;
      this.tag(context, `${laneName(lane)}: ${memory(lane.height)}`, 4, Math.max(high, panel.top + 20) + 9);
    });
    this.tag(context, `${layout.name}: ${memory(layout.peak)} reserved at its peak`, 4, panel.top + 10, true);
    context.restore();
  }

  /** Draws light text that is readable on any color. */
  outlined(context, text, x, y) {
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeStyle = "rgba(0,0,0,.55)";
    context.strokeText(text, x, y);
    context.fillText(text, x, y);
  }

  tag(context, text, x, y, isBold = false) {
    context.font = `${isBold ? "600 " : ""}12px system-ui, sans-serif`;
    const wide = context.measureText(text).width + 8;
    context.globalAlpha = 0.88;
    context.fillStyle = this.paint.page;
    context.fillRect(x, y - 9, wide, 18);
    context.globalAlpha = 1;
    context.fillStyle = this.paint.ink;
    context.textBaseline = "middle";
    context.fillText(text, x + 4, y);
  }

  axis(context, top) {
    const { width } = this.lanes;
    const { from, to } = this.ops;
    context.fillStyle = this.paint.page;
    context.fillRect(0, top, width, AXIS_HEIGHT);
    context.strokeStyle = this.paint.line;
    context.fillStyle = this.paint.ink;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "top";
    const distance = Math.max(1, step(to - from, width / 110));
    for (let op = Math.ceil(from / distance) * distance; op < to; op += distance) {
      const x = Math.round(this.across(op)) + 0.5;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + 5);
      context.stroke();
      const text = count(op);
      const wide = context.measureText(text).width;
      context.fillText(text, clamp(x - wide / 2, 0, width - wide), top + 7);
    }
  }

  // Reader

  /** Returns the op, lane and position at a point of the canvas; `null` between the panels. */
  point(event) {
    const box = this.lanes.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const op = this.ops.from + (x / box.width) * (this.ops.to - this.ops.from);
    const panel = this.panels().find(({ top, height }) => y >= top && y < top + height);
    const parts = { x: x / box.width, y: panel ? 1 - (y - panel.top) / panel.height : 0.5 };
    if (!panel) return { op, parts, index: -1, lane: null };
    const share = (this.bytes.from + parts.y * (this.bytes.to - this.bytes.from)) * this.height;
    const { lanes } = this.lanesOf.get(panel.layout);
    const lane = lanes.findIndex(({ at, height }) => share >= at && share < at + height);
    const position = lane < 0 ? 0 : (share - lanes[lane].at) / lanes[lane].scale;
    const index = lane < 0 ? -1 : allocationAt(this.recording, panel.layout, lane, position, Math.floor(op));
    return { op, parts, index, lane: lane < 0 ? null : panel.layout.lanes[lane] };
  }

  pointers(canvas) {
    const held = new Map();
    let isDrag = false;
    // A reader who scrolls through the page is not stopped by the picture.
    let scrolled = -Infinity;
    window.addEventListener("scroll", () => { scrolled = performance.now(); }, { passive: true });
    canvas.addEventListener("wheel", (event) => {
      if (performance.now() - scrolled < SCROLL_MS) return;
      event.preventDefault();
      const { parts } = this.point(event);
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && !event.shiftKey) {
        this.move((event.deltaX * lines) / canvas.clientWidth, 0);
        return;
      }
      const factor = 1.0015 ** clamp((event.deltaY || event.deltaX) * lines, -400, 400);
      if (event.shiftKey) this.zoom(1, 0.5, factor, parts.y);
      else this.zoom(factor, parts.x);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      held.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (held.size === 1) isDrag = false;
      this.hint(null);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = held.get(event.pointerId);
      if (!before) {
        if (event.pointerType === "mouse") this.hint(event);
        return;
      }
      const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
      if (!isDrag && Math.hypot(dx, dy) < 4) return;
      isDrag = true;
      const other = [...held].find(([id]) => id !== event.pointerId);
      if (other) {
        const distances = (at) => [at.x - other[1].x, at.y - other[1].y].map((length) => Math.max(40, Math.abs(length)));
        const [was, now] = [distances(before), distances({ x: event.clientX, y: event.clientY })];
        const middle = { clientX: (event.clientX + other[1].x) / 2, clientY: (event.clientY + other[1].y) / 2 };
        const { parts } = this.point(middle);
        this.zoom(was[0] / now[0], parts.x, was[1] / now[1], parts.y);
      } else {
        this.move(-dx / canvas.clientWidth, dy / this.panels()[0].height);
      }
      held.set(event.pointerId, { x: event.clientX, y: event.clientY });
    });
    const released = (event) => {
      const wasHeld = held.delete(event.pointerId);
      if (!wasHeld || isDrag || event.type !== "pointerup") return;
      const { op, index } = this.point(event);
      this.setCursor(op);
      this.select(index);
    };
    canvas.addEventListener("pointerup", released);
    canvas.addEventListener("pointercancel", released);
    canvas.addEventListener("pointerleave", () => this.hint(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, this.point(event).parts.x));
  }

  /** Describes the allocation and the lane under the pointer. */
  hint(event) {
    const hint = element("hint");
    const { index = -1, op = 0, lane = null } = event ? this.point(event) : {};
    hint.hidden = lane === null;
    if (lane === null) return;
    const { recording } = this;
    const lines = [made("span", `${laneName(lane)}; op ${count(Math.floor(op))}`)];
    if (index >= 0) {
      const [from, to] = [recording.from[index], recording.to[index]];
      const life = to < recording.ops ? `ops ${count(from)} to ${count(to)}` : `from op ${count(from)}, never freed`;
      lines.unshift(
        made("b", nameOf(recording, index) || "without a name"),
        made("span", `${memory(recording.size[index])}, ${life}, stream ${recording.stream[index]}`),
      );
    }
    hint.replaceChildren(...lines);
    const box = this.lanes.canvas.getBoundingClientRect();
    const left = clamp(event.clientX - box.left + 14, 0, Math.max(0, box.width - hint.offsetWidth - 4));
    hint.style.left = `${left}px`;
    hint.style.top = `${event.clientY - box.top + 18}px`;
  }

  overviewPointers(canvas) {
    const centerAt = (event) => {
      const box = canvas.getBoundingClientRect();
      const op = ((event.clientX - box.left) / box.width) * this.recording.ops;
      this.center(op);
      if (this.ops.to - this.ops.from >= this.recording.ops) this.setCursor(op);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      centerAt(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) centerAt(event);
    });
  }

  keys(canvas) {
    const acts = {
      ArrowLeft: () => this.move(-0.1, 0),
      ArrowRight: () => this.move(0.1, 0),
      ArrowUp: () => this.move(0, 0.1),
      ArrowDown: () => this.move(0, -0.1),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      "[": () => this.zoom(1, 0.5, 2),
      "]": () => this.zoom(1, 0.5, 0.5),
      "0": () => this.showWhole(),
      ",": () => this.setCursor(this.cursor - 1),
      ".": () => this.setCursor(this.cursor + 1),
      Escape: () => this.select(-1),
    };
    canvas.addEventListener("keydown", (event) => {
      const act = event.ctrlKey || event.metaKey || event.altKey ? null : acts[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }
}

/** Returns the name of a lane. */
function laneName(lane) {
  if (lane.group !== null) return `pool ${lane.pool}, group of stream ${lane.group}`;
  return lane.stream === null ? `pool ${lane.pool}, all streams` : `pool ${lane.pool}, stream ${lane.stream}`;
}

/** Returns as much of a text as fits. */
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const share = width / context.measureText(text).width;
  return `${text.slice(0, Math.max(1, Math.floor(text.length * share) - 1))}…`;
}

/** Reads the page's data, and replaces the still pictures. They stay if anything fails. */
async function open() {
  const text = atob(element("recording").textContent);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const recording = decode(new Uint8Array(await new Response(stream).arrayBuffer()));
  if (recording.layouts.length === 0 || recording.ops === 0) return;
  element("explorer").hidden = false;
  new Picture(recording);
  element("still").hidden = true;
}

if (typeof document !== "undefined") {
  open().catch((error) => {
    element("explorer").hidden = true;
    console.error(error);
  });
}

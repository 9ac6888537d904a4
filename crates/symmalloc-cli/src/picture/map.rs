//! A map of memory after one op: the segments of each heap in sequence, in rows that are read like text.
//!
//! ```text
//! segment 0                                  segment 1
//! ├█████ 1 ██████│███│░░░░│██████████│▒▒▒▒▒▒▒├█████████│░░░░░░
//! ░░░░░░░░░░░│█████████ 2 ███████│██│            live █  free ░  free with fences ▒
//! ```
//!
//! A row is divided into columns of one pixel. A column shows the state of most of its bytes, so the picture stays small
//! regardless of the number of blocks. The largest allocations are numbered and listed below.

use super::heap_name;
use super::history::{Flow, Words, heading, swatch};
use super::memory::{BlockState, DrawnBlock, DrawnHeap, LiveAllocation, Memory};
use super::svg::{Anchor, BODY, Fill, SMALL, Svg, fitting, short, text_width, wrapped};
use crate::quantity::{count, counted, memory};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use symmalloc_core::ids::{AllocationId, HeapId};

const ROW: f64 = 22.0;
const MARGIN: f64 = 12.0;
/// Number of allocations that are numbered and listed.
const NUMBERED: usize = 8;
/// Minimum width, in pixels, of segments and blocks with lines between them.
const SEPARATED_PX: f64 = 3.0;
/// Minimum width, in pixels, of blocks with a tooltip.
const POINTED_PX: f64 = 6.0;

/// Draws one rank's memory.
pub(crate) fn draw(memory: &Memory, width: u32, prefix: &'static str, class: &str, words: &Words<'_>) -> String {
    let mut svg = Svg::new(prefix, width);
    let inner = svg.width() - 2.0 * MARGIN;
    let scale = Scale::of([memory].into_iter(), inner, svg.is_narrow());
    let mut y = heading(&mut svg, words);
    y = legend(&mut svg, y, &[memory], &scale);
    let numbers = numbers(memory);
    for heap in &memory.heaps {
        y = heap_title(&mut svg, MARGIN, y, inner, heap);
        y = rows(&mut svg, MARGIN, y, heap, &scale, &numbers);
    }
    y = list(&mut svg, MARGIN, y, inner, memory);
    svg.finish(y + 8.0, class, words.title, &description(memory))
}

/// Draws the memory of two ranks next to each other, or one below the other on narrow pages. The name of each rank is above its memory.
pub(crate) fn draw_beside(
    memories: [&Memory; 2],
    names: [&str; 2],
    width: u32,
    prefix: &'static str,
    class: &str,
    words: &Words<'_>,
) -> String {
    let mut svg = Svg::new(prefix, width);
    let is_narrow = svg.is_narrow();
    let half = if is_narrow { svg.width() - 2.0 * MARGIN } else { (svg.width() - 4.0 * MARGIN) / 2.0 };
    let scale = Scale::of(memories.into_iter(), half, is_narrow);
    let mut y = heading(&mut svg, words);
    y = legend(&mut svg, y, &memories, &scale);
    let left = [MARGIN, if is_narrow { MARGIN } else { half + 3.0 * MARGIN }];
    let mut owners: Vec<HeapId> = memories.iter().flat_map(|memory| &memory.heaps).map(|heap| heap.owner).collect();
    owners.sort_unstable();
    owners.dedup();
    if is_narrow {
        for (memory, name) in memories.into_iter().zip(names) {
            y = rank_name(&mut svg, MARGIN, y, half, name);
            for heap in &memory.heaps {
                y = heap_title(&mut svg, MARGIN, y, half, heap);
                y = rows(&mut svg, MARGIN, y, heap, &scale, &BTreeMap::new());
            }
        }
    } else {
        let below = [0, 1].map(|side| rank_name(&mut svg, left[side], y, half, names[side]));
        y = below[0].max(below[1]);
        for owner in owners {
            let mut end = y;
            for (side, memory) in memories.into_iter().enumerate() {
                for heap in memory.heaps.iter().filter(|heap| heap.owner == owner) {
                    let below = heap_title(&mut svg, left[side], y, half, heap);
                    end = end.max(rows(&mut svg, left[side], below, heap, &scale, &BTreeMap::new()));
                }
            }
            y = end;
        }
    }
    y = list_differing(&mut svg, y, memories);
    let descriptions = memories.into_iter().zip(names).map(|(memory, name)| format!("{name}: {}", description(memory)));
    svg.finish(y + 8.0, class, words.title, &descriptions.collect::<Vec<_>>().join(" "))
}

/// Width of a row in pixels and in bytes.
struct Scale {
    width: f64,
    row_bytes: u64,
}

impl Scale {
    fn of<'a>(memories: impl Iterator<Item = &'a Memory>, width: f64, is_narrow: bool) -> Self {
        let largest = memories.map(Memory::size_bytes).max().unwrap_or(0);
        let rows = if is_narrow { 24 } else { 14 };
        Scale { width, row_bytes: (largest / rows).max(1 << 20).next_power_of_two() }
    }

    fn pixels(&self, bytes: u64) -> f64 {
        bytes as f64 * self.width / self.row_bytes as f64
    }
}

fn legend(svg: &mut Svg, y: f64, memories: &[&Memory], scale: &Scale) -> f64 {
    let mut at = Flow { x: MARGIN, y };
    for (state, text) in [
        (BlockState::Live, if memories.len() == 1 { "live" } else { "live, at the same place on both" }),
        (BlockState::Differs, "live, elsewhere on the other"),
        (BlockState::Free, "free"),
        (BlockState::Fenced, "free, fenced: next user may wait"),
    ] {
        if memories.iter().any(|memory| memory.blocks().any(|block| block.state == state)) {
            swatch(svg, &mut at, fill(state), text);
        }
    }
    let y = at.y + if at.x > MARGIN { 22.0 } else { 0.0 };
    let (row, pixel) = (scale.row_bytes, scale.row_bytes as f64 / scale.width);
    let text = format!("A row is {}, a pixel {}.", memory(row), memory(pixel as u64));
    svg.text(MARGIN, y + 15.0, SMALL, Anchor::Start, &text);
    y + 24.0
}

fn rank_name(svg: &mut Svg, x: f64, y: f64, width: f64, name: &str) -> f64 {
    let name = fitting(name, BODY, width);
    svg.bold(x, y + 20.0, BODY, Anchor::Start, &name);
    y + 26.0
}

fn heap_title(svg: &mut Svg, x: f64, y: f64, width: f64, heap: &DrawnHeap) -> f64 {
    svg.bold(x, y + 18.0, BODY, Anchor::Start, &heap_name(heap.owner));
    let mut y = y + 18.0;
    for line in wrapped(&summary(heap), SMALL, width) {
        y += 17.0;
        svg.text(x, y, SMALL, Anchor::Start, &line);
    }
    y + 6.0
}

fn summary(heap: &DrawnHeap) -> String {
    let sum = |has: fn(BlockState) -> bool| {
        heap.blocks().filter(|block| has(block.state)).map(|block| block.size_bytes).sum()
    };
    let live: u64 = sum(is_live);
    let free: u64 = sum(|state| !is_live(state));
    let largest = heap.blocks().filter(|block| !is_live(block.state)).map(|block| block.size_bytes).max();
    let mut text = format!(
        "{} in {}: {} live, {} free",
        memory(heap.size_bytes()),
        counted(heap.segments.len(), "segment"),
        memory(live),
        memory(free)
    );
    if let Some(largest) = largest {
        text += &format!(" (largest block {})", memory(largest));
    }
    let differing = heap.blocks().filter(|block| block.state == BlockState::Differs).count();
    if differing > 0 {
        text += &format!("; {} elsewhere on the other", counted(differing, "allocation"));
    }
    text
}

fn is_live(state: BlockState) -> bool {
    matches!(state, BlockState::Live | BlockState::Differs)
}

fn fill(state: BlockState) -> Fill {
    match state {
        BlockState::Live => Fill::Live,
        BlockState::Differs => Fill::Differs,
        BlockState::Free => Fill::Free,
        BlockState::Fenced => Fill::Fenced,
    }
}

/// Returns the numbers of the largest allocations.
fn numbers(memory: &Memory) -> BTreeMap<AllocationId, usize> {
    largest(memory, |_| true).into_iter().zip(1..).map(|((_, held), number)| (held.id, number)).collect()
}

/// Returns the largest allocations in the selected live blocks, at most [`NUMBERED`], in descending order of size.
fn largest(memory: &Memory, is_meant: impl Fn(&DrawnBlock) -> bool) -> Vec<(HeapId, &LiveAllocation)> {
    let order = |(_, held): &(HeapId, &LiveAllocation)| (Reverse(held.requested_bytes), held.id);
    let live = memory.live().filter(|(_, block, _)| is_meant(block));
    let mut largest: Vec<(HeapId, &LiveAllocation)> = live.map(|(owner, _, held)| (owner, held)).collect();
    if largest.len() > NUMBERED {
        largest.select_nth_unstable_by_key(NUMBERED, order);
        largest.truncate(NUMBERED);
    }
    largest.sort_by_key(order);
    largest
}

/// Part of a block within a row.
struct Fragment {
    row: usize,
    from: f64,
    to: f64,
}

/// Returns the position of a range of the heap in rows, in pixels.
fn fragments(scale: &Scale, from_bytes: u64, size_bytes: u64) -> Vec<Fragment> {
    let (mut at, end) = (from_bytes, from_bytes + size_bytes);
    let mut out = Vec::new();
    while at < end {
        let row = at / scale.row_bytes;
        let stop = end.min((row + 1) * scale.row_bytes);
        let x = |bytes: u64| scale.pixels(bytes - row * scale.row_bytes);
        out.push(Fragment { row: row as usize, from: x(at), to: x(stop) });
        at = stop;
    }
    out
}

/// Start of a segment in the map.
struct Start {
    row: usize,
    x: f64,
    label: Option<String>,
}

/// Returns the starts of the segments that are wide enough for a line between them.
fn starts(heap: &DrawnHeap, scale: &Scale) -> Vec<Start> {
    let (mut starts, mut at) = (Vec::new(), 0);
    for segment in &heap.segments {
        let size_bytes: u64 = segment.blocks.iter().map(|block| block.size_bytes).sum();
        if let Some(first) = fragments(scale, at, size_bytes).first()
            && (scale.pixels(size_bytes) >= SEPARATED_PX || at == 0)
        {
            let room = first.to - first.from - 4.0;
            let labels = [format!("segment {}", segment.id), segment.id.to_string()];
            let label = labels.into_iter().find(|text| text_width(text, SMALL) <= room);
            starts.push(Start { row: first.row, x: first.from, label });
        }
        at += size_bytes;
    }
    starts
}

/// Draws the rows of a heap. Returns the vertical position below them.
fn rows(
    svg: &mut Svg,
    x: f64,
    y: f64,
    heap: &DrawnHeap,
    scale: &Scale,
    numbers: &BTreeMap<AllocationId, usize>,
) -> f64 {
    let starts = starts(heap, scale);
    let count = heap.size_bytes().div_ceil(scale.row_bytes).max(1) as usize;
    let mut tops = Vec::with_capacity(count);
    let mut below = y;
    for row in 0..count {
        let is_labeled = starts.iter().any(|start| start.row == row && start.label.is_some());
        tops.push(below + if is_labeled { 16.0 } else { 5.0 });
        below = tops[row] + ROW;
    }
    areas(svg, heap, scale, &|column| {
        let per_row = scale.width as usize;
        (x + (column % per_row) as f64, tops[column / per_row])
    });
    let mut edges = String::new();
    for start in &starts {
        let rise = if start.label.is_some() { 6.0 } else { 3.0 };
        edges += &format!("M{} {}v{}", short(x + start.x), short(tops[start.row] - rise), short(ROW + rise));
    }
    for piece in fragments(scale, 0, heap.size_bytes()) {
        outline(&mut edges, x + piece.from, tops[piece.row], piece.to - piece.from);
    }
    svg.line(&separators(heap, scale, x, &tops), r##"stroke="#fff" stroke-width="1""##);
    svg.line(&edges, r##"stroke="#000" stroke-width="1.2""##);
    for start in starts {
        if let Some(label) = start.label {
            svg.text(x + start.x + 4.0, tops[start.row] - 3.0, SMALL, Anchor::Start, &label);
        }
    }
    mark_numbers(svg, heap, scale, x, &tops, numbers);
    tooltips(svg, heap, scale, x, &tops);
    below + 8.0
}

/// Returns the path of the lines between blocks.
fn separators(heap: &DrawnHeap, scale: &Scale, x: f64, tops: &[f64]) -> String {
    let (mut path, mut at) = (String::new(), 0);
    for block in heap.blocks() {
        if scale.pixels(block.size_bytes) >= SEPARATED_PX
            && let Some(first) = fragments(scale, at, block.size_bytes).first()
        {
            path += &format!("M{} {}v{}", short(x + first.from), short(tops[first.row]), short(ROW));
        }
        at += block.size_bytes;
    }
    path
}

/// Writes the numbers of the largest allocations, with their names if there is room.
fn mark_numbers(
    svg: &mut Svg,
    heap: &DrawnHeap,
    scale: &Scale,
    x: f64,
    tops: &[f64],
    numbers: &BTreeMap<AllocationId, usize>,
) {
    let mut at = 0;
    for block in heap.blocks() {
        let from = at;
        at += block.size_bytes;
        let Some((held, number)) = block.held.as_ref().and_then(|held| Some((held, numbers.get(&held.id)?))) else {
            continue;
        };
        let pieces = fragments(scale, from, block.size_bytes);
        let by_width = |a: &&Fragment, b: &&Fragment| (a.to - a.from).total_cmp(&(b.to - b.from));
        let Some(widest) = pieces.iter().max_by(by_width) else { continue };
        let room = widest.to - widest.from - 4.0;
        let labels = [format!("{number} {}", held.label()), number.to_string()];
        if let Some(label) = labels.iter().find(|text| text_width(text, SMALL) * 1.1 <= room) {
            let middle = x + (widest.from + widest.to) / 2.0;
            svg.light(middle, tops[widest.row] + 15.5, SMALL, Anchor::Middle, label);
        }
    }
}

/// Adds a tooltip to each block that is wide enough.
fn tooltips(svg: &mut Svg, heap: &DrawnHeap, scale: &Scale, x: f64, tops: &[f64]) {
    let mut at = 0;
    for segment in &heap.segments {
        for block in &segment.blocks {
            let from = at;
            at += block.size_bytes;
            if scale.pixels(block.size_bytes) < POINTED_PX {
                continue;
            }
            let mut path = String::new();
            for piece in fragments(scale, from, block.size_bytes) {
                outline(&mut path, x + piece.from, tops[piece.row], piece.to - piece.from);
            }
            let size = memory(block.size_bytes);
            let words = match (&block.held, block.state) {
                (Some(held), _) => format!("{}: {}, {}", held.label(), memory(held.requested_bytes), place(held)),
                (None, BlockState::Fenced) => format!("free, fenced: {size} in segment {}", segment.id),
                (None, _) => format!("free: {size} in segment {}", segment.id),
            };
            svg.tooltip(&path, &words);
        }
    }
}

fn outline(path: &mut String, x: f64, y: f64, width: f64) {
    *path += &format!("M{} {}h{}v{}h{}z", short(x), short(y), short(width), short(ROW), short(-width));
}

/// Bytes of a column by state, as fractions of the column.
type Column = [f64; 4];

const STATES: [BlockState; 4] = [BlockState::Differs, BlockState::Fenced, BlockState::Live, BlockState::Free];

/// Draws the filled areas: runs of columns in the same state.
fn areas(svg: &mut Svg, heap: &DrawnHeap, scale: &Scale, place: &dyn Fn(usize) -> (f64, f64)) {
    let per_row = scale.width as usize;
    let mut columns: Vec<Column> = Vec::new();
    let mut at = 0.0;
    for block in heap.blocks() {
        let end = at + block.size_bytes as f64 * per_row as f64 / scale.row_bytes as f64;
        spread(&mut columns, at, end, block);
        at = end;
    }
    let most = |column: &Column| {
        let by_size = |a: &usize, b: &usize| column[*a].total_cmp(&column[*b]).then(b.cmp(a));
        (0..STATES.len()).max_by(by_size).map_or(BlockState::Free, |index| STATES[index])
    };
    let mut paths: [String; 4] = Default::default();
    let mut column = 0;
    while column < columns.len() {
        let state = most(&columns[column]);
        let row_end = ((column / per_row + 1) * per_row).min(columns.len());
        let end = (column + 1..row_end).find(|next| most(&columns[*next]) != state).unwrap_or(row_end);
        let (x, y) = place(column);
        let index = STATES.iter().position(|of| *of == state).unwrap_or(0);
        let width = end - column;
        paths[index] += &format!("M{} {}h{width}v{}h-{width}z", short(x), short(y), short(ROW));
        column = end;
    }
    for (path, state) in paths.iter().zip(STATES) {
        if !path.is_empty() {
            svg.area(path, fill(state));
        }
    }
}

/// Adds a block to each column that it overlaps.
fn spread(columns: &mut Vec<Column>, from: f64, to: f64, block: &DrawnBlock) {
    let index = STATES.iter().position(|state| *state == block.state).unwrap_or(0);
    let last = to.ceil() as usize;
    if columns.len() < last {
        columns.resize(last, [0.0; 4]);
    }
    for (column, shares) in columns.iter_mut().enumerate().take(last).skip(from as usize) {
        shares[index] += (to.min(column as f64 + 1.0) - from.max(column as f64)).max(0.0);
    }
}

/// Lists the largest allocations with their placements.
fn list(svg: &mut Svg, x: f64, y: f64, width: f64, of: &Memory) -> f64 {
    let largest = largest(of, |_| true);
    if largest.is_empty() {
        return y;
    }
    let mut y = y + 22.0;
    svg.bold(x, y, BODY, Anchor::Start, "The largest live allocations");
    for (index, (owner, held)) in largest.iter().enumerate() {
        let place = format!("{}, {}", heap_name(*owner), place(held));
        let size = memory(held.requested_bytes);
        y += 21.0;
        svg.text(x + 16.0, y, BODY, Anchor::End, &(index + 1).to_string());
        if svg.is_narrow() {
            svg.text(x + width, y, BODY, Anchor::End, &size);
            svg.text(x + 26.0, y, BODY, Anchor::Start, &fitting(&held.label(), BODY, width - 130.0));
            y += 17.0;
            svg.text(x + 26.0, y, SMALL, Anchor::Start, &place);
        } else {
            svg.text(x + 110.0, y, BODY, Anchor::End, &size);
            svg.text(x + 126.0, y, BODY, Anchor::Start, &fitting(&held.label(), BODY, 320.0));
            svg.text(x + 460.0, y, BODY, Anchor::Start, &place);
        }
    }
    let smaller = of.live().count() - largest.len();
    if smaller > 0 {
        y += 21.0;
        let text = format!("and {} smaller ones", count(smaller));
        svg.text(x + 26.0, y, SMALL, Anchor::Start, &text);
    }
    y + 6.0
}

fn place(held: &LiveAllocation) -> String {
    format!("segment {} at {}", held.placement.segment.0, memory(held.placement.offset_bytes))
}

/// Lists the largest allocations whose placements differ, with both placements.
fn list_differing(svg: &mut Svg, y: f64, [one, other]: [&Memory; 2]) -> f64 {
    let largest = largest(one, |block| block.state == BlockState::Differs);
    let is_listed = |id: AllocationId| largest.iter().any(|(_, held)| held.id == id);
    let listed = other.live().filter(|(_, _, held)| is_listed(held.id));
    let places: BTreeMap<AllocationId, String> = listed.map(|(_, _, held)| (held.id, place(held))).collect();
    let mut y = y;
    for (index, (_, held)) in largest.iter().enumerate() {
        if index == 0 {
            y += 22.0;
            svg.bold(MARGIN, y, BODY, Anchor::Start, "The largest that lie elsewhere");
        }
        let size = memory(held.requested_bytes);
        let elsewhere = places.get(&held.id).map_or("nowhere", String::as_str);
        let places = format!("{}, on the other {elsewhere}", place(held));
        y += 21.0;
        if svg.is_narrow() {
            svg.text(svg.width() - MARGIN, y, BODY, Anchor::End, &size);
            let room = svg.width() - 130.0;
            svg.text(MARGIN, y, BODY, Anchor::Start, &fitting(&held.label(), BODY, room));
            for line in wrapped(&places, SMALL, svg.width() - 2.0 * MARGIN) {
                y += 17.0;
                svg.text(MARGIN, y, SMALL, Anchor::Start, &line);
            }
        } else {
            svg.text(MARGIN + 94.0, y, BODY, Anchor::End, &size);
            svg.text(MARGIN + 110.0, y, BODY, Anchor::Start, &fitting(&held.label(), BODY, 220.0));
            svg.text(MARGIN + 340.0, y, BODY, Anchor::Start, &places);
        }
    }
    y + 6.0
}

/// Returns a text description of the picture, for accessibility.
fn description(memory: &Memory) -> String {
    let heaps = memory.heaps.iter().map(|heap| format!("{}: {}.", heap_name(heap.owner), summary(heap)));
    heaps.collect::<Vec<_>>().join(" ")
}

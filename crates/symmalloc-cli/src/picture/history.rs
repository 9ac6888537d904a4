//! Live, allocated and reserved bytes over ops: all heaps stacked in one panel, followed by a panel for each heap.
//!
//! ```text
//!  4 GiB ┤      ┌──────────  reserved     thick line
//!        │   ┌──┘ ▒▒▒▒▒▒▒▒   allocated    filled, a pattern for each heap
//!  2 GiB ┤ ┌─┘▒▒▒▒▒▒▒▒▒▒▒▒   live         dashed: requested by the program
//!        │ │▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//!      0 ┴─┴──────────────► ops
//! ```
//!
//! With a plan, one more line shows the memory reserved by the job that follows it.

use super::heap_name;
use super::svg::{Anchor, BODY, Fill, HEAP_FILLS, SMALL, Svg, TITLE, fitting, short, wrapped};
use super::timeline::{ALLOCATED, Curve, JobCurves, LIVE, Peak, RESERVED, Span};
use crate::quantity::{count, memory};
use std::cmp::Reverse;
use symmalloc_core::ids::HeapId;

const RESERVED_LINE: &str = r##"stroke="#000" stroke-width="2.4""##;
const LIVE_LINE: &str = r##"stroke="#000" stroke-width="1.4" stroke-dasharray="5 3""##;
const PLANNED_LINE: &str = r##"stroke="#d55e00" stroke-width="2.4" stroke-dasharray="9 4""##;
const LEAST_LINE: &str = r##"stroke="#fff" stroke-width="1.4""##;
const GRID: &str = r##"stroke="#000" stroke-opacity=".16""##;
const AXIS: &str = r##"stroke="#000""##;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 12.0;

/// Position of a panel, and the ranges of its axes.
struct Panel {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
    bytes_max: u64,
    columns: usize,
}

impl Panel {
    fn column(&self, column: usize) -> f64 {
        self.x + self.width * column as f64 / self.columns.max(1) as f64
    }

    fn level(&self, bytes: u64) -> f64 {
        self.y + self.height * (1.0 - bytes as f64 / self.bytes_max.max(1) as f64)
    }

    /// Returns the path of a value over the columns, from left to right.
    fn steps(&self, values: impl Iterator<Item = u64>) -> String {
        let mut path = String::new();
        let mut last = None;
        for (column, value) in values.enumerate() {
            let y = short(self.level(value));
            if last.as_ref() == Some(&y) {
                continue;
            }
            let x = short(self.column(column));
            path += &if last.is_none() { format!("M{x} {y}") } else { format!("H{x}V{y}") };
            last = Some(y);
        }
        path + &format!("H{}", short(self.column(self.columns)))
    }

    /// Returns the outline of the area between two values over the columns.
    fn between(&self, values: &[(u64, u64)]) -> String {
        let mut path = self.steps(values.iter().map(|(_, above)| *above));
        let mut last = None;
        for (column, (below, _)) in values.iter().enumerate().rev() {
            let y = short(self.level(*below));
            if last.as_ref() != Some(&y) {
                path += &format!("H{}V{y}", short(self.column(column + 1)));
                last = Some(y);
            }
        }
        path + &format!("H{}z", short(self.x))
    }

    fn axes(&self, svg: &mut Svg, ticks: usize) {
        for bytes in byte_ticks(self.bytes_max, ticks) {
            let y = self.level(bytes);
            svg.line(&format!("M{} {}h{}", short(self.x), short(y), short(self.width)), GRID);
            svg.text(self.x - 8.0, y + 4.0, SMALL, Anchor::End, &round_memory(bytes));
        }
        let (x, y) = (short(self.x), short(self.y + self.height));
        svg.line(&format!("M{x} {}V{y}h{}", short(self.y), short(self.width)), AXIS);
    }

    fn op_labels(&self, svg: &mut Svg, op_count: usize) {
        let y = self.y + self.height;
        let ticks = op_ticks(op_count, if svg.is_narrow() { 3 } else { 6 });
        for op in ticks {
            let x = self.x + self.width * op as f64 / op_count.max(1) as f64;
            svg.line(&format!("M{} {}v5", short(x), short(y)), AXIS);
            svg.text(x, y + 19.0, SMALL, Anchor::Middle, &count(op));
        }
        svg.text(self.x + self.width, y + 36.0, SMALL, Anchor::End, "ops");
    }
}

/// Title of a picture, and the remark below it.
pub(crate) struct Words<'a> {
    pub(crate) title: &'a str,
    pub(crate) aside: &'a str,
}

/// Draws a timeline at the given width.
pub(crate) fn draw(timeline: &JobCurves, width: u32, prefix: &'static str, class: &str, words: &Words<'_>) -> String {
    let mut svg = Svg::new(prefix, width);
    let mut y = heading(&mut svg, words);
    let shown = shown_heaps(timeline);
    y = legend(&mut svg, y, timeline, &shown) + 14.0;
    let panel = Panel {
        x: LEFT,
        y,
        width: svg.width() - LEFT - RIGHT,
        height: if svg.is_narrow() { 220.0 } else { 280.0 },
        bytes_max: headroom(timeline.total.peaks[RESERVED].bytes.max(planned_peak(timeline).bytes)),
        columns: timeline.columns,
    };
    stack(&mut svg, &panel, timeline, &shown);
    curve(&mut svg, &panel, &timeline.total, is_condensed(timeline));
    if let Some(planned) = &timeline.planned {
        svg.line(&panel.steps(planned.reserved.iter().copied()), PLANNED_LINE);
    }
    panel.axes(&mut svg, 5);
    panel.op_labels(&mut svg, timeline.op_count);
    peak(&mut svg, &panel, timeline);
    tooltips(&mut svg, &panel, timeline);
    y = panel.y + panel.height + 44.0;
    if timeline.heaps.len() > 1 {
        for (fill, index) in &shown {
            y = heap(&mut svg, y + 8.0, timeline, *fill, *index);
        }
        y += 20.0;
    }
    svg.finish(y, class, words.title, &description(timeline))
}

fn planned_peak(timeline: &JobCurves) -> Peak {
    timeline.planned.as_ref().map_or_else(Peak::default, |planned| planned.peak)
}

/// Draws the title and the remark. Returns the vertical position below them.
pub(crate) fn heading(svg: &mut Svg, words: &Words<'_>) -> f64 {
    let mut y = 10.0;
    for line in wrapped(words.title, TITLE, svg.width() - 24.0) {
        y += 20.0;
        let line = fitting(&line, TITLE, svg.width() - 24.0);
        svg.bold(12.0, y, TITLE, Anchor::Start, &line);
    }
    for line in wrapped(words.aside, SMALL, svg.width() - 24.0) {
        y += 17.0;
        let line = fitting(&line, SMALL, svg.width() - 24.0);
        svg.text(12.0, y, SMALL, Anchor::Start, &line);
    }
    y + 10.0
}

/// Returns the largest heaps, by index, each with its own fill.
fn shown_heaps(timeline: &JobCurves) -> Vec<(Fill, usize)> {
    let mut largest: Vec<usize> = (0..timeline.heaps.len()).collect();
    largest.sort_by_key(|index| (Reverse(timeline.heaps[*index].1.peaks[RESERVED].bytes), *index));
    largest.truncate(HEAP_FILLS);
    largest.sort_unstable();
    largest.into_iter().enumerate().map(|(fill, index)| (Fill::Heap(fill), index)).collect()
}

fn legend(svg: &mut Svg, y: f64, timeline: &JobCurves, shown: &[(Fill, usize)]) -> f64 {
    let peaks = &timeline.total.peaks;
    let peak_text =
        |name: &str, Peak { bytes, op }: Peak| format!("{name}: peak {} after op {}", memory(bytes), count(op));
    let mut at = Flow { x: 12.0, y };
    let mut line = |svg: &mut Svg, style: &str, text: &str| {
        let (x, y) = at.next(svg, text);
        svg.line(&format!("M{} {}h26", short(x), short(y - 5.0)), style);
        svg.text(x + 34.0, y, BODY, Anchor::Start, text);
    };
    line(svg, RESERVED_LINE, &peak_text("reserved", peaks[RESERVED]));
    line(svg, LIVE_LINE, &peak_text("live", peaks[LIVE]));
    if timeline.planned.is_some() {
        line(svg, PLANNED_LINE, &peak_text("reserved by the plan", planned_peak(timeline)));
    }
    let is_one = timeline.heaps.len() == 1;
    for (fill, index) in shown {
        let (owner, curve) = &timeline.heaps[*index];
        let peak = curve.peaks[ALLOCATED];
        let text = if is_one {
            peak_text("allocated", peak)
        } else {
            format!("{}: {} allocated", heap_name(*owner), memory(peak.bytes))
        };
        swatch(svg, &mut at, *fill, &text);
    }
    let others = timeline.heaps.len() - shown.len();
    if others > 0 {
        swatch(svg, &mut at, Fill::Others, &format!("{} other heaps", count(others)));
    }
    if is_condensed(timeline) {
        let ops = timeline.op_count.div_ceil(timeline.columns);
        let text =
            format!("white line: minimum of allocated bytes within {} ops; all other values are maximums", count(ops));
        for text in wrapped(&text, BODY, svg.width() - 24.0) {
            at = Flow { x: 12.0, y: at.y + if at.x > 12.0 { 22.0 } else { 0.0 } };
            let (x, y) = at.next(svg, &text);
            svg.text(x, y, BODY, Anchor::Start, &text);
        }
    }
    at.y + if at.x > 12.0 { 22.0 } else { 0.0 }
}

pub(crate) fn swatch(svg: &mut Svg, at: &mut Flow, fill: Fill, text: &str) {
    let (x, y) = at.next(svg, text);
    svg.swatch(x, y - 12.0, 26.0, 14.0, fill);
    svg.text(x + 34.0, y, BODY, Anchor::Start, text);
}

/// Layout of a legend, with as many entries per line as fit.
pub(crate) struct Flow {
    pub(crate) x: f64,
    pub(crate) y: f64,
}

impl Flow {
    /// Returns the position of the next entry: its left end and base line.
    fn next(&mut self, svg: &Svg, text: &str) -> (f64, f64) {
        // Entries are aligned in columns, two of them in wide pictures.
        let column = if svg.is_narrow() { svg.width() } else { svg.width() / 2.0 - 6.0 };
        let width = 34.0 + super::svg::text_width(text, BODY);
        if self.x > 12.0 && self.x + width > svg.width() - 4.0 {
            *self = Flow { x: 12.0, y: self.y + 22.0 };
        }
        let place = (self.x, self.y + 15.0);
        self.x += (width / column).ceil() * column;
        place
    }
}

/// Returns `true` if a column represents more than one op.
fn is_condensed(timeline: &JobCurves) -> bool {
    timeline.op_count > timeline.columns
}

/// Draws the allocated bytes of all heaps as a stack.
fn stack(svg: &mut Svg, panel: &Panel, timeline: &JobCurves, shown: &[(Fill, usize)]) {
    let mut below = vec![0; timeline.columns];
    let mut layer = |svg: &mut Svg, fill: Fill, has: &dyn Fn(usize) -> bool| {
        let of_column = |(stack, below): (&Vec<u64>, &mut u64)| {
            let bytes: u64 = (0..stack.len()).filter(|index| has(*index)).map(|index| stack[index]).sum();
            let from = *below;
            *below += bytes;
            (from, *below)
        };
        let values: Vec<(u64, u64)> = timeline.stacks.iter().zip(&mut below).map(of_column).collect();
        if values.iter().any(|(from, to)| from < to) {
            svg.area(&panel.between(&values), fill);
            svg.line(&panel.steps(values.iter().map(|(_, to)| *to)), r##"stroke="#000" stroke-width=".7""##);
        }
    };
    for (fill, index) in shown {
        layer(svg, *fill, &|other| other == *index);
    }
    layer(svg, Fill::Others, &|other| shown.iter().all(|(_, index)| *index != other));
}

fn curve(svg: &mut Svg, panel: &Panel, curve: &Curve, is_condensed: bool) {
    let most = |span: &Span| span.most;
    if is_condensed {
        svg.line(&panel.steps(curve.spans[ALLOCATED].iter().map(|span| span.least)), LEAST_LINE);
    }
    svg.line(&panel.steps(curve.spans[LIVE].iter().map(most)), LIVE_LINE);
    svg.line(&panel.steps(curve.spans[RESERVED].iter().map(most)), RESERVED_LINE);
}

/// Marks the peaks of reserved and of allocated memory.
fn peak(svg: &mut Svg, panel: &Panel, timeline: &JobCurves) {
    let reserved = panel.level(timeline.total.peaks[RESERVED].bytes);
    for (quantity, word) in [(RESERVED, "reserved"), (ALLOCATED, "allocated")] {
        let Peak { bytes, op } = timeline.total.peaks[quantity];
        if bytes == 0 {
            continue;
        }
        let x = panel.x + panel.width * (op as f64 + 0.5) / timeline.op_count as f64;
        let y = panel.level(bytes);
        svg.dot(x, y);
        // A tag close below the other tag would hide the line, so it is omitted. The legend also states the peak.
        if quantity == ALLOCATED && y - reserved < 30.0 {
            continue;
        }
        let anchor = match x - panel.x {
            near if near < panel.width * 0.3 => Anchor::Start,
            near if near > panel.width * 0.7 => Anchor::End,
            _ => Anchor::Middle,
        };
        let text = if svg.is_narrow() { memory(bytes) } else { format!("{} {word}", memory(bytes)) };
        svg.tag(x, y - 9.0, SMALL, anchor, &text);
    }
}

/// Number of columns that share a tooltip.
const POINTED_COLUMNS: usize = 4;

/// Adds tooltips with the peaks of short ranges of ops.
fn tooltips(svg: &mut Svg, panel: &Panel, timeline: &JobCurves) {
    let most = |quantity: usize, from: usize, to: usize| {
        timeline.total.spans[quantity][from..to].iter().map(|span| span.most).max().unwrap_or(0)
    };
    let op = |column: usize| column * timeline.op_count / timeline.columns.max(1);
    for from in (0..timeline.columns).step_by(POINTED_COLUMNS) {
        let to = (from + POINTED_COLUMNS).min(timeline.columns);
        let (left, width) = (panel.column(from), panel.column(to) - panel.column(from));
        let [reserved, allocated, live] = [RESERVED, ALLOCATED, LIVE].map(|quantity| memory(most(quantity, from, to)));
        let last = op(to).saturating_sub(1).max(op(from));
        let words = format!(
            "ops {} to {}: at most {reserved} reserved, {allocated} allocated, {live} live",
            count(op(from)),
            count(last)
        );
        let path =
            format!("M{} {}h{}v{}H{}z", short(left), short(panel.y), short(width), short(panel.height), short(left));
        svg.tooltip(&path, &words);
    }
}

/// Draws the panel of one heap. Returns the vertical position below it.
fn heap(svg: &mut Svg, y: f64, timeline: &JobCurves, fill: Fill, index: usize) -> f64 {
    let (owner, curve_of_heap) = &timeline.heaps[index];
    let mut at = Flow { x: 12.0, y };
    swatch(svg, &mut at, fill, &heap_name(*owner));
    let peaks = &curve_of_heap.peaks;
    let text = format!(
        "peaks: {} reserved, {} allocated, {} live",
        memory(peaks[RESERVED].bytes),
        memory(peaks[ALLOCATED].bytes),
        memory(peaks[LIVE].bytes)
    );
    let mut y = y + 15.0;
    if svg.is_narrow() {
        for line in wrapped(&text, SMALL, svg.width() - 24.0) {
            y += 17.0;
            svg.text(12.0, y, SMALL, Anchor::Start, &line);
        }
    } else {
        svg.text(svg.width() - RIGHT, y, SMALL, Anchor::End, &text);
    }
    let panel = Panel {
        x: LEFT,
        y: y + 12.0,
        width: svg.width() - LEFT - RIGHT,
        height: 70.0,
        bytes_max: headroom(peaks[RESERVED].bytes),
        columns: timeline.columns,
    };
    let values: Vec<(u64, u64)> = curve_of_heap.spans[ALLOCATED].iter().map(|span| (0, span.most)).collect();
    svg.area(&panel.between(&values), fill);
    curve(svg, &panel, curve_of_heap, is_condensed(timeline));
    panel.axes(svg, 2);
    panel.y + panel.height + 14.0
}

/// Returns the upper end of an axis, with room above the peak.
fn headroom(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 10)
}

/// Returns round amounts up to the largest, about `wanted` of them, in steps of a power of two.
fn byte_ticks(bytes_max: u64, wanted: usize) -> Vec<u64> {
    let step = (bytes_max / wanted as u64).max(1).next_power_of_two();
    (0..=bytes_max / step).map(|tick| tick * step).collect()
}

/// Returns round op numbers up to the count, in steps of 1, 2 or 5 times a power of ten.
fn op_ticks(op_count: usize, wanted: usize) -> Vec<usize> {
    let mut steps = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_usize.saturating_pow(power)));
    let step = steps.find(|step| op_count / step <= wanted).unwrap_or(usize::MAX);
    (0..=op_count / step).map(|tick| tick * step).collect()
}

/// Formats an amount of memory without insignificant digits.
fn round_memory(bytes: u64) -> String {
    if bytes == 0 { "0".to_owned() } else { memory(bytes).replace(".00 ", " ") }
}

/// Returns a text description of the picture, for accessibility.
fn description(timeline: &JobCurves) -> String {
    let peaks = &timeline.total.peaks;
    let mut text = format!(
        "Over {} ops: at most {} reserved (after op {}), {} allocated (op {}), {} live (op {}).",
        count(timeline.op_count),
        memory(peaks[RESERVED].bytes),
        count(peaks[RESERVED].op),
        memory(peaks[ALLOCATED].bytes),
        count(peaks[ALLOCATED].op),
        memory(peaks[LIVE].bytes),
        count(peaks[LIVE].op),
    );
    if timeline.planned.is_some() {
        text += &format!(" As planned: at most {} reserved.", memory(planned_peak(timeline).bytes));
    }
    for (owner, curve) in timeline.heaps.iter().filter(|_| timeline.heaps.len() > 1) {
        text += &describe_heap(*owner, curve);
    }
    text
}

fn describe_heap(owner: HeapId, curve: &Curve) -> String {
    let [live, allocated, reserved] = curve.peaks.map(|peak| memory(peak.bytes));
    format!(" {}: {reserved} reserved, {allocated} allocated, {live} live.", heap_name(owner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(byte_ticks(3 << 30, 5), [0, 1 << 30, 2 << 30, 3 << 30]);
        assert_eq!(op_ticks(127_227, 6), [0, 20_000, 40_000, 60_000, 80_000, 100_000, 120_000]);
        assert_eq!(op_ticks(127_227, 3), [0, 50_000, 100_000]);
        assert_eq!(op_ticks(4, 6), [0, 1, 2, 3, 4]);
        assert_eq!([0, 512, 3 << 20, 5 << 39].map(round_memory), ["0", "512 B", "3 MiB", "2.50 TiB"]);
    }

    #[test]
    fn equal_steps_are_one_line() {
        let panel = Panel { x: 0.0, y: 0.0, width: 40.0, height: 10.0, bytes_max: 10, columns: 4 };
        assert_eq!(panel.steps([1, 1, 3, 3].into_iter()), "M0 9H20V7H40");
        assert_eq!(panel.between(&[(0, 1), (0, 1), (1, 3), (1, 3)]), "M0 9H20V7H40H40V9H20V10H0z");
    }
}

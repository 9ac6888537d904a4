//! One picture to share: a job's reserved memory under PyTorch's two kinds of segments, under our allocator, and with a plan.
//!
//! ```text
//!  fsdp1
//!  PyTorch, its default   ████████████████████████┊████████████   7.38 GiB
//!  PyTorch, expandable    ████████████████████████┊██████         5.63 GiB   24 % less
//!  symmalloc              ████████████████████████┊█████          5.54 GiB   25 % less
//!  symmalloc, planned     ████████████████████████┊               4.66 GiB   37 % less
//!                                                 live at the peak
//! ```

use super::svg::{Anchor, Fill, Svg, fitting, short};
use crate::quantity::memory;

/// Width of a link preview, in pixels; its ratio to the height is 1200 to 630.
const WIDTH: u32 = 1200;
const HEIGHT: f64 = 630.0;
const MARGIN: f64 = 60.0;
const BAR: f64 = 52.0;
const STEP: f64 = 98.0;

/// A bar of the picture.
pub(crate) struct Bar {
    pub(crate) label: &'static str,
    pub(crate) bytes: u64,
}

/// Data of the picture.
pub(crate) struct Shared<'a> {
    pub(crate) name: &'a str,
    /// The first bar is PyTorch's, to which the others are compared.
    pub(crate) bars: &'a [Bar],
    pub(crate) live_bytes: u64,
    pub(crate) footer: &'a str,
}

/// Draws the picture.
pub(crate) fn draw(shared: &Shared<'_>) -> String {
    let mut svg = Svg::new("s", WIDTH);
    let inner = svg.width() - 2.0 * MARGIN;
    svg.bold(MARGIN, 84.0, 40, Anchor::Start, &fitting(shared.name, 40, inner));
    svg.text(MARGIN, 126.0, 22, Anchor::Start, "GPU memory that the job holds at its peak");
    let most = shared.bars.iter().map(|bar| bar.bytes).max().unwrap_or(1).max(1);
    let room = inner - 330.0;
    let pixels = |bytes: u64| room * bytes as f64 / most as f64;
    let first = shared.bars.first().map_or(0, |bar| bar.bytes);
    let top = 190.0;
    for (index, bar) in shared.bars.iter().enumerate() {
        let y = top + STEP * index as f64;
        let fill = match index {
            0 | 1 => Fill::Others,
            2 => Fill::Heap(0),
            _ => Fill::Heap(2),
        };
        svg.bold(MARGIN, y - 10.0, 24, Anchor::Start, bar.label);
        svg.swatch(MARGIN, y, pixels(bar.bytes), BAR, fill);
        let x = MARGIN + pixels(bar.bytes) + 16.0;
        svg.bold(x, y + 24.0, 28, Anchor::Start, &memory(bar.bytes));
        if index > 0 && first > 0 {
            svg.text(x, y + 49.0, 22, Anchor::Start, &compared(bar.bytes, first));
        }
    }
    let bottom = top + STEP * shared.bars.len().saturating_sub(1) as f64 + BAR;
    let x = MARGIN + pixels(shared.live_bytes);
    let line = format!("M{} {}V{}", short(x), short(top - 6.0), short(bottom + 12.0));
    svg.line(&line, r##"stroke="#000" stroke-width="3" stroke-dasharray="9 5""##);
    let live = format!("{} live at the peak", memory(shared.live_bytes));
    svg.text(x, bottom + 36.0, 22, Anchor::Middle, &live);
    svg.text(MARGIN, HEIGHT - 24.0, 20, Anchor::Start, &fitting(shared.footer, 20, inner));
    let bars = shared.bars.iter().map(|bar| format!("{}: {}.", bar.label, memory(bar.bytes))).collect::<Vec<_>>();
    let title = format!("GPU memory of {}", shared.name);
    svg.finish(HEIGHT, "", &title, &format!("{} {live}.", bars.join(" ")))
}

fn compared(bytes: u64, first: u64) -> String {
    let percent = |bytes: u64| format!("{:.0} %", bytes as f64 * 100.0 / first as f64);
    match bytes <= first {
        true => format!("{} less", percent(first - bytes)),
        false => format!("{} more", percent(bytes - first)),
    }
}

//! Writer for layouts. The spelling is canonical: equal layouts produce equal bytes.

use super::line::{CLASSES, MAGIC, VERSION};
use crate::text::write_name;
use std::fmt::{self, Write};
use symmalloc_core::layout::{AllocationLayout, HeapLayout, Layout, SegmentLayout};

/// Returns the layout as text, which [`parse`](super::parse) reads back to an equal layout.
pub fn to_text(layout: &Layout) -> String {
    let mut out = Counted { text: format!("{MAGIC} {VERSION}\n"), lines: 0 };
    write_layout(&mut out, layout).expect("writing to a string cannot fail");
    let Counted { text, lines } = out;
    format!("{text}end {lines}\n")
}

/// Text and the number of its lines.
struct Counted {
    text: String,
    lines: u64,
}

impl Counted {
    fn line(&mut self, line: fmt::Arguments<'_>) -> fmt::Result {
        self.lines += 1;
        writeln!(self.text, "{line}")
    }
}

fn write_layout(out: &mut Counted, layout: &Layout) -> fmt::Result {
    out.line(format_args!("pool {}", layout.config()))?;
    out.line(format_args!("granularity {}", layout.granularity_bytes()))?;
    if let Some(limit) = layout.total_limit_bytes() {
        out.line(format_args!("total_limit {limit}"))?;
    }
    layout.heaps().iter().try_for_each(|heap| write_heap(out, heap))
}

fn write_heap(out: &mut Counted, heap: &HeapLayout) -> fmt::Result {
    let HeapLayout { group, digest, next_segment, segments, .. } = heap;
    out.line(format_args!("heap {group} {} {digest} {}", digest.ops, next_segment.0))?;
    segments.iter().try_for_each(|segment| write_segment(out, segment))
}

fn write_segment(out: &mut Counted, segment: &SegmentLayout) -> fmt::Result {
    let (_, class) = CLASSES[segment.class as usize];
    match segment.base_offset_bytes {
        Some(offset_bytes) => out.line(format_args!("segment {} {class} {offset_bytes}", segment.id.0))?,
        None => out.line(format_args!("segment {} {class}", segment.id.0))?,
    }
    for extent in &segment.extents {
        out.line(format_args!("memory {} {}", extent.offset_bytes, extent.size_bytes))?;
    }
    for allocation in &segment.allocations {
        write_allocation(out, allocation)?;
        for user in &allocation.used_by {
            out.line(format_args!("u {user}"))?;
        }
    }
    Ok(())
}

/// Writes the allocation's line, without the lines of its additional users.
fn write_allocation(out: &mut Counted, allocation: &AllocationLayout) -> fmt::Result {
    let AllocationLayout { offset_bytes, size_bytes, requested_bytes, stream, name, .. } = allocation;
    out.lines += 1;
    write!(out.text, "a {offset_bytes} {size_bytes} {requested_bytes} {stream}")?;
    name.as_ref().map_or(Ok(()), |name| write_name(&mut out.text, name))?;
    out.text.write_char('\n')
}

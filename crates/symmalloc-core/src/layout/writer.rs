//! Writes a layout. Spelling is canonical: equal layouts are equal bytes.

use super::line::{CLASSES, SHARED};
use super::{AllocationLayout, HeapLayout, Layout, MAGIC, SegmentLayout, VERSION};
use crate::text::write_name;
use std::fmt;

impl Layout {
    /// The layout as text, which [`parse`](Layout::parse) reads back to an equal layout.
    pub fn to_text(&self) -> String {
        self.to_string()
    }
}

/// Lines, counted.
struct Counted<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    lines: u64,
}

impl Counted<'_, '_> {
    fn line(&mut self, line: fmt::Arguments<'_>) -> fmt::Result {
        self.lines += 1;
        writeln!(self.f, "{line}")
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{MAGIC} {VERSION}")?;
        let mut out = Counted { f, lines: 0 };
        out.line(format_args!("pool {}", self.config))?;
        out.line(format_args!("granularity {}", self.granularity_bytes))?;
        if let Some(limit) = self.total_limit_bytes {
            out.line(format_args!("total_limit {limit}"))?;
        }
        self.heaps.iter().try_for_each(|heap| write_heap(&mut out, heap))?;
        let lines = out.lines;
        writeln!(f, "end {lines}")
    }
}

fn write_heap(out: &mut Counted<'_, '_>, heap: &HeapLayout) -> fmt::Result {
    let HeapLayout { stream, digest, next_segment, segments } = heap;
    match stream {
        Some(stream) => out.line(format_args!("heap {stream} {} {digest} {}", digest.ops, next_segment.0))?,
        None => out.line(format_args!("heap {SHARED} {} {digest} {}", digest.ops, next_segment.0))?,
    }
    segments.iter().try_for_each(|segment| write_segment(out, segment))
}

fn write_segment(out: &mut Counted<'_, '_>, segment: &SegmentLayout) -> fmt::Result {
    let (_, class) = CLASSES[segment.class as usize];
    out.line(format_args!("segment {} {class}", segment.id.0))?;
    for extent in &segment.extents {
        out.line(format_args!("memory {} {}", extent.offset_bytes, extent.size_bytes))?;
    }
    for allocation in &segment.allocations {
        out.line(format_args!("{allocation}"))?;
        for user in &allocation.used_by {
            out.line(format_args!("u {user}"))?;
        }
    }
    Ok(())
}

impl fmt::Display for AllocationLayout {
    /// The allocation's line, without those of its other users.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AllocationLayout { offset_bytes, size_bytes, requested_bytes, stream, name, .. } = self;
        write!(f, "a {offset_bytes} {size_bytes} {requested_bytes} {stream}")?;
        name.as_ref().map_or(Ok(()), |name| write_name(f, name))
    }
}

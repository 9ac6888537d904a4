//! Parser for one line of a layout.

use super::rules::LayoutItem;
use crate::text::{Fields, Line, LineError};
use smallvec::SmallVec;
use symmalloc_core::Digest;
use symmalloc_core::SizeClass;
use symmalloc_core::ids::SegmentId;
use symmalloc_core::layout::{AllocationLayout, Extent};

/// First word of every layout's text.
pub const MAGIC: &str = "symmalloc-layout";

/// Version of the format that this library writes, and the only one that it reads.
pub const VERSION: u64 = 1;

/// Keywords that a line can start with, after the first line.
pub(super) const KEYWORDS: &[&str] =
    &["pool", "granularity", "total_limit", "heap", "segment", "memory", "a", "u", "end"];

/// Words for the size classes of segments.
pub(super) const CLASSES: [(SizeClass, &str); 2] = [(SizeClass::Small, "small"), (SizeClass::Large, "large")];

/// Parses one line, given without its line break.
pub(super) fn parse(line: u64, text: &str) -> Result<Line<LayoutItem>, LineError> {
    let mut fields = Fields::new(line, text);
    let Some(keyword) = fields.next() else { return Ok(Line::Nothing) };
    let item = match keyword.text {
        "pool" => LayoutItem::Pool(fields.config()?),
        "granularity" => LayoutItem::Granularity(fields.bytes()?),
        "total_limit" => LayoutItem::TotalLimit(fields.bytes()?),
        "heap" => LayoutItem::Heap {
            group: fields.stream_group()?,
            digest: Digest { ops: fields.number("the number of ops", u64::MAX)?, value: fields.hexadecimal()? },
            next_segment: fields.segment()?,
        },
        "segment" => LayoutItem::Segment {
            id: fields.segment()?,
            class: fields.class()?,
            base_offset_bytes: if fields.ahead().is_some() { Some(fields.bytes()?) } else { None },
        },
        "memory" => LayoutItem::Memory(Extent { offset_bytes: fields.bytes()?, size_bytes: fields.bytes()? }),
        "a" => LayoutItem::Allocation(AllocationLayout {
            offset_bytes: fields.bytes()?,
            size_bytes: fields.bytes()?,
            requested_bytes: fields.bytes()?,
            stream: fields.stream()?,
            used_by: SmallVec::new(),
            name: if fields.ahead() == Some(b'"') { Some(fields.name()?) } else { None },
        }),
        "u" => LayoutItem::Use(fields.stream()?),
        "end" => return fields.end(),
        _ => return Err(fields.unknown(keyword, KEYWORDS)),
    };
    fields.finish()?;
    Ok(Line::Statement(item))
}

impl Fields<'_> {
    fn bytes(&mut self) -> Result<u64, LineError> {
        self.number("a number of bytes", u64::MAX)
    }

    fn segment(&mut self) -> Result<SegmentId, LineError> {
        self.number("a segment's id, a number", u32::MAX.into()).map(|id| SegmentId(id as u32))
    }

    fn class(&mut self) -> Result<SizeClass, LineError> {
        const EXPECTED: &str = "a class of segments: small or large";
        let field = self.expect(EXPECTED)?;
        let class = CLASSES.iter().find(|(_, word)| *word == field.text);
        class.map(|(class, _)| *class).ok_or_else(|| self.expected(field.column, EXPECTED))
    }

    fn hexadecimal(&mut self) -> Result<u64, LineError> {
        const EXPECTED: &str = "a digest: 16 hexadecimal digits";
        let field = self.expect(EXPECTED)?;
        let is_one = field.text.len() == 16 && field.text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let value = u64::from_str_radix(field.text, 16).ok().filter(|_| is_one);
        value.ok_or_else(|| self.expected(field.column, EXPECTED))
    }
}

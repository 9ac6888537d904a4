//! The data of the explorer: a header, and the columns of the job as numbers of variable length.
//!
//! ```text
//! length of the header, header (JSON), then for every allocation, column by column:
//!   op minus the op of the previous allocation, ops until its free (0: never), index of its size, stream, pool, index of its name
//! the sizes, ascending, each minus the previous one
//! if there are stacks:
//!   stack + 1 of every allocation (0: none)
//!   for every stack: omitted frames, outermost frames that it shares with the previous stack, number of its other frames, those frames
//! for every layout:
//!   lane + 1 of every allocation (0: none), position of every allocation that has a lane
//!   lane, position, size, first op, number of ops of every part of reserved memory
//! ```
//!
//! A number has 7 bits per byte, the lowest first, and the last byte is below 128 (LEB128). The columns of a training job repeat with every
//! step, so they compress well. A stack is stored from its outermost frame inward, because most stacks share their outer frames. Equal jobs
//! give equal bytes.

use super::layout::Layout;
use crate::picture::group_number;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use symmalloc_core::ids::AllocationId;
use symmalloc_core::op::Op;
use symmalloc_import::{Stack, Stacks};
use symmalloc_text::visible_line;
use symmalloc_trace::replay::Program;

/// Returns the compressed data, for `DecompressionStream("deflate-raw")`. The best compression level would take three times as long, and
/// save a few percent.
pub(super) fn compressed(program: &Program, stacks: Option<&Stacks>, layouts: &[Layout], op: usize) -> Vec<u8> {
    let mut out = DeflateEncoder::new(Vec::new(), Compression::default());
    let written = out.write_all(&encoded(program, stacks, layouts, op)).and_then(|()| out.finish());
    written.expect("writing to memory does not fail")
}

/// An allocation of the program.
struct Row<'a> {
    op: usize,
    freed: Option<usize>,
    size_bytes: u64,
    stream: u64,
    pool: u64,
    name: Option<&'a str>,
}

fn rows(program: &Program) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::with_capacity(program.allocation_count());
    for (number, op) in program.ops().iter().enumerate() {
        match op {
            Op::Allocate { id, pool, stream, size_bytes } => rows.push(Row {
                op: number,
                freed: None,
                size_bytes: *size_bytes,
                stream: stream.0.into(),
                pool: pool.0.into(),
                name: program.name(*id),
            }),
            Op::Free { id } => rows[id.index()].freed = Some(number),
            _ => {}
        }
    }
    rows
}

fn encoded(program: &Program, stacks: Option<&Stacks>, layouts: &[Layout], op: usize) -> Vec<u8> {
    let rows = rows(program);
    let mut names: BTreeMap<&str, u64> = rows.iter().filter_map(|row| row.name).map(|name| (name, 0)).collect();
    let mut sizes: BTreeMap<u64, u64> = rows.iter().map(|row| (row.size_bytes, 0)).collect();
    for indices in [names.values_mut().zip(1..).collect::<Vec<_>>(), sizes.values_mut().zip(0..).collect()] {
        indices.into_iter().for_each(|(index, number)| *index = number);
    }
    let lanes = |layout: &Layout| {
        let lane = |lane: &super::layout::Lane| json!({ "pool": lane.owner.pool.0, "stream": lane.owner.stream().map(|stream| stream.0), "group": group_number(lane.owner), "height": lane.height_bytes });
        layout.lanes.iter().map(lane).collect::<Vec<_>>()
    };
    let header = json!({
        "ops": program.ops().len(),
        "op": op,
        "allocations": rows.len(),
        "sizes": sizes.len(),
        "names": names.keys().map(|name| visible_line(name)).collect::<Vec<_>>(),
        "frames": stacks.map_or(&[][..], Stacks::frames).iter().map(|frame| visible_line(frame)).collect::<Vec<_>>(),
        "stacks": stacks.map_or(0, |stacks| stacks.stacks().len()),
        "layouts": layouts.iter().map(|layout| json!({
            "name": layout.name,
            "origin": layout.origin,
            "lanes": lanes(layout),
            "reserved": layout.reserved.len(),
        })).collect::<Vec<_>>(),
    });
    let header = header.to_string();
    let mut out = Vec::new();
    put(&mut out, header.len() as u64);
    out.extend(header.as_bytes());
    let mut last = 0;
    for row in &rows {
        put(&mut out, (row.op - last) as u64);
        last = row.op;
    }
    let columns: [&dyn Fn(&Row<'_>) -> u64; 5] = [
        &|row| row.freed.map_or(0, |freed| (freed - row.op) as u64),
        &|row| sizes[&row.size_bytes],
        &|row| row.stream,
        &|row| row.pool,
        &|row| row.name.map_or(0, |name| names[name]),
    ];
    for column in columns {
        rows.iter().for_each(|row| put(&mut out, column(row)));
    }
    let mut last = 0;
    for &size_bytes in sizes.keys() {
        put(&mut out, size_bytes - last);
        last = size_bytes;
    }
    if let Some(stacks) = stacks {
        put_stacks(&mut out, stacks, rows.len());
    }
    for layout in layouts {
        for position in &layout.positions {
            put(&mut out, position.map_or(0, |position| position.lane as u64 + 1));
        }
        for position in layout.positions.iter().flatten() {
            put(&mut out, position.position_bytes);
        }
        for part in &layout.reserved {
            let ops = [part.ops.start, part.ops.end - part.ops.start];
            let numbers = [part.lane as u64, part.position_bytes, part.size_bytes, ops[0] as u64, ops[1] as u64];
            numbers.into_iter().for_each(|number| put(&mut out, number));
        }
    }
    out
}

fn put_stacks(out: &mut Vec<u8>, stacks: &Stacks, allocations: usize) {
    for id in 0..allocations {
        put(out, stacks.of(AllocationId(id as u64)).map_or(0, |stack| stack as u64 + 1));
    }
    let mut last: &[u32] = &[];
    for Stack { frames, frames_omitted, .. } in stacks.stacks() {
        let shared = frames.iter().rev().zip(last.iter().rev()).take_while(|(frame, other)| frame == other).count();
        let others = frames.iter().rev().skip(shared);
        [*frames_omitted, shared as u64, others.len() as u64].into_iter().for_each(|number| put(out, number));
        others.for_each(|frame| put(out, (*frame).into()));
        last = frames;
    }
}

/// Appends a number of variable length.
fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explorer::layout::{Lane, Position, Rectangle};
    use flate2::read::DeflateDecoder;
    use std::io::Read;
    use std::path::Path;
    use symmalloc_core::ids::HeapId;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::ids::{PoolId, StreamId};
    use symmalloc_import::{ReadOptions, read_bytes, read_path};

    #[test]
    fn numbers_have_seven_bits_a_byte() {
        let mut out = Vec::new();
        [0, 127, 128, 300, u64::MAX].into_iter().for_each(|number| put(&mut out, number));
        assert_eq!(out[..6], [0, 127, 0x80, 1, 0xac, 2]);
        assert_eq!(out[6..], [255, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
    }

    #[test]
    fn stacks_are_read_back_from_the_frames_that_they_share() {
        let snapshot = Path::new("../symmalloc-import/tests/fixtures/job.protocol4.pickle.gz");
        let stacks = read_path(snapshot, &ReadOptions::default().stacks()).unwrap().stacks.unwrap();
        let mut out = Vec::new();
        put_stacks(&mut out, &stacks, 10);
        // All numbers are below 128.
        let mut numbers = out.into_iter();
        let mut next = || numbers.next().unwrap().into();
        for id in 0..10 {
            assert_eq!(next(), stacks.of(AllocationId(id)).map_or(0, |stack| stack as u32 + 1));
        }
        let mut inward: Vec<u32> = Vec::new();
        for Stack { frames, frames_omitted, .. } in stacks.stacks() {
            assert_eq!(u64::from(next()), *frames_omitted);
            inward.truncate(next() as usize);
            for _ in 0..next() {
                inward.push(next());
            }
            assert!(frames.iter().eq(inward.iter().rev()));
        }
        assert_eq!(numbers.next(), None);
    }

    #[test]
    fn columns_follow_the_header_in_the_documented_order() {
        let trace = "symmalloc-trace 1\nstream s0\nstream s1\na 0 512 s0 \"b</script>\"\na 1 100000 s1\nf 0\na 2 512 s0 \"a\"\nend 6\n";
        let recording = read_bytes(trace.as_bytes(), &ReadOptions::default()).unwrap();
        let program = Program::new(&recording.records).unwrap();
        let owner = HeapId { pool: PoolId::DEFAULT, group: StreamGroup::One(StreamId(0)) };
        let layout = Layout {
            name: "x",
            origin: "y",
            lanes: vec![Lane { owner, height_bytes: 1024 }],
            positions: vec![
                Some(Position { lane: 0, position_bytes: 512 }),
                None,
                Some(Position { lane: 0, position_bytes: 0 }),
            ],
            reserved: vec![Rectangle { lane: 0, position_bytes: 0, size_bytes: 1024, ops: 2..6 }],
        };
        let mut bytes = Vec::new();
        DeflateDecoder::new(&*compressed(&program, None, &[layout], 3)).read_to_end(&mut bytes).unwrap();
        let (length, start) = (usize::from(bytes[0] & 127) | usize::from(bytes[1]) << 7, 2);
        let header: serde_json::Value = serde_json::from_slice(&bytes[start..start + length]).unwrap();
        assert_eq!(header["names"], json!(["a", "b</script>"]));
        assert_eq!((&header["ops"], &header["op"], &header["allocations"]), (&json!(6), &json!(3), &json!(3)));
        let expected: &[&[u8]] = &[
            &[2, 1, 2],                // ops
            &[2, 0, 0],                // frees
            &[0, 1, 0],                // sizes
            &[0, 1, 0],                // streams
            &[0, 0, 0],                // pools
            &[2, 0, 1],                // names
            &[0x80, 4, 0xa0, 0x89, 6], // 512, and 99,488 more
            &[1, 0, 1],                // lanes
            &[0x80, 4, 0],             // positions
            &[0, 0, 0x80, 8, 2, 4],    // reserved
        ];
        assert_eq!(bytes[start + length..], expected.concat());
    }
}

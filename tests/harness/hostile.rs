//! Hostile traces: valid programs of a given size that cost a reader as much as possible.
//!
//! A trace consists of a *state* and a *line*. The state takes half of the bytes and prepares the worst case, for example many small
//! gaps, many segments or many observers. The line follows until the trace is full. [`traces`] combines every state with every
//! kind of line, so a cost that grows with (lines of the state) × (lines that follow) shows in one of them.

use std::fmt::{Display, Write};

/// A hostile trace.
#[derive(Clone, Debug)]
pub struct HostileTrace {
    /// The state and the line, for messages.
    pub name: String,
    /// The trace.
    pub text: String,
}

/// Adds lines to a draft. Does nothing if the line is impossible in its state.
type Part = fn(&mut Draft);

/// The states that precede the lines, and the configuration of each.
const STATES: [(&str, &str, Part); 20] = [
    ("nothing", "", |_| {}),
    ("live blocks", "", |draft| _ = draft.allocate(512)),
    ("gaps", "", |draft| draft.gap(512)),
    ("gaps of many sizes", "", |draft| draft.gap(512 * (1 + draft.ids % 4000))),
    ("gaps of granules", "", |draft| draft.gap(4 << 20)),
    ("holes", "", |draft| {
        draft.gap(4 << 20);
        if draft.is_half_full() {
            draft.line("trim");
        }
    }),
    ("segments", "segments:fixed", |draft| _ = draft.allocate(20 << 20)),
    ("gaps of segments", "segments:fixed", |draft| draft.gap(20 << 20)),
    ("ranges", "segments:expandable,range_mb:2,growth_mb:2", |draft| _ = draft.allocate(2 << 20)),
    ("stitched", "segments:expandable,stitching:true", |draft| {
        draft.gap(16 << 20);
        if draft.is_half_full() {
            draft.allocate(256 << 20);
        }
    }),
    ("gaps of stitched granules", "segments:expandable,stitching:true,range_mb:1048576", |draft| draft.gap(16 << 20)),
    ("stitched ranges in use", "segments:expandable,stitching_granule_mb:2,stitching_least_mb:4", |draft| {
        // Three of four granules are free, and a range maps some of them. Half of it is freed again.
        draft.gap(2 << 20);
        draft.gap(4 << 20);
        if draft.ids % 16 == 0 {
            draft.allocate_and_free(8 << 20);
            draft.gap(4 << 20);
        }
    }),
    ("streams of a shared heap", "streams:shared", |draft| {
        let stream = draft.add_stream();
        let id = draft.allocate_on(stream, 512);
        draft.line(format!("u {id} s{}", stream / 2));
        draft.free(id);
    }),
    ("users of one block", "streams:shared", |draft| {
        let stream = draft.add_stream();
        let id = draft.live.last().copied().unwrap_or_else(|| draft.allocate(512));
        draft.line(format!("u {id} s{stream}"));
    }),
    ("heaps", "segments:fixed", |draft| {
        let stream = draft.add_stream();
        draft.allocate_on(stream, 512);
    }),
    ("pools", "segments:fixed", |draft| {
        draft.pools += 1;
        let (pool, id) = (draft.pools, draft.ids);
        draft.line(format!("pool p{pool} segments:fixed"));
        draft.ids += 1;
        draft.line(format!("a {id} 512 s0 p{pool}"));
    }),
    ("observers", "", |draft| draft.observe()),
    ("waits", "", |draft| {
        let stream = draft.add_stream();
        draft.line(format!("wait s{stream} s{}", stream - 1));
    }),
    ("pending frees", "", |draft| {
        let id = draft.allocate(512);
        draft.line(format!("u {id} s1"));
        draft.live.pop();
        draft.line(format!("f {id} pending"));
    }),
    ("sizes", "", |draft| _ = draft.allocate(512 * (1 + draft.ids))),
];

/// The lines that follow a state.
const LINES: [(&str, Part); 34] = [
    ("a small", |draft| _ = draft.allocate(512)),
    ("a granules", |draft| _ = draft.allocate(4 << 20)),
    ("a sizes", |draft| _ = draft.allocate(512 * (1 + draft.ids))),
    ("a huge", |draft| _ = draft.allocate(1 << 40)),
    ("a nothing", |draft| _ = draft.allocate(0)),
    ("a f small", |draft| draft.allocate_and_free(512)),
    ("a f granules", |draft| draft.allocate_and_free(4 << 20)),
    ("a f large", |draft| draft.allocate_and_free(64 << 20)),
    ("a f stitched sizes", |draft| draft.allocate_and_free((128 << 20) + (draft.ids * 7919 % 400) * (16 << 20))),
    ("a stitched sizes f", |draft| {
        let id = draft.allocate((4 << 20) + (draft.ids % 50) * (2 << 20));
        if id % 2 == 0 {
            draft.free(id);
        }
    }),
    ("a u f", |draft| {
        let id = draft.allocate(512);
        draft.line(format!("u {id} s1"));
        draft.free(id);
    }),
    ("a f on every stream", |draft| {
        let stream = draft.next_stream();
        let id = draft.allocate_on(stream, 512);
        draft.free(id);
    }),
    ("f", |draft| {
        if let Some(id) = draft.live.pop() {
            draft.line(format!("f {id}"));
        }
    }),
    ("u", |draft| {
        if let Some(id) = draft.live.last().copied() {
            draft.line(format!("u {id} s1"));
        }
    }),
    ("u of every stream", |draft| {
        let stream = draft.next_stream();
        if let Some(id) = draft.live.last().copied() {
            draft.line(format!("u {id} s{stream}"));
        }
    }),
    ("wait", |draft| {
        let stream = draft.next_stream();
        draft.line(format!("wait s{stream} s{}", draft.streams - 1 - stream));
    }),
    ("synchronize", |draft| {
        let stream = draft.next_stream();
        draft.line(format!("synchronize s{stream}"));
    }),
    ("reserve", |draft| {
        draft.reserved += 2 << 20;
        draft.line(format!("reserve {} s0", draft.reserved));
    }),
    ("trim", |draft| draft.line("trim")),
    ("trim p0", |draft| draft.line("trim p0")),
    ("a f trim", |draft| {
        draft.allocate_and_free(4 << 20);
        draft.line("trim");
    }),
    ("sync", |draft| draft.line("sync")),
    ("begin_step end_step", |draft| {
        draft.line("begin_step 0");
        draft.line("end_step");
    }),
    ("sleep keep wake", |draft| {
        draft.line("sleep keep");
        draft.line("wake");
    }),
    ("sleep drop wake", |draft| {
        draft.line("sleep drop");
        draft.line("wake");
    }),
    ("stay", |draft| draft.line("stay keep")),
    ("observe", Draft::observe),
    ("observe forget", |draft| {
        draft.observe();
        draft.forget();
    }),
    ("acknowledge", |draft| {
        if let Some(observer) = draft.observing.last() {
            draft.line(format!("acknowledge o{observer}"));
        }
    }),
    ("reclaim refuse", |draft| {
        draft.line("reclaim 1 s0");
        draft.line("refuse 1 s0 limit");
    }),
    ("a f revived", |draft| {
        let id = draft.ids;
        draft.ids += 1;
        draft.line(format!("a {id} 512 s0 -> 0@{} revived 512", 512 * (id / 2)));
        draft.line(format!("f {id}"));
    }),
    ("pool a f pending reset", |draft| {
        draft.pools += 1;
        let (pool, id) = (draft.pools, draft.ids);
        draft.ids += 1;
        draft.line(format!("pool p{pool}"));
        draft.line(format!("a {id} 512 s0 p{pool}"));
        draft.line(format!("f {id} pending"));
        draft.line(format!("reset p{pool}"));
    }),
    ("pool a", |draft| {
        draft.pools += 1;
        let (pool, id) = (draft.pools, draft.ids);
        draft.ids += 1;
        draft.line(format!("pool p{pool}"));
        draft.line(format!("a {id} {} s0 p{pool}", 2 << 20));
    }),
    ("pool destroy", |draft| {
        draft.pools += 1;
        let pool = draft.pools;
        draft.line(format!("pool p{pool}"));
        draft.line(format!("destroy p{pool}"));
    }),
];

/// Returns every state with every line, as traces of about `bytes`.
pub fn traces(bytes: usize) -> impl Iterator<Item = HostileTrace> {
    (0..STATES.len()).flat_map(move |state| (0..LINES.len()).map(move |line| made(bytes, state, line)))
}

/// Returns the trace of a state with a line, of about `bytes`.
///
/// # Panics
/// Panics if there is no such state or line.
pub fn trace(state: &str, line: &str, bytes: usize) -> HostileTrace {
    let state = STATES.iter().position(|(name, ..)| *name == state).expect("a state of this name");
    made(bytes, state, LINES.iter().position(|(name, _)| *name == line).expect("a line of this name"))
}

fn made(bytes: usize, state: usize, line: usize) -> HostileTrace {
    let ((state, config, prepare), (line, add)) = (STATES[state], LINES[line]);
    let mut draft = Draft::new(bytes, config);
    while !draft.is_half_full() {
        draft.repeat(prepare);
    }
    while !draft.is_full() {
        draft.repeat(add);
    }
    HostileTrace { name: format!("{state}, {line}"), text: draft.finish() }
}

/// Maximum size of a trace from bytes.
const MIXED_BYTES_MAX: usize = 64 << 10;

/// Returns a trace that mixes states and lines as the bytes select. The first byte selects the configuration. Each further pair is a state
/// or a line, and the number of its repetitions.
pub fn mixed(bytes: &[u8]) -> HostileTrace {
    let (first, pairs) = bytes.split_first().unwrap_or((&0, &[]));
    let config = STATES[usize::from(*first) % STATES.len()].1;
    let parts: Vec<Part> = STATES.iter().map(|(.., part)| *part).chain(LINES.iter().map(|(_, part)| *part)).collect();
    let mut draft = Draft::new(MIXED_BYTES_MAX, config);
    for pair in pairs.chunks_exact(2) {
        for _ in 0..u32::from(pair[1]) * u32::from(pair[1]) / 16 {
            if !draft.is_full() {
                draft.repeat(parts[usize::from(pair[0]) % parts.len()]);
            }
        }
    }
    HostileTrace { name: "mixed".to_owned(), text: draft.finish() }
}

/// A trace under construction.
struct Draft {
    text: String,
    bytes_max: usize,
    records: u64,
    streams: u64,
    /// The stream of the last line that takes turns.
    turn: u64,
    pools: u64,
    observers: u64,
    /// The observers that are not forgotten.
    observing: Vec<u64>,
    /// Number of allocations so far, which is the next id.
    ids: u64,
    live: Vec<u64>,
    reserved: u64,
}

impl Draft {
    fn new(bytes_max: usize, config: &str) -> Self {
        let mut text = "symmalloc-trace 1\n".to_owned();
        if !config.is_empty() {
            text += &format!("config {config}\n");
        }
        let mut draft = Draft {
            text,
            bytes_max,
            records: 0,
            streams: 0,
            turn: 0,
            pools: 0,
            observers: 0,
            observing: Vec::new(),
            ids: 0,
            live: Vec::new(),
            reserved: 0,
        };
        draft.add_stream();
        draft.add_stream();
        draft
    }

    fn is_half_full(&self) -> bool {
        self.text.len() >= self.bytes_max / 2
    }

    fn is_full(&self) -> bool {
        self.text.len() >= self.bytes_max
    }

    /// Adds a part, or a comment if the part adds nothing.
    fn repeat(&mut self, part: Part) {
        let before = self.text.len();
        part(self);
        if self.text.len() == before {
            self.text += "#\n";
        }
    }

    fn line(&mut self, line: impl Display) {
        writeln!(self.text, "{line}").expect("writing to a string cannot fail");
        self.records += 1;
    }

    /// Registers a stream and returns it, or returns the last one if there are no more.
    fn add_stream(&mut self) -> u64 {
        if self.streams < 65_535 {
            self.line(format!("stream s{}", self.streams));
            self.streams += 1;
        }
        self.streams - 1
    }

    fn next_stream(&mut self) -> u64 {
        self.turn = (self.turn + 1) % self.streams;
        self.turn
    }

    fn allocate(&mut self, size_bytes: u64) -> u64 {
        self.allocate_on(0, size_bytes)
    }

    fn allocate_on(&mut self, stream: u64, size_bytes: u64) -> u64 {
        let id = self.ids;
        self.ids += 1;
        self.live.push(id);
        self.line(format!("a {id} {size_bytes} s{stream}"));
        id
    }

    fn free(&mut self, id: u64) {
        self.live.pop();
        self.line(format!("f {id}"));
    }

    fn allocate_and_free(&mut self, size_bytes: u64) {
        let id = self.allocate(size_bytes);
        self.live.pop();
        self.line(format!("f {id}"));
    }

    /// Adds an allocation after a gap of the same size.
    fn gap(&mut self, size_bytes: u64) {
        let gap = self.allocate(size_bytes);
        self.live.pop();
        self.allocate(size_bytes);
        self.line(format!("f {gap}"));
    }

    fn observe(&mut self) {
        self.line(format!("observe o{} p0", self.observers));
        self.observing.push(self.observers);
        self.observers += 1;
    }

    /// Forgets the newest observer, if there is one.
    fn forget(&mut self) {
        if let Some(observer) = self.observing.pop() {
            self.line(format!("forget o{observer}"));
        }
    }

    fn finish(mut self) -> String {
        writeln!(self.text, "end {}", self.records).expect("writing to a string cannot fail");
        self.text
    }
}

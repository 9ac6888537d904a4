//! Comparison of the ranks' histories. The ranks communicate through a gather function that the caller provides.
//!
//! Symmetric pools use the core's agreement, which finds the first op that differs. Other pools keep no history, so their heaps are
//! compared by digest: in one round if all are equal, and in two otherwise.
//!
//! ```text
//!  round 1   heaps 8 │ digest of all heaps 8                                     per rank
//!  round 2   [ pool 4 │ stream 4 │ ops 8 │ digest 8 ] × the most heaps of a rank
//! ```
//!
//! Pool and stream ids identify a heap, so ranks that create different private pools are reported as different.

use crate::device::DeviceAllocator;
use crate::error::Error;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fmt::Write;
use symmalloc_agreement::{AgreementError, Gathered, Point, RankSet, Ranks, Transport, TransportError, agree};
use symmalloc_core::PoolConfig;
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::units::Counted;

/// Sends `len` bytes of this rank to all ranks, and writes the bytes of all ranks to `all` (world times `len` bytes), in rank order.
/// Returns 0 on success. The function must not throw.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_gather_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, mine: *const u8, len: usize, all: *mut u8) -> c_int>;

/// The maximum number of ranks. A round holds the messages of all ranks in memory.
const RANKS_MAX: u32 = 1 << 20;

/// A transport over the caller's gather function.
pub(crate) struct Gathering {
    rank: u32,
    ranks: u32,
    gather: unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut u8) -> c_int,
    context: *mut c_void,
}

impl Gathering {
    /// # Safety
    /// The function meets the contract of [`symmalloc_gather_fn`] with this context, on the calling thread, while the transport lives.
    pub(crate) unsafe fn new(
        rank: u32,
        ranks: u32,
        gather: symmalloc_gather_fn,
        context: *mut c_void,
    ) -> Result<Self, Error> {
        let gather = gather.ok_or(Error::Null { argument: "gather" })?;
        if ranks > RANKS_MAX {
            return Err(Error::Argument {
                argument: "world",
                value: ranks.into(),
                expected: "at most 1,048,576 ranks",
            });
        }
        if rank >= ranks {
            return Err(Error::Argument { argument: "rank", value: rank.into(), expected: "a number below `world`" });
        }
        Ok(Gathering { rank, ranks, gather, context })
    }
}

impl Transport for Gathering {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        let mut all = vec![0; message.len() * self.ranks as usize];
        // SAFETY: by the contract of `new`. Both buffers have the sizes that are passed to the function.
        let code = unsafe { (self.gather)(self.context, message.as_ptr(), message.len(), all.as_mut_ptr()) };
        match code {
            0 => Ok(Gathered::new(all, message.len())),
            code => Err(TransportError::Failed { call: "the gather function", code: code.into() }),
        }
    }
}

/// Compares the ranks' histories in symmetric pools. Every rank calls it at the same point of the program.
pub(crate) fn compare_symmetric(allocator: &DeviceAllocator, transport: &Gathering) -> Result<(), Error> {
    agree(allocator.core(), transport, Point::Sync)?;
    Ok(())
}

/// The identity of a heap: its pool, and the [code](StreamGroup::code) of its streams.
type PrivateHeap = (u32, u32);

const ENTRY_BYTES: usize = 24;

/// Limits of the second round: the maximum number of heaps per rank, and the maximum total size of all ranks' messages, in bytes. The
/// counts of heaps come from other ranks, so the limits bound the memory that a wrong count can request.
const HEAPS_MAX: u64 = 1 << 16;
const ROUND_BYTES_MAX: u64 = 256 << 20;

/// A heap's history: ops and digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct History {
    ops: u64,
    value: u64,
}

/// Compares the heaps of pools that are not symmetric.
pub(crate) fn compare_private(allocator: &DeviceAllocator, transport: &Gathering) -> Result<(), Error> {
    let heaps = private_heaps(allocator);
    let mut digest = heaps.len() as u64;
    for (&(pool, stream), history) in &heaps {
        for word in [u64::from(pool), stream.into(), history.ops, history.value] {
            digest = (digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
    }
    let mine = [&(heaps.len() as u64).to_le_bytes()[..], &digest.to_le_bytes()].concat();
    let first = transport.all_gather(&mine).map_err(AgreementError::from)?;
    if first.iter().all(|theirs| theirs == mine) {
        return Ok(());
    }
    let counts = (0_u32..).zip(first.iter().map(|theirs| word(theirs, 0)));
    let (rank, most) = counts.max_by_key(|(_, heaps)| *heaps).unwrap_or_default();
    let heaps_max = HEAPS_MAX.min(ROUND_BYTES_MAX / (ENTRY_BYTES as u64 * u64::from(transport.ranks)));
    if most > heaps_max {
        return Err(Error::Heaps(format!(
            "the ranks differ in pools that are not symmetric, and rank {rank} reports {most} heaps: at most {heaps_max} can be compared"
        )));
    }
    let most = most as usize;
    let mut mine = Vec::with_capacity(most * ENTRY_BYTES);
    for (&(pool, stream), history) in &heaps {
        mine.extend([pool.to_le_bytes(), stream.to_le_bytes()].as_flattened());
        mine.extend([history.ops.to_le_bytes(), history.value.to_le_bytes()].as_flattened());
    }
    mine.resize(most * ENTRY_BYTES, 0);
    let second = transport.all_gather(&mine).map_err(AgreementError::from)?;
    Err(Error::Heaps(difference(&first, &second)))
}

fn private_heaps(allocator: &DeviceAllocator) -> BTreeMap<PrivateHeap, History> {
    let core = allocator.core();
    let mut heaps = BTreeMap::new();
    for pool in core.pools() {
        if core.pool_config(pool).is_ok_and(PoolConfig::symmetric) {
            continue;
        }
        // A destroyed pool has no heaps.
        for (group, digest) in core.heap_digests(pool).unwrap_or_default() {
            heaps.insert((pool.0, group.code()), History { ops: digest.ops, value: digest.value });
        }
    }
    heaps
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Describes the heaps that differ, with the history that each rank has in them.
fn difference(first: &Gathered, second: &Gathered) -> String {
    let mut heaps: BTreeMap<PrivateHeap, BTreeMap<Option<History>, Vec<u32>>> = BTreeMap::new();
    let ranks: Vec<BTreeMap<PrivateHeap, History>> = first
        .iter()
        .zip(second.iter())
        .map(|(summary, entries)| {
            let count = word(summary, 0) as usize;
            let entries = entries.chunks_exact(ENTRY_BYTES).take(count);
            let read = |entry: &[u8]| {
                let name = word(entry, 0);
                ((name as u32, (name >> 32) as u32), History { ops: word(entry, 8), value: word(entry, 16) })
            };
            entries.map(read).collect()
        })
        .collect();
    for name in ranks.iter().flat_map(BTreeMap::keys) {
        heaps.entry(*name).or_default();
    }
    for (name, histories) in &mut heaps {
        for (rank, heaps) in (0..).zip(&ranks) {
            histories.entry(heaps.get(name).copied()).or_default().push(rank);
        }
    }
    heaps.retain(|_, histories| histories.len() > 1);
    let mut text =
        format!("the ranks differ in {} of pools that are not symmetric:", Counted(heaps.len() as u64, "heap"));
    for ((pool, streams), histories) in &heaps {
        let _ = match StreamGroup::from_code(*streams) {
            Some(StreamGroup::One(stream)) => write!(text, "\n  pool {pool}, stream {}", stream.0),
            Some(StreamGroup::Group(first)) => write!(text, "\n  pool {pool}, group of stream {}", first.0),
            _ => write!(text, "\n  pool {pool}"),
        };
        for (history, ranks) in histories {
            let ranks: RankSet = ranks.iter().copied().collect();
            let _ = match history {
                Some(History { ops, value }) => {
                    write!(text, "\n    {}, digest {value:016x}: {}", Counted(*ops, "op"), Ranks(&ranks))
                }
                None => write!(text, "\n    no op: {}", Ranks(&ranks)),
            };
        }
    }
    text.push_str(
        "\nTo find the first op that differs, make the pool symmetric (symmetric:true), or record a trace on each rank \
         (SYMMALLOC_TRACE) and compare them with `symmalloc diff`.",
    );
    text
}

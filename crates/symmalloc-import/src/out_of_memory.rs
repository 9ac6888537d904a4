//! An HTML page about a failed allocation, which a running program writes when the allocation fails.
//!
//! `SYMMALLOC_ON_OUT_OF_MEMORY=report:FOLDER` turns it on. Each device of each rank writes a separate page, so that the folder shows which
//! ranks failed, and why. The allocator keeps no history of earlier ops, but it knows all live allocations with their names, so the page
//! lists what they hold. If the same device fails again later, the new page replaces the old one.
//!
//! ```text
//! FOLDER/out-of-memory.html                       one rank, device 0
//! FOLDER/out-of-memory.rank3.html                 rank 3 of several
//! FOLDER/out-of-memory.rank3.device1.html         its second device
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::perfetto::heap_words;
use symmalloc_core::backend::Backend;
use symmalloc_core::errors::OutOfMemory;
use symmalloc_core::generic;
use symmalloc_core::ids::{HeapId, PoolId, StreamGroup};
use symmalloc_core::lock::Lock;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::units::Amount;
use symmalloc_files::say;

/// The environment variable that turns the page on.
pub const ON_OUT_OF_MEMORY_VARIABLE: &str = "SYMMALLOC_ON_OUT_OF_MEMORY";

/// Maximum number of pages that a process writes. Without it, a program that repeats a failing request would spend its time on writing
/// pages.
const PAGES_MAX: u32 = 64;

/// Maximum number of holders that a page lists. A holder is all live allocations with the same name, or with the same
/// size if they have no name.
const HOLDERS_MAX: usize = 40;

/// Maximum number of pools that the description lists separately.
const POOLS_MAX: usize = 5;

/// Number of pages that this process has written so far.
static PAGES: AtomicU32 = AtomicU32::new(0);

/// The action when an allocation fails: write a page to a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnOutOfMemory {
    folder: PathBuf,
}

/// Error: the text does not name an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be report:FOLDER, to write a page into that folder when an allocation fails")]
pub struct OnOutOfMemoryError;

impl FromStr for OnOutOfMemory {
    type Err = OnOutOfMemoryError;

    fn from_str(text: &str) -> Result<Self, OnOutOfMemoryError> {
        let folder = text.trim().strip_prefix("report:").map(str::trim).filter(|folder| !folder.is_empty());
        folder.map(|folder| OnOutOfMemory { folder: folder.into() }).ok_or(OnOutOfMemoryError)
    }
}

impl OnOutOfMemory {
    /// Returns the action that the environment variable states, if it is set.
    ///
    /// # Errors
    /// Returns an error if the value of the variable is invalid.
    pub fn from_environment() -> Result<Option<Self>, OnOutOfMemoryError> {
        match env::var(ON_OUT_OF_MEMORY_VARIABLE) {
            Ok(text) if text.trim().is_empty() => Ok(None),
            Ok(text) => text.parse().map(Some),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(_)) => Err(OnOutOfMemoryError),
        }
    }

    /// Returns the action that the environment of this process states. If the value is invalid, prints it once and
    /// returns `None`.
    pub fn of_process() -> Option<&'static Self> {
        static ACTION: OnceLock<Option<OnOutOfMemory>> = OnceLock::new();
        let read = || {
            OnOutOfMemory::from_environment().unwrap_or_else(|error| {
                say(format_args!("{ON_OUT_OF_MEMORY_VARIABLE} {error}"));
                None
            })
        };
        ACTION.get_or_init(read).as_ref()
    }

    /// Writes the page like [`write`](Self::write), and prints the path of the page, or the reason why it cannot be
    /// written.
    pub fn report<B: Backend, L: Lock>(
        &self,
        allocator: &generic::Allocator<B, L>,
        error: &OutOfMemory,
        device: usize,
    ) {
        match self.write(allocator, error, device) {
            Ok(Some(path)) => say(format_args!("out of memory: {} shows what holds it", path.display())),
            Ok(None) => {}
            Err(error) => say(format_args!("out of memory: no page in {}: {error}", self.folder.display())),
        }
    }

    /// Returns the folder in which the pages are written.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the page of a device and returns its path, or returns `None` if this process has already written 64 pages. Reads the state of
    /// the allocator but does not change it, so not all ranks need to call it. The rank comes from `RANK` and `WORLD_SIZE`.
    ///
    /// # Errors
    /// Returns an error if the page cannot be written.
    pub fn write<B: Backend, L: Lock>(
        &self,
        allocator: &generic::Allocator<B, L>,
        error: &OutOfMemory,
        device: usize,
    ) -> io::Result<Option<PathBuf>> {
        if PAGES.fetch_add(1, Ordering::Relaxed) >= PAGES_MAX {
            PAGES.store(PAGES_MAX, Ordering::Relaxed);
            return Ok(None);
        }
        let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let rank = number("RANK").filter(|_| number("WORLD_SIZE").is_some_and(|ranks| ranks > 1));
        let mut name = "out-of-memory".to_owned();
        let mut title = "Out of memory".to_owned();
        let parts = [("rank", rank), ("device", Some(device as u64).filter(|device| *device > 0))];
        for (part, number) in parts.into_iter().filter_map(|(part, number)| number.map(|number| (part, number))) {
            _ = write!(name, ".{part}{number}");
            _ = write!(title, ", {part} {number}");
        }
        fs::create_dir_all(&self.folder)?;
        let path = self.folder.join(name + ".html");
        symmalloc_files::write_whole(&path, page(allocator, error, &title).as_bytes())?;
        Ok(Some(path))
    }
}

/// The memory of a heap.
#[derive(Default)]
struct HeapState {
    live_bytes: u64,
    reserved_bytes: u64,
    free_bytes: u64,
    free_blocks: u64,
    largest_free_bytes: u64,
}

/// Returns the page as HTML.
fn page<B: Backend, L: Lock>(allocator: &generic::Allocator<B, L>, error: &OutOfMemory, title: &str) -> String {
    let mut heaps: BTreeMap<HeapId, HeapState> = BTreeMap::new();
    // Live allocations, grouped by name, or by size if they have no name.
    let mut holders: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for segment in allocator.snapshot().segments {
        let heap = heaps.entry(segment.heap).or_default();
        heap.reserved_bytes += segment.mapped_bytes;
        for block in &segment.blocks {
            match &block.state {
                BlockStateSnapshot::Allocated { requested_bytes, name, .. } => {
                    let name = name.as_deref();
                    let label = name
                        .map_or_else(|| format!("without a name, {} each", Amount(*requested_bytes)), str::to_owned);
                    let (number, bytes) = holders.entry(label).or_default();
                    (*number, *bytes) = (*number + 1, *bytes + requested_bytes);
                    heap.live_bytes += requested_bytes;
                }
                BlockStateSnapshot::Free { .. } => {
                    heap.free_bytes += block.size_bytes;
                    heap.free_blocks += 1;
                    heap.largest_free_bytes = heap.largest_free_bytes.max(block.size_bytes);
                }
                _ => {}
            }
        }
    }
    let mut holders: Vec<(String, (u64, u64))> = holders.into_iter().collect();
    holders.sort_by(|(one, (_, bytes)), (other, (_, others))| others.cmp(bytes).then_with(|| one.cmp(other)));
    let sum = |of: fn(&HeapState) -> u64| heaps.values().map(of).sum::<u64>();
    let (reserved, free) = (sum(|heap| heap.reserved_bytes), sum(|heap| heap.free_bytes));
    let live_bytes = sum(|heap| heap.live_bytes);
    let mut facts = vec![
        ("failed", format!("{} for {}", Amount(error.requested_bytes), heap_words(HeapId { pool: error.pool, group: StreamGroup::One(error.stream) }))),
        (
            "then",
            format!(
                "{} live, {} reserved; free: {} (blocks: {}, largest: {})",
                Amount(live_bytes),
                Amount(reserved),
                Amount(free),
                sum(|heap| heap.free_blocks),
                Amount(heaps.values().map(|heap| heap.largest_free_bytes).max().unwrap_or(0))
            ),
        ),
        ("why, and what to do", error.to_string()),
        (
            "before",
            "SYMMALLOC_TRACE=job-%r.trace.zst records every op of the next run; `symmalloc report job-0.trace.zst -o job.html` shows \
             them, and which settings serve the request"
                .to_owned(),
        ),
    ];
    facts.extend(pools_text(&heaps, error.pool).map(|text| ("where", text)));
    let rows =
        |cells: &[String]| cells.iter().fold(String::new(), |row, cell| row + &format!("<td>{}</td>", escaped(cell)));
    let mut out = format!(
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>{0}</title><style>{STYLE}</style></head><body><h1>{0}</h1><table>",
        escaped(title)
    );
    for (word, text) in facts {
        out += &format!("<tr><th>{word}</th>{}</tr>", rows(&[text]));
    }
    out += "</table><h2>What holds memory</h2><table><tr><th>allocations</th><th>number</th><th>bytes</th></tr>";
    let others = holders.split_off(holders.len().min(HOLDERS_MAX));
    if !others.is_empty() {
        let sum = others.iter().fold((0, 0), |(number, bytes), (_, (one, more))| (number + one, bytes + more));
        holders.push(("all others".to_owned(), sum));
    }
    for (label, (number, bytes)) in holders {
        out += &format!("<tr>{}</tr>", rows(&[label, number.to_string(), Amount(bytes).to_string()]));
    }
    out += "</table><h2>Free memory</h2><table><tr><th>heap</th><th>live</th><th>reserved</th><th>free</th><th>blocks</th><th>largest</th></tr>";
    for (key, heap) in &heaps {
        let HeapState { live_bytes, reserved_bytes, free_bytes, free_blocks, largest_free_bytes } = heap;
        let [live, reserved, free, largest] =
            [live_bytes, reserved_bytes, free_bytes, largest_free_bytes].map(|bytes| Amount(*bytes).to_string());
        let cells = [heap_words(*key), live, reserved, free, free_blocks.to_string(), largest];
        out += &format!("<tr>{}</tr>", rows(&cells));
    }
    out + "</table></body></html>\n"
}

/// Describes what each pool holds: first the pool of the request, then the pools that hold most. Returns `None` if
/// there is only one pool.
fn pools_text(heaps: &BTreeMap<HeapId, HeapState>, own: PoolId) -> Option<String> {
    // For each pool: live, reserved and free bytes.
    let mut pools: BTreeMap<PoolId, [u64; 3]> = BTreeMap::from([(own, [0; 3])]);
    for (HeapId { pool, .. }, heap) in heaps {
        let sums = pools.entry(*pool).or_default();
        let bytes = [heap.live_bytes, heap.reserved_bytes, heap.free_bytes];
        sums.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
    }
    if pools.len() < 2 {
        return None;
    }
    let mut pools: Vec<(PoolId, [u64; 3])> = pools.into_iter().collect();
    pools.sort_by_key(|(pool, [_, reserved, _])| (*pool != own, Reverse(*reserved), *pool));
    let others = pools.split_off(pools.len().min(POOLS_MAX));
    let amounts = |[live, reserved, free]: [u64; 3]| {
        format!("{} live, {} reserved, {} free", Amount(live), Amount(reserved), Amount(free))
    };
    let mut parts: Vec<String> = pools
        .iter()
        .map(|(pool, sums)| {
            let of_request = if *pool == own { ", of the request" } else { "" };
            format!("pool {}{of_request}: {}", pool.0, amounts(*sums))
        })
        .collect();
    if !others.is_empty() {
        let add = |[live, reserved, free]: [u64; 3], (_, sums): &(PoolId, [u64; 3])| {
            [live + sums[0], reserved + sums[1], free + sums[2]]
        };
        parts.push(format!("other pools ({}): {}", others.len(), amounts(others.iter().fold([0; 3], add))));
    }
    Some(parts.join("; "))
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:1rem auto;padding:0 1rem}\
table{border-collapse:collapse}th,td{text-align:left;padding:.25rem 1rem .25rem 0;vertical-align:top;border-bottom:1px solid #bbb}";

/// Escapes text for HTML, and drops control characters.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars().filter(|character| !character.is_control()) {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::PoolId;
    use symmalloc_core::errors::AllocateError;
    use symmalloc_sim::SimBackend;

    #[test]
    fn only_a_report_into_a_folder_is_an_action() {
        let parsed = |text: &str| text.parse::<OnOutOfMemory>();
        assert_eq!(parsed("report:/tmp/x").unwrap().folder(), Path::new("/tmp/x"));
        assert_eq!(parsed(" report: a b ").unwrap().folder(), Path::new("a b"));
        for text in ["", "report", "report:", "report: ", "page:/tmp", "/tmp"] {
            assert_eq!(parsed(text), Err(OnOutOfMemoryError), "{text}");
        }
    }

    #[test]
    fn the_page_states_what_failed_and_what_holds_the_memory() {
        // The pool keeps its free memory, so that the page can show it.
        let config = "total_limit_mb:64,reclaim:never".parse().unwrap();
        let allocator = symmalloc_core::Allocator::new(SimBackend::builder().build(), config).unwrap();
        let stream = allocator.register_stream().unwrap();
        let _live = allocator.allocate_named(PoolId::DEFAULT, stream, 40 << 20, "model.py:40 <forward>").unwrap();
        let freed = allocator.allocate(PoolId::DEFAULT, stream, 8 << 20).unwrap();
        let _live = allocator.allocate(PoolId::DEFAULT, stream, 4 << 20).unwrap();
        allocator.free(freed.handle).unwrap();
        let Err(AllocateError::OutOfMemory(error)) = allocator.allocate(PoolId::DEFAULT, stream, 32 << 20) else {
            panic!("44 + 32 MiB do not fit into 64");
        };
        let folder = tempfile::tempdir().unwrap();
        let action = OnOutOfMemory { folder: folder.path().join("new/folder") };
        let digest = allocator.digest(PoolId::DEFAULT).unwrap();
        let path = action.write(&allocator, &error, 1).unwrap().expect("the first page");
        assert!(path.ends_with("new/folder/out-of-memory.device1.html"), "{path:?}");
        let page = fs::read_to_string(&path).unwrap();
        for wanted in [
            "32.00 MiB for pool 0, stream 0",
            "44.00 MiB live, 52.00 MiB reserved; free: 8.00 MiB (blocks: 1, largest: 8.00 MiB)",
            "model.py:40 &lt;forward&gt;</td><td>1</td><td>40.00 MiB",
            "without a name, 4.00 MiB each",
        ] {
            assert!(page.contains(wanted), "no {wanted:?} in {page}");
        }
        assert_eq!(allocator.digest(PoolId::DEFAULT).unwrap(), digest, "the page changes nothing");
        for _ in 0..2 * PAGES_MAX {
            action.write(&allocator, &error, 1).unwrap();
        }
        assert_eq!(action.write(&allocator, &error, 1).unwrap(), None, "pages are limited");
    }

    #[test]
    fn the_page_states_which_pools_hold_the_memory() {
        let config = "total_limit_mb:256,reclaim:never".parse().unwrap();
        let allocator = symmalloc_core::Allocator::new(SimBackend::builder().build(), config).unwrap();
        let stream = allocator.register_stream().unwrap();
        let mut pools = vec![PoolId::DEFAULT];
        pools.extend((0..7).map(|_| allocator.create_pool("reclaim:never".parse().unwrap()).unwrap()));
        for (pool, mib) in pools.iter().zip([4_u64, 8, 16, 2, 2, 2, 2, 2]) {
            let freed = allocator.allocate(*pool, stream, mib << 20).unwrap();
            let _live = allocator.allocate(*pool, stream, 2 << 20).unwrap();
            allocator.free(freed.handle).unwrap();
        }
        let refused = |pool| match allocator.allocate(pool, stream, 250 << 20) {
            Err(AllocateError::OutOfMemory(error)) => error,
            other => panic!("{other:?}"),
        };
        let page = page(&allocator, &refused(pools[1]), "Out of memory");
        let wanted = "pool 1, of the request: 2.00 MiB live, 10.00 MiB reserved, 8.00 MiB free; \
                      pool 2: 2.00 MiB live, 18.00 MiB reserved, 16.00 MiB free; \
                      pool 0: 2.00 MiB live, 6.00 MiB reserved, 4.00 MiB free";
        assert!(page.contains(wanted), "no {wanted:?} in {page}");
        assert!(page.contains("other pools (3): 6.00 MiB live, 12.00 MiB reserved, 6.00 MiB free"), "{page}");
        assert!(page.contains("pool 2, stream 0</td><td>2.00 MiB</td><td>18.00 MiB</td><td>16.00 MiB"), "{page}");
        // A pool that holds nothing yet is listed as well.
        let empty = allocator.create_pool("reclaim:never".parse().unwrap()).unwrap();
        let text = super::page(&allocator, &refused(empty), "Out of memory");
        assert!(text.contains("pool 8, of the request: 0 B live, 0 B reserved, 0 B free"), "{text}");
    }
}

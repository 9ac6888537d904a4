//! The report of a process to `symmalloc run` at exit: one file in the run's folder, `PID.json`.
//!
//! `PID.begun` is written at the first allocation. A process that is killed leaves `PID.begun` without `PID.json`.

use crate::context::Context;
use crate::live::LIVE;
use crate::settings::{Settings, rank, settings};
use crate::{forks, recordings, tally, watch};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs::File;
use std::sync::{Mutex, Once, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_files::say;

/// Maximum number of leak sizes that are reported.
const LEAK_SIZES_MAX: usize = 100;

/// Reports of contexts that have ended.
static ENDED: Mutex<Vec<Value>> = Mutex::new(Vec::new());
/// Peaks of reserved bytes by device, from before the program reset them.
static PEAKS: Mutex<BTreeMap<c_int, u64>> = Mutex::new(BTreeMap::new());

/// Prepares the report at exit when the process first allocates, if `symmalloc run` requested one.
#[inline]
pub(crate) fn begin() {
    static IS_ASKED: Once = Once::new();
    IS_ASKED.call_once(|| {
        let Some(settings) = settings() else { return };
        if settings.folder.is_some() {
            tally::begin();
            write_file(
                settings,
                "begun",
                &json!({ "process": std::process::id(), "program": program(), "rank": rank() }),
            );
        }
        if settings.folder.is_some() || settings.record.is_some() || settings.is_debugged() {
            // SAFETY: the function takes nothing, and this library is never closed.
            let refused = unsafe { libc::atexit(finish) };
            if refused != 0 {
                say(format_args!("cannot register the exit handler, no summary will be written: out of memory"));
            }
        }
    });
}

fn program() -> String {
    std::env::args_os().next().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn write_file(settings: &Settings, suffix: &str, value: &Value) {
    let Some(folder) = &settings.folder else { return };
    let name = format!("{}.{suffix}", std::process::id());
    let path = folder.join(name);
    if let Err(error) = symmalloc_files::write_whole(&path, value.to_string().as_bytes()) {
        say(format_args!("{}: {error}", path.display()));
        // An empty file needs no space on a full disk.
        let _unreported = File::create_new(folder.join(format!("{}.unwritten", std::process::id())));
    }
}

extern "C" fn finish() {
    // A panic must not unwind into the C library.
    let _panicked = std::panic::catch_unwind(|| {
        if forks::is_forked() {
            return;
        }
        watch::finish();
        let Some(settings) = settings() else { return };
        let ended = std::mem::take(&mut *ENDED.lock().unwrap_or_else(PoisonError::into_inner));
        let serving = Context::all().filter(|context| !context.is_gone());
        let served = serving.map(|context| {
            if settings.is_debugged() {
                // Thread-local state of this thread, also that of the driver, may have been destroyed already.
                let check = std::thread::Builder::new().spawn(move || report_damage(context));
                let _panicked = check.map(std::thread::JoinHandle::join);
            }
            recordings::stop(context.allocator());
            of_context(context)
        });
        let devices: Vec<Value> = ended.into_iter().chain(served).chain(of_watched()).collect();
        let failures = recordings::take_failures().into_iter();
        let incomplete: Vec<Value> = failures.map(|(trace, cause)| json!({ "trace": trace, "cause": cause })).collect();
        let tally = tally::read();
        let report = json!({
            "process": std::process::id(),
            "program": program(),
            "rank": rank(),
            "watched": settings.is_watched,
            "allocations": tally.allocations,
            "frees": tally.frees,
            "passed_on": tally.passed_on,
            "nanoseconds": tally.nanoseconds,
            "peak_live_bytes": tally.peak_live_bytes,
            "peak_driver_bytes": tally.peak_driver_bytes,
            "devices": devices,
            "incomplete": incomplete,
        });
        write_file(settings, "json", &report);
    });
}

/// Maximum number of damaged blocks that the exit reports for a context.
const REPORTS_MAX: usize = 32;

/// Checks the memory of a context, if the configuration has debugging options, and reports damage on standard error. Blocks until the work
/// of the context is done.
pub(crate) fn report_damage(context: &Context) {
    if !settings().is_some_and(Settings::is_debugged) {
        return;
    }
    // Work of any stream may use memory of `cudaMalloc`. If the device is lost, nothing is found.
    let _lost = context.allocator().device().synchronize();
    // Each check compares all blocks again.
    for _ in 0..REPORTS_MAX {
        let Err(damage) = context.allocator().core().check_memory() else { return };
        say(format_args!("memory was damaged: {damage}"));
    }
}

/// Stores the report of a context that is about to end, for the report at exit.
pub(crate) fn keep(context: &'static Context) {
    if settings().is_some_and(|settings| settings.folder.is_some()) {
        let report = of_context(context);
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).push(report);
    }
}

/// Stores the peaks before the program resets them.
pub(crate) fn keep_peaks(context: &Context) {
    let peak = context.allocator().stats().reserved_bytes.peak;
    let mut peaks = PEAKS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = peaks.entry(context.device()).or_default();
    *known = peak.max(*known);
}

fn of_context(context: &'static Context) -> Value {
    keep_peaks(context);
    let peaks = PEAKS.lock().unwrap_or_else(PoisonError::into_inner);
    let core = context.allocator().core();
    let pools = (0..core.pool_count()).map(PoolId);
    let digests = pools.filter_map(|pool| core.digest(pool).ok().map(|digest| (pool, digest)));
    let digests: Vec<Value> = digests
        .filter(|(_, digest)| digest.ops > 0)
        .map(|(pool, digest)| json!({ "pool": pool.0, "ops": digest.ops, "digest": digest.to_string() }))
        .collect();
    let live = LIVE.all().into_iter();
    let stats = context.allocator().stats();
    json!({
        "device": context.device(),
        "trace": recordings::file_of(context.device() as usize),
        "peak_reserved_bytes": peaks.get(&context.device()),
        "growths": stats.growth_count,
        "refused": stats.out_of_memory_count,
        "digests": digests,
        "leaks": leaks(live.filter(|found| std::ptr::eq(found.known.context, context)).map(|found| found.size_bytes)),
    })
}

fn of_watched() -> Vec<Value> {
    let of_device = |(device, live): (c_int, Vec<u64>)| {
        json!({
            "device": device,
            "trace": recordings::file_of(device as usize),
            "leaks": leaks(live),
        })
    };
    watch::all_devices().into_iter().map(of_device).collect()
}

/// Returns the live allocations as counts by size, largest total first.
fn leaks(sizes: impl IntoIterator<Item = u64>) -> Vec<Value> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    sizes.into_iter().for_each(|size_bytes| *counts.entry(size_bytes).or_default() += 1);
    let mut leaks: Vec<(u64, u64)> = counts.into_iter().collect();
    leaks.sort_by_key(|(size_bytes, count)| std::cmp::Reverse((size_bytes * count, *size_bytes)));
    let largest = leaks.into_iter().take(LEAK_SIZES_MAX);
    largest.map(|(size_bytes, count)| json!({ "size_bytes": size_bytes, "count": count })).collect()
}

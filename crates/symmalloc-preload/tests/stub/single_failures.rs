//! Each driver call fails once, and the program continues as if nothing had happened: see `stub_process::sweep`.

use crate::driver::*;
use crate::environment::preload;
use std::collections::BTreeMap;
use std::ffi::c_int;
use stub_process::cuda::{Live, live};
use stub_process::{Repeatable, stub_test, sweep};

/// A step of a program. Streams, pools and blocks have numbers.
#[derive(Clone, Copy, Debug)]
enum Step {
    BeginStream(u8),
    EndStream(u8),
    CreatePool(u8),
    DestroyPool(u8),
    /// Selects a pool, or the default one.
    Select(Option<u8>),
    /// Allocates on a stream, from the selected pool.
    Take(u8, u8, usize),
    /// Allocates on a stream, from this pool.
    TakeFrom(u8, u8, u8, usize),
    TakeNow(u8, usize),
    Free(u8, u8),
    FreeNow(u8),
    Trim(u8),
    ResetPeaks(u8),
}
use Step::*;

#[derive(Default)]
struct Program {
    streams: BTreeMap<u8, u64>,
    pools: BTreeMap<u8, u64>,
    blocks: BTreeMap<u8, u64>,
}

#[derive(Debug, PartialEq)]
struct State {
    live: Live,
    /// Size of each block, and the number of its pool.
    blocks: Vec<(u8, u64, Option<u8>)>,
    /// Used bytes of each pool, and their peak.
    pools: Vec<[u64; 2]>,
    streams: usize,
}

fn outcome(code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("code {code}")) }
}

fn attribute(number: c_int, address: u64) -> u64 {
    let mut value = 0_u64;
    assert_eq!(pointer_attribute((&raw mut value).cast(), number, address), 0);
    value
}

fn default_of_device() -> Result<u64, String> {
    let mut pool = 0;
    outcome(default_pool(&raw mut pool, 0)).map(|()| pool)
}

impl Program {
    fn free(&mut self, block: u8, free: impl FnOnce(u64) -> c_int) -> Result<(), String> {
        outcome(free(self.blocks[&block]))?;
        self.blocks.remove(&block);
        Ok(())
    }
}

impl Repeatable for Program {
    type Step = Step;
    type Error = String;
    type Held = State;

    fn run(&mut self, step: &Step) -> Result<(), String> {
        let mut made = 0;
        match *step {
            BeginStream(stream) => {
                outcome(stream_create(&raw mut made, 1))?;
                self.streams.insert(stream, made);
            }
            EndStream(stream) => {
                outcome(stream_destroy(self.streams[&stream]))?;
                self.streams.remove(&stream);
            }
            CreatePool(pool) => {
                // `CUmemPoolProps`: pinned memory of device 0.
                let mut properties = [0_i32; 24];
                (properties[0], properties[2]) = (1, 1);
                outcome(pool_create(&raw mut made, properties.as_ptr().cast()))?;
                self.pools.insert(pool, made);
            }
            DestroyPool(pool) => {
                outcome(pool_destroy(self.pools[&pool]))?;
                self.pools.remove(&pool);
            }
            Select(pool) => outcome(set_pool(0, pool.map_or_else(default_of_device, |pool| Ok(self.pools[&pool]))?))?,
            Take(block, stream, size) => {
                outcome(mem_alloc_async(&raw mut made, size, self.streams[&stream]))?;
                self.blocks.insert(block, made);
            }
            TakeFrom(block, pool, stream, size) => {
                outcome(mem_alloc_from_pool(&raw mut made, size, self.pools[&pool], self.streams[&stream]))?;
                self.blocks.insert(block, made);
            }
            TakeNow(block, size) => {
                outcome(mem_alloc(&raw mut made, size))?;
                self.blocks.insert(block, made);
            }
            Free(block, stream) => {
                let stream = self.streams[&stream];
                self.free(block, |address| mem_free_async(address, stream))?;
            }
            FreeNow(block) => self.free(block, mem_free)?,
            Trim(pool) => outcome(pool_trim(self.pools[&pool], 0))?,
            ResetPeaks(pool) => {
                for peak in [6, 8] {
                    let mut zero = 0_u64;
                    outcome(set_pool_attribute(self.pools[&pool], peak, (&raw mut zero).cast()))?;
                }
            }
        }
        Ok(())
    }

    fn held(&self) -> State {
        let number_of = |raw: u64| self.pools.iter().find(|(_, pool)| **pool == raw).map(|(number, _)| *number);
        let block =
            |(number, address): (&u8, &u64)| (*number, attribute(12, *address), number_of(attribute(17, *address)));
        let bytes = |pool: &u64| {
            [7, 8].map(|number| {
                let mut value = 0_u64;
                assert_eq!(pool_attribute(*pool, number, (&raw mut value).cast()), 0);
                value
            })
        };
        State {
            // Events are created when they are first needed, and a failed call may release cached memory.
            live: Live { events: 0, device_bytes: 0, ranges: 0, mappings: 0, ..live() },
            blocks: self.blocks.iter().map(block).collect(),
            pools: self.pools.values().map(bytes).collect(),
            streams: self.streams.len(),
        }
    }

    fn end(mut self) -> State {
        std::mem::take(&mut self.blocks).into_values().for_each(|block| assert_eq!(mem_free(block), 0));
        let default = default_of_device().expect("the device has one");
        assert_eq!(set_pool(0, default), 0);
        std::mem::take(&mut self.pools).into_values().for_each(|pool| assert_eq!(pool_destroy(pool), 0));
        std::mem::take(&mut self.streams).into_values().for_each(|stream| assert_eq!(stream_destroy(stream), 0));
        assert_eq!(pool_trim(default, 0), 0);
        self.held()
    }
}

/// Calls whose failure may have no consequence: they restore a context or a mode, or release memory. Growth is tried again after cached memory
/// was released.
const SILENT: [&str; 10] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuThreadExchangeStreamCaptureMode",
];

/// Calls that do not fail here: the test makes them to read what it holds, or the driver serves the request after their failure.
const LEFT_OUT: [&str; 6] = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuDeviceGetMemPool",
    "cuMemPoolGetAttribute",
    "cuPointerGetAttribute",
    "cuStreamGetCtx",
];

fn check(what: &str, silent: &[&str], steps: &[Step]) {
    let mut unreported = sweep(what, steps, &LEFT_OUT, || {
        begin(0);
        Program::default()
    });
    unreported.retain(|name| !SILENT.iter().chain(silent).any(|known| known == name));
    assert!(unreported.is_empty(), "{what}: failures of these calls must be reported: {unreported:?}");
}

stub_test!(streams_survive_any_failed_call, ["LD_PRELOAD" = &preload()], {
    check(
        "streams",
        &[],
        &[
            BeginStream(0),
            BeginStream(1),
            Take(1, 0, 2 * MIB),
            Take(2, 1, 3 * MIB),
            // Another stream than the one that allocated the memory.
            Free(1, 1),
            EndStream(0),
            BeginStream(2),
            Take(3, 2, 2 * MIB),
            EndStream(1),
            BeginStream(3),
            Take(4, 3, 5 * MIB),
            Free(3, 2),
            Free(2, 3),
            TakeNow(5, MIB),
            FreeNow(5),
            Free(4, 2),
            EndStream(2),
            EndStream(3),
        ],
    );
});

stub_test!(pools_survive_any_failed_call, ["LD_PRELOAD" = &preload()], {
    check(
        "pools",
        // A trim releases what it can.
        &["cuEventRecord", "cuEventSynchronize", "cuMemAddressFree"],
        &[
            BeginStream(0),
            CreatePool(0),
            CreatePool(1),
            Take(1, 0, 2 * MIB),
            Select(Some(0)),
            Take(2, 0, 3 * MIB),
            TakeFrom(3, 1, 0, 40 * MIB),
            Free(2, 0),
            Trim(0),
            ResetPeaks(1),
            Free(3, 0),
            Trim(1),
            Take(4, 0, 2 * MIB),
            Free(4, 0),
            DestroyPool(0),
            Take(5, 0, MIB),
            Select(None),
            Free(1, 0),
            FreeNow(5),
            DestroyPool(1),
            EndStream(0),
        ],
    );
});

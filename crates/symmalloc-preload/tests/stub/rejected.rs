//! Calls that the driver refuses change nothing, and destructive calls change only what they destroy. Everything that a program can
//! observe is compared around each call, on two devices.

use crate::driver::*;
use crate::environment::preload;
use std::ffi::{c_int, c_void};
use stub_process::cuda::{Live, fail, heal, live};
use stub_process::stub_test;

const DEVICES: [c_int; 2] = [0, 1];
/// Sizes of the probes, which no other allocation has.
const PROBE: usize = 777;

/// A program on two devices.
struct Program {
    contexts: [usize; 2],
    streams: [u64; 2],
    /// Pools that the program created, with their devices.
    pools: Vec<(u64, c_int)>,
    /// Live allocations.
    blocks: Vec<u64>,
}

/// Everything that a program can observe.
#[derive(Clone, Debug, PartialEq)]
struct Observed {
    /// For each device: the pool that serves an asynchronous allocation, its address, and the address of a synchronous one.
    probes: Vec<(u64, u64, u64)>,
    /// For each device: free memory.
    free: Vec<usize>,
    /// Used memory of each pool; `None` if the pool does not exist.
    used: Vec<Option<u64>>,
    /// Start and size of each block, and its pool.
    blocks: Vec<Option<(u64, u64, u64)>>,
    live: Live,
}

fn attribute(number: c_int, address: u64) -> Option<u64> {
    let mut value = 0_u64;
    (pointer_attribute((&raw mut value).cast(), number, address) == 0).then_some(value)
}

fn create_pool(device: c_int) -> u64 {
    // `CUmemPoolProps`: pinned memory of the device.
    let mut properties = [0_i32; 24];
    (properties[0], properties[2], properties[3]) = (1, 1, device);
    let mut pool = 0;
    assert_eq!(pool_create(&raw mut pool, properties.as_ptr().cast()), 0);
    pool
}

fn from_pool(size: usize, pool: u64, stream: u64) -> Result<u64, c_int> {
    let mut address = 0;
    match mem_alloc_from_pool(&raw mut address, size, pool, stream) {
        0 => Ok(address),
        code => Err(code),
    }
}

impl Program {
    fn new() -> Self {
        let contexts = DEVICES.map(begin);
        let streams = contexts.map(|context| {
            assert_eq!(set_current(context), 0);
            stream()
        });
        let pools = DEVICES.into_iter().chain(DEVICES).map(|device| (create_pool(device), device)).collect();
        let mut program = Program { contexts, streams, pools, blocks: Vec::new() };
        for device in DEVICES {
            program.enter(device);
            let stream = program.streams[device as usize];
            let pool = program.pools[device as usize].0;
            program.blocks.extend([
                alloc(2 * MIB).expect("memory should suffice"),
                alloc_async(3 * MIB, stream).expect("memory should suffice"),
                from_pool(MIB, pool, stream).expect("memory should suffice"),
            ]);
        }
        program
    }

    fn enter(&self, device: c_int) {
        assert_eq!(set_current(self.contexts[device as usize]), 0);
    }

    fn observe(&self) -> Observed {
        let (mut probes, mut free) = (Vec::new(), Vec::new());
        for device in DEVICES {
            self.enter(device);
            let stream = self.streams[device as usize];
            let probe = alloc_async(PROBE, stream).expect("memory should suffice");
            let pool = attribute(17, probe).expect("a live allocation");
            assert_eq!(mem_free_async(probe, stream), 0);
            let plain = alloc(PROBE).expect("memory should suffice");
            assert_eq!(mem_free(plain), 0);
            probes.push((pool, probe, plain));
            let (mut left, mut total) = (0, 0);
            assert_eq!(mem_info(&raw mut left, &raw mut total), 0);
            free.push(left);
        }
        let used = |(pool, _): &(u64, c_int)| {
            let mut value = 0_u64;
            (pool_attribute(*pool, 7, (&raw mut value).cast()) == 0).then_some(value)
        };
        let block =
            |address: &u64| Some((attribute(11, *address)?, attribute(12, *address)?, attribute(17, *address)?));
        Observed {
            probes,
            free,
            used: self.pools.iter().map(used).collect(),
            blocks: self.blocks.iter().map(block).collect(),
            // Events are created when a stream first needs them.
            live: Live { events: 0, ..live() },
        }
    }

    fn default_pool(device: c_int) -> u64 {
        let mut pool = 0;
        assert_eq!(default_pool(&raw mut pool, device), 0);
        pool
    }
}

/// A call that fails. Returns its code.
type Refused = (&'static str, fn(&Program) -> c_int);

const REFUSED: &[Refused] = &[
    ("cuMemFree of an interior address", |it| mem_free(it.blocks[0] + 512)),
    ("cuMemFree of no address", |_| mem_free(0x1234)),
    ("cuMemFreeAsync of an interior address", |it| mem_free_async(it.blocks[1] + 512, it.streams[0])),
    ("cuMemFreeAsync on no stream", |it| mem_free_async(it.blocks[1], 0x666)),
    ("cuMemAlloc of nothing", |_| alloc(0).expect_err("refused")),
    ("cuMemAlloc of too much", |_| alloc(usize::MAX / 4).expect_err("refused")),
    ("cuMemAllocAsync of nothing", |it| alloc_async(0, it.streams[0]).expect_err("refused")),
    ("cuMemAllocAsync on no stream", |_| alloc_async(MIB, 0x666).expect_err("refused")),
    ("cuMemAllocFromPoolAsync from no pool", |it| from_pool(MIB, 0x666, it.streams[0]).expect_err("refused")),
    ("cuMemAllocFromPoolAsync on no stream", |it| from_pool(MIB, it.pools[0].0, 0x666).expect_err("refused")),
    ("cuDeviceSetMemPool of no pool", |_| set_pool(0, 0x666)),
    ("cuMemPoolDestroy of no pool", |_| pool_destroy(0x666)),
    ("cuMemPoolTrimTo of no pool", |_| pool_trim(0x666, 0)),
    ("cuMemPoolSetAttribute of no pool", |_| {
        let mut zero = 0_u64;
        set_pool_attribute(0x666, 8, (&raw mut zero).cast())
    }),
    ("cuMemPoolGetAttribute of no attribute", |it| {
        let mut value = 0_u64;
        pool_attribute(it.pools[0].0, 99, (&raw mut value).cast())
    }),
    ("cuMemPoolSetAccess of no pool", |_| pool_access(0x666, [[1, 1, 3]].as_ptr(), 1)),
    ("cuPointerGetAttribute of no address", |_| {
        let mut value = 0_u64;
        pointer_attribute((&raw mut value).cast(), 11, 0x1234)
    }),
    ("cuMemGetAddressRange of no address", |_| address_range(std::ptr::null_mut(), std::ptr::null_mut(), 0x1234)),
    ("cuIpcGetMemHandle of served memory", |it| ipc_handle([0_u8; 64].as_mut_ptr().cast::<c_void>(), it.blocks[0])),
];

/// A call of the program that fails because a driver call fails. Begins with the driver call.
type Failing = (&'static str, &'static str, fn(&Program) -> c_int);

const FAILING: &[Failing] = &[
    ("cuCtxSynchronize", "a free", |it| mem_free(it.blocks[0])),
    ("cuDeviceSetMemPool", "a change of the current pool", |it| set_pool(0, it.pools[0].0)),
    ("cuMemPoolDestroy", "the end of a pool", |it| pool_destroy(it.pools[0].0)),
    ("cuMemPoolTrimTo", "a trim", |it| pool_trim(it.pools[0].0, 0)),
    ("cuStreamDestroy_v2", "the end of a stream", |it| stream_destroy(it.streams[0])),
];

stub_test!(
    calls_that_fail_change_nothing,
    ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "2", "STUB_MEMORY_BYTES" = "4294967296"],
    {
        let program = Program::new();
        // The first probes reserve memory, and the first end of a stream makes a stream in its place.
        program.observe();
        fail("cuStreamDestroy_v2", 1, 719);
        assert_eq!(stream_destroy(program.streams[0]), 719);
        heal();
        for current in [None, Some(0), Some(1)] {
            if let Some(device) = current {
                program.enter(device);
                assert_eq!(set_pool(device, program.pools[device as usize].0), 0);
            }
            let before = program.observe();
            for (what, call) in REFUSED {
                for device in DEVICES {
                    program.enter(device);
                    assert_ne!(call(&program), 0, "{what} must fail");
                    assert_eq!(program.observe(), before, "{what}, device {device}");
                }
            }
            for (name, what, call) in FAILING {
                program.enter(0);
                fail(name, 1, 719);
                let code = call(&program);
                heal();
                assert_eq!((code, program.observe()), (719, before.clone()), "{what}, {name} fails");
            }
        }
    }
);

stub_test!(
    the_end_of_a_pool_changes_only_this_pool,
    ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "2", "STUB_MEMORY_BYTES" = "4294967296"],
    {
        // For each device: the pool that is current, the default one or one of the program's.
        for current in [[None, None], [Some(0), None], [Some(0), Some(1)], [Some(2), Some(3)]] {
            for ended in 0..4 {
                let program = Program::new();
                for (device, pool) in DEVICES.into_iter().zip(current) {
                    if let Some(pool) = pool {
                        assert_eq!(set_pool(device, program.pools[pool].0), 0);
                    }
                }
                let (pool, device) = program.pools[ended];
                let before = program.observe();
                assert_eq!(pool_destroy(pool), 0);
                let after = program.observe();
                let context = format!("current {current:?}, pool {ended} was destroyed");
                for other in DEVICES {
                    let is_current = current[other as usize] == Some(ended);
                    let expected =
                        if is_current { Program::default_pool(device) } else { before.probes[other as usize].0 };
                    assert_eq!(after.probes[other as usize].0, expected, "{context}: the pool of device {other}");
                    if other != device {
                        let of = |it: &Observed| (it.probes[other as usize], it.free[other as usize]);
                        assert_eq!(of(&after), of(&before), "{context}: device {other}");
                    }
                }
                let mut used = before.used;
                used[ended] = None;
                assert_eq!(after.used, used, "{context}");
                // Allocations outlive their pool. Their pool attribute is not defined then.
                let range = |block: &Option<(u64, u64, u64)>| block.map(|(start, size, _)| (start, size));
                let ranges = |it: &[Option<(u64, u64, u64)>]| it.iter().map(range).collect::<Vec<_>>();
                assert_eq!(ranges(&after.blocks), ranges(&before.blocks), "{context}");
                for (at, block) in program.blocks.iter().enumerate() {
                    program.enter(at as c_int / 3);
                    assert_eq!(mem_free(*block), 0, "{context}: block {at}");
                }
                for device in DEVICES {
                    assert_eq!(set_pool(device, Program::default_pool(device)), 0);
                }
                for (pool, _) in &program.pools {
                    if *pool != program.pools[ended].0 {
                        assert_eq!(pool_destroy(*pool), 0);
                    }
                }
                program.streams.into_iter().for_each(|stream| assert_eq!(stream_destroy(stream), 0));
            }
        }
    }
);

//! Forked children: every call that releases something succeeds without effect, and no call crashes or blocks, even if another thread held
//! locks of the library at the fork.

use crate::class_calls::is_stream;
use crate::header::{Function, Kind, call, functions, valid};
use crate::library::*;
use crate::registrar::{POOL, Windows, allocator_of_torch, ranks_of};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use stub_process::{in_child, nccl_test, until};
use symmalloc_torch::*;

const GRAPH: (u64, u64) = (0, 7);
const BLOCKED: (u64, u64) = (0, 8);

static IS_ALLOCATING: AtomicBool = AtomicBool::new(false);
static MAY_RETURN: AtomicBool = AtomicBool::new(false);

/// A program's allocator that does not return until the test allows it. The library holds locks meanwhile.
unsafe extern "C" fn blocks(_context: *mut c_void, _bytes: usize) -> *mut c_void {
    IS_ALLOCATING.store(true, Ordering::Release);
    until(|| MAY_RETURN.load(Ordering::Acquire));
    null_mut()
}

fn begin(id: (u64, u64), stream: *mut c_void) {
    let mut number = 0;
    // SAFETY: the filter takes any context; an output pointer.
    done(unsafe { symmalloc_torch_begin_scope(0, id.0, id.1, Some(is_stream), stream, None, &raw mut number) });
}

/// One object of each kind that the library hands out.
struct Objects {
    allocator: Allocator,
    own: Allocator,
    pool: u32,
    tensor: Pointer,
    unordered: Pointer,
    registrar: *mut PoolRegistration,
    all_to_all: *mut RankAllToAll,
    announcement: *mut RankAnnouncement,
    dma_buf: *mut HeldDmaBuf,
    checkpoint: *mut PoolCheckpoint,
    opened: *const OpenedMemory,
}

impl Objects {
    fn new(allocator: Allocator, comm: *mut c_void, stream: *mut c_void) -> Self {
        let pool = allocator.create_pool(Some(POOL));
        let registrar = Windows::new(allocator, pool, comm).0;
        let (mut all_to_all, mut announcement, mut dma_buf) = (null_mut(), null_mut(), null_mut());
        let (mut checkpoint, mut opened, mut text) = (null_mut(), null(), null_mut::<c_char>());
        let (mut unordered, mut base, mut fd, mut offset) = (null_mut(), null_mut(), 0, 0);
        begin(GRAPH, stream);
        let tensor = torch::allocate(3 * MIB, stream);
        let held = allocator.allocate(0, 3 * MIB, null_mut());
        // SAFETY: live objects, C strings, and output pointers.
        unsafe {
            done(symmalloc_all_to_all_create(registrar, 0, &raw mut all_to_all));
            done(symmalloc_announce_begin(registrar, c"theirs".as_ptr(), 0, stream, &raw mut announcement));
            let (out, address) = (&raw mut dma_buf, held as *const c_void);
            done(symmalloc_dma_buf_open(allocator.0, address, MIB, &raw mut fd, &raw mut offset, out));
            done(symmalloc_torch_checkpoint(0, GRAPH.0, GRAPH.1, &raw mut checkpoint));
            done(symmalloc_torch_share(held as *mut c_void, &raw mut text, &raw mut offset));
            done(symmalloc_torch_open(0, text, &raw mut base, &raw mut opened));
            symmalloc_release_bytes(text.cast());
            done(symmalloc_allocate_unordered(allocator.0, MIB, &raw mut unordered));
            done(symmalloc_torch_push_name(0, c"model".as_ptr()));
        }
        done(symmalloc_torch_push_pool(0, pool));
        let (own, unordered) = (Allocator::new(""), unordered as Pointer);
        Objects {
            allocator,
            own,
            pool,
            tensor,
            unordered,
            registrar,
            all_to_all,
            announcement,
            dma_buf,
            checkpoint,
            opened,
        }
    }

    /// Returns the calls that release something, in the order in which a program makes them.
    fn releases(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (torch, own, tensor) = (self.allocator.0 as usize, self.own.0 as usize, self.tensor);
        let (pool, graph) = (self.pool as usize, [GRAPH.0 as usize, GRAPH.1 as usize]);
        let [first, second] = graph;
        vec![
            ("symmalloc_torch_pop_name", vec![0]),
            ("symmalloc_torch_pop_pool", vec![0]),
            ("symmalloc_scope_end", vec![0, pool, 0, 0]),
            ("symmalloc_free", vec![torch, tensor]),
            ("symmalloc_free_on", vec![torch, tensor, 0]),
            ("symmalloc_free_unordered", vec![torch, self.unordered]),
            ("symmalloc_ort_free", vec![self.unordered]),
            ("symmalloc_ort_empty_cache", vec![]),
            ("symmalloc_torch_deallocate", vec![0, tensor, 0]),
            ("symmalloc_torch_end_scope", vec![0, first, second]),
            ("symmalloc_torch_pool_helps_out", vec![0, first, second, 0]),
            ("symmalloc_torch_release_use", vec![0, first, second]),
            ("symmalloc_torch_checkpoint_destroy", vec![self.checkpoint as usize]),
            ("symmalloc_torch_close", vec![self.opened as usize]),
            ("symmalloc_torch_trim", vec![first, second]),
            ("symmalloc_torch_trim", vec![0, 0]),
            ("symmalloc_dma_buf_close", vec![self.dma_buf as usize]),
            ("symmalloc_announce_end", vec![self.announcement as usize]),
            ("symmalloc_all_to_all_destroy", vec![self.all_to_all as usize]),
            ("symmalloc_registrar_destroy", vec![self.registrar as usize]),
            ("symmalloc_pool_reset", vec![torch, pool, 0]),
            ("symmalloc_pool_destroy", vec![torch, pool]),
            ("symmalloc_trim", vec![torch, 0]),
            ("symmalloc_trim_private", vec![torch, 0]),
            ("symmalloc_release_host_memory", vec![torch, 0]),
            ("symmalloc_trace_stop", vec![own]),
            ("symmalloc_destroy", vec![own]),
            ("symmalloc_release_bytes", vec![0]),
        ]
    }

    /// Returns a live object for an argument.
    fn object(&self, (name, kind): &(String, Kind)) -> Option<usize> {
        match (name.as_str(), kind) {
            ("registrar", Kind::Object) => Some(self.registrar as usize),
            ("all_to_all", Kind::Object) => Some(self.all_to_all as usize),
            ("dma_buf", Kind::Object) => Some(self.dma_buf as usize),
            ("checkpoint", Kind::Object) => Some(self.checkpoint as usize),
            (_, Kind::Object) => Some(0),
            _ => None,
        }
    }
}

fn named<'a>(functions: &'a [Function], name: &str) -> &'a Function {
    functions.iter().find(|function| function.name == name).unwrap_or_else(|| panic!("the header declares {name}"))
}

/// Parts of the names of functions that release something.
const RELEASING: [&str; 12] = [
    "destroy",
    "free",
    "close",
    "_end",
    "deallocate",
    "release",
    "pop_",
    "trim",
    "reset",
    "empty_cache",
    "stop",
    "helps_out",
];

/// Functions with such a name that release nothing: those of peaks, and the end of a step, which reports it.
const OTHERS: [&str; 3] = ["symmalloc_step_end", "symmalloc_reset_peaks", "symmalloc_torch_reset_peaks"];

nccl_test!(a_forked_child_releases_nothing_and_no_call_blocks_in_it, {
    ranks_of(1, allocator_of_torch, |_, allocator, comm, _| {
        let streams = Streams::new(2);
        let functions = functions();
        let objects = Objects::new(allocator, comm.raw(), streams.get(0));
        let releases = objects.releases();
        for function in &functions {
            let name = &function.name[..];
            let is_release = RELEASING.iter().any(|part| name.contains(part)) && !OTHERS.contains(&name);
            assert_eq!(is_release, releases.iter().any(|(release, _)| *release == name), "{name} in the table");
        }
        let source = symmalloc_source { allocate: Some(blocks), free: None, context: null_mut(), destroy: None };
        // SAFETY: functions that take any context.
        done(unsafe { symmalloc_torch_retain_pool(0, BLOCKED.0, BLOCKED.1, &raw const source) });
        begin(BLOCKED, streams.get(1));
        let stream = streams.get(1) as usize;
        let blocked = thread::spawn(move || {
            let mut out = null_mut();
            // SAFETY: a live stream, and an output pointer.
            unsafe { symmalloc_torch_allocate(0, stream as *mut c_void, MIB, 0, null(), &raw mut out) }
        });
        until(|| IS_ALLOCATING.load(Ordering::Acquire));
        let code = in_child(|| {
            assert!(symmalloc_torch_is_forked());
            for (name, values) in &releases {
                let function = named(&functions, name);
                let status = call(function, values) as u32;
                assert!(!function.has_status || status == SYMMALLOC_OK as u32, "{name}: {}", message());
            }
            for function in &functions {
                let arguments = function.arguments.iter();
                let value = |argument| objects.object(argument).or_else(|| valid(argument, allocator));
                let values: Vec<usize> = arguments.map(|argument| value(argument).expect("a value")).collect();
                let status = call(function, &values) as u32;
                let is_typed = status != SYMMALLOC_INTERNAL as u32;
                assert!(!function.has_status || is_typed, "{}: {}", function.name, message());
            }
        });
        assert_eq!(code, Some(0), "the child crashed or blocked");
        assert!(!symmalloc_torch_is_forked());
        MAY_RETURN.store(true, Ordering::Release);
        assert_eq!(blocked.join().expect("no panic"), SYMMALLOC_OUT_OF_MEMORY);
        done(symmalloc_torch_end_scope(0, BLOCKED.0, BLOCKED.1));
        // The child's calls had no effect on the parent: each object can be released, and a second time is an error.
        assert_eq!(allocator.placement(objects.tensor).requested_bytes, 3 << 20);
        assert_eq!(symmalloc_torch_pool_uses(0, GRAPH.0, GRAPH.1), 1);
        for (name, values) in &releases {
            let function = named(&functions, name);
            // These repeat an earlier release. The pools have no names in this test, and the trace was not started.
            let is_repeated = matches!(
                *name,
                "symmalloc_scope_end"
                    | "symmalloc_free_on"
                    | "symmalloc_ort_free"
                    | "symmalloc_torch_deallocate"
                    | "symmalloc_trace_stop"
            );
            if !is_repeated {
                let status = call(function, values) as u32;
                assert!(!function.has_status || status == SYMMALLOC_OK as u32, "{name}: {}", message());
            }
            let is_destroyed = function.arguments.len() == 1
                && matches!(function.arguments[0].1, Kind::Allocator | Kind::Object)
                && function.has_status
                && *name != "symmalloc_trace_stop";
            if is_destroyed {
                assert_eq!(call(function, values) as u32, SYMMALLOC_INVALID_ARGUMENT as u32, "{name} twice");
                assert!(message().contains("destroy each object once"), "{}", message());
            }
        }
    });
});

/// Returns the functions that destroy an object of their only argument.
fn destroyers() -> Vec<Function> {
    let is_object = |function: &Function| match &function.arguments[..] {
        [(_, Kind::Allocator)] => function.name == "symmalloc_destroy",
        [(_, Kind::Object)] => function.has_status,
        _ => false,
    };
    let functions: Vec<Function> = functions().into_iter().filter(is_object).collect();
    assert!(functions.len() >= 5, "destroy calls of all kinds");
    functions
}

stub_test!(a_destroy_call_rejects_what_no_create_call_returned, {
    let process = Allocator::of_torch();
    let held = process.allocate(0, MIB, null_mut());
    let buffer = [0_u64; 512];
    for function in destroyers() {
        for pointer in [process.0 as usize, held, buffer.as_ptr() as usize, 64, usize::MAX] {
            let status = call(&function, &[pointer]) as u32;
            assert_eq!(status, SYMMALLOC_INVALID_ARGUMENT as u32, "{}({pointer:#x})", function.name);
            assert!(message().contains("destroy each object once"), "{}", message());
        }
    }
    process.free(held);
    let other = process.allocate(0, MIB, null_mut());
    assert_eq!(other, held, "the process's allocator still works");
    let own = Allocator::new("");
    own.destroy();
    // SAFETY: the call compares the pointer only.
    assert_eq!(unsafe { symmalloc_destroy(own.0) }, SYMMALLOC_INVALID_ARGUMENT);
    // SAFETY: a C string of the library.
    assert!(!unsafe { CStr::from_ptr(symmalloc_error_message()) }.is_empty());
});

//! A tool for NVTX's memory extension, as compute-sanitizer is one: it keeps the reported ranges and blocks.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

/// The reported ranges and blocks.
struct Reported {
    /// Sizes by handle, which is the first address plus one.
    heaps: BTreeMap<usize, usize>,
    /// Size and name by address.
    blocks: BTreeMap<usize, (usize, Option<String>)>,
}

static REPORTED: Mutex<Reported> = Mutex::new(Reported { heaps: BTreeMap::new(), blocks: BTreeMap::new() });

fn with<T>(act: impl FnOnce(&mut Reported) -> T) -> T {
    act(&mut REPORTED.lock().expect("no panic"))
}

/// `nvtxExtModuleInfo_t`, up to the segments.
#[repr(C)]
pub struct Module {
    versions: [u16; 4],
    segment_count: usize,
    segments: *mut Segment,
}

/// `nvtxExtModuleSegment_t`.
#[repr(C)]
struct Segment {
    id: usize,
    slot_count: usize,
    slots: *mut usize,
}

/// A range of addresses.
#[repr(C)]
struct VirtualRange {
    size: usize,
    pointer: usize,
}

/// Fills the slots of the memory extension.
///
/// # Safety
/// `module` is a valid module of this extension.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtxExtension(module: *mut Module) -> c_int {
    // SAFETY: the caller's contract.
    let module = unsafe { &mut *module };
    if module.versions[2..] != [1, 0x0102] || module.segment_count != 1 {
        return 0;
    }
    // SAFETY: as above.
    let segment = unsafe { &mut *module.segments };
    assert!(segment.id == 1 && segment.slot_count == 63, "the extension's segment");
    if std::env::var_os("STUB_NVTX_EMPTY").is_some() {
        return 1;
    }
    let functions = [
        (0, heap_register as *const () as usize),
        (1, heap_unregister as *const () as usize),
        (3, register as *const () as usize),
        (5, unregister as *const () as usize),
        (6, name as *const () as usize),
    ];
    for (slot, function) in functions {
        // SAFETY: the segment has that many slots.
        unsafe { *segment.slots.add(slot) = function };
    }
    1
}

/// Reads a field of a description at a byte offset.
///
/// # Safety
/// The description has such a field there.
unsafe fn field<T: Copy>(description: *const c_void, offset: usize) -> T {
    // SAFETY: the caller's contract.
    unsafe { description.byte_add(offset).cast::<T>().read() }
}

unsafe extern "C" fn heap_register(_domain: *const c_void, description: *const c_void) -> usize {
    // SAFETY: `nvtxMemHeapDesc_v1`: compatibility, size, reserved, usage, type, size and address of the range.
    let (usage, kind, range) = unsafe {
        (field::<u32>(description, 8), field::<u32>(description, 12), &*field::<*const VirtualRange>(description, 24))
    };
    assert_eq!((usage, kind), (1, 1), "a suballocator of virtual memory");
    // compute-sanitizer 2025.3 accepts memory of `cuMemAlloc` only, and counts a rejection as an error of the program.
    let whole = crate::model::with(|state| state.memory.allocation(range.pointer as u64));
    let is_inside = whole.is_some_and(|(base, size, _)| (range.pointer + range.size) as u64 <= base + size);
    assert!(is_inside, "the heap is in memory of cuMemAlloc");
    with(|reported| reported.heaps.insert(range.pointer + 1, range.size));
    range.pointer + 1
}

unsafe extern "C" fn heap_unregister(_domain: *const c_void, heap: usize) {
    with(|reported| {
        let size = reported.heaps.remove(&heap).expect("a registered heap");
        reported.blocks.retain(|block, _| !(heap - 1..heap - 1 + size).contains(block));
    });
}

unsafe extern "C" fn register(_domain: *const c_void, batch: *const c_void) {
    // SAFETY: `nvtxMemRegionsRegisterBatch_v1`: compatibility, size, type, heap, count, element size, elements, handles.
    let (heap, count, element_size, block) = unsafe {
        (
            field::<usize>(batch, 8),
            field::<usize>(batch, 16),
            field::<usize>(batch, 24),
            &*field::<*const VirtualRange>(batch, 32),
        )
    };
    assert_eq!((count, element_size), (1, 16), "one range");
    with(|reported| {
        let size = reported.heaps[&heap];
        assert!(block.pointer >= heap - 1 && block.pointer + block.size <= heap - 1 + size, "the block is in its heap");
        let before = reported.blocks.insert(block.pointer, (block.size, None));
        assert!(before.is_none(), "the block is registered once");
    });
}

unsafe extern "C" fn unregister(_domain: *const c_void, batch: *const c_void) {
    // SAFETY: `nvtxMemRegionsUnregisterBatch_v1`: compatibility, size, reference, count, element size, elements.
    let (reference, pointer) = unsafe { (field::<u32>(batch, 4), *field::<*const usize>(batch, 24)) };
    assert_eq!(reference, 1, "by pointer");
    with(|reported| reported.blocks.remove(&pointer)).expect("a registered block");
}

unsafe extern "C" fn name(_domain: *const c_void, batch: *const c_void) {
    // SAFETY: `nvtxMemRegionsNameBatch_v1`: its elements are at 24, and each has the pointer at 8 and the name at 16.
    let (pointer, text) = unsafe {
        let element = field::<*const c_void>(batch, 24);
        (field::<usize>(element, 8), CStr::from_ptr(field::<*const c_char>(element, 16)))
    };
    let text = text.to_string_lossy().into_owned();
    with(|reported| reported.blocks.get_mut(&pointer).expect("a registered block").1 = Some(text));
}

/// Returns the number of ranges (0) or blocks (1), the size of the block at an address (2), or 1 if it has a name (3), or a
/// printable one (4).
#[unsafe(no_mangle)]
pub extern "C" fn stub_nvtx(what: c_int, address: usize) -> u64 {
    with(|reported| match what {
        0 => reported.heaps.len() as u64,
        1 => reported.blocks.len() as u64,
        2 => reported.blocks.get(&address).map_or(0, |(size, _)| *size as u64),
        4 => {
            let is_printable = |name: &str| name.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            let name = reported.blocks.get(&address).and_then(|(_, name)| name.as_deref());
            u64::from(name.is_some_and(is_printable))
        }
        _ => u64::from(reported.blocks.get(&address).is_some_and(|(_, name)| name.is_some())),
    })
}

//! Reports blocks to compute-sanitizer, which otherwise sees each segment as one valid allocation.
//!
//! ```text
//!  tool ── NVTX_INJECTION64_PATH ──► this file loads the library, once
//!       ◄── InitializeInjectionNvtxExtension(module of the memory extension, empty slots)
//!       ──► slots with the tool's functions
//!  reserve ─► HeapRegister    allocate ─► RegionsRegister    free ─► RegionsUnregister    release ─► HeapUnregister
//! ```
//! These are the parts of NVTX 3's memory extension (`nvtx3/nvToolsExtMem.h`, compatibility 0x0102) that this needs, declared here, so that
//! building needs no header. Without the variable, nothing is loaded and no block is reported.

use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use symmalloc_core::backend::{Bytes, DeviceAddress, Range};

/// `NVTX_EXT_COMPATID_MEM`.
const COMPATIBILITY: u16 = 0x0102;
/// `NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR`.
const SUB_ALLOCATOR: u32 = 1;
/// `NVTX_MEM_TYPE_VIRTUAL_ADDRESS`.
const VIRTUAL_ADDRESS: u32 = 1;
/// `NVTX_MEM_REGION_REF_TYPE_POINTER`.
const BY_POINTER: u32 = 1;
/// `NVTX_MESSAGE_TYPE_ASCII`.
const ASCII: u32 = 1;
/// The value of a slot that the tool leaves empty, after NVTX has initialized it.
const DISABLED: usize = 1;
/// The number of functions of the extension, with room for one more, which NVTX's own loop reads.
const SLOTS: usize = 17;

/// `nvtxExtModuleSegment_t`.
#[repr(C)]
struct ModuleSegment {
    id: usize,
    slot_count: usize,
    slots: *mut usize,
}

/// `nvtxExtModuleInfo_t`.
#[repr(C)]
struct ModuleInfo {
    nvtx_version: u16,
    struct_size: u16,
    module: u16,
    compatibility: u16,
    segment_count: usize,
    segments: *mut ModuleSegment,
    export_function: extern "C" fn(u32) -> isize,
    extension_info: *const c_void,
}

/// `nvtxMemVirtualRangeDesc_v1`.
#[repr(C)]
struct VirtualRange {
    size: usize,
    pointer: *const c_void,
}

/// `nvtxMemHeapDesc_v1`.
#[repr(C)]
struct HeapDescription {
    compatibility: u16,
    struct_size: u16,
    reserved: u32,
    usage: u32,
    kind: u32,
    range_size: usize,
    range: *const VirtualRange,
    category: u32,
    message_type: u32,
    message: *const c_char,
}

/// `nvtxMemRegionsRegisterBatch_v1`.
#[repr(C)]
struct RegisterBatch {
    compatibility: u16,
    struct_size: u16,
    kind: u32,
    heap: *mut c_void,
    count: usize,
    element_size: usize,
    elements: *const VirtualRange,
    handles: *mut *mut c_void,
}

/// `nvtxMemRegionsUnregisterBatch_v1`. A reference by pointer is the pointer.
#[repr(C)]
struct UnregisterBatch {
    compatibility: u16,
    struct_size: u16,
    reference: u32,
    count: usize,
    element_size: usize,
    elements: *const *const c_void,
}

/// `nvtxMemRegionNameDesc_v1`.
#[repr(C)]
struct NameDescription {
    reference: u32,
    name_type: u32,
    region: *const c_void,
    name: *const c_char,
    category: u32,
    reserved: u32,
}

/// `nvtxMemRegionsNameBatch_v1`.
#[repr(C)]
struct NameBatch {
    compatibility: u16,
    struct_size: u16,
    reserved: u32,
    count: usize,
    element_size: usize,
    elements: *const NameDescription,
    reserved1: usize,
}

type Initialize = unsafe extern "C" fn(*mut ModuleInfo) -> c_int;
type HeapRegister = unsafe extern "C" fn(*const c_void, *const HeapDescription) -> *mut c_void;
type HeapUnregister = unsafe extern "C" fn(*const c_void, *mut c_void);
type Register = unsafe extern "C" fn(*const c_void, *const RegisterBatch);
type Unregister = unsafe extern "C" fn(*const c_void, *const UnregisterBatch);
type Name = unsafe extern "C" fn(*const c_void, *const NameBatch);

/// The tool's functions. Its library stays loaded.
#[derive(Clone, Copy)]
struct Tool {
    heap_register: HeapRegister,
    heap_unregister: HeapUnregister,
    register: Register,
    unregister: Unregister,
    name: Option<Name>,
}

impl Tool {
    /// Returns the tool of this process, if there is one that checks memory.
    fn of_process() -> Option<&'static Tool> {
        static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
        TOOL.get_or_init(|| {
            let path = std::env::var_os("NVTX_INJECTION64_PATH")?;
            // SAFETY: the user starts the process under this tool, whose library is made to be loaded here.
            let library = unsafe { Library::new(&path) };
            let library =
                library.inspect_err(|error| tracing::warn!(name: "nvtx.failed", target: "symmalloc", %error)).ok()?;
            Tool::of(library)
        })
        .as_ref()
    }

    /// Asks a library for the functions of the memory extension.
    fn of(library: Library) -> Option<Tool> {
        // SAFETY: NVTX defines the type of this symbol.
        let initialize =
            unsafe { library.get::<Initialize>(b"InitializeInjectionNvtxExtension\0") }.ok().map(|it| *it)?;
        let mut slots = [0_usize; SLOTS];
        let mut segment = ModuleSegment { id: 1, slot_count: SLOTS - 1, slots: slots.as_mut_ptr() };
        let mut module = ModuleInfo {
            nvtx_version: 3,
            struct_size: size_of::<ModuleInfo>() as u16,
            module: 1,
            compatibility: COMPATIBILITY,
            segment_count: 1,
            segments: &raw mut segment,
            export_function: no_export,
            extension_info: null(),
        };
        // SAFETY: the module and everything that it points to is valid during the call, in which the tool fills the slots.
        let accepted = unsafe { initialize(&raw mut module) };
        // The tool's functions stay valid.
        std::mem::forget(library);
        let slot = |index: usize| (slots[index] & !DISABLED != 0).then_some(slots[index]);
        if accepted == 0 {
            return None;
        }
        // SAFETY: the tool has stored functions of these types in these slots, as NVTX defines them.
        unsafe {
            Some(Tool {
                heap_register: std::mem::transmute::<usize, HeapRegister>(slot(0)?),
                heap_unregister: std::mem::transmute::<usize, HeapUnregister>(slot(1)?),
                register: std::mem::transmute::<usize, Register>(slot(3)?),
                unregister: std::mem::transmute::<usize, Unregister>(slot(5)?),
                name: slot(6).map(|name| std::mem::transmute::<usize, Name>(name)),
            })
        }
    }
}

/// The functions that this module exports to the tool: none.
extern "C" fn no_export(_id: u32) -> isize {
    0
}

/// The reports of one backend to the tool.
pub(crate) struct BlockReports {
    tool: &'static Tool,
    /// The tool's handle of each range, by its first address.
    heaps: Mutex<BTreeMap<u64, Heap>>,
}

#[derive(Clone, Copy)]
struct Heap {
    handle: usize,
    size_bytes: u64,
}

impl BlockReports {
    /// Returns the reports to the tool of this process, if there is one.
    pub(crate) fn of_process() -> Option<Self> {
        Tool::of_process().map(|tool| BlockReports { tool, heaps: Mutex::default() })
    }

    fn heaps(&self) -> MutexGuard<'_, BTreeMap<u64, Heap>> {
        self.heaps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a range, of which only reported blocks may be accessed.
    pub(crate) fn reserved(&self, range: Range) {
        let pointer = pointer(range.base);
        let whole = VirtualRange { size: range.size_bytes as usize, pointer };
        let description = HeapDescription {
            compatibility: COMPATIBILITY,
            struct_size: size_of::<HeapDescription>() as u16,
            reserved: 0,
            usage: SUB_ALLOCATOR,
            kind: VIRTUAL_ADDRESS,
            range_size: size_of::<VirtualRange>(),
            range: &raw const whole,
            category: 0,
            message_type: ASCII,
            message: c"symmalloc segment".as_ptr(),
        };
        // SAFETY: the description is valid during the call; the null domain is NVTX's default.
        let handle = unsafe { (self.tool.heap_register)(null(), &raw const description) } as usize;
        self.heaps().insert(range.base.0, Heap { handle, size_bytes: range.size_bytes });
    }

    /// Reports that a range was released.
    pub(crate) fn released(&self, range: Range) {
        if let Some(heap) = self.heaps().remove(&range.base.0) {
            // SAFETY: the tool returned the handle, which is not used afterwards.
            unsafe { (self.tool.heap_unregister)(null(), heap.handle as *mut c_void) };
        }
    }

    /// Reports a block that the program may access from now on.
    pub(crate) fn allocated(&self, bytes: Bytes, name: Option<&str>) {
        let around = self.heaps().range(..=bytes.address.0).next_back().map(|(base, heap)| (*base, *heap));
        let Some((base, heap)) = around.filter(|(base, heap)| bytes.address.0 - base < heap.size_bytes) else { return };
        debug_assert!(bytes.address.0 + bytes.size_bytes <= base + heap.size_bytes);
        let block = VirtualRange { size: bytes.size_bytes as usize, pointer: pointer(bytes.address) };
        let mut handle = null_mut();
        let batch = RegisterBatch {
            compatibility: COMPATIBILITY,
            struct_size: size_of::<RegisterBatch>() as u16,
            kind: VIRTUAL_ADDRESS,
            heap: heap.handle as *mut c_void,
            count: 1,
            element_size: size_of::<VirtualRange>(),
            elements: &raw const block,
            handles: &raw mut handle,
        };
        // SAFETY: the batch and what it points to are valid during the call.
        unsafe { (self.tool.register)(null(), &raw const batch) };
        if let (Some(set_name), Some(Ok(name))) = (self.tool.name, name.map(CString::new)) {
            let description = NameDescription {
                reference: BY_POINTER,
                name_type: ASCII,
                region: pointer(bytes.address),
                name: name.as_ptr(),
                category: 0,
                reserved: 0,
            };
            let batch = NameBatch {
                compatibility: COMPATIBILITY,
                struct_size: size_of::<NameBatch>() as u16,
                reserved: 0,
                count: 1,
                element_size: size_of::<NameDescription>(),
                elements: &raw const description,
                reserved1: 0,
            };
            // SAFETY: as above.
            unsafe { set_name(null(), &raw const batch) };
        }
    }

    /// Reports that the program must no longer access a block.
    pub(crate) fn freed(&self, address: DeviceAddress) {
        let block = pointer(address);
        let batch = UnregisterBatch {
            compatibility: COMPATIBILITY,
            struct_size: size_of::<UnregisterBatch>() as u16,
            reference: BY_POINTER,
            count: 1,
            element_size: size_of::<*const c_void>(),
            elements: &raw const block,
        };
        // SAFETY: as above.
        unsafe { (self.tool.unregister)(null(), &raw const batch) };
    }
}

fn pointer(address: DeviceAddress) -> *const c_void {
    address.0 as *const c_void
}

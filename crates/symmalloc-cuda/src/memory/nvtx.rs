//! Reports blocks to compute-sanitizer, which otherwise sees each segment as one valid allocation.
//!
//! ```text
//!  tool ── NVTX_INJECTION64_PATH ──► this file loads the library, once
//!       ◄── InitializeInjectionNvtxExtension(module of the memory extension, empty slots)
//!       ──► slots with the tool's functions
//!  first map ─► HeapRegister    allocate ─► RegionsRegister    free ─► RegionsUnregister    release ─► HeapUnregister
//! ```
//! compute-sanitizer 2025.3 accepts only heaps in memory of `cuMemAlloc`, so only that memory is reported (`SYMMALLOC_PLAIN_MEMORY`). It
//! rejects mapped memory and memory of `cudaMallocAsync`. The tool looks up the current context, so all calls are made in the device's. If
//! the tool rejects a heap, its blocks are not registered, and the tool checks the segment as a whole.
//!
//! These are the parts of NVTX 3's memory extension (`nvtx3/nvToolsExtMem.h`, compatibility 0x0102) that this needs, declared here, so that
//! building needs no header. Without the variable, nothing is loaded and no block is reported.

use crate::device::CudaDevice;
use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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
/// The number of slots of the extension's module (`NVTX3EXT_CBID_MEM_FN_NUM`), which a tool fills from index 0.
const SLOTS: usize = 63;
/// Maximum number of bytes of a name.
const NAME_BYTES_MAX: usize = 256;

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
        let mut segment = ModuleSegment { id: 1, slot_count: SLOTS, slots: slots.as_mut_ptr() };
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
    device: Arc<CudaDevice>,
    tool: &'static Tool,
    reported: Mutex<Reported>,
}

#[derive(Default)]
struct Reported {
    /// The registered ranges, by their first address.
    heaps: BTreeMap<u64, Heap>,
    /// The registered regions of each live block, by the block's address. A block that reuses memory of a graph has only the rest.
    blocks: BTreeMap<u64, Vec<Bytes>>,
    /// Ends of the regions that captures allocated, by their starts. They do not overlap. Launches use them after their free, so they stay
    /// registered as long as their range.
    of_graphs: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy)]
struct Heap {
    /// The tool's handle.
    handle: usize,
    size_bytes: u64,
}

impl Reported {
    /// Returns the base of the registered range around an address, and its heap.
    fn heap_around(&self, address: DeviceAddress) -> Option<(u64, Heap)> {
        let around = self.heaps.range(..=address.0).next_back().map(|(base, heap)| (*base, *heap));
        around.filter(|(base, heap)| address.0 - base < heap.size_bytes)
    }

    /// Returns the parts of a block that no graph has registered.
    fn parts_outside_of_graphs(&self, Bytes { address, size_bytes }: Bytes) -> Vec<Bytes> {
        let (mut parts, mut at, end) = (Vec::new(), address.0, address.0 + size_bytes);
        let mut add = |from: u64, to: u64| {
            if from < to {
                parts.push(Bytes { address: DeviceAddress(from), size_bytes: to - from });
            }
        };
        let before = self.of_graphs.range(..at).next_back();
        for (start, stop) in before.into_iter().chain(self.of_graphs.range(at..end)) {
            add(at, (*start).min(end));
            at = at.max(*stop);
        }
        add(at, end);
        parts
    }
}

impl BlockReports {
    /// Returns the reports to the tool of this process, if there is one.
    pub(crate) fn of_process(device: &Arc<CudaDevice>) -> Option<Self> {
        let device = Arc::clone(device);
        Tool::of_process().map(|tool| BlockReports { device, tool, reported: Mutex::default() })
    }

    fn reported(&self) -> MutexGuard<'_, Reported> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a range with mapped memory, of which only reported blocks may be accessed. Has no effect if it was reported before.
    pub(crate) fn mapped(&self, range: Range) {
        let mut reported = self.reported();
        let is_new = !reported.heaps.contains_key(&range.base.0);
        let Some(_current) = self.device.enter().ok().filter(|_| is_new) else { return };
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
        if handle != 0 {
            reported.heaps.insert(range.base.0, Heap { handle, size_bytes: range.size_bytes });
        }
    }

    /// Reports that a range is about to be released. It contains no block.
    pub(crate) fn released(&self, range: Range) {
        let mut reported = self.reported();
        let Some(heap) = reported.heaps.remove(&range.base.0) else { return };
        reported.of_graphs.retain(|start, _| start.wrapping_sub(range.base.0) >= range.size_bytes);
        reported.blocks.retain(|start, _| start.wrapping_sub(range.base.0) >= range.size_bytes);
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: the tool returned the handle, which is not used afterwards. The regions of the heap end with it.
        unsafe { (self.tool.heap_unregister)(null(), heap.handle as *mut c_void) };
    }

    /// Reports a block that the program may access from now on. `is_of_graph` is `true` if a capture allocated it.
    pub(crate) fn allocated(&self, bytes: Bytes, name: Option<&str>, is_of_graph: bool) {
        let mut reported = self.reported();
        let Some((base, heap)) = reported.heap_around(bytes.address) else { return };
        debug_assert!(bytes.address.0 + bytes.size_bytes <= base + heap.size_bytes);
        let Ok(_current) = self.device.enter() else { return };
        let parts = reported.parts_outside_of_graphs(bytes);
        for part in &parts {
            self.register(heap, *part);
            if is_of_graph {
                reported.of_graphs.insert(part.address.0, part.address.0 + part.size_bytes);
            }
        }
        if let (Some(name), Some(first)) = (name, parts.first()) {
            self.name(first.address, name);
        }
        if !is_of_graph {
            reported.blocks.insert(bytes.address.0, parts);
        }
    }

    fn register(&self, heap: Heap, bytes: Bytes) {
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
    }

    fn name(&self, address: DeviceAddress, name: &str) {
        let Some(set_name) = self.tool.name else { return };
        let name = printable(name);
        let description = NameDescription {
            reference: BY_POINTER,
            name_type: ASCII,
            region: pointer(address),
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
        // SAFETY: the batch, its element and the C string that it points to are valid during the call.
        unsafe { set_name(null(), &raw const batch) };
    }

    /// Reports that the program must no longer access a block.
    pub(crate) fn freed(&self, address: DeviceAddress) {
        let parts = self.reported().blocks.remove(&address.0).unwrap_or_default();
        let Ok(_current) = self.device.enter() else { return };
        for part in parts {
            let block = pointer(part.address);
            let batch = UnregisterBatch {
                compatibility: COMPATIBILITY,
                struct_size: size_of::<UnregisterBatch>() as u16,
                reference: BY_POINTER,
                count: 1,
                element_size: size_of::<*const c_void>(),
                elements: &raw const block,
            };
            // SAFETY: the batch and the pointer that it refers to are valid during the call. The tool does not read the memory.
            unsafe { (self.tool.unregister)(null(), &raw const batch) };
        }
    }
}

/// Returns a name that a tool can print: printable ASCII without the rest. Names of programs are arbitrary text.
fn printable(name: &str) -> CString {
    let is_plain = |byte: &u8| (b' '..=b'~').contains(byte);
    let bytes: Vec<u8> =
        name.bytes().map(|byte| if is_plain(&byte) { byte } else { b'?' }).take(NAME_BYTES_MAX).collect();
    CString::new(bytes).expect("every byte is printable")
}

fn pointer(address: DeviceAddress) -> *const c_void {
    address.0 as *const c_void
}

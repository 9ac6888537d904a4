//! C++ exceptions and `std::function` without a C++ compiler, for PyTorch's calls.
//!
//! PyTorch does not check the result of an allocator, so a failed allocation must throw. It throws the most specific type that the
//! libraries of the process provide:
//!
//! | type | found in | Python's exception |
//! |---|---|---|
//! | `c10::OutOfMemoryError` | libc10, libc10_cuda | `torch.OutOfMemoryError` |
//! | `c10::Error`, by `c10::detail::torchCheckFail` | libc10 | `RuntimeError` |
//! | `std::runtime_error`, by `std::__throw_runtime_error` | libstdc++ | `RuntimeError` |
//!
//! # Assumptions
//! The Itanium C++ ABI (all of Linux):
//! - An exception is allocated by `__cxa_allocate_exception`, built in place, and thrown by `__cxa_throw` with its type's `type_info` and
//!   its complete destructor.
//! - A vtable symbol is followed by the offset to the top, the `type_info`, and the virtual functions. An object's first word points
//!   after the first two words. If the virtual destructor is declared first, as in `std::exception`, its complete variant comes first.
//! - A class that is not trivially copyable is passed by value as a pointer to a copy that the caller owns.
//!
//! PyTorch since 1.13: `OutOfMemoryError` adds nothing to `c10::Error`, which is at most [`ERROR_BYTES_MAX`] bytes long. The constructor
//! is `c10::Error(SourceLocation, std::string)`. A `SourceLocation` consists of two C strings and a `uint32_t`.
//!
//! libstdc++ with the C++11 strings: `std::string` has 32 bytes, and an exported constructor and destructor. `std::function` consists of
//! 16 bytes of functor, a manager and an invoker, see [`StdFunction`].
//!
//! `tests/cxx.rs` compiles a C++ program that checks these assumptions.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Bytes allocated for an error. `sizeof(c10::Error)` is about 200; extra memory is harmless.
const ERROR_BYTES_MAX: usize = 512;

/// Words between a vtable's symbol and its first virtual function.
const VTABLE_HEADER_WORDS: usize = 2;

/// `c10::SourceLocation`. It has 24 bytes, so it is passed in memory.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::__cxx11::string`, alive between its constructor and its destructor.
#[repr(C, align(8))]
struct StdString([MaybeUninit<u8>; 32]);

type AllocateException = unsafe extern "C" fn(usize) -> *mut c_void;
type Destructor = unsafe extern "C" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, Destructor) -> !;
/// `basic_string(const char*, const allocator&)`. The allocator is empty.
type NewString = unsafe extern "C-unwind" fn(*mut StdString, *const c_char, *const u8);
type DropString = unsafe extern "C" fn(*mut StdString);
type NewError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StdString);
type TorchCheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;
type ThrowRuntimeError = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// The functions and types for throwing a `c10::OutOfMemoryError`.
struct OutOfMemoryError {
    allocate: AllocateException,
    throw: Throw,
    new_string: NewString,
    drop_string: DropString,
    new_error: NewError,
    type_info: *const c_void,
    vtable: *const *const c_void,
}

/// The process's functions for throwing exceptions.
struct Thrower {
    out_of_memory: Option<OutOfMemoryError>,
    check_fail: Option<TorchCheckFail>,
    runtime_error: Option<ThrowRuntimeError>,
}

// SAFETY: addresses of functions and of constant data, in libraries that are never closed.
unsafe impl Send for Thrower {}
// SAFETY: as above.
unsafe impl Sync for Thrower {}

/// The kind of exception, which determines its type in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExceptionKind {
    OutOfMemory,
    Other,
}

const FUNCTION: &CStr = c"symmalloc_torch";
const FILE: &CStr = c"symmalloc-torch";

/// Throws a C++ exception with this message. Returns only if the process has no C++ library.
///
/// # Safety
/// All frames between here and the C++ caller can unwind (`extern "C-unwind"`), and none of them is inside of a
/// `catch_unwind`.
pub(crate) unsafe fn throw(kind: ExceptionKind, message: &str) {
    let thrower = thrower();
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    if let (ExceptionKind::OutOfMemory, Some(error)) = (kind, &thrower.out_of_memory) {
        // SAFETY: the symbols have the types in this file's comment; the caller's contract for the frames.
        unsafe { error.throw(text) }
    }
    let text = kept_until_thrown(text);
    if let Some(check_fail) = thrower.check_fail {
        // SAFETY: C strings, copied before the exception is thrown; the caller's contract for the frames.
        unsafe { check_fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, text) }
    }
    if let Some(runtime_error) = thrower.runtime_error {
        // SAFETY: as above.
        unsafe { runtime_error(text) }
    }
}

thread_local! {
    static TEXT: std::cell::RefCell<CString> = std::cell::RefCell::default();
}

/// Stores the text in the thread, because unwinding out of a call that never returns would not drop it.
fn kept_until_thrown(text: CString) -> *const c_char {
    TEXT.try_with(|place| {
        let mut place = place.borrow_mut();
        *place = text;
        place.as_ptr()
    })
    .unwrap_or(c"symmalloc: an allocation failed while its thread ended".as_ptr())
}

impl OutOfMemoryError {
    /// # Safety
    /// As [`throw`].
    unsafe fn throw(&self, text: CString) -> ! {
        let text = kept_until_thrown(text);
        let mut string = StdString([const { MaybeUninit::uninit() }; 32]);
        let location = SourceLocation { function: FUNCTION.as_ptr(), file: FILE.as_ptr(), line: 0 };
        // SAFETY: memory for a string; the text is a C string; libstdc++ does not read the allocator.
        unsafe { (self.new_string)(&raw mut string, text, &raw const EMPTY_ALLOCATOR) };
        // SAFETY: any size is valid; the memory is aligned for any object, and the call does not return null.
        let error = unsafe { (self.allocate)(ERROR_BYTES_MAX) };
        // SAFETY: memory for an error, and a live string that the caller keeps.
        unsafe { (self.new_error)(error, location, &raw mut string) };
        // SAFETY: alive, and not used after this.
        unsafe { (self.drop_string)(&raw mut string) };
        // SAFETY: the vtable has at least its header and a destructor.
        let functions = unsafe { self.vtable.add(VTABLE_HEADER_WORDS) };
        // SAFETY: the error's first word points to its virtual functions. Replacing it turns the error into an
        // `OutOfMemoryError`, which has the same layout.
        unsafe { error.cast::<*const *const c_void>().write(functions) };
        // SAFETY: the first virtual function is the complete destructor, which takes the object.
        let destructor = unsafe { std::mem::transmute::<*const c_void, Destructor>(*functions) };
        // SAFETY: an exception object with its type and its destructor; the caller's contract for the frames.
        unsafe { (self.throw)(error, self.type_info, destructor) }
    }
}

static EMPTY_ALLOCATOR: u8 = 0;

/// Returns the functions for throwing, looked up once. PyTorch's libraries are loaded before it calls an allocator.
fn thrower() -> &'static Thrower {
    static THROWER: OnceLock<Thrower> = OnceLock::new();
    THROWER.get_or_init(|| Thrower {
        out_of_memory: out_of_memory_error(),
        // SAFETY: the mangled name states the type.
        check_fail: unsafe { function(c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_") },
        // SAFETY: as above.
        runtime_error: unsafe { function(c"_ZSt21__throw_runtime_errorPKc") },
    })
}

fn out_of_memory_error() -> Option<OutOfMemoryError> {
    // SAFETY: the mangled names state the types, which the file's comment describes.
    unsafe {
        Some(OutOfMemoryError {
            allocate: function(c"__cxa_allocate_exception")?,
            throw: function(c"__cxa_throw")?,
            new_string: function(c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_")?,
            drop_string: function(c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev")?,
            new_error: function(
                c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
            )?,
            type_info: symbol(c"_ZTIN3c1016OutOfMemoryErrorE")?,
            vtable: symbol(c"_ZTVN3c1016OutOfMemoryErrorE")?.cast(),
        })
    }
}

/// Returns a function that the process exports.
///
/// # Safety
/// `F` is the function's type.
unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    let address = symbol(name)?;
    // SAFETY: the caller's contract, and the sizes are equal.
    Some(unsafe { std::mem::transmute_copy(&address) })
}

/// Looks up a symbol globally, and then in the loaded libraries, because Python loads extension modules with local visibility.
pub(crate) fn symbol(name: &CStr) -> Option<*const c_void> {
    const LIBRARIES: [&CStr; 5] =
        [c"libc10.so", c"libc10_cuda.so", c"libtorch_cuda.so", c"libtorch_python.so", c"libstdc++.so.6"];
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if !found.is_null() {
        return Some(found);
    }
    LIBRARIES.into_iter().find_map(|library| {
        // SAFETY: a C string; the call loads no library.
        let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return None;
        }
        // SAFETY: an open library, never closed, and a C string.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!found.is_null()).then_some(found.cast_const())
    })
}

/// `std::function<bool(cudaStream_t)>`.
#[repr(C)]
pub(crate) struct StdFunction {
    /// The functor, or a pointer to it.
    functor: [usize; 2],
    /// Copies and destroys the functor. Null when the function is empty.
    manager: Option<Manager>,
    /// Calls the functor. Arguments are passed by reference.
    invoker: Option<Invoker>,
}

type Functor = [usize; 2];
type Manager = unsafe extern "C-unwind" fn(*mut Functor, *const Functor, c_int) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const Functor, *mut *mut c_void) -> bool;

/// Values of libstdc++'s `_Manager_operation`.
const CLONE_FUNCTOR: c_int = 2;
const DESTROY_FUNCTOR: c_int = 3;

/// A copy of a PyTorch filter.
pub(crate) struct FunctionFilter(StdFunction);

// SAFETY: PyTorch's own allocator keeps and calls its filters on any thread.
unsafe impl Send for FunctionFilter {}
// SAFETY: as above; a filter mutates nothing.
unsafe impl Sync for FunctionFilter {}

impl FunctionFilter {
    /// Copies a filter. Propagates exceptions of its copy constructor.
    ///
    /// # Safety
    /// `function` is null or points to a live `std::function<bool(cudaStream_t)>` of libstdc++.
    pub(crate) unsafe fn copy(function: *const StdFunction) -> Self {
        let mut copy = StdFunction { functor: [0; 2], manager: None, invoker: None };
        // SAFETY: the caller's contract.
        if let Some(function) = unsafe { function.as_ref() }
            && let Some(manager) = function.manager
        {
            // SAFETY: the first argument is memory for a functor, the second a live functor.
            unsafe { manager(&raw mut copy.functor, &raw const function.functor, CLONE_FUNCTOR) };
            copy.manager = function.manager;
            copy.invoker = function.invoker;
        }
        FunctionFilter(copy)
    }

    /// Returns `true` if the filter accepts the stream. An empty filter accepts all. Propagates exceptions of the filter.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        let mut argument = stream;
        match self.0.invoker {
            // SAFETY: the functor is alive, and the argument is a reference to a stream.
            Some(invoker) => unsafe { invoker(&raw const self.0.functor, &raw mut argument) },
            None => true,
        }
    }
}

impl Drop for FunctionFilter {
    fn drop(&mut self) {
        if let Some(manager) = self.0.manager {
            // SAFETY: the functor is alive, and not used after this.
            unsafe { manager(&raw mut self.0.functor, std::ptr::null(), DESTROY_FUNCTOR) };
        }
    }
}

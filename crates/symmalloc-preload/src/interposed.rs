//! `dlsym` and `dlvsym`, which interpose the C library's functions.
//!
//! ```text
//!  caller ── dlsym(handle, name) ─► naked code: saves the arguments, calls `answer`
//!                                      │ a served call ─► returned
//!                                      ╰ all others ─────► jump to the C library's dlsym, with the original caller
//! ```
//!
//! The jump preserves the return address, so that `RTLD_NEXT` means the library after the caller's, and not the library after this one.
//!
//! | handle | result for the name of a served call |
//! |---|---|
//! | a library | our function if the C library finds libcuda's or ours there; otherwise the C library's result |
//! | `RTLD_DEFAULT`, `RTLD_NEXT` | our function if libcuda is loaded |
//!
//! Callers inside this library (cudarc, the allocator's table of driver calls, Rust's standard library) get the C library's result.

use crate::served_call::{self, ServedCall};
use crate::{calls, libc_symbols, libcuda};
use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};

/// Instruction for the naked code, in two registers: `(0, address)` jumps to the address, `(1, address)` returns it.
#[repr(C)]
struct Answer {
    is_final: usize,
    address: *mut c_void,
}

impl Answer {
    fn jump(address: *mut c_void) -> Self {
        Answer { is_final: 0, address }
    }

    fn of(address: *mut c_void) -> Self {
        Answer { is_final: 1, address }
    }
}

/// See `dlsym(3)`.
///
/// # Safety
/// See the C library's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        // The return address.
        "mov rdx, [rsp + 24]",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "mov rax, rdx",
        "ret",
        "2:",
        "jmp rdx",
        answer = sym answer_dlsym,
    )
}

/// See `dlvsym(3)`.
///
/// # Safety
/// See the C library's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rcx, [rsp + 24]",
        "call {answer}",
        "mov rcx, rdx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "mov rax, rcx",
        "ret",
        "2:",
        "jmp rcx",
        answer = sym answer_dlvsym,
    )
}

/// See `dlsym(3)`.
///
/// # Safety
/// See the C library's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x29, sp",
        "mov x2, x30",
        "bl {answer}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x9, 2f",
        "mov x0, x10",
        "ret",
        "2:",
        "br x10",
        answer = sym answer_dlsym,
    )
}

/// See `dlvsym(3)`.
///
/// # Safety
/// See the C library's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "mov x29, sp",
        "mov x3, x30",
        "bl {answer}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "cbz x9, 2f",
        "mov x0, x10",
        "ret",
        "2:",
        "br x10",
        answer = sym answer_dlvsym,
    )
}

unsafe extern "C" fn answer_dlsym(handle: *mut c_void, name: *const c_char, caller: usize) -> Answer {
    let jump = Answer::jump(libc_symbols::dlsym_address());
    // SAFETY: the caller passes null or a C string.
    let Some(call) = (unsafe { asked_for(name, caller) }) else { return jump };
    if is_search(handle) {
        return answer_search(call);
    }
    // SAFETY: the arguments are those of the caller, who upholds the C library's contract.
    of_library(call, unsafe { libc_symbols::dlsym()(handle, name) }, jump)
}

unsafe extern "C" fn answer_dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Answer {
    let jump = Answer::jump(libc_symbols::dlvsym_address());
    // SAFETY: the caller passes null or a C string.
    let Some(call) = (unsafe { asked_for(name, caller) }) else { return jump };
    if is_search(handle) {
        // libcuda's symbols have no versions, so a versioned search finds none.
        return jump;
    }
    // SAFETY: the arguments are those of the caller, who upholds the C library's contract.
    of_library(call, unsafe { libc_symbols::dlvsym()(handle, name, version) }, jump)
}

/// Returns the served call with this name. Returns `None` if there is none, or if the caller is a part of this library.
///
/// # Safety
/// The name is null or a C string.
unsafe fn asked_for(name: *const c_char, caller: usize) -> Option<&'static ServedCall> {
    if name.is_null() || is_ours(caller) {
        return None;
    }
    // SAFETY: the caller's contract.
    served_call::by_symbol(&calls::ALL, unsafe { CStr::from_ptr(name) }.to_bytes())
}

fn is_search(handle: *mut c_void) -> bool {
    handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT
}

/// Answers a search through all libraries. If libcuda is not loaded, the call does not exist, and the C library sets the error that
/// `dlerror` reports.
fn answer_search(call: &'static ServedCall) -> Answer {
    match libcuda::if_loaded() {
        Some(library) if !call.driver(library).is_null() => Answer::of(call.served()),
        // The driver is too old to export the call.
        Some(library) => {
            // SAFETY: the library is never closed.
            Answer::of(unsafe { libc_symbols::look_up(library.handle(), call.symbol()) })
        }
        None => {
            // SAFETY: looks up a name that no library has, so that `dlerror` reports it.
            Answer::of(unsafe { libc_symbols::dlsym()(libc::RTLD_DEFAULT, c"libcuda is not loaded".as_ptr()) })
        }
    }
}

/// Answers a lookup in one library. The C library may have found libcuda's function, this library's through the program's global scope, or
/// another library's.
fn of_library(call: &'static ServedCall, found: *mut c_void, jump: Answer) -> Answer {
    if found.is_null() {
        // Repeats the lookup, so that `dlerror` reports the error.
        return jump;
    }
    if found == call.served() {
        return answer_search(call);
    }
    let is_drivers = libcuda::if_loaded().is_some_and(|library| call.driver(library) == found);
    if is_drivers { Answer::of(call.served()) } else { Answer::of(found) }
}

unsafe extern "C" {
    /// The first byte of this library, defined by the linker.
    static __ehdr_start: u8;
    /// The end of this library, defined by the linker.
    static _end: u8;
}

/// Returns `true` if a code address lies in this library.
fn is_ours(address: usize) -> bool {
    (&raw const __ehdr_start as usize..&raw const _end as usize).contains(&address)
}

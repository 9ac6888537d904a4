//! Null pointers at the C boundary: no call crashes, and a call that requires the pointer names it in its error.
//!
//! The functions and their arguments are parsed from the header, so new functions are tested automatically.

use crate::header::{Function, Kind, call, functions, valid};
use crate::library::*;
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::thread;
use std::time::Duration;
use symmalloc_torch::*;

fn is_pointer(kind: Kind) -> bool {
    !matches!(kind, Kind::Number | Kind::Real | Kind::Handle)
}

/// Aborts the process if a call blocks.
pub(crate) fn within_a_deadline(body: impl FnOnce()) {
    thread::spawn(|| {
        thread::sleep(Duration::from_secs(120));
        eprintln!("a call blocks");
        std::process::abort();
    });
    body();
}

stub_test!(a_null_pointer_is_a_typed_error_at_every_function, {
    within_a_deadline(|| {
        let allocator = Allocator::new("");
        let mut wrong = Vec::new();
        for function in functions() {
            let kinds: Vec<Kind> = function.arguments.iter().map(|(_, kind)| *kind).collect();
            // The call may throw without a valid number.
            if kinds.contains(&Kind::Real) {
                continue;
            }
            call(&function, &vec![0; kinds.len()]);
            // These functions would destroy a live object.
            let ends = ["_destroy", "_close", "release_bytes"].iter().any(|end| function.name.ends_with(end));
            for missing in (0..kinds.len()).filter(|at| is_pointer(kinds[*at]) && !ends) {
                let others = function.arguments.iter().enumerate();
                let values: Option<Vec<usize>> =
                    others.map(|(at, other)| if at == missing { Some(0) } else { valid(other, allocator) }).collect();
                let Some(values) = values else { continue };
                let status = call(&function, &values) as u32;
                wrong.extend(complaint(&function, &function.arguments[missing].0, status));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        let pointer = allocator.allocate(0, 512, null_mut());
        done(allocator.try_free(pointer));
    });
});

/// Pointers that may be NULL although the documentation of their function refers to another function's.
const OPTIONAL: [(&str, &str); 4] = [
    ("symmalloc_pool_agree", "registered"),
    ("symmalloc_pool_agree", "deregistered"),
    ("symmalloc_torch_begin_scope", "filter"),
    ("symmalloc_torch_begin_scope", "destroy"),
];

/// Returns a complaint if the status of a call without one of its pointers is wrong. Another argument may fail first.
fn complaint(function: &Function, missing: &str, status: u32) -> Option<String> {
    let name = &function.name;
    if !function.has_status {
        return None;
    }
    if status == SYMMALLOC_OK as u32 {
        let may_be_null = function.text.contains("NULL") || OPTIONAL.contains(&(name, missing));
        return (!may_be_null)
            .then(|| format!("{name} accepts NULL for `{missing}`, but its documentation does not say so"));
    }
    let text = message();
    let is_typed = status != SYMMALLOC_INTERNAL as u32 && !text.is_empty();
    (!is_typed).then(|| format!("{name} without `{missing}`: status {status}, {text}"))
}

// All calls return a null pointer for zero bytes. It is not an allocation, and can be freed any number of times.
stub_test!(zero_bytes_are_null_and_own_nothing, {
    let allocator = Allocator::new("");
    for _ in 0..2 {
        let nothing = allocator.allocate(0, 0, null_mut());
        assert_eq!(nothing, 0);
        (0..2).for_each(|_| done(allocator.try_free(nothing)));
    }
    let mut placement = symmalloc_placement::default();
    // SAFETY: a live allocator, and an output pointer.
    let found = unsafe { symmalloc_placement_of(allocator.0, null_mut::<c_void>(), &raw mut placement) };
    assert_eq!(found, SYMMALLOC_UNKNOWN_POINTER);
    let mut shared: (*mut c_char, u64) = (null_mut(), 0);
    // SAFETY: output pointers.
    let status = unsafe { symmalloc_torch_share(null_mut(), &raw mut shared.0, &raw mut shared.1) };
    assert_eq!(status, SYMMALLOC_UNKNOWN_POINTER);
});

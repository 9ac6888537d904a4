//! Numbers at the C boundary: no count, size, id or device crashes a call or requests memory without a bound.

use crate::header::{Kind, call, functions, valid};
use crate::library::*;
use crate::nulls::within_a_deadline;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use symmalloc_torch::*;

/// The limits of the types of counts, sizes and devices, and numbers next to them.
const EXTREMES: [usize; 7] =
    [1 << 20, i32::MAX as usize, 1 << 31, u32::MAX as usize, isize::MAX as usize, usize::MAX - 511, usize::MAX];

stub_test!(an_extreme_number_is_a_typed_error_at_every_function, {
    within_a_deadline(|| {
        let allocator = Allocator::new("");
        // Functions without a status return nothing or throw.
        for function in functions().iter().filter(|function| function.has_status) {
            let is_called = |kind| !matches!(kind, Kind::Real | Kind::Object);
            if !function.arguments.iter().all(|(_, kind)| is_called(*kind)) || function.name == "symmalloc_destroy" {
                continue;
            }
            let arguments = function.arguments.iter();
            let values: Vec<usize> = arguments.map(|argument| valid(argument, allocator).expect("a value")).collect();
            for at in (0..values.len()).filter(|at| function.arguments[*at].1 == Kind::Number) {
                for extreme in EXTREMES {
                    let mut values = values.clone();
                    values[at] = extreme;
                    let status = call(function, &values) as u32;
                    let is_typed = status != SYMMALLOC_INTERNAL as u32;
                    let name = &function.arguments[at].0;
                    assert!(is_typed, "{} with `{name}` {extreme:#x}: {}", function.name, message());
                }
            }
        }
        let pointer = allocator.allocate(0, 512, null_mut());
        done(allocator.try_free(pointer));
    });
});

/// A job in which rank 1 reports a number of heaps that it does not have.
struct Lie {
    ranks: usize,
    heaps: u64,
}

unsafe extern "C" fn lies(context: *mut c_void, mine: *const u8, len: usize, all: *mut u8) -> c_int {
    // SAFETY: the context is a lie, and the buffers have the sizes in the contract.
    let (lie, mine, all) = unsafe {
        let lie = &*context.cast::<Lie>();
        (lie, std::slice::from_raw_parts(mine, len), std::slice::from_raw_parts_mut(all, lie.ranks * len))
    };
    all.chunks_exact_mut(len).for_each(|message| message.copy_from_slice(mine));
    // The first round of mempools starts with the number of heaps.
    if len == 16 {
        all[len..len + 8].copy_from_slice(&lie.heaps.to_le_bytes());
    }
    i32::from(len > 1 << 16)
}

stub_test!(the_counts_of_another_rank_request_bounded_memory, {
    let allocator = Allocator::new("");
    allocator.allocate(0, MIB, null_mut());
    // Sixty thousand heaps of each of a million ranks would take more than a terabyte.
    for lie in [Lie { ranks: 2, heaps: u64::MAX }, Lie { ranks: 1 << 20, heaps: 60_000 }] {
        let context = (&raw const lie).cast_mut().cast();
        // SAFETY: a live allocator, and a gather that meets its contract with this context.
        let status = unsafe { symmalloc_agree_all(allocator.0, 0, lie.ranks as u32, Some(lies), context) };
        assert_eq!(status, SYMMALLOC_MISALIGNED, "{}", message());
        assert!(message().contains(&format!("rank 1 reports {} heaps", lie.heaps)), "{}", message());
    }
});

//! The compiler's answer to a program that shares an allocator of one thread.

use symmalloc_core::lock::{Exclusive, Lock};

/// The compiler lists the types that are not `Sync`, and so names the remedy. `SharedAllocator` has a test that the program does not compile.
#[test]
fn the_type_that_prevents_sharing_names_the_type_to_use() {
    let name = std::any::type_name::<<Exclusive as Lock>::Cell<u8>>();
    assert!(name.ends_with("::UseSharedAllocator<u8>"), "{name}");
}

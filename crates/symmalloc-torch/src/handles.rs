//! Objects that the C interface handed out and that have not been destroyed yet.
//!
//! A destroy call frees its argument, so it accepts only the address of a live object of its type that a create call returned. The
//! process's allocators are not among these objects, because the library owns them.

use crate::error::Error;
use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The types of all objects that are handed out, by address.
static HANDED_OUT: Mutex<BTreeMap<usize, TypeId>> = Mutex::new(BTreeMap::new());

fn handed_out() -> MutexGuard<'static, BTreeMap<usize, TypeId>> {
    HANDED_OUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves an object to the heap, and returns the pointer for C. [`take_back`] destroys it.
pub(crate) fn hand_out<T: 'static>(object: T) -> *mut T {
    let pointer = Box::into_raw(Box::new(object));
    handed_out().insert(pointer.addr(), TypeId::of::<T>());
    pointer
}

/// Returns the object of a pointer that [`hand_out`] returned; `None` for NULL. If several threads call it concurrently, only one of them
/// gets the object.
///
/// # Errors
/// Returns an error for any other pointer, and for an object that was taken back before.
pub(crate) fn take_back<T: 'static>(pointer: *mut T, argument: &'static str) -> Result<Option<Box<T>>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    let mut live = handed_out();
    if live.get(&pointer.addr()) != Some(&TypeId::of::<T>()) {
        return Err(Error::NotCreated { argument, address: pointer.addr() as u64 });
    }
    live.remove(&pointer.addr());
    // SAFETY: `hand_out` created the pointer from a box of this type, and only the call that removes the pointer from the list gets here.
    Ok(Some(unsafe { Box::from_raw(pointer) }))
}

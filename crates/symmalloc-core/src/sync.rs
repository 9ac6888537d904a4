//! What threads share beside the locks of heaps: the standard primitives, or under `--cfg symmalloc_loom` those whose interleavings
//! a model test explores.

#[cfg(all(symmalloc_loom, test))]
pub(crate) use modelled::*;
#[cfg(not(all(symmalloc_loom, test)))]
pub(crate) use std::sync::{
    Mutex, OnceLock,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};

#[cfg(all(symmalloc_loom, test))]
mod modelled {
    pub(crate) use loom::sync::Mutex;
    use loom::sync::atomic::Ordering;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

    /// The standard one, with what it promises where loom can see it: who finds the value comes after who made it.
    #[derive(Debug)]
    pub(crate) struct OnceLock<T> {
        value: std::sync::OnceLock<T>,
        is_made: AtomicBool,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            OnceLock { value: std::sync::OnceLock::new(), is_made: AtomicBool::new(false) }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            self.value.get().filter(|_| self.is_made.load(Ordering::Acquire))
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            let value = self.value.get_or_init(make);
            self.is_made.swap(true, Ordering::AcqRel);
            value
        }
    }
}

//! The processors of the machine, and arithmetic that keeps one busy.

use std::hint::black_box;

/// Performs independent additions, rotations and similar operations, several per cycle.
#[inline(never)]
pub(crate) fn independent(rounds: u64) -> u64 {
    let [mut a, mut b, mut c, mut d, mut e, mut f] = black_box([1_u64, 2, 3, 4, 5, 6]);
    for round in 0..rounds {
        a = a.rotate_left(9) ^ round;
        b = b.wrapping_mul(5).wrapping_sub(round);
        c = (c >> 1).wrapping_add(round);
        d = !d.wrapping_add(round);
        e = e.rotate_left(13).wrapping_add(round);
        f = f.wrapping_mul(9) ^ round;
    }
    a ^ b ^ c ^ d ^ e ^ f
}

/// The processors that this program may run on.
#[cfg(target_os = "linux")]
pub(crate) struct Processors {
    allowed: rustix::thread::CpuSet,
    numbers: Vec<usize>,
}

#[cfg(target_os = "linux")]
impl Processors {
    pub(crate) fn allowed() -> Self {
        use rustix::thread::{CpuSet, sched_getaffinity};
        let allowed = sched_getaffinity(None).unwrap_or_default();
        let numbers = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number)).collect();
        Processors { allowed, numbers }
    }

    pub(crate) fn count(&self) -> usize {
        self.numbers.len().max(1)
    }

    pub(crate) fn stay_on(&self, at: usize) {
        let mut only = rustix::thread::CpuSet::new();
        if let Some(number) = self.numbers.get(at) {
            only.set(*number);
            // If the processor is no longer available, the thread stays where it is.
            let _moved = rustix::thread::sched_setaffinity(None, &only);
        }
    }

    pub(crate) fn go_anywhere(&self) {
        let _moved = rustix::thread::sched_setaffinity(None, &self.allowed);
    }
}

/// A stand-in for systems where the program cannot choose its processor.
#[cfg(not(target_os = "linux"))]
pub(crate) struct Processors;

#[cfg(not(target_os = "linux"))]
impl Processors {
    pub(crate) fn allowed() -> Self {
        Processors
    }

    pub(crate) fn count(&self) -> usize {
        1
    }

    pub(crate) fn stay_on(&self, _: usize) {}

    pub(crate) fn go_anywhere(&self) {}
}

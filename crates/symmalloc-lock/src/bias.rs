//! Who enters how: the protocol of the lock, on atomics alone.
//!
//! Eight flags say who is inside. The first is everybody's: a thread takes it with a locked exchange, and has the lock once
//! nobody is inside by bias. Each of the others is one thread's for good, and no other thread ever writes it. A thread that
//! has the bias enters with a plain store to its flag, and looks whether it still has the bias.
//!
//! ```text
//!  owner? ── mine ── my flag = 1 ── light() ── still mine? ──► inside ── my flag = 0
//!    │                                              │ no
//!    │ nobody's, another's                    my flag = 0
//!    ▼                                              │
//!  flag 0 = 1, by exchange ◄────────────────────────┘
//!    │
//!    ├─ another's: owner = nobody ── heavy() ── until its flag is 0 ──► inside ── flag 0 = 0
//!    ├─ often enough in a row: owner = me, my flag = 1, flag 0 = 0 ───► inside ── my flag = 0
//!    └────────────────────────────────────────────────────────────────► inside ── flag 0 = 0
//! ```
//!
//! **Why nobody meets.** A thread that takes the bias away stores `owner` and then looks at the flag; one that enters by bias
//! stores the flag and then looks at `owner`. With the [fences](crate::membarrier) in between at least one sees the
//! other. Only a thread itself makes itself the owner, from inside, so who still is the owner finds what it left behind.
//!
//! **Why a flag each.** A thread may stop between the look at `owner` and the store to its flag, for as long as the system
//! likes. The store comes late then, and is taken back; to a flag that another thread enters by it would open the lock.
//! A thread that ended cannot be there any more: its number, and its flag with it, may be another thread's.

use crate::membarrier;
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::thread_number::STEP;
use crate::wait;

/// Number of flags: everybody's, and those of the first seven threads that come often.
const FLAGS: usize = STEP as usize;
/// The flag that everybody may take.
const EVERYBODY: usize = 0;
/// Owns nothing: unlike every thread's number in more bits than a flag's number has.
const NOBODY: u32 = u32::MAX;

/// A lock that threads come to in turns gets more patient, up to this.
const PATIENCE_MAX: u32 = 1 << 16;

/// The state of a lock. Whoever is inside may read and write what the comments say is the insider's.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Bias {
    /// Number of the thread that has the bias plus that of its flag. Written by insiders, and by whoever holds flag 0.
    owner: AtomicU32,
    /// The insider's: the flag that it came by.
    entered: AtomicU32,
    /// Who is inside, or about to be.
    flags: [AtomicBool; FLAGS],
    /// The insider's: the thread that came by flag 0 the last time, and how many times in a row.
    last: AtomicU32,
    streak: AtomicU32,
    patience: AtomicU32,
    /// The insider's: whose flag each is. The first is nobody's.
    holders: [AtomicU32; FLAGS],
}

impl Bias {
    /// A lock that gives a bias after `patience` times in a row.
    #[cfg(not(all(symmalloc_loom, test)))]
    pub(crate) const fn new(patience: u32) -> Self {
        Bias {
            owner: AtomicU32::new(NOBODY),
            entered: AtomicU32::new(EVERYBODY as u32),
            flags: [const { AtomicBool::new(false) }; FLAGS],
            last: AtomicU32::new(0),
            streak: AtomicU32::new(0),
            patience: AtomicU32::new(patience),
            holders: [const { AtomicU32::new(0) }; FLAGS],
        }
    }

    #[cfg(all(symmalloc_loom, test))]
    pub(crate) fn new(patience: u32) -> Self {
        Bias {
            owner: AtomicU32::new(NOBODY),
            entered: AtomicU32::new(EVERYBODY as u32),
            flags: std::array::from_fn(|_| AtomicBool::new(false)),
            last: AtomicU32::new(0),
            streak: AtomicU32::new(0),
            patience: AtomicU32::new(patience),
            holders: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    /// Enters if the thread with this number has the bias. Whether it is inside now.
    #[inline(always)]
    pub(crate) fn enter_by_bias(&self, thread: u32) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        let flag = owner as usize ^ thread as usize;
        // A thread that is inside already must not come in again.
        if flag >= FLAGS || self.flags[flag].load(Ordering::Relaxed) {
            return false;
        }
        self.flags[flag].store(true, Ordering::Relaxed);
        membarrier::light();
        if self.owner.load(Ordering::Relaxed) == owner {
            return true;
        }
        self.flags[flag].store(false, Ordering::Release);
        false
    }

    /// Enters as any thread may, and waits for as long as it takes. A thread without a number never gets the bias.
    pub(crate) fn enter(&self, thread: u32) {
        if !self.take() {
            wait::until(|| !self.flags[EVERYBODY].load(Ordering::Relaxed) && self.take());
        }
        if self.is_biased() {
            self.revoke();
        }
        self.count(thread);
    }

    /// Enters if nobody is inside and nobody has the bias. Whether it is inside now.
    pub(crate) fn try_enter(&self, thread: u32) -> bool {
        // Looks before it takes: who fails leaves the owner its cache line.
        if self.is_biased() || self.flags[EVERYBODY].load(Ordering::Relaxed) || !self.take() {
            return false;
        }
        if self.is_biased() {
            self.flags[EVERYBODY].store(false, Ordering::Release);
            return false;
        }
        self.count(thread);
        true
    }

    #[inline(always)]
    fn take(&self) -> bool {
        self.flags[EVERYBODY].compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether some thread has the bias.
    #[inline(always)]
    pub(crate) fn is_biased(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != NOBODY
    }

    /// Takes the bias away from the thread that has it.
    #[cold]
    #[inline(never)]
    fn revoke(&self) {
        let flag = self.owner.load(Ordering::Relaxed) as usize % FLAGS;
        self.owner.store(NOBODY, Ordering::Relaxed);
        membarrier::heavy();
        // Acquire: what the owner did inside is seen.
        wait::until(|| !self.flags[flag].load(Ordering::Acquire));
        self.entered.store(EVERYBODY as u32, Ordering::Relaxed);
        let patience = self.patience.load(Ordering::Relaxed);
        self.patience.store(PATIENCE_MAX.min(2 * patience), Ordering::Relaxed);
    }

    /// Notes who came, and gives the bias to a thread that comes often.
    #[inline(always)]
    fn count(&self, thread: u32) {
        if self.last.load(Ordering::Relaxed) != thread {
            self.last.store(thread, Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
            return;
        }
        let streak = self.streak.load(Ordering::Relaxed) + 1;
        self.streak.store(streak, Ordering::Relaxed);
        if streak >= self.patience.load(Ordering::Relaxed) {
            self.give(thread);
        }
    }

    /// Gives the bias to the insider, if there is a flag for it.
    #[cold]
    #[inline(never)]
    fn give(&self, thread: u32) {
        self.streak.store(0, Ordering::Relaxed);
        if thread == 0 || !membarrier::is_supported() {
            return;
        }
        let flag = (1..FLAGS).find(|flag| [0, thread].contains(&self.holders[*flag].load(Ordering::Relaxed)));
        let Some(flag) = flag else { return };
        self.holders[flag].store(thread, Ordering::Relaxed);
        self.entered.store(flag as u32, Ordering::Relaxed);
        self.flags[flag].store(true, Ordering::Relaxed);
        self.owner.store(thread + flag as u32, Ordering::Relaxed);
        // Whoever takes it next sees the owner and its flag.
        self.flags[EVERYBODY].store(false, Ordering::Release);
    }

    /// Leaves. The caller is inside.
    #[inline(always)]
    pub(crate) fn leave(&self) {
        let flag = self.entered.load(Ordering::Relaxed) as usize % FLAGS;
        self.flags[flag].store(false, Ordering::Release);
    }
}

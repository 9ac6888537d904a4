//! The rate at which ranks compare their histories, and a wrapper that runs agreements at that rate.

use super::agree::agree;
use super::outcome::{Agreed, AgreementError};
use super::point::Point;
use super::transport::Transport;
use std::num::{NonZeroU32, NonZeroU64};
use symmalloc_core::backend::Backend;
use symmalloc_core::generic;
use symmalloc_core::lock::Lock;

/// The rate at which ranks compare their histories. Must be the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Never.
    Off,
    /// At every point where the program synchronizes its ranks.
    #[default]
    AtSync,
    /// At every n-th point where the program synchronizes its ranks.
    EverySyncs(NonZeroU32),
    /// At every sync, and after every given number of ops.
    EveryOps(NonZeroU64),
    /// At every sync, and after every op. Intended for debugging.
    EachOp,
}

/// One rank's agreements with the other ranks, at the rate that its [`Mode`] sets.
///
/// The program must call [`at_sync`](Self::at_sync) and [`after_op`](Self::after_op) at the same points on every rank.
/// These are the only methods that perform a collective operation.
///
/// # Examples
/// ```
/// use std::{thread, time::Duration};
/// use symmalloc::agreement::{Agreement, Mode, ThreadTransport};
/// use symmalloc::{Allocator, Config, PoolConfig};
/// use symmalloc::sim::SimBackend;
///
/// thread::scope(|scope| {
///     for (rank, transport) in (0..).zip(ThreadTransport::group(4, Duration::from_secs(60))) {
///         scope.spawn(move || {
///             let pool = PoolConfig::builder().symmetric(true).build().unwrap();
///             let config = Config::builder().default_pool(pool).build().unwrap();
///             let allocator = Allocator::new(SimBackend::builder().rank(rank).build(), config).unwrap();
///             let mut agreement = Agreement::new(Mode::AtSync, transport);
///             let stream = allocator.register_stream().unwrap();
///             allocator.allocate(symmalloc::PoolId::DEFAULT, stream, 1 << 20).unwrap();
///             // The allocation and the memory obtained for it count as two ops.
///             assert_eq!(agreement.at_sync(&allocator).unwrap().unwrap().ops, 2);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Agreement<T> {
    mode: Mode,
    transport: T,
    /// Syncs so far.
    syncs: u32,
    /// Ops counted since `after_op` last ran an agreement.
    ops: u64,
}

impl Mode {
    /// Returns `true` if ranks compare at their n-th sync, counted from 1.
    pub fn compares_at_sync(self, sync: u32) -> bool {
        match self {
            Mode::Off => false,
            Mode::EverySyncs(every) => sync.is_multiple_of(every.get()),
            Mode::AtSync | Mode::EveryOps(_) | Mode::EachOp => true,
        }
    }
}

impl<T: Transport> Agreement<T> {
    /// Creates an agreement that compares over `transport` as often as `mode` requires.
    pub fn new(mode: Mode, transport: T) -> Self {
        Agreement { mode, transport, syncs: 0, ops: 0 }
    }

    /// Returns how often ranks compare.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Compares ranks at a point where the program synchronizes them. Returns `None` if the mode requires no comparison at this sync.
    ///
    /// # Errors
    /// Fails like [`agree`].
    pub fn at_sync<B: Backend, L: Lock>(
        &mut self,
        allocator: &generic::Allocator<B, L>,
    ) -> Result<Option<Agreed>, AgreementError> {
        self.syncs = self.syncs.wrapping_add(1);
        if !self.mode.compares_at_sync(self.syncs) {
            return Ok(None);
        }
        agree(allocator, &self.transport, Point::Sync).map(Some)
    }

    /// Counts an op on a symmetric pool, and compares ranks if the mode requires a comparison after this op. Returns
    /// `None` if it does not.
    ///
    /// Do not call it for ops in private pools, because other ranks do not perform these ops.
    ///
    /// # Errors
    /// Fails like [`agree`].
    #[inline]
    pub fn after_op<B: Backend, L: Lock>(
        &mut self,
        allocator: &generic::Allocator<B, L>,
    ) -> Result<Option<Agreed>, AgreementError> {
        let every = match self.mode {
            Mode::Off | Mode::AtSync | Mode::EverySyncs(_) => return Ok(None),
            Mode::EveryOps(every) => every.get(),
            Mode::EachOp => 1,
        };
        self.ops += 1;
        if self.ops < every {
            return Ok(None);
        }
        self.ops = 0;
        agree(allocator, &self.transport, Point::Op).map(Some)
    }
}

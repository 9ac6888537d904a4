//! When to compare: what a program that wants it cheap, or wants it exact, tells its ranks.

use super::agree::agree;
use super::outcome::{Agreed, AgreementError};
use super::point::Point;
use super::transport::Transport;
use std::num::NonZeroU64;
use symmalloc_core::Allocator;
use symmalloc_core::backend::Backend;
use symmalloc_core::lock::Lock;

/// When ranks compare. The same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Never.
    Off,
    /// Where the program synchronizes its ranks.
    #[default]
    AtSync,
    /// There, and after every so many ops.
    EveryOps(NonZeroU64),
    /// There, and after each op: to find a bug.
    EachOp,
}

/// One rank's agreements with the others, as often as its [`Mode`] says.
///
/// The program calls [`at_sync`](Self::at_sync) and [`after_op`](Self::after_op) at the same points on every rank; this is
/// where collectives happen, and the only place.
///
/// # Examples
/// ```
/// use std::{thread, time::Duration};
/// use symmalloc_agreement::{Agreement, Mode, ThreadTransport};
/// use symmalloc_core::{Allocator, Config, PoolConfig};
/// use symmalloc_sim::SimBackend;
///
/// thread::scope(|scope| {
///     for (rank, transport) in (0..).zip(ThreadTransport::group(4, Duration::from_secs(60))) {
///         scope.spawn(move || {
///             let pool = PoolConfig::builder().symmetric(true).build().unwrap();
///             let config = Config::builder().default_pool(pool).build().unwrap();
///             let allocator: Allocator<_> = Allocator::new(SimBackend::builder().rank(rank).build(), config).unwrap();
///             let mut agreement = Agreement::new(Mode::AtSync, transport);
///             let stream = allocator.register_stream().unwrap();
///             allocator.allocate(symmalloc_core::PoolId::DEFAULT, stream, 1 << 20).unwrap();
///             // The allocation, and the memory that was obtained for it.
///             assert_eq!(agreement.at_sync(&allocator).unwrap().unwrap().ops, 2);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Agreement<T> {
    mode: Mode,
    transport: T,
    /// Since the last agreement after an op.
    ops: u64,
}

impl<T: Transport> Agreement<T> {
    /// Agreements over a transport.
    pub fn new(mode: Mode, transport: T) -> Self {
        Agreement { mode, transport, ops: 0 }
    }

    /// When ranks compare.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The ranks have come to a point where the program synchronizes them. `None` when the mode is off.
    ///
    /// # Errors
    /// As [`agree`].
    pub fn at_sync<B: Backend, L: Lock>(
        &mut self,
        allocator: &Allocator<B, L>,
    ) -> Result<Option<Agreed>, AgreementError> {
        if self.mode == Mode::Off {
            return Ok(None);
        }
        agree(allocator, &self.transport, Point::Sync).map(Some)
    }

    /// The program has carried out an op on a symmetric pool. `None` when the mode does not compare now.
    ///
    /// Ops in private pools, which other ranks do not carry out, must not be told here.
    ///
    /// # Errors
    /// As [`agree`].
    #[inline]
    pub fn after_op<B: Backend, L: Lock>(
        &mut self,
        allocator: &Allocator<B, L>,
    ) -> Result<Option<Agreed>, AgreementError> {
        let every = match self.mode {
            Mode::Off | Mode::AtSync => return Ok(None),
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

//! Functions that run an inquiry to completion, over a transport or for all ranks in one thread.

use super::exchange::Exchange;
use super::inquiry::{Inquiry, Progress};
use super::outcome::{Agreed, AgreementError};
use super::point::Point;
use super::rank_history::RankHistory;
use super::transport::{Gathered, Transport};
use symmalloc_core::backend::Backend;
use symmalloc_core::generic;
use symmalloc_core::lock::Lock;

/// Compares this rank's symmetric pools with those of all other ranks. Every rank must call it at the same point of the
/// program.
///
/// If the ranks agree, the history before this point is discarded. It is known to be equal on all ranks, so later
/// agreements need not compare it again.
///
/// # Errors
/// Returns [`AgreementError::Disagreed`], with the same contents on every rank, if the ranks differ. Returns a
/// different error if the comparison could not be completed. The allocator is unchanged in both cases.
pub fn agree<B: Backend, L: Lock>(
    allocator: &generic::Allocator<B, L>,
    transport: &impl Transport,
    point: Point,
) -> Result<Agreed, AgreementError> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    let _entered = tracing::debug_span!(target: "symmalloc", "ranks.agree", rank, ranks, %point).entered();
    let history = RankHistory::new(allocator, point);
    let exchanged = Exchange::begin(transport, Some(&history), &[])?.finish()?;
    history.settle();
    Ok(exchanged.agreed.expect("an exchange with a history compares it"))
}

/// Compares any number of ranks in one thread with a single inquiry. The n-th history belongs to rank n.
///
/// # Errors
/// Fails like [`agree`], except for transport errors.
pub fn agree_in_lockstep(histories: &[RankHistory<'_>]) -> Result<Agreed, AgreementError> {
    let mut inquiry = Inquiry::new(histories.len() as u32);
    loop {
        let mut messages = Vec::with_capacity(histories.len() * inquiry.question().message_bytes());
        histories.iter().for_each(|history| history.answer(inquiry.question(), &mut messages));
        match inquiry.advance(&Gathered::new(messages, inquiry.question().message_bytes()))? {
            Progress::Asked => {}
            Progress::Agreed(agreed) => {
                histories.iter().for_each(RankHistory::settle);
                return Ok(agreed);
            }
            Progress::Disagreed(disagreement) => return Err(AgreementError::Disagreed(disagreement)),
        }
    }
}

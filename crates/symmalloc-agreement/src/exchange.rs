//! The message exchange of an agreement, over a transport.
//!
//! ```text
//!   answer │ extra ──► all-gather ──► the caller compares the extra bytes of all ranks
//!                                          │
//!                                          ▼
//!                                      question ──► answer ──► all-gather ──► ... ──► agreed or disagreed
//! ```
//!
//! The extra bytes let a caller compare more than histories in the same collective, such as the windows that each rank is about to
//! register. The inquiry sends further messages only if histories differ.

use super::inquiry::{Inquiry, Progress};
use super::outcome::{Agreed, AgreementError};
use super::rank_history::RankHistory;
use super::transport::{Gathered, Transport};

/// An exchange after its first round, in which every rank has sent its summary and extra bytes.
///
/// # Examples
/// ```
/// use std::{thread, time::Duration};
/// use symmalloc::agreement::{Exchange, Point, RankHistory, ThreadTransport, Transport};
/// use symmalloc::sim::SimBackend;
/// use symmalloc::{Allocator, Config};
///
/// thread::scope(|scope| {
///     for transport in ThreadTransport::group(2, Duration::from_secs(60)) {
///         scope.spawn(move || {
///             let allocator = Allocator::new(SimBackend::builder().build(), Config::default()).unwrap();
///             let history = RankHistory::new(&allocator, Point::Sync);
///             let rank = [transport.rank() as u8];
///             let exchange = Exchange::begin(&transport, Some(&history), &rank).unwrap();
///             assert!(!exchange.is_unanimous(), "the extra bytes differ");
///             assert_eq!(exchange.extras().collect::<Vec<_>>(), [[0], [1]]);
///             assert_eq!(exchange.finish().unwrap().rounds, 1);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Exchange<'a, T> {
    transport: &'a T,
    /// `None` if histories are not compared.
    history: Option<&'a RankHistory<'a>>,
    inquiry: Inquiry,
    first: Gathered,
    answer_bytes: usize,
    is_unanimous: bool,
}

/// The result of an exchange in which no histories differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exchanged {
    /// The agreement; `None` if histories were not compared.
    pub agreed: Option<Agreed>,
    /// Number of collectives that the exchange took.
    pub rounds: u64,
}

impl<'a, T: Transport> Exchange<'a, T> {
    /// Runs the first round. Every rank must call it at the same point of the program, with the same number of extra bytes. Either all
    /// ranks must pass a history, or none. To detect ranks that differ in this, a caller can include its choice in the extra bytes.
    ///
    /// # Errors
    /// Returns an error if the transport fails or returns messages of a different size.
    pub fn begin(transport: &'a T, history: Option<&'a RankHistory<'a>>, extra: &[u8]) -> Result<Self, AgreementError> {
        let inquiry = Inquiry::new(transport.ranks());
        let answer_bytes = inquiry.question().message_bytes();
        let mut message = Vec::with_capacity(answer_bytes + extra.len());
        match history {
            Some(history) => history.answer(inquiry.question(), &mut message),
            None => message.resize(answer_bytes, 0),
        }
        message.extend_from_slice(extra);
        let first = transport.all_gather(&message)?;
        first.check_shape(transport.ranks(), message.len())?;
        let is_unanimous = first.iter().all(|other| other == message);
        Ok(Exchange { transport, history, inquiry, first, answer_bytes, is_unanimous })
    }

    /// Returns `true` if all ranks sent the same message. Their histories and extra bytes are then equal, and the ranks need not call
    /// [`finish`](Self::finish).
    pub fn is_unanimous(&self) -> bool {
        self.is_unanimous
    }

    /// Returns the extra bytes of all ranks, in rank order.
    pub fn extras(&self) -> impl Iterator<Item = &[u8]> {
        self.first.iter().map(|message| &message[self.answer_bytes..])
    }

    /// Completes the comparison of histories. If they differ, this takes further rounds. Either all ranks must call it, or none.
    ///
    /// # Errors
    /// Returns [`AgreementError::Disagreed`], with the same contents on every rank, if the histories differ. Returns a different error if
    /// the comparison could not be completed.
    pub fn finish(mut self) -> Result<Exchanged, AgreementError> {
        let Some(history) = self.history else { return Ok(Exchanged { agreed: None, rounds: 1 }) };
        let answers: Vec<u8> = self.first.iter().flat_map(|message| &message[..self.answer_bytes]).copied().collect();
        let mut gathered = Gathered::new(answers, self.answer_bytes);
        let mut message = Vec::new();
        loop {
            match self.inquiry.advance(&gathered)? {
                Progress::Asked => {}
                Progress::Agreed(agreed) => {
                    return Ok(Exchanged { agreed: Some(agreed), rounds: self.inquiry.rounds().into() });
                }
                Progress::Disagreed(disagreement) => {
                    disagreement.trace(self.transport.rank());
                    return Err(AgreementError::Disagreed(disagreement));
                }
            }
            message.clear();
            history.answer(self.inquiry.question(), &mut message);
            gathered = self.transport.all_gather(&message)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Point, ProtocolError, ThreadTransport, TransportError};
    use std::thread;
    use std::time::Duration;
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::{PoolId, SharedAllocator};
    use symmalloc_sim::SimBackend;

    /// Runs an exchange on two ranks that allocate these sizes, with these extra bytes. Returns the outcome of rank 0.
    fn exchange(sizes: [u64; 2], extras: [u8; 2], compares: bool) -> (bool, Result<Exchanged, AgreementError>) {
        let ends = ThreadTransport::group(2, Duration::from_secs(60));
        let ranks = ends.into_iter().zip(sizes).zip(extras);
        let outcomes = thread::scope(|scope| {
            let run = |((transport, size_bytes), extra): ((ThreadTransport, u64), u8)| {
                scope.spawn(move || {
                    let pool =
                        PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
                    let config =
                        Config::builder().default_pool(pool).build().expect("the configuration should be valid");
                    let allocator = SharedAllocator::new(SimBackend::builder().build(), config)
                        .expect("the arguments should be valid");
                    let stream = allocator.register_stream().expect("the first stream should be registered");
                    let _live =
                        allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("the allocation should fit");
                    let history = compares.then(|| RankHistory::new(&allocator, Point::Sync));
                    let exchange =
                        Exchange::begin(&transport, history.as_ref(), &[7, extra]).expect("all ranks should arrive");
                    let received: Vec<Vec<u8>> = exchange.extras().map(<[u8]>::to_vec).collect();
                    assert_eq!(received, extras.map(|extra| vec![7, extra]));
                    (exchange.is_unanimous(), exchange.finish())
                })
            };
            let threads: Vec<_> = ranks.map(run).collect();
            threads.into_iter().map(|thread| thread.join().expect("the thread should not panic")).collect::<Vec<_>>()
        });
        assert_eq!(outcomes[0], outcomes[1], "all ranks reach the same result");
        outcomes.into_iter().next().expect("there are two")
    }

    #[test]
    fn histories_are_compared_whatever_the_extra_bytes() {
        for extras in [[1, 1], [1, 2]] {
            let (is_unanimous, outcome) = exchange([1 << 20, 1 << 20], extras, true);
            let exchanged = outcome.expect("the histories are equal");
            assert_eq!(is_unanimous, extras[0] == extras[1]);
            assert_eq!((exchanged.agreed.map(|agreed| agreed.ops), exchanged.rounds), (Some(2), 1));
            let (is_unanimous, outcome) = exchange([1 << 20, 2 << 20], extras, true);
            let Err(AgreementError::Disagreed(disagreement)) = outcome else { panic!("{outcome:?}") };
            assert!(!is_unanimous && disagreement.rounds > 1, "{disagreement}");
        }
    }

    #[test]
    fn without_a_history_only_the_extra_bytes_are_exchanged() {
        for extras in [[1, 1], [1, 2]] {
            let (is_unanimous, outcome) = exchange([1 << 20, 2 << 20], extras, false);
            assert_eq!((is_unanimous, outcome), (extras[0] == extras[1], Ok(Exchanged { agreed: None, rounds: 1 })));
        }
    }

    #[test]
    fn messages_of_another_size_are_an_error() {
        #[derive(Debug)]
        struct Short;
        impl Transport for Short {
            fn rank(&self) -> u32 {
                0
            }
            fn ranks(&self) -> u32 {
                2
            }
            fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
                Ok(Gathered::new(message, message.len()))
            }
        }
        let error = Exchange::begin(&Short, None, &[1]).expect_err("one of two messages is missing");
        assert!(matches!(error, AgreementError::Protocol(ProtocolError::WrongShape { messages: 1, ranks: 2, .. })));
    }
}

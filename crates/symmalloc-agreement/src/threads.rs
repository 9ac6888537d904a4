//! A transport between threads of one process, for tests, simulated jobs, and programs that drive one device per
//! thread.
//!
//! ```text
//!  open:   rank 0 ─► slot 0 ┐
//!          rank 1 ─► slot 1 ├─ the last rank closes the round ─► all read the same bytes ─► next round opens
//!          rank 2 ─► slot 2 ┘
//! ```
//! A rank can be at most one round ahead: it enters a round only after it has read the result of the previous one.
//!
//! The first rank that gives up determines the error of the round. Every rank gets this error, now and in later calls. Without this rule, a
//! rank that gave up because of a missing rank, and was then dropped, would itself be reported as lost to the ranks that still wait.

use super::ranks::RankSet;
use super::transport::{Gathered, Transport, TransportError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One rank's endpoint. Dropping it notifies the other ranks that this rank has left.
#[derive(Debug)]
pub struct ThreadTransport {
    rank: u32,
    timeout: Duration,
    meeting: Arc<ThreadMeeting>,
}

#[derive(Debug)]
struct ThreadMeeting {
    state: Mutex<RoundState>,
    changed: Condvar,
}

#[derive(Debug)]
struct RoundState {
    /// Number of completed rounds.
    rounds: u64,
    /// Messages received in the open round, indexed by rank.
    given: Vec<Option<Box<[u8]>>>,
    /// Result of the last completed round.
    last: Result<Gathered, TransportError>,
    /// The first error, after which no further round can complete.
    failed: Option<TransportError>,
}

impl ThreadTransport {
    /// Creates the endpoints of `ranks` ranks. Each waits at most `timeout` for the other ranks in a round.
    pub fn group(ranks: u32, timeout: Duration) -> Vec<ThreadTransport> {
        let state = RoundState {
            rounds: 0,
            given: vec![None; ranks as usize],
            last: Ok(Gathered::new([].as_slice(), 0)),
            failed: None,
        };
        let meeting = Arc::new(ThreadMeeting { state: Mutex::new(state), changed: Condvar::new() });
        (0..ranks).map(|rank| ThreadTransport { rank, timeout, meeting: Arc::clone(&meeting) }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, RoundState> {
        self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.lock().given.len() as u32
    }

    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        let mut state = self.lock();
        let round = state.rounds;
        state.given[self.rank as usize] = Some(message.into());
        if state.failed.is_none() && state.given.iter().all(Option::is_some) {
            state.close_round();
            self.meeting.changed.notify_all();
            return state.last.clone();
        }
        let is_open = |state: &mut RoundState| state.rounds == round && state.failed.is_none();
        let waited = self.meeting.changed.wait_timeout_while(state, self.timeout, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.rounds > round {
            return state.last.clone();
        }
        let missing = state.missing();
        let verdict = state.fail(TransportError::TimedOut { missing, waited: self.timeout });
        self.meeting.changed.notify_all();
        Err(verdict)
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        self.lock().fail(TransportError::RankLost { rank: self.rank });
        self.meeting.changed.notify_all();
    }
}

impl RoundState {
    /// Makes the transport fail with this error, unless it has already failed. Returns the error with which it failed
    /// first.
    fn fail(&mut self, error: TransportError) -> TransportError {
        self.failed.get_or_insert(error).clone()
    }

    fn missing(&self) -> RankSet {
        self.given.iter().zip(0..).filter(|(given, _)| given.is_none()).map(|(_, rank)| rank).collect()
    }

    /// Completes the round once all ranks have sent a message.
    fn close_round(&mut self) {
        let messages: Vec<_> = self.given.iter_mut().filter_map(Option::take).collect();
        let expected_bytes = messages.first().map_or(0, |first| first.len());
        let unequal = messages.iter().zip(0..).find(|(message, _)| message.len() != expected_bytes);
        self.last = match unequal {
            None => Ok(Gathered::new(messages.concat(), expected_bytes)),
            Some((message, rank)) => {
                Err(TransportError::UnequalLengths { rank, given_bytes: message.len(), expected_bytes })
            }
        };
        self.rounds += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn every_rank_receives_every_message_in_each_round() {
        thread::scope(|scope| {
            for end in ThreadTransport::group(5, LONG) {
                scope.spawn(move || {
                    for round in 0..200_u8 {
                        let gathered = end.all_gather(&[round, end.rank() as u8]).expect("all are there");
                        let expected: Vec<Vec<u8>> = (0..5).map(|rank| vec![round, rank]).collect();
                        assert_eq!(gathered.iter().map(<[u8]>::to_vec).collect::<Vec<_>>(), expected);
                    }
                    end
                });
            }
        });
    }

    #[test]
    fn a_dropped_rank_is_reported_to_the_others() {
        let mut ends = ThreadTransport::group(3, LONG);
        drop(ends.remove(1));
        for end in &ends {
            assert_eq!(end.all_gather(&[1]), Err(TransportError::RankLost { rank: 1 }));
        }
    }

    #[test]
    fn ranks_that_do_not_arrive_are_named() {
        let ends = ThreadTransport::group(4, Duration::from_millis(5));
        let Err(TransportError::TimedOut { missing, .. }) = ends[2].all_gather(&[1]) else {
            panic!("no other rank arrived")
        };
        assert_eq!(missing.to_string(), "0-1,3");
    }

    /// Whichever rank is missing, every rank gets the same error. So does the missing rank itself, if it arrives after the others have
    /// left.
    #[test]
    fn every_rank_gets_the_first_verdict() {
        for (ranks, missing) in [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)] {
            let mut ends = ThreadTransport::group(ranks, Duration::from_millis(20));
            let late = ends.remove(missing as usize);
            let mut verdicts: Vec<_> = thread::scope(|scope| {
                let enter = |end: ThreadTransport| scope.spawn(move || end.all_gather(&[1]));
                let threads: Vec<_> = ends.into_iter().map(enter).collect();
                threads.into_iter().map(|thread| thread.join().expect("the thread should not panic")).collect()
            });
            verdicts.push(late.all_gather(&[1]));
            let Err(TransportError::TimedOut { missing: named, .. }) = &verdicts[0] else {
                panic!("rank {missing} did not arrive: {verdicts:?}")
            };
            assert!(named.contains(missing), "{named}");
            assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
        }
    }

    #[test]
    fn messages_of_different_lengths_are_rejected_on_every_rank() {
        let ends = ThreadTransport::group(2, LONG);
        let expected = Err(TransportError::UnequalLengths { rank: 1, given_bytes: 2, expected_bytes: 1 });
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(ends[0].all_gather(&[1]), expected));
            assert_eq!(ends[1].all_gather(&[1, 2]), expected);
        });
    }
}

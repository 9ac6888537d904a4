//! The state machine of an agreement: in each round it asks all ranks one question and combines their answers.
//!
//! ```text
//!  compare ──all equal──────────────────────────────────────────────► agreed
//!     │ configurations differ          │ histories differ
//!     ▼                                ▼
//!  policies (pages) ─► policy       heaps (pages) ─► search: digests, checkpoints, ops ─► details
//!                        │             (16 heaps at once, until all heaps that differ are searched)  │
//!                        └─────────────────► disagreed ◄────────────────────────────────────────────┘
//! ```
//!
//! The next state depends only on the gathered messages, so all ranks ask the same next question and reach the same
//! result, including errors. The state combines the answers of all ranks instead of storing them, so it takes only a
//! few words per heap that differs, and one set of ranks per distinct answer.

use super::directory::Directory;
use super::message::{RankSummaryMessage, messages};
use super::outcome::{Agreed, Next};
use super::point::Point;
use super::policies::Policies;
use super::protocol::ProtocolError;
use super::question::{Ask, Question};
use super::ranks::RankSet;
use super::report::{Difference, Disagreement};
use super::search::Search;
use super::transport::Gathered;
use std::collections::BTreeMap;

/// Maximum number of rounds, enough for a hundred thousand heaps. An inquiry that takes longer is faulty.
const ROUNDS_MAX: u32 = 1 << 12;

/// The result of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// The inquiry continues with the next [question](Inquiry::question).
    Asked,
    /// All ranks have the same history. Every rank should now [settle](super::RankHistory::settle) it.
    Agreed(Agreed),
    /// The ranks differ.
    Disagreed(Box<Disagreement>),
}

/// The state machine of one agreement. Each rank runs its own instance, or a single instance serves all ranks.
#[derive(Debug)]
pub struct Inquiry {
    ranks: u32,
    rounds: u32,
    question: Question,
    policies: Policies,
    directory: Directory,
    search: Search,
}

impl Inquiry {
    /// Creates an inquiry among `ranks` ranks.
    pub fn new(ranks: u32) -> Self {
        Inquiry {
            ranks,
            rounds: 0,
            question: Question(Ask::Compare),
            policies: Policies::default(),
            directory: Directory::default(),
            search: Search::new(ranks),
        }
    }

    /// Returns the question that every rank must answer in this round.
    pub fn question(&self) -> &Question {
        &self.question
    }

    /// Returns the number of rounds completed so far.
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Processes the answers of all ranks to the current question.
    ///
    /// # Errors
    /// Returns a [`ProtocolError`] if the answers are malformed or contradictory. The inquiry cannot continue after an
    /// error.
    pub fn advance(&mut self, gathered: &Gathered) -> Result<Progress, ProtocolError> {
        let ranks = self.ranks;
        gathered.check_shape(ranks, self.question.message_bytes())?;
        self.rounds += 1;
        if self.rounds > ROUNDS_MAX {
            return Err(ProtocolError::TooManyRounds { rounds: self.rounds });
        }
        let next = match &self.question.0 {
            Ask::Compare => compare(gathered)?,
            Ask::Policies { first } => self.policies.page(*first, gathered)?,
            Ask::Policy { number } => self.policies.texts(*number, gathered)?,
            Ask::Heaps { .. } => match self.directory.page(ranks, gathered)? {
                Some(ask) => Next::Ask(ask),
                None => self.search.begin(self.directory.take_differing())?,
            },
            Ask::Digests { at } => self.search.digests(at, gathered)?,
            Ask::Checkpoints { heap } => self.search.checkpoints(*heap, gathered)?,
            Ask::Ops { at } => self.search.ops(at, gathered)?,
            Ask::Details { at } => self.search.details(*at, gathered)?,
        };
        Ok(match next {
            Next::Ask(ask) => {
                self.question = Question(ask);
                Progress::Asked
            }
            Next::Agreed(agreed) => Progress::Agreed(agreed),
            Next::Disagreed(difference) => {
                Progress::Disagreed(Box::new(Disagreement { ranks, rounds: self.rounds, difference }))
            }
        })
    }
}

/// Processes the first round, which is also the last one if the ranks agree.
fn compare(gathered: &Gathered) -> Result<Next, ProtocolError> {
    let mut points: BTreeMap<u8, RankSet> = BTreeMap::new();
    let mut first = None;
    let (mut are_policies_equal, mut are_histories_equal) = (true, true);
    for message in messages::<RankSummaryMessage>(gathered) {
        let (rank, message) = message?;
        let summary = message.decode(rank)?;
        if point(summary.point).is_none() {
            return Err(ProtocolError::Garbled { rank });
        }
        points.entry(summary.point).or_default().push(rank);
        let first = first.get_or_insert(summary);
        are_policies_equal &= (summary.policies, summary.policy_digest) == (first.policies, first.policy_digest);
        are_histories_equal &= (summary.heaps, summary.digest) == (first.heaps, first.digest);
    }
    Ok(if !are_policies_equal {
        Next::Ask(Ask::Policies { first: 0 })
    } else if !are_histories_equal {
        Next::Ask(Ask::Heaps { after: None })
    } else if points.len() > 1 {
        Next::Disagreed(Difference::Point(
            points.into_iter().filter_map(|(p, ranks)| Some((ranks, point(p)?))).collect(),
        ))
    } else {
        Next::Agreed(Agreed { ops: first.map_or(0, |first| first.digest.ops) })
    })
}

fn point(number: u8) -> Option<Point> {
    [Point::Sync, Point::Op].into_iter().find(|point| *point as u8 == number)
}

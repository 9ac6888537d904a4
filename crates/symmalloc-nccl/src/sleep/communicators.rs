//! The communicators of a pool in a sleep or wake, as all ranks report them.

use crate::sleep::error::{SleepDifference, SleepField};
use crate::sleep::message::{CommunicatorRow, WAKE};
use std::collections::BTreeMap;

/// The combined reports of all ranks on one communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reports {
    /// Number of ranks of the communicator.
    ranks: u32,
    /// Number of ranks that report the communicator.
    reported: u32,
    /// Number of ranks that report the communicator as usable.
    ready: u32,
}

impl Reports {
    /// Returns `true` if all ranks of the communicator report it, as usable or not.
    fn is_complete(self) -> bool {
        self.reported == self.ranks
    }

    /// Returns `true` if all ranks of the communicator report it as usable.
    pub(super) fn is_ready(self) -> bool {
        self.ready == self.ranks
    }

    /// Returns `true` if all ranks of the communicator report that it ended.
    pub(super) fn is_over(self) -> bool {
        self.is_complete() && self.ready == 0
    }
}

/// Combines the rows of all ranks by communicator.
pub(super) fn combine(rows: &[Vec<CommunicatorRow>]) -> BTreeMap<u64, Reports> {
    let mut all: BTreeMap<u64, Reports> = BTreeMap::new();
    for row in rows.iter().flatten() {
        let reports = all.entry(row.communicator()).or_default();
        reports.ranks = reports.ranks.max(row.ranks());
        reports.reported += 1;
        reports.ready += u32::from(row.is_ready());
    }
    all
}

/// Compares the reports of all ranks before a sleep or wake. Returns the first communicator that some of its ranks do not report, or whose
/// windows differ between the ranks on which it is usable.
///
/// A wake continues without the communicators that are unusable on some of their ranks, so it compares only the others.
pub(super) fn compare(call: u64, rows: &[Vec<CommunicatorRow>]) -> Option<SleepDifference> {
    for (communicator, reports) in combine(rows) {
        let find = |rows: &Vec<CommunicatorRow>| rows.iter().copied().find(|row| row.communicator() == communicator);
        let reported: Vec<(u32, CommunicatorRow)> =
            (0..).zip(rows).filter_map(|(rank, rows)| Some((rank, find(rows)?))).collect();
        if call == WAKE && !reports.is_ready() {
            continue;
        }
        if !reports.is_complete() {
            let ranks = reported.iter().map(|(rank, _)| *rank).collect();
            let groups = vec![(ranks, u64::from(reports.ranks))];
            return Some(SleepDifference { field: SleepField::Communicators, groups });
        }
        let mut windows: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (rank, row) in reported.iter().filter(|(_, row)| row.is_ready()) {
            windows.entry(row.windows()).or_default().push(*rank);
        }
        if windows.len() > 1 {
            let groups = windows.into_iter().map(|(digest, ranks)| (ranks.into_iter().collect(), digest)).collect();
            return Some(SleepDifference { field: SleepField::Windows, groups });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sleep::message::call_of;
    use symmalloc_core::op::Contents;

    fn row(windows: Option<u64>) -> Vec<CommunicatorRow> {
        vec![CommunicatorRow::new(5, 2, windows)]
    }

    #[test]
    fn ranks_outside_a_communicator_do_not_report_it() {
        assert_eq!(compare(call_of(Contents::Drop), &[row(Some(1)), row(Some(1)), vec![]]), None);
    }

    #[test]
    fn windows_of_a_communicator_that_ended_on_one_rank_are_not_compared() {
        assert_eq!(compare(call_of(Contents::Drop), &[row(Some(1)), row(None), vec![]]), None);
    }

    #[test]
    fn a_communicator_that_a_rank_does_not_report_is_a_difference() {
        let difference =
            compare(call_of(Contents::Drop), &[row(Some(1)), vec![], vec![]]).expect("one of two ranks reports it");
        assert_eq!(difference.field, SleepField::Communicators);
        assert_eq!(difference.groups, vec![([0].into_iter().collect(), 2)]);
    }

    #[test]
    fn windows_that_differ_are_a_difference() {
        let difference =
            compare(call_of(Contents::Drop), &[row(Some(1)), vec![], row(Some(2))]).expect("the windows should differ");
        assert_eq!(difference.field, SleepField::Windows);
        assert_eq!(difference.groups, vec![([0].into_iter().collect(), 1), ([2].into_iter().collect(), 2)]);
    }

    #[test]
    fn windows_of_a_second_communicator_are_compared_on_wake() {
        let difference = compare(WAKE, &[row(Some(1)), row(Some(2)), vec![]]).expect("the windows should differ");
        assert_eq!(difference.field, SleepField::Windows);
        assert_eq!(difference.groups, vec![([0].into_iter().collect(), 1), ([1].into_iter().collect(), 2)]);
        assert_eq!(compare(WAKE, &[row(Some(1)), row(Some(1)), vec![]]), None);
    }

    #[test]
    fn a_wake_continues_without_a_communicator_that_is_not_usable_on_all_of_its_ranks() {
        assert_eq!(compare(WAKE, &[row(Some(1)), vec![], vec![]]), None);
        assert_eq!(compare(WAKE, &[row(Some(1)), row(None), vec![]]), None);
    }

    #[test]
    fn a_communicator_is_over_once_all_of_its_ranks_report_its_end() {
        let reports = |rows: &[Vec<CommunicatorRow>]| combine(rows)[&5];
        assert!(reports(&[row(None), row(None)]).is_over());
        assert!(!reports(&[row(None), row(Some(1))]).is_over());
        assert!(!reports(&[row(None), vec![]]).is_over());
        assert!(reports(&[row(Some(1)), row(Some(1))]).is_ready());
        assert!(!reports(&[row(Some(1)), row(None)]).is_ready());
    }
}

//! Repetition: after any number of rounds, a program holds what it held after the first one.

use std::fmt::Debug;

/// Runs rounds. Each returns what must be equal after every round: addresses, windows, bytes, events, descriptors.
///
/// # Panics
/// Panics if a round returns a different value than the first one, or if there are fewer than two rounds.
#[track_caller]
pub fn steady<S: PartialEq + Debug>(rounds: usize, mut round: impl FnMut(usize) -> S) {
    assert!(rounds > 1, "a single round has nothing to be compared with");
    let first = round(0);
    for number in 1..rounds {
        let later = round(number);
        assert!(later == first, "after round {number}, compared with round 0:\n{}", difference(&first, &later));
    }
}

/// Returns the lines of two values that differ.
pub fn difference<S: Debug>(first: &S, later: &S) -> String {
    let [first, later] = [first, later].map(|value| format!("{value:#?}"));
    let lines = first.lines().zip(later.lines()).enumerate().filter(|(_, (first, later))| first != later);
    lines.map(|(line, (first, later))| format!("line {line}: {} became {}\n", first.trim(), later.trim())).collect()
}

/// Returns the number of open file descriptors of this process.
///
/// # Panics
/// Panics if the system does not list them.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

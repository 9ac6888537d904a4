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
    std::fs::read_dir("/proc/self/fd").expect("this test should run on Linux").count()
}

/// Host memory in bytes that a round may keep. The process also allocates for itself, in its threads and in the stubs.
const KEPT_MAX: usize = 32;

/// Number of times that rounds are repeated. A table that doubles its size grows in some repetitions only.
const REPETITIONS: usize = 4;

/// Runs rounds again and again, and checks that the host memory in use does not grow each time. Finds lists and tables that grow with every
/// round, which no count of objects contains.
///
/// # Panics
/// Panics if every repetition keeps more than a few bytes per round.
#[track_caller]
pub fn keeps_no_host_memory(what: &str, rounds: usize, mut round: impl FnMut(usize)) {
    (0..rounds).for_each(&mut round);
    let repetitions = (1..=REPETITIONS).map(|repetition| {
        let before = heap_bytes();
        (repetition * rounds..(repetition + 1) * rounds).for_each(&mut round);
        heap_bytes().saturating_sub(before)
    });
    let kept: Vec<usize> = repetitions.collect();
    assert!(
        kept.iter().any(|bytes| *bytes < rounds * KEPT_MAX),
        "{what}: {rounds} rounds keep {kept:?} bytes of host memory"
    );
}

/// Returns the bytes of host memory in use, of all libraries of this process.
fn heap_bytes() -> usize {
    // SAFETY: takes and changes nothing.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

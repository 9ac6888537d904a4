//! Tests the checks of a schedule against a slow model of which allocation follows which.

use proptest::prelude::*;
use std::collections::BTreeSet;
use symmalloc_plan::{Place, PlacedAllocation, Problem, Rectangle, Schedule, SearchBudget, solve};

/// Generates a step of allocations, each with a lifetime in allocations, a size and a stream; some have no place.
fn step(streams: u16) -> impl Strategy<Value = Vec<Option<PlacedAllocation>>> {
    let wanted = (1..20_u32, 1..6_u64, 0..streams, 0..10);
    prop::collection::vec(wanted, 1..40).prop_map(|step| {
        let count = step.len() as u32;
        let is_placed = |number: &u32| step[*number as usize].3 > 0;
        let until = |number: u32| number + step[number as usize].0.min(count);
        let placed: Vec<u32> = (0..count).filter(is_placed).collect();
        let rectangle = |number: &u32| Rectangle {
            lower: u64::from(*number),
            upper: u64::from(until(*number)),
            size: step[*number as usize].1,
        };
        let problem =
            Problem::periodic(count.into(), placed.iter().map(rectangle).collect()).expect("the problem is valid");
        let solution = solve(&problem, SearchBudget(2_000));
        let mut allocations = vec![None; step.len()];
        for (number, offset) in placed.into_iter().zip(solution.offsets()) {
            let (_, size, stream, _) = step[number as usize];
            let place = Place { offset: *offset as u32, size: size as u32 };
            allocations[number as usize] = Some(PlacedAllocation { place, stream, until: until(number) });
        }
        allocations
    })
}

/// An allocation of one of several rounds.
struct Made {
    placed: PlacedAllocation,
    /// The allocations of all rounds that are known to be complete before this one, given only the checks of its
    /// stream.
    behind: BTreeSet<usize>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_user_of_a_place_is_checked_directly_or_transitively(step in step(3)) {
        let schedule = Schedule::new(&step).expect("nothing should overlap");
        let ends = schedule.check_ends();
        // By stream: the allocations that are complete before its next allocation.
        let mut behind = vec![BTreeSet::new(); 3];
        let mut made: Vec<Option<Made>> = Vec::new();
        for at in 0..4 * step.len() {
            let number = at % step.len();
            let Some(placed) = step[number] else {
                made.push(None);
                continue;
            };
            let begin = if number == 0 { 0 } else { ends[number - 1] };
            let checks = &schedule.checks()[begin as usize..ends[number] as usize];
            prop_assert_eq!(checks.last().copied(), schedule.place_of()[number]);
            let stream = &mut behind[usize::from(placed.stream)];
            for place in checks.iter().map(|place| schedule.places()[*place as usize]) {
                let last = (0..at).rev().find(|before| made[*before].as_ref().is_some_and(|made| made.placed.place == place));
                if let Some(last) = last {
                    let it = made[last].as_ref().expect("found");
                    stream.insert(last);
                    stream.extend(&it.behind);
                }
            }
            // Places used in the first round may have been checked in an earlier round.
            if at >= step.len() {
                for (before, it) in made.iter().enumerate().filter_map(|(before, made)| Some((before, made.as_ref()?))) {
                    let (one, other) = (it.placed.place, placed.place);
                    let overlaps = one.offset < other.offset + other.size && other.offset < one.offset + one.size;
                    prop_assert!(!overlaps || stream.contains(&before), "{at} does not wait for {before}");
                }
            }
            made.push(Some(Made { placed, behind: stream.clone() }));
        }
    }

    #[test]
    fn a_step_of_one_stream_checks_each_allocation_at_most_twice(step in step(1)) {
        let schedule = Schedule::new(&step).expect("nothing should overlap");
        prop_assert!(schedule.checks().len() <= 2 * step.iter().flatten().count());
    }
}

//! Tests the solver against an exhaustive search on small problems, and its handling of invalid input.

use proptest::prelude::*;
use symmalloc_plan::{PlacementError, Problem, ProblemError, Rectangle, SearchBudget, TableError, solve};

fn rectangle() -> impl Strategy<Value = Rectangle> {
    (0..12_u64, 1..8_u64, 1..6_u64).prop_map(|(lower, life, size)| Rectangle { lower, upper: lower + life, size })
}

/// Generates problems. Half of them repeat a step of 12, in which rectangles live for up to one step.
fn problem(count: std::ops::Range<usize>) -> impl Strategy<Value = Problem> {
    let repeated = (0..12_u64, 1..=12_u64, 1..6_u64).prop_map(|(lower, life, size)| Rectangle {
        lower,
        upper: lower + life,
        size,
    });
    prop_oneof![
        prop::collection::vec(rectangle(), count.clone())
            .prop_map(|all| Problem::new(all).expect("the problem is valid")),
        prop::collection::vec(repeated, count)
            .prop_map(|all| Problem::periodic(12, all).expect("the problem is valid")),
    ]
}

/// Returns `true` if two rectangles live at the same time, in one step or across adjacent budget.
fn live_together(problem: &Problem, one: Rectangle, other: Rectangle) -> bool {
    let period = problem.period().unwrap_or(0);
    let meet = |later: u64| one.lower < other.upper + later && other.lower + later < one.upper;
    let meet_earlier = |earlier: u64| one.lower + earlier < other.upper && other.lower < one.upper + earlier;
    meet(0) || meet(period) || meet_earlier(period)
}

/// Returns the least height of all placements, by placing the rectangles as low as possible in every order.
fn least_height(problem: &Problem) -> u64 {
    fn place(problem: &Problem, placed: &mut Vec<(usize, u64)>, height: u64, least: &mut u64) {
        if height >= *least {
            return;
        }
        let rectangles = problem.rectangles();
        if placed.len() == rectangles.len() {
            *least = height;
            return;
        }
        for index in 0..rectangles.len() {
            if placed.iter().any(|(there, _)| *there == index) {
                continue;
            }
            let it = rectangles[index];
            let mut offset = 0;
            // The lowest offset on the bottom or on a placed rectangle.
            loop {
                let in_the_way = placed.iter().find(|(other, at)| {
                    let other = rectangles[*other];
                    live_together(problem, it, other) && *at < offset + it.size && offset < at + other.size
                });
                match in_the_way {
                    Some((other, at)) => offset = at + rectangles[*other].size,
                    None => break,
                }
            }
            placed.push((index, offset));
            place(problem, placed, height.max(offset + it.size), least);
            placed.pop();
        }
    }
    let mut least = u64::MAX;
    place(problem, &mut Vec::new(), 0, &mut least);
    least
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_solution_is_deterministic(problem in problem(0..60)) {
        let solution = solve(&problem, SearchBudget(20_000));
        prop_assert_eq!(solution.check(&problem), Ok(()));
        prop_assert!(solution.height() >= problem.lower_bound());
        prop_assert!(solution.work() <= 20_000);
        prop_assert_eq!(solve(&problem, SearchBudget(20_000)), solution);
    }

    /// `check` has its own definition of overlap, so this test compares every pair.
    #[test]
    fn rectangles_that_live_together_do_not_overlap(problem in problem(0..40), budget in 0..10_000_u64) {
        let solution = solve(&problem, SearchBudget(budget));
        let all: Vec<(Rectangle, u64)> =
            problem.rectangles().iter().copied().zip(solution.offsets().iter().copied()).collect();
        for (number, (one, at)) in all.iter().enumerate() {
            for (other, there) in &all[..number] {
                let apart = at + one.size <= *there || there + other.size <= *at;
                prop_assert!(apart || !live_together(&problem, *one, *other), "{:?} and {:?}", one, other);
            }
        }
    }

    #[test]
    fn a_larger_search_budget_never_gives_a_worse_solution(problem in problem(1..40)) {
        let heights = [0, 1_000, 10_000, 100_000, 500_000].map(|budget| solve(&problem, SearchBudget(budget)).height());
        prop_assert!(heights.is_sorted_by(|less, more| less >= more), "{:?}", heights);
    }

    /// No solution below the optimum, and no solution above it that claims to be optimal, at any budget. With a large enough budget, the solver
    /// proves the optimum even if no placement reaches the lower bound.
    #[test]
    fn a_solution_is_called_optimal_only_if_it_is(
        problem in problem(1..9),
        budgets in prop::collection::vec(0..20_000_u64, 8),
    ) {
        let least = least_height(&problem);
        for budget in (0..40).chain(budgets).chain([100_000]) {
            let solution = solve(&problem, SearchBudget(budget));
            prop_assert!(problem.lower_bound() <= least && least <= solution.height(), "{budget} budget");
            prop_assert!(!solution.is_optimal() || solution.height() == least, "{budget} budget");
            prop_assert!(budget < 100_000 || solution.is_optimal(), "{budget} budget");
        }
    }
}

/// Fills a box completely by repeatedly placing a rectangle at the lowest offset, and shuffles the result.
fn filled(seed: u64) -> Problem {
    const TIMES: usize = 40;
    const HEIGHT: u64 = 10_000;
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((u128::from(state) * u128::from(bound)) >> 64) as u64
    };
    let mut floor = [0; TIMES];
    let mut rectangles = Vec::new();
    loop {
        let low = *floor.iter().min().expect("not empty");
        if low == HEIGHT {
            break;
        }
        let from = floor.iter().position(|it| *it == low).expect("it is one of them");
        let room = floor[from..].iter().take_while(|it| **it == low).count() as u64;
        let life = room.min(1 + below(20));
        let lower = from as u64 + below(room - life + 1);
        let size = (HEIGHT - low).min(1 + below(2_500));
        rectangles.push(Rectangle { lower, upper: lower + life, size });
        floor[lower as usize..(lower + life) as usize].fill(low + size);
    }
    for last in (1..rectangles.len()).rev() {
        rectangles.swap(last, below(last as u64 + 1) as usize);
    }
    Problem::new(rectangles).expect("the problem is valid")
}

#[test]
fn problems_without_gaps_are_solved() {
    for seed in 0..20 {
        let problem = filled(seed);
        let solution = solve(&problem, SearchBudget(300_000));
        assert_eq!((problem.lower_bound(), solution.height()), (10_000, 10_000), "seed {seed}");
        assert_eq!(solution.check(&problem), Ok(()), "seed {seed}");
    }
}

#[test]
fn the_step_limit_bounds_problems_with_many_overlaps() {
    let rectangles = (0..100_000).map(|it| Rectangle { lower: it, upper: it + 90_000, size: 1 + it % 7 }).collect();
    let problem = Problem::new(rectangles).expect("the problem is valid");
    for budget in [0, 3_000_000] {
        let solution = solve(&problem, SearchBudget(budget));
        assert_eq!(solution.check(&problem), Ok(()));
        assert!(solution.work() <= budget.max(100_000), "{} budget", solution.work());
        assert!(solution.height() < 2 * problem.lower_bound(), "{} for {}", solution.height(), problem.lower_bound());
    }
}

#[test]
fn rectangles_that_live_into_the_next_step_keep_their_offset() {
    let at = |lower, upper, size| Rectangle { lower, upper, size };
    // Each rectangle overlaps its predecessor and its successor, also across the end of the step. A ring of four needs
    // the height of two rectangles, and a ring of five the height of three.
    let ring = |count: u64| {
        let rectangles = (0..count).map(|it| at(2 * it, 2 * it + 3, 4)).collect();
        Problem::periodic(2 * count, rectangles).expect("the problem is valid")
    };
    let heights = [4, 5].map(|count| {
        let solution = solve(&ring(count), SearchBudget::default());
        assert_eq!(solution.check(&ring(count)), Ok(()));
        (ring(count).lower_bound(), solution.height(), solution.is_optimal())
    });
    assert_eq!(heights, [(8, 8, true), (8, 12, true)]);
    let whole = Problem::periodic(6, vec![at(4, 10, 3), at(0, 1, 2), at(5, 7, 1)]).expect("the problem is valid");
    let solution = solve(&whole, SearchBudget::default());
    assert_eq!((solution.height(), solution.check(&whole)), (6, Ok(())));
    let two = Problem::periodic(6, vec![at(4, 8, 3), at(1, 2, 3)]).expect("the problem is valid");
    let apart = Problem::new(vec![at(4, 8, 3), at(1, 2, 3)]).expect("the problem is valid");
    let low = solve(&apart, SearchBudget::default());
    assert_eq!((low.height(), low.check(&two)), (3, Err(PlacementError::Overlap { first: 0, second: 1 })));
}

/// Cuts a rectangle into pieces that fill it. Such problems are the hardest, because no space may be wasted.
fn cut(lower: u64, upper: u64, height: u64, seed: &mut u64, pieces: &mut Vec<Rectangle>) {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let draw = *seed >> 33;
    if draw.is_multiple_of(7) || upper - lower < 60 || height < 600 {
        pieces.push(Rectangle { lower, upper, size: height });
    } else if draw.is_multiple_of(2) {
        let middle = lower + 1 + draw % (upper - lower - 1);
        cut(lower, middle, height, seed, pieces);
        cut(middle, upper, height, seed, pieces);
    } else {
        let middle = 1 + draw % (height - 1);
        cut(lower, upper, middle, seed, pieces);
        cut(lower, upper, height - middle, seed, pieces);
    }
}

#[test]
fn pieces_cut_from_a_rectangle_fit_into_it_again() {
    for seed in 0..20_u64 {
        let mut pieces = Vec::new();
        cut(0, 1000, 10_000, &mut seed.wrapping_mul(77), &mut pieces);
        // The order of the pieces is a solution. The search does not depend on it.
        let problem = Problem::new(pieces).expect("the problem is valid");
        let solution = solve(&problem, SearchBudget(3_000_000));
        assert_eq!((problem.lower_bound(), solution.check(&problem)), (10_000, Ok(())));
        assert_eq!(solution.height(), 10_000, "seed {seed}, {} pieces", problem.rectangles().len());
    }
}

#[test]
fn offsets_that_are_not_a_solution_are_refused() {
    let at = |lower, upper, size| Rectangle { lower, upper, size };
    let apart = Problem::new(vec![at(0, 2, 4), at(2, 4, 4)]).expect("the problem is valid");
    let together = Problem::new(vec![at(0, 3, 4), at(2, 4, 4)]).expect("the problem is valid");
    let low = solve(&apart, SearchBudget::default());
    assert_eq!(low.offsets(), [0, 0]);
    assert_eq!(low.check(&together), Err(PlacementError::Overlap { first: 0, second: 1 }));
    let larger = Problem::new(vec![at(0, 2, 4), at(2, 4, 5)]).expect("the problem is valid");
    assert_eq!(low.check(&larger), Err(PlacementError::TooHigh { index: 1, end: 5, height: 4 }));
    let more = Problem::new(vec![at(0, 2, 4)]).expect("the problem is valid");
    assert_eq!(low.check(&more), Err(PlacementError::Count { offsets: 2, rectangles: 1 }));
}

#[test]
fn invalid_problems_are_refused() {
    let at = |lower, upper, size| Rectangle { lower, upper, size };
    assert_eq!(Problem::new(vec![at(3, 3, 1)]), Err(ProblemError::Lifetime { index: 0, lower: 3, upper: 3 }));
    assert_eq!(Problem::new(vec![at(0, 1, 1), at(0, 1, 0)]), Err(ProblemError::Size { index: 1 }));
    assert_eq!(Problem::new(vec![at(0, 1, u64::MAX), at(0, 1, 1)]), Err(ProblemError::TooLarge { index: 0 }));
    let outside = |lower, upper| ProblemError::OutsidePeriod { index: 0, lower, upper, period: 6 };
    assert_eq!(Problem::periodic(6, vec![at(6, 7, 1)]), Err(outside(6, 7)));
    assert_eq!(Problem::periodic(6, vec![at(2, 9, 1)]), Err(outside(2, 9)));
    let nothing = Problem::new(Vec::new()).expect("nothing is easy");
    assert_eq!((solve(&nothing, SearchBudget::default()).height(), nothing.lower_bound()), (0, 0));
}

#[test]
fn tables_survive_a_round_trip_in_any_column_order() {
    let (problem, names) =
        Problem::read_csv("id, size ,start,upper\nb1,4,0,2\nb2,2,1,4\n".as_bytes()).expect("the read should succeed");
    assert_eq!(names, ["b1", "b2"]);
    let solution = solve(&problem, SearchBudget::default());
    let mut out = Vec::new();
    solution.write_csv(&problem, &names, &mut out).expect("the write should succeed");
    assert_eq!(String::from_utf8_lossy(&out), "id,lower,upper,size,offset\nb1,0,2,4,2\nb2,1,4,2,0\n");
    let (inclusive, _) = Problem::read_csv("buffer_id,start,end,size,alignment\na,0,1,4,1\nb,1,3,2,\n".as_bytes())
        .expect("the read should succeed");
    assert_eq!(inclusive, problem, "`end` is the last moment of a lifetime");
    let (repeated, _) =
        Problem::read_periodic_csv(3, "id,lower,upper,size\na,2,5,4\n".as_bytes()).expect("the read should succeed");
    assert_eq!(repeated.period(), Some(3));
    for (text, output) in [
        ("id,lower,upper\na,0,1\n", "no column `size`; it has id, lower, upper"),
        ("id,lower,upper,size\na,0,1\n", "line 2 has 3 values, but the table has 4 columns: id, lower, upper, size"),
        ("id,lower,upper,size\na,0,1,x\n", "line 2: column `size` is \"x\": invalid digit"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1,-4\n", "line 3: column `size` is \"-4\""),
        ("start,size,id,end\n1.5,4,a,7\n", "line 2: column `start` is \"1.5\""),
        ("id,lower,upper,size\na,5,1,4\n", "rectangle 0 lives from 5 to 1"),
        ("id,lower,size\na,5,4\n", "rectangle 0 needs one end"),
        ("id,lower,upper,end,size\na,5,7,6,4\n", "rectangle 0 needs one end"),
        ("id,lower,end,size\na,5,18446744073709551615,4\n", "rectangle 0 ends at 2^64 - 1"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1,4\na,1,2,4\n", "rectangles 0 and 2 have the id \"a\""),
        ("id,lower,upper,size\n", "has no rectangles"),
        ("id,lower,upper,size,alignment\na,0,1,4,1\nb,0,1,4,8\n", "rectangle 1 has a value in column `alignment`"),
        ("id,lower,upper,size,gaps\na,0,9,4,3-5\n", "column `gaps`"),
        ("id,lower,upper,size,offset\na,0,9,4,0\n", "column `offset`"),
    ] {
        let error: TableError = Problem::read_csv(text.as_bytes()).expect_err(text);
        assert!(error.to_string().contains(output), "{error}");
    }
}

/// Returns the problem with every beginning and end numbered, ends before beginnings at the same time, as a trace does.
fn renumbered(problem: &Problem) -> Problem {
    let all = problem.rectangles();
    let begins = all.iter().enumerate().map(|(index, it)| (it.lower, true, index));
    let ends = all.iter().enumerate().map(|(index, it)| (it.upper, false, index));
    let mut events: Vec<(u64, bool, usize)> = begins.chain(ends).collect();
    events.sort_unstable();
    let mut times = vec![[0; 2]; all.len()];
    for (number, (_, begins, index)) in (0..).zip(events) {
        times[index][usize::from(!begins)] = number;
    }
    let rectangle = |(it, &[lower, upper]): (&Rectangle, &[u64; 2])| Rectangle { lower, upper, size: it.size };
    Problem::new(all.iter().zip(&times).map(rectangle).collect()).expect("the problem is valid")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Tables that number their events and tables that do not are the same problem, in any order of rows.
    #[test]
    fn equal_conflicts_are_solved_equally(
        all in prop::collection::vec(rectangle(), 1..40).prop_shuffle(),
        budget in 0..30_000_u64,
    ) {
        let problem = Problem::new(all.clone()).expect("the problem is valid");
        let solution = solve(&problem, SearchBudget(budget));
        let numbered = renumbered(&problem);
        prop_assert_eq!(&solve(&numbered, SearchBudget(budget)), &solution);
        let reversed = Problem::new(numbered.rectangles().iter().rev().copied().collect()).expect("the problem is valid");
        let of_reversed = solve(&reversed, SearchBudget(budget));
        prop_assert_eq!((of_reversed.height(), of_reversed.work()), (solution.height(), solution.work()));
    }
}

#[test]
fn the_numbering_of_time_does_not_change_the_search() {
    for seed in 0..10 {
        let problem = filled(seed);
        let sparse =
            |it: &Rectangle| Rectangle { lower: it.lower.pow(2) * 7, upper: it.upper.pow(2) * 7, size: it.size };
        let stretched = Problem::new(problem.rectangles().iter().map(sparse).collect()).expect("the problem is valid");
        for budget in [0, 1_000, 20_000, 300_000] {
            let solution = solve(&problem, SearchBudget(budget));
            for other in [renumbered(&problem), stretched.clone()] {
                assert_eq!(solve(&other, SearchBudget(budget)), solution, "seed {seed}, {budget} budget");
            }
        }
    }
}

/// More rectangles than exact search takes: the problem that fills a box, in ten boxes next to each other, and small rectangles for
/// the rest of the time that fit into a row above them.
#[test]
fn the_largest_rectangles_of_a_large_problem_are_placed_exactly() {
    let mut rectangles = Vec::new();
    for seed in 0..10 {
        let shifted = |it: &Rectangle| Rectangle {
            lower: it.lower + seed * 40,
            upper: it.upper + seed * 40,
            size: it.size * 100,
        };
        rectangles.extend(filled(seed).rectangles().iter().map(shifted));
    }
    rectangles.extend((0..8_000).map(|it| Rectangle { lower: it % 400, upper: it % 400 + 1, size: 1 + it / 2_000 }));
    let problem = Problem::new(rectangles).expect("the problem is valid");
    let solution = solve(&problem, SearchBudget(30_000_000));
    assert_eq!(solution.check(&problem), Ok(()));
    assert!(problem.rectangles().len() > 8_192);
    assert_eq!(solution.height(), problem.lower_bound());
}

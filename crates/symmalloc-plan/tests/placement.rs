//! The solver against all placements of small problems, and its bad input.

use proptest::prelude::*;
use symmalloc_plan::{PlacementError, Problem, ProblemError, Rectangle, Steps, TableError, solve};

fn rectangle() -> impl Strategy<Value = Rectangle> {
    (0..12_u64, 1..8_u64, 1..6_u64).prop_map(|(lower, life, size)| Rectangle { lower, upper: lower + life, size })
}

/// The least height of all placements: each rectangle, in every order, as low as it goes.
fn least_height(rectangles: &[Rectangle]) -> u64 {
    fn place(rectangles: &[Rectangle], placed: &mut Vec<(usize, u64)>, height: u64, least: &mut u64) {
        if height >= *least {
            return;
        }
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
            // As low as it goes above nothing, or above one of those that are there.
            loop {
                let in_the_way = placed.iter().find(|(other, at)| {
                    let other = rectangles[*other];
                    other.lower < it.upper
                        && it.lower < other.upper
                        && *at < offset + it.size
                        && offset < at + other.size
                });
                match in_the_way {
                    Some((other, at)) => offset = at + rectangles[*other].size,
                    None => break,
                }
            }
            placed.push((index, offset));
            place(rectangles, placed, height.max(offset + it.size), least);
            placed.pop();
        }
    }
    let mut least = u64::MAX;
    place(rectangles, &mut Vec::new(), 0, &mut least);
    least
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_solution_is_one_and_the_same_again(rectangles in prop::collection::vec(rectangle(), 0..60)) {
        let problem = Problem::new(rectangles).expect("sane");
        let solution = solve(&problem, Steps(20_000));
        prop_assert_eq!(solution.check(&problem), Ok(()));
        prop_assert!(solution.height() >= problem.lower_bound());
        prop_assert_eq!(solve(&problem, Steps(20_000)), solution);
    }

    #[test]
    fn more_steps_are_never_worse(rectangles in prop::collection::vec(rectangle(), 1..40)) {
        let problem = Problem::new(rectangles).expect("sane");
        let heights = [0, 1_000, 10_000, 100_000].map(|steps| solve(&problem, Steps(steps)).height());
        prop_assert!(heights.is_sorted_by(|less, more| less >= more), "{:?}", heights);
    }

    #[test]
    fn small_problems_are_solved_as_well_as_they_can_be(rectangles in prop::collection::vec(rectangle(), 1..7)) {
        let problem = Problem::new(rectangles).expect("sane");
        let solution = solve(&problem, Steps(100_000));
        prop_assert_eq!(solution.height(), least_height(problem.rectangles()));
    }
}

/// Cuts a rectangle into pieces that fill it. Such problems are the hardest: no room may be lost.
fn cut(lower: u64, upper: u64, height: u64, seed: &mut u64, pieces: &mut Vec<Rectangle>) {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let draw = *seed >> 33;
    if draw.is_multiple_of(7) || upper - lower < 4 || height < 4 {
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
fn what_was_cut_from_one_piece_fits_into_a_fifth_more() {
    let (mut lost, mut count) = (0, 0);
    for seed in 0..40_u64 {
        let mut pieces = Vec::new();
        cut(0, 1000, 10_000, &mut seed.wrapping_mul(77), &mut pieces);
        let problem = Problem::new(pieces).expect("sane");
        let solution = solve(&problem, Steps(2_000_000));
        assert_eq!((problem.lower_bound(), solution.check(&problem)), (10_000, Ok(())));
        (lost, count) = (lost + solution.height() - 10_000, count + 1);
    }
    assert!(lost / count < 2_000, "on average {} of 10,000 are lost", lost / count);
}

#[test]
fn offsets_that_are_no_solution_are_refused() {
    let at = |lower, upper, size| Rectangle { lower, upper, size };
    let apart = Problem::new(vec![at(0, 2, 4), at(2, 4, 4)]).expect("sane");
    let together = Problem::new(vec![at(0, 3, 4), at(2, 4, 4)]).expect("sane");
    let low = solve(&apart, Steps::default());
    assert_eq!(low.offsets(), [0, 0]);
    assert_eq!(low.check(&together), Err(PlacementError::Overlap { first: 0, second: 1 }));
    let larger = Problem::new(vec![at(0, 2, 4), at(2, 4, 5)]).expect("sane");
    assert_eq!(low.check(&larger), Err(PlacementError::TooHigh { index: 1, end: 5, height: 4 }));
    let more = Problem::new(vec![at(0, 2, 4)]).expect("sane");
    assert_eq!(low.check(&more), Err(PlacementError::Count { offsets: 2, rectangles: 1 }));
}

#[test]
fn what_is_no_problem_is_refused() {
    let at = |lower, upper, size| Rectangle { lower, upper, size };
    assert_eq!(Problem::new(vec![at(3, 3, 1)]), Err(ProblemError::Lifetime { index: 0, lower: 3, upper: 3 }));
    assert_eq!(Problem::new(vec![at(0, 1, 1), at(0, 1, 0)]), Err(ProblemError::Size { index: 1 }));
    assert_eq!(Problem::new(vec![at(0, 1, u64::MAX), at(0, 1, 1)]), Err(ProblemError::TooLarge { index: 0 }));
    let nothing = Problem::new(Vec::new()).expect("nothing is easy");
    assert_eq!((solve(&nothing, Steps::default()).height(), nothing.lower_bound()), (0, 0));
}

#[test]
fn tables_are_read_in_any_order_of_columns_and_written() {
    let (problem, names) = Problem::read_csv("id, size ,start,end\nb1,4,0,2\nb2,2,1,4\n".as_bytes()).expect("read");
    assert_eq!(names, ["b1", "b2"]);
    let solution = solve(&problem, Steps::default());
    let mut out = Vec::new();
    solution.write_csv(&problem, &names, &mut out).expect("written");
    assert_eq!(String::from_utf8_lossy(&out), "id,lower,upper,size,offset\nb1,0,2,4,0\nb2,1,4,2,4\n");
    for (text, said) in [
        ("id,lower,upper\na,0,1\n", "missing field `size`"),
        ("id,lower,upper,size\na,0,1\n", "line: 2"),
        ("id,lower,upper,size\na,0,1,x\n", "line: 2"),
        ("id,lower,upper,size\na,0,1,-4\n", "line: 2"),
        ("id,lower,upper,size\na,5,1,4\n", "rectangle 0 lives from 5 to 1"),
    ] {
        let error: TableError = Problem::read_csv(text.as_bytes()).expect_err(text);
        assert!(error.to_string().contains(said), "{error}");
    }
}

//! Sweeps: each driver call of a program fails once, and the program continues.
//!
//! ```text
//!  reference   step ── held ── step ── held ── step ── held ── end
//!  call 1      step! step ── held ── step ── held ── ...            a step that fails is repeated
//!  call 2      step ── held ── step! step ── held ── ...
//! ```
//! After every step, and at the end, a program with a failed call must hold what it holds without one: statistics, driver objects, contents.

use crate::cuda::{calls, calls_by_name, fail, heal};
use crate::steady::difference;
use std::collections::BTreeSet;
use std::fmt::{Debug, Display};

/// A program whose steps can be repeated after an error.
pub trait Repeatable {
    /// A step.
    type Step: Debug;
    /// The error of a step. Its text contains the driver's code.
    type Error: Display;
    /// Everything that must be equal after a step, with and without a failed call.
    type Held: PartialEq + Debug;
    /// Runs a step.
    ///
    /// # Errors
    /// Returns an error if a driver call failed. The step can be repeated.
    fn run(&mut self, step: &Self::Step) -> Result<(), Self::Error>;
    /// Returns what the program holds. Makes no driver call.
    fn held(&self) -> Self::Held;
    /// Ends the program. Returns what remains.
    fn end(self) -> Self::Held;
}

/// Code of the failed calls.
const CODE: i32 = 999;
/// Number of reported differences.
const REPORTED_MAX: usize = 8;

/// Runs the program once without failed calls, and once for each call that it makes, which fails. Calls of these names are left out.
/// Returns the names of the calls whose failure no step reported.
///
/// # Panics
/// Panics if a step fails twice or with another error, or if the program holds something else than without the failed call.
pub fn sweep<P: Repeatable>(
    what: &str,
    steps: &[P::Step],
    left_out: &[&str],
    begin: impl Fn() -> P,
) -> BTreeSet<String> {
    let expected = {
        // The first run creates what later ones reuse.
        reference(steps, begin());
        reference(steps, begin())
    };
    let before = calls_by_name();
    reference(steps, begin());
    let after = calls_by_name();
    let (mut unreported, mut problems) = (BTreeSet::new(), Vec::new());
    for (name, made) in after.into_iter().filter(|(name, _)| !left_out.contains(&name.as_str())) {
        // Includes the calls of the beginning and the end, which are not reached.
        for nth in 1..=made - before.get(&name).copied().unwrap_or(0) {
            let mut program = begin();
            let earlier = calls(&name);
            fail(&name, nth, CODE);
            let outcome = run_with_failure(steps, &mut program, &expected);
            let is_reached = calls(&name) - earlier >= nth;
            heal();
            if !is_reached {
                program.end();
                break;
            }
            let outcome =
                outcome.and_then(|is_reported| match same(&program.end(), expected.last().expect("the end")) {
                    Ok(()) => Ok(is_reported),
                    Err(text) => Err(format!("at the end:\n{text}")),
                });
            match outcome {
                Ok(true) => {}
                Ok(false) => _ = unreported.insert(name.clone()),
                Err(text) => problems.push(format!("{what}: {name} {nth} failed, {text}")),
            }
        }
    }
    let shown = problems.iter().take(REPORTED_MAX).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(problems.is_empty(), "{} problems\n{shown}", problems.len());
    unreported
}

/// Returns what the program holds after each step and at the end, if no call fails.
fn reference<P: Repeatable>(steps: &[P::Step], mut program: P) -> Vec<P::Held> {
    let after = |step: &P::Step| {
        program.run(step).unwrap_or_else(|error| panic!("{step:?}: {error}"));
        program.held()
    };
    let mut held: Vec<P::Held> = steps.iter().map(after).collect();
    held.push(program.end());
    held
}

/// Runs the steps, of which one fails once. Returns `true` if a step reported the failure.
fn run_with_failure<P: Repeatable>(steps: &[P::Step], program: &mut P, expected: &[P::Held]) -> Result<bool, String> {
    let mut is_reported = false;
    for ((at, step), expected) in steps.iter().enumerate().zip(expected) {
        let context = |text: String| format!("step {at}, {step:?}: {text}");
        if let Err(error) = program.run(step) {
            let text = error.to_string();
            if is_reported || !text.contains(&CODE.to_string()) {
                return Err(context(format!("another error: {text}")));
            }
            is_reported = true;
            program.run(step).map_err(|error| context(format!("again: {error}")))?;
        }
        same(&program.held(), expected).map_err(context)?;
    }
    Ok(is_reported)
}

fn same<H: PartialEq + Debug>(held: &H, expected: &H) -> Result<(), String> {
    if held == expected { Ok(()) } else { Err(difference(expected, held)) }
}

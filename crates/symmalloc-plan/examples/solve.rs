//! Solves a table of rectangles: `cargo run --release -p symmalloc-plan --example solve -- FILE.csv [STEPS]`. The offsets go to
//! standard output, what was reached to standard error.

use std::error::Error;
use std::fs::File;
use std::time::Instant;
use symmalloc_plan::{Problem, Steps, solve};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: solve FILE.csv [STEPS]")?;
    let steps = args.next().map(|text| text.parse().map(Steps)).transpose()?.unwrap_or_default();
    let (problem, names) = Problem::read_csv(File::open(&path)?)?;
    let begun = Instant::now();
    let solution = solve(&problem, steps);
    let took = begun.elapsed();
    solution.check(&problem)?;
    let (bound, height) = (problem.lower_bound(), solution.height());
    eprintln!(
        "{path}: {} rectangles, live at most {bound}, height {height} ({:.4}), {} steps, {took:.1?}",
        names.len(),
        bound as f64 / height.max(1) as f64,
        solution.steps(),
    );
    Ok(solution.write_csv(&problem, &names, std::io::stdout().lock())?)
}

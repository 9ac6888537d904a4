//! Solves tables of rectangles and prints the heights that the search reaches.
//!
//! `--budget N` sets the search budget, `--period N` solves a step that repeats after N, and `--offsets` prints the rectangles with
//! their offsets instead.

use std::error::Error;
use std::fs::File;
use std::time::Instant;
use symmalloc_plan::{Problem, SearchBudget, solve};

fn main() -> Result<(), Box<dyn Error>> {
    let (mut budget, mut period, mut offsets, mut paths) = (SearchBudget::default(), None, false, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--budget" => budget = SearchBudget(args.next().ok_or("--budget needs a number")?.parse()?),
            "--period" => period = Some(args.next().ok_or("--period needs a number")?.parse()?),
            "--offsets" => offsets = true,
            _ => paths.push(arg),
        }
    }
    if paths.is_empty() {
        return Err("usage: solve [--budget N] [--period N] [--offsets] FILE.csv...".into());
    }
    if !offsets {
        println!(
            "{:<32}{:>7}{:>16}{:>16}{:>8}{:>13}{:>9}",
            "name", "count", "bound", "height", "ratio", "work", "seconds"
        );
    }
    for path in paths {
        let (problem, names) = match period {
            Some(period) => Problem::read_periodic_csv(period, File::open(&path)?)?,
            None => Problem::read_csv(File::open(&path)?)?,
        };
        let begun = Instant::now();
        let solution = solve(&problem, budget);
        let seconds = begun.elapsed().as_secs_f64();
        solution.check(&problem)?;
        if offsets {
            solution.write_csv(&problem, &names, std::io::stdout().lock())?;
            continue;
        }
        let (bound, height) = (problem.lower_bound(), solution.height());
        let ratio = height as f64 / bound.max(1) as f64;
        let name = path.rsplit('/').next().unwrap_or(&path);
        let (count, work) = (names.len(), solution.work());
        println!("{name:<32}{count:>7}{bound:>16}{height:>16}{ratio:>8.4}{work:>13}{seconds:>9.2}");
    }
    Ok(())
}

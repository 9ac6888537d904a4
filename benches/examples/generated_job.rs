//! Writes a generated job (`varying`) as a trace, for the comparison of planners in `benches/peers/plan.py`:
//! `cargo run --release -p symmalloc-benches --example generated_job -- vit 3 180 > vit.trace`.

use std::io::{self, Write};
use symmalloc_benches::varying;

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let job = match &args[..] {
        [name, seed, steps] if varying::JOBS.contains(&&name[..]) => {
            seed.parse().ok().zip(steps.parse().ok()).map(|(seed, steps)| varying::job(name, seed, steps))
        }
        _ => None,
    };
    match job {
        Some(job) => write!(io::stdout(), "{}", job.trace()),
        None => {
            eprintln!("usage: generated_job JOB SEED STEPS, where JOB is one of {}", varying::JOBS.join(", "));
            std::process::exit(2);
        }
    }
}

//! Writes a generated job (`varying`) as a trace: `generated_job JOB SEED STEPS > job.trace`.

use symmalloc_benches::varying;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let job = match &args[..] {
        [name, seed, steps] if varying::JOBS.contains(&&name[..]) => {
            seed.parse().ok().zip(steps.parse().ok()).map(|(seed, steps)| varying::job(name, seed, steps))
        }
        _ => None,
    };
    match job {
        Some(job) => print!("{}", job.trace()),
        None => {
            eprintln!("usage: generated_job JOB SEED STEPS, where JOB is one of {}", varying::JOBS.join(", "));
            std::process::exit(2);
        }
    }
}

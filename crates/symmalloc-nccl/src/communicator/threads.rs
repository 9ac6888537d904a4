//! Threads for calls that may never come back.
//!
//! A thread that is through with its call waits for the next one: making one costs some 50 us, and CUDA's first call on it as much
//! again. One that hangs in a call is never seen again, and another takes its place.

use std::io;
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that wait for work.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// Threads that wait at most; more end.
const IDLE_MAX: usize = 16;

/// Runs a job on a thread of its own.
///
/// # Errors
/// When the system refuses a thread. The job is not run then.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut job: Job = Box::new(job);
    while let Some(thread) = pop() {
        match thread.send(job) {
            Ok(()) => return Ok(()),
            // It ended meanwhile.
            Err(SendError(refused)) => job = refused,
        }
    }
    std::thread::Builder::new().name("symmalloc-nccl".to_owned()).spawn(move || work(job)).map(drop)
}

fn work(first: Job) {
    let (sender, jobs) = channel();
    let mut job = first;
    loop {
        job();
        if !push(sender.clone()) {
            return;
        }
        match jobs.recv() {
            Ok(next) => job = next,
            Err(_) => return,
        }
    }
}

fn pop() -> Option<Sender<Job>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

fn push(thread: Sender<Job>) -> bool {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let is_wanted = idle.len() < IDLE_MAX;
    if is_wanted {
        idle.push(thread);
    }
    is_wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;
    use std::time::Duration;

    #[test]
    fn a_thread_that_hangs_holds_nobody_up() {
        let (release, hung): (Sender<()>, Receiver<()>) = channel();
        let (done, finished) = channel();
        let also_done = done.clone();
        run(move || {
            hung.recv().expect("released");
            also_done.send(0).expect("somebody waits");
        })
        .expect("a thread");
        for number in 1..40 {
            let done = done.clone();
            run(move || done.send(number).expect("somebody waits")).expect("a thread");
            assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(number));
        }
        release.send(()).expect("it waits");
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(0));
    }
}

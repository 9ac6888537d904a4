//! Threads for calls that may never return.
//!
//! A thread that has finished its call waits for the next one: creating a thread costs about 50 us, and so does the first CUDA call on it.
//! A thread that hangs in a call is never reused. A new thread replaces it.

use std::io;
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// Idle threads.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// Maximum number of idle threads. Further threads exit.
const IDLE_MAX: usize = 16;

/// Runs a job on a separate thread.
///
/// # Errors
/// Returns an error if the system cannot create a thread. The job then has not run.
pub fn run(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut job: Job = Box::new(job);
    while let Some(thread) = pop() {
        match thread.send(job) {
            Ok(()) => return Ok(()),
            // The thread has exited in the meantime: try the next one.
            Err(SendError(refused)) => job = refused,
        }
    }
    std::thread::Builder::new().name("symmalloc-worker".to_owned()).spawn(move || work(job)).map(drop)
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
    fn a_thread_that_hangs_does_not_delay_other_calls() {
        let (release, hung): (Sender<()>, Receiver<()>) = channel();
        let (done, finished) = channel();
        let also_done = done.clone();
        run(move || {
            hung.recv().expect("released");
            also_done.send(0).expect("the receiver is waiting");
        })
        .expect("a thread");
        for number in 1..40 {
            let done = done.clone();
            run(move || done.send(number).expect("the receiver is waiting")).expect("a thread");
            assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(number));
        }
        release.send(()).expect("the thread is waiting");
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(0));
    }
}

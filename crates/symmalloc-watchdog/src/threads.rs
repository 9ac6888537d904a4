//! Threads for calls that may never return.
//!
//! A thread that has finished its call waits for the next call, because creating a thread costs about 50 us, and the first CUDA call on it
//! costs as much again. A thread that hangs in a call is never reused. A new thread replaces it.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// Idle threads.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// Jobs for which no thread could be created, see [`run_when_possible`].
static REFUSED: Mutex<VecDeque<Job>> = Mutex::new(VecDeque::new());

/// Maximum number of idle threads. Further threads exit.
const IDLE_MAX: usize = 16;

/// Runs a job on a separate thread.
///
/// # Errors
/// Returns an error if the system cannot create a thread. The job then has not run.
pub fn run(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    hand_over(Box::new(job)).map_err(|(_job, error)| error)
}

/// Runs a job on a separate thread. If the system cannot create one now, the job runs as soon as a thread of this crate is idle or can be
/// created. A running watchdog retries every 100 ms.
///
/// # Errors
/// Returns an error if the job has to wait.
pub fn run_when_possible(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    hand_over(Box::new(job)).map_err(|(job, error)| {
        lock(&REFUSED).push_back(job);
        // A thread may have become idle before the job was in the queue.
        retry_refused();
        error
    })
}

/// Tries again to run the jobs for which no thread could be created.
pub fn retry_refused() {
    while let Some(job) = next_refused() {
        if let Err((job, _error)) = hand_over(job) {
            lock(&REFUSED).push_front(job);
            return;
        }
    }
}

fn next_refused() -> Option<Job> {
    lock(&REFUSED).pop_front()
}

/// Runs a job on an idle thread or a new one. If the system cannot create one, returns the job.
fn hand_over(mut job: Job) -> Result<(), (Job, io::Error)> {
    while let Some(thread) = pop() {
        match thread.send(job) {
            Ok(()) => return Ok(()),
            // The thread has exited in the meantime: try the next one.
            Err(SendError(refused)) => job = refused,
        }
    }
    // If the thread cannot be created, its closure is dropped, but the job remains in the slot.
    let slot = Arc::new(Mutex::new(Some(job)));
    let taken = Arc::clone(&slot);
    let started = std::thread::Builder::new().name("symmalloc-worker".to_owned()).spawn(move || {
        let job = lock(&taken).take();
        if let Some(job) = job {
            work(job);
        }
    });
    match (started, slot) {
        (Ok(_thread), _) => Ok(()),
        (Err(error), slot) => Err((lock(&slot).take().expect("no thread took the job"), error)),
    }
}

fn work(first: Job) {
    let (sender, jobs) = channel();
    let mut job = first;
    loop {
        job();
        while let Some(refused) = next_refused() {
            refused();
        }
        if !push(sender.clone()) {
            return;
        }
        // A job may have entered the queue before this thread was idle.
        retry_refused();
        match jobs.recv() {
            Ok(next) => job = next,
            Err(_) => return,
        }
    }
}

fn pop() -> Option<Sender<Job>> {
    lock(&IDLE).pop()
}

fn push(thread: Sender<Job>) -> bool {
    let mut idle = lock(&IDLE);
    let is_wanted = idle.len() < IDLE_MAX;
    if is_wanted {
        idle.push(thread);
    }
    is_wanted
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            hung.recv().expect("the sender should not be dropped");
            also_done.send(0).expect("the receiver is waiting");
        })
        .expect("the system should create a thread");
        for number in 1..40 {
            let done = done.clone();
            run(move || done.send(number).expect("the receiver is waiting"))
                .expect("the system should create a thread");
            assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(number));
        }
        release.send(()).expect("the thread is waiting");
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(0));
    }
}

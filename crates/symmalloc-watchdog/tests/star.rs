//! The cost of the star at process 0: connections, messages, bytes and processor time per second while nothing happens, and the time and bytes
//! of events that concern all processes. `SYMMALLOC_RANKS=1024,8192` selects the numbers of processes.
//!
//! Process 0 is real. The others are the ends of its sockets, and send what real ones send.

use rustix::event::{Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_watchdog::{CommunicatorId, Lifeline, POLL_INTERVAL, ProcessId, Progress, RankId};

const WORLD: CommunicatorId = CommunicatorId(0x8fd3_06a1_52b7_e94c);
const BEAT_EVERY: Duration = Duration::from_millis(250);
const TOLD: &str = "\"told\"";
const GONE: &str = "\"gone\"";
/// Time for which the star is measured while nothing happens.
const MEASURED: Duration = Duration::from_secs(2);

fn of_world(rank: u32) -> RankId {
    RankId { communicator: WORLD, rank }
}

/// A process other than 0.
struct Process {
    stream: UnixStream,
    /// Its heartbeat, as one line.
    beat: Vec<u8>,
    received_bytes: u64,
    /// The end of what it has received, in which a name may begin.
    tail: Vec<u8>,
    /// The messages that it awaits and has received.
    heard: Vec<&'static str>,
}

impl Process {
    /// Creates a process that has joined the world, and returns the other end of its connection.
    fn new(number: u32, processes: u32) -> (Self, UnixStream) {
        let (ours, hubs) = UnixStream::pair().expect("descriptors: raise `ulimit -n`");
        // What a real process sends.
        let (real, mut heard) = UnixStream::pair().expect("descriptors: raise `ulimit -n`");
        let connections = vec![(ProcessId(0), real.into())];
        let mut lifeline =
            Lifeline::new(ProcessId(number), processes, connections, Duration::ZERO).expect("the setup should succeed");
        lifeline.endpoint().join(of_world(number), Duration::ZERO);
        let progress = Progress { submitted: 123_456, finished: 123_450, is_destroying: false };
        lifeline.endpoint().set_progress(of_world(number), progress, Duration::ZERO);
        // A heartbeat waits until the messages before it are sent.
        lifeline.turn(Duration::ZERO);
        lifeline.turn(BEAT_EVERY);
        drop(lifeline);
        let mut said = String::new();
        heard.read_to_string(&mut said).expect("the contents should be UTF-8");
        let (joined, beat) = said.split_once('\n').expect("a join and a heartbeat");
        let mut process =
            Process { stream: ours, beat: beat.into(), received_bytes: 0, tail: Vec::new(), heard: Vec::new() };
        process.stream.write_all(format!("{joined}\n").as_bytes()).expect("the connection should be open");
        process.stream.set_nonblocking(true).expect("the socket should accept the setting");
        (process, hubs)
    }

    fn send(&mut self, bytes: &[u8]) {
        match self.stream.write(bytes) {
            Ok(count) => assert_eq!(count, bytes.len(), "the hub reads in time"),
            Err(error) => panic!("process 0 does not read: {error}"),
        }
    }

    fn receive(&mut self) {
        let mut bytes = [0; 1 << 16];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => panic!("process 0 closed the connection"),
                Ok(count) => {
                    self.received_bytes += count as u64;
                    self.tail.extend_from_slice(&bytes[..count]);
                    for name in [TOLD, GONE] {
                        if self.tail.windows(name.len()).any(|window| window == name.as_bytes()) {
                            self.heard.push(name);
                        }
                    }
                    self.tail.drain(..self.tail.len().saturating_sub(TOLD.len()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// What process 0 used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    turns: u64,
    processor: Duration,
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs process 0 as the watchdog's thread does, until the flag is set.
fn run_hub(lifeline: &mut Lifeline, begun: Instant, is_over: &AtomicBool) -> Used {
    let (mut turns, before) = (0, processor_time());
    while !is_over.load(Ordering::Relaxed) {
        let mut descriptors: Vec<_> = lifeline.descriptors().collect();
        let time = if lifeline.is_due() { Duration::ZERO } else { POLL_INTERVAL };
        let limit = Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as i64 };
        poll(&mut descriptors, Some(&limit)).expect("the poll succeeds");
        drop(descriptors);
        thread::sleep(lifeline.pause());
        lifeline.turn(begun.elapsed());
        turns += 1;
    }
    Used { turns, processor: processor_time() - before }
}

/// Lets processes 1 and up do `act` while process 0 runs.
fn while_hub_runs<R>(lifeline: &mut Lifeline, begun: Instant, act: impl FnOnce() -> R) -> (R, Used) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let hub = scope.spawn(|| run_hub(lifeline, begun, &is_over));
        let done = act();
        is_over.store(true, Ordering::Relaxed);
        (done, hub.join().expect("the thread should not panic"))
    })
}

/// Sends heartbeats, evenly over time.
fn beat(processes: &mut [Process], time: Duration) {
    let (begun, count) = (Instant::now(), processes.len() as u32);
    for round in 0.. {
        for at in 0..count {
            let due = BEAT_EVERY * round + BEAT_EVERY * at / count;
            if due > time {
                return;
            }
            if let Some(early) = due.checked_sub(begun.elapsed()).filter(|early| *early > Duration::from_millis(1)) {
                thread::sleep(early);
            }
            let process = &mut processes[at as usize];
            let beat = process.beat.clone();
            process.send(&beat);
            process.receive();
        }
    }
}

/// Waits until all processes have received a message of this name. Returns the time.
fn until_all_received(processes: &mut [Process], name: &'static str) -> Duration {
    let begun = Instant::now();
    let mut waiting: Vec<&mut Process> = processes.iter_mut().collect();
    while !waiting.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(300), "{} processes did not receive {name}", waiting.len());
        waiting.retain_mut(|process| {
            process.receive();
            !process.heard.contains(&name)
        });
        thread::sleep(Duration::from_millis(1));
    }
    begun.elapsed()
}

fn received_bytes(processes: &[Process]) -> u64 {
    processes.iter().map(|process| process.received_bytes).sum()
}

/// Measures a star of this many processes. Returns the bytes per second and connection, in both directions, while nothing happens.
fn measure(count: u32) -> [u64; 2] {
    let begun = Instant::now();
    let (mut processes, ends): (Vec<Process>, Vec<UnixStream>) =
        (1..count).map(|number| Process::new(number, count)).unzip();
    let connections = (1..).map(ProcessId).zip(ends.into_iter().map(Into::into)).collect();
    let mut lifeline =
        Lifeline::new(ProcessId(0), count, connections, begun.elapsed()).expect("the setup should succeed");
    lifeline.endpoint().join(of_world(0), begun.elapsed());
    // The joins.
    while_hub_runs(&mut lifeline, begun, || beat(&mut processes, BEAT_EVERY * 2));
    let before = received_bytes(&processes);
    let ((), idle) = while_hub_runs(&mut lifeline, begun, || beat(&mut processes, MEASURED));
    let seconds = MEASURED.as_secs();
    let beats = MEASURED.as_millis() as u64 / BEAT_EVERY.as_millis() as u64;
    let to_hub: u64 = processes.iter().map(|process| process.beat.len() as u64 * beats).sum::<u64>() / seconds;
    let from_hub = (received_bytes(&processes) - before) / seconds;
    // On a busy machine, heartbeats are still on their way.
    while_hub_runs(&mut lifeline, begun, || thread::sleep(BEAT_EVERY * 2));
    processes.iter_mut().for_each(Process::receive);
    // One process asks for the state of all, as each does at its deadline.
    let before = received_bytes(&processes);
    let ask = format!("{{\"ask\":{{\"communicator\":{}}}}}\n", WORLD.0);
    let (asked, asking) = while_hub_runs(&mut lifeline, begun, || {
        processes[0].send(ask.as_bytes());
        let asked = until_all_received(&mut processes[..1], TOLD);
        // The rest of the answer.
        let mut last = 0;
        while std::mem::replace(&mut last, processes[0].received_bytes) != processes[0].received_bytes {
            thread::sleep(Duration::from_millis(200));
            processes[0].receive();
        }
        asked
    });
    let answer_bytes = received_bytes(&processes) - before;
    // One process dies.
    drop(processes.pop());
    let (gone, dying) = while_hub_runs(&mut lifeline, begun, || until_all_received(&mut processes, GONE));
    println!(
        "| {count} | {} | {} | {} | {:.1} % | {} | {answer_bytes} | {:.1} ms | {:.1} ms | {:.1} ms |",
        count - 1,
        to_hub,
        from_hub,
        idle.processor.as_secs_f64() / MEASURED.as_secs_f64() * 100.0,
        idle.turns / seconds,
        asking.processor.min(asked).as_secs_f64() * 1000.0,
        gone.as_secs_f64() * 1000.0,
        dying.processor.as_secs_f64() * 1000.0,
    );
    [to_hub, from_hub].map(|bytes| bytes / u64::from(count - 1))
}

#[test]
fn the_bytes_of_a_connection_do_not_grow_with_the_job() {
    let numbers = std::env::var("SYMMALLOC_RANKS").unwrap_or_else(|_| "8,64".to_owned());
    println!(
        "| processes | connections | to process 0, bytes/s | from it, bytes/s | processor | turns/s | answer, bytes | its processor time | \
         all know of a death after | its processor time |"
    );
    for number in numbers.split(',') {
        let [to_hub, from_hub] = measure(number.parse().expect("numbers, separated by commas"));
        assert!((100..1500).contains(&to_hub) && (100..1500).contains(&from_hub), "{number}: {to_hub} {from_hub}");
    }
}

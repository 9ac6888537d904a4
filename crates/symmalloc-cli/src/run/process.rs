//! The program as a child process: starting it, waiting for it, and forwarding signals to it.

use super::environment::Environment;
use crate::args::RunArgs;
use crate::error::CliError;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Exit status of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Code(u8),
    Signal(i32),
}

impl Ended {
    /// Returns the exit code that a shell would return.
    pub(super) fn exit_code(self) -> ExitCode {
        match self {
            Ended::Code(code) => ExitCode::from(code),
            Ended::Signal(signal) => ExitCode::from(128_u8.saturating_add(u8::try_from(signal).unwrap_or(127))),
        }
    }
}

fn command(args: &RunArgs, environment: &Environment) -> Command {
    // The argument parser requires at least one word.
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    environment.apply(&mut command);
    command
}

fn not_started(args: &RunArgs, source: io::Error) -> CliError {
    CliError::NotStarted { program: args.command[0].clone(), source }
}

/// Replaces this process with the program. Returns only if that fails.
pub(super) fn replace(args: &RunArgs, environment: &Environment) -> CliError {
    not_started(args, command(args, environment).exec())
}

/// Runs the program until it ends.
pub(super) fn run(args: &RunArgs, environment: &Environment) -> Result<Ended, CliError> {
    // Register before the program starts, so that no signal ends this process and leaves the program running.
    let signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2]);
    let mut signals = signals.map_err(|source| not_started(args, source))?;
    let handle = signals.handle();
    let (running, forwarded): (Sender<Arc<Mutex<Option<Pid>>>>, _) = channel();
    // Start the thread before the program. Otherwise, if the system cannot create the thread, no signal reaches the
    // program.
    let forwarder = thread::Builder::new().name("symmalloc-signals".to_owned()).spawn(move || {
        let Ok(forwarded) = forwarded.recv() else { return };
        // A terminal also sends these signals to the program.
        let has_terminal = io::stdin().is_terminal();
        for signal in signals.forever().filter(|signal| !(has_terminal && [SIGINT, SIGQUIT].contains(signal))) {
            let running = forwarded.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(pid), Some(signal)) = (*running, Signal::from_named_raw(signal)) {
                // The program may have just ended. Its id is not reused before it is reaped.
                let _ended = kill_process(pid, signal);
            }
        }
    });
    let forwarder = forwarder.map_err(|source| CliError::Thread { source })?;
    let mut child = command(args, environment).spawn().map_err(|source| not_started(args, source))?;
    let pid = Arc::new(Mutex::new(Pid::from_raw(child.id().cast_signed())));
    // The thread waits for the process id.
    let _received = running.send(Arc::clone(&pid));
    let ended = wait(&mut child, &pid);
    handle.close();
    // The thread does nothing that can panic.
    let _ended = forwarder.join();
    ended.map_err(|source| not_started(args, source))
}

/// Waits until the program has ended. Reaps it only once no signal can be sent to its id anymore.
fn wait(child: &mut Child, running: &Mutex<Option<Pid>>) -> io::Result<Ended> {
    let pid = *running.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pid) = pid {
        while waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            .is_err_and(|error| error == rustix::io::Errno::INTR)
        {}
    }
    *running.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let status = child.wait()?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Code(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, signal) => Ended::Signal(signal.unwrap_or(0)),
    })
}

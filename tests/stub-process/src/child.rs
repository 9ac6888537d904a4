//! Child processes with a time limit, which also end with their parent.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time limit of a test's process. `SYMMALLOC_STUB_LIMIT_SECONDS` overrides it for long runs.
const LIMIT: Duration = Duration::from_secs(600);

/// Time between two checks of a process.
const LOOK: Duration = Duration::from_millis(2);

/// The outcome of a process.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// `true` if the process exceeded the limit and was killed.
    pub(crate) is_late: bool,
}

/// A running process.
pub(crate) struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
    begun: Instant,
}

/// Returns the time limit of a test's process.
pub(crate) fn limit() -> Duration {
    let seconds = std::env::var("SYMMALLOC_STUB_LIMIT_SECONDS");
    seconds.map_or(LIMIT, |text| Duration::from_secs(text.parse().expect("a number of seconds")))
}

impl Running {
    /// Starts a process that is killed when the calling thread ends.
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec, makes one system call, which uses neither memory nor locks.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        let mut child = command.spawn().expect("the test can be started again");
        let stdout = read_all(child.stdout.take().expect("the stream should be piped"));
        let stderr = read_all(child.stderr.take().expect("the stream should be piped"));
        Running { child, stdout, stderr, begun: Instant::now() }
    }

    /// Returns the id of the process.
    pub(crate) fn id(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns the time since the process started.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Returns `true` if the process has not ended.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits until the process ends, and kills it when its age exceeds the limit.
    pub(crate) fn wait(mut self, limit: Duration) -> Ended {
        let mut is_late = false;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            if !is_late && self.begun.elapsed() > limit {
                is_late = true;
                self.child.kill().expect("a child");
            }
            std::thread::sleep(LOOK);
        };
        let text = |reader: JoinHandle<Vec<u8>>| {
            String::from_utf8_lossy(&reader.join().expect("the thread should not panic")).into_owned()
        };
        Ended { status, stdout: text(self.stdout), stderr: text(self.stderr), is_late }
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).expect("the system should create a pipe");
        bytes
    })
}

/// Runs `body` in a forked child. Returns its exit code; `None` if a signal ended it, as for a crash or a call that blocks.
pub fn in_child(body: impl FnOnce()) -> Option<i32> {
    // SAFETY: the child runs `body` and exits, without returning to the test.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no preconditions.
            unsafe { libc::alarm(60) };
            let is_done = catch_unwind(AssertUnwindSafe(body)).is_ok();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!is_done)) }
        }
        child => {
            assert!(child > 0, "fork failed");
            let mut status = 0;
            // SAFETY: a child of this process, and an output pointer.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
        }
    }
}

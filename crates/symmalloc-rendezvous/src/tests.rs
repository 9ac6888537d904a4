//! Tests of several modules together: the handshake, stores, and meetings.

mod handshake;
mod meetings;
mod namespaces;
mod stores;
mod torch_stand_in;

use crate::endpoint::Endpoint;
use crate::launch::Launch;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::thread;

const SECRET: &str = "the secret of the job";
const OTHER_SECRET: &str = "the secret of another";

/// Returns the launch that torchrun describes to rank 0.
pub(crate) fn launch(ranks: u32, local_ranks: u32, job: &str) -> Launch {
    let variables = [
        ("RANK", "0".to_owned()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", "0".to_owned()),
        ("LOCAL_WORLD_SIZE", local_ranks.to_string()),
        ("TORCHELASTIC_RUN_ID", job.to_owned()),
    ];
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Launch::from_variables(variable).expect("the variables should be complete")
}

/// Returns an endpoint at which nobody listens, and the socket that keeps others from using its port.
fn nobody() -> (OwnedFd, Endpoint) {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("the socket should accept the setting");
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port should be free");
    let address = getsockname(&socket).expect("the socket is bound").try_into().expect("an address of the internet");
    (socket, Endpoint::Network(address))
}

/// Runs `body` on a thread with another user's id. Returns `None` if this process lacks the privileges.
fn as_another_user<R: Send>(body: impl FnOnce() -> R + Send) -> Option<R> {
    const NOBODY: libc::c_long = 65534;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the system call, unlike the C library's function, changes only the calling thread, which ends soon.
            let code = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            (code == 0).then(body)
        });
        let result = thread.join().expect("the thread does not panic");
        if result.is_none() {
            println!("skipped: only root can act as another user");
        }
        result
    })
}

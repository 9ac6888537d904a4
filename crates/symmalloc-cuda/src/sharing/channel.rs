//! A Unix socket with a deadline that carries bytes and file descriptors. The socket's own settings are not changed.

use super::error::ShareError;
use super::message::{BATCH, MessageError};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A socket and the deadline for the whole exchange.
#[derive(Debug)]
pub struct Channel<'a> {
    socket: BorrowedFd<'a>,
    /// `None` if there is no deadline.
    until: Option<Instant>,
}

/// Space for the descriptors of one message.
const SPACE_BYTES: usize = cmsg_space!(ScmRights(BATCH));
type Space = [MaybeUninit<u8>; SPACE_BYTES];

impl<'a> Channel<'a> {
    /// Creates a channel whose exchange must finish within `timeout`.
    pub fn new(socket: &'a impl AsFd, timeout: Duration) -> Self {
        Channel { socket: socket.as_fd(), until: Instant::now().checked_add(timeout) }
    }

    /// Connects to a socket with an abstract name.
    ///
    /// # Errors
    /// Returns an error if no process listens, or the listener does not accept in time, for example because it is stopped and its queue is
    /// full.
    pub fn connect(name: &str, timeout: Duration) -> Result<UnixStream, ShareError> {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(socket.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ShareError::TimedOut),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends all bytes. The descriptors are sent with the first byte.
    ///
    /// # Errors
    /// Returns an error if the other process has closed the socket, or does not receive in time.
    pub fn send(&self, mut bytes: &[u8], mut descriptors: &[BorrowedFd<'_>]) -> Result<(), ShareError> {
        debug_assert!(descriptors.len() <= BATCH && !bytes.is_empty());
        while !bytes.is_empty() {
            let mut space: Space = [MaybeUninit::uninit(); SPACE_BYTES];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                let has_room = control.push(SendAncillaryMessage::ScmRights(descriptors));
                debug_assert!(has_room);
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    descriptors = &[];
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Fills `bytes`, and returns the file descriptors that came with them. The message must carry exactly `descriptors` of them.
    ///
    /// # Errors
    /// Returns an error if a different number of descriptors arrives, or the other process has closed the socket or does not send in time.
    /// Received descriptors are closed.
    pub fn receive(&self, bytes: &mut [u8], descriptors: usize) -> Result<Vec<OwnedFd>, ShareError> {
        let received = self.receive_at_most(bytes, descriptors)?;
        if received.len() == descriptors {
            return Ok(received);
        }
        Err(MessageError::Descriptors { got: received.len(), wanted: descriptors }.into())
    }

    /// Like [`receive`](Self::receive), but accepts fewer descriptors too.
    ///
    /// # Errors
    /// See [`receive`](Self::receive).
    pub fn receive_at_most(&self, bytes: &mut [u8], descriptors: usize) -> Result<Vec<OwnedFd>, ShareError> {
        let mut received = Vec::new();
        let mut filled = 0;
        while filled < bytes.len() {
            let mut space: Space = [MaybeUninit::uninit(); SPACE_BYTES];
            // Descriptors that are not taken out of the buffer are closed with it.
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let into = &mut [IoSliceMut::new(&mut bytes[filled..])];
            let message = match rustix::net::recvmsg(self.socket, into, &mut control, flags) {
                Ok(message) => message,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN)?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            for part in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = part {
                    received.extend(files);
                }
            }
            if received.len() > descriptors || message.flags.contains(ReturnFlags::CTRUNC) {
                return Err(MessageError::Descriptors { got: received.len(), wanted: descriptors }.into());
            }
            if message.bytes == 0 {
                return Err(ShareError::HungUp);
            }
            filled += message.bytes;
        }
        Ok(received)
    }

    /// Returns the process that created the other end of the socket, and its user, as reported by the kernel. The process id is 0 if the
    /// kernel cannot see the process, for example in a sibling container.
    pub fn peer(&self) -> Option<(u32, u32)> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        let (socket, into) = (self.socket.as_raw_fd(), (&raw mut credentials).cast());
        // SAFETY: an open socket, and a buffer with room for the option's value.
        let answered = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut size) };
        (answered == 0).then_some((credentials.pid as u32, credentials.uid))
    }

    fn wait(&self, what: PollFlags) -> Result<(), ShareError> {
        let left = match self.until {
            None => None,
            Some(until) => match until.checked_duration_since(Instant::now()) {
                Some(left) => Some(left),
                None => return Err(ShareError::TimedOut),
            },
        };
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(self.socket, what)], left.as_ref()) {
            Ok(0) => Err(ShareError::TimedOut),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_listener_times_out() {
        let name = format!("symmalloc-test-{}", std::process::id());
        assert!(
            matches!(Channel::connect(&name, Duration::from_secs(5)), Err(ShareError::Socket { .. })),
            "no process listens"
        );
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a short name");
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("made");
        rustix::net::bind(&listener, &address).expect("bound");
        rustix::net::listen(&listener, 0).expect("listens");
        let timeout = Duration::from_millis(50);
        let begun = Instant::now();
        // Nobody accepts: the queue holds one connection, and the next one waits.
        let waiting: Vec<_> = (0..4).map(|_| Channel::connect(&name, timeout)).collect();
        assert!(waiting[0].is_ok() && matches!(waiting[3], Err(ShareError::TimedOut)), "{waiting:?}");
        assert!((timeout..Duration::from_secs(5)).contains(&begun.elapsed()));
    }
}

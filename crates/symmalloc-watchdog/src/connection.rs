//! Connections between the processes of a job.

use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{SendFlags, send};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;

/// A byte stream to another process, on this machine or a remote one.
#[derive(Debug)]
#[non_exhaustive]
pub enum Connection {
    /// A network socket.
    Tcp(TcpStream),
    /// A local (Unix) socket. The kernel provides the peer's credentials.
    Unix(UnixStream),
}

impl Connection {
    /// Makes reads and writes nonblocking, and sends small messages immediately.
    pub(crate) fn set_prompt(&self) -> io::Result<()> {
        match self {
            Connection::Tcp(stream) => stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true)),
            Connection::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    /// Ends the connection. Bytes that have arrived can still be read; after that, reads return EOF.
    pub(crate) fn shut_down(&self) {
        // An error means that the connection has ended already.
        let _ended = match self {
            Connection::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Connection::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for Connection {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Tcp(stream) => stream.read(bytes),
            Connection::Unix(stream) => stream.read(bytes),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Tcp(stream) => stream.write(bytes),
            // In older versions of the standard library, `UnixStream::write` raises SIGPIPE, which ends programs in C and C++.
            Connection::Unix(stream) => Ok(send(stream, bytes, SendFlags::NOSIGNAL)?),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Connection::Tcp(stream) => stream.as_fd(),
            Connection::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<TcpStream> for Connection {
    fn from(stream: TcpStream) -> Self {
        Connection::Tcp(stream)
    }
}

impl From<UnixStream> for Connection {
    fn from(stream: UnixStream) -> Self {
        Connection::Unix(stream)
    }
}

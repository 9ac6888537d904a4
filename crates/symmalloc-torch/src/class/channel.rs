//! File descriptors from one process to another.
//!
//! The one that asks sends numbers, 16 bytes for each chunk; the one that serves answers each with a byte, 1 and a descriptor or 0. An
//! empty request ends the connection.

use crate::error::Error;
use crate::shared_chunks::Ticket;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use symmalloc_cuda::SharedPiece;

/// How long one end waits for the other.
const PATIENCE: Duration = Duration::from_secs(30);
const TICKET_BYTES: usize = 16;

/// The name of this process's socket, and the process. A child that was forked has none.
static SERVED: Mutex<Option<(u32, String)>> = Mutex::new(None);

/// Exports a chunk that still has its number.
pub(super) type Export = fn(Ticket) -> Result<SharedPiece, Error>;

/// The name of this process's socket. Starts to serve with the first call.
pub(super) fn serve(export: Export) -> Result<String, Error> {
    let process = std::process::id();
    let mut served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, name)) = &*served
        && *owner == process
    {
        return Ok(name.clone());
    }
    // Nobody is to guess it, and two processes of one number in different containers have different ones.
    let name = format!("symmalloc-{process}-{:016x}", RandomState::new().build_hasher().finish());
    let listener = SocketAddr::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
    let listener = listener.map_err(Error::Sharing)?;
    let accept = move || listener.incoming().flatten().for_each(|stream| answer_on_a_thread(stream, export));
    thread::Builder::new().name("symmalloc-share".to_owned()).spawn(accept).map_err(Error::Sharing)?;
    Ok(served.insert((process, name)).1.clone())
}

/// One that does not read does not keep the others waiting.
fn answer_on_a_thread(stream: UnixStream, export: Export) {
    let answering = thread::Builder::new().name("symmalloc-share".to_owned()).spawn(move || answer(stream, export));
    if let Err(error) = answering {
        tracing::warn!(name: "sharing.unanswered", target: "symmalloc", %error);
    }
}

fn answer(mut stream: UnixStream, export: Export) {
    let outcome = is_same_user(&stream).and_then(|is_same| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut request = [0; TICKET_BYTES];
        while is_same && read_whole(&mut stream, &mut request)? {
            let ticket = Ticket { number: word(&request[..8]), bytes: word(&request[8..]) };
            match export(ticket) {
                Ok(piece) => send(&stream, 1, Some(piece.file.as_raw_fd()))?,
                Err(error) => {
                    tracing::warn!(name: "sharing.refused", target: "symmalloc", %error);
                    send(&stream, 0, None)?;
                }
            }
        }
        Ok(())
    });
    if let Err(error) = outcome {
        tracing::debug!(name: "sharing.broken", target: "symmalloc", %error);
    }
}

/// Asks another process for chunks.
pub(super) fn fetch(socket: &str, tickets: &[Ticket]) -> Result<Vec<SharedPiece>, Error> {
    let connect = || {
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket)?)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    };
    let mut stream = connect().map_err(Error::Sharing)?;
    let mut pieces = Vec::new();
    for ticket in tickets {
        let request = [ticket.number.to_le_bytes(), ticket.bytes.to_le_bytes()].concat();
        let file = stream.write_all(&request).and_then(|()| receive(&stream)).map_err(Error::Sharing)?;
        let gone = Error::SharedMemoryGone { bytes: ticket.bytes };
        pieces.push(SharedPiece { size_bytes: ticket.bytes, file: file.ok_or(gone)? });
    }
    Ok(pieces)
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// Whether there was a request: not at the end of the connection.
fn read_whole(stream: &mut UnixStream, buffer: &mut [u8]) -> io::Result<bool> {
    match stream.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_same_user(stream: &UnixStream) -> io::Result<bool> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` has room for what is asked for, and `size` says how much.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            peer.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: written by the call that succeeded.
    let peer = unsafe { peer.assume_init() };
    // SAFETY: asks for a number.
    Ok(peer.uid == unsafe { libc::geteuid() })
}

/// Room for the head of a message with one descriptor, aligned as a head must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

// SAFETY: computes a size.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;

fn send(stream: &UnixStream, byte: u8, file: Option<RawFd>) -> io::Result<()> {
    let mut byte = byte;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: a message of zeros is an empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(file) = file {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        // SAFETY: the control has room for one head with a descriptor.
        unsafe {
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
            libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(file);
        }
    }
    // SAFETY: everything the message points to lives until the call returns.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The descriptor of an answer, if it has one.
fn receive(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = 0_u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: a message of zeros is an empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: everything the message points to lives until the call returns.
    let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    match received {
        1 => {}
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        _ => return Err(io::Error::last_os_error()),
    }
    // SAFETY: the system wrote the control.
    let head = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if head.is_null() {
        return Ok(None);
    }
    // SAFETY: a head that the system wrote.
    let (level, kind) = unsafe { ((*head).cmsg_level, (*head).cmsg_type) };
    if (level, kind) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
        return Ok(None);
    }
    // SAFETY: a head of this kind is followed by a descriptor.
    let file = unsafe { libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned() };
    // SAFETY: the system made it for us.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(file) }))
}

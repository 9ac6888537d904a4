//! Hostile peers, which send invalid or incomplete messages.

use super::{LONG, Trainer, descriptors};
use crate::process::{device, live, stub_test};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use symmalloc_cuda::{Access, CudaDevice, Export, Import, MessageError, ShareError};

/// Receives bytes, and returns the descriptors that came with them.
fn receive_with_files(socket: &UnixStream, bytes: &mut [u8]) -> Vec<std::os::fd::OwnedFd> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); 256];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [std::io::IoSliceMut::new(bytes)];
    recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a message");
    let files = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(files) => Some(files.collect::<Vec<_>>()),
        _ => None,
    });
    files.flatten().collect()
}

/// Returns an importer's first message.
fn hello(device: &Arc<CudaDevice>) -> Vec<u8> {
    let (near, mut far) = UnixStream::pair().expect("sockets");
    let _gone = Import::attach(device, &near, Access::Read, Duration::from_millis(20));
    let mut hello = vec![0; 36];
    far.read_exact(&mut hello).expect("a hello");
    hello
}

stub_test!(an_importer_that_received_the_offer_is_a_peer_even_if_the_exporter_timed_out, {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    theirs.write_all(&hello(&device)).expect("sent");
    // The importer may have mapped everything when the exporter gives up: its confirmation comes too late.
    assert_eq!(export.serve(&ours, Access::Read, Duration::from_millis(50)), Err(ShareError::TimedOut));
    let files = receive_with_files(&theirs, &mut [0; 32]);
    assert_eq!((files.len(), export.report().peers.len()), (2, 1));
    drop(export);
    assert_eq!(trainer.weights.exports().len(), 1);
    let word = || {
        let mut word = [0; 8];
        rustix::io::pread(&files[0], &mut word, 0).expect("the page");
        u64::from_le_bytes(word)
    };
    assert_eq!(word(), 1, "live");
    drop(trainer.layer);
    assert_eq!(word(), 2 | 1 << 8, "the second allocation was freed");
    drop(files);
    assert_eq!(trainer.weights.exports(), [], "the peer has left");
});

stub_test!(an_exporter_learns_that_its_offer_was_refused, {
    let device = device();
    let trainer = Trainer::new(&device);
    let offer = real_offer(&trainer.weights.export().expect("exported"), &device);
    let (near, mut far) = UnixStream::pair().expect("sockets");
    // Sends the offer without its descriptors, as to a process that has reached its descriptor limit.
    far.write_all(&offer).expect("sent");
    let error = Import::attach(&device, &near, Access::Read, LONG).map(drop).expect_err("no descriptors");
    assert_eq!(error, ShareError::Message(MessageError::Descriptors { got: 0, wanted: 2 }));
    drop(near);
    let mut output = Vec::new();
    far.read_to_end(&mut output).expect("the output can be read");
    assert_eq!(output[..36], hello(&device));
    assert_eq!(output[36..], [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "the importer gave up");
});

/// Returns the header and body of a real offer. Its descriptors stay here.
fn real_offer(export: &Export, device: &Arc<CudaDevice>) -> Vec<u8> {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let (near, mut far) = UnixStream::pair().expect("sockets");
    thread::scope(|scope| {
        let serving = scope.spawn(move || export.serve(&ours, Access::Read, LONG).expect_err("nobody attaches"));
        // Reads the hello that a real importer sends.
        let asking = scope.spawn(move || Import::attach(device, &near, Access::Read, LONG).map(drop));
        let mut hello = [0; 36];
        far.read_exact(&mut hello).expect("a hello");
        (&theirs).write_all(&hello).expect("sent");
        let mut header = [0; 32];
        (&theirs).read_exact(&mut header).expect("a header");
        let length = u32::from_le_bytes(header[20..24].try_into().expect("four bytes"));
        let mut body = vec![0; length as usize];
        (&theirs).read_exact(&mut body).expect("a body");
        drop((theirs, far));
        assert_eq!(asking.join().expect("no panic"), Err(ShareError::HungUp));
        assert_eq!(serving.join().expect("no panic"), ShareError::HungUp);
        [&header[..], &body].concat()
    })
}

/// Returns the error of an importer that receives these bytes with these descriptors.
fn attach_to(bytes: &[u8], files: &[std::os::fd::BorrowedFd<'_>], device: &Arc<CudaDevice>) -> ShareError {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let (near, far) = UnixStream::pair().expect("sockets");
    let mut space = [std::mem::MaybeUninit::uninit(); 256];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
    let sent = sendmsg(&far, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).expect("sent");
    assert_eq!(sent, bytes.len());
    far.shutdown(std::net::Shutdown::Write).expect("shut down");
    Import::attach(device, &near, Access::Read, LONG).map(drop).expect_err("no exporter")
}

stub_test!(torn_and_hostile_offers_are_typed_errors_and_their_descriptors_are_closed, {
    use std::os::fd::AsFd;
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let offer = real_offer(&export, &device);
    let file = std::fs::File::open("/dev/null").expect("a file");
    let (before, mappings) = (descriptors(), live());
    let two = [file.as_fd(), file.as_fd()];
    let mut seen = std::collections::BTreeSet::new();
    for length in (1..offer.len()).step_by(3) {
        assert_eq!(attach_to(&offer[..length], &two, &device), ShareError::HungUp, "{length} bytes");
    }
    for at in 0..offer.len() {
        let mut changed = offer.clone();
        changed[at] ^= 0x41;
        let error = attach_to(&changed, &two, &device);
        let is_typed =
            matches!(error, ShareError::Message(_) | ShareError::HungUp | ShareError::VersionMismatch { .. });
        assert!(is_typed, "byte {at}: {error}");
        seen.insert(error.to_string());
    }
    assert!(seen.len() >= 5, "{seen:#?}");
    // Correct bytes with wrong descriptors: too few, too many, and files that are not a page.
    let descriptors_of = |got| ShareError::Message(MessageError::Descriptors { got, wanted: 2 });
    assert_eq!(attach_to(&offer, &[], &device), descriptors_of(0));
    assert_eq!(attach_to(&offer, &[file.as_fd()], &device), descriptors_of(1));
    assert_eq!(attach_to(&offer, &[file.as_fd(); 5], &device), descriptors_of(5));
    assert_eq!(attach_to(&offer, &two, &device), ShareError::Message(MessageError::Descriptor));
    assert_eq!(attach_to(&[0; 64], &two, &device), ShareError::Message(MessageError::Foreign));
    assert_eq!((descriptors(), live()), (before, mappings));
});

stub_test!(hostile_importers_are_typed_errors, {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let before = descriptors();
    let serve = |bytes: &[u8]| {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.write_all(bytes).expect("sent");
        theirs.shutdown(std::net::Shutdown::Write).expect("shut down");
        export.serve(&ours, Access::Read, LONG).expect_err("no importer")
    };
    assert_eq!(serve(&[]), ShareError::HungUp);
    assert_eq!(serve(&[0xab; 36]), ShareError::Message(MessageError::Foreign));
    let mut hello = hello(&device);
    assert_eq!(serve(&hello), ShareError::HungUp);
    let step = |words: [u32; 3]| {
        let step: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        serve(&[&hello[..], &step].concat())
    };
    assert_eq!(step([1, 0, u32::MAX]), ShareError::Message(MessageError::Layout("batch")));
    assert_eq!(step([1, u32::MAX, 1]), ShareError::Message(MessageError::Layout("batch")));
    assert_eq!(step([1, 0, 0]), ShareError::Message(MessageError::Layout("batch")));
    assert_eq!(step([7, 0, 0]), ShareError::Message(MessageError::Unexpected { kind: 7 }));
    assert_eq!(step([3, 2, 0]), ShareError::PeerFailed { code: 2 });
    hello[8] = 9;
    assert_eq!(serve(&hello), ShareError::VersionMismatch { theirs: 9, ours: 1 });
    assert_eq!((descriptors(), export.report().peers.len()), (before, 0));
});

//! Transport of the core's agreement protocol over NCCL.
//!
//! ```text
//!  pinned host memory   [ rank 0 | rank 1 | ... | this rank's message | ... ]
//!                          ▲ ncclAllGather in place, on the transport's separate stream ── event ── polled until done
//! ```
//!
//! Messages are small (160 bytes if ranks agree), so the kernel reads and writes pinned host memory, which avoids copies to and from the
//! device. NCCL can abort the kernel, because the memory is not a window.
//!
//! If a rank aborts, kernels of other ranks that wait for it may complete without an error and leave zeros or old bytes in some slots
//! (observed on 4 H200). Each message therefore carries a seal over its bytes and the number of the gather. A slot with a mismatched seal
//! means that another rank has ended the communicator.

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::communicator::submission::{Buffers, Elements};
use crate::communicator::{CommState, Communicator, Stage};
use crate::ffi::driver::refused;
use crate::ffi::operation::{DataType, NcclCall};
use crate::watchdog::keyed;
use cudarc::driver::{CudaEvent, CudaStream};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use symmalloc_agreement::{Gathered, Transport, TransportError};
use symmalloc_core::config::Config;
use symmalloc_cuda::{CudaError, PinnedAllocator, PinnedBuffer};
use symmalloc_watchdog::Tick;

/// Time after which a wait also polls NCCL for lost ranks.
const ASK_NCCL_AFTER: Duration = Duration::from_millis(5);

/// Time in which the stream of an aborted communicator must have completed for its memory to be released.
const ENDS_WITHIN: Duration = Duration::from_millis(100);

/// Size of the seal after each message in bytes, see [`seal`].
const SEAL_BYTES: usize = size_of::<u64>();

/// A [`Transport`] over a communicator's all-gather, with its own memory and stream.
///
/// The all-gathers count among the communicator's collectives: every rank must call them at the same points. If a rank does not arrive
/// within the communicator's deadline, the communicator is ended on the other ranks. Their calls return [`TransportError::RankLost`], or
/// [`TransportError::Overdue`] if the missing rank is unknown.
pub struct NcclTransport {
    comm: Communicator,
    /// `None` after an error, because the device may still write to this memory.
    staging: Mutex<Option<Staging>>,
    /// The resources after an error, until the transport is dropped.
    abandoned: Mutex<Option<Staging>>,
}

/// The resources of an all-gather.
struct Staging {
    stream: Arc<CudaStream>,
    event: CudaEvent,
    memory: PinnedAllocator,
    /// The messages of all ranks.
    messages: PinnedBuffer<u8>,
}

impl NcclTransport {
    /// Creates a transport over this communicator. If the transport's stream is the first of the context, cudarc waits for the device's
    /// work, so create the transport before any collective that may not complete.
    ///
    /// # Errors
    /// Returns an error if a stream, an event or pinned memory cannot be allocated.
    pub fn new(comm: &Communicator) -> Result<Self, CommError> {
        let device = comm.device();
        let _current = device.enter()?;
        let _relaxed = device.relax_capture();
        let stream = device.context().new_stream().map_err(refused("cuStreamCreate"))?;
        let event = device.context().new_event(None).map_err(refused("cuEventCreate"))?;
        let memory = PinnedAllocator::pinned(device, Config::default())?;
        let messages = memory.alloc_host_zeroed((64 + SEAL_BYTES) * comm.ranks() as usize)?;
        let staging = Mutex::new(Some(Staging { stream, event, memory, messages }));
        Ok(NcclTransport { comm: comm.clone(), staging, abandoned: Mutex::default() })
    }

    /// Returns the communicator.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    fn gather(&self, staging: &mut Staging, message: &[u8]) -> Result<Gathered, CommError> {
        let (rank, ranks) = (self.comm.rank() as usize, self.comm.ranks() as usize);
        let slot_bytes = message.len() + SEAL_BYTES;
        let all_bytes = slot_bytes * ranks;
        if staging.messages.len() < all_bytes {
            staging.messages = staging.memory.alloc_host_zeroed(all_bytes.next_power_of_two())?;
        }
        let messages = staging.messages.as_mut_slice()?;
        let number = self.comm.next_gather()?;
        // Otherwise, bytes of an earlier gather could be mistaken for a message of this gather.
        messages[..all_bytes].fill(0);
        let mine = rank * slot_bytes;
        let (bytes, sealed) = messages[mine..mine + slot_bytes].split_at_mut(message.len());
        bytes.copy_from_slice(message);
        sealed.copy_from_slice(&seal(number, message));
        let receive = messages.as_mut_ptr() as u64;
        let send = Elements { address: receive + mine as u64, count: slot_bytes };
        let receive = Elements { address: receive, count: all_bytes };
        let _current = self.comm.device().enter()?;
        // The device accesses pinned memory at the host's addresses. The host does not touch the memory before the event completes, and
        // never frees it if the event does not complete.
        let stream = &staging.stream;
        self.comm.collective(NcclCall::AllGather, |comm| Buffers::raw(comm, send, receive, DataType::Uint8, stream))?;
        staging.event.record(&staging.stream).map_err(refused("cuEventRecord"))?;
        let flight = self.comm.watched().flight();
        let end = flight.end_of(keyed(stream));
        let backoff = Backoff::new(self.comm.wait_limit());
        let _relaxed = self.comm.device().relax_capture();
        while !staging.event.try_is_complete().map_err(refused("cuEventQuery"))? {
            if backoff.waited() > ASK_NCCL_AFTER {
                self.comm.check()?;
            }
            if !backoff.pause() {
                return Err(self.comm.end_overdue(Stage::Run, backoff.waited()));
            }
        }
        flight.done(end, Tick::now());
        let slots = messages[..all_bytes].chunks_exact(slot_bytes).map(|slot| slot.split_at(message.len()));
        if let Some(rank) = slots.clone().position(|(bytes, sealed)| sealed != seal(number, bytes)) {
            return Err(self.comm.end_for_lost_message(rank as u32));
        }
        let mut bytes = Vec::with_capacity(ranks * message.len());
        slots.for_each(|(message, _)| bytes.extend_from_slice(message));
        Ok(Gathered::new(bytes, message.len()))
    }
}

/// Returns the seal that distinguishes a message of this gather from other contents of a slot. Every rank computes it for the messages of
/// all ranks, so it processes whole words to save time.
fn seal(number: u64, message: &[u8]) -> [u8; SEAL_BYTES] {
    let mix = |state: u64, word: u64| {
        let product = u128::from(state ^ word) * u128::from(SEAL_KEY);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let (words, rest) = message.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let begun = mix(number, SEAL_KEY ^ message.len() as u64);
    let folded = words.iter().chain([&last]).fold(begun, |state, word| mix(state, u64::from_le_bytes(*word)));
    // Never zero, which is the content of an empty slot.
    folded.max(1).to_le_bytes()
}

// Digits of pi, like the digest's constants.
const SEAL_KEY: u64 = 0x9216_d5d9_8979_fb1b;

impl Transport for NcclTransport {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn ranks(&self) -> u32 {
        self.comm.ranks()
    }

    /// # Errors
    /// Same as for the trait. NCCL does not detect messages of different lengths, but the core's messages have equal lengths by
    /// construction.
    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        if message.is_empty() {
            return Ok(Gathered::new([].as_slice(), 0));
        }
        let mut slot = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(staging) = slot.as_mut() else { return Err(TransportError::Closed) };
        self.gather(staging, message).map_err(|error| {
            // A kernel may still access the memory.
            *self.abandoned.lock().unwrap_or_else(PoisonError::into_inner) = slot.take();
            tracing::warn!(name: "transport.failed", target: "symmalloc", communicator = self.comm.name(), %error);
            transport_error(&error)
        })
    }
}

impl NcclTransport {
    /// Returns `true` if no kernel can access the memory any more: the communicator is aborted, and the stream's work has completed.
    fn is_unused(&self, staging: &Staging) -> bool {
        if self.comm.state() != CommState::Aborted || symmalloc_files::is_forked() {
            return false;
        }
        let Ok(_current) = self.comm.device().enter() else { return false };
        let _relaxed = self.comm.device().relax_capture();
        // The error may have prevented the record after the collective.
        if staging.event.record(&staging.stream).is_err() {
            return false;
        }
        let backoff = Backoff::new(ENDS_WITHIN);
        loop {
            match staging.event.try_is_complete() {
                Ok(true) => return true,
                Ok(false) if backoff.pause() => {}
                _ => return false,
            }
        }
    }
}

impl Drop for NcclTransport {
    /// Leaks the memory of an all-gather that failed if a kernel may still access it.
    fn drop(&mut self) {
        let abandoned = self.abandoned.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(staging) = abandoned
            && !self.is_unused(&staging)
        {
            std::mem::forget(staging);
        }
    }
}

fn transport_error(error: &CommError) -> TransportError {
    match error {
        CommError::Deadline { waited, .. } => TransportError::Overdue { waited: *waited },
        CommError::PeerLost { rank, .. } => TransportError::RankLost { rank: *rank },
        CommError::Failed(failure) => match failure.cause.rank() {
            Some(rank) => TransportError::RankLost { rank },
            None => TransportError::Overdue { waited: failure.waited },
        },
        CommError::Nccl(error) => TransportError::Failed { call: error.call, code: error.code.into() },
        CommError::Cuda(CudaError::Driver(error)) => {
            TransportError::Failed { call: error.call, code: error.code.into() }
        }
        CommError::Thread { .. } => TransportError::Failed { call: "pthread_create", code: libc::EAGAIN.into() },
        CommError::Gone { cause: Some(cause), .. } => transport_error(cause),
        _ => TransportError::Closed,
    }
}

impl fmt::Debug for NcclTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclTransport").field("communicator", &self.comm).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_is_valid_for_its_message_and_gather_only() {
        let message = [7_u8; 67];
        let sealed = seal(3, &message);
        assert_eq!(sealed, seal(3, &message));
        assert_ne!(sealed, seal(2, &message), "an earlier gather with the same message");
        assert_ne!(seal(3, &[0; 64]), [0; SEAL_BYTES], "an empty slot");
        assert_ne!(seal(3, &[0; 64]), seal(3, &[0; 65]), "another length");
        for byte in 0..message.len() {
            let mut other = message;
            other[byte] ^= 1;
            assert_ne!(sealed, seal(3, &other), "byte {byte}");
        }
    }
}

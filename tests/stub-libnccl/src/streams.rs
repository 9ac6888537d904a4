//! Collectives on streams, submitted as external work to the stub of libcuda. The collectives of one communicator run in order.
//!
//! ```text
//!  launch ─► stream ─► submitted: joins the communicator's queue ─► arrived: its data may be used ─► the job
//!                                                                                                    │ all ranks
//!            the stream continues ◄──────────────── done: leaves the queue  ◄────────────────────────╯
//! ```

use crate::codes::{CUDA_ERROR, SUCCESS};
use crate::cuda;
use crate::ledger::violate;
use crate::member::{Life, Member, fresh};
use crate::messages::{Collective, Signature, ToJob, Transfer, WindowPlace, Work};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// A buffer: address and bytes. Address 0 denotes no buffer.
pub type Buffer = (u64, u64);

/// A kernel to launch.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// A collective.
    Collective {
        /// The call and its arguments.
        signature: Signature,
        /// The buffer read.
        send: Buffer,
        /// The buffer written.
        receive: Buffer,
        /// The positions of the buffers in windows.
        symmetric: Option<(WindowPlace, WindowPlace)>,
    },
    /// The sends and receives of a group, as (peer, is a send, buffer).
    Transfers(Vec<(usize, bool, Buffer)>),
}

/// A kernel and its stream.
#[derive(Clone, Debug)]
pub struct Launch {
    /// See [`Kernel`].
    pub kernel: Kernel,
    /// `cudaStream_t`.
    pub stream: u64,
    /// `true` if the rank hangs in this launch.
    pub is_hung: bool,
}

/// Work on a stream that has not taken effect.
#[derive(Debug)]
pub struct Queued {
    instance: u64,
    kernel: Arc<Kernel>,
    is_hung: bool,
    has_arrived: bool,
    is_told: bool,
}

type Template = (Arc<Member>, Arc<Kernel>, bool);

static TEMPLATES: Mutex<BTreeMap<u64, Template>> = Mutex::new(BTreeMap::new());
static INSTANCES: Mutex<BTreeMap<u64, Arc<Member>>> = Mutex::new(BTreeMap::new());

fn lock<T>(map: &'static Mutex<T>) -> std::sync::MutexGuard<'static, T> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Submits a kernel to its stream.
pub fn launch(member: &Arc<Member>, launch: Launch) -> c_int {
    if cuda::stream_device(launch.stream).is_some_and(|device| device != member.device) {
        violate(format!("rank {}: the stream and the communicator are on different devices", member.world));
    }
    let template = fresh();
    lock(&TEMPLATES).insert(template, (Arc::clone(member), Arc::new(launch.kernel), launch.is_hung));
    match cuda::submit(launch.stream, template) {
        // The template stays, because its graph may launch it repeatedly.
        Ok(true) => SUCCESS,
        Ok(false) => {
            lock(&TEMPLATES).remove(&template);
            SUCCESS
        }
        Err(_) => {
            lock(&TEMPLATES).remove(&template);
            CUDA_ERROR
        }
    }
}

/// Called by the stub of libcuda when a kernel is submitted to a stream.
pub extern "C" fn submitted(template: u64, instance: u64) {
    let found = lock(&TEMPLATES).get(&template).cloned();
    let Some((member, kernel, is_hung)) = found else { return cuda::complete(instance) };
    lock(&INSTANCES).insert(instance, Arc::clone(&member));
    let mut inner = member.lock();
    if matches!(inner.life, Life::Destroyed | Life::Aborted | Life::Revoked) {
        drop(inner);
        violate(format!("rank {}: a graph launched a collective of a communicator that has ended", member.world));
        lock(&INSTANCES).remove(&instance);
        return cuda::complete(instance);
    }
    inner.queue.push_back(Queued { instance, kernel, is_hung, has_arrived: false, is_told: false });
}

/// Called by the stub of libcuda when all work before the kernel on its stream has taken effect.
pub extern "C" fn arrived(instance: u64) {
    let Some(member) = lock(&INSTANCES).get(&instance).cloned() else { return };
    if let Some(queued) = member.lock().queue.iter_mut().find(|queued| queued.instance == instance) {
        queued.has_arrived = true;
    }
    pump(&member);
}

/// Sends the first work in a communicator's queue to the job, once it may run.
fn pump(member: &Arc<Member>) {
    let (instance, kernel) = {
        let mut inner = member.lock();
        let Some(front) = inner.queue.front_mut() else { return };
        if !front.has_arrived || front.is_told || front.is_hung {
            return;
        }
        front.is_told = true;
        let mut started = (front.instance, Arc::clone(&front.kernel));
        if let Kernel::Collective { symmetric: Some(places), .. } = &*started.1 {
            match inner.windows.current(places.0).zip(inner.windows.current(places.1)) {
                Some(current) if current == *places => {}
                // A captured kernel whose windows were registered again under their handles.
                Some(current) => {
                    let mut kernel = Kernel::clone(&started.1);
                    if let Kernel::Collective { symmetric, .. } = &mut kernel {
                        *symmetric = Some(current);
                    }
                    started.1 = Arc::new(kernel);
                }
                None => violate(format!("rank {}: a kernel uses a window that was deregistered", member.world)),
            }
        }
        started
    };
    member.send(ToJob::Arrived { instance, work: work(member, &kernel) });
}

fn extents(member: &Member, (address, bytes): Buffer) -> Option<Vec<(u64, u64)>> {
    if address == 0 {
        return None;
    }
    let extents = cuda::extents(address, bytes);
    if extents.is_none() {
        violate(format!("rank {}: a kernel uses {bytes} bytes at {address:#x}, which are not allocated", member.world));
    }
    extents
}

fn work(member: &Member, kernel: &Kernel) -> Work {
    match kernel {
        Kernel::Collective { signature, send, receive, symmetric } => Work::Collective(Collective {
            signature: *signature,
            send: extents(member, *send),
            receive: extents(member, *receive),
            symmetric: *symmetric,
        }),
        Kernel::Transfers(transfers) => {
            let transfer = |&(peer, is_send, buffer): &(usize, bool, Buffer)| Transfer {
                peer,
                is_send,
                bytes: buffer.1,
                extents: extents(member, buffer),
                is_done: false,
            };
            Work::Transfers(transfers.iter().map(transfer).collect())
        }
    }
}

/// Completes work that the job has run.
pub fn done(member: &Arc<Member>, instance: u64) {
    let was_queued = {
        let mut inner = member.lock();
        let is_first = inner.queue.front().is_some_and(|front| front.instance == instance);
        if is_first {
            inner.queue.pop_front();
        }
        is_first
    };
    if was_queued {
        lock(&INSTANCES).remove(&instance);
        cuda::complete(instance);
        pump(member);
    }
}

/// Cancels work that will never run: the stream continues without it.
pub fn cancel(queued: &Queued) {
    lock(&INSTANCES).remove(&queued.instance);
    cuda::complete(queued.instance);
}

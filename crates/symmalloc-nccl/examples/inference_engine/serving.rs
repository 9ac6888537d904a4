//! Continuous batching: requests join the batch when they arrive and leave it when they are answered.
//!
//! ```text
//!  step            7                   8                   9
//!  prefill streams │ prompts of new    │                   │ ...
//!                  │ requests          │ (they join)       │
//!  decode stream   │ graph of 16 rows  │ graph of 32 rows  │ ...
//! ```
//! The order in which requests join depends only on the requests and never on the speed of a stream: a prompt that begins in a step is in
//! the batch of the next one. Every rank therefore makes the same calls, and allocates the same memory at the same offsets.

use super::Failure;
use super::forward::{DeviceModel, NO_POSITION, PAGE, PAGES, Row, Workspace};
use super::memory::Memory;
use super::model::{END, Model, POSITIONS};
use super::requests::Request;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream, DevicePtrMut};
use std::sync::Arc;
use symmalloc_cuda::{PinnedAllocator, PinnedBuffer};
use symmalloc_nccl::Communicator;

/// Maximum number of concurrent requests.
pub(crate) const BATCH_MAX: usize = 32;
/// Maximum number of prompts that begin in one step, each on a separate stream.
pub(crate) const PREFILLS_MAX: usize = 2;
/// Row counts of the captured graphs: a batch uses the first one that is large enough.
const BUCKETS: [usize; 6] = [1, 2, 4, 8, 16, BATCH_MAX];

/// A request in the batch, or in the batch of the next step.
struct Sequence<M: Memory> {
    number: usize,
    /// Number of tokens whose keys and values are stored.
    kept: usize,
    answer: Vec<u32>,
    pages: Vec<M::Buffer<f32>>,
    /// The row that the kernels read.
    row: Row,
}

impl<M: Memory> Sequence<M> {
    /// Allocates pages for `tokens` more tokens.
    fn make_room(
        &mut self,
        memory: &M,
        stream: &Arc<CudaStream>,
        page_len: usize,
        tokens: usize,
    ) -> Result<(), Failure> {
        while self.pages.len() * PAGE < self.kept + tokens {
            let mut page = memory.take::<f32>(stream, page_len)?;
            self.row[2 + self.pages.len()] = page.device_ptr_mut(stream).0;
            self.pages.push(page);
        }
        Ok(())
    }

    fn is_answered(&self, request: &Request) -> bool {
        self.answer.len() == request.answer_max || self.answer.last() == Some(&END)
    }
}

/// A prompt in progress, with its buffers.
struct Prefill<M: Memory> {
    sequence: Sequence<M>,
    _rows: M::Buffer<u64>,
    _token: M::Buffer<u32>,
    _work: Workspace<M>,
}

/// The stream and host buffers of a prompt.
struct Lane {
    stream: Arc<CudaStream>,
    rows: PinnedBuffer<u64>,
    token: PinnedBuffer<u32>,
}

/// The resources of the batch. The graphs contain their addresses.
struct Decoder<M: Memory> {
    stream: Arc<CudaStream>,
    graphs: Vec<(usize, CudaGraph)>,
    rows: PinnedBuffer<u64>,
    tokens: PinnedBuffer<u32>,
    device_rows: M::Buffer<u64>,
    device_tokens: M::Buffer<u32>,
    _work: Workspace<M>,
}

/// The results of serving.
#[derive(Clone, Debug, Default)]
pub(crate) struct Served {
    /// Indexed by request.
    pub(crate) answers: Vec<Vec<u32>>,
    /// Decoding steps, each of which launches a graph.
    pub(crate) launches: u64,
    /// Maximum number of concurrent requests.
    pub(crate) most_at_once: usize,
}

/// The engine of one rank.
pub(crate) struct Engine<'a, M: Memory> {
    memory: &'a M,
    comm: &'a Communicator,
    model: DeviceModel<'a, M>,
    lanes: Vec<Lane>,
    decoder: Decoder<M>,
}

impl<'a, M: Memory> Engine<'a, M> {
    /// Copies the model and captures a graph for each batch size. `streams` contains one for the batch, then those for prompts.
    pub(crate) fn new(
        memory: &'a M,
        pinned: &PinnedAllocator,
        comm: &'a Communicator,
        streams: &[Arc<CudaStream>],
        model: &Model,
    ) -> Result<Self, Failure> {
        let (stream, others) = streams.split_first().expect("a stream for the batch");
        let model = DeviceModel::new(memory, comm, stream, model)?;
        let lane = |stream: &Arc<CudaStream>| -> Result<Lane, Failure> {
            let rows = pinned.alloc_host_zeroed(POSITIONS * size_of::<Row>() / size_of::<u64>())?;
            Ok(Lane { stream: Arc::clone(stream), rows, token: pinned.alloc_host_zeroed(1)? })
        };
        let lanes = others.iter().map(lane).collect::<Result<_, _>>()?;

        let mut rows: PinnedBuffer<u64> = pinned.alloc_host_zeroed(BATCH_MAX * (2 + PAGES))?;
        rows.as_mut_slice()?.fill(NO_POSITION);
        let mut device_rows = memory.take::<u64>(stream, rows.len())?;
        let mut device_tokens = memory.take::<u32>(stream, BATCH_MAX)?;
        stream.memcpy_htod(&rows, &mut device_rows)?;
        let work = Workspace::new(memory, stream, BATCH_MAX)?;
        let (at_rows, at_tokens) = (device_rows.device_ptr_mut(stream).0, device_tokens.device_ptr_mut(stream).0);
        // Run once eagerly, so that all one-time setup of launches and collectives happens outside the captures.
        model.forward(stream, &work, (at_rows, BATCH_MAX), 0, at_tokens)?;
        comm.synchronize(stream)?;
        // During captures the allocator checks whether a stream is captured before it records an event on it.
        let _captures = comm.device().watch_captures();
        let mut graphs = Vec::new();
        for count in BUCKETS {
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            let captured = model.forward(stream, &work, (at_rows, count), 0, at_tokens);
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags)?.ok_or("nothing was captured")?;
            captured?;
            graph.upload()?;
            graphs.push((count, graph));
        }
        let tokens = pinned.alloc_host_zeroed(BATCH_MAX)?;
        let decoder =
            Decoder { stream: Arc::clone(stream), graphs, rows, tokens, device_rows, device_tokens, _work: work };
        Ok(Engine { memory, comm, model, lanes, decoder })
    }

    /// Answers all requests.
    pub(crate) fn serve(&mut self, requests: &[Request]) -> Result<Served, Failure> {
        let mut served = Served { answers: vec![Vec::new(); requests.len()], ..Served::default() };
        let (mut batch, mut waiting) = (Vec::new(), requests.iter().enumerate().peekable());
        let mut step = 0;
        while !batch.is_empty() || waiting.peek().is_some() {
            let mut begun = Vec::new();
            while begun.len() < self.lanes.len().min(BATCH_MAX - batch.len())
                && let Some((number, request)) = waiting.next_if(|(_, request)| request.arrival <= step)
            {
                begun.push(self.begin(begun.len(), number, &request.prompt)?);
            }
            if !batch.is_empty() {
                self.decode(&mut batch)?;
                served.launches += 1;
            }
            for (lane, prefill) in begun.into_iter().enumerate() {
                batch.push(self.join(lane, prefill)?);
            }
            served.most_at_once = served.most_at_once.max(batch.len());
            for at in (0..batch.len()).rev() {
                let number = batch[at].number;
                if batch[at].is_answered(&requests[number]) {
                    // The pages of the request are now free for later requests.
                    served.answers[number] = batch.swap_remove(at).answer;
                }
            }
            step += 1;
        }
        Ok(served)
    }

    /// Begins the prompt of a request on one of the lanes.
    fn begin(&mut self, lane: usize, number: usize, prompt: &[u32]) -> Result<Prefill<M>, Failure> {
        let (lane, memory) = (&mut self.lanes[lane], self.memory);
        let row = [NO_POSITION; 2 + PAGES];
        let mut sequence = Sequence { number, kept: 0, answer: Vec::new(), pages: Vec::new(), row };
        sequence.make_room(memory, &self.decoder.stream, self.model.page_len(), prompt.len())?;
        let rows = lane.rows.as_mut_slice()?.chunks_exact_mut(sequence.row.len());
        for (position, (row, token)) in rows.zip(prompt).enumerate() {
            row.copy_from_slice(&sequence.row);
            (row[0], row[1]) = (u64::from(*token), position as u64);
        }
        let mut rows = memory.take::<u64>(&lane.stream, lane.rows.len())?;
        let mut token = memory.take::<u32>(&lane.stream, 1)?;
        let work = Workspace::new(memory, &lane.stream, prompt.len())?;
        lane.stream.memcpy_htod(&lane.rows, &mut rows)?;
        let (at_rows, at_token) = (rows.device_ptr_mut(&lane.stream).0, token.device_ptr_mut(&lane.stream).0);
        // The pages belong to the batch's stream. While these guards live, their use on this stream is recorded.
        let uses: Vec<_> = sequence.pages.iter_mut().map(|page| page.device_ptr_mut(&lane.stream)).collect();
        self.model.forward(&lane.stream, &work, (at_rows, prompt.len()), prompt.len() - 1, at_token)?;
        drop(uses);
        lane.stream.memcpy_dtoh(&token, &mut lane.token)?;
        sequence.kept = prompt.len();
        Ok(Prefill { sequence, _rows: rows, _token: token, _work: work })
    }

    /// Completes a prompt: its request joins the batch with the first token of its answer.
    fn join(&mut self, lane: usize, prefill: Prefill<M>) -> Result<Sequence<M>, Failure> {
        let lane = &self.lanes[lane];
        self.comm.synchronize(&lane.stream)?;
        let mut sequence = prefill.sequence;
        sequence.answer.push(lane.token.as_slice()?[0]);
        // The batch's stream waits for these writes.
        sequence.pages.iter_mut().for_each(|page| drop(page.device_ptr_mut(&self.decoder.stream)));
        Ok(sequence)
    }

    /// Generates one more token for each request of the batch.
    fn decode(&mut self, batch: &mut [Sequence<M>]) -> Result<(), Failure> {
        let decoder = &mut self.decoder;
        let mut rows = decoder.rows.as_mut_slice()?.chunks_exact_mut(2 + PAGES);
        for sequence in &mut *batch {
            sequence.make_room(self.memory, &decoder.stream, self.model.page_len(), 1)?;
            sequence.row[0] = u64::from(*sequence.answer.last().expect("a prompt gives a token"));
            sequence.row[1] = sequence.kept as u64;
            rows.next().expect("the batch should fit").copy_from_slice(&sequence.row);
        }
        rows.for_each(|row| row.fill(NO_POSITION));
        decoder.stream.memcpy_htod(&decoder.rows, &mut decoder.device_rows)?;
        let (_, graph) = decoder.graphs.iter().find(|(count, _)| *count >= batch.len()).expect("the batch should fit");
        graph.launch()?;
        decoder.stream.memcpy_dtoh(&decoder.device_tokens, &mut decoder.tokens)?;
        self.comm.synchronize(&decoder.stream)?;
        for (sequence, token) in batch.iter_mut().zip(decoder.tokens.as_slice()?) {
            sequence.kept += 1;
            sequence.answer.push(*token);
        }
        Ok(())
    }
}

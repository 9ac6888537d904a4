//! What is measured: one of our interfaces, as a program calls it.

/// An interface of ours. Threads share it.
///
/// A subject has no other purpose than to be measured, so a call that is refused ends the program with the reason.
pub(crate) trait Subject: Sync + Sized {
    /// What a thread holds to allocate for work on a stream.
    type Stream<'a>: Send
    where
        Self: 'a;

    /// An allocation.
    type Block<'a>: Send
    where
        Self: 'a;

    /// One of the streams, from 0.
    fn stream(&self, number: usize) -> Self::Stream<'_>;

    /// Allocates for work on the stream.
    fn allocate<'a>(&'a self, stream: &Self::Stream<'a>, size_bytes: u64) -> Self::Block<'a>;

    /// Frees what was allocated for work on the stream.
    fn free<'a>(&'a self, stream: &Self::Stream<'a>, block: Self::Block<'a>);

    /// Frees what is kept at a place, if anything is.
    #[inline(always)]
    fn free_at<'a>(&'a self, stream: &Self::Stream<'a>, place: &mut Option<Self::Block<'a>>) {
        if let Some(block) = place.take() {
            self.free(stream, block);
        }
    }

    /// Notes a use by work on another stream.
    fn record_use(&self, block: &Self::Block<'_>, stream: &Self::Stream<'_>);

    /// Waits for the device, outside of what is measured.
    fn synchronize(&self) {}

    /// What it holds; `None` when the interface does not say.
    fn memory(&self) -> Option<Memory>;

    /// Driver calls made so far in the process; `None` when nobody counts.
    fn driver_calls(&self) -> Option<u64>;
}

/// What an allocator takes from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The most that it held.
    pub(crate) reserved_peak_bytes: u64,
    /// In how many pieces it is now.
    pub(crate) segments: u64,
}

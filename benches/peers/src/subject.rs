//! The abstraction over our interfaces that the cases measure.

/// One of our interfaces, as a program calls it. Threads share it.
///
/// A subject exists only for measurement, so a refused call ends the program with the reason.
pub(crate) trait Subject: Sync + Sized {
    /// The state of a thread for allocating on a stream.
    type Stream<'a>: Send
    where
        Self: 'a;

    /// An allocation.
    type Block<'a>: Send
    where
        Self: 'a;

    /// Returns a stream by number, starting at 0.
    fn stream(&self, number: usize) -> Self::Stream<'_>;

    /// Allocates for work on the stream.
    fn allocate<'a>(&'a self, stream: &Self::Stream<'a>, size_bytes: u64) -> Self::Block<'a>;

    /// Frees a block that was allocated for work on the stream.
    fn free<'a>(&'a self, stream: &Self::Stream<'a>, block: Self::Block<'a>);

    /// Frees the block in `place`, if any.
    #[inline(always)]
    fn free_at<'a>(&'a self, stream: &Self::Stream<'a>, place: &mut Option<Self::Block<'a>>) {
        if let Some(block) = place.take() {
            self.free(stream, block);
        }
    }

    /// Records a use by work on another stream.
    fn record_use(&self, block: &Self::Block<'_>, stream: &Self::Stream<'_>);

    /// Waits for the device, outside of the measurement.
    fn synchronize(&self) {}

    /// Returns the device memory of the allocator, or `None` if the interface does not report it.
    fn memory(&self) -> Option<Memory>;

    /// Returns the number of driver calls of the process so far, or `None` if they are not counted.
    fn driver_calls(&self) -> Option<u64>;
}

/// The device memory of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Peak of reserved bytes.
    pub(crate) reserved_peak_bytes: u64,
    /// Current number of segments.
    pub(crate) segments: u64,
}

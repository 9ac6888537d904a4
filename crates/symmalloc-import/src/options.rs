//! How a recording is read: which part of it, how much is forgiven, and how much memory that may take.

/// The memory limit when none is set, in bytes: room for snapshots of 500 MB without stack frames, of 2 GB with them.
pub const MEMORY_LIMIT_BYTES: u64 = 1 << 30;

/// How to read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOptions {
    /// The device whose trace to read from a PyTorch snapshot. `None`: the only one that was recorded.
    pub device: Option<usize>,
    /// Whether text that ends in the middle is read up to there. A torn pickle is never read.
    pub accept_torn: bool,
    /// The most memory that the records may take, in bytes, and again the most that may be kept of a snapshot's pickle
    /// while it is read. Counted is what is used; spare room in tables can take as much again.
    pub memory_limit_bytes: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions { device: None, accept_torn: false, memory_limit_bytes: MEMORY_LIMIT_BYTES }
    }
}

impl ReadOptions {
    /// Reads this device's trace from a PyTorch snapshot.
    #[must_use]
    pub fn device(mut self, device: usize) -> Self {
        self.device = Some(device);
        self
    }

    /// Reads text that ends in the middle up to there; [`Summary::torn_at_line`](crate::Summary::torn_at_line) then says where.
    #[must_use]
    pub fn accept_torn(mut self) -> Self {
        self.accept_torn = true;
        self
    }

    /// Sets the memory limit ([`memory_limit_bytes`](ReadOptions::memory_limit_bytes)), in bytes.
    #[must_use]
    pub fn memory_limit_bytes(mut self, limit_bytes: u64) -> Self {
        self.memory_limit_bytes = limit_bytes;
        self
    }
}

//! Options for reading a recording: the device, the tolerance for truncated text, stacks, and the memory limit.

/// Default memory limit in bytes. It suffices for snapshots of 500 MB without stack frames, or 2 GB with them, and three copies of each
/// record.
pub const MEMORY_LIMIT_BYTES: u64 = 4 << 30;

/// The entry of [`ReadOptions::libraries`] that stands for every installed package.
pub(crate) const ALL_LIBRARIES: &str = "all";

/// Libraries by default, besides PyTorch: their frames say how a tensor was computed, not for what.
pub const LIBRARIES: [&str; 4] = ["einops", "functorch", "torchgen", "triton"];

/// Options for reading a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Device whose trace to read from a PyTorch snapshot. `None` selects the only recorded one.
    pub device: Option<usize>,
    /// If `true`, truncated text is read up to the point of truncation. A truncated pickle is never read.
    pub accept_torn: bool,
    /// If `true`, the Python stacks of a PyTorch snapshot are read too.
    pub stacks: bool,
    /// Installed packages whose Python frames do not name allocations, besides PyTorch; `all` for every installed package. The innermost
    /// frame of other code is that of the program.
    pub libraries: Vec<String>,
    /// Memory limit in bytes. It applies once to the records with their [`copies`](Self::copies), once to the stacks, and once to
    /// the parts kept of a snapshot's pickle while it is read. Records with the same name share its text, which counts once. Only
    /// used bytes count; spare capacity of tables can take as much again.
    pub memory_limit_bytes: u64,
    /// Number of further copies of each record that the caller makes. They count toward the limit. Copies share names.
    pub copies: u32,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions {
            device: None,
            accept_torn: false,
            stacks: false,
            libraries: LIBRARIES.map(str::to_owned).to_vec(),
            memory_limit_bytes: MEMORY_LIMIT_BYTES,
            copies: 0,
        }
    }
}

impl ReadOptions {
    /// Selects the device whose trace to read from a PyTorch snapshot.
    #[must_use]
    pub fn device(mut self, device: usize) -> Self {
        self.device = Some(device);
        self
    }

    /// Accepts truncated text up to the point of truncation; [`Summary::torn_at_line`](crate::Summary::torn_at_line) then states the line.
    #[must_use]
    pub fn accept_torn(mut self) -> Self {
        self.accept_torn = true;
        self
    }

    /// Reads the Python stacks of a PyTorch snapshot too, into [`Recording::stacks`](crate::Recording::stacks).
    #[must_use]
    pub fn stacks(mut self) -> Self {
        self.stacks = true;
        self
    }

    /// Adds an installed package whose Python frames do not name allocations ([`libraries`](ReadOptions::libraries)).
    #[must_use]
    pub fn library(mut self, package: &str) -> Self {
        self.libraries.push(package.to_owned());
        self
    }

    /// Sets the memory limit ([`memory_limit_bytes`](ReadOptions::memory_limit_bytes)), in bytes.
    #[must_use]
    pub fn memory_limit_bytes(mut self, limit_bytes: u64) -> Self {
        self.memory_limit_bytes = limit_bytes;
        self
    }

    /// Counts this many further copies of each record toward the memory limit ([`copies`](ReadOptions::copies)).
    #[must_use]
    pub fn copies(mut self, copies: u32) -> Self {
        self.copies = copies;
        self
    }
}

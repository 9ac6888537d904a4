//! Options for reading a recording: the device, the tolerance for truncated text, stacks, and the memory limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Default memory limit in bytes. It suffices for snapshots of 500 MB without stack frames, or 2 GB with them, and three copies of each
/// record. It is lower for small compressed files, see [`ReadOptions::memory_limit_bytes`].
pub const MEMORY_LIMIT_BYTES: u64 = 4 << 30;
/// Lowest default memory limit in bytes, for compressed files of up to 256 KiB.
const COMPRESSED_LIMIT_BYTES: u64 = 256 << 20;
/// Default memory limit of larger compressed files per byte. Reports of recordings take up to 150 bytes for each.
const COMPRESSED_LIMIT_FACTOR: u64 = 1024;

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
    /// If `true`, the addresses of allocations are read too.
    pub addresses: bool,
    /// Installed packages whose Python frames do not name allocations, besides PyTorch; `all` for every installed package. The innermost
    /// frame of other code is that of the program.
    pub libraries: Vec<String>,
    /// Memory limit in bytes. It applies once to the records with their [`copies`](Self::copies), once to the stacks, and once to
    /// the parts kept of a snapshot's pickle while it is read. Records with the same name share its text, which counts once. Only
    /// used bytes count; spare capacity of tables can take as much again.
    ///
    /// `None` selects [`MEMORY_LIMIT_BYTES`]. For a compressed file, it selects 1,024 times the compressed size if that is less, but at
    /// least 256 MiB: a few kilobytes must not take gigabytes.
    pub memory_limit_bytes: Option<u64>,
    /// Number of further copies of each record that the caller makes. They count toward the limit. Copies share names.
    pub copies: u32,
    /// The compressed bytes read so far; `None` for plain data.
    pub(crate) compressed: Option<CompressedBytes>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions {
            device: None,
            accept_torn: false,
            stacks: false,
            addresses: false,
            libraries: LIBRARIES.map(str::to_owned).to_vec(),
            memory_limit_bytes: None,
            copies: 0,
            compressed: None,
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

    /// Reads the addresses of allocations too, into [`Recording::addresses`](crate::Recording::addresses).
    #[must_use]
    pub fn addresses(mut self) -> Self {
        self.addresses = true;
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
        self.memory_limit_bytes = Some(limit_bytes);
        self
    }

    /// Counts this many further copies of each record toward the memory limit ([`copies`](ReadOptions::copies)).
    #[must_use]
    pub fn copies(mut self, copies: u32) -> Self {
        self.copies = copies;
        self
    }

    /// Returns the limit for the data read so far.
    pub(crate) fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit { stated_bytes: self.memory_limit_bytes, compressed: self.compressed.clone() }
    }
}

/// Number of compressed bytes that a reader has consumed so far, shared with it.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompressedBytes(Arc<AtomicU64>);

impl CompressedBytes {
    pub(crate) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for CompressedBytes {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CompressedBytes {}

/// A limit on memory. The default for compressed data grows with the data.
#[derive(Clone, Debug)]
pub(crate) struct MemoryLimit {
    stated_bytes: Option<u64>,
    compressed: Option<CompressedBytes>,
}

impl MemoryLimit {
    /// Returns the current limit in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let of_compressed = |compressed: &CompressedBytes| {
            let bytes = compressed.bytes().saturating_mul(COMPRESSED_LIMIT_FACTOR);
            bytes.clamp(COMPRESSED_LIMIT_BYTES, MEMORY_LIMIT_BYTES)
        };
        let default_bytes = || self.compressed.as_ref().map_or(MEMORY_LIMIT_BYTES, of_compressed);
        self.stated_bytes.unwrap_or_else(default_bytes)
    }
}

impl From<u64> for MemoryLimit {
    fn from(bytes: u64) -> Self {
        MemoryLimit { stated_bytes: Some(bytes), compressed: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limit_grows_with_the_compressed_size() {
        let compressed = CompressedBytes::default();
        let options = ReadOptions { compressed: Some(compressed.clone()), ..ReadOptions::default() };
        let limit = options.memory_limit();
        assert_eq!(limit.bytes(), 256 << 20);
        for (bytes, expected) in
            [(256 << 10, 256 << 20), (256 << 10, 512 << 20), (1 << 30, 4 << 30), (u64::MAX / 2, 4 << 30)]
        {
            compressed.add(bytes);
            assert_eq!(limit.bytes(), expected, "{bytes} bytes more");
        }
        assert_eq!(ReadOptions::default().memory_limit().bytes(), 4 << 30, "plain data");
        assert_eq!(options.memory_limit_bytes(8 << 30).memory_limit().bytes(), 8 << 30, "a stated limit");
    }
}

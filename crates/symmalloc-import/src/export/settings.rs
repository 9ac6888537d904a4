//! The allocator's settings, in the form that PyTorch's snapshots use.

use std::io::{self, Write};

use symmalloc_core::config::{Config, SegmentPolicy};

use crate::pickle::PickleWriter;

/// Writes `allocator_settings`. PyTorch settings that have no counterpart here are written as turned off.
pub(super) fn write<W: Write>(pickle: &mut PickleWriter<W>, config: &Config) -> io::Result<()> {
    let pool = config.default_pool();
    pickle.text("allocator_settings")?;
    pickle.open_dict()?;
    pickle.text("PYTORCH_CUDA_ALLOC_CONF")?;
    pickle.text(&config.to_string())?;
    pickle.text("max_split_size")?;
    let max_split_size_bytes = match pool.segments() {
        SegmentPolicy::Fixed(fixed) => fixed.max_split_size_bytes,
        _ => None,
    };
    match max_split_size_bytes {
        Some(bytes) => pickle.integer(bytes)?,
        None => pickle.minus_one()?,
    }
    pickle.text("garbage_collection_threshold")?;
    pickle.zero()?;
    pickle.text("expandable_segments")?;
    pickle.boolean(matches!(pool.segments(), SegmentPolicy::Expandable(_)))?;
    pickle.text("pinned_num_register_threads")?;
    pickle.integer(1)?;
    for key in ["release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "graph_capture_record_stream_reuse"] {
        pickle.text(key)?;
        pickle.boolean(false)?;
    }
    pickle.text("roundup_power2_divisions")?;
    pickle.open_dict()?;
    for (power, divisions) in pool.roundup_power2_divisions().divisions().into_iter().enumerate() {
        pickle.text(&(1 << power).to_string())?;
        pickle.integer(divisions.into())?;
    }
    pickle.close_dict()?;
    pickle.close_dict()
}

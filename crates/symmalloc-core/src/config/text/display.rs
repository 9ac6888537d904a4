//! The canonical text of a configuration.

use std::fmt;

use super::keys::{EXPANDABLE, FIXED, PLAN, POINTER_LOOKUP, RECLAIM, RESERVED, SEGMENTS, STREAMS};
use crate::config::policy::{Config, PlanPolicy, PoolConfig, RoundupPower2Divisions, SegmentPolicy};
use crate::types::units::MIB;

impl fmt::Display for PoolConfig {
    /// Writes the canonical text; see the [module documentation](super).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.segments() {
            SegmentPolicy::Fixed(fixed) => {
                write!(f, "segments:{}", SEGMENTS[FIXED])?;
                write_bytes(f, "large_segment_size", Some(fixed.large_segment_bytes))?;
                write_bytes(f, "max_split_size", fixed.max_split_size_bytes)?;
                write_bytes(f, "max_non_split_rounding", Some(fixed.max_non_split_rounding_bytes))?;
                if fixed.unsplit {
                    f.write_str(",unsplit:true")?;
                }
            }
            SegmentPolicy::Expandable(expandable) => {
                write!(f, "segments:{}", SEGMENTS[EXPANDABLE])?;
                write_bytes(f, "range", Some(expandable.range_bytes))?;
                write_bytes(f, "growth", Some(expandable.growth_bytes))?;
            }
            SegmentPolicy::Reserved { segment_bytes } => {
                write!(f, "segments:{}", SEGMENTS[RESERVED])?;
                write_bytes(f, "segment", Some(*segment_bytes))?;
            }
        }
        write!(f, ",streams:{},symmetric:{}", STREAMS[self.streams() as usize], self.symmetric())?;
        write_bytes(f, "limit", self.limit_bytes())?;
        write_bytes(f, "release_threshold", self.release_threshold_bytes())?;
        write!(f, ",reclaim:{}", RECLAIM[self.reclaim() as usize])?;
        write_divisions(f, self.roundup_power2_divisions())?;
        if self.plan() == PlanPolicy::Learn {
            write!(f, ",plan:{}", PLAN[self.plan() as usize])?;
        }
        if let Some(tag) = self.tag() {
            write!(f, ",tag:{tag}")?;
        }
        if let Some(base) = self.base() {
            write!(f, ",base:{base}")?;
        }
        if !self.debug().is_off() {
            write!(f, ",debug:{}", self.debug())?;
        }
        let Some(stitching) = self.stitching() else { return Ok(()) };
        write!(f, ",stitching:true")?;
        write_bytes(f, "stitching_granule", Some(stitching.granule_bytes))?;
        write_bytes(f, "stitching_least", Some(stitching.least_bytes))?;
        write!(f, ",stitching_maps:{},stitching_aliases:{}", stitching.maps_max, stitching.aliases_max)
    }
}

impl fmt::Display for Config {
    /// Writes the canonical text: the default pool's settings, then those of the allocator.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.default_pool())?;
        write_bytes(f, "total_limit", self.total_limit_bytes())?;
        let lookup = POINTER_LOOKUP[self.pointer_lookup() as usize];
        write!(f, ",retries_max:{},pointer_lookup:{lookup},history_ops:{}", self.retries_max(), self.history_ops())
    }
}

/// Writes `,name_mb:number`, or `,name_bytes:number` if the value is not a multiple of a MiB. Writes nothing without a
/// value.
fn write_bytes(f: &mut fmt::Formatter<'_>, name: &str, bytes: Option<u64>) -> fmt::Result {
    match bytes {
        Some(bytes) if bytes.is_multiple_of(MIB) => write!(f, ",{name}_mb:{}", bytes / MIB),
        Some(bytes) => write!(f, ",{name}_bytes:{bytes}"),
        None => Ok(()),
    }
}

/// Writes nothing if requests are not rounded, one number if it is the same for all sizes, and the shortest list
/// otherwise: the first entry covers all smaller sizes, and `>` covers the longest run of equal divisions at the end.
fn write_divisions(f: &mut fmt::Formatter<'_>, divisions: RoundupPower2Divisions) -> fmt::Result {
    let by_size = divisions.divisions();
    let (first, last) = (by_size[0], by_size[by_size.len() - 1]);
    let first_other = by_size.iter().position(|divisions| *divisions != first);
    let Some(first_other) = first_other else {
        return if first == 0 { Ok(()) } else { write!(f, ",roundup_power2_divisions:{first}") };
    };
    let tail = by_size.iter().rposition(|divisions| *divisions != last).map_or(0, |before| before + 1);
    write!(f, ",roundup_power2_divisions:[")?;
    for (index, divisions) in by_size.iter().enumerate().take(tail).skip(first_other - 1) {
        write!(f, "{}:{divisions},", 1_u64 << index)?;
    }
    write!(f, ">:{last}]")
}

//! How little memory the job would need if all of it were known beforehand: an offset for each allocation, found by
//! `symmalloc-plan`, with streams shared and sizes rounded as in a block.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use symmalloc_core::op::Op;
use symmalloc_core::units::UNIT_BYTES;
use symmalloc_plan::{Problem, ProblemError, Rectangle, Steps, solve};
use symmalloc_trace::replay::Program;

/// What an offline placement comes to; of several ranks the most. No allocator of this version follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OfflineBound {
    /// As the program requests it, over all pools.
    pub(super) peak_live_bytes: u64,
    /// The heights of all pools together.
    pub(super) planned_bytes: u64,
}

impl OfflineBound {
    pub(super) fn of(program: &Program) -> Result<Self, ProblemError> {
        // Time goes on with each allocation: what is freed in between makes room for it.
        let (mut now, mut live_bytes, mut bound) = (0_u64, 0_u64, OfflineBound::default());
        let mut live = BTreeMap::new();
        let mut pools: BTreeMap<_, Vec<Rectangle>> = BTreeMap::new();
        for op in program.ops() {
            match *op {
                Op::Allocate { id, pool, size_bytes, .. } if size_bytes > 0 => {
                    now += 1;
                    live.insert(id, (pool, now, size_bytes));
                    live_bytes += size_bytes;
                    bound.peak_live_bytes = live_bytes.max(bound.peak_live_bytes);
                }
                Op::Free { id } => {
                    if let Some((pool, lower, size_bytes)) = live.remove(&id) {
                        live_bytes -= size_bytes;
                        pools.entry(pool).or_default().push(rectangle(lower, now + 1, size_bytes));
                    }
                }
                _ => {}
            }
        }
        for (pool, lower, size_bytes) in live.into_values() {
            pools.entry(pool).or_default().push(rectangle(lower, now + 1, size_bytes));
        }
        for rectangles in pools.into_values() {
            bound.planned_bytes += solve(&Problem::new(rectangles)?, Steps::default()).height() * UNIT_BYTES;
        }
        Ok(bound)
    }

    /// The larger number of each.
    pub(super) fn max(self, other: OfflineBound) -> OfflineBound {
        OfflineBound {
            peak_live_bytes: self.peak_live_bytes.max(other.peak_live_bytes),
            planned_bytes: self.planned_bytes.max(other.planned_bytes),
        }
    }

    /// Live over planned; 1 where nothing is.
    pub(super) fn efficiency(self) -> f64 {
        if self.planned_bytes == 0 { 1.0 } else { self.peak_live_bytes as f64 / self.planned_bytes as f64 }
    }

    pub(super) fn object(self) -> Value {
        json!({
            "peak_live_bytes": self.peak_live_bytes,
            "planned_bytes": self.planned_bytes,
            "efficiency": (self.efficiency() * 1e6).round() / 1e6,
        })
    }
}

/// In blocks' units: what lives from one allocation to before another one.
fn rectangle(lower: u64, upper: u64, size_bytes: u64) -> Rectangle {
    Rectangle { lower, upper, size: size_bytes.div_ceil(UNIT_BYTES) }
}

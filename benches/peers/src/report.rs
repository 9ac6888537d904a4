//! The output of figures: one line of JSON each, in the same format from every program.
//!
//! ```text
//! {"peer":"symmalloc","case":"steady_ns_per_op","at":"moe_train","values":[24.1,24.3,24.0]}
//! ```
//!
//! | case | at | values, one per repeat |
//! |---|---|---|
//! | `ops`, `streams`, `live_peak_bytes` | job | properties of the job; the last is the peak of requested bytes (peer: empty) |
//! | `cold_ns_per_op` | job | first passes, each on an allocator without memory |
//! | `steady_ns_per_op` | job | later passes |
//! | `steady_driver_calls` | job | driver calls per steady pass (symmalloc only) |
//! | `reserved_peak_bytes`, `segments` | job | values after all passes |
//! | `pair_ns` | bytes | allocation and free of one block |
//! | `replacement_ns` | live blocks | free of a random block and allocation of a different size |
//! | `pairs_per_second` | threads | all threads together, 4 KiB, one stream each |
//! | `readings` | `all`, `disturbed` | number of clock readings for the figures above, and how many were disturbed by a slowed processor |
//! | `arithmetic_per_second` | threads | all threads together, rounds of arithmetic that share nothing (peer: kind of arithmetic) |
//! | `growth_ns` | live blocks | per allocation, without frees (symmalloc only, like all below) |
//! | `live_blocks_ns` | live blocks | like `replacement_ns`, with blocks of 512 B to 4 KiB |
//! | `host_bytes_per_block` | live blocks | host memory used by the process per block, without the program's own data |
//! | `free_blocks_ns` | free blocks | like `replacement_ns` among 1,000, with this many free blocks that cannot merge |
//! | `free_and_live_blocks_ns` | free blocks | like `replacement_ns`, with this many free and as many live blocks |

use serde_json::json;

/// Prints the figures of a peer.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    peer: String,
}

impl Report {
    /// Creates a report for the peer with this name.
    pub(crate) fn new(peer: &str) -> Self {
        Report { peer: peer.to_owned() }
    }

    /// Prints one figure.
    pub(crate) fn figure(&self, case: &str, at: &impl ToString, values: &[f64]) {
        let line = json!({"peer": self.peer, "case": case, "at": at.to_string(), "values": values});
        println!("{line}");
    }
}

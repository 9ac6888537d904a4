//! Where figures go: one line of JSON each, the same from every program.
//!
//! ```text
//! {"peer":"symmalloc","case":"steady_ns_per_op","at":"moe_train","values":[24.1,24.3,24.0]}
//! ```
//!
//! | case | at | values, one per repeat |
//! |---|---|---|
//! | `ops`, `streams`, `live_peak_bytes` | job | what the job is; the last: bytes asked for at its peak (peer: empty) |
//! | `cold_ns_per_op` | job | first passes, each on an allocator without memory |
//! | `steady_ns_per_op` | job | later passes |
//! | `steady_driver_calls` | job | driver calls of a steady pass (ours) |
//! | `reserved_peak_bytes`, `segments` | job | after all passes |
//! | `pair_ns` | bytes | allocate and free one block |
//! | `replacement_ns` | live blocks | free a random one and allocate another size |
//! | `pairs_per_second` | threads | all threads together, 4 KiB, a stream each |
//! | `readings` | `all`, `disturbed` | number of times that a clock was read for the figures above, and how often somebody slowed the processor |
//! | `arithmetic_per_second` | threads | all threads together, rounds of arithmetic that share nothing (peer: which arithmetic) |
//! | `growth_ns` | live blocks | per allocation, nothing freed (ours, as all below) |
//! | `live_blocks_ns` | live blocks | as `replacement_ns`, blocks of 512 B to 4 KiB |
//! | `host_bytes_per_block` | live blocks | host memory that the process took for them, what the program holds not counted |
//! | `free_blocks_ns` | free blocks | as `replacement_ns` among 1,000, with so many free blocks that cannot merge |
//! | `free_and_live_blocks_ns` | free blocks | as `replacement_ns`, with so many free and so many live blocks |

use serde_json::json;

/// Prints the figures of a peer.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    peer: String,
}

impl Report {
    /// For the peer of this name.
    pub(crate) fn new(peer: &str) -> Self {
        Report { peer: peer.to_owned() }
    }

    /// One figure.
    pub(crate) fn figure(&self, case: &str, at: &impl ToString, values: &[f64]) {
        let line = json!({"peer": self.peer, "case": case, "at": at.to_string(), "values": values});
        println!("{line}");
    }
}

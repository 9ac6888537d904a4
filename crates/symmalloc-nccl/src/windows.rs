//! State of the windows on one communicator. Nothing here communicates.
//!
//! | file | contents |
//! |---|---|
//! | `segment.rs` | the names of a segment |
//! | `table.rs` | the live segments, and what an event changes |
//! | `registrations.rs` | the registered segments, and their lookup |
//! | `keys.rs` | cache keys, and their invalidation |
//! | `symmetric_space.rs` | a model of NCCL's symmetric address space |

pub(crate) mod keys;
pub(crate) mod registrations;
pub(crate) mod segment;
pub(crate) mod symmetric_space;
pub(crate) mod table;

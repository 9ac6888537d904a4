//! Configuration: the program's choices as values and as text, the rules that follow from them, and their errors.

pub(crate) mod damage;
mod debug;
pub mod errors;
pub(crate) mod nearest;
pub mod op;
mod policy;
pub(crate) mod restore_error;
pub(crate) mod size_rules;
mod stitching;
pub mod text;

pub use debug::DebugOptions;
pub(crate) use policy::in_range;
pub use policy::{
    Config, ConfigBuilder, ConfigError, ExpandableSegments, FixedSegments, PlanPolicy, PointerLookup, PoolConfig,
    PoolConfigBuilder, Reclaim, RoundupPower2Divisions, SegmentPolicy, StreamPolicy,
};
pub use stitching::Stitching;

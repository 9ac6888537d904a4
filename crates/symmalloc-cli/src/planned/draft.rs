//! A job's plans before there is one: the configuration, and the pools that the program makes.

use crate::error::CliError;
use crate::recorded::Recorded;
use symmalloc_core::PoolId;
use symmalloc_core::config::Config;
use symmalloc_core::op::Op;
use symmalloc_trace::plan::{PlanContradiction, PlanFile};

/// A file with this configuration and the pools that the program makes, without plans.
pub(super) fn empty(recorded: &Recorded, config: Config) -> Result<PlanFile, CliError> {
    let mut file = PlanFile::new(config);
    for op in recorded.program().ops() {
        if let Op::CreatePool { pool, config } = op
            && *pool != PoolId::DEFAULT
        {
            file.add_pool(*pool, (**config).clone()).map_err(|source| contradicts(recorded, source))?;
        }
    }
    Ok(file)
}

/// The error of plans that do not go together.
pub(super) fn contradicts(recorded: &Recorded, source: PlanContradiction) -> CliError {
    CliError::Contradictory { path: recorded.path.clone(), source }
}

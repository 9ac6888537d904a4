//! The calls of a recording, whose allocations are identified by ordinals.

use std::collections::HashMap;
use symmalloc_core::ids::AllocationId;
use symmalloc_core::op::{Op, Record};

/// Ops that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ComparedOps {
    Everything,
    /// All ops except uses by other streams and registrations of streams, which depend on event polling.
    WithoutUses,
}

/// A call of the program.
pub(super) struct ProgramCall<'a> {
    /// Number of its record, counted from 0.
    pub(super) number: usize,
    /// The op, in which the allocation is identified by its ordinal.
    pub(super) op: Op,
    pub(super) record: &'a Record,
    /// The name that the program gave the op's allocation.
    pub(super) name: Option<&'a str>,
}

/// Returns the calls in the records.
pub(super) fn calls(records: &[Record], detail: ComparedOps) -> impl Iterator<Item = ProgramCall<'_>> {
    // The map is never iterated, so its order has no effect.
    let mut known: HashMap<AllocationId, (AllocationId, Option<&str>)> = HashMap::new();
    records.iter().enumerate().filter_map(move |(number, record)| {
        let mut op = record.op.clone();
        let mut name = record.name.as_deref();
        match &mut op {
            Op::Allocate { id, .. } => {
                let ordinal = AllocationId(known.len() as u64);
                known.insert(*id, (ordinal, name));
                *id = ordinal;
            }
            Op::Free { id } | Op::RecordUse { id, .. } => {
                if let Some((ordinal, known)) = known.get(id) {
                    (*id, name) = (*ordinal, *known);
                }
            }
            _ => {}
        }
        let depends_on_polling = matches!(op, Op::RecordUse { .. } | Op::RegisterStream { .. });
        (detail == ComparedOps::Everything || !depends_on_polling).then_some(ProgramCall { number, op, record, name })
    })
}

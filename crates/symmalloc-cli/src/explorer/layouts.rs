//! The layouts of a job: as recorded, under PyTorch's rule, under the job's own settings, and as planned.

use super::layout::{Address, Layout, LayoutDraft};
use crate::address_order::{AddressOrder, ModelSegments};
use crate::error::CliError;
use crate::picture::memory::has_placements;
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::backend::Reason;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::ids::{HeapId, Placement, PoolId, SegmentId, StreamGroup};
use symmalloc_core::op::Op;
use symmalloc_core::work::Allowance;
use symmalloc_import::rerun::{Happened, Rerun, RerunError};
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;

/// Returns the layouts of a job, those of PyTorch first.
///
/// # Errors
/// Returns an error if the job fails under its own settings. Other layouts that fail are left out.
pub(crate) fn layouts(recorded: &Recorded, plan: Option<&PlanFile>) -> Result<Vec<Layout>, CliError> {
    let program = recorded.program();
    let failed = |error| recorded.failed(error);
    let own = Rerun::new(program, &recorded.config).map_err(failed)?;
    let own = rerun(program, own, "symmalloc", "replayed with the settings of this report").map_err(failed)?;
    let planned = plan.and_then(|plan| {
        let following = Rerun::following(program, plan).ok()?;
        rerun(program, following, "symmalloc, planned", "replayed as it follows a plan").ok().flatten()
    });
    Ok([as_recorded(recorded), model(program), own, planned].into_iter().flatten().collect())
}

/// Returns the layout of a rerun.
fn rerun(
    program: &Program,
    mut rerun: Rerun<'_>,
    name: &'static str,
    origin: &'static str,
) -> Result<Option<Layout>, RerunError> {
    let mut draft = LayoutDraft::new(program.ops().len(), program.allocation_count());
    let address = |offset_bytes| Address { range: 0, offset_bytes };
    rerun.run(program.ops().len(), |moment| {
        for change in moment.memory {
            let at = address(change.address.0);
            if change.is_mapped {
                draft.map(change.heap, at, change.size_bytes, moment.number);
            } else {
                draft.unmap(at, change.size_bytes, moment.number);
            }
        }
        match &moment.happened {
            Happened::Allocated(live) => {
                draft.allocate(live.id, live.heap, address(live.address.0), live.requested_bytes, moment.number);
            }
            Happened::Freed(live) => draft.free(live.id, moment.number),
            _ => {}
        }
        Ok::<(), RerunError>(())
    })?;
    Ok(draft.finish(name, origin))
}

/// Returns the recorded placements, if the recording has any. The sizes of segments are unknown, so each segment is drawn up to the end of
/// its furthest allocation.
fn as_recorded(recorded: &Recorded) -> Option<Layout> {
    if !has_placements(recorded) {
        return None;
    }
    let program = recorded.program();
    let mut draft = LayoutDraft::new(program.ops().len(), program.allocation_count());
    let (mut pools, groups) = (BTreeMap::new(), program.groups());
    // Use the configuration of the recording, not one that replaces it.
    let of_default_pool = recorded.recording.config.as_ref().map(|config| config.default_pool().streams());
    pools.insert(PoolId::DEFAULT, of_default_pool.unwrap_or_default());
    for (number, (record, op)) in recorded.recording.records.iter().zip(program.ops()).enumerate() {
        match op {
            Op::Allocate { id, pool, stream, size_bytes: size_bytes @ 1.. } => {
                let Some(placement) = record.placement.filter(|placement| *placement != Placement::NOWHERE) else {
                    continue;
                };
                let streams = pools.get(pool).copied().unwrap_or_default();
                let owner = HeapId { pool: *pool, group: streams.group_of(*stream, &groups) };
                draft.allocate(*id, owner, placed(placement), *size_bytes, number);
            }
            Op::CreatePool { pool, config } => _ = pools.insert(*pool, config.streams()),
            Op::Free { id } => draft.free(*id, number),
            _ => {}
        }
    }
    draft.reserve_around_allocations();
    draft.finish(
        "recorded",
        "as the recorded allocator placed it, with each segment drawn up to its furthest allocation",
    )
}

fn placed(placement: Placement) -> Address {
    let Placement { segment: SegmentId(segment), offset_bytes } = placement;
    Address { range: segment.into(), offset_bytes }
}

/// Returns the layout of PyTorch's rule with its default settings.
fn model(program: &Program) -> Option<Layout> {
    let rules = PoolConfig::builder().fixed().build().ok()?;
    let mut model = AddressOrder::new(0, ModelSegments::Fixed, 0).with_rules(&rules).with_completions(program);
    let mut draft = LayoutDraft::new(program.ops().len(), program.allocation_count());
    let mut allowance = Allowance::default();
    for (number, op) in program.ops().iter().enumerate() {
        let stepped = allowance.charge(|| model.step_of(program, number)).ok()?;
        let placement = match (stepped, op) {
            (Ok(placement), _) => placement,
            (Err(error), Op::Allocate { .. }) if error.reason == Reason::OutOfMemory => None,
            (Err(_), _) => return None,
        };
        for change in model.take_changes() {
            let owner = HeapId { pool: change.pool, group: StreamGroup::One(change.stream) };
            let at = placed(Placement { segment: change.segment, offset_bytes: change.offset_bytes });
            if change.is_mapped {
                draft.map(owner, at, change.size_bytes, number);
            } else {
                draft.unmap(at, change.size_bytes, number);
            }
        }
        match (op, placement) {
            (Op::Allocate { id, pool, stream, size_bytes }, Some(placement)) => {
                let owner = HeapId { pool: *pool, group: StreamGroup::One(*stream) };
                draft.allocate(*id, owner, placed(placement), *size_bytes, number);
            }
            (Op::Free { id }, _) => draft.free(*id, number),
            _ => {}
        }
    }
    draft.finish("PyTorch, its default", "a model of PyTorch's allocator with fixed segments")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{PolicyArgs, ReadingArgs};
    use crate::planned::PlannedJob;
    use std::path::Path;

    /// Returns the peak of a layout's reserved memory.
    fn peak_bytes(layout: &Layout) -> u64 {
        let mut changes: Vec<(usize, i128)> = Vec::new();
        for part in &layout.reserved {
            changes.push((part.ops.start, i128::from(part.size_bytes)));
            changes.push((part.ops.end, -i128::from(part.size_bytes)));
        }
        // At the same op, memory ends before other memory begins.
        changes.sort_unstable();
        let held = changes.iter().scan(0, |held, (_, change)| {
            *held += change;
            Some(*held)
        });
        held.max().unwrap_or(0).try_into().unwrap()
    }

    /// Every allocation lies in memory that is reserved throughout its life, and no two allocations overlap.
    #[track_caller]
    fn assert_valid(layout: &Layout, program: &Program) {
        let mut ends = vec![program.ops().len(); program.allocation_count()];
        let mut sizes = vec![(0, 0); program.allocation_count()];
        for (number, op) in program.ops().iter().enumerate() {
            match op {
                Op::Allocate { id, size_bytes, .. } => sizes[id.index()] = (number, *size_bytes),
                Op::Free { id } => ends[id.index()] = number,
                _ => {}
            }
        }
        let mut live: BTreeMap<(usize, u64), (u64, usize)> = BTreeMap::new();
        let mut freed: Vec<usize> = (0..ends.len()).collect();
        freed.sort_by_key(|&id| ends[id]);
        let mut freed = freed.into_iter().peekable();
        for (id, position) in layout.positions.iter().enumerate() {
            let (op, size_bytes) = sizes[id];
            while let Some(gone) = freed.next_if(|&gone| ends[gone] <= op) {
                if let Some(position) = layout.positions[gone] {
                    live.remove(&(position.lane, position.position_bytes));
                }
            }
            let Some(position) = position else { continue };
            let (lane, start) = (position.lane, position.position_bytes);
            let end = start + size_bytes;
            if let Some((&(of, _), &(above, other))) = live.range(..(lane, end)).next_back()
                && of == lane
            {
                assert!(above <= start, "{}: allocations {other} and {id} overlap", layout.name);
            }
            live.insert((lane, start), (end, id));
            if id % 97 == 0 {
                let ops = op..ends[id];
                let covered: u64 = layout
                    .reserved
                    .iter()
                    .filter(|part| part.lane == lane && part.ops.start <= ops.start && part.ops.end >= ops.end)
                    .map(|part| {
                        let part_end = part.position_bytes + part.size_bytes;
                        part_end.min(end).saturating_sub(part.position_bytes.max(start))
                    })
                    .sum();
                assert_eq!(covered, size_bytes, "{}: memory of allocation {id}", layout.name);
            }
        }
    }

    #[test]
    fn layouts_reserve_what_the_numbers_of_the_report_say() {
        let recorded = Recorded::read(Path::new("fsdp1"), &ReadingArgs::default(), &PolicyArgs::default()).unwrap();
        let planned = PlannedJob::of(&recorded, &PolicyArgs::default(), crate::planned::budget(2)).unwrap();
        let found = layouts(&recorded, Some(&planned.file)).unwrap();
        let names: Vec<&str> = found.iter().map(|layout| layout.name).collect();
        assert_eq!(names, ["recorded", "PyTorch, its default", "symmalloc", "symmalloc, planned"]);
        for layout in &found {
            assert_valid(layout, recorded.program());
        }
        let options = crate::job::Options { ranks: std::num::NonZeroU32::MIN, ..crate::job::Options::default() };
        let model = recorded.job.replay_as_pytorch(crate::job::Segments::Fixed, &options, &|| ()).unwrap();
        let own = recorded.job.steady(&recorded.config, None).unwrap();
        assert_eq!(peak_bytes(&found[1]), model.first_pass.reserved_bytes);
        assert_eq!(peak_bytes(&found[2]), own.peaks.reserved_bytes);
        assert_eq!(peak_bytes(&found[3]), planned.followed.peaks.reserved_bytes);
        assert_eq!(found[2].lanes.len(), 4);
        assert_eq!(found[3].lanes.len(), 1, "a plan shares its memory between streams");
    }
}

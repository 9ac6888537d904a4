//! Writer for plans. The spelling is canonical: equal plans produce equal bytes.

use super::file::PlanFile;
use super::line::{MAGIC, NEVER, VERSION};
use std::fmt::{self, Write};
use symmalloc_core::ids::HeapId;
use symmalloc_core::plans::{Plan, PlannedAllocation};

/// Returns the plans as text, which [`parse`](super::parse) reads back to equal plans.
pub fn to_text(file: &PlanFile) -> String {
    let mut out = format!("{MAGIC} {VERSION}\nconfig {}\n", file.config());
    let mut lines = 1;
    for (pool, config) in file.pools() {
        out += &format!("pool {pool} {config}\n");
        lines += 1;
    }
    for (heap, plan) in file.plans() {
        write_plan(&mut out, heap, plan).expect("writing to a string cannot fail");
        lines += 1 + plan.allocations().len();
    }
    out + &format!("end {lines}\n")
}

fn write_plan(out: &mut String, heap: HeapId, plan: &Plan) -> fmt::Result {
    let count = plan.allocations().len();
    writeln!(out, "plan {} {} key {} allocations {count}", heap.pool, heap.group, plan.key())?;
    for PlannedAllocation { wanted, offset_bytes } in plan.allocations() {
        write!(out, "a {} {} ", wanted.requested_bytes, wanted.stream)?;
        match wanted.until {
            Some(until) => write!(out, "{until}")?,
            None => out.write_str(NEVER)?,
        }
        match offset_bytes {
            Some(offset) => writeln!(out, " @{offset}")?,
            None => out.write_char('\n')?,
        }
    }
    Ok(())
}

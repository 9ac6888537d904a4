//! Plans of tables of rectangles (CSV), in the formats of MiniMalloc and TelaMalloc, and plans of jobs as such tables, to compare the
//! search with others.

use crate::args::PlanArgs;
use crate::content::Content;
use crate::destination::{Destination, shown};
use crate::error::{CliError, NotATable};
use crate::output;
use crate::planned::{self, GRANULE_BYTES};
use crate::progress::Progress;
use crate::quantity::{count, counted, rounded};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;
use symmalloc_core::ids::HeapId;
use symmalloc_core::plans::{Plan, PlannedAllocation};
use symmalloc_plan::{Problem, SearchBudget, Solution, TableError, solve_watched, write_csv};
use symmalloc_trace::plan::PlanFile;

/// Maximum length of the header line.
const HEADER_BYTES_MAX: u64 = 4096;

/// Returns `true` if the file is a table of rectangles, or is meant to be one: its first line has the columns, or its name ends in `.csv`.
/// A log of RMM is CSV too, but has different columns.
pub(super) fn is_table(path: &Path) -> bool {
    let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let Some(file) = is_file.then(|| File::open(path).ok()).flatten() else { return false };
    let mut header = Vec::new();
    if BufReader::new(file.take(HEADER_BYTES_MAX)).read_until(b'\n', &mut header).is_err() {
        return false;
    }
    let Ok(header) = String::from_utf8(header) else { return false };
    let header = header.trim_start_matches('\u{feff}').to_lowercase();
    let columns: Vec<&str> =
        header.split([',', ';', '\t']).map(|column| column.trim_matches([' ', '"', '\r', '\n'])).collect();
    let has = |names: &[&str]| columns.iter().any(|column| names.contains(column));
    let is_other = header.starts_with("symmalloc-trace") || has(&["action", "allocate", "free"]);
    let has_columns = has(&["lower", "start", "begin"]) && has(&["upper", "end"]) && has(&["size"]);
    has_columns || !is_other && Content::of_name(path) == Some(Content::Table)
}

/// Returns `true` if the output is a table.
pub(super) fn is_output(args: &PlanArgs) -> bool {
    args.output.as_deref().and_then(Content::of_name) == Some(Content::Table)
}

/// Plans each table. If an output is given, there is only one table, which is written with its offsets.
pub(super) fn plan(args: &PlanArgs) -> Result<(), CliError> {
    if let Some(path) = args.traces.iter().find(|path| !is_table(path)) {
        return Err(CliError::PlanOfBoth { recording: path.clone() });
    }
    if let Some(flag) = flag_of_recordings(args) {
        return Err(CliError::PlanOfRectangles { flag });
    }
    let out = args.output.as_ref().map(|path| Destination::file(path, Content::Table, &args.traces)).transpose()?;
    let mut objects = Vec::new();
    for path in &args.traces {
        let planned = Planned::new(path, planned::budget(args.seconds.unwrap_or(planned::SECONDS)))?;
        if let Some(out) = &out {
            planned.write(out)?;
        }
        if args.json {
            objects.push(planned.object(args.output.as_ref()));
        } else {
            output::print(&planned.render())?;
        }
    }
    if args.json {
        output::print_json(objects.into())?;
    }
    Ok(())
}

/// Returns a job's plan as a table. A table can express only the plan of one heap, and only lifetimes that end with the step or earlier.
pub(super) fn of_plan(path: &Path, file: &PlanFile) -> Result<Vec<u8>, CliError> {
    let not_a_table = |reason| CliError::PlanNotATable { path: path.to_path_buf(), reason };
    let plans: Vec<(HeapId, &Plan)> = file.plans().collect();
    let (heap, plan) = match plans[..] {
        [] => return Err(CliError::NothingToPlan { path: path.to_path_buf() }),
        [plan] => plan,
        _ => return Err(not_a_table(NotATable::Plans(plans.len()))),
    };
    let allocations = plan.allocations();
    let ends_later = |it: &PlannedAllocation| it.wanted.until.is_none_or(|until| until as usize > allocations.len());
    if let Some(allocation) = allocations.iter().position(ends_later) {
        return Err(not_a_table(NotATable::EndsLater { allocation }));
    }
    let config = file.pool_config(heap.pool).expect("a pool with a plan should have a configuration");
    let rows = plan.rectangles(config, GRANULE_BYTES);
    let mut table = Vec::new();
    write_csv(rows, &mut table).map_err(|source| CliError::Rectangles { path: path.to_path_buf(), source })?;
    Ok(table)
}

/// Returns the first of the given flags that applies to recordings only, if there is one.
fn flag_of_recordings(args: &PlanArgs) -> Option<&'static str> {
    let given = [
        ("--one-job", args.one_job),
        ("--margin", args.margin > 0),
        ("--reserved", args.reserved),
        ("--reservations", args.reservations.is_some()),
        ("--segments", args.policy.segments.is_some()),
        ("--streams", args.policy.streams.is_some()),
        ("--config", args.policy.config().is_some()),
    ];
    given.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
}

/// A table and its solution.
struct Planned<'a> {
    path: &'a PathBuf,
    problem: Problem,
    names: Vec<String>,
    solution: Solution,
    seconds: f64,
}

impl<'a> Planned<'a> {
    fn new(path: &'a PathBuf, budget: SearchBudget) -> Result<Self, CliError> {
        let failed = |source| CliError::Rectangles { path: path.clone(), source };
        let file = File::open(path).map_err(|error| failed(TableError::Csv(error.into())))?;
        let (problem, names) = Problem::read_csv(file).map_err(failed)?;
        let begun = Instant::now();
        let progress = Progress::new(&path.to_string_lossy(), budget.0, "units of work");
        let solution = solve_watched(&problem, budget, |search| progress.set(search.work, budget.0));
        drop(progress);
        let seconds = begun.elapsed().as_secs_f64();
        let checked = solution.check(&problem);
        assert_eq!(checked, Ok(()), "the search returns a valid placement");
        Ok(Planned { path, problem, names, solution, seconds })
    }

    fn write(&self, out: &Destination) -> Result<(), CliError> {
        let mut table = Vec::new();
        let written = self.solution.write_csv(&self.problem, &self.names, &mut table);
        written.map_err(|source| CliError::Rectangles { path: self.path.clone(), source })?;
        out.write(&table)
    }

    /// Returns the lower bound divided by the height; 1 is optimal.
    fn quality(&self) -> f64 {
        if self.solution.height() == 0 {
            return 1.0;
        }
        self.problem.lower_bound() as f64 / self.solution.height() as f64
    }

    fn render(&self) -> String {
        let remark = if self.solution.is_optimal() { ": optimal" } else { "" };
        format!(
            "{}\n{}\nlower bound {:>22}\nheight      {:>22}   lower bound / height {:.4}{remark}\nfound in {:.1} s, {} units of work\n",
            shown(self.path),
            counted(self.names.len(), "rectangle"),
            count(self.problem.lower_bound()),
            count(self.solution.height()),
            self.quality(),
            self.seconds,
            count(self.solution.work()),
        )
    }

    /// Returns the JSON output. Its keys are an interface: `symmalloc plan --help` lists them.
    fn object(&self, out: Option<&PathBuf>) -> Value {
        json!({
            "table": self.path.display().to_string(),
            "rectangles": self.names.len(),
            "lower_bound": self.problem.lower_bound(),
            "height": self.solution.height(),
            "quality": rounded(self.quality()),
            "is_optimal": self.solution.is_optimal(),
            "steps": self.solution.work(),
            "seconds": rounded(self.seconds),
            "plan": out.map(|path| path.display().to_string()),
        })
    }
}

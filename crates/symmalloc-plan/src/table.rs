//! Problems and solutions as CSV tables, in the formats of `google/minimalloc` and TelaMalloc. The header line determines the
//! order of the columns.
//!
//! | column | aliases | holds |
//! |---|---|---|
//! | `id` | `buffer`, `buffer_id` | a name |
//! | `lower` | `start`, `begin` | beginning of the lifetime |
//! | `upper` | | end of the lifetime, exclusive |
//! | `end` | | end of the lifetime, inclusive; instead of `upper` |
//! | `size` | | size in any unit |
//! | `offset` | | in a solution: the offset |
//!
//! A constraint that the search cannot keep (`alignment`, `gaps`, a given `offset`) is an error. Other columns are ignored.

use crate::problem::{Problem, ProblemError, Rectangle};
use crate::solution::Solution;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use thiserror::Error;

/// A table that cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The table is malformed, lacks a column, or contains an invalid number, or reading or writing failed.
    #[error("the table of rectangles cannot be read or written: {0}")]
    Csv(#[from] csv::Error),
    /// A value is not a number that its column accepts.
    #[error("line {line}: column `{column}` is {value:?}: {reason}; give a whole number of at most 64 bits")]
    Value {
        /// Line of the table, from 1.
        line: u64,
        /// Name of the column.
        column: String,
        /// The value.
        value: String,
        /// Why it is not accepted.
        reason: String,
    },
    /// A column is missing.
    #[error("the table has no column `{column}`; it has {}", columns.join(", "))]
    MissingColumn {
        /// Name of the column.
        column: String,
        /// Names of the columns that the table has.
        columns: Vec<String>,
    },
    /// A row has more or fewer values than the table has columns.
    #[error("line {line} has {found} values, but the table has {} columns: {}", columns.len(), columns.join(", "))]
    Length {
        /// Line of the table, from 1.
        line: u64,
        /// Number of values.
        found: u64,
        /// Names of the columns.
        columns: Vec<String>,
    },
    /// A rectangle has neither `upper` nor `end`, or both.
    #[error("rectangle {index} needs one end: give a column `upper` (exclusive) or `end` (inclusive)")]
    End {
        /// Index of the rectangle.
        index: usize,
    },
    /// The inclusive end of a rectangle is the maximum value, so the exclusive end cannot be represented.
    #[error("rectangle {index} ends at 2^64 - 1: the maximum of column `end` is 2^64 - 2")]
    TooLate {
        /// Index of the rectangle.
        index: usize,
    },
    /// Two rectangles have the same id, so a solution would be ambiguous.
    #[error("rectangles {first} and {index} have the id {id:?}: give each a different one")]
    Duplicate {
        /// Index of the first rectangle.
        first: usize,
        /// Index of the second rectangle.
        index: usize,
        /// The id.
        id: String,
    },
    /// The table has a header only.
    #[error("the table has no rectangles: add a row for each below the header")]
    Empty,
    /// A rectangle has a constraint that the search does not support.
    #[error("rectangle {index} has a value in column `{column}`, which is not supported: remove the column")]
    Unsupported {
        /// Index of the rectangle.
        index: usize,
        /// Name of the column.
        column: &'static str,
    },
    /// The rectangles are not a valid problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

#[derive(Deserialize)]
struct Row {
    #[serde(alias = "buffer", alias = "buffer_id")]
    id: String,
    #[serde(alias = "start", alias = "begin")]
    lower: u64,
    upper: Option<u64>,
    end: Option<u64>,
    size: u64,
    alignment: Option<String>,
    gaps: Option<String>,
    offset: Option<String>,
}

impl Row {
    /// Returns the exclusive end of the lifetime.
    fn upper(&self, index: usize) -> Result<u64, TableError> {
        match (self.upper, self.end) {
            (Some(upper), None) => Ok(upper),
            (None, Some(end)) => end.checked_add(1).ok_or(TableError::TooLate { index }),
            _ => Err(TableError::End { index }),
        }
    }

    /// Returns the name of a column with a constraint that the search cannot keep, if there is one.
    fn unsupported(&self) -> Option<&'static str> {
        let has = |value: &Option<String>, neutral: &str| {
            value.as_ref().is_some_and(|value| !value.is_empty() && value != neutral)
        };
        let columns = [("alignment", &self.alignment, "1"), ("gaps", &self.gaps, ""), ("offset", &self.offset, "")];
        columns.into_iter().find_map(|(column, value, neutral)| has(value, neutral).then_some(column))
    }
}

#[derive(Serialize)]
struct SolvedRow<I> {
    id: I,
    lower: u64,
    upper: u64,
    size: u64,
    offset: u64,
}

impl Problem {
    /// Reads a table. Returns the problem and the id of each rectangle.
    ///
    /// # Errors
    /// Returns [`TableError`] if the source is not a table of valid rectangles.
    pub fn read_csv(source: impl Read) -> Result<(Self, Vec<String>), TableError> {
        let (rectangles, names) = read(source)?;
        Ok((Problem::new(rectangles)?, names))
    }

    /// Reads the table of a step that repeats every `period`; see [`Problem::periodic`].
    ///
    /// # Errors
    /// Returns [`TableError`] if the source is not a table of rectangles that are valid for the period.
    pub fn read_periodic_csv(period: u64, source: impl Read) -> Result<(Self, Vec<String>), TableError> {
        let (rectangles, names) = read(source)?;
        Ok((Problem::periodic(period, rectangles)?, names))
    }
}

fn read(source: impl Read) -> Result<(Vec<Rectangle>, Vec<String>), TableError> {
    let (mut rectangles, mut names) = (Vec::new(), Vec::new());
    let mut indices = BTreeMap::new();
    let mut table = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(source);
    let columns: csv::StringRecord = table.headers()?.iter().map(str::to_lowercase).collect();
    for (index, record) in table.records().enumerate() {
        let record = record.map_err(|error| explained(error, &columns, None))?;
        let row: Row = record.deserialize(Some(&columns)).map_err(|error| explained(error, &columns, Some(&record)))?;
        if let Some(column) = row.unsupported() {
            return Err(TableError::Unsupported { index, column });
        }
        if let Some(first) = indices.insert(row.id.clone(), index) {
            return Err(TableError::Duplicate { first, index, id: row.id });
        }
        rectangles.push(Rectangle { lower: row.lower, upper: row.upper(index)?, size: row.size });
        names.push(row.id);
    }
    if rectangles.is_empty() { Err(TableError::Empty) } else { Ok((rectangles, names)) }
}

/// Adds the name of the column to a CSV error.
fn explained(error: csv::Error, columns: &csv::StringRecord, record: Option<&csv::StringRecord>) -> TableError {
    let names = || columns.iter().map(str::to_owned).collect::<Vec<String>>();
    match error.kind() {
        csv::ErrorKind::Deserialize { pos, err } => {
            let line = pos.as_ref().or(record.and_then(csv::StringRecord::position)).map_or(0, csv::Position::line);
            let reason = err.kind().to_string();
            let missing = reason.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'));
            let field = err.field().and_then(|field| usize::try_from(field).ok());
            match (missing, field.and_then(|field| columns.get(field).zip(record.and_then(|record| record.get(field)))))
            {
                (Some(column), _) => TableError::MissingColumn { column: column.to_owned(), columns: names() },
                (None, Some((column, value))) => {
                    TableError::Value { line, column: column.to_owned(), value: value.to_owned(), reason }
                }
                (None, None) => TableError::Csv(error),
            }
        }
        csv::ErrorKind::UnequalLengths { pos, len, .. } => {
            TableError::Length { line: pos.as_ref().map_or(0, csv::Position::line), found: *len, columns: names() }
        }
        _ => TableError::Csv(error),
    }
}

impl Solution {
    /// Writes the rectangles of a problem with their ids and offsets.
    ///
    /// # Errors
    /// Returns [`TableError`] if writing to the sink fails.
    pub fn write_csv(&self, problem: &Problem, names: &[String], sink: impl Write) -> Result<(), TableError> {
        let rows = problem.rectangles().iter().zip(names).zip(self.offsets());
        write_csv(rows.map(|((rectangle, id), offset)| (id, *rectangle, *offset)), sink)
    }
}

/// Writes rectangles with their ids and offsets.
///
/// # Errors
/// Returns [`TableError`] if writing to the sink fails.
pub fn write_csv<I: Serialize>(
    rows: impl IntoIterator<Item = (I, Rectangle, u64)>,
    sink: impl Write,
) -> Result<(), TableError> {
    let mut table = csv::Writer::from_writer(sink);
    for (id, Rectangle { lower, upper, size }, offset) in rows {
        table.serialize(SolvedRow { id, lower, upper, size, offset })?;
    }
    table.flush().map_err(csv::Error::from)?;
    Ok(())
}

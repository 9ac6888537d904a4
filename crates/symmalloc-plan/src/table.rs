//! Problems and solutions as CSV tables: the columns `id,lower,upper,size`, as `google/minimalloc` publishes problems, and
//! `offset` after them in a solution. The header line determines the order of the columns.

use crate::problem::{Problem, ProblemError, Rectangle};
use crate::solution::Solution;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use thiserror::Error;

/// A table that cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The table is malformed, lacks a column, or contains an invalid number, or reading or writing failed.
    #[error("the table of rectangles cannot be read or written: {0}")]
    Csv(#[from] csv::Error),
    /// The rectangles are not a valid problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

#[derive(Deserialize)]
struct Row {
    id: String,
    #[serde(alias = "start")]
    lower: u64,
    #[serde(alias = "end")]
    upper: u64,
    size: u64,
}

#[derive(Serialize)]
struct SolvedRow<'a> {
    id: &'a str,
    lower: u64,
    upper: u64,
    size: u64,
    offset: u64,
}

impl Problem {
    /// Reads a table. Returns the problem and the id of each rectangle.
    ///
    /// # Errors
    /// Returns [`TableError`] if it is not a table of valid rectangles.
    pub fn read_csv(source: impl Read) -> Result<(Self, Vec<String>), TableError> {
        let (rectangles, names) = read(source)?;
        Ok((Problem::new(rectangles)?, names))
    }

    /// Reads the table of a step that repeats every `period`; see [`Problem::periodic`].
    ///
    /// # Errors
    /// Returns [`TableError`] if it is not a table of rectangles valid for the period.
    pub fn read_periodic_csv(period: u64, source: impl Read) -> Result<(Self, Vec<String>), TableError> {
        let (rectangles, names) = read(source)?;
        Ok((Problem::periodic(period, rectangles)?, names))
    }
}

fn read(source: impl Read) -> Result<(Vec<Rectangle>, Vec<String>), csv::Error> {
    let (mut rectangles, mut names) = (Vec::new(), Vec::new());
    for row in csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(source).deserialize() {
        let Row { id, lower, upper, size } = row?;
        rectangles.push(Rectangle { lower, upper, size });
        names.push(id);
    }
    Ok((rectangles, names))
}

impl Solution {
    /// Writes the rectangles of a problem with their ids and offsets.
    ///
    /// # Errors
    /// Returns [`TableError`] if writing to the sink fails.
    pub fn write_csv(&self, problem: &Problem, names: &[String], sink: impl Write) -> Result<(), TableError> {
        let mut table = csv::Writer::from_writer(sink);
        for ((rectangle, id), offset) in problem.rectangles().iter().zip(names).zip(self.offsets()) {
            let Rectangle { lower, upper, size } = *rectangle;
            table.serialize(SolvedRow { id, lower, upper, size, offset: *offset })?;
        }
        table.flush().map_err(csv::Error::from)?;
        Ok(())
    }
}

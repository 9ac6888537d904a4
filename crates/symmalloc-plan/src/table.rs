//! Problems and solutions as tables: CSV with the columns `id,lower,upper,size`, as `google/minimalloc` publishes problems, and
//! `offset` behind them in a solution. The order of the columns is that of the first line.

use crate::problem::{Problem, ProblemError, Rectangle};
use crate::solution::Solution;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use thiserror::Error;

/// Why a table cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// It is torn, has no such columns, or a number is none.
    #[error("the table of rectangles cannot be read or written: {0}")]
    Csv(#[from] csv::Error),
    /// The rectangles are no problem.
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
    /// Reads a table. Returns the problem, and what each rectangle is called.
    ///
    /// # Errors
    /// When it is no table of rectangles; the line is named.
    pub fn read_csv(source: impl Read) -> Result<(Self, Vec<String>), TableError> {
        let (rectangles, names) = read(source)?;
        Ok((Problem::new(rectangles)?, names))
    }

    /// Reads the table of a step that is repeated after `period`: see [`Problem::periodic`].
    ///
    /// # Errors
    /// When it is no table of such rectangles; the line is named.
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
    /// Writes the rectangles of a problem with their offsets, each under its name.
    ///
    /// # Errors
    /// When the sink refuses.
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

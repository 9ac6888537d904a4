//! Tests with files: reads, writes, and reads back by the programs for which the files are intended.

mod export;
mod fixtures;
mod recorded_jobs;
mod reports;
mod trace_file;

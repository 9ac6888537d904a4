//! Files as users have them: read, written, and read again by the programs that they are for.

mod export;
mod fixtures;
mod recorded_jobs;
mod trace_file;

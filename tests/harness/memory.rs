//! A sink that keeps records in memory.

use std::sync::{Arc, Mutex};
use symmalloc_core::Record;
use symmalloc_core::config::Config;
use symmalloc_core::recording::{Sink, SinkError};

/// Records in memory, up to a number of them.
#[derive(Clone)]
pub struct Memory {
    records: Arc<Mutex<Vec<Record>>>,
    room: usize,
    is_finished: Arc<Mutex<bool>>,
}

impl Memory {
    /// With room for all.
    #[must_use]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Memory::with_room(usize::MAX)
    }

    /// With room for so many. What comes then is refused.
    #[must_use]
    pub fn with_room(room: usize) -> Self {
        Memory { records: Arc::default(), room, is_finished: Arc::default() }
    }

    /// Whether it was told the end.
    ///
    /// # Panics
    /// After a panic in another thread that told it something.
    pub fn is_finished(&self) -> bool {
        *self.is_finished.lock().unwrap()
    }

    /// What it was told so far.
    ///
    /// # Panics
    /// After a panic in another thread that told it something.
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap().clone()
    }
}

impl Sink for Memory {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        if self.room == 0 { Err("no room".into()) } else { Ok(()) }
    }

    fn record(&mut self, record: Record) -> Result<(), SinkError> {
        assert!(!*self.is_finished.lock().unwrap(), "a record after the end");
        let mut records = self.records.lock().unwrap();
        if records.len() == self.room {
            return Err("no room".into());
        }
        records.push(record);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SinkError> {
        *self.is_finished.lock().unwrap() = true;
        Ok(())
    }
}

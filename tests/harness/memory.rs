//! A sink that keeps records in memory.

use std::sync::{Arc, Mutex};
use symmalloc_core::Record;
use symmalloc_core::config::Config;
use symmalloc_core::recording::{Sink, SinkError};

/// Records in memory, with a limited capacity.
#[derive(Clone)]
pub struct Memory {
    records: Arc<Mutex<Vec<Record>>>,
    room: usize,
    is_finished: Arc<Mutex<bool>>,
}

impl Memory {
    /// Creates a sink of unlimited capacity.
    #[must_use]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Memory::with_room(usize::MAX)
    }

    /// Creates a sink for `room` records. It rejects further ones.
    #[must_use]
    pub fn with_room(room: usize) -> Self {
        Memory { records: Arc::default(), room, is_finished: Arc::default() }
    }

    /// Returns `true` if the recording was finished.
    ///
    /// # Panics
    /// Panics if another thread panicked while using the sink.
    pub fn is_finished(&self) -> bool {
        *self.is_finished.lock().unwrap()
    }

    /// Returns the records so far.
    ///
    /// # Panics
    /// Panics if another thread panicked while using the sink.
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap().clone()
    }
}

impl Sink for Memory {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        if self.room == 0 { Err("the sink is full".into()) } else { Ok(()) }
    }

    fn record(&mut self, record: Record) -> Result<(), SinkError> {
        assert!(!*self.is_finished.lock().unwrap(), "a record after the end");
        let mut records = self.records.lock().unwrap();
        if records.len() == self.room {
            return Err("the sink is full".into());
        }
        records.push(record);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SinkError> {
        *self.is_finished.lock().unwrap() = true;
        Ok(())
    }
}

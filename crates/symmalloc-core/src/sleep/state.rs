//! The sleep state of a pool, and the saved contents.

use crate::config::op::Contents;
use crate::types::backend::{Image, Part};

/// The sleep state of a pool.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The saved contents; `None` while the pool is awake.
    pub(crate) kept: Option<Kept>,
    /// `true` while a sleep or a wake is in progress.
    pub(crate) is_changing: bool,
}

impl State {
    /// Returns `true` if the pool's heaps serve requests.
    pub(crate) fn is_awake(&self) -> bool {
        self.kept.is_none() && !self.is_changing
    }
}

/// The contents of a sleeping pool.
#[derive(Debug)]
pub(crate) struct Kept {
    contents: Contents,
    /// The image that contains them; `None` if there was nothing to save.
    image: Option<Image>,
    /// The saved parts, in the order of streams, segments and offsets.
    saved: Vec<Part>,
}

impl Kept {
    /// Creates the record of these parts, which the image contains if there is one.
    pub(crate) fn new(contents: Contents, image: Option<Image>, saved: Vec<Part>) -> Self {
        Kept { contents, image, saved }
    }

    pub(crate) fn image(&self) -> Option<Image> {
        self.image
    }

    /// Returns the parts of `live` to restore, with their positions in the image, or all of `live` to zero them. Each
    /// is one of the saved parts or lies within one, because nothing is allocated while a pool sleeps.
    pub(crate) fn parts_to_fill(&self, live: Vec<Part>) -> Vec<Part> {
        let mut saved = self.saved.iter().peekable();
        let find = |Part { address, size_bytes, .. }: Part| {
            let holds = |part: &Part| part.address <= address && address.0 - part.address.0 < part.size_bytes;
            while saved.next_if(|part| !holds(part)).is_some() {}
            let part = saved.peek().expect("live memory was saved");
            Part { address, size_bytes, image_offset_bytes: part.image_offset_bytes + (address.0 - part.address.0) }
        };
        match self.contents {
            Contents::Keep => live.into_iter().map(find).collect(),
            Contents::Zero => live,
            Contents::Drop => Vec::new(),
        }
    }
}

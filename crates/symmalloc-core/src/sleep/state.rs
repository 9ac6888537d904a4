//! Whether a pool sleeps, and what is kept for it meanwhile.

use crate::config::op::Contents;
use crate::types::backend::{Image, Part};

/// Whether a pool sleeps.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// `None` while it is awake.
    pub(crate) kept: Option<Kept>,
    /// Whether a sleep or a wake is under way.
    pub(crate) is_changing: bool,
}

impl State {
    /// Whether its heaps serve requests.
    pub(crate) fn is_awake(&self) -> bool {
        self.kept.is_none() && !self.is_changing
    }
}

/// What is known of the contents of a pool that sleeps.
#[derive(Debug)]
pub(crate) struct Kept {
    contents: Contents,
    /// `None` when nothing was to be kept.
    image: Option<Image>,
    /// What was saved, in the order of pools, segments and offsets.
    saved: Vec<Part>,
}

impl Kept {
    /// These parts are in the image, if there is one.
    pub(crate) fn new(contents: Contents, image: Option<Image>, saved: Vec<Part>) -> Self {
        Kept { contents, image, saved }
    }

    pub(crate) fn image(&self) -> Option<Image> {
        self.image
    }

    /// Which parts of what is live are to be made what they were: where they lie in the image, or all, where they are to be zero.
    /// Each is, or is a part of, one that was saved: nothing is allocated while a pool sleeps.
    pub(crate) fn parts_to_fill(&self, live: Vec<Part>) -> Vec<Part> {
        let mut saved = self.saved.iter().peekable();
        let find = |Part { address, size_bytes, .. }: Part| {
            let holds = |part: &Part| part.address <= address && address.0 - part.address.0 < part.size_bytes;
            while saved.next_if(|part| !holds(part)).is_some() {}
            let part = saved.peek().expect("what is live was saved");
            Part { address, size_bytes, image_offset_bytes: part.image_offset_bytes + (address.0 - part.address.0) }
        };
        match self.contents {
            Contents::Keep => live.into_iter().map(find).collect(),
            Contents::Zero => live,
            Contents::Drop => Vec::new(),
        }
    }
}

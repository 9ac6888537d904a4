//! Whether a pool sleeps, and what is kept for it meanwhile.

use super::Phase;
use crate::config::op::Contents;
use crate::types::backend::Image;

/// What is known of the contents of a pool that sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) contents: Contents,
    /// `None` when nothing was to be kept.
    pub(crate) image: Option<Image>,
}

/// Whether a pool sleeps.
#[derive(Debug)]
pub(crate) enum State {
    Awake,
    Asleep(Kept),
    /// A guard knows more. The phase is the one that was.
    Changing(Phase),
}

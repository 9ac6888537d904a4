//! The registrations of a sleeping pool, kept so that wake restores them in the same order.

use crate::handles::WindowHandle;
use crate::registrar::segment_key::Generation;
use crate::registrar::sync_actions::{SyncAction, fold};
use crate::registrar::window::Entry;

/// The saved registrations of a sleeping pool on one communicator.
#[derive(Debug, Default)]
pub(crate) struct SavedRegistrations {
    /// Windows in registration order.
    pub(super) windows: Vec<SavedWindow>,
    pub(super) buffers: Vec<SavedBuffers>,
}

/// A window that was deregistered for sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedWindow {
    pub(super) action: SyncAction,
    /// Previous handle; `None` if it was a plain registration.
    pub(super) handle: Option<WindowHandle>,
}

/// The pieces of a segment, each with a registration local to this rank.
#[derive(Debug)]
pub(crate) struct SavedBuffers {
    pub(super) segment: Generation,
    /// Address and size in bytes of each piece.
    pub(super) pieces: Vec<(u64, u64)>,
    pub(super) entry: Option<Entry>,
}

/// Returns a digest of the windows and their order, for comparison across ranks.
pub(super) fn digest(windows: &[SavedWindow]) -> u64 {
    let words = windows.iter().flat_map(|window| window.action.step.words());
    words.fold(windows.len() as u64, fold)
}

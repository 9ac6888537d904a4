//! The registrations of a sleeping pool, kept so that wake restores them in the same order.

use crate::ffi::handles::WindowHandle;
use crate::sync::actions::SyncAction;
use crate::sync::digest::fold;
use crate::windows::segment_key::Generation;
use crate::windows::window::Entry;

/// The saved registrations of a sleeping pool on one communicator.
#[derive(Debug, Default)]
pub(crate) struct SavedRegistrations {
    /// Windows in registration order.
    pub(crate) windows: Vec<SavedWindow>,
    pub(crate) buffers: Vec<SavedBuffers>,
}

/// A window that was deregistered for sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedWindow {
    pub(crate) action: SyncAction,
    /// Previous handle; `None` if it was a plain registration.
    pub(crate) handle: Option<WindowHandle>,
}

/// The pieces of a segment, each with a registration local to this rank.
#[derive(Debug)]
pub(crate) struct SavedBuffers {
    pub(crate) segment: Generation,
    /// Address and size in bytes of each piece.
    pub(crate) pieces: Vec<(u64, u64)>,
    pub(crate) entry: Option<Entry>,
}

/// Returns a digest of the windows and their order, for comparison across ranks.
pub(crate) fn digest(windows: &[SavedWindow]) -> u64 {
    let words = windows.iter().flat_map(|window| window.action.change.words());
    words.fold(windows.len() as u64, fold)
}

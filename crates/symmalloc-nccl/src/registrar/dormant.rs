//! What is registered of a pool while it is awake, kept while it sleeps: to be registered again in the same order.

use crate::handles::WindowHandle;
use crate::registrar::plan::{Step, fold};
use crate::registrar::segment_key::Generation;
use crate::registrar::window::Entry;

/// A pool that sleeps, on one communicator.
#[derive(Debug, Default)]
pub(crate) struct Dormant {
    /// In the order in which they were made.
    pub(super) windows: Vec<DormantWindow>,
    pub(super) buffers: Vec<DormantBuffers>,
}

/// A window that was taken away.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DormantWindow {
    pub(super) step: Step,
    /// What it was; `None` where it was a plain registration.
    pub(super) handle: Option<WindowHandle>,
}

/// The pieces of a segment, each of which had a registration of this rank's own.
#[derive(Debug)]
pub(crate) struct DormantBuffers {
    pub(super) segment: Generation,
    /// Address and size of each.
    pub(super) pieces: Vec<(u64, u64)>,
    pub(super) entry: Option<Entry>,
}

/// Equal on two ranks exactly when they have these windows in this order.
pub(super) fn digest(windows: &[DormantWindow]) -> u64 {
    let words = windows.iter().flat_map(|window| window.step.told.words());
    words.fold(windows.len() as u64, fold)
}

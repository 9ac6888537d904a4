//! A pause of one call, so that a test can run other calls meanwhile.
//!
//! ```text
//!  test       stub_pause ─────── stub_is_paused = 1 ── other calls ── stub_resume
//!  thread           call: effect ─── waits ─────────────────────────────── returns
//! ```

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time after which a call continues, so that no test hangs.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct Pause {
    /// Name of the call, and number of calls until it pauses.
    planned: Option<(String, u64)>,
    is_paused: bool,
}

static PAUSE: Mutex<Option<Pause>> = Mutex::new(None);
static RESUMED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<Pause>> {
    PAUSE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits after a call took effect, if a test paused it.
pub fn wait_after(name: &str) {
    let mut pause = lock();
    let Some(state) = pause.as_mut() else { return };
    match &mut state.planned {
        Some((planned, left)) if planned == name => {
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        _ => return,
    }
    (state.planned, state.is_paused) = (None, true);
    let is_paused = |pause: &mut Option<Pause>| pause.as_ref().is_some_and(|state| state.is_paused);
    let _waited = RESUMED.wait_timeout_while(pause, LIMIT, is_paused);
}

/// Pauses the `nth` call of `name` from now on, after its effect, until [`stub_resume`].
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_pause(name: *const c_char, nth: u64) {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    *lock() = Some(Pause { planned: Some((name, nth)), is_paused: false });
}

/// Returns 1 while a call is paused.
#[unsafe(no_mangle)]
pub extern "C" fn stub_is_paused() -> c_int {
    c_int::from(lock().as_ref().is_some_and(|state| state.is_paused))
}

/// Lets the paused call return, and cancels a planned pause.
#[unsafe(no_mangle)]
pub extern "C" fn stub_resume() {
    *lock() = None;
    RESUMED.notify_all();
}

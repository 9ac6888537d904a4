//! A thread that captures while others do something else.

use crate::cuda::control;
use crate::threads::WAIT_MAX;
use std::ffi::c_int;
use std::sync::mpsc::channel;
use std::thread;

/// How a capture ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Captured {
    /// With a graph.
    Graph,
    /// Something was done meanwhile that the driver forbids.
    Spoilt,
}

/// Runs `body` while another thread captures a stream of this device that nobody else knows, in the global mode.
pub fn while_captured<R>(device: c_int, body: impl FnOnce() -> R) -> (R, Captured) {
    let (begun, has_begun) = channel();
    let (end, is_over) = channel::<()>();
    thread::scope(|scope| {
        let capture = scope.spawn(move || {
            let stream = Stream::begin(device);
            begun.send(()).expect("somebody waits");
            // Also when the body panics: then nobody can send any more.
            let _over = is_over.recv_timeout(WAIT_MAX);
            stream.end()
        });
        has_begun.recv_timeout(WAIT_MAX).expect("it captures");
        let answer = body();
        drop(end);
        (answer, capture.join().expect("no panic"))
    })
}

/// A stream that is captured.
struct Stream {
    device: c_int,
    handle: u64,
}

impl Stream {
    fn begin(device: c_int) -> Self {
        let (mut context, mut handle) = (0, 0);
        // SAFETY: the symbols' types, and places for the answers.
        let codes = unsafe {
            [
                control::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>("cuDevicePrimaryCtxRetain")(
                    &raw mut context,
                    device,
                ),
                control::<unsafe extern "C" fn(usize) -> c_int>("cuCtxSetCurrent")(context),
                control::<unsafe extern "C" fn(*mut u64, u32) -> c_int>("cuStreamCreate")(&raw mut handle, 1),
                control::<unsafe extern "C" fn(u64, c_int) -> c_int>("cuStreamBeginCapture_v2")(handle, 0),
            ]
        };
        assert_eq!(codes, [0; 4]);
        Stream { device, handle }
    }

    fn end(self) -> Captured {
        let mut graph = 0_u64;
        // SAFETY: the symbol's type, and a place for the answer.
        let code = unsafe {
            control::<unsafe extern "C" fn(u64, *mut u64) -> c_int>("cuStreamEndCapture")(self.handle, &raw mut graph)
        };
        // SAFETY: the symbols' types, and what was made above.
        unsafe {
            if graph != 0 {
                control::<unsafe extern "C" fn(u64) -> c_int>("cuGraphDestroy")(graph);
            }
            control::<unsafe extern "C" fn(u64) -> c_int>("cuStreamDestroy_v2")(self.handle);
            control::<unsafe extern "C" fn(c_int) -> c_int>("cuDevicePrimaryCtxRelease_v2")(self.device);
        }
        match code {
            0 => Captured::Graph,
            901 => Captured::Spoilt,
            code => panic!("cuStreamEndCapture failed with {code}"),
        }
    }
}

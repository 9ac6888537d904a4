//! Stream captures on one thread while other threads run.

use crate::cuda::control;
use crate::threads::WAIT_MAX;
use std::ffi::c_int;
use std::sync::mpsc::channel;
use std::thread;

/// The outcome of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Captured {
    /// The capture succeeded with a graph.
    Graph,
    /// A forbidden call during the capture invalidated it.
    Spoiled,
}

/// Runs `body` while another thread captures a private stream of this device in global mode.
pub fn while_captured<R>(device: c_int, body: impl FnOnce() -> R) -> (R, Captured) {
    let (begun, has_begun) = channel();
    let (end, is_over) = channel::<()>();
    thread::scope(|scope| {
        let capture = scope.spawn(move || {
            let stream = Stream::begin(device);
            begun.send(()).expect("the receiver waits");
            // If the body panics, the sender is dropped, which ends this wait as well.
            let _over = is_over.recv_timeout(WAIT_MAX);
            stream.end()
        });
        has_begun.recv_timeout(WAIT_MAX).expect("the capture should begin");
        let answer = body();
        drop(end);
        (answer, capture.join().expect("the thread should not panic"))
    })
}

/// A stream that is being captured.
struct Stream {
    device: c_int,
    handle: u64,
}

impl Stream {
    fn begin(device: c_int) -> Self {
        let (mut context, mut handle) = (0, 0);
        // SAFETY: the symbols have these types, and the pointers are valid for writing.
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
        // SAFETY: the symbol has this type, and the pointer is valid for writing.
        let code = unsafe {
            control::<unsafe extern "C" fn(u64, *mut u64) -> c_int>("cuStreamEndCapture")(self.handle, &raw mut graph)
        };
        // SAFETY: the symbols have these types, and the objects were created above.
        unsafe {
            if graph != 0 {
                control::<unsafe extern "C" fn(u64) -> c_int>("cuGraphDestroy")(graph);
            }
            control::<unsafe extern "C" fn(u64) -> c_int>("cuStreamDestroy_v2")(self.handle);
            control::<unsafe extern "C" fn(c_int) -> c_int>("cuDevicePrimaryCtxRelease_v2")(self.device);
        }
        match code {
            0 => Captured::Graph,
            901 => Captured::Spoiled,
            code => panic!("cuStreamEndCapture failed with {code}"),
        }
    }
}

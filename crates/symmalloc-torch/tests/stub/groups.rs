//! Groups of streams, selected by the thread that uses a stream first or by the program.

use crate::library::*;
use std::ffi::c_void;
use std::thread;
use symmalloc_torch::*;

/// Allocates and frees on a stream, in a thread with this name. Returns the address.
fn used(name: &str, streams: &Streams, index: usize) -> Pointer {
    let stream = streams.get(index) as usize;
    let body = move || {
        let tensor = torch::allocate(3 * MIB, stream as *mut c_void);
        torch::free(tensor);
        tensor
    };
    thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread").join().expect("no panic")
}

fn register(allocator: Allocator, stream: *mut c_void, member: Option<*mut c_void>) -> symmalloc_status {
    match member {
        // SAFETY: a live allocator and stream.
        None => unsafe { symmalloc_register_stream(allocator.0, stream) },
        // SAFETY: a live allocator, and live streams.
        Some(member) => unsafe { symmalloc_register_stream_in(allocator.0, stream, member) },
    }
}

stub_test!(streams_first_used_by_autograds_threads_share_memory, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(6));
    let of_autograd = used("pt_autograd_0", &streams, 0);
    let of_loader = used("loader", &streams, 1);
    assert_ne!(of_loader, of_autograd);
    assert_eq!(used("pt_autograd_1", &streams, 2), of_autograd);
    assert_eq!(used("loader", &streams, 2), of_autograd, "a stream stays in its group");
    assert_ne!(used("loader", &streams, 3), of_loader, "each stream of another thread is a group");
    done(register(allocator, streams.get(4), Some(streams.get(1))));
    assert_eq!(used("pt_autograd_0", &streams, 4), of_loader, "the program named its group");
    done(register(allocator, streams.get(5), None));
    assert!(![of_autograd, of_loader].contains(&used("pt_autograd_0", &streams, 5)), "the program gave it its own");
    done(register(allocator, streams.get(4), Some(streams.get(1))));
    assert_eq!(register(allocator, streams.get(1), Some(streams.get(0))), SYMMALLOC_INVALID_ARGUMENT);
    assert!(message().contains("no other group"), "{}", message());
    assert_eq!(register(allocator, streams.get(2), None), SYMMALLOC_INVALID_ARGUMENT);
    for shared in [0, 1] {
        assert_eq!(
            register(allocator, streams.get(shared), None),
            SYMMALLOC_INVALID_ARGUMENT,
            "others are in its group"
        );
    }
    done(register(allocator, streams.get(3), None));
});

stub_test!(separate_streams_are_one_word, ["SYMMALLOC_CONF" = "streams:separate"], {
    let streams = Streams::new(2);
    assert_ne!(used("pt_autograd_0", &streams, 0), used("pt_autograd_0", &streams, 1));
});

stub_test!(other_allocators_and_pools_have_no_groups_of_their_own, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(2));
    used("pt_autograd_0", &streams, 0);
    used("pt_autograd_0", &streams, 1);
    let (inherits, asks) = (allocator.create_pool(None), allocator.create_pool(Some("streams:grouped")));
    let addresses = |allocator: Allocator, pool| {
        [0, 1].map(|index| {
            let pointer = allocator.allocate(pool, 3 * MIB, streams.get(index));
            allocator.free(pointer);
            pointer
        })
    };
    let [one, other] = addresses(allocator, inherits);
    assert_ne!(one, other);
    let [one, other] = addresses(allocator, asks);
    assert_eq!(one, other);
    let own = Allocator::new("streams:grouped");
    let [one, other] = addresses(own, 0);
    assert_ne!(one, other, "each stream is a group by default");
    own.destroy();
});

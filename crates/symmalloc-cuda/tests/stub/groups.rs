//! Groups of streams: in a pool with `streams:grouped`, the streams of a group reuse memory of each other.

use crate::process::{device, stub_test};
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::errors::StreamError;
use symmalloc_core::{PoolId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaError};

stub_test!(streams_of_a_group_reuse_memory_of_each_other_and_no_others, {
    let device = device();
    let pool = PoolConfig::builder().streams(StreamPolicy::Grouped).build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    let allocator = CudaAllocator::new(&device, config).expect("made");
    let [first, other, member] = [(); 3].map(|()| device.context().new_stream().expect("a stream"));
    let [first, other] = [first, other].map(|stream| allocator.register_stream(&stream).expect("registered"));
    let error = allocator.register_stream_in(&member, StreamId(7)).expect_err("no group has this name");
    assert!(matches!(error, CudaError::Stream(StreamError::UnknownGroup { group: StreamId(7) })), "{error}");
    assert_eq!(allocator.stream_id(&member), None, "nothing changed");
    let id = allocator.register_stream_in(&member, first).expect("registered");
    assert_eq!(allocator.register_stream_in(&member, other).expect("known"), id);
    assert_eq!(allocator.core().group_of(id), Ok(first), "it stays in its group");

    let core = allocator.core();
    let freed = core.allocate(PoolId::DEFAULT, first, 4 << 20).expect("memory");
    core.free(freed.handle).expect("live");
    let [elsewhere, reused] =
        [other, id].map(|stream| core.allocate(PoolId::DEFAULT, stream, 4 << 20).expect("memory"));
    assert_eq!(reused.address, freed.address);
    assert_ne!(elsewhere.address, freed.address);
    core.check().expect("consistent");
});

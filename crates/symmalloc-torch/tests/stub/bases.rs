//! Pools with a base, through the C functions and PyTorch's.

use crate::library::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use symmalloc_torch::*;

const SLOT_0: Pointer = 0x1000_0000_0000;
const SLOT_1: Pointer = 0x1100_0000_0000;

fn try_pool(allocator: Allocator, conf: &str) -> symmalloc_status {
    let (conf, mut out) = (c_text(conf), 0);
    // SAFETY: a live allocator, a C string, and an output pointer.
    unsafe { symmalloc_pool_create(allocator.0, conf.as_ptr(), &raw mut out) }
}

/// Allocates at an address, as PyTorch's `allocateWithAddress` does.
fn allocate_with_address(address: Pointer, bytes: usize, stream: *mut c_void) -> Result<Pointer, symmalloc_status> {
    let mut out = null_mut();
    // SAFETY: a live stream, and an output pointer.
    let status =
        unsafe { symmalloc_torch_allocate_with_address(0, stream, bytes, address as *const c_void, &raw mut out) };
    if status == SYMMALLOC_OK { Ok(out as Pointer) } else { Err(status) }
}

stub_test!(tensors_have_the_same_addresses_in_every_process, ["SYMMALLOC_CONF" = "base:slot:0"], {
    let streams = Streams::new(2);
    let (a, b) = (streams.get(0), streams.get(1));
    let first = torch::allocate(5 * MIB, a);
    let second = torch::allocate(MIB, b);
    assert_eq!([first, second], [SLOT_0, SLOT_0 + (64 << 30)]);
    let allocator = Allocator::of_torch();
    // Pools that inherit the default pool's settings have no base: it belongs to the default pool.
    let private = allocator.create_pool(None);
    assert!(!(SLOT_0..SLOT_1).contains(&allocator.allocate(private, MIB, a)));
    let own = allocator.create_pool(Some("base:slot:1,segments:fixed"));
    assert_eq!(allocator.allocate(own, MIB, a), SLOT_1);
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 0);
});

stub_test!(each_wrong_base_has_its_status, {
    let allocator = Allocator::new("base:slot:3");
    for (conf, status, words) in [
        ("base:0x1000", SYMMALLOC_INVALID_SETTINGS, "must be a multiple of 0x40000000"),
        ("base:0x200000200000", SYMMALLOC_INVALID_SETTINGS, "must be a multiple of 0x40000000"),
        ("base:slot:64", SYMMALLOC_INVALID_SETTINGS, "use slot:0 to slot:63"),
        ("base:0x7fffc0000000", SYMMALLOC_INVALID_SETTINGS, "is too high"),
        ("base:slot", SYMMALLOC_INVALID_SETTINGS, "a base must be slot:N"),
        ("base:slot:3", SYMMALLOC_INVALID_STATE, "p0 of device 0 in this process has base:slot:3; use base:slot:0"),
    ] {
        assert_eq!(try_pool(allocator, conf), status, "{conf}: {}", message());
        assert!(message().contains(words), "{conf}: {}", message());
    }
    assert_eq!(live().ranges, 1);
    let mut out = null_mut();
    // SAFETY: a C string, and an output pointer.
    let status = unsafe { symmalloc_create(0, c"base:slot:3".as_ptr(), &raw mut out) };
    assert_eq!((status, out), (SYMMALLOC_INVALID_STATE, null_mut()), "{}", message());
    allocator.destroy();
    assert_eq!(live().ranges, 0);
    Allocator::new("base:slot:3").destroy();
});

stub_test!(a_tensor_can_be_allocated_at_an_address_of_a_base, ["SYMMALLOC_CONF" = "base:slot:0,stitching:false"], {
    let streams = Streams::new(2);
    let (a, b) = (streams.get(0), streams.get(1));
    // The heap grows to an address that has no memory yet, and memory before it stays free.
    let later = SLOT_0 + 40 * MIB;
    assert_eq!(allocate_with_address(later, 3 * MIB, a), Ok(later));
    assert_eq!(torch::allocate(MIB, a), later + 3 * MIB, "the smallest free block");
    assert_eq!(torch::allocate(8 * MIB, a), SLOT_0);
    // A freed tensor's address can be named again, and that of a live one cannot.
    assert_eq!(allocate_with_address(later, MIB, a), Err(SYMMALLOC_INVALID_STATE));
    assert!(message().contains("is live"), "{}", message());
    torch::free(later);
    assert_eq!(allocate_with_address(later + 512, MIB, a), Ok(later + 512));
    torch::free(later + 512);
    // The range belongs to the first stream, and other addresses to no pool with a base.
    assert_eq!(allocate_with_address(later, MIB, b), Err(SYMMALLOC_INVALID_STATE), "{}", message());
    for address in [0, SLOT_1, 4096] {
        assert_eq!(allocate_with_address(address, MIB, a), Err(SYMMALLOC_UNKNOWN_POOL));
        assert!(message().contains("belongs to no pool with a base"), "{}", message());
    }
    assert_eq!(allocate_with_address(SLOT_0 + 1, MIB, a), Err(SYMMALLOC_INVALID_STATE), "not a multiple of 512");
    assert_eq!(allocate_with_address(later, 0, a), Ok(0));
});

stub_test!(
    a_request_at_an_address_that_cannot_be_served_keeps_nothing,
    ["SYMMALLOC_CONF" = "base:slot:0,range_mb:1024,growth_mb:2,stitching_granule_mb:2,stitching_least_mb:4"],
    {
        let streams = Streams::new(2);
        let (a, b) = (streams.get(0), streams.get(1));
        for bytes in [usize::MAX, usize::MAX - 511, usize::MAX - SLOT_0, 1 << 40, 2 << 30] {
            assert_eq!(allocate_with_address(SLOT_0 + 512, bytes, a), Err(SYMMALLOC_INVALID_STATE), "{bytes:#x}");
        }
        assert_eq!(live().device_bytes, 0, "nothing is reserved");
        // Memory on the way is in use, and the address is no multiple of 512.
        let parts: [Pointer; 6] = [0; 6].map(|_| torch::allocate(2 * MIB, a));
        let before = live().device_bytes;
        for address in [parts[5], parts[5] + MIB, parts[5] + 2 * MIB + 1] {
            assert_eq!(allocate_with_address(address, 8 * MIB, a), Err(SYMMALLOC_INVALID_STATE), "{}", message());
        }
        // The range ends before the request does, and the range of the other stream lies behind it.
        let first_of_b = torch::allocate(2 * MIB, b);
        assert_eq!(first_of_b, SLOT_0 + (1 << 30));
        let with_b = live().device_bytes;
        assert!(with_b > before);
        assert_eq!(allocate_with_address(SLOT_0 + 1023 * MIB, 2 * MIB, a), Err(SYMMALLOC_INVALID_STATE));
        // A stitched range does not grow.
        for part in [parts[0], parts[2]] {
            torch::free(part);
        }
        let stitched = torch::allocate(4 * MIB, a);
        assert_eq!(stitched, SLOT_0 + (2 << 30));
        assert_eq!(allocate_with_address(stitched + 4 * MIB, 2 * MIB, a), Err(SYMMALLOC_INVALID_STATE));
        assert_eq!(live().device_bytes, with_b);
    }
);

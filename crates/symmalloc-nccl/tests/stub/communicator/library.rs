//! Tests of the search for libnccl, and of an old or incomplete library.

use super::ranks;
use stub_process::{Library, nccl, nccl_test};
use symmalloc_nccl::{Capability, CommError, LoadError, Nccl, NcclVersion, ReduceOp, UniqueId};

nccl_test!(a_library_under_its_other_name_is_found, Library::Named("libnccl.so"), [], {
    let nccl = Nccl::load().expect("libnccl.so");
    assert_eq!(nccl.version(), NcclVersion::new(2, 28, 9));
    assert!(nccl.path().ends_with("libnccl.so"), "{}", nccl.path().display());
});

nccl_test!(a_missing_library_is_an_error_that_lists_the_attempts, Library::Missing, [], {
    let Err(LoadError::LibraryMissing { tried }) = Nccl::load().map(|_| ()) else { panic!("a library was found") };
    assert!(tried[0].contains("libnccl.so.2") && tried[1].contains("libnccl.so"), "{tried:?}");
    let refused = UniqueId::new().map(|_| ());
    assert!(matches!(refused, Err(CommError::Load(LoadError::LibraryMissing { .. }))));
});

nccl_test!(a_library_that_is_loaded_already_is_shared, {
    // SAFETY: opens the stub, whose initializers are harmless.
    let loaded = unsafe { libloading::Library::new("libnccl.so.2") }.expect("on the path");
    // SAFETY: the symbol has this type.
    let version = unsafe { loaded.get::<unsafe extern "C" fn(*mut i32) -> i32>("ncclGetVersion") }.expect("a symbol");
    let mut code = 0;
    // SAFETY: the pointer is valid for writing.
    assert_eq!(unsafe { version(&raw mut code) }, 0);
    let before = nccl::calls("ncclGetVersion");
    Nccl::load().expect("libnccl is loaded");
    assert_eq!(nccl::calls("ncclGetVersion"), before + 1, "both calls reach the same library");
});

nccl_test!(a_library_without_a_needed_call_is_refused, Library::StubWithout("ncclCommSplit"), [], {
    let Err(LoadError::SymbolMissing { symbol, .. }) = Nccl::load().map(|_| ()) else { panic!("loaded") };
    assert_eq!(symbol, "ncclCommSplit");
});

nccl_test!(an_old_library_is_refused_by_version, ["STUB_NCCL_VERSION" = "21701"], {
    let Err(LoadError::TooOld { version, .. }) = Nccl::load().map(|_| ()) else { panic!("loaded") };
    assert_eq!(version, NcclVersion::new(2, 17, 1));
});

nccl_test!(
    an_older_library_supports_all_functions_that_it_has,
    Library::StubWithoutAll(&["ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclCommRevoke"]),
    ["STUB_NCCL_VERSION" = "22106"],
    {
        let loaded = Nccl::load().expect("old enough");
        assert!(loaded.supports(Capability::BufferRegistration));
        assert!(!loaded.supports(Capability::Windows) && !loaded.supports(Capability::Revoke));
        ranks(2, |rank| {
            let version = NcclVersion::new(2, 21, 6);
            let expected = CommError::Unsupported { capability: Capability::Windows, version };
            assert_eq!(
                expected.to_string(),
                "NCCL 2.27.3 is required for symmetric windows, but the library is 2.21.6: install a newer one, or set \
                 SYMMALLOC_NCCL_LIBRARY to one"
            );
            assert_eq!(rank.comm.register_window(4096, 4096).map(|_| ()), Err(expected));
            let (_allocation, base) = rank.segment();
            let buffer = rank.comm.register_buffer(base, 4096).expect("buffers can be in any memory");
            rank.comm.deregister_buffer(buffer).expect("the buffer is registered");
            let mut sum = rank.buffer(&[1.0]);
            rank.comm.all_reduce_in_place(&mut sum, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
            assert_eq!(rank.read(&sum), [2.0]);
        });
        nccl::assert_clean();
    }
);

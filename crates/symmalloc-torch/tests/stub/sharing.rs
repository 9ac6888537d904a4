//! Sharing of tensors: a process opens them by a text, from owners that respond, are slow, or have exited.

use crate::class_calls::{allocate, free};
use crate::library::*;
use std::ffi::{c_char, c_void};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::Barrier;
use symmalloc_torch::*;

/// A timeout that is longer than all later steps.
const PATIENT: Duration = Duration::from_secs(60);

pub(crate) fn shared(pointer: Pointer) -> Result<(String, u64), symmalloc_status> {
    let (mut text, mut offset) = (null_mut::<c_char>(), 0);
    // SAFETY: output pointers.
    match unsafe { symmalloc_torch_share(pointer as *mut c_void, &raw mut text, &raw mut offset) } {
        SYMMALLOC_OK => Ok((taken(text), offset)),
        status => Err(status),
    }
}

pub(crate) fn opened(text: &str) -> Result<(Pointer, *const OpenedMemory), symmalloc_status> {
    let (text, mut base, mut opened) = (c_text(text), null_mut(), null());
    // SAFETY: a C string, and output pointers.
    match unsafe { symmalloc_torch_open(0, text.as_ptr(), &raw mut base, &raw mut opened) } {
        SYMMALLOC_OK => Ok((base as Pointer, opened)),
        status => Err(status),
    }
}

stub_test!(a_stitched_tensor_is_shared_with_all_its_granules, {
    let size = 128 * MIB;
    let blocks: Vec<_> = (0..4).map(|_| allocate(size, null_mut(), 0)).collect();
    free(blocks[0]);
    free(blocks[2]);
    let stitched = allocate(2 * size, null_mut(), 0);
    assert_eq!(live().device_bytes, 4 * (size as u64), "the tensor has the memory of two blocks");
    let (text, offset) = shared(stitched).expect("shared");
    let (base, handle) = opened(&text).expect("opened");
    for (at, granule) in (0..2 * size).step_by(16 * MIB).zip(1_u64..) {
        // SAFETY: memory of the stub, which the host can write, within the allocated and opened range.
        unsafe { ((stitched + at) as *mut u64).write(granule) };
        // SAFETY: as above.
        assert_eq!(unsafe { ((base + offset as usize + at) as *const u64).read() }, granule);
    }
    // SAFETY: opened above, and not used after this.
    unsafe { symmalloc_torch_close(handle) };
});

stub_test!(shared_memory_is_opened_by_its_text_and_ends_with_its_owner, {
    let small = allocate(512, null_mut(), 0);
    let large = allocate(50 * MIB, null_mut(), 0);
    let (text, offset) = shared(large).expect("shared");
    let (again, _) = shared(large).expect("shared");
    assert_eq!(text, again, "the text for the same memory is equal");
    let (base, handle) = opened(&text).expect("opened");
    let (same, second) = opened(&text).expect("opened");
    assert_eq!((base, handle), (same, second));
    // The allocation spans three adjacent chunks. The same memory is mapped at other addresses.
    let last = 50 * MIB - 8;
    // SAFETY: memory of the stub, which the host can write, within the allocated and opened range.
    unsafe { ((large + last) as *mut u64).write(0x5eed) };
    // SAFETY: as above.
    assert_eq!(unsafe { ((base + offset as usize + last) as *const u64).read() }, 0x5eed);
    assert_ne!(base + offset as usize, large);
    for handle in [handle, second] {
        // SAFETY: opened above, and not used after this.
        unsafe { symmalloc_torch_close(handle) };
    }
    free(large);
    done(symmalloc_torch_trim(0, 0));
    assert_eq!(opened(&text).expect_err("the owner has freed the memory"), SYMMALLOC_INVALID_STATE);
    assert!(message().contains("keep the tensor in the process that sent it"), "{}", message());
    let too_large = format!("symmalloc 1 x 1:{} 2:{}", u64::MAX, 2 * MIB + 1);
    for wrong in ["", "symmalloc 2 x", "symmalloc 1 x", "symmalloc 1 x 1:y", &too_large, "cuda"] {
        assert_eq!(opened(wrong).expect_err("the text is invalid"), SYMMALLOC_INVALID_ARGUMENT, "{wrong}");
    }
    assert_eq!(opened("symmalloc 1 nobody 1:2097152").expect_err("no process listens"), SYMMALLOC_IO);
    assert_eq!(shared(large).expect_err("it was freed"), SYMMALLOC_UNKNOWN_POINTER);
    free(small);
});

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a list").count() - 1
}

stub_test!(sharing_many_chunks_needs_few_descriptors_and_leaks_none, {
    let large = allocate(900 * MIB, null_mut(), 0);
    let (text, _) = shared(large).expect("shared");
    assert!(text.split(' ').count() > 3 + 25, "{text}");
    let begun = Instant::now();
    // A server thread may be about to close its connection.
    let settle = |most: usize| {
        while descriptors() > most && begun.elapsed() < PATIENT {
            thread::yield_now();
        }
    };
    let mut before = (usize::MAX, live());
    for round in 0..1000 {
        if round == 1 {
            before = (descriptors(), live());
            let most = libc::rlimit { rlim_cur: before.0 as u64 + 12, rlim_max: before.0 as u64 + 12 };
            // SAFETY: a valid limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) }, 0);
        }
        let (_, handle) = opened(&text).unwrap_or_else(|_| panic!("{round}: {}", message()));
        // SAFETY: opened above, and not used after this.
        unsafe { symmalloc_torch_close(handle) };
        settle(before.0);
    }
    assert!(descriptors() <= before.0, "{} and {} before", descriptors(), before.0);
    assert_eq!(live(), before.1);
});

stub_test!(memory_without_descriptors_is_not_shared, ["STUB_NO_VMM" = "1", "SYMMALLOC_CONF" = "segments:fixed"], {
    let tensor = allocate(512, null_mut(), 0);
    assert_eq!(shared(tensor).expect_err("no descriptors"), SYMMALLOC_INVALID_STATE);
    assert!(message().contains("file descriptors"), "{}", message());
});

/// Returns the address of an abstract socket.
fn socket(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).expect("a name that fits")
}

/// Opens shared memory. Returns the address and a handle that can be sent between threads.
fn base_of(text: &str) -> Result<(Pointer, usize), symmalloc_status> {
    opened(text).map(|(base, handle)| (base, handle as usize))
}

fn close(handle: usize) {
    // SAFETY: opened by `base_of`, and not used after this.
    unsafe { symmalloc_torch_close(handle as *const OpenedMemory) };
}

stub_test!(a_silent_owner_does_not_delay_opening_memory_of_others, {
    let (text, _) = shared(allocate(MIB, null_mut(), 0)).expect("shared");
    let silent = format!("symmalloc-silent-{}", std::process::id());
    let listener = UnixListener::bind_addr(&socket(&silent)).expect("a name of our own");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| base_of(&format!("symmalloc 1 {silent} 1:2097152")));
        let (connection, _) = listener.accept().expect("it asks");
        let begun = Instant::now();
        let (_, handle) = base_of(&text).expect("its owner answers");
        close(handle);
        assert!(
            begun.elapsed() < Duration::from_secs(15),
            "took longer than half of the timeout: {:?}",
            begun.elapsed()
        );
        assert!(!waiting.is_finished());
        drop(connection);
        assert_eq!(waiting.join().expect("no panic").expect_err("the owner closed the connection"), SYMMALLOC_IO);
    });
});

/// Returns the number of server threads of this process.
fn answering() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("a list");
    let name = |thread: std::io::Result<std::fs::DirEntry>| {
        // A thread that ended meanwhile has no name.
        std::fs::read_to_string(thread.expect("an entry").path().join("comm")).unwrap_or_default()
    };
    threads.map(name).filter(|name| name.trim_end() == "symmalloc-share").count()
}

stub_test!(a_few_threads_answer_and_other_requests_wait_in_the_queue, {
    let (text, _) = shared(allocate(MIB, null_mut(), 0)).expect("shared");
    let owner = socket(text.split(' ').nth(2).expect("a name"));
    let idle: Vec<UnixStream> = (0..50).map(|_| UnixStream::connect_addr(&owner).expect("in the queue")).collect();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| base_of(&text));
        thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished(), "all threads are busy with idle clients");
        // A thread gets its name shortly after its start.
        let begun = Instant::now();
        while answering() < 8 && begun.elapsed() < PATIENT {
            thread::yield_now();
        }
        assert_eq!(answering(), 8);
        drop(idle);
        let begun = Instant::now();
        let (_, handle) = waiting.join().expect("no panic").expect("its turn came");
        assert!(
            begun.elapsed() < Duration::from_secs(15),
            "the request waited for closed connections: {:?}",
            begun.elapsed()
        );
        close(handle);
    });
});

stub_test!(threads_that_open_the_same_memory_concurrently_share_it, ["STUB_MAPPING_MICROSECONDS" = "2000"], {
    let (text, _) = shared(allocate(MIB, null_mut(), 0)).expect("shared");
    let before = live();
    let reserved = calls("cuMemAddressReserve");
    let (rounds, threads) = (20, 4);
    for _ in 0..rounds {
        let barrier = Barrier::new(threads);
        let open = || {
            barrier.wait();
            base_of(&text).expect("opened")
        };
        let all: Vec<_> = thread::scope(|scope| {
            let started: Vec<_> = (0..threads).map(|_| scope.spawn(open)).collect();
            started.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        all.iter().for_each(|(_, handle)| close(*handle));
        assert_eq!(live(), before, "redundant copies were unmapped");
    }
    assert!(calls("cuMemAddressReserve") - reserved > rounds, "no two threads opened the memory at the same time");
});

/// Set in a process that listens at the socket with this name, as another user's process would.
const LISTENS: &str = "SYMMALLOC_TEST_LISTENS";
const NOBODY: u32 = 65534;

/// Accepts one connection, and serves no descriptor.
fn listen_as_another_user(name: &str) {
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("nobody has the name");
    println!("listening");
    let (mut stream, _) = listener.accept().expect("a connection");
    let mut request = [0; 16];
    if stream.read_exact(&mut request).is_ok() {
        // The library sent a request before it checked the user.
        let _answered = stream.write_all(&[0]);
    }
}

stub_test!(memory_of_another_users_process_is_refused, {
    if let Ok(name) = std::env::var(LISTENS) {
        return listen_as_another_user(&name);
    }
    if std::fs::metadata("/proc/self").expect("it has an owner").uid() != 0 {
        println!("skipped: only root can start a process of another user");
        return;
    }
    let name = format!("symmalloc-{}-other", std::process::id());
    let test = std::env::args().nth(1).expect("the test's name");
    let executable = std::env::current_exe().expect("it has a path");
    let started = Command::new(executable)
        .args([&test, "--exact", "--nocapture", "--test-threads=1"])
        .env(LISTENS, &name)
        .uid(NOBODY)
        .stdout(Stdio::piped())
        .spawn();
    let mut server = match started {
        Ok(server) => server,
        Err(error) => {
            println!("skipped: user {NOBODY} cannot run the test's executable: {error}");
            return;
        }
    };
    let mut lines = BufReader::new(server.stdout.take().expect("piped")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("listening")), "the other process does not listen");
    let refused = opened(&format!("symmalloc 1 {name} 1:{}", 2 * MIB)).expect_err("another user's");
    let text = message();
    server.kill().expect("it runs, or ran");
    server.wait().expect("it ended");
    assert_eq!(refused, SYMMALLOC_INVALID_STATE, "{text}");
    assert!(text.contains("runs as user 65534") && text.contains("run both as the same user"), "{text}");
});

//! One suite for all stores, and what is particular to each.

use crate::deadline::Deadline;
use crate::endpoint::{Endpoint, Listener, read_until, write_until};
use crate::error::RendezvousError;
use crate::folder::FolderStore;
use crate::handshake::Terms;
use crate::own::{RemoteStore, ServedStore};
use crate::search::Identity;
use crate::store::{STORE_BYTES_MAX, Store, Values};
use crate::tests::as_another_user;
use crate::tests::torch_stand_in::StandIn;
use crate::torch_store::TorchStore;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::scaled_to_load;
use symmalloc_watchdog::Connection;

fn patient() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(60))
}

/// Checks the contract of a store with two clients.
fn check(first: &dyn Store, second: &dyn Store) {
    assert_eq!(first.get("color", &patient()), Ok(None));
    let since = Instant::now();
    let waited = first.wait("color", &brief());
    assert!(matches!(waited, Err(RendezvousError::KeyMissing { ref key, .. }) if key == "color"), "{waited:?}");
    assert!(since.elapsed() >= Duration::from_millis(60));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| second.wait("color", &patient()));
        thread::sleep(Duration::from_millis(20));
        first.set("color", b"blue", &patient()).expect("it should be set");
        assert_eq!(waiting.join().expect("the thread does not panic"), Ok(b"blue".to_vec()));
    });
    // What one client has set, every other one sees, also in a value with any bytes and none.
    for value in [&b"green"[..], b"", &[0, 255, b'\n'], &[7; 5000]] {
        first.set("color", value, &patient()).expect("it should be set");
        assert_eq!(second.get("color", &patient()), Ok(Some(value.to_vec())));
    }
    second.set("a/b c", b"1", &patient()).expect("it should be set");
    second.set("a/b", b"2", &patient()).expect("it should be set");
    assert_eq!(first.get("a/b c", &patient()), Ok(Some(b"1".to_vec())));
    let too_long = first.set("color", &[0; (64 << 10) + 1], &patient());
    assert!(matches!(too_long, Err(RendezvousError::TooLong { key_bytes: 5, .. })), "{too_long:?}");
}

#[test]
fn values_in_memory_are_a_store() {
    let values = Values::default();
    check(&values, &values);
}

#[test]
fn the_memory_of_an_own_store_is_bounded() {
    let values = Values::default();
    let full = Err(RendezvousError::StoreFull { bytes_max: STORE_BYTES_MAX });
    for (value, most) in [(&[0; 64 << 10][..], 256), (b"", 1 << 17)] {
        let stored = (0..).take_while(|key| values.set(&key.to_string(), value, &patient()).is_ok()).count();
        assert!((most / 2..=most).contains(&stored), "{stored} values of {} bytes", value.len());
        assert_eq!(values.set("one more", value, &patient()), full);
        // Values that are there can be replaced, and shorter ones make room.
        (0..stored).for_each(|key| values.set(&key.to_string(), b"", &patient()).expect("it has this key"));
    }
}

fn terms() -> Terms {
    Terms { job: 5, ranks: 4, has_secret: false, key: None, refusal_key: None }
}

fn served() -> (ServedStore, Endpoint) {
    let listener = Endpoint::Network("127.0.0.1:0".parse().expect("it should be an address"))
        .listen()
        .expect("a port should be free");
    let Listener::Network(bound) = &listener else { panic!("it has an address") };
    let endpoint = Endpoint::Network(bound.local_addr().expect("the socket should be bound"));
    let store = ServedStore::start(listener, terms(), |rank, _| (format!("refused/{rank}"), vec![1]));
    (store.expect("a thread should start"), endpoint)
}

fn client(endpoint: &Endpoint, rank: u32) -> RemoteStore {
    let identity = Identity { rank, session: rank.into(), deadline: patient() };
    RemoteStore::new(terms(), vec![endpoint.clone()], identity)
}

#[test]
fn an_own_store_serves_its_process_and_others() {
    let (server, endpoint) = served();
    check(&client(&endpoint, 1), &client(&endpoint, 2));
    drop(server);
    let (server, endpoint) = served();
    check(&server, &client(&endpoint, 3));
}

#[test]
fn an_own_store_is_found_again_after_a_restart() {
    let (server, endpoint) = served();
    let client = client(&endpoint, 1);
    client.set("color", b"blue", &patient()).expect("it should be set");
    drop(server);
    let again = endpoint.listen().expect("the old server has closed its listener");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.wait("color", &patient()));
        thread::sleep(Duration::from_millis(50));
        let server = ServedStore::start(again, terms(), |rank, _| (format!("refused/{rank}"), vec![1]));
        let server = server.expect("a thread should start");
        server.set("color", b"green", &patient()).expect("it should be set");
        assert_eq!(waiting.join().expect("the thread does not panic"), Ok(b"green".to_vec()));
    });
}

#[test]
fn an_own_store_frees_its_port_before_its_drop_returns() {
    let (mut server, endpoint) = served();
    for turn in 0..20 {
        client(&endpoint, 1).set("turn", &[turn], &patient()).expect("it should be set");
        drop(server);
        let listener = endpoint.listen().expect("the port is free");
        server = ServedStore::start(listener, terms(), |rank, _| (format!("refused/{rank}"), vec![1]))
            .expect("a thread should start");
    }
}

#[test]
fn a_client_that_violates_the_protocol_is_disconnected() {
    let (server, endpoint) = served();
    for request in
        [&b"\x09\x01\0\0\0\0\0k"[..], b"\x01\xff\xff\0\0\0\0", b"\x01\x01\0\xff\xff\xff\xff", b"\x02\x01\0\0\0\0\0\xff"]
    {
        let identity = Identity { rank: 1, session: 1, deadline: patient() };
        let (_, mut connection) =
            crate::search::search(&terms(), std::slice::from_ref(&endpoint), identity, &patient())
                .expect("it should run");
        connection.write_all(request).expect("the message should be sent");
        // A server that waited for more bytes would keep the connection open.
        let end = Instant::now() + Duration::from_secs(30);
        let read = read_until(&mut connection, &mut [0; 1], end).expect_err("no reply").kind();
        let is_closed = matches!(read, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset);
        assert!(is_closed, "{request:?}: {read}");
    }
    assert_eq!(server.get("k", &patient()), Ok(None));
}

#[test]
fn a_shared_folder_is_a_store() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let open = || FolderStore::open(folder.path()).expect("the folder should be private");
    check(&open(), &open());
    let modes = fs::read_dir(folder.path()).expect("the folder should be readable").map(|entry| {
        let entry = entry.expect("it should be readable");
        assert!(!entry.file_name().to_string_lossy().contains(".symmalloc-"), "no draft remains");
        entry.metadata().expect("the file should be accessible").permissions().mode() & 0o777
    });
    assert!(modes.collect::<Vec<_>>().iter().all(|mode| *mode == 0o600));
}

/// Two jobs that were given one folder: the first one to meet leaves the other one's card.
#[test]
fn a_folder_is_removed_by_the_rank_0_whose_card_it_has() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let path = folder.path().join("job");
    let [first, second] = [(); 2].map(|()| FolderStore::open(&path).expect("the folder should be private"));
    first.remove_own();
    first.set("card", b"one", &patient()).expect("it should be set");
    second.set("card", b"two", &patient()).expect("it should be set");
    first.remove_own();
    assert_eq!(second.get("card", &patient()), Ok(Some(b"two".to_vec())));
    second.remove_own();
    assert!(!path.exists());
}

#[test]
fn a_folder_that_others_can_change_is_rejected() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).expect("the creation should succeed");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).expect("owned");
    let opened = FolderStore::open(&shared.join("job")).map(drop);
    assert!(matches!(opened, Err(RendezvousError::FolderWritable { .. })), "{opened:?}");
    assert!(matches!(FolderStore::open("relative".as_ref()), Err(RendezvousError::Folder { .. })));
}

#[test]
fn a_folder_of_another_user_is_rejected() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("owned");
    let path = folder.path().to_owned();
    let Some(opened) = as_another_user(|| FolderStore::open(&path).map(drop)) else { return };
    assert!(matches!(opened, Err(RendezvousError::FolderOwner { .. } | RendezvousError::Folder { .. })), "{opened:?}");
}

#[test]
fn a_link_in_a_folder_is_not_followed() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let elsewhere = tempfile::NamedTempFile::new().expect("the file should be accessible");
    let store = FolderStore::open(folder.path()).expect("the folder should be private");
    symlink(elsewhere.path(), folder.path().join("color")).expect("the link should be created");
    assert!(matches!(store.get("color", &patient()), Err(RendezvousError::Folder { .. })));
    store.set("color", b"blue", &patient()).expect("the link is replaced");
    assert_eq!(fs::read(elsewhere.path()).expect("the file should be accessible"), b"");
    assert_eq!(store.get("color", &patient()), Ok(Some(b"blue".to_vec())));
}

#[test]
fn the_store_of_torchrun_is_a_store() {
    let server = StandIn::start();
    let connect =
        || TorchStore::connect("localhost", server.address.port(), &patient()).expect("a process should listen");
    check(&connect(), &connect());
}

/// Two threads can share a client: one that waits does not keep the other from its deadline.
#[test]
fn a_wait_does_not_delay_requests_of_other_threads() {
    let server = StandIn::start();
    let store = TorchStore::connect("127.0.0.1", server.address.port(), &patient()).expect("a process should listen");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait("color", &patient()));
        thread::sleep(Duration::from_millis(50));
        store.set("color", b"blue", &patient()).expect("it should be set");
        assert_eq!(waiting.join().expect("the thread does not panic"), Ok(b"blue".to_vec()));
    });
}

#[test]
fn a_search_for_an_own_store_does_not_delay_requests_of_other_threads() {
    let (_port, nobody) = crate::tests::nobody();
    let store = client(&nobody, 1);
    thread::scope(|scope| {
        scope.spawn(|| store.get("color", &Deadline::after(Duration::from_secs(5))));
        thread::sleep(Duration::from_millis(50));
        let since = Instant::now();
        store.get("color", &Deadline::after(Duration::from_millis(100))).expect_err("nobody listens");
        assert!(since.elapsed() < scaled_to_load(Duration::from_secs(2)), "{:?}", since.elapsed());
    });
}

/// A program at the store's port that answers correctly until it is asked for a value.
#[test]
fn a_value_that_is_too_long_is_refused_before_it_is_read() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let port = listener.local_addr().expect("the socket should be bound").port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().expect("the connection should succeed").0;
            let mut bytes = [0; 64];
            let count = stream.read(&mut bytes).expect("it introduces itself");
            stream.write_all(&bytes[count - 4..count]).expect("the message should be sent");
            let _check = stream.read(&mut bytes).expect("the request should be complete");
            stream.write_all(&[0]).expect("all keys are set");
            let _get = stream.read(&mut bytes).expect("the request should be complete");
            stream.write_all(&u64::MAX.to_le_bytes()).expect("the message should be sent");
        });
        let store = TorchStore::connect("127.0.0.1", port, &patient()).expect("a process should listen");
        let address = format!("127.0.0.1:{port}");
        assert_eq!(store.get("color", &patient()), Err(RendezvousError::ForeignStore { address }));
    });
}

#[test]
fn a_slow_peer_does_not_extend_a_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let mut ours = Connection::from(
        TcpStream::connect(listener.local_addr().expect("the socket should be bound"))
            .expect("a process should listen"),
    );
    let mut theirs = listener.accept().expect("the connection should succeed").0;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; 64 << 10];
            while !is_over.load(Ordering::Relaxed) {
                let _count = theirs.read(&mut bytes).expect("the connection should be open");
                thread::sleep(Duration::from_millis(5));
            }
        });
        let since = Instant::now();
        let written = write_until(&mut ours, &vec![0; 256 << 20], since + Duration::from_millis(300));
        is_over.store(true, Ordering::Relaxed);
        assert!(written.is_err() && since.elapsed() < scaled_to_load(Duration::from_secs(1)), "{:?}", since.elapsed());
        drop(ours);
    });
}

#[test]
fn a_lost_connection_to_torchruns_store_is_replaced() {
    let server = StandIn::start();
    let store = TorchStore::connect("127.0.0.1", server.address.port(), &patient()).expect("a process should listen");
    store.set("color", b"blue", &patient()).expect("it should be set");
    server.cut();
    assert_eq!(store.get("color", &patient()), Ok(Some(b"blue".to_vec())));
    server.cut();
    store.set("color", b"green", &patient()).expect("it should be set");
    assert_eq!(store.wait("color", &patient()), Ok(b"green".to_vec()));
}

/// A proxy whose server is gone answers like this, and so does a server without a free descriptor.
#[test]
fn a_server_that_closes_each_connection_is_tried_again_with_pauses() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let port = listener.local_addr().expect("the socket should be bound").port();
    let connections = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&connections);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::Relaxed);
            let mut hello = [0; 10];
            let _answered = stream.read_exact(&mut hello).and_then(|()| stream.write_all(&hello[6..]));
        }
    });
    let limit = || Deadline::after(Duration::from_millis(300));
    let store = TorchStore::connect("127.0.0.1", port, &patient()).expect("it answers the ping");
    store.get("color", &limit()).expect_err("it closes the connection");
    store.wait("color", &limit()).expect_err("it closes the connection");
    // Pauses of 10, 20, 40, 80 and 160 ms.
    assert!((3..=15).contains(&connections.load(Ordering::Relaxed)), "{connections:?}");
}

#[test]
fn another_program_at_the_stores_port_and_none_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let port = listener.local_addr().expect("the socket should be bound").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _answered = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let address = format!("127.0.0.1:{port}");
    let limit = || Deadline::after(Duration::from_millis(200));
    assert_eq!(
        TorchStore::connect("127.0.0.1", port, &limit()).map(drop),
        Err(RendezvousError::ForeignStore { address })
    );
    // One that closes the connection, and one that is silent.
    for is_silent in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let port = listener.local_addr().expect("the socket should be bound").port();
        thread::spawn(move || {
            let _kept: Vec<_> = listener.incoming().filter(|_| is_silent).collect();
        });
        let address = format!("127.0.0.1:{port}");
        let opened = TorchStore::connect("127.0.0.1", port, &limit()).map(drop);
        assert_eq!(opened, Err(RendezvousError::ForeignStore { address }));
    }
    let (_port, nobody) = crate::tests::nobody();
    let port = nobody.address().expect("a network endpoint").port();
    let refused = TorchStore::connect("127.0.0.1", port, &limit()).map(drop);
    assert!(matches!(refused, Err(RendezvousError::StoreUnreachable { .. })), "{refused:?}");
    let unknown = TorchStore::connect("not-a-host.invalid", port, &limit()).map(drop);
    assert!(matches!(unknown, Err(RendezvousError::StoreUnreachable { .. })), "{unknown:?}");
}

/// The bytes that a client of PyTorch 2.9.1 sends for `set("k", b"value")`, `get("k")` and `check(["k"])`, and what the
/// server answers.
#[test]
fn the_bytes_are_those_of_pytorchs_own_client() {
    let recorded: [(&[u8], &[u8]); 4] = [
        (b"\x01\x02\0\0\0\0\0\0\0/k\x05\0\0\0\0\0\0\0value", b""),
        (b"\x05\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k", b"\0"),
        (b"\x05\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k", b"\0"),
        (b"\x03\x02\0\0\0\0\0\0\0/k", b"\x05\0\0\0\0\0\0\0value"),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let port = listener.local_addr().expect("the socket should be bound").port();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let mut stream = listener.accept().expect("the connection should succeed").0;
            let mut hello = [0; 10];
            stream.read_exact(&mut hello).expect("it introduces itself");
            assert_eq!(hello[..6], *b"\x00\xce\xf7\x85\x3c\x0d");
            stream.write_all(&hello[6..]).expect("the message should be sent");
            for (request, reply) in recorded {
                let mut received = vec![0; request.len()];
                stream.read_exact(&mut received).expect("the request should be complete");
                assert_eq!(received, request);
                stream.write_all(reply).expect("the message should be sent");
            }
        });
        let store = TorchStore::connect("127.0.0.1", port, &patient()).expect("a process should listen");
        store.set("k", b"value", &patient()).expect("it should be set");
        assert_eq!(store.get("k", &patient()), Ok(Some(b"value".to_vec())));
        server.join().expect("the bytes are equal");
    });
}

/// Against a real server: `SYMMALLOC_TEST_TORCH_STORE=host:port`, as `torch.distributed.TCPStore(host, port, is_master=True)` runs it. Use a
/// new server for each run.
#[test]
fn a_real_store_of_pytorch_is_a_store() {
    let Ok(address) = std::env::var("SYMMALLOC_TEST_TORCH_STORE") else {
        println!("skipped: SYMMALLOC_TEST_TORCH_STORE is not set");
        return;
    };
    let (host, port) = address.rsplit_once(':').expect("host:port");
    let connect = || {
        TorchStore::connect(host, port.parse().expect("the value should be a port"), &patient())
            .expect("a process should listen")
    };
    check(&connect(), &connect());
}

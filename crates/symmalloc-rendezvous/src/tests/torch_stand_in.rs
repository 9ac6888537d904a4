//! A stand-in for the server of PyTorch's store: what the tests need of the protocol, written down a second time, from the server's side.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// A server that runs until the test ends.
pub(super) struct StandIn {
    pub(super) address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    values: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    is_changed: Condvar,
    connections: Mutex<Vec<TcpStream>>,
}

impl State {
    fn values(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StandIn {
    pub(super) fn start() -> Self {
        Self::start_at(([127, 0, 0, 1], 0))
    }

    pub(super) fn start_at(address: impl Into<SocketAddr>) -> Self {
        let listener = TcpListener::bind(address.into()).expect("a port should be free");
        let (address, state) = (listener.local_addr().expect("the socket should be bound"), Arc::<State>::default());
        let of_server = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&of_server);
                state
                    .connections
                    .lock()
                    .expect("no thread should panic")
                    .push(stream.try_clone().expect("the socket should accept the setting"));
                thread::spawn(move || serve(&state, stream));
            }
        });
        StandIn { address, state }
    }

    /// Ends all connections, as a firewall that forgets them.
    pub(super) fn cut(&self) {
        for stream in self.state.connections.lock().expect("no thread should panic").drain(..) {
            let _ended = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn serve(state: &State, mut stream: TcpStream) -> io::Result<()> {
    loop {
        match read::<1>(&mut stream)? {
            [0] => assert_eq!(u32::from_le_bytes(read(&mut stream)?), 0x3C85_F7CE, "the number of a client"),
            [1] => {
                let (key, value) = (text(&mut stream)?, text(&mut stream)?);
                state.values().insert(key, value);
                state.is_changed.notify_all();
            }
            [3] => {
                let key = text(&mut stream)?;
                let value = state.values().get(&key).cloned().unwrap_or_default();
                stream.write_all(&[&(value.len() as u64).to_le_bytes()[..], &value].concat())?;
            }
            [5] => {
                let keys = keys(&mut stream)?;
                let is_missing = keys.iter().any(|key| !state.values().contains_key(key));
                stream.write_all(&[u8::from(is_missing)])?;
            }
            [6] => {
                let keys = keys(&mut stream)?;
                let is_missing =
                    |values: &mut BTreeMap<Vec<u8>, Vec<u8>>| keys.iter().any(|key| !values.contains_key(key));
                let limit = Duration::from_secs(60);
                drop(state.is_changed.wait_timeout_while(state.values(), limit, is_missing));
                stream.write_all(&[0])?;
            }
            [13] => {
                let nonce = read::<4>(&mut stream)?;
                stream.write_all(&nonce)?;
            }
            [other] => panic!("no operation {other}"),
        }
    }
}

fn read<const BYTES: usize>(stream: &mut TcpStream) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn text(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut text = vec![0; u64::from_le_bytes(read(stream)?) as usize];
    stream.read_exact(&mut text).map(|()| text)
}

fn keys(stream: &mut TcpStream) -> io::Result<Vec<Vec<u8>>> {
    let count = u64::from_le_bytes(read(stream)?);
    (0..count).map(|_| text(stream)).collect()
}

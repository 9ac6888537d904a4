//! The network addresses of this machine, for the card of rank 0.
//!
//! The kernel lists them in `/proc/net`. Where these files are missing, the address from which a packet to the store would leave remains.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Maximum number of addresses that rank 0 publishes: each costs every rank a thread for a moment.
const ADDRESSES_MAX: usize = 16;

/// Returns the addresses of this machine at which other machines may reach it, without duplicates. The address toward each of `peers` comes
/// first. Loopback and link-local addresses are left out, unless a peer is reached from one.
pub(crate) fn own_addresses(peers: &[SocketAddr]) -> Vec<IpAddr> {
    let file = |path| fs::read_to_string(path).unwrap_or_default();
    let listed = [in_fib_trie(&file("/proc/net/fib_trie")), in_inet6(&file("/proc/net/if_inet6"))].concat();
    let mut found: Vec<IpAddr> = Vec::new();
    for address in peers.iter().filter_map(toward).chain(listed) {
        if !found.contains(&address) && found.len() < ADDRESSES_MAX {
            found.push(address);
        }
    }
    found
}

/// Returns this machine's address on the way to a peer. Sends nothing.
fn toward(peer: &SocketAddr) -> Option<IpAddr> {
    let unspecified: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(unspecified, 0)).ok()?;
    socket.connect(peer).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_unspecified()).then_some(address)
}

/// Returns the local addresses in the kernel's table of IPv4 routes, in which a line with an address precedes the line with its kind.
fn in_fib_trie(table: &str) -> Vec<IpAddr> {
    let mut last = None;
    let mut found = Vec::new();
    for line in table.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL"
            && let Some(address) = last
            && !address.is_loopback()
            && !address.is_link_local()
        {
            found.push(IpAddr::from(address));
        }
    }
    found
}

/// Returns the global addresses in the kernel's list of IPv6 addresses: address, interface, prefix, scope, flags and name.
fn in_inet6(list: &str) -> Vec<IpAddr> {
    const GLOBAL: &str = "00";
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        (words.nth(2)? == GLOBAL).then(|| IpAddr::from(Ipv6Addr::from(address)))
    };
    list.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().expect("the value should be an address")).collect()
    }

    #[test]
    fn addresses_of_interfaces_are_read_from_the_kernels_lists() {
        let table = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.0\n        /24 link UNICAST\n     \
                     |-- 10.0.0.7\n        /32 host LOCAL\n     |-- 169.254.0.1\n        /32 host LOCAL\n";
        assert_eq!(in_fib_trie(table), addresses(&["10.0.0.7"]));
        let list = "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\nfd000000000000000000000000000002 04 40 00 82     eth0\n\
                    00000000000000000000000000000001 01 80 10 80       lo\nnonsense\n";
        assert_eq!(in_inet6(list), addresses(&["fd00::2"]));
        assert!(in_fib_trie("").is_empty() && in_inet6("").is_empty());
    }

    #[test]
    fn the_address_toward_a_peer_comes_first_and_once() {
        let found = own_addresses(&["127.0.0.1:9".parse().expect("the value should be an address"); 2]);
        assert_eq!(found[0], IpAddr::from(Ipv4Addr::LOCALHOST));
        assert_eq!(found.iter().filter(|address| address.is_loopback()).count(), 1);
    }
}

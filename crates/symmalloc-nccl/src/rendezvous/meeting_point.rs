//! Where rank 0 waits for the others.

use super::error::RendezvousError;
use crate::launch::Launch;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// Names the place of the rendezvous.
const ADDRESS_VARIABLE: &str = "SYMMALLOC_RENDEZVOUS";
/// torchrun's names for the same.
const MASTER_ADDRESS_VARIABLE: &str = "MASTER_ADDR";
const MASTER_PORT_VARIABLE: &str = "MASTER_PORT";

/// Ports tried where the program did not name one.
const PORTS: u16 = 8;
/// Ports that follow from a job: below those that systems give to clients.
const JOB_PORTS: std::ops::Range<u64> = 20_000..30_000;
/// Where rank 0 listens: at the first of these that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MeetingPoint {
    pub(super) addresses: Vec<SocketAddr>,
}

impl MeetingPoint {
    pub(super) fn of(launch: &Launch, variable: impl Fn(&str) -> Option<String>) -> Result<Self, RendezvousError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let Some(value) = variable(ADDRESS_VARIABLE) {
            let addresses = resolve(value.as_str(), ADDRESS_VARIABLE, &value)?;
            return Ok(MeetingPoint { addresses });
        }
        if let (Some(host), Some(port)) = (variable(MASTER_ADDRESS_VARIABLE), variable(MASTER_PORT_VARIABLE)) {
            let bad = |variable, value: &str| RendezvousError::BadAddress { variable, value: value.to_owned() };
            let port: u16 = port.parse().map_err(|_| bad(MASTER_PORT_VARIABLE, &port))?;
            let first = resolve((host.as_str(), port), MASTER_ADDRESS_VARIABLE, &host)?;
            let ports = (1..=PORTS).filter_map(|step| port.checked_add(step));
            let addresses: Vec<_> =
                ports.flat_map(|port| first.iter().map(move |it| SocketAddr::new(it.ip(), port))).collect();
            return if addresses.is_empty() {
                Err(bad(MASTER_PORT_VARIABLE, "65535"))
            } else {
                Ok(MeetingPoint { addresses })
            };
        }
        if launch.ranks == launch.local_ranks {
            let ports = JOB_PORTS.end - JOB_PORTS.start - u64::from(PORTS);
            let first = JOB_PORTS.start + hash(job_of(launch).as_bytes()) % ports;
            let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let addresses = (0..PORTS).map(|step| SocketAddr::new(localhost, first as u16 + step)).collect();
            return Ok(MeetingPoint { addresses });
        }
        Err(RendezvousError::NoAddress)
    }

    /// One address, as the program says.
    pub(super) fn at(address: &str) -> Result<Self, RendezvousError> {
        Ok(MeetingPoint { addresses: resolve(address, "rendezvous", address)? })
    }

    pub(super) fn listen(&self) -> Result<TcpListener, RendezvousError> {
        let mut refusal = None;
        for &address in &self.addresses {
            match listen_at(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => refusal = Some(RendezvousError::Listen { address, kind: error.kind() }),
            }
        }
        Err(refusal.unwrap_or(RendezvousError::NoAddress))
    }
}

pub(super) fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let everywhere = match address {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let listener = match TcpListener::bind(address) {
        // The name of this machine as others see it, which is none of its own addresses.
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            TcpListener::bind(SocketAddr::new(everywhere, address.port()))
        }
        bound => bound,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn resolve(
    address: impl ToSocketAddrs,
    variable: &'static str,
    value: &str,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    let bad = || RendezvousError::BadAddress { variable, value: value.to_owned() };
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(|_| bad())?.collect();
    if addresses.is_empty() { Err(bad()) } else { Ok(addresses) }
}

/// FNV-1a: the same on every machine.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What tells this job from others on the same machine.
pub(super) fn job_of(launch: &Launch) -> String {
    #[cfg(unix)]
    if launch.job.is_empty() && launch.ranks == launch.local_ranks {
        // mpiexec and its like: the ranks of one machine are children of one process.
        return format!("{}.{}", launch.launcher, std::os::unix::process::parent_id());
    }
    format!("{}.{}", launch.launcher, launch.job)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(ranks: u32, local_ranks: u32, job: &str) -> Launch {
        let variables = [
            ("RANK", "0".to_owned()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", "0".to_owned()),
            ("LOCAL_WORLD_SIZE", local_ranks.to_string()),
            ("TORCHELASTIC_RUN_ID", job.to_owned()),
        ];
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        Launch::from_variables(variable).expect("complete")
    }

    fn place(launch: &Launch, variables: &[(&str, &str)]) -> Result<MeetingPoint, RendezvousError> {
        MeetingPoint::of(launch, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_place_is_what_is_said_first_or_follows_from_the_job() {
        let job = launch(4, 4, "job");
        let said =
            place(&job, &[("SYMMALLOC_RENDEZVOUS", "127.0.0.1:4000"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")]);
        assert_eq!(said.expect("an address").addresses, ["127.0.0.1:4000".parse().expect("an address")]);

        let master = place(&job, &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]).expect("addresses");
        let ports: Vec<u16> = master.addresses.iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [29501, 29502, 29503, 29504, 29505, 29506, 29507, 29508]);

        let (one, again, other) = (place(&job, &[]), place(&job, &[]), place(&launch(4, 4, "other"), &[]));
        assert_eq!(one, again);
        assert_ne!(one, other);
        for address in one.expect("local").addresses {
            assert!(address.ip().is_loopback() && JOB_PORTS.contains(&u64::from(address.port())));
        }
        assert_eq!(place(&launch(4, 2, "job"), &[]), Err(RendezvousError::NoAddress));
    }

    #[test]
    fn a_place_that_cannot_be_is_refused_by_name() {
        let job = launch(4, 4, "job");
        let bad = |variable, value: &str| Err(RendezvousError::BadAddress { variable, value: value.to_owned() });
        assert_eq!(place(&job, &[("SYMMALLOC_RENDEZVOUS", "nowhere")]), bad("SYMMALLOC_RENDEZVOUS", "nowhere"));
        assert_eq!(place(&job, &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "99999")]), bad("MASTER_PORT", "99999"));
        assert_eq!(place(&job, &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "65535")]), bad("MASTER_PORT", "65535"));
    }
}

//! Meetings of a job's ranks, and the endpoints at which rank 0 waits for the others.

use crate::endpoint::{Endpoint, Listener, hash, names};
use crate::error::RendezvousError;
use crate::handshake::Hello;
use crate::launch::Launch;
use crate::secret::Secret;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::Duration;

/// Time limit for a peer to identify itself, and for rank 0 to answer.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// One meeting of the ranks of one job.
#[derive(Clone, Debug)]
pub(super) struct Meeting {
    pub(super) job: u64,
    pub(super) ranks: u32,
    pub(super) secret: Option<Secret>,
}

impl Meeting {
    pub(super) fn new(launch: &Launch, turn: u32, secret: Option<Secret>) -> Self {
        Meeting { job: hash(format!("{}.{turn}", job_of(launch)).as_bytes()), ranks: launch.ranks, secret }
    }

    /// Returns `true` if the peer is a rank of this job that rank 0 waits for.
    pub(super) fn is_of(&self, hello: &Hello) -> bool {
        (hello.job, hello.ranks) == (self.job, self.ranks) && (1..self.ranks).contains(&hello.rank)
    }
}

/// Returns a name that distinguishes this job from others on the machine.
pub(super) fn job_of(launch: &Launch) -> String {
    if launch.job.is_empty() && launch.ranks == launch.local_ranks {
        // Under mpiexec and similar launchers, the ranks of one machine are children of one process.
        return format!("{}.{}", launch.launcher, std::os::unix::process::parent_id());
    }
    format!("{}.{}", launch.launcher, launch.job)
}

/// The environment variable with the address of the rendezvous.
const ADDRESS_VARIABLE: &str = "SYMMALLOC_RENDEZVOUS";
/// torchrun's environment variables for the address.
const MASTER_ADDRESS_VARIABLE: &str = "MASTER_ADDR";
const MASTER_PORT_VARIABLE: &str = "MASTER_PORT";

/// Number of ports to try if the program does not specify one.
const PORTS: u16 = 8;

/// The endpoints at which rank 0 may listen. It uses the first free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndpointList {
    pub(super) endpoints: Vec<Endpoint>,
}

impl EndpointList {
    pub(super) fn of(
        launch: &Launch,
        meeting: &Meeting,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, RendezvousError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let is_one_machine = launch.ranks == launch.local_ranks;
        if let Some(value) = variable(ADDRESS_VARIABLE) {
            let addresses = resolve(value.as_str(), ADDRESS_VARIABLE, &value)?;
            return Ok(Self::named(addresses, is_one_machine, meeting));
        }
        if let (Some(host), Some(port)) = (variable(MASTER_ADDRESS_VARIABLE), variable(MASTER_PORT_VARIABLE)) {
            let bad = |variable, value: &str| RendezvousError::BadAddress { variable, value: value.to_owned() };
            let port: u16 = port.parse().map_err(|_| bad(MASTER_PORT_VARIABLE, &port))?;
            let first = resolve((host.as_str(), port), MASTER_ADDRESS_VARIABLE, &host)?;
            if is_of_this_machine(&first, is_one_machine) {
                return Ok(Self::on_this_machine(port, meeting));
            }
            let ports = (1..=PORTS).filter_map(|step| port.checked_add(step));
            let endpoints: Vec<_> = ports
                .flat_map(|port| first.iter().map(move |it| SocketAddr::new(it.ip(), port)))
                .map(Endpoint::Network)
                .collect();
            return if endpoints.is_empty() {
                Err(bad(MASTER_PORT_VARIABLE, "65535"))
            } else {
                Ok(EndpointList { endpoints })
            };
        }
        if is_one_machine { Ok(Self::on_this_machine(0, meeting)) } else { Err(RendezvousError::NoAddress) }
    }

    /// Returns the list of endpoints at the address that the program specifies.
    pub(super) fn at(address: &str, meeting: &Meeting) -> Result<Self, RendezvousError> {
        // The ranks may be on several machines, but a loopback address refers only to this one.
        Ok(Self::named(resolve(address, "rendezvous", address)?, false, meeting))
    }

    fn named(addresses: Vec<SocketAddr>, is_one_machine: bool, meeting: &Meeting) -> Self {
        if is_of_this_machine(&addresses, is_one_machine) {
            return Self::on_this_machine(addresses[0].port(), meeting);
        }
        EndpointList { endpoints: addresses.into_iter().map(Endpoint::Network).collect() }
    }

    /// Returns a list of endpoints of sockets on this machine. The port distinguishes jobs with the same name.
    fn on_this_machine(port: u16, meeting: &Meeting) -> Self {
        let names = names(meeting.job, port, meeting.secret.as_ref());
        EndpointList { endpoints: names.into_iter().map(Endpoint::Local).collect() }
    }

    pub(super) fn listen(&self) -> Result<Listener, RendezvousError> {
        let mut refusal = RendezvousError::NoAddress;
        for endpoint in &self.endpoints {
            match endpoint.listen() {
                Ok(listener) => return Ok(listener),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

/// Returns `true` if the addresses refer to this machine: loopback addresses do, and so do its own if all ranks are on one machine.
fn is_of_this_machine(addresses: &[SocketAddr], is_one_machine: bool) -> bool {
    let is_own = |address: &SocketAddr| UdpSocket::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    addresses.iter().all(|address| address.ip().is_loopback()) || is_one_machine && addresses.iter().any(is_own)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;
    use crate::tests::launch;

    const SECRET: &str = "0123456789abcdef";

    fn place(launch: &Launch, variables: &[(&str, &str)]) -> Result<EndpointList, RendezvousError> {
        place_with(None, launch, variables)
    }

    fn place_with(
        secret: Option<&str>,
        launch: &Launch,
        variables: &[(&str, &str)],
    ) -> Result<EndpointList, RendezvousError> {
        let secret = secret.map(|text| Secret::new(text.into()).expect("the secret is long enough"));
        EndpointList::of(launch, &Meeting::new(launch, 0, secret), |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn ports(list: &EndpointList) -> Vec<u16> {
        let port = |endpoint: &Endpoint| match endpoint {
            Endpoint::Network(address) => address.port(),
            Endpoint::Local(name) => panic!("{name:?} is no port"),
        };
        list.endpoints.iter().map(port).collect()
    }

    fn is_local(list: &EndpointList) -> bool {
        list.endpoints.iter().all(|endpoint| matches!(endpoint, Endpoint::Local(_)))
    }

    #[test]
    fn ranks_of_one_machine_use_its_sockets() {
        let job = launch(4, 4, "job");
        let (one, again, other) = (place(&job, &[]), place(&job, &[]), place(&launch(4, 4, "other"), &[]));
        assert_eq!(one, again);
        assert_ne!(one, other);
        let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        let next = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29501")];
        let named = [("SYMMALLOC_RENDEZVOUS", "127.0.0.1:4000")];
        for variables in [&[][..], &master, &next, &named, &[("SYMMALLOC_RENDEZVOUS", "0.0.0.0:4000")]] {
            assert!(is_local(&place(&job, variables).expect("the list of endpoints is local")), "{variables:?}");
        }
        assert_ne!(place(&job, &master), place(&job, &next), "two jobs with one name");
        let by_name = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
        assert_eq!(place(&job, &master), place(&job, &by_name), "two names of one machine");
        // Ranks without the secret find those that have it and are rejected. The other names cannot be guessed.
        let (plain, secret) = (
            place(&job, &master).expect("the list of endpoints is local"),
            place_with(Some(SECRET), &job, &master).expect("the list of endpoints is local"),
        );
        assert!(
            is_local(&secret)
                && secret.endpoints.starts_with(&plain.endpoints)
                && secret.endpoints.len() > plain.endpoints.len()
        );
    }

    #[test]
    fn a_remote_address_is_a_network_endpoint() {
        let (one_machine, two_machines) = (launch(4, 4, "job"), launch(4, 2, "job"));
        // An address reserved for documentation, which no machine has.
        let elsewhere = [("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500")];
        for job in [&one_machine, &two_machines] {
            let master = place(job, &elsewhere).expect("the addresses are valid");
            assert_eq!(ports(&master), [29501, 29502, 29503, 29504, 29505, 29506, 29507, 29508]);
        }
        let named = [("SYMMALLOC_RENDEZVOUS", "192.0.2.1:4000"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")];
        assert_eq!(ports(&place(&two_machines, &named).expect("an address")), [4000]);
        assert_eq!(place(&two_machines, &[]), Err(RendezvousError::NoAddress));
    }

    #[test]
    fn an_invalid_address_is_an_error() {
        let job = launch(4, 4, "job");
        let bad = |variable, value: &str| Err(RendezvousError::BadAddress { variable, value: value.to_owned() });
        assert_eq!(place(&job, &[("SYMMALLOC_RENDEZVOUS", "nowhere")]), bad("SYMMALLOC_RENDEZVOUS", "nowhere"));
        assert_eq!(place(&job, &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "99999")]), bad("MASTER_PORT", "99999"));
        assert_eq!(place(&job, &[("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "65535")]), bad("MASTER_PORT", "65535"));
    }
}

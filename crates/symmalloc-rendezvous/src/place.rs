//! The place where the ranks of a job meet, as the environment specifies.

use crate::card::note;
use crate::deadline::Deadline;
use crate::endpoint::{Endpoint, Listener, hash, names};
use crate::error::RendezvousError;
use crate::folder::FolderStore;
use crate::handshake::Shared;
use crate::launch::{Launch, Launcher};
use crate::meeting::{Meeting, Met, Reach};
use crate::own::{RemoteStore, ServedStore};
use crate::search::Identity;
use crate::torch_store::TorchStore;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

/// The environment variable with the address of the rendezvous.
const ADDRESS_VARIABLE: &str = "SYMMALLOC_RENDEZVOUS";
/// torchrun's environment variables for the address of its store.
const MASTER_ADDRESS_VARIABLE: &str = "MASTER_ADDR";
const MASTER_PORT_VARIABLE: &str = "MASTER_PORT";

/// torchrun's variable: true if the launcher itself runs the store. Otherwise, PyTorch runs it in the process of rank 0.
const AGENT_STORE_VARIABLE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// Number of ports to try if the program does not specify one.
const PORTS: u16 = 8;

/// The store through which the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An own store at the first free endpoint of these.
    Own(EndpointList),
    /// The store of torchrun.
    Torch { host: String, port: u16 },
    /// A folder, which this job does not share with others.
    Folder(PathBuf),
}

impl Place {
    pub(crate) fn of(
        launch: &Launch,
        meeting: &Meeting,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, RendezvousError> {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let text = |name: &'static str| {
            let value = variable(name).filter(|value| !value.is_empty()).map(OsString::into_string);
            value.transpose().map_err(|_| RendezvousError::NotUtf8 { variable: name })
        };
        let is_one_machine = launch.ranks == launch.local_ranks;
        if let Some(value) = text(ADDRESS_VARIABLE)? {
            if value.starts_with('/') && !is_identified(launch) {
                // Other jobs with this folder may have the same name.
                let master = text(MASTER_ADDRESS_VARIABLE)?.zip(text(MASTER_PORT_VARIABLE)?);
                let master = master.map(|(host, port)| format!("{host}:{port}"));
                let machine = || is_one_machine.then(machine).flatten().filter(|_| launch.job.is_empty());
                let launcher = launch.launcher;
                let distinction = master.or_else(machine).ok_or(RendezvousError::UnnamedJob { launcher })?;
                let job = hash(format!("{:016x} {distinction}", meeting.job).as_bytes());
                return Ok(Place::Folder(Path::new(&value).join(format!("{job:016x}"))));
            }
            return Self::named(&value, ADDRESS_VARIABLE, is_one_machine, meeting);
        }
        if let (Some(host), Some(port)) = (text(MASTER_ADDRESS_VARIABLE)?, text(MASTER_PORT_VARIABLE)?) {
            let bad = |variable, value: &str| RendezvousError::BadAddress { variable, value: value.to_owned() };
            let port: u16 = port.parse().map_err(|_| bad(MASTER_PORT_VARIABLE, &port))?;
            let is_served = text(AGENT_STORE_VARIABLE)?.is_some_and(|value| value.eq_ignore_ascii_case("true"));
            if is_served && !is_one_machine {
                return Ok(Place::Torch { host, port });
            }
            let first = resolve((host.as_str(), port), MASTER_ADDRESS_VARIABLE, &host)?;
            if is_of_this_machine(&host, &first, is_one_machine) {
                return Ok(Place::Own(EndpointList::on_this_machine(port, meeting)));
            }
            if is_served {
                return Ok(Place::Torch { host, port });
            }
            let ports = (1..=PORTS).filter_map(|step| port.checked_add(step));
            let endpoints: Vec<_> = ports
                .flat_map(|port| first.iter().map(move |it| SocketAddr::new(it.ip(), port)))
                .map(Endpoint::Network)
                .collect();
            return if endpoints.is_empty() {
                Err(bad(MASTER_PORT_VARIABLE, "65535"))
            } else {
                Ok(Place::Own(EndpointList { endpoints }))
            };
        }
        if is_one_machine {
            return Ok(Place::Own(EndpointList::on_this_machine(0, meeting)));
        }
        // A job of torchrun has an address, and its identifier may be that of another job.
        if launch.job.is_empty() || launch.launcher == Launcher::Torchrun {
            return Err(RendezvousError::NoAddress { launcher: launch.launcher });
        }
        let state = path("XDG_STATE_HOME").or_else(|| path("HOME").map(|home| home.join(".local/state")));
        let state = state.filter(|state| state.is_absolute()).ok_or(RendezvousError::NoHome)?;
        Ok(Place::Folder(folder_of(&state.join("symmalloc").join("rendezvous"), meeting)))
    }

    /// Returns the place that the program specifies.
    pub(crate) fn at(address: &str, meeting: &Meeting) -> Result<Self, RendezvousError> {
        // The ranks may be on several machines, but a loopback address refers only to this one.
        Self::named(address, "rendezvous", false, meeting)
    }

    fn named(
        value: &str,
        variable: &'static str,
        is_one_machine: bool,
        meeting: &Meeting,
    ) -> Result<Self, RendezvousError> {
        if value.starts_with('/') {
            return Ok(Place::Folder(folder_of(Path::new(value), meeting)));
        }
        let addresses = resolve(value, variable, value)?;
        let host = value.rsplit_once(':').map_or(value, |(host, _)| host);
        if is_of_this_machine(host, &addresses, is_one_machine) {
            return Ok(Place::Own(EndpointList::on_this_machine(addresses[0].port(), meeting)));
        }
        Ok(Place::Own(EndpointList { endpoints: addresses.into_iter().map(Endpoint::Network).collect() }))
    }

    /// Meets the other ranks there. Rank 0 shares what `create` returns.
    pub(crate) fn hold<E: From<RendezvousError>>(
        &self,
        meeting: &Meeting,
        rank: u32,
        create: impl FnOnce() -> Result<Shared, E>,
        deadline: &Deadline,
    ) -> Result<Met, E> {
        match self {
            Place::Own(list) if rank == 0 => {
                let job = meeting.job;
                let refused = move |rank, found| (Meeting::note_key(job, rank), note(None, found));
                let store = ServedStore::start(list.listen()?, meeting.store_terms(), refused)?;
                meeting.hold(&store, &list.reach(), rank, create, deadline)
            }
            Place::Own(list) => {
                let identity = Identity::new(rank, deadline)?;
                let store = RemoteStore::new(meeting.store_terms(), list.endpoints.clone(), identity);
                meeting.hold(&store, &list.reach(), rank, create, deadline)
            }
            Place::Torch { host, port } => {
                let store = TorchStore::connect(host, *port, deadline)?;
                let reach = Reach::Network { toward: store.peer().into_iter().collect(), named: Vec::new() };
                meeting.hold(&store, &reach, rank, create, deadline)
            }
            Place::Folder(folder) => {
                let store = FolderStore::open(folder)?;
                let reach = Reach::Network { toward: Vec::new(), named: Vec::new() };
                let met = meeting.hold(&store, &reach, rank, create, deadline)?;
                if rank == 0 {
                    store.remove_own();
                } else {
                    store.remove_if_empty();
                }
                Ok(met)
            }
        }
    }
}

/// Returns `true` if the launcher gives the job an identifier that no other job has. torchrun calls all jobs without one `none`.
fn is_identified(launch: &Launch) -> bool {
    !launch.job.is_empty() && (launch.launcher != Launcher::Torchrun || launch.job != "none")
}

/// Returns a text that distinguishes this machine, or this container, from others. A job without an identifier is named after the id of a
/// process, which another machine may have, too.
fn machine() -> Option<String> {
    let read = |name| std::fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).ok();
    Some(format!("{} {}", read("hostname")?, read("random/boot_id")?))
}

/// Returns the folder of one meeting.
fn folder_of(folder: &Path, meeting: &Meeting) -> PathBuf {
    folder.join(format!("{:016x}", meeting.job))
}

/// The endpoints at which the own store of rank 0 may listen. It uses the first free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointList {
    pub(crate) endpoints: Vec<Endpoint>,
}

impl EndpointList {
    /// Returns a list of endpoints of sockets on this machine. The port distinguishes jobs with the same name.
    fn on_this_machine(port: u16, meeting: &Meeting) -> Self {
        let names = names(meeting.job, port, meeting.secret.as_ref());
        EndpointList { endpoints: names.into_iter().map(Endpoint::Local).collect() }
    }

    pub(crate) fn listen(&self) -> Result<Listener, RendezvousError> {
        let mut refusal = None;
        for endpoint in &self.endpoints {
            match endpoint.listen_for_others() {
                Ok(listener) => return Ok(listener),
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.expect("a list has an endpoint"))
    }

    /// Returns from where rank 0 must be reachable, if its store is at these endpoints.
    fn reach(&self) -> Reach {
        let addresses: Vec<SocketAddr> = self.endpoints.iter().filter_map(Endpoint::address).collect();
        if addresses.is_empty() {
            return Reach::Machine;
        }
        // Other machines cannot reach a loopback address.
        let toward: Vec<SocketAddr> = addresses.into_iter().filter(|address| !address.ip().is_loopback()).collect();
        Reach::Network { named: toward.iter().map(SocketAddr::ip).collect(), toward }
    }
}

/// Returns `true` if the host, with these addresses, means this machine on every rank: a loopback address does, and so does an own address if
/// all ranks are on one machine.
///
/// A host name does not, even if it has only loopback addresses here: Debian resolves the machine's own name to 127.0.1.1, and other machines
/// resolve it to an address on the network.
fn is_of_this_machine(host: &str, addresses: &[SocketAddr], is_one_machine: bool) -> bool {
    let is_own = |address: &SocketAddr| UdpSocket::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let is_loopback = addresses.iter().all(|address| address.ip().is_loopback());
    is_loopback && (is_address || host == "localhost") || is_one_machine && addresses.iter().any(is_own)
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
    use crate::meeting_of;
    use crate::secret::Secret;
    use crate::tests::launch;
    use std::os::unix::ffi::OsStringExt;

    const SECRET: &str = "0123456789abcdef";

    fn place(launch: &Launch, variables: &[(&str, &str)]) -> Result<Place, RendezvousError> {
        place_with(None, launch, variables)
    }

    fn place_with(secret: Option<&str>, launch: &Launch, variables: &[(&str, &str)]) -> Result<Place, RendezvousError> {
        let secret = secret.map(|text| Secret::new(text.into()).expect("the secret is long enough"));
        Place::of(launch, &meeting_of(launch, 0, secret)?, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        })
    }

    fn endpoints(place: &Place) -> &[Endpoint] {
        let Place::Own(list) = place else { panic!("{place:?} has no endpoints") };
        &list.endpoints
    }

    fn ports(place: &Place) -> Vec<u16> {
        let port = |endpoint: &Endpoint| match endpoint {
            Endpoint::Network(address) => address.port(),
            Endpoint::Local(name) => panic!("{name:?} is no port"),
        };
        endpoints(place).iter().map(port).collect()
    }

    fn is_local(place: &Place) -> bool {
        endpoints(place).iter().all(|endpoint| matches!(endpoint, Endpoint::Local(_)))
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
                && endpoints(&secret).starts_with(endpoints(&plain))
                && endpoints(&secret).len() > endpoints(&plain).len()
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
        assert_eq!(ports(&place(&two_machines, &named).expect("the value should be an address")), [4000]);
        let launcher = Launcher::Torchrun;
        assert_eq!(place(&two_machines, &[]), Err(RendezvousError::NoAddress { launcher }));
    }

    #[test]
    fn a_machines_own_name_is_not_a_loopback_address_on_other_machines() {
        let addresses = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|it| it.parse().expect("the value should be an address")).collect()
        };
        let debian = addresses(&["127.0.1.1:29500"]);
        assert!(!is_of_this_machine("node7", &debian, false));
        assert!(is_of_this_machine("node7", &debian, true), "all ranks are on one machine");
        assert!(is_of_this_machine("127.0.1.1", &debian, false) && is_of_this_machine("localhost", &debian, false));
        assert!(is_of_this_machine("[::1]", &addresses(&["[::1]:29500"]), false));
        let list = EndpointList { endpoints: vec![Endpoint::Network(([127, 0, 1, 1], 0).into())] };
        let Ok(Listener::Network(listener)) = list.listen() else { panic!("a network address") };
        assert!(listener.local_addr().expect("the socket should be bound").ip().is_unspecified());
        assert_eq!(list.reach(), Reach::Network { toward: Vec::new(), named: Vec::new() });
    }

    #[test]
    fn torchruns_store_is_used_if_the_launcher_runs_it() {
        let (one_machine, two_machines) = (launch(4, 4, "job"), launch(4, 2, "job"));
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
        let elsewhere = [("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500"), agent];
        let torch = |host: &str| Place::Torch { host: host.to_owned(), port: 29500 };
        assert_eq!(place(&two_machines, &elsewhere), Ok(torch("192.0.2.1")));
        assert_eq!(place(&one_machine, &elsewhere), Ok(torch("192.0.2.1")), "a container counts as a machine");
        // The name of another machine may be resolved later.
        let unknown = [("MASTER_ADDR", "not-yet.invalid"), ("MASTER_PORT", "29500"), agent];
        assert_eq!(place(&two_machines, &unknown), Ok(torch("not-yet.invalid")));
        let here = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), agent];
        assert_eq!(place(&two_machines, &here), Ok(torch("127.0.0.1")), "two agents on one machine");
        assert!(
            is_local(&place(&one_machine, &here).expect("the value should be an address")),
            "a socket admits only this user"
        );
        let by_worker = [elsewhere[0], elsewhere[1], ("TORCHELASTIC_USE_AGENT_STORE", "False")];
        assert_eq!(ports(&place(&two_machines, &by_worker).expect("the value should be an address"))[0], 29501);
    }

    #[test]
    fn a_job_of_several_machines_without_an_address_uses_a_folder() {
        let slurm = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_NODEID", "0"),
            ("SLURM_JOB_ID", "77"),
        ];
        let launch_of = |job: &str| {
            let variable = |name: &str| slurm.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            Launch::from_variables(|name| {
                if name == "SLURM_JOB_ID" { Some(job.into()) } else { variable(name).map(Into::into) }
            })
            .expect("the variables should be complete")
        };
        let (job, other, unnamed) = (launch_of("77"), launch_of("78"), launch_of(""));
        let folder = |launch: &Launch, variables: &[(&str, &str)]| match place(launch, variables) {
            Ok(Place::Folder(folder)) => folder,
            other => panic!("{other:?} is no folder"),
        };
        let home = [("HOME", "/home/me")];
        let in_home = folder(&job, &home);
        assert_eq!(in_home, folder(&job, &home));
        assert_ne!(in_home, folder(&other, &home));
        assert!(in_home.starts_with("/home/me/.local/state/symmalloc/rendezvous"), "{in_home:?}");
        assert!(folder(&job, &[("HOME", "/home/me"), ("XDG_STATE_HOME", "/state")]).starts_with("/state/symmalloc"));
        assert!(folder(&job, &[("SYMMALLOC_RENDEZVOUS", "/shared")]).starts_with("/shared"));
        assert_eq!(place(&job, &[]), Err(RendezvousError::NoHome));
        let launcher = Launcher::Slurm;
        assert_eq!(place(&unnamed, &home), Err(RendezvousError::NoAddress { launcher }), "two jobs could meet");
    }

    #[test]
    fn a_variable_that_is_not_utf8_is_an_error_and_not_ignored() {
        let job = launch(4, 2, "job");
        let meeting = meeting_of(&job, 0, None).expect("a job may have four ranks");
        let bytes = || OsString::from_vec(b"/\xff".to_vec());
        for bad in [ADDRESS_VARIABLE, MASTER_ADDRESS_VARIABLE, MASTER_PORT_VARIABLE, AGENT_STORE_VARIABLE] {
            let place = Place::of(&job, &meeting, |name| match name {
                _ if name == bad => Some(bytes()),
                ADDRESS_VARIABLE => None,
                _ => Some("29500".into()),
            });
            assert_eq!(place, Err(RendezvousError::NotUtf8 { variable: bad }));
        }
        // The path of a home directory is not text.
        let job = Launch { launcher: Launcher::Slurm, ..job };
        let place = Place::of(&job, &meeting, |name| (name == "HOME").then(bytes));
        assert!(matches!(&place, Ok(Place::Folder(folder)) if folder.starts_with(bytes())), "{place:?}");
    }

    #[test]
    fn jobs_without_an_identifier_do_not_share_a_folder() {
        let shared = ("SYMMALLOC_RENDEZVOUS", "/shared");
        let [first, second] = ["29500", "29501"].map(|port| [shared, ("MASTER_ADDR", "node7"), ("MASTER_PORT", port)]);
        for name in ["none", ""] {
            let unnamed = launch(4, 2, name);
            let launcher = Launcher::Torchrun;
            assert_eq!(place(&unnamed, &[shared]), Err(RendezvousError::UnnamedJob { launcher }));
            let Ok(Place::Folder(folder)) = place(&unnamed, &first) else { panic!("a folder") };
            assert!(folder.starts_with("/shared"), "{folder:?}");
            assert_eq!(place(&unnamed, &first), Ok(Place::Folder(folder)));
            assert_ne!(place(&unnamed, &first), place(&unnamed, &second), "two jobs could meet");
        }
        // The name of a job on one machine has the id of a process. Containers may have the same ids.
        assert!(matches!(place(&launch(2, 2, ""), &[shared]), Ok(Place::Folder(_))));
        // An identifier suffices, and the address may differ between the machines.
        let named = launch(4, 2, "job");
        assert_eq!(place(&named, &first), place(&named, &[shared]));
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

//! An engine as its operator names it: its address, and what is sent to it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;

use axum::http::{HeaderValue, Uri};
use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{EventSpec, broker_path, port_of, shifted};
use kvflash_core::ids::InstanceId;

/// Most data-parallel ranks of a worker.
pub(crate) const MAX_RANKS: u32 = 1_024;

/// An address for display, without its login.
pub(crate) fn without_login(url: &str) -> String {
    match (url.find("//"), url.rfind('@')) {
        (Some(from), Some(to)) if from < to => format!("{}//***{}", &url[..from], &url[to..]),
        _ => url.to_owned(),
    }
}

/// The key that is sent to a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WorkerKey {
    /// That of `--worker-api-key-file`.
    #[default]
    Ours,
    /// Its own key, with which it was added; marked as sensitive, so `Debug` hides it.
    Own(HeaderValue),
    /// None: a client added it over HTTP.
    Nothing,
}

impl WorkerKey {
    /// From a worker's own key; `Nothing` without one.
    ///
    /// # Errors
    /// `Config` for a key that is not valid in a header.
    pub fn of(key: Option<&str>) -> Result<Self> {
        let Some(key) = key else { return Ok(Self::Nothing) };
        bearer("api_key", key).map(Self::Own)
    }
}

/// The header of a key that has this name in errors.
///
/// # Errors
/// `Config` for a key that is not valid in a header.
pub(crate) fn bearer(name: &str, key: &str) -> Result<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| {
        Error::Config(format!("{name} has characters that are not allowed in a header"))
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// An engine as its operator names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSpec {
    /// Base address, `http://host:port`.
    pub url: String,
    /// Address of its event socket, or its path at a broker; `None`: it publishes no events.
    pub events: Option<String>,
    /// Address of its replay socket.
    pub replay: Option<String>,
    /// Instance id; `None`: the frontend assigns one.
    pub instance_id: Option<InstanceId>,
    /// Data-parallel ranks behind the address; rank r publishes on the event port + r.
    pub dp_size: u32,
    /// It only prefills; another engine decodes.
    pub is_prefill: bool,
    /// Folder of its model's tokenizer, or the model's id at the Hub, if its card has it.
    pub tokenizer: Option<String>,
    /// The client that registered it over HTTP.
    pub registrant: Option<IpAddr>,
    /// The key that is sent to it.
    pub key: WorkerKey,
}

impl Default for EngineSpec {
    /// A decode worker with one rank, of which nothing else is known.
    fn default() -> Self {
        Self {
            url: String::new(),
            events: None,
            replay: None,
            instance_id: None,
            dp_size: 1,
            is_prefill: false,
            tokenizer: None,
            registrant: None,
            key: WorkerKey::default(),
        }
    }
}

impl FromStr for EngineSpec {
    type Err = Error;

    /// `URL[,events=tcp://...][,replay=tcp://...][,id=N][,dp=N][,role=prefill|decode][,tokenizer=FOLDER]`
    fn from_str(text: &str) -> Result<Self> {
        let shown = without_login(text);
        let mut parts = text.split(',');
        let url = parts.next().unwrap_or_default().trim().to_owned();
        let mut spec = Self { url, ..Self::default() };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| {
                Error::Config(format!("--worker {shown:?}: {part:?} is not key=value"))
            })?;
            let number = |limit: u64| match value.parse::<u64>() {
                Ok(number) if (1..=limit).contains(&number) => Ok(number),
                _ => Err(Error::Config(format!(
                    "--worker {shown:?}: {key} must be a number in 1..={limit}, got {value:?}"
                ))),
            };
            match key.trim() {
                "events" => spec.events = Some(value.to_owned()),
                "replay" => spec.replay = Some(value.to_owned()),
                "id" => spec.instance_id = Some(number(u64::MAX)?),
                "dp" => spec.dp_size = number(u64::from(MAX_RANKS))? as u32,
                "role" => spec.is_prefill = is_prefill(value)?,
                "tokenizer" => spec.tokenizer = Some(value.to_owned()),
                other => {
                    return Err(Error::Config(format!(
                        "--worker {shown:?}: unknown key {other:?}; known keys are events, replay, id, dp, role, \
                         tokenizer"
                    )));
                }
            }
        }
        spec.check()?;
        Ok(spec)
    }
}

impl EngineSpec {
    /// Checks the addresses.
    ///
    /// # Errors
    /// `Config`, naming the field and what is legal.
    pub fn check(&self) -> Result<()> {
        if self.url.contains('@') {
            return Err(Error::Config(format!(
                "worker url must be http://host:port or https://host:port, without a login, got {:?}; put the workers' API key into \
                 --worker-api-key-file",
                without_login(&self.url)
            )));
        }
        let uri: Uri = self
            .url
            .parse()
            .map_err(|_| Error::Config(format!("worker url {:?} is not a URL", self.url)))?;
        // An invalid port would become 80; the host must not be empty, and a user or a fragment
        // would be silently lost.
        let is_whole = uri.authority().is_some_and(|authority| {
            let port = authority.as_str().rsplit_once(':').map(|(_, port)| port);
            !authority.host().is_empty()
                && (authority.port_u16().is_some_and(|port| port > 0)
                    || port.is_none_or(|port| port.ends_with(']')))
        });
        if !matches!(uri.scheme_str(), Some("http" | "https"))
            || !is_whole
            || self.url.contains('#')
        {
            return Err(Error::Config(format!(
                "worker url must be http://host:port or https://host:port, got {:?}",
                self.url
            )));
        }
        if uri.query().is_some() {
            return Err(Error::Config(format!("worker url {:?} must not have a query", self.url)));
        }
        for (key, address) in [("events", &self.events), ("replay", &self.replay)] {
            if let Some(address) = address {
                if key == "events" && broker_path(address).is_some() {
                    continue;
                }
                let port = port_of(address);
                if port.is_none() && !is_local(address) {
                    return Err(Error::Config(format!(
                        "worker {key} must be tcp://host:port or ipc://path, got {address:?}"
                    )));
                }
                if port.is_none() && self.dp_size > 1 {
                    return Err(Error::Config(format!(
                        "worker {key} {address:?}: with dp={} it must be tcp://host:port, because rank r is at port + r",
                        self.dp_size
                    )));
                }
                if port.is_some_and(|port| u32::from(port) + self.dp_size - 1 > 65_535) {
                    return Err(Error::Config(format!(
                        "worker {key} {address:?}: rank {} would need a port above 65535",
                        self.dp_size - 1
                    )));
                }
            }
        }
        if self.replay.is_some() && self.events.is_none() {
            return Err(Error::Config(format!(
                "worker {:?} has replay= but no events=: add events=, or remove replay=",
                self.url
            )));
        }
        Ok(())
    }

    /// Whether somebody added it over HTTP, now or before the last start: only such a worker is not shown our key.
    pub fn is_added(&self) -> bool {
        self.key != WorkerKey::Ours
    }

    /// Where its ranks publish.
    pub fn event_specs(&self) -> BTreeMap<u32, EventSpec> {
        let (events, replay) = (self.place(&self.events), self.place(&self.replay));
        EventSpec::of_ranks(events.as_deref(), replay.as_deref(), self.dp_size)
    }

    /// The first event socket that a rank of `other` would have, too.
    pub fn shared_socket(&self, other: &Self) -> Option<String> {
        let (ours, theirs) = (self.place(&self.events)?, other.place(&other.events)?);
        let (Some(our_port), Some(their_port)) = (port_of(&ours), port_of(&theirs)) else {
            return (ours == theirs && broker_path(&ours).is_none()).then_some(ours);
        };
        let first = u32::from(our_port.max(their_port));
        let (our_rank, their_rank) = (first - u32::from(our_port), first - u32::from(their_port));
        let has_both = our_rank < self.dp_size && their_rank < other.dp_size;
        let socket = shifted(&ours, our_rank);
        (has_both && socket == shifted(&theirs, their_rank)).then_some(socket)
    }

    /// An address of its sockets, as it is dialled.
    fn place(&self, address: &Option<String>) -> Option<String> {
        let address = address.as_deref()?;
        let uri = self.url.parse::<Uri>().unwrap_or_default();
        // All interfaces are those of IPv4, which this name need not mean first.
        let host =
            uri.host().map_or("", |host| if host == "localhost" { "127.0.0.1" } else { host });
        Some(dialled(host, address))
    }
}

/// Parses a worker's role: a decode worker may also prefill.
///
/// # Errors
/// `Config`, with what is legal and what came.
pub(crate) fn is_prefill(role: &str) -> Result<bool> {
    match role {
        "prefill" => Ok(true),
        "decode" => Ok(false),
        other => {
            Err(Error::Config(format!("worker role must be prefill or decode, got {other:?}")))
        }
    }
}

fn is_local(address: &str) -> bool {
    ["ipc://", "inproc://"]
        .iter()
        .any(|scheme| address.strip_prefix(scheme).is_some_and(|path| !path.is_empty()))
}

/// A socket's address as it is dialled: engines write `*`, or the address of all interfaces, for
/// the interfaces that they bind to, and are reached at `host`.
pub(crate) fn dialled(host: &str, address: &str) -> String {
    ["tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"]
        .iter()
        .find_map(|any| address.strip_prefix(any))
        .map_or_else(|| address.to_owned(), |port| format!("tcp://{host}:{port}"))
}

/// `host:port` of a base address, which identifies workers in session ids.
pub(crate) fn address_of(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, address)| address).trim_end_matches('/')
}

/// A worker's URL without the trailing slash and `/v1`, which the frontend adds itself.
pub(crate) fn base_of(url: &str) -> &str {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url).trim_end_matches('/')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_key_and_shifts_ports_by_rank() {
        let spec: EngineSpec =
            "http://h:8000,events=tcp://h:5557,replay=tcp://h:5657,id=7,dp=2".parse().unwrap();
        assert_eq!((spec.instance_id, spec.dp_size), (Some(7), 2));
        let specs = spec.event_specs();
        assert_eq!(specs[&0].endpoint, "tcp://h:5557");
        assert_eq!(specs[&1].endpoint, "tcp://h:5558");
        assert_eq!(specs[&1].replay_endpoint.as_deref(), Some("tcp://h:5658"));
    }

    #[test]
    fn sockets_on_all_interfaces_are_those_of_the_workers_host() {
        for (url, host) in [
            ("http://10.0.0.7:8000", "10.0.0.7"),
            ("https://engine", "engine"),
            ("http://localhost:8000", "127.0.0.1"),
            ("http://[fe80::1]:8000/v1", "[fe80::1]"),
            ("http://[fe80::1]", "[fe80::1]"),
        ] {
            let text = format!("{url},events=tcp://*:5557,replay=tcp://0.0.0.0:5657,dp=2");
            let specs = text.parse::<EngineSpec>().unwrap().event_specs();
            assert_eq!(specs[&1].endpoint, format!("tcp://{host}:5558"));
            assert_eq!(specs[&1].replay_endpoint, Some(format!("tcp://{host}:5658")));
        }
        let own = "http://10.0.0.7:8000,events=tcp://10.0.0.8:5557".parse::<EngineSpec>().unwrap();
        assert_eq!(own.event_specs()[&0].endpoint, "tcp://10.0.0.8:5557");
    }

    #[test]
    fn two_engines_share_a_socket_if_a_rank_of_each_publishes_there() {
        for (one, other, wanted) in [
            ("events=tcp://h:5557", "events=tcp://h:5557", Some("tcp://h:5557")),
            ("events=tcp://*:5557", "events=tcp://e:5557", Some("tcp://e:5557")),
            ("events=tcp://h:5557,dp=2", "events=tcp://h:5558", Some("tcp://h:5558")),
            ("events=tcp://h:5558", "events=tcp://h:5557,dp=4", Some("tcp://h:5558")),
            ("events=ipc:///tmp/e", "events=ipc:///tmp/e", Some("ipc:///tmp/e")),
            ("events=tcp://h:5557", "events=tcp://h:5558", None),
            ("events=tcp://h:5557,dp=2", "events=tcp://h:5559", None),
            ("events=tcp://h:5557", "events=tcp://i:5557", None),
            ("events=ipc:///tmp/e", "events=ipc:///tmp/f", None),
            ("events=jetstream://ns-b/7/0", "events=jetstream://ns-b/7/0", None),
            ("events=tcp://h:5557", "id=2", None),
        ] {
            let [one, other] = [one, other]
                .map(|keys| format!("http://e:1,{keys}").parse::<EngineSpec>().unwrap());
            assert_eq!(one.shared_socket(&other).as_deref(), wanted, "{one:?} {other:?}");
            assert_eq!(other.shared_socket(&one).as_deref(), wanted, "{other:?} {one:?}");
        }
    }

    #[test]
    fn a_login_in_an_address_is_refused_and_not_told() {
        for text in
            ["http://me:se/cr@et@h:8000", "http://me:se@h:8000,events=no", "http://me:se@h,x"]
        {
            let error = text.parse::<EngineSpec>().unwrap_err().to_string();
            assert!(error.contains("http://***@h") && !error.contains("se"), "{error}");
        }
    }

    #[test]
    fn the_path_that_is_added_anyway_is_left_out() {
        for url in ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"] {
            assert_eq!(base_of(url), "http://h:8000", "{url}");
        }
        assert_eq!(base_of("http://h:8000/llm/v1"), "http://h:8000/llm");
        assert_eq!(base_of("http://h:8000/llmv1"), "http://h:8000/llmv1");
    }

    #[test]
    fn refusals_name_the_field_and_what_came() {
        for (text, wanted) in [
            ("h:8000", "http://host:port"),
            ("ftp://h:8000", "http://host:port"),
            ("http://h:8000,evnts=tcp://h:1", "unknown key \"evnts\""),
            ("http://h:8000,events=udp://h:1", "events must be tcp://host:port"),
            ("http://h:8000,events=nats://subject/7/x", "events must be tcp://host:port"),
            ("http://h:8000,replay=tcp://h:1", "no events="),
            ("http://h:8000,dp=0,events=tcp://h:1", "dp must be a number in 1..=1024"),
            ("http://h:8000,events=tcp://h:65535,dp=2", "above 65535"),
            (
                "http://h:8000,dp=2,events=ipc:///tmp/x",
                "worker events \"ipc:///tmp/x\": with dp=2 it must be tcp://host:port, because rank r",
            ),
        ] {
            let error = text.parse::<EngineSpec>().unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}

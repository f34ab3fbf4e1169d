//! Event endpoints of workers: sockets, and paths at a broker.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::InstanceId;

/// Scheme of events in a component's stream.
const STREAM: &str = "jetstream://";
/// Scheme of events published by a worker with a local index.
const SUBJECT: &str = "nats://";

/// Location of one rank's events: its sockets, or a path at a broker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EventSpec {
    /// Address of its event socket, or its path at a broker.
    pub endpoint: String,
    /// Address of its replay socket.
    pub replay_endpoint: Option<String>,
}

impl EventSpec {
    /// The endpoints of each of `dp_size` ranks, derived from those of rank 0.
    pub fn of_ranks(
        endpoint: Option<&str>,
        replay_endpoint: Option<&str>,
        dp_size: u32,
    ) -> BTreeMap<u32, Self> {
        let of_rank = |endpoint: &str, rank| Self {
            endpoint: shifted(endpoint, rank),
            replay_endpoint: replay_endpoint.map(|address| shifted(address, rank)),
        };
        let ranks = |endpoint| (0..dp_size).map(move |rank| (rank, of_rank(endpoint, rank)));
        endpoint.into_iter().flat_map(ranks).collect()
    }

    /// Whether a broker carries them.
    pub fn is_brokered(&self) -> bool {
        broker_path(&self.endpoint).is_some()
    }

    /// Whether they are in the stream of the worker's component, whose follower delivers them for
    /// all workers.
    pub fn is_in_stream(&self) -> bool {
        self.endpoint.starts_with(STREAM)
    }
}

/// The events that a roster subscribes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hearing {
    /// No events, because overlaps are not used.
    Nothing,
    /// Events from sockets.
    Sockets,
    /// Events from sockets and from a broker's subjects; those in a stream arrive with the stream.
    Broker,
    /// All endpoints that a worker announces.
    All,
}

impl Hearing {
    /// Whether these events are subscribed to.
    pub fn hears(self, events: &EventSpec) -> bool {
        match self {
            Self::Nothing => false,
            Self::Sockets => !events.is_brokered(),
            Self::Broker => !events.is_in_stream(),
            Self::All => true,
        }
    }
}

/// Subject or stream, instance and rank of events at a broker.
pub fn broker_path(endpoint: &str) -> Option<(&str, InstanceId, u32)> {
    let path = endpoint.strip_prefix(STREAM).or_else(|| endpoint.strip_prefix(SUBJECT))?;
    let mut parts = path.rsplitn(3, '/');
    let (rank, instance) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().filter(|name| !name.is_empty()).map(|name| (name, instance, rank))
}

/// The port of a TCP address with a host.
pub fn port_of(address: &str) -> Option<u16> {
    let (host, port) = address.strip_prefix("tcp://")?.rsplit_once(':')?;
    port.parse().ok().filter(|port| *port > 0 && !host.is_empty())
}

/// With data parallelism, rank r publishes on port + r; at a broker the rank is the last part.
pub fn shifted(address: &str, dp_rank: u32) -> String {
    if let (Some(_), Some((place, _))) = (broker_path(address), address.rsplit_once('/')) {
        return format!("{place}/{dp_rank}");
    }
    match (port_of(address), address.rsplit_once(':')) {
        (Some(port), Some((host, _))) if dp_rank > 0 => {
            format!("{host}:{}", u32::from(port) + dp_rank)
        }
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_publish_at_the_next_ports_and_differ_in_the_last_part_at_a_broker() {
        let ranks = EventSpec::of_ranks(Some("tcp://h:5557"), Some("tcp://h:5657"), 2);
        let found: Vec<_> =
            ranks.values().map(|one| (&*one.endpoint, one.replay_endpoint.as_deref())).collect();
        assert_eq!(
            found,
            [("tcp://h:5557", Some("tcp://h:5657")), ("tcp://h:5558", Some("tcp://h:5658"))]
        );
        for place in ["nats://namespace.ns.component.b.kv-events/7", "jetstream://ns-b/7"] {
            let ranks = EventSpec::of_ranks(Some(&format!("{place}/0")), None, 2);
            assert_eq!(ranks[&1].endpoint, format!("{place}/1"));
            assert_eq!(Hearing::Broker.hears(&ranks[&1]), place.starts_with("nats"));
            assert!(!Hearing::Sockets.hears(&ranks[&1]) && Hearing::All.hears(&ranks[&1]));
        }
        assert!(EventSpec::of_ranks(None, None, 2).is_empty());
    }
}

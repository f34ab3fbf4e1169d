//! From start to readiness: recovery from a peer, and the required workers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::http::Uri;
use kvflash_core::catalog::{Catalog, Progress};
use kvflash_core::error::{Error, Result};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cause::Unready;

/// Maximum known peers.
const PEERS_MAX: usize = 64;

/// Number of latest peer errors to keep.
const ERRORS_MAX: usize = 16;

/// State of the recovery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// There was no peer to recover from.
    #[default]
    None,
    /// Waiting for listeners to connect, and for a peer to answer.
    Looking,
    /// Receiving a peer's dump.
    Loading,
    /// Over, with whatever was received.
    Done,
}

impl Phase {
    fn is_running(self) -> bool {
        matches!(self, Self::Looking | Self::Loading)
    }
}

/// Progress of the recovery, as in GET /ready.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Recovery {
    pub phase: Phase,
    /// The peer that sends or sent its dump.
    pub peer: Option<String>,
    /// Received bytes of the dump.
    pub bytes: u64,
    #[serde(flatten)]
    pub progress: Progress,
    /// Why recovery from peers failed.
    pub errors: Vec<String>,
    /// Its duration, so far or in total.
    pub seconds: f64,
}

/// Conditions for this replica's readiness, and its peers.
#[derive(Debug)]
pub(super) struct Startup {
    began: Instant,
    min_workers: usize,
    /// Once open it stays open: a gate for the start, not a health check.
    is_open: AtomicBool,
    peers: Mutex<Vec<String>>,
    recovery: Mutex<Recovery>,
}

impl Startup {
    /// # Errors
    /// `InvalidArgument` for a peer with an invalid URL, or too many peers.
    pub fn new(peers: &[String], min_workers: usize) -> Result<Self> {
        let phase = if peers.is_empty() { Phase::None } else { Phase::Looking };
        let recovery = Mutex::new(Recovery { phase, ..Recovery::default() });
        let (is_open, peers_known) = Default::default();
        let began = Instant::now();
        let startup = Self { began, min_workers, is_open, peers: peers_known, recovery };
        peers.iter().try_for_each(|peer| startup.add_peer(peer))?;
        Ok(startup)
    }

    /// Whether the gate is open. Opens it when nothing is left to wait for.
    pub fn is_ready(&self, catalog: &Catalog) -> bool {
        // Relaxed: a late reader only marks one more response.
        if self.is_open.load(Ordering::Relaxed) {
            return true;
        }
        let is_recovering = self.recovery.lock().phase.is_running();
        let is_ready = !is_recovering && catalog.instance_count() >= self.min_workers;
        if is_ready {
            self.is_open.store(true, Ordering::Relaxed);
        }
        is_ready
    }

    /// The response of GET /ready, and whether it is ready: never while it is about to stop.
    pub fn answer(&self, catalog: &Catalog, is_stopping: bool) -> (bool, Value) {
        let is_ready = self.is_ready(catalog);
        let mut recovery = self.recovery.lock().clone();
        if recovery.phase.is_running() {
            recovery.seconds = self.began.elapsed().as_secs_f64();
        }
        let code = match is_ready {
            _ if is_stopping => Some(Unready::Stopping),
            true => None,
            false if recovery.phase.is_running() => Some(Unready::Recovering),
            false => Some(Unready::WaitingForWorkers),
        };
        let answer = json!({
            "status": code.map_or(json!("ready"), |code| json!(code)),
            "code": code,
            "workers": { "registered": catalog.instance_count(), "wanted": self.min_workers },
            "recovery": recovery,
        });
        (code.is_none(), answer)
    }

    /// Blocks recovered from the peer's dump so far.
    pub fn recovered_blocks(&self) -> usize {
        self.recovery.lock().progress.blocks
    }

    /// Updates the state of the recovery.
    pub fn update(&self, change: impl FnOnce(&mut Recovery)) {
        let mut recovery = self.recovery.lock();
        change(&mut recovery);
        recovery.seconds = self.began.elapsed().as_secs_f64();
    }

    /// Records that recovery from a peer failed.
    pub fn failed(&self, peer: &str, why: &str) {
        tracing::warn!(peer, why, "not recovered from this peer");
        self.update(|recovery| {
            if recovery.errors.len() == ERRORS_MAX {
                recovery.errors.remove(0);
            }
            recovery.errors.push(format!("{peer}: {why}"));
        });
    }

    /// The peers, in the order in which they were added.
    pub fn peers(&self) -> Vec<String> {
        self.peers.lock().clone()
    }

    /// Adds a peer; adding it again has no effect.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid URL; `Overloaded` at the limit.
    pub fn add_peer(&self, url: &str) -> Result<()> {
        let peer = peer_url(url)?;
        let mut peers = self.peers.lock();
        if peers.contains(&peer) {
            return Ok(());
        }
        if peers.len() >= PEERS_MAX {
            return Err(Error::Overloaded(format!("the limit of {PEERS_MAX} peers is reached")));
        }
        peers.push(peer);
        Ok(())
    }

    /// Removes a peer.
    ///
    /// # Errors
    /// `NotFound`, with the text of the published API.
    pub fn remove_peer(&self, url: &str) -> Result<()> {
        let wanted = url.trim_end_matches('/');
        let mut peers = self.peers.lock();
        let before = peers.len();
        peers.retain(|peer| peer != wanted);
        if peers.len() == before {
            return Err(Error::NotFound("peer not found".to_owned()));
        }
        Ok(())
    }
}

/// The base URL of a peer, without a trailing slash.
fn peer_url(url: &str) -> Result<String> {
    let base = url.trim_end_matches('/');
    let is_legal = base.parse::<Uri>().is_ok_and(|uri| {
        let has_host = uri.authority().is_some_and(|authority| {
            is_host(authority.host()) && !authority.as_str().contains('@')
        });
        let has_plain_path =
            uri.path().bytes().all(|byte| is_of_name(byte) || b"/~%".contains(&byte));
        matches!(uri.scheme_str(), Some("http" | "https"))
            && has_host
            && has_plain_path
            && uri.query().is_none()
    });
    if is_legal {
        return Ok(base.to_owned());
    }
    Err(Error::invalid(format!("url must be http://host[:port] of a peer indexer, got {url:?}")))
}

/// A name, an address, or an IPv6 address in brackets; the URI grammar would also allow
/// `http://0*`.
fn is_host(host: &str) -> bool {
    host.starts_with('[')
        || host.starts_with(|first: char| first.is_ascii_alphanumeric())
            && host.bytes().all(is_of_name)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use kvflash_core::catalog::{EngineFacts, Identity, ModelKey, Registration, Source};
    use kvflash_core::ids::Worker;

    fn register(catalog: &Catalog, instance_id: u64) {
        register_rank(catalog, instance_id, 0);
    }

    fn register_rank(catalog: &Catalog, instance_id: u64, dp_rank: u32) {
        let key = ModelKey { model_name: "m".into(), tenant_id: "t".into() };
        let registration = Registration {
            worker: Worker::new(instance_id, dp_rank),
            key,
            block_size: Some(16),
            endpoint: "tcp://127.0.0.1:1".into(),
            replay_endpoint: None,
            capacity_blocks: None,
            identity: Identity::default(),
            facts: EngineFacts::default(),
            source: Source::Zmq,
        };
        catalog.register(registration).unwrap();
    }

    #[test]
    fn the_gate_opens_once_and_stays_open() {
        let catalog = Catalog::default();
        let startup = Startup::new(&["http://a:1/".to_owned()], 2).unwrap();
        register(&catalog, 1);
        let answer = || startup.answer(&catalog, false).1;
        assert_eq!(answer()["status"], "recovering");
        startup.update(|recovery| recovery.phase = Phase::Done);
        assert_eq!(answer()["status"], "waiting_for_workers");
        // Further ranks of the same instance are not further workers.
        register_rank(&catalog, 1, 1);
        assert_eq!(answer()["workers"]["registered"], 1);
        register(&catalog, 2);
        assert_eq!(answer()["status"], "ready");
        let (is_ready, stopping) = startup.answer(&catalog, true);
        assert!(!is_ready && stopping["status"] == "stopping", "{stopping}");
        catalog.unregister(1, "m", None, None).unwrap();
        assert!(startup.is_ready(&catalog));
    }

    #[test]
    fn peers_are_known_once_and_by_their_base() {
        let startup = Startup::new(&[], 0).unwrap();
        startup.add_peer("http://peer:8091").unwrap();
        startup.add_peer("http://peer:8091/").unwrap();
        assert_eq!(startup.peers(), ["http://peer:8091"]);
        startup.remove_peer("http://peer:8091/").unwrap();
        assert_eq!(
            startup.remove_peer("http://peer:8091"),
            Err(Error::NotFound("peer not found".into()))
        );
        for bad in [
            "",
            "peer:8091",
            "ftp://peer:1",
            "http://",
            "http://u@h:1",
            "http://h:1?x=1",
            "http://h*",
            "http://-h",
            "http://h/a*b",
            "ftp://h",
        ] {
            let error = startup.add_peer(bad).unwrap_err().to_string();
            assert!(error.starts_with("url must be") && error.contains(bad), "{error}");
        }
    }

    #[test]
    fn peers_are_limited() {
        let startup = Startup::new(&[], 0).unwrap();
        for n in 0..PEERS_MAX {
            startup.add_peer(&format!("http://peer{n}:1")).unwrap();
        }
        assert!(matches!(startup.add_peer("http://late:1"), Err(Error::Overloaded(_))));
        startup.add_peer("http://peer0:1").unwrap();
    }
}

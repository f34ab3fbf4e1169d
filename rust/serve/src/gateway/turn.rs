//! Fair turns: requests of a model wait until its workers have room, and clients take turns
//! according to past usage. A client is known by its key, or by what its request says of it.

use std::hash::BuildHasher;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName};
use ipnet::IpNet;
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::{
    ClientName, Cost, FairConfig, FairQueue, FairStats, Grant, Refusal, Standing, Ticket, Used,
};
use kvflash_core::select::Usage;
use kvflash_core::settings::Concern;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::serve::client_network;
use crate::{FairnessSettings, Reject};

/// How clients share capacity.
#[derive(Debug, Clone)]
pub struct FairnessOptions {
    /// Order, prices and limits; see [`FairConfig`].
    pub queue: FairConfig,
    /// Concurrent requests per healthy worker of a model; at least 1.
    pub max_running: usize,
    /// Clients with a share other than 1.
    pub weights: Vec<(String, f64)>,
    /// Identity of clients without a key.
    pub identity: Identity,
}

impl FairnessOptions {
    /// The options from the settings, for this limit of requests in flight; `None` without fair
    /// queueing, and then a warning for each setting that has no effect.
    ///
    /// # Errors
    /// `Config` for an unknown discipline or identity.
    pub fn of(settings: FairnessSettings, max_requests: usize) -> Result<Option<Self>> {
        if settings.fairness == "none" {
            for name in settings.changed() {
                tracing::warn!(
                    "{name} has no effect without --fairness: no request waits for a turn; add --fairness vtc-fair"
                );
            }
            return Ok(None);
        }
        let queue = FairConfig {
            discipline: settings.fairness.parse()?,
            cached_share: settings.fairness_cached_share,
            max_queued: max_requests,
            max_queued_per_client: settings.fairness_queue_limit,
            max_wait_ms: settings.fairness_queue_timeout.as_millis() as u64,
        };
        let weights = settings.fairness_weight;
        let identity = settings.fairness_identity.parse()?;
        Ok(Some(Self { queue, max_running: settings.fairness_max_running, weights, identity }))
    }

    /// Check every field.
    ///
    /// # Errors
    /// `Config` or `InvalidArgument`, naming the first field that is out of range.
    pub fn check(&self) -> Result<()> {
        if self.max_running == 0 {
            return Err(Error::Config("--fairness-max-running must be at least 1, got 0".into()));
        }
        self.new_queue().map(|_| ())
    }

    fn new_queue(&self) -> Result<FairQueue<Waiter>> {
        let mut queue = FairQueue::new(self.queue.clone())?;
        for (client, weight) in &self.weights {
            queue.set_weight(client, *weight)?;
        }
        Ok(queue)
    }
}

type Waiter = oneshot::Sender<Turn>;

/// The waiting requests of one model.
///
/// # Consistency
/// A request that may run never stays in the queue: freed room is assigned at once.
pub(crate) struct WaitingRoom {
    clock: Arc<dyn Clock>,
    pub options: FairnessOptions,
    state: Mutex<State>,
}

struct State {
    queue: FairQueue<Waiter>,
    running: usize,
    /// Healthy workers at the last check; one if there are none, so that requests proceed and learn
    /// why they can't be served.
    workers: usize,
}

impl WaitingRoom {
    /// # Errors
    /// As [`FairnessOptions::check`].
    pub fn new(options: FairnessOptions, clock: Arc<dyn Clock>) -> Result<Self> {
        let state = Mutex::new(State { queue: options.new_queue()?, running: 0, workers: 1 });
        Ok(Self { clock, options, state })
    }

    /// Waits for a turn. A cancelled wait leaves the queue.
    ///
    /// # Errors
    /// 429 if too many wait, 503 after a timeout, both with Retry-After; 400 for a name that is too
    /// long. With the cause under which `FrontendMetrics::refused` counts it.
    pub async fn turn(
        self: &Arc<Self>,
        client: ClientName<'_>,
        cost: Cost,
        standing: Standing,
        workers: usize,
    ) -> Result<Turn, (&'static str, Reject)> {
        let (sender, receiver) = oneshot::channel();
        let now_ms = self.clock.now_ms();
        let pushed = self.state.lock().queue.push(client, sender, cost, standing, now_ms);
        let ticket = pushed.map_err(|refused| {
            let retry_after_s = Some(refused.retry_after_ms.div_ceil(1_000) as u32);
            let (cause, retry_after_s) = match refused.refusal {
                Refusal::Name(_) => ("invalid", None),
                Refusal::ClientQueueFull => ("client_limit", retry_after_s),
                Refusal::QueueFull | Refusal::TooManyClients => ("no_turn", retry_after_s),
            };
            (cause, Reject { retry_after_s, ..Reject::from(refused.error) })
        })?;
        let mut waiting = Waiting { room: self, ticket, receiver };
        self.call(workers);
        let max_wait = Duration::from_millis(self.options.queue.max_wait_ms);
        match tokio::time::timeout(max_wait, &mut waiting.receiver).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => {
                // A timeout counts as a timeout, not as a departure.
                let _late = self.state.lock().queue.expire(self.clock.now_ms());
                let error = Error::AllBusy(format!(
                    "the request got no turn within {} s (--fairness-queue-timeout)",
                    max_wait.as_secs_f64()
                ));
                Err(("no_turn", error.into()))
            }
        }
    }

    /// Admits the requests that fit while `workers` workers are healthy.
    pub fn call(self: &Arc<Self>, workers: usize) {
        self.state.lock().workers = workers.max(1);
        self.call_next();
    }

    fn call_next(self: &Arc<Self>) {
        loop {
            let granted = {
                let mut state = self.state.lock();
                let limit = self.options.max_running.saturating_mul(state.workers);
                if state.running >= limit {
                    return;
                }
                let now_ms = self.clock.now_ms();
                let granted = state.queue.pop(now_ms, |_| true);
                // A request with a timeout notices it by itself.
                let _late = state.queue.expire(now_ms);
                let Some(granted) = granted else { return };
                state.running += 1;
                granted
            };
            let turn = Turn { room: Arc::clone(self), grant: granted.grant, end: Mutex::default() };
            // A request that has just left returns the turn.
            let _left = granted.item.send(turn);
        }
    }

    pub fn stats(&self) -> FairStats {
        self.state.lock().queue.stats()
    }
}

/// A place in the queue, given up when dropped.
struct Waiting<'a> {
    room: &'a Arc<WaitingRoom>,
    ticket: Ticket,
    receiver: oneshot::Receiver<Turn>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // None if it got its turn, or timed out.
        let _waited = self.room.state.lock().queue.cancel(self.ticket);
    }
}

#[derive(Debug, Default)]
struct End {
    charged: u64,
    /// A worker has the request, or had it when the client left.
    is_charged: bool,
    usage: Usage,
}

/// A request that may run. Dropping it makes room for the next one.
pub(crate) struct Turn {
    room: Arc<WaitingRoom>,
    grant: Grant,
    end: Mutex<End>,
}

impl Turn {
    /// Whether the request is charged when it ends.
    pub fn charges(&self, is_charged: bool) {
        self.end.lock().is_charged = is_charged;
    }

    /// Sets the number of tokens generated so far.
    pub fn generated(&self, tokens: u64) {
        let more = {
            let mut end = self.end.lock();
            let more = tokens.saturating_sub(end.charged);
            end.charged += more;
            more
        };
        if more > 0 {
            self.room.state.lock().queue.tokens(self.grant, more);
        }
    }

    /// Records the engine's usage counts.
    pub fn used(&self, usage: Usage) {
        self.end.lock().usage = usage;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let end = std::mem::take(self.end.get_mut());
        let used = if end.is_charged {
            let Usage { input_tokens, cached_tokens, output_tokens } = end.usage;
            Used { input_tokens: input_tokens.zip(cached_tokens), output_tokens }
        } else {
            Used { input_tokens: Some((0, 0)), output_tokens: Some(0) }
        };
        {
            let mut state = self.room.state.lock();
            state.queue.finish(self.grant, used);
            state.running -= 1;
        }
        self.room.call_next();
    }
}

/// Longest name in a header, in bytes; a longer one is truncated.
const MAX_NAME_BYTES: usize = 256;

/// Identity of clients without a key of this server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Identity {
    /// Its `Authorization`, which is secret; without one its `user`, else its address.
    #[default]
    Authorization,
    /// The header or field `user`, else as above: for servers behind a gateway that sets it.
    User,
    /// A header that a gateway sets, else as the first.
    Header(HeaderName),
}

impl FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Config(format!(
                "--fairness-identity must be authorization, user or header:NAME, got {text:?}"
            ))
        };
        match text.split_once(':') {
            None if text == "authorization" => Ok(Self::Authorization),
            None if text == "user" => Ok(Self::User),
            Some(("header", name)) => name.parse().map(Self::Header).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl Identity {
    /// The client of a request that calls itself `user`.
    pub(crate) fn client(
        &self,
        user: Option<&str>,
        headers: &HeaderMap,
        address: Option<IpAddr>,
    ) -> Client {
        // Each process draws its own seed, so that a client cannot choose a key that shares another's turns.
        static KEYS: OnceLock<std::hash::RandomState> = OnceLock::new();
        let hashed = |bytes: &[u8]| {
            let hash = KEYS.get_or_init(std::hash::RandomState::new).hash_one(bytes);
            format!("key-{hash:016x}")
        };
        let own = || user.map(str::to_owned);
        let first = match self {
            Self::Authorization => None,
            Self::User => own(),
            Self::Header(name) => headers.get(name).map(|value| {
                let text = String::from_utf8_lossy(value.as_bytes());
                let fits = |at: &usize| text.is_char_boundary(*at);
                let end = (0..=text.len().min(MAX_NAME_BYTES)).rev().find(fits).unwrap_or(0);
                text[..end].to_owned()
            }),
        };
        if let Some(name) = first {
            return Client { group: None, name };
        }
        let said = headers.get(AUTHORIZATION).map(|value| hashed(value.as_bytes())).or_else(own);
        let name = said.or_else(|| address.map(|address| address.to_string()));
        let group = address.map(|address| match client_network(address) {
            IpNet::V4(one) => one.addr().to_string(),
            IpNet::V6(network) => network.to_string(),
        });
        Client { group, name: name.unwrap_or_default() }
    }
}

/// Whose turn is charged for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Where it comes from, if that is all that is certain: names that a client may choose share the turns of one
    /// client.
    group: Option<String>,
    name: String,
}

impl Client {
    /// The owner of a key of this server.
    pub fn known(id: &str) -> Self {
        Self { group: None, name: id.to_owned() }
    }

    pub fn as_name(&self) -> ClientName<'_> {
        ClientName { group: self.group.as_deref(), client: &self.name }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

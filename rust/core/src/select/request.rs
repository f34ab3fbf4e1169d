//! A request for a worker, the same whichever entrance it came through.

use std::sync::Arc;

use super::ask::{Ask, Pin, Prompt};
use super::router::RouteOverride;
use crate::error::Result;
use crate::fair::Wish;
use crate::ids::{InstanceId, Worker};
use crate::policy::session::check_key;
use crate::policy::{Advice, Session};

/// What routing knows of a request. An entrance makes it once, before any worker is chosen.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The name under which the journal keeps its decisions; `None` keeps none.
    pub request_id: Option<String>,
    /// What its client calls the model, where that is another name.
    pub alias: Option<Arc<str>>,
    /// Its prompt, hashed.
    pub prompt: Arc<Prompt>,
    /// The prompt's tokens, for policies; empty while unknown.
    pub tokens: Arc<Vec<u32>>,
    /// The prompt's text, UTF-8, for policies; empty where none asks.
    pub text: Arc<[u8]>,
    /// Whose request it is.
    pub user: Option<Arc<str>>,
    /// The worker that its session was told to come back to.
    pub session_worker: Option<Worker>,
    /// The key that all requests of its session carry.
    pub session_key: Option<Arc<str>>,
    /// What it wants otherwise than the configuration.
    pub overrides: RouteOverride,
    /// The worker that must take it.
    pub pin: Option<Pin>,
    /// The only workers that may take it, ascending; `None` for all.
    pub allowed: Option<Vec<InstanceId>>,
    /// Leading blocks on each worker's device as a remote indexer tells, ascending by worker; `None` where
    /// the selector's own index knows.
    pub overlaps: Option<Vec<(Worker, u32)>>,
    /// How urgent it is among those that wait.
    pub wish: Wish,
    /// Tokens that its answer is expected to have.
    pub expected_output_tokens: Option<u64>,
    /// Its answer comes as a whole: nobody sees the first token.
    pub is_whole: bool,
}

impl Request {
    /// Call `act` with the question that a selector is asked. `is_eligible` says which workers its entrance
    /// would send it to, `None` stands for all; `advice` is what a policy outside the core said of it.
    pub fn ask<T>(
        &self,
        is_eligible: Option<&dyn Fn(Worker) -> bool>,
        advice: Option<&Advice>,
        act: impl FnOnce(&Ask<'_>) -> T,
    ) -> T {
        let is_allowed = |worker| {
            self.allows(worker) && is_eligible.is_none_or(|is_eligible| is_eligible(worker))
        };
        let is_restricted = self.allowed.is_some() || is_eligible.is_some();
        act(&Ask {
            overrides: self.overrides,
            allowed: if is_restricted { Some(&is_allowed) } else { None },
            pin: self.pin,
            overlaps: self.overlaps.as_deref(),
            expected_output_tokens: self.expected_output_tokens,
            request_id: self.request_id.as_deref(),
            alias: self.alias.as_deref(),
            text: &self.text,
            token_ids: &self.tokens,
            user: self.user.as_deref(),
            is_whole: self.is_whole,
            session: Session { worker: self.session_worker, key: self.session_key.as_deref() },
            advice,
            ..Ask::new(&self.prompt)
        })
    }

    /// Check what it says of its client.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error) for a `user` or `session_key` of more than 256 bytes.
    pub fn check_client(&self) -> Result<()> {
        check_key("user", self.user.as_deref())?;
        check_key("session_key", self.session_key.as_deref())
    }

    /// Whether its list of workers has `worker`; without a list it has all.
    pub fn allows(&self, worker: Worker) -> bool {
        let id = worker.instance_id;
        self.allowed.as_ref().is_none_or(|ids| ids.binary_search(&id).is_ok())
    }

    /// Whether it may go to every worker.
    pub fn is_open(&self) -> bool {
        self.pin.is_none() && self.allowed.is_none()
    }

    /// What policies that go by text take of `tokens`: four bytes each, the most significant first.
    pub fn text_of(tokens: &[u32]) -> Arc<[u8]> {
        tokens.iter().flat_map(|id| id.to_be_bytes()).collect()
    }
}

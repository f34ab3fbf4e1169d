//! A request for a worker, independent of its entrance.

use std::sync::Arc;

use super::ask::{Ask, Pin, Prompt};
use super::router::RouteOverride;
use crate::error::Result;
use crate::fair::Wish;
use crate::ids::{InstanceId, Worker};
use crate::policy::session::check_key;
use crate::policy::{Advice, Session};

/// The routing inputs of a request. An entrance creates it once, before any worker is chosen.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The request's name in the journal; `None` keeps no record.
    pub request_id: Option<String>,
    /// The client's name for the model, if it is an alias.
    pub alias: Option<Arc<str>>,
    /// Its prompt, hashed.
    pub prompt: Arc<Prompt>,
    /// The prompt's tokens, for policies; empty while unknown.
    pub tokens: Arc<Vec<u32>>,
    /// The prompt's text, UTF-8, for policies; empty if none needs it.
    pub text: Arc<[u8]>,
    /// The request's user.
    pub user: Option<Arc<str>>,
    /// The worker of its session, as returned to the client.
    pub session_worker: Option<Worker>,
    /// A key that all requests of its session share.
    pub session_key: Option<Arc<str>>,
    /// Settings that it overrides.
    pub overrides: RouteOverride,
    /// The worker that must take it.
    pub pin: Option<Pin>,
    /// The only workers that may take it, ascending; `None` for all.
    pub allowed: Option<Vec<InstanceId>>,
    /// Leading blocks on each worker's device according to a remote indexer, ascending by worker;
    /// `None` to use the selector's own index.
    pub overlaps: Option<Vec<(Worker, u32)>>,
    /// Its priority in the queue.
    pub wish: Wish,
    /// Expected tokens of its answer.
    pub expected_output_tokens: Option<u64>,
    /// Whether its answer is not streamed, so that the first token is not observed.
    pub is_whole: bool,
}

impl Request {
    /// Calls `act` with the input of a selector. `is_eligible` selects the workers that the
    /// entrance allows, `None` stands for all; `advice` is that of a policy outside the core.
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

    /// Checks the fields about its client.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error) for a `user` or `session_key` of more than 256 bytes.
    pub fn check_client(&self) -> Result<()> {
        check_key("user", self.user.as_deref())?;
        check_key("session_key", self.session_key.as_deref())
    }

    /// Whether its list of workers contains `worker`; true without a list.
    pub fn allows(&self, worker: Worker) -> bool {
        let id = worker.instance_id;
        self.allowed.as_ref().is_none_or(|ids| ids.binary_search(&id).is_ok())
    }

    /// Whether it may use every worker.
    pub fn is_open(&self) -> bool {
        self.pin.is_none() && self.allowed.is_none()
    }

    /// The text of `tokens` for policies that need text: four bytes each, most significant first.
    pub fn text_of(tokens: &[u32]) -> Arc<[u8]> {
        tokens.iter().flat_map(|id| id.to_be_bytes()).collect()
    }
}

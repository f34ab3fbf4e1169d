//! A request for a worker, and the input of a selection that is made of it.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashMap;

use super::busy::BusyTable;
use super::config::QueueThreshold;
use super::router::RouteOverride;
use crate::catalog::PromptNames;
use crate::error::{Error, Result};
use crate::fair::Wish;
use crate::hash;
use crate::ids::{InstanceId, Worker};
use crate::policy::session::check_key;
use crate::policy::{Advice, EngineMetrics, Session};

named! {
    /// How far the tokens of a prompt are known.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub enum TokenSource {
        /// Not at all: its length is a guess.
        #[default]
        Unknown = "unknown",
        /// Those that it begins with, which an engine told with its answer to an earlier turn: its length is a guess.
        Taught = "taught",
        /// All of them.
        Known = "known",
    }
}

/// A prompt as selection needs it: hashed once, however often a worker is chosen for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Length in tokens; at least 1.
    pub isl_tokens: u64,
    /// How far its tokens are known: the length is counted, or guessed.
    pub source: TokenSource,
    /// Tokens in a block when it was hashed; 0 when that was not known.
    pub block_size: u32,
    /// Identity in the local hashes.
    pub seed: u64,
    /// Local hashes of its full blocks, as far as its tokens are known.
    pub locals: Vec<u64>,
    /// Sequence hashes of the same blocks.
    pub sequence_hashes: Vec<u64>,
    /// Names of its blocks at engines with several cache groups.
    pub names: PromptNames,
}

impl Prompt {
    /// A prompt with unknown tokens, of about `isl_tokens`: routed by load alone.
    pub fn unknown(isl_tokens: u64) -> Self {
        Self { isl_tokens: isl_tokens.max(1), ..Self::default() }
    }

    /// A prompt of `tokens`, in blocks of `block_size` (0 while unknown: no hashes).
    ///
    /// # Cost
    /// O(tokens).
    pub fn of_tokens(tokens: &[u32], block_size: u32, seed: u64) -> Self {
        let locals = match block_size {
            0 => Vec::new(),
            size => hash::local_hashes(tokens, size, seed),
        };
        Self { isl_tokens: tokens.len() as u64, ..Self::of_hashes(locals, block_size, seed) }
    }

    /// A prompt of full blocks that the caller has hashed.
    ///
    /// # Cost
    /// O(blocks).
    pub fn of_hashes(locals: Vec<u64>, block_size: u32, seed: u64) -> Self {
        let mut sequence_hashes = Vec::new();
        hash::sequence_hashes_into(&locals, &mut sequence_hashes);
        let isl_tokens = locals.len() as u64 * u64::from(block_size);
        let names = PromptNames::default();
        Self {
            isl_tokens,
            source: TokenSource::Known,
            block_size,
            seed,
            locals,
            sequence_hashes,
            names,
        }
    }

    /// Whether all of its tokens are known, and its length is counted.
    pub fn are_tokens_known(&self) -> bool {
        self.source == TokenSource::Known
    }

    /// Blocks of an overlap that an engine can reuse: the last token is always computed anew.
    ///
    /// # Source
    /// vLLM v1 caps its hit at `prompt_tokens - 1`.
    pub fn reusable_blocks(&self, overlap_blocks: u32) -> u64 {
        match self.block_size {
            0 => 0,
            size => u64::from(overlap_blocks).min((self.isl_tokens.max(1) - 1) / u64::from(size)),
        }
    }

    /// Tokens of an overlap that an engine can reuse.
    pub fn reusable_tokens(&self, overlap_blocks: u32) -> u64 {
        self.reusable_blocks(overlap_blocks) * u64::from(self.block_size)
    }
}

/// The worker that must take the request, at any cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// The engine.
    pub instance_id: InstanceId,
    /// One of its ranks; `None` lets the policy choose.
    pub dp_rank: Option<u32>,
}

impl Pin {
    /// The pin of a request that may name a worker and one of its ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank without a worker.
    pub fn of(worker_id: Option<InstanceId>, dp_rank: Option<u32>) -> Result<Option<Self>> {
        match (worker_id, dp_rank) {
            (Some(instance_id), dp_rank) => Ok(Some(Self { instance_id, dp_rank })),
            (None, Some(rank)) => Err(Error::invalid(format!(
                "dp_rank {rank} needs worker_id: add it, or leave dp_rank out"
            ))),
            (None, None) => Ok(None),
        }
    }

    /// Whether the pin includes `worker`.
    pub fn fits(&self, worker: Worker) -> bool {
        self.instance_id == worker.instance_id
            && self.dp_rank.is_none_or(|rank| rank == worker.dp_rank)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.instance_id)?;
        self.dp_rank.map_or(Ok(()), |rank| write!(f, " rank {rank}"))
    }
}

/// A request for a worker.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Settings that this request overrides.
    pub overrides: RouteOverride,
    /// Workers that may take it; `None` for all. Called under the router's lock, so it must use
    /// only its own data.
    pub allowed: Option<&'a dyn Fn(Worker) -> bool>,
    /// The worker that must take it.
    pub pin: Option<Pin>,
    /// Blocks on the workers' devices according to a remote index, ascending by worker, instead of
    /// those in the selector's own index.
    pub overlaps: Option<&'a [(Worker, u32)]>,
    /// Expected tokens of the answer: if generated blocks count, their weight fades towards its
    /// end.
    pub expected_output_tokens: Option<u64>,
    /// Whether the caller can wait: then `MustWait` is returned instead of a booking if no worker
    /// has room to prefill.
    pub waits: bool,
    /// The request's name in the journal; `None` keeps no record.
    pub request_id: Option<&'a str>,
    /// The client's name for the model, if it is an alias; for the journal.
    pub alias: Option<&'a str>,
    /// Text of the prompt in UTF-8, without the surrounding JSON, for policies; empty if none needs
    /// it.
    pub text: &'a [u8],
    /// The model's own token ids, for policies; empty while unknown.
    pub token_ids: &'a [u32],
    /// The request's user, if known.
    pub user: Option<&'a str>,
    /// Whether the answer is not streamed, so that its first token is not observed.
    pub is_whole: bool,
    /// Whether the same request was routed before, to a worker that failed.
    pub is_retry: bool,
    /// The session of the request.
    pub session: Session<'a>,
    /// Advice of a policy outside the core; see [`Selector::question`](super::Selector::question).
    pub advice: Option<&'a Advice>,
    /// Inputs that a selector fills in itself.
    pub known: Known<'a>,
}

/// What is known besides the load when a worker is chosen. Unregistered workers are skipped,
/// because the index may be behind or ahead.
#[derive(Clone, Copy, Default)]
pub struct Known<'a> {
    /// Leading blocks of the prompt that workers hold; 0 for workers that are not listed.
    pub overlaps: &'a [(Worker, u32)],
    /// Leading blocks that workers are predicted to hold soon; those beyond `overlaps` count as
    /// overlap and are reported separately.
    pub predictions: &'a [(Worker, u32)],
    /// Leading blocks that workers reach with host memory, and with disks; at least as many as on
    /// the device. Blocks beyond the device save a share, see [`TierWeights`](super::TierWeights).
    pub tiers: &'a [(Worker, [u32; 2])],
    /// The signals of busy workers; `None` does not leave them out.
    pub busy: Option<&'a BusyTable>,
    /// The threshold above which the request waits, if it can.
    pub queue: Option<QueueThreshold>,
    /// The engines' reports; `None` without any.
    pub metrics: Option<&'a HashMap<Worker, EngineMetrics>>,
    /// The workers that compete for the request, by model and tenant; see [`Context`](crate::policy::Context).
    pub pool: &'a str,
    /// Whether the overlaps come from engines' events.
    pub is_indexed: bool,
    /// Instances that take no new requests, ascending.
    pub draining: &'a [InstanceId],
    /// The pin that was ignored because its worker is one of these.
    pub unpinned: Option<Pin>,
}

impl<'a> Ask<'a> {
    /// For `prompt`, without options.
    pub fn new(prompt: &'a Prompt) -> Self {
        Self {
            prompt,
            overrides: RouteOverride::default(),
            allowed: None,
            pin: None,
            overlaps: None,
            expected_output_tokens: None,
            waits: false,
            request_id: None,
            alias: None,
            text: &[],
            token_ids: &[],
            user: None,
            is_whole: false,
            is_retry: false,
            session: Session::default(),
            advice: None,
            known: Known::default(),
        }
    }

    /// Whether `worker` may take it.
    pub(super) fn allows(&self, worker: Worker) -> bool {
        self.pin.is_none_or(|pin| pin.fits(worker))
            && self.allowed.is_none_or(|allowed| allowed(worker))
    }
}

/// The routing inputs of a request. An entrance creates it once, before any worker is chosen.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The request's name in the journal; `None` keeps no record.
    pub request_id: Option<String>,
    /// The client's name for the model, if it is an alias.
    pub alias: Option<Arc<str>>,
    /// Its prompt, hashed.
    pub prompt: Arc<Prompt>,
    /// The prompt's tokens, for policies; may be empty while unknown, or if none needs the text.
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

    /// Adds the prompt for policies that need it, see `Selector::needs_text`: its tokens, and its
    /// text or what stands for it.
    ///
    /// # Cost
    /// O(tokens); without a text about 5 ns a token.
    pub fn tell_prompt(&mut self, tokens: Vec<u32>, text: Option<String>) {
        self.text = match text {
            Some(text) => text.into_bytes().into(),
            None => Self::text_of(&tokens),
        };
        self.tokens = tokens.into();
    }

    /// The text of `tokens` for policies that need text: four bytes each, most significant first.
    pub fn text_of(tokens: &[u32]) -> Arc<[u8]> {
        tokens.iter().flat_map(|id| id.to_be_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_never_reused() {
        let tokens: Vec<u32> = (0..9).collect();
        let blocks = |count: usize| Prompt::of_tokens(&tokens[..count], 4, 0).reusable_blocks(2);
        assert_eq!([4, 7, 8, 9].map(blocks), [0, 1, 1, 2]);
    }
}

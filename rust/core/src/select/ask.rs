//! What a selection is asked for.

use std::fmt;

use super::router::{Gate, RouteOverride};
use crate::catalog::PromptNames;
use crate::hash;
use crate::ids::{InstanceId, Worker};
use crate::policy::{Advice, EngineMetrics, Session};

/// A prompt as selection needs it: hashed once, however often a worker is chosen for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Length in tokens; at least 1.
    pub isl_tokens: u64,
    /// Whether the length is counted, not guessed.
    pub are_tokens_known: bool,
    /// Tokens in a block when it was hashed; 0 when that was not known.
    pub block_size: u32,
    /// Identity that the local hashes were made with.
    pub seed: u64,
    /// Local hashes of its full blocks.
    pub locals: Vec<u64>,
    /// Sequence hashes of its full blocks.
    pub sequence_hashes: Vec<u64>,
    /// What engines with several cache groups call its blocks.
    pub names: PromptNames,
}

impl Prompt {
    /// A prompt whose tokens are not known, of about `isl_tokens`: routed by load alone.
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

    /// A prompt of full blocks that somebody else has hashed.
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
            are_tokens_known: true,
            block_size,
            seed,
            locals,
            sequence_hashes,
            names,
        }
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

/// The worker that must take the request, whatever it costs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// The engine.
    pub instance_id: InstanceId,
    /// One of its ranks; `None` lets the policy choose between them.
    pub dp_rank: Option<u32>,
}

impl Pin {
    /// Whether `worker` is meant.
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
    /// What this request wants otherwise than the configuration.
    pub overrides: RouteOverride,
    /// Workers that may take it; `None` for all. Called under the router's lock: it answers from what it
    /// holds.
    pub allowed: Option<&'a dyn Fn(Worker) -> bool>,
    /// The worker that must take it.
    pub pin: Option<Pin>,
    /// What workers hold on their devices as a remote index tells, ascending by worker, instead of what the
    /// selector's own one knows.
    pub overlaps: Option<&'a [(Worker, u32)]>,
    /// Tokens that the answer is expected to have: what it has generated fades towards its end, where
    /// generated blocks count.
    pub expected_output_tokens: Option<u64>,
    /// The caller can wait: `MustWait` where no worker has room to prefill, instead of a booking.
    pub waits: bool,
    /// The name under which the journal keeps the decision; `None` keeps nothing.
    pub request_id: Option<&'a str>,
    /// What its client calls the model, where that is another name; for the journal.
    pub alias: Option<&'a str>,
    /// Text of the prompt, UTF-8, without the JSON around it, for policies; empty when nobody needs it.
    pub text: &'a [u8],
    /// The model's own token ids, for policies; empty while unknown.
    pub token_ids: &'a [u32],
    /// Whose request it is; `None` for nobody's.
    pub user: Option<&'a str>,
    /// The answer comes as a whole, so that nobody sees its first token.
    pub is_whole: bool,
    /// What ties it to earlier requests.
    pub session: Session<'a>,
    /// What a policy outside the core said of it; see [`Selector::question`](super::Selector::question).
    pub advice: Option<&'a Advice>,
    /// What a selector finds out itself.
    pub known: Known<'a>,
}

/// What is known beside the load when a worker is chosen. Workers that are not registered are passed over:
/// the index may be behind or ahead.
#[derive(Clone, Copy, Default)]
pub struct Known<'a> {
    /// Leading blocks of the prompt that workers hold; none for workers that are not named.
    pub overlaps: &'a [(Worker, u32)],
    /// Leading blocks that workers are predicted to hold soon; what goes beyond `overlaps` counts as
    /// overlap too, and is told apart.
    pub predictions: &'a [(Worker, u32)],
    /// Leading blocks that workers reach with host memory, and with disks: each as many as on the device or
    /// more. What goes beyond the former saves a share, see [`TierWeights`](super::TierWeights).
    pub tiers: &'a [(Worker, [u32; 2])],
    /// Who is too busy for any request; `None` for nobody.
    pub gate: Option<&'a dyn Gate>,
    /// What engines report of themselves; `None` where none does. Called under the router's lock:
    /// it answers from what it holds and does not come back to the router.
    pub metrics: Option<&'a dyn Fn(Worker) -> EngineMetrics>,
    /// The model that was asked for.
    pub model: &'a str,
    /// The overlaps come from engines' events.
    pub is_indexed: bool,
    /// Instances that take no new requests, ascending.
    pub draining: &'a [InstanceId],
    /// The pin that was left out because its worker is one of these.
    pub unpinned: Option<Pin>,
}

impl<'a> Ask<'a> {
    /// For `prompt`, with nothing special.
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

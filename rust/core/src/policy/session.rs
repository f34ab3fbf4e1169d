//! `session-affinity`: a session stays on the worker and rank where it began.
//!
//! A session is recognized by the worker that the client names, by its key, or by a prompt that
//! begins with an answered one. If its worker can't take a request, the session moves to another
//! one and stays there.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::general_purpose::{GeneralPurpose, PAD};
use parking_lot::Mutex;
use rand::RngCore;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::by_metric::choose_lowest;
use super::contract::{Candidates, Context, RoutePolicy, Sample};
use super::cost::{CandidateCost, Stage};
use super::decision::{Choice, Reason};
use crate::error::{Error, Result};
use crate::ids::Worker;
use crate::load::recency::Recent;

/// Longest session key.
pub const MAX_KEY_BYTES: usize = 256;

/// Longest session id that is decoded.
const MAX_ID_BYTES: usize = 512;

/// Other routers' ids may end in bits that mean nothing.
const BASE64: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, PAD.with_decode_allow_trailing_bits(true));

/// Checks the length of a client's or a session's name.
///
/// # Errors
/// [`Error::InvalidArgument`] with the field, its length and the limit.
pub fn check_key(field: &str, key: Option<&str>) -> Result<()> {
    let bytes = key.map_or(0, str::len);
    if bytes <= MAX_KEY_BYTES {
        return Ok(());
    }
    Err(Error::invalid(format!("{field} may have at most {MAX_KEY_BYTES} bytes, got {bytes}")))
}

#[derive(Debug)]
pub(super) struct SessionAffinity {
    pins: Mutex<Pins>,
}

impl SessionAffinity {
    /// The policy, which remembers so many conversations.
    pub(super) fn new(max_sessions: usize) -> Self {
        Self { pins: Mutex::new(Pins(Recent::new(max_sessions))) }
    }
}

impl RoutePolicy for SessionAffinity {
    fn name(&self) -> &str {
        "session-affinity"
    }

    fn needs_tokens(&self) -> bool {
        true
    }

    fn prepare(&self, context: &Context<'_>) -> Result<()> {
        check_key("session_key", context.session.key)
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        candidates.fill(costs, |index| f64::from(candidates.requests(index)));
        let place_of = |wanted: Worker| candidates.list.iter().position(|c| c.worker == wanted);
        let pinned = |index, reason| Some(Choice::plain(index, 1, reason));
        if let Some(index) = context.session.worker.and_then(place_of) {
            return pinned(index, Reason::SessionHeader);
        }
        let key = context.session.key.filter(|key| !key.is_empty());
        if let Some(key) = key.filter(|key| key.len() <= MAX_KEY_BYTES) {
            return pinned(rendezvous(key, candidates)?, Reason::SessionKey);
        }
        let known = self.pins.lock().longest(context);
        if let Some(index) = known.and_then(place_of) {
            return pinned(index, Reason::SessionPrefix);
        }
        let counts: Vec<_> = (0..candidates.len())
            .map(|index| Some(f64::from(candidates.requests(index))))
            .collect();
        choose_lowest(&counts, rng)
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        if let Some(&last) = context.sequence_hashes.last() {
            let worker = candidates.list[choice.index].worker;
            let mut pins = self.pins.lock();
            pins.follow(context);
            pins.pin(context, last, worker);
        }
    }

    fn removed(&self, worker: Worker) {
        self.pins.lock().forget(worker);
    }

    fn samples(&self, _now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        let pins = self.pins.lock();
        visit(Sample::plain("session_pins", "Sessions that have a worker", pins.0.len() as f64));
        let help = "Sessions that lost their worker at SESSION_MAX_SESSIONS";
        visit(Sample::plain("session_evicted_pins_total", help, pins.0.evicted() as f64));
    }
}

/// The candidate that `key` maps to: the one with the highest hash of itself and the key. If it
/// leaves, only its own keys move.
fn rendezvous(key: &str, candidates: &Candidates<'_>) -> Option<usize> {
    let key = fnv_1a(key.bytes());
    let rank = |worker: Worker| {
        mixed(key ^ mixed(worker.instance_id ^ mixed(u64::from(worker.dp_rank) + 1)))
    };
    let ranked = candidates.list.iter().enumerate();
    ranked.max_by_key(|(_, one)| (rank(one.worker), one.worker)).map(|(index, _)| index)
}

fn fnv_1a(bytes: impl Iterator<Item = u8>) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    bytes.fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// Mixes all bits, so that comparing hashes as numbers is fair. The constants are those of
/// MurmurHash3's finalizer.
fn mixed(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// A prompt with this many continuations is a common opening, not a conversation.
const FORKS_MAX: u8 = 4;

/// An answered prompt.
#[derive(Debug, Clone, Copy)]
struct Pin {
    worker: Worker,
    /// The block after it in the latest prompt that began with it.
    next: Option<u64>,
    /// How often that block changed, including the first.
    forks: u8,
}

/// The last full block of prompts, and the workers that answered them.
#[derive(Debug)]
struct Pins(Recent<u64, Pin>);

impl Pins {
    /// A conversation has a worker for its prefills and another one for the rest.
    fn key(context: &Context<'_>, hash: u64) -> u64 {
        let is_prefill = context.request.stage == Stage::Prefill;
        xxh3_64_with_seed(context.model.as_bytes(), if is_prefill { !hash } else { hash })
    }

    /// The longest conversation prompt that this one begins with, by its key, and the block after
    /// it.
    fn find(&self, context: &Context<'_>) -> Option<(u64, Option<u64>)> {
        let hashes = context.sequence_hashes;
        (0..hashes.len()).rev().find_map(|at| {
            let key = Self::key(context, hashes[at]);
            let is_shared = self.0.get(key)?.forks > FORKS_MAX;
            (!is_shared).then(|| (key, hashes.get(at + 1).copied()))
        })
    }

    /// The worker that answered it.
    fn longest(&self, context: &Context<'_>) -> Option<Worker> {
        let (key, _) = self.find(context)?;
        self.0.get(key).map(|pin| pin.worker)
    }

    /// Records a prompt that may continue another one.
    fn follow(&mut self, context: &Context<'_>) {
        if let Some((key, Some(next))) = self.find(context)
            && let Some(pin) = self.0.get_mut(key)
        {
            pin.forks += u8::from(pin.next != Some(next));
            pin.next = Some(next);
        }
    }

    fn pin(&mut self, context: &Context<'_>, hash: u64, worker: Worker) {
        let new = || Pin { worker, next: None, forks: 0 };
        self.0.touch(Self::key(context, hash), new).worker = worker;
    }

    fn forget(&mut self, worker: Worker) {
        for place in self.0.places(|pin| pin.worker == worker) {
            self.0.remove(place);
        }
    }
}

/// The session id that identifies a worker to the client: `host:port`, followed by `/rank` for
/// ranks above 0, in base64.
pub fn session_id(address: &str, dp_rank: u32) -> String {
    let plain = match dp_rank {
        0 => address.to_owned(),
        rank => format!("{address}/{rank}"),
    };
    BASE64.encode(plain)
}

/// Address and rank in an id from [`session_id`], or from another router that has no ranks; `None`
/// for anything else.
pub fn read_session_id(id: &str) -> Option<(String, u32)> {
    let plain = (id.len() <= MAX_ID_BYTES).then(|| BASE64.decode(id).ok()).flatten()?;
    let plain = String::from_utf8(plain).ok()?;
    match plain.rsplit_once('/') {
        Some((address, rank)) => Some((address.to_owned(), rank.parse().ok()?)),
        None => Some((plain, 0)),
    }
}

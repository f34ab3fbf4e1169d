//! Detects whether an engine names its blocks by a known scheme, so that they can be found by name.
//!
//! The scheme is proven, not assumed: a stored event that starts a prompt has tokens and names, and
//! either a scheme gives these names for these tokens or it does not.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{ExtraKey, Stored};
use crate::hash::engine::{Key, NameAlgorithm, NameScheme, Namer};

/// Prompt starts to examine before the search for a scheme slows down.
const EAGER_TRIES: u32 = 32;
/// After that, one in this many: a try costs some 400 digests, and all of the first ones have
/// failed.
const LAZY_TRIES: u32 = 4_096;
/// Prompt starts to compare with a proven scheme before only samples are.
const EAGER_CHECKS: u32 = 8;
/// After that, one in this many.
const LAZY_CHECKS: u32 = 64;
/// Tokens of a block in an event that is examined: a try hashes it by every scheme, which would take a
/// second for a block that fills a message. The largest blocks of engines have some thousand tokens.
const PROOF_TOKENS_MAX: u32 = 65_536;
/// Common values of `PYTHONHASHSEED` in deployments that need equal names everywhere.
const COMMON_SEEDS: [&str; 3] = [NameScheme::DEFAULT_SEED, "0", "42"];

/// An engine's naming of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Naming {
    /// The scheme.
    pub scheme: Arc<NameScheme>,
    /// Tokens hashed at once; divides the block size.
    pub unit: u32,
}

/// A naming as text, for another replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamingOf {
    algorithm: String,
    seed: String,
    unit: u32,
}

impl NamingOf {
    pub fn of(naming: &Naming) -> Self {
        let Naming { scheme, unit } = naming;
        let algorithm = scheme.algorithm.name().to_owned();
        Self { algorithm, seed: scheme.seed.to_string(), unit: *unit }
    }

    /// `None` for an unknown scheme.
    pub fn naming(&self) -> Option<Naming> {
        let algorithm = NameAlgorithm::from_name(&self.algorithm)?;
        let scheme = Arc::new(NameScheme::new(algorithm, &self.seed));
        (self.unit > 0).then_some(Naming { scheme, unit: self.unit })
    }
}

/// State of one publisher's naming.
#[derive(Debug, Default)]
pub(super) struct Proof {
    naming: Option<Naming>,
    looked_at: u32,
}

impl Proof {
    /// Proven by another replica; events are compared with it from now on.
    pub fn told(naming: Option<Naming>) -> Self {
        Self { naming, looked_at: 0 }
    }

    /// The proven naming.
    pub fn naming(&self) -> Option<&Naming> {
        self.naming.as_ref()
    }

    /// Examines a stored event. Returns whether the naming has changed.
    pub fn look(&mut self, event: &Stored) -> bool {
        if !is_proof(event) {
            return false;
        }
        self.looked_at = self.looked_at.saturating_add(1);
        let (eager, lazy) = match self.naming {
            Some(_) => (EAGER_CHECKS, LAZY_CHECKS),
            None => (EAGER_TRIES, LAZY_TRIES),
        };
        if self.looked_at > eager && !self.looked_at.is_multiple_of(lazy) {
            return false;
        }
        let Some(keys) = keys_of(event) else { return false };
        let found = match &self.naming {
            Some(naming) if names(event, &keys, naming) => return false,
            Some(_) => None,
            None => candidates(event, &keys).find(|naming| names(event, &keys, naming)),
        };
        let has_changed = found.is_some() || self.naming.is_some();
        if has_changed {
            self.looked_at = 0;
        }
        self.naming = found;
        has_changed
    }
}

type Keys<'a> = SmallVec<[SmallVec<[Key<'a>; 2]>; 8]>;

/// Whether the event has everything that its blocks were hashed with, so that its names prove or
/// disprove a scheme.
///
/// # Cost
/// Allocates and hashes nothing, because it is called for every event.
fn is_proof(event: &Stored) -> bool {
    let blocks = event.block_hashes.len();
    let is_whole = event.parent.is_none()
        && blocks > 0
        && (1..=PROOF_TOKENS_MAX).contains(&event.block_size)
        && blocks.checked_mul(event.block_size as usize) == Some(event.token_ids.len());
    // The adapter's path is hashed as well, and events do not contain it.
    let has_adapter = event.lora_name.is_some() || event.lora_id.is_some_and(|id| id != 0);
    let is_known = |(block, keys): (usize, &Option<Vec<ExtraKey>>)| {
        keys.iter().flatten().all(|key| key_of(key, block).is_some())
    };
    is_whole
        && !has_adapter
        && event.cache_salt.is_none()
        && event.extra_keys.iter().take(blocks).enumerate().all(is_known)
}

/// The keys with which the blocks were hashed besides tokens, for an event that [is a
/// proof](is_proof).
fn keys_of(event: &Stored) -> Option<Keys<'_>> {
    let keys = |block: usize| {
        let keys = event.extra_keys.get(block).into_iter().flatten().flatten();
        keys.map(|key| key_of(key, block)).collect()
    };
    (0..event.block_hashes.len()).map(keys).collect()
}

/// A key as block number `block` of a prompt hashes it; `None` for an unknown key.
fn key_of(key: &ExtraKey, block: usize) -> Option<Key<'_>> {
    match key {
        ExtraKey::Text(salt) if block == 0 => Some(Key::Salt(salt)),
        ExtraKey::Item { identifier, offset } => Some(Key::Media(identifier, *offset)),
        ExtraKey::Digest(digest) => Some(Key::Embeds(digest)),
        ExtraKey::Text(_) | ExtraKey::Opaque(_) => None,
    }
}

/// The schemes that the event may follow, the likeliest first.
fn candidates<'a>(event: &'a Stored, keys: &Keys<'_>) -> impl Iterator<Item = Naming> + use<'a> {
    // Keys refer to whole blocks; only the salt is always in the first part of one.
    let is_salted_at_most = keys.iter().flatten().all(|key| matches!(key, Key::Salt(_)));
    let block_size = event.block_size;
    let halves = std::iter::successors(Some(block_size), |unit| {
        (unit.is_multiple_of(2) && *unit > 1).then_some(unit / 2)
    });
    let units: SmallVec<[u32; 12]> = halves.take(if is_salted_at_most { 12 } else { 1 }).collect();
    NameAlgorithm::ALL.into_iter().flat_map(move |algorithm| {
        let units = units.clone();
        COMMON_SEEDS.into_iter().flat_map(move |seed| {
            let scheme = Arc::new(NameScheme::new(algorithm, seed));
            let units = units.clone();
            units.into_iter().map(move |unit| Naming { scheme: Arc::clone(&scheme), unit })
        })
    })
}

/// Whether `naming` gives the event's names.
fn names(event: &Stored, keys: &Keys<'_>, naming: &Naming) -> bool {
    let unit = naming.unit;
    if !event.block_size.is_multiple_of(unit) {
        // Part of a block, without the tokens before it.
        return true;
    }
    let parts = (event.block_size / unit) as usize;
    let is_salted_at_most = keys.iter().flatten().all(|key| matches!(key, Key::Salt(_)));
    if parts > 1 && !is_salted_at_most {
        return true;
    }
    let mut namer = Namer::new(&naming.scheme);
    let mut tokens = event.token_ids.chunks_exact(unit as usize);
    for (name, keys) in event.block_hashes.iter().zip(keys) {
        let mut given = 0;
        for part in 0..parts {
            let Some(tokens) = tokens.next() else { return false };
            let keys = if part == 0 { keys.as_slice() } else { &[] };
            given = namer.next(tokens, keys.iter().copied());
        }
        if given != *name {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_any_size_is_no_reason_to_hash_it() {
        for (tokens, looked_at) in [(PROOF_TOKENS_MAX, 1), (PROOF_TOKENS_MAX + 1, 0)] {
            let event = Stored {
                block_hashes: vec![1],
                token_ids: vec![7; tokens as usize],
                block_size: tokens,
                ..Stored::default()
            };
            let mut proof = Proof::default();
            assert!(!proof.look(&event));
            assert_eq!(proof.looked_at, looked_at);
        }
    }
}

//! Transfer between replicas: every publisher's blocks, and their stream position.
//!
//! The binary form is a magic, followed by parts: a length (8 bytes, little-endian) and a snapshot
//! of one publisher's workers, with a key in JSON that identifies them; then in msgpack, if there
//! are any, their doubtful copies, and the names in their cache groups; a length of 0 ends it. The
//! JSON form is the published dump, which other systems' indexers also provide.

use std::io::{self, Read};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use super::cache_groups::{CacheGroups, CountedCopies, EngineFacts, Knowledge};
use super::dump::dump_worker;
use super::identity::Identity;
use super::legal::check_names;
use super::model::{ModelIndex, ModelKey};
use super::past::Recovered;
use super::publisher::Publisher;
use super::registration::Place;
use super::registry::Catalog;
use crate::codec::router::RouterEvent;
use crate::error::Error;
use crate::ids::{InstanceId, Tier, Worker};
use crate::index::groups::{GroupName, Holder};
use crate::index::snapshot::{Meta, Reader, save_workers};

/// First bytes of the binary form; the last one is its version.
pub const MAGIC: [u8; 8] = *b"kvfdump\x01";

/// Size limit of a part, which is one publisher's share, 16 bytes per block: enough for sixty
/// million blocks.
const PART_BYTES_MAX: u64 = 1 << 30;

/// Why a worker is left out that a dump has restored and that is not registered yet.
pub(super) const RESTORED: &str = "an earlier dump has restored it";

/// Maximum reasons kept as text by a recovery; further ones are only counted.
const REASONS_MAX: usize = 16;

/// Content of a part's key, in JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    model_name: String,
    tenant_id: String,
    instance_id: InstanceId,
    dp_rank: u32,
    group: Option<u32>,
    cache: Option<Knowledge>,
    is_inexact: bool,
    lora_name: Option<String>,
    additional_salt: Option<String>,
}

enum Owner {
    Publisher(Arc<Publisher>),
    Recovered(Box<Place>),
}

/// One publisher's share of a model: its own rank, and those named by its batches.
pub struct Part {
    /// The model and tenant.
    pub model: Arc<ModelIndex>,
    /// The registered worker.
    pub worker: Worker,
    owner: Owner,
    /// Ranks of the same instance with other publishers.
    others: Vec<u32>,
}

/// All parts of a catalog, by model and worker.
pub fn parts(catalog: &Catalog) -> Vec<Part> {
    let registered = catalog.publishers().into_iter().map(|publisher| {
        (Arc::clone(&publisher.model), publisher.worker, Owner::Publisher(publisher))
    });
    let recovered = catalog.recovered().into_iter();
    let recovered =
        recovered.map(|(model, worker, place)| (model, worker, Owner::Recovered(Box::new(place))));
    let part = |(model, worker, owner)| Part { model, worker, owner, others: Vec::new() };
    let mut parts: Vec<Part> = registered.chain(recovered).map(part).collect();
    parts.sort_by(|a, b| (&a.model.key, a.worker).cmp(&(&b.model.key, b.worker)));
    // Ranks of one instance are adjacent within a model.
    let is_same = |a: &Part, b: &Part| {
        a.worker.instance_id == b.worker.instance_id && a.model.key == b.model.key
    };
    for ranks in parts.chunk_by_mut(is_same) {
        let all: Vec<u32> = ranks.iter().map(|part| part.worker.dp_rank).collect();
        for (at, part) in ranks.iter_mut().enumerate() {
            part.others = [&all[..at], &all[at + 1..]].concat();
        }
    }
    parts
}

impl Part {
    /// Reads position and workers of one moment; the publisher's frames wait meanwhile.
    fn read<T>(&self, read: impl FnOnce(&Place, &[Worker]) -> T) -> T {
        let read = |place: Place| {
            let ranks = place.ranks.iter().filter(|rank| !self.others.contains(rank));
            let mut workers: Vec<Worker> =
                ranks.map(|rank| Worker::new(self.worker.instance_id, *rank)).collect();
            workers.sort_unstable();
            workers.dedup();
            read(&place, &workers)
        };
        match &self.owner {
            Owner::Publisher(publisher) => publisher.hold_still(read),
            Owner::Recovered(place) => read((**place).clone()),
        }
    }

    /// Encodes it in the binary form, including the length. If it does not fit the format, such as
    /// one with long names of many shared stores or over 1 GiB, the reason stands in its place: the
    /// peer counts it as skipped, and the dump goes on.
    ///
    /// # Cost
    /// 16 bytes per block; the publisher's frames wait meanwhile.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_within(PART_BYTES_MAX)
    }

    fn encode_within(&self, bytes_max: u64) -> Vec<u8> {
        self.try_encode(bytes_max).unwrap_or_else(|error| {
            tracing::error!(worker = %self.worker, %error, "left out of a dump");
            let reason = format!("worker {}: {error}", self.worker);
            let len = (LEFT_OUT.len() + reason.len()) as u64;
            [&len.to_le_bytes(), &LEFT_OUT[..], reason.as_bytes()].concat()
        })
    }

    fn try_encode(&self, bytes_max: u64) -> io::Result<Vec<u8>> {
        self.read(|place, workers| {
            let Identity { lora_name, cache_salt } = self.model.agreement.held();
            // A key has a limit, which these would exceed.
            let mut cache = place.cache.clone();
            let doubts = cache.as_mut().map(|known| std::mem::take(&mut known.doubts));
            let head = Head {
                model_name: self.model.key.model_name.clone(),
                tenant_id: self.model.key.tenant_id.clone(),
                instance_id: self.worker.instance_id,
                dp_rank: self.worker.dp_rank,
                group: place.group,
                cache,
                is_inexact: place.is_inexact,
                lora_name,
                additional_salt: cache_salt,
            };
            let meta = Meta {
                block_size: self.model.block_size().unwrap_or(0),
                created_ms: 0,
                key: serde_json::to_vec(&head).unwrap_or_default(),
            };
            let mut bytes = vec![0; 8];
            save_workers(&self.model.index, workers, &meta, |_| place.cursor, &mut bytes)?;
            bytes.extend(tail(&doubts.unwrap_or_default(), DOUBTS_MARK));
            bytes.extend(tail(&names_of(&self.model, workers), NAMES_MARK));
            let len = bytes.len() as u64 - 8;
            if len > bytes_max {
                // The peer would drop this and all later parts.
                let why = format!("its part has {len} bytes; the limit is {bytes_max}");
                return Err(io::Error::other(why));
            }
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            Ok(bytes)
        })
    }

    /// Its events, and the related watermark.
    pub fn events(&self) -> (Vec<RouterEvent>, Watermark) {
        self.read(|place, workers| {
            let index = &self.model.index;
            let events = workers.iter().flat_map(|worker| dump_worker(index, *worker)).collect();
            (events, Watermark::new(self.worker, place, workers))
        })
    }

    /// Digests of its workers' blocks: equal states have equal digests. Workers without blocks have
    /// none.
    ///
    /// # Cost
    /// O(n log n) and 48 bytes for n blocks of a worker.
    pub fn digests(&self) -> Vec<Digest> {
        self.read(|place, workers| {
            let last_sequence = place.cursor.map(|cursor| cursor.sequence);
            workers
                .iter()
                .map(|worker| (worker, self.model.index.memberships(*worker)))
                .filter(|(_, held)| !held.is_empty())
                .map(|(worker, held)| {
                    let mut hash = Xxh3::new();
                    for block in &held {
                        let words = [
                            block.chain,
                            block.engine_hash,
                            block.tier as u64,
                            block.seed,
                            u64::from(block.copies),
                        ];
                        words.iter().for_each(|word| hash.update(&word.to_le_bytes()));
                    }
                    Digest {
                        worker: *worker,
                        blocks: held.len(),
                        digest: hash.digest(),
                        last_sequence,
                    }
                })
                .collect()
        })
    }
}

/// A summary of one worker's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    /// The worker.
    pub worker: Worker,
    /// Names held, counted per tier.
    pub blocks: usize,
    /// XXH3 over the blocks, in order.
    pub digest: u64,
    /// The last batch of its publisher that is included.
    pub last_sequence: Option<u64>,
}

/// The position of one publisher's stream, in the JSON form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watermark {
    /// The registered instance.
    pub instance_id: InstanceId,
    /// The registered rank.
    pub dp_rank: u32,
    /// All ranks named by its batches.
    pub dp_ranks: Vec<u32>,
    /// The last batch that is included in the events; `None` if there was none.
    pub last_sequence: Option<u64>,
    /// XXH3 of that batch's bytes, in hexadecimal.
    pub fingerprint: Option<String>,
    /// The credited cache group.
    pub group: Option<u32>,
    /// All cache groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Knowledge>,
    /// The blocks are known to differ slightly from the engine's.
    #[serde(default)]
    pub is_inexact: bool,
}

impl Watermark {
    fn new(worker: Worker, place: &Place, workers: &[Worker]) -> Self {
        Self {
            instance_id: worker.instance_id,
            dp_rank: worker.dp_rank,
            dp_ranks: workers.iter().map(|worker| worker.dp_rank).collect(),
            last_sequence: place.cursor.map(|cursor| cursor.sequence),
            fingerprint: place
                .cursor
                .and_then(|cursor| cursor.fingerprint)
                .map(|hash| format!("{hash:016x}")),
            group: place.group,
            cache: place.cache.clone(),
            is_inexact: place.is_inexact,
        }
    }

    /// As a position to continue from.
    pub(super) fn place(&self) -> Place {
        let fingerprint = self.fingerprint.as_deref();
        let fingerprint = fingerprint.and_then(|hash| u64::from_str_radix(hash, 16).ok());
        Place {
            cursor: self
                .last_sequence
                .map(|sequence| crate::index::snapshot::Cursor { sequence, fingerprint }),
            ranks: self.dp_ranks.clone(),
            group: self.group,
            cache: self.cache.clone(),
            is_inexact: self.is_inexact,
        }
    }
}

/// Progress of a recovery.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Restored publishers.
    pub publishers: usize,
    /// Workers with blocks now.
    pub workers: usize,
    /// Their blocks.
    pub blocks: usize,
    /// Reasons for omissions, as text; the first ones.
    pub skipped: Vec<String>,
    /// Number of omissions.
    pub skipped_count: usize,
}

impl Progress {
    /// Records an omission; the first ones are logged, because a peer decides how many there are.
    pub(super) fn skip(&mut self, reason: String) {
        self.skipped_count += 1;
        if self.skipped.len() < REASONS_MAX {
            tracing::warn!(reason, "left out of the recovery");
            self.skipped.push(reason);
        }
    }
}

/// Why a recovery ended early. Complete parts before the error are kept.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The connection broke, or was too slow.
    #[error("the peer's dump can't be read: {0}")]
    Io(#[from] io::Error),
    /// It ended before its end marker.
    #[error("the peer's dump ends too early")]
    Cut,
    /// It has another format.
    #[error("the peer's answer is not a dump: {0}")]
    NotADump(String),
}

/// Restores a dump in the binary form. Calls `tell` after every step.
///
/// # Errors
/// See [`TransferError`]; complete parts before the error are kept.
///
/// # Consistency
/// Each publisher's share, including its stream position, is of one moment.
///
/// # Cost
/// O(blocks), and memory for the largest part, twice.
pub fn restore(
    catalog: &Catalog,
    from: &mut dyn Read,
    tell: &mut dyn FnMut(&Progress),
) -> Result<Progress, TransferError> {
    let mut progress = Progress::default();
    if read_word(from)? != MAGIC {
        return Err(TransferError::NotADump("it begins with the wrong bytes".to_owned()));
    }
    loop {
        let len = u64::from_le_bytes(read_word(from)?);
        if len == 0 {
            return Ok(progress);
        }
        if len > PART_BYTES_MAX {
            let why = format!("a part of {len} bytes; the limit is {PART_BYTES_MAX}");
            return Err(TransferError::NotADump(why));
        }
        // Read completely before anything is locked: a slow peer delays neither frames nor queries.
        let mut part = Vec::new();
        from.take(len).read_to_end(&mut part)?;
        if (part.len() as u64) < len {
            return Err(TransferError::Cut);
        }
        restore_part(catalog, &part, &mut progress);
        tell(&progress);
    }
}

fn read_word(from: &mut dyn Read) -> Result<[u8; 8], TransferError> {
    let mut word = [0; 8];
    match from.read_exact(&mut word) {
        Ok(()) => Ok(word),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(TransferError::Cut),
        Err(error) => Err(error.into()),
    }
}

/// Begins a part that has only the reason why another one is left out.
const LEFT_OUT: [u8; 8] = *b"kvferror";

/// Unusable data of the part is skipped; the dump continues after it.
fn restore_part(catalog: &Catalog, part: &[u8], progress: &mut Progress) {
    if let Some(reason) = part.strip_prefix(&LEFT_OUT) {
        return progress.skip(format!("the peer says: {}", String::from_utf8_lossy(reason)));
    }
    // Older versions read only the last one, or none: what precedes it follows the snapshot's end.
    let (part, names) = split_tail(part, NAMES_MARK);
    let (mut part, doubts) = split_tail(part, DOUBTS_MARK);
    let snapshot = match Reader::open(&mut part) {
        Ok(snapshot) => snapshot,
        Err(error) => return progress.skip(error.to_string()),
    };
    let head: Head = match serde_json::from_slice(&snapshot.meta().key) {
        Ok(head) => head,
        Err(error) => return progress.skip(format!("a part has an invalid key: {error}")),
    };
    let worker = Worker::new(head.instance_id, head.dp_rank);
    let key = ModelKey { model_name: head.model_name.clone(), tenant_id: head.tenant_id.clone() };
    let block_size = Some(snapshot.meta().block_size).filter(|size| *size > 0);
    let model = match model_of(catalog, &key, block_size) {
        Ok(model) => model,
        Err(error) => return progress.skip(format!("worker {worker}: {error}")),
    };
    // Here an unspecified identity means none, because the blocks already exist.
    let [lora_name, cache_salt] =
        [&head.lora_name, &head.additional_salt].map(|name| Some(name.clone().unwrap_or_default()));
    let identity = Identity { lora_name, cache_salt };
    if let Err(error) = model.agreement.check(&identity, &model.key) {
        return progress.skip(format!("worker {worker}: {error}"));
    }
    model.agreement.settle(identity);
    let mut ranks: Vec<u32> = snapshot.workers().iter().map(|worker| worker.dp_rank).collect();
    if !ranks.contains(&worker.dp_rank) {
        ranks.push(worker.dp_rank);
    }
    let adopted = adopt(catalog, &model, worker, || {
        let loaded = snapshot.load(&model.index);
        let Head { group, cache, is_inexact, .. } = head;
        let mut place = Place { cursor: None, ranks, group, cache, is_inexact };
        if !doubts.is_empty() {
            place.is_inexact |= !restore_doubts(&mut place.cache, doubts);
        }
        if !names.is_empty() {
            place.is_inexact |= !restore_names(&model, names);
        }
        for restored in &loaded.workers {
            progress.workers += usize::from(restored.blocks > 0);
            progress.blocks += restored.blocks;
            if restored.worker == worker {
                place.cursor = restored.cursor;
            }
        }
        for lost in loaded.lost {
            // Its blocks would never return, so the position would promise too much.
            place.cursor = None;
            place.is_inexact = true;
            progress.skip(format!("worker {}: {}", lost.worker, lost.cause));
        }
        place
    });
    match adopted {
        Ok(()) => progress.publishers += 1,
        Err(reason) => progress.skip(format!("worker {worker}: {reason}")),
    }
}

/// One worker's names in a tier's cache groups.
#[derive(Debug, Serialize, Deserialize)]
struct NamesOf {
    worker: (InstanceId, u32),
    tier: String,
    names: Vec<GroupName>,
}

/// Ends a part with names in cache groups.
const NAMES_MARK: [u8; 8] = *b"kvfnames";

/// Ends a part's doubtful copies, which precede the names.
const DOUBTS_MARK: [u8; 8] = *b"kvfdoubt";

/// The workers' entries in the table of groups.
fn names_of(model: &ModelIndex, workers: &[Worker]) -> Vec<NamesOf> {
    let places = workers.iter().flat_map(|worker| Tier::ALL.map(|tier| (*worker, tier)));
    let names = places.map(|(worker, tier)| NamesOf {
        worker: (worker.instance_id, worker.dp_rank),
        tier: tier.name().to_owned(),
        names: model.groups.dump(&Holder::Worker(worker, tier)),
    });
    names.filter(|of| !of.names.is_empty()).collect()
}

/// What follows a part's snapshot: msgpack, its length and a marker; nothing without entries.
fn tail<T: Serialize>(entries: &[T], mark: [u8; 8]) -> Vec<u8> {
    if entries.is_empty() {
        return Vec::new();
    }
    let mut bytes = rmp_serde::to_vec(entries).unwrap_or_default();
    bytes.extend((bytes.len() as u64).to_le_bytes());
    bytes.extend(mark);
    bytes
}

/// A part without its tail, and the tail's msgpack if there is one.
fn split_tail(part: &[u8], mark: [u8; 8]) -> (&[u8], &[u8]) {
    let whole = (part, &[][..]);
    let Some(rest) = part.strip_suffix(&mark) else { return whole };
    let Some((rest, len)) = rest.split_last_chunk::<8>() else { return whole };
    let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
    rest.len().checked_sub(len).map_or(whole, |at| rest.split_at(at))
}

/// False if they are invalid.
fn restore_doubts(cache: &mut Option<Knowledge>, bytes: &[u8]) -> bool {
    let Some(known) = cache else { return false };
    let doubts = rmp_serde::from_slice::<Vec<CountedCopies>>(bytes);
    doubts.map(|doubts| known.doubts = doubts).is_ok()
}

/// False if they are invalid.
fn restore_names(model: &ModelIndex, bytes: &[u8]) -> bool {
    let Ok(all) = rmp_serde::from_slice::<Vec<NamesOf>>(bytes) else { return false };
    for NamesOf { worker: (instance_id, dp_rank), tier, names } in all {
        let Some(tier) = Tier::from_name(&tier) else { continue };
        let holder = Holder::Worker(Worker::new(instance_id, dp_rank), tier);
        model.groups.clear(&holder);
        model.groups.restore(&holder, &names);
    }
    true
}

pub(super) fn model_of(
    catalog: &Catalog,
    key: &ModelKey,
    block_size: Option<u32>,
) -> Result<Arc<ModelIndex>, Error> {
    check_names(key)?;
    catalog.model_for(key, block_size)
}

/// Passes the blocks that `load` loads, and the position it returns, to the worker's publisher, or
/// keeps them until it is registered.
///
/// # Errors
/// The reason; then `load` was not called.
pub(super) fn adopt(
    catalog: &Catalog,
    model: &Arc<ModelIndex>,
    worker: Worker,
    load: impl FnOnce() -> Place,
) -> Result<(), &'static str> {
    if let Some(publisher) = catalog.publisher_of(worker, &model.key) {
        return publisher.take_over(load);
    }
    if catalog.has_recovered(worker, &model.key) {
        return Err(RESTORED);
    }
    let place = load();
    let past = Recovered { model: Arc::clone(model), place: place.clone() };
    if let Some(known) = &place.cache {
        let layout =
            CacheGroups::knowing(known, worker.instance_id).changed(EngineFacts::default());
        for rank in &place.ranks {
            model.set_layout(Worker::new(worker.instance_id, *rank), layout.clone());
        }
    }
    if !catalog.remember_recovered(worker, past) {
        // It has registered meanwhile, and waits, unless it is unregistered already.
        let publisher = catalog.publisher_of(worker, &model.key);
        if !publisher.is_some_and(|publisher| publisher.go_on_from(&place)) {
            Recovered { model: Arc::clone(model), place }.drop_blocks(worker.instance_id);
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::index::{Block, DEFAULT_SEED};

    #[test]
    fn a_part_beyond_the_limit_is_skipped_and_the_dump_goes_on() {
        let catalog = Catalog::default();
        let key = ModelKey { model_name: "m".into(), tenant_id: "t".into() };
        let model = catalog.model_or_create(&key, Some(4)).unwrap();
        for (id, count) in [(1, 100), (2, 1)] {
            let worker = Worker::new(id, 0);
            let block = |name| Block { engine_hash: name, local_hash: name };
            let blocks: Vec<Block> = (0..count).map(block).collect();
            model.index.store(worker, Tier::Device, None, DEFAULT_SEED, &blocks);
            let place = || Place { ranks: vec![0], ..Place::default() };
            assert_eq!(adopt(&catalog, &model, worker, place), Ok(()));
        }
        let mut dump = MAGIC.to_vec();
        parts(&catalog).iter().for_each(|part| dump.extend(part.encode_within(1_000)));
        dump.extend([0; 8]);
        let replica = Catalog::default();
        let progress = restore(&replica, &mut dump.as_slice(), &mut |_| {}).unwrap();
        assert_eq!((progress.publishers, progress.blocks, progress.skipped_count), (1, 1, 1));
        let reason = &progress.skipped[0];
        assert!(reason.starts_with("the peer says: worker 1:0: "), "{reason}");
        assert!(reason.ends_with("the limit is 1000"), "{reason}");
    }
}

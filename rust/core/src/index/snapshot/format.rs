//! The bytes of a snapshot: numbers are little-endian, the size of every part is a multiple of 8
//! bytes.

use xxhash_rust::xxh3::xxh3_64;

use super::{Cursor, LoadError, Meta};
use crate::hash::SEED;
use crate::ids::{Tier, Worker};
use crate::index::types::MAX_WORKERS;

pub(super) const MAGIC: [u8; 8] = *b"kvfsnap\0";
pub(super) const SECTION_MAGIC: [u8; 8] = *b"kvfpart\xa5";

/// Version of the format; other versions are not read.
pub const VERSION: u32 = 1;

/// Size limit of [`Meta::key`].
pub const MAX_KEY_BYTES: usize = 65_536;

/// Reads as another number if the byte order differs.
const BYTE_ORDER: u32 = 0x0102_0304;

/// XXH3 with 64 bits over little-endian tokens, identities in the seed: see [`crate::hash`].
const HASH_SCHEME: u32 = 1;

pub(super) const HEAD_BYTES: usize = 56;
const NAME_BYTES: usize = 16;
pub(super) const SECTION_BYTES: usize = 88;
pub(super) const STEP_BYTES: usize = 24;

/// Reads fields from bytes that were checked to be long enough.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> u32 {
        let (field, rest) = self.0.split_first_chunk().expect("callers give whole records");
        self.0 = rest;
        u32::from_le_bytes(*field)
    }

    fn u64(&mut self) -> u64 {
        let (field, rest) = self.0.split_first_chunk().expect("callers give whole records");
        self.0 = rest;
        u64::from_le_bytes(*field)
    }
}

/// The `u64` column in `bytes`.
pub(super) fn column(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

// ---- the head

/// The header fields in the first [`HEAD_BYTES`], which describe the rest of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    block_size: u32,
    pub workers: usize,
    created_ms: u64,
    key_bytes: usize,
    scheme: u32,
    seed: u64,
}

/// The whole header: fields, key, the workers in the order of their sections, checksum.
pub(super) fn encode_head(meta: &Meta, workers: &[Worker]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + padded(meta.key.len()) + workers.len() * 16 + 8);
    out.extend_from_slice(&MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(BYTE_ORDER.to_le_bytes());
    out.extend(HASH_SCHEME.to_le_bytes());
    out.extend(meta.block_size.to_le_bytes());
    out.extend(SEED.to_le_bytes());
    out.extend(meta.created_ms.to_le_bytes());
    out.extend((workers.len() as u64).to_le_bytes());
    out.extend((meta.key.len() as u64).to_le_bytes());
    debug_assert_eq!(out.len(), HEAD_BYTES);
    out.extend_from_slice(&meta.key);
    out.resize(padded(out.len()), 0);
    for worker in workers {
        out.extend(worker.instance_id.to_le_bytes());
        out.extend(u64::from(worker.dp_rank).to_le_bytes());
    }
    out.extend(xxh3_64(&out).to_le_bytes());
    out
}

fn differs(field: &'static str, expected: impl ToString, found: impl ToString) -> LoadError {
    LoadError::Field { field, expected: expected.to_string(), found: found.to_string() }
}

/// Reads the fields. Fields that may differ between versions are read only after the version.
pub(super) fn decode_head(bytes: &[u8; HEAD_BYTES]) -> Result<Head, LoadError> {
    let (magic, rest) = bytes.split_at(MAGIC.len());
    if magic != MAGIC {
        let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
        return Err(LoadError::Alien { expected: text(&MAGIC), found: text(magic) });
    }
    let mut fields = Fields(rest);
    let version = fields.u32();
    let order = fields.u32();
    if order == BYTE_ORDER.swap_bytes() {
        return Err(differs("byte order", "little-endian", "big-endian"));
    }
    if version != VERSION {
        return Err(differs("version", VERSION, version));
    }
    if order != BYTE_ORDER {
        return Err(differs("byte order", hex(BYTE_ORDER.into()), hex(order.into())));
    }
    let (scheme, block_size, seed) = (fields.u32(), fields.u32(), fields.u64());
    let (created_ms, workers, key_bytes) = (fields.u64(), fields.u64(), fields.u64());
    if workers > MAX_WORKERS as u64 {
        return Err(differs("number of workers", format!("at most {MAX_WORKERS}"), workers));
    }
    if key_bytes > MAX_KEY_BYTES as u64 {
        return Err(differs("length of the key", format!("at most {MAX_KEY_BYTES}"), key_bytes));
    }
    let (workers, key_bytes) = (workers as usize, key_bytes as usize);
    Ok(Head { block_size, workers, created_ms, key_bytes, scheme, seed })
}

fn hex(number: u64) -> String {
    format!("{number:#x}")
}

impl Head {
    /// Size of the rest of the header.
    pub fn rest_bytes(&self) -> usize {
        padded(self.key_bytes) + self.workers * NAME_BYTES + 8
    }

    /// Checks the complete header `head`, and reads the parts that the fields announced.
    pub fn decode_rest(&self, head: &[u8]) -> Result<(Meta, Vec<Worker>), LoadError> {
        let (head, checksum) = head.split_at(head.len() - 8);
        let (found, expected) = (xxh3_64(head), Fields(checksum).u64());
        if found != expected {
            return Err(differs("checksum of the header", hex(expected), hex(found)));
        }
        if self.scheme != HASH_SCHEME {
            return Err(differs("hash scheme", HASH_SCHEME, self.scheme));
        }
        if self.seed != SEED {
            return Err(differs("hash seed", SEED, self.seed));
        }
        let (key, names) = head[HEAD_BYTES..].split_at(padded(self.key_bytes));
        let worker = |name: &[u8; NAME_BYTES]| {
            let mut fields = Fields(name);
            let (instance_id, rank) = (fields.u64(), fields.u64());
            let rank = u32::try_from(rank)
                .map_err(|_| differs("dp rank", format!("at most {}", u32::MAX), rank))?;
            Ok(Worker::new(instance_id, rank))
        };
        let workers: Vec<Worker> =
            names.as_chunks().0.iter().map(worker).collect::<Result<_, LoadError>>()?;
        if let Some(pair) = workers.windows(2).find(|pair| pair[0] >= pair[1]) {
            let found = format!("{} before {}", pair[0], pair[1]);
            return Err(differs("order of workers", "ascending", found));
        }
        let key = key[..self.key_bytes].to_vec();
        Ok((Meta { block_size: self.block_size, created_ms: self.created_ms, key }, workers))
    }
}

// ---- sections

/// Header of one worker's section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Section {
    /// Index in the header's list of workers.
    pub number: usize,
    pub worker: Worker,
    pub cursor: Option<Cursor>,
    pub steps: u64,
    /// Number of names in all steps.
    pub names: u64,
    /// Number of labels in stored steps.
    pub labels: u64,
    /// Checksum of the section's body.
    pub checksum: u64,
}

const HAS_CURSOR: u64 = 1;
const HAS_FINGERPRINT: u64 = 2;

impl Section {
    pub fn encode(&self) -> [u8; SECTION_BYTES] {
        let Cursor { sequence, fingerprint } =
            self.cursor.unwrap_or(Cursor { sequence: 0, fingerprint: None });
        let flags = u64::from(self.cursor.is_some()) * HAS_CURSOR
            + u64::from(fingerprint.is_some()) * HAS_FINGERPRINT;
        let place = self.number as u64 | u64::from(self.worker.dp_rank) << 32;
        let mut out = [0; SECTION_BYTES];
        let fields = [
            u64::from_le_bytes(SECTION_MAGIC),
            place,
            self.worker.instance_id,
            flags,
            sequence,
            fingerprint.unwrap_or(0),
            self.steps,
            self.names,
            self.labels,
            self.checksum,
        ];
        let words = out.as_chunks_mut().0;
        for (word, field) in words.iter_mut().zip(fields) {
            *word = field.to_le_bytes();
        }
        let checksum = xxh3_64(&out[..SECTION_BYTES - 8]);
        out[SECTION_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// `None` for anything that [`Section::encode`] does not write.
    pub fn decode(bytes: &[u8; SECTION_BYTES]) -> Option<Self> {
        let (covered, checksum) = bytes.split_at(SECTION_BYTES - 8);
        if covered[..8] != SECTION_MAGIC || xxh3_64(covered) != Fields(checksum).u64() {
            return None;
        }
        let mut fields = Fields(&covered[8..]);
        let (number, rank, instance_id) = (fields.u32(), fields.u32(), fields.u64());
        let flags = fields.u64();
        let (sequence, fingerprint) = (fields.u64(), fields.u64());
        let fingerprint = (flags & HAS_FINGERPRINT != 0).then_some(fingerprint);
        let section = Self {
            number: number as usize,
            worker: Worker::new(instance_id, rank),
            cursor: (flags & HAS_CURSOR != 0).then_some(Cursor { sequence, fingerprint }),
            steps: fields.u64(),
            names: fields.u64(),
            labels: fields.u64(),
            checksum: fields.u64(),
        };
        // Encoding must reproduce the bytes: every field has a single representation.
        (section.encode() == *bytes).then_some(section)
    }

    /// Size of the body; `None` on overflow.
    pub fn body_bytes(&self) -> Option<u64> {
        let words = self.names.checked_add(self.labels)?.checked_mul(8)?;
        self.steps.checked_mul(STEP_BYTES as u64)?.checked_add(words)
    }
}

// ---- steps

/// One step of a dump, without its names and labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub is_stored: bool,
    pub tier: Tier,
    pub len: u32,
    pub parent: Option<u64>,
    pub seed: u64,
}

impl Step {
    pub fn encode(&self, out: &mut Vec<u8>) {
        let kind = [u8::from(self.is_stored), self.tier as u8, u8::from(self.parent.is_some()), 0];
        out.extend_from_slice(&kind);
        out.extend(self.len.to_le_bytes());
        out.extend(self.parent.unwrap_or(0).to_le_bytes());
        out.extend(self.seed.to_le_bytes());
    }

    /// The error names the invalid field.
    pub fn decode(bytes: &[u8; STEP_BYTES]) -> Result<Self, &'static str> {
        let [kind, tier, has_parent, zero, ..] = *bytes;
        let mut fields = Fields(&bytes[4..]);
        let (len, parent, seed) = (fields.u32(), fields.u64(), fields.u64());
        let step = Self {
            is_stored: kind == 1,
            tier: *Tier::ALL.get(usize::from(tier)).ok_or("a step's tier")?,
            len,
            parent: (has_parent == 1).then_some(parent),
            seed,
        };
        if kind > 1 || has_parent > 1 || zero != 0 {
            return Err("a step's kind");
        }
        if len == 0 {
            return Err("a step without blocks");
        }
        if (has_parent == 0 && parent != 0) || (!step.is_stored && (has_parent, seed) != (0, 0)) {
            return Err("a step's parent or seed");
        }
        Ok(step)
    }
}

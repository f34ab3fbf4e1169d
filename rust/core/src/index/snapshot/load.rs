//! Reads a snapshot: everything is checked before it is applied.

use std::io::Read;

use xxhash_rust::xxh3::xxh3_64;

use super::format::{HEAD_BYTES, SECTION_BYTES, STEP_BYTES, Section, Step, column, decode_head};
use super::source::Source;
use super::{Cause, LoadError, Loaded, Lost, Meta, Restored};
use crate::ids::Worker;
use crate::index::RadixIndex;
use crate::index::types::{Block, Rejection};

/// Reads a snapshot of blocks of `block_size` tokens, or of any size, into `index`, section by
/// section, up to the end of its last one.
///
/// A section is applied if it is complete and valid, and undone if the index does not accept all of
/// it. A damaged section loses only its own worker. Workers that already hold blocks are not
/// changed, so load before events of the snapshot's workers arrive.
///
/// # Errors
/// If the header is not a snapshot's, is damaged, or names another block size. Nothing was applied
/// then.
///
/// # Consistency
/// Queries and events of other workers continue; a worker's blocks appear step by step.
///
/// # Cost
/// O(blocks), and memory for the largest section. Memory never exceeds a small multiple of the
/// bytes received.
pub fn load(
    index: &RadixIndex,
    from: &mut impl Read,
    block_size: Option<u32>,
) -> Result<Loaded, LoadError> {
    let snapshot = Reader::open(from)?;
    let found = snapshot.meta().block_size;
    if let Some(expected) = block_size.filter(|expected| *expected != found) {
        let (expected, found) = (expected.to_string(), found.to_string());
        return Err(LoadError::Field { field: "block size", expected, found });
    }
    Ok(snapshot.load(index))
}

/// A snapshot with a valid header, by which the caller can choose the index to load into.
pub struct Reader<R: Read> {
    source: Source<R>,
    meta: Meta,
    workers: Vec<Worker>,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// If it is not a snapshot's, or damaged.
    pub fn open(from: R) -> Result<Self, LoadError> {
        let mut source = Source::new(from);
        let (meta, workers) = head(&mut source)?;
        Ok(Self { source, meta, workers })
    }

    /// The header's description of the snapshot.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The workers of the sections that follow.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Reads the sections into `index`, as [`load`] does.
    pub fn load(self, index: &RadixIndex) -> Loaded {
        let Self { mut source, meta, workers } = self;
        let mut loaded = Loaded { meta, workers: Vec::new(), lost: Vec::new(), cut: false };
        let mut blocks = Vec::new();
        let mut next = 0;
        while next < workers.len() {
            let section = match section(&mut source, &workers, next) {
                Ok(section) => section,
                Err(cause) => {
                    lose(&mut loaded, &workers[next..], cause);
                    break;
                }
            };
            lose(&mut loaded, &workers[next..section.number], Cause::Header);
            next = section.number + 1;
            match body(index, &mut source, &section, &mut blocks) {
                Ok(restored) => loaded.workers.push(restored),
                Err(cause @ (Cause::Cut | Cause::Unreadable(_))) => {
                    lose(&mut loaded, &workers[section.number..], cause);
                    break;
                }
                Err(cause) => lose(&mut loaded, &[section.worker], cause),
            }
        }
        loaded
    }
}

fn lose(loaded: &mut Loaded, workers: &[Worker], cause: Cause) {
    loaded.cut |= cause == Cause::Cut;
    let lost = workers.iter().map(|worker| Lost { worker: *worker, cause: cause.clone() });
    loaded.lost.extend(lost);
}

fn head(source: &mut Source<impl Read>) -> Result<(Meta, Vec<Worker>), LoadError> {
    let fields = source.peek(HEAD_BYTES as u64)?.first_chunk().ok_or(LoadError::Cut)?;
    let head = decode_head(fields)?;
    let len = HEAD_BYTES + head.rest_bytes();
    let bytes = source.peek(len as u64)?;
    if bytes.len() < len {
        return Err(LoadError::Cut);
    }
    let decoded = head.decode_rest(bytes)?;
    source.advance(len);
    Ok(decoded)
}

/// Skips to after the header of the next existing section.
fn section(
    source: &mut Source<impl Read>,
    workers: &[Worker],
    next: usize,
) -> Result<Section, Cause> {
    let is_next = |section: &Section| {
        section.number >= next && workers.get(section.number) == Some(&section.worker)
    };
    let unreadable = |error: std::io::Error| Cause::Unreadable(error.kind());
    let bytes = source.peek(SECTION_BYTES as u64).map_err(unreadable)?;
    let Some(header) = bytes.first_chunk() else { return Err(Cause::Cut) };
    let mut found = Section::decode(header).filter(is_next);
    if found.is_none() {
        if !source.find(is_next).map_err(unreadable)? {
            return Err(Cause::Header);
        }
        let bytes = source.peek(SECTION_BYTES as u64).map_err(unreadable)?;
        found = bytes.first_chunk().and_then(Section::decode);
    }
    source.advance(SECTION_BYTES);
    found.ok_or(Cause::Header)
}

/// Checks the body of a section and applies it.
fn body(
    index: &RadixIndex,
    source: &mut Source<impl Read>,
    section: &Section,
    blocks: &mut Vec<Block>,
) -> Result<Restored, Cause> {
    // Without it the start of the next section must be searched.
    let len = section.body_bytes().ok_or(Cause::Invalid("a section's length"))?;
    let body = source.peek(len).map_err(|error| Cause::Unreadable(error.kind()))?;
    if (body.len() as u64) < len {
        return Err(Cause::Cut);
    }
    let outcome = Body::new(body, section).and_then(|body| body.apply(index, section, blocks));
    let len = body.len();
    source.advance(len);
    outcome
}

/// A body with consistent lengths.
struct Body<'a> {
    steps: &'a [[u8; STEP_BYTES]],
    names: &'a [u8],
    labels: &'a [u8],
}

impl<'a> Body<'a> {
    /// `body` has the length from the header.
    fn new(body: &'a [u8], section: &Section) -> Result<Self, Cause> {
        let found = xxh3_64(body);
        if found != section.checksum {
            return Err(Cause::Checksum { expected: section.checksum, found });
        }
        // Lengths of parts of a body in memory, so the casts are lossless.
        let (steps, columns) = body.split_at(section.steps as usize * STEP_BYTES);
        let (names, labels) = columns.split_at(section.names as usize * 8);
        let steps = steps.as_chunks().0;
        let (mut named, mut labelled) = (0_u64, 0_u64);
        for step in steps {
            let step = Step::decode(step).map_err(Cause::Invalid)?;
            named += u64::from(step.len);
            labelled += u64::from(step.len) * u64::from(step.is_stored);
        }
        if (named, labelled) != (section.names, section.labels) {
            return Err(Cause::Invalid("blocks of the steps and of the section differ"));
        }
        Ok(Self { steps, names, labels })
    }

    fn apply(
        &self,
        index: &RadixIndex,
        section: &Section,
        blocks: &mut Vec<Block>,
    ) -> Result<Restored, Cause> {
        let worker = section.worker;
        match index.blocks(worker) {
            0 => {}
            held => return Err(Cause::Held(held)),
        }
        if let Err(cause) = self.play(index, worker, blocks) {
            index.remove_worker(worker);
            return Err(cause);
        }
        Ok(Restored { worker, cursor: section.cursor, blocks: index.blocks(worker) })
    }

    fn play(
        &self,
        index: &RadixIndex,
        worker: Worker,
        blocks: &mut Vec<Block>,
    ) -> Result<(), Cause> {
        let (mut names, mut labels) = (self.names, self.labels);
        for step in self.steps {
            let step = Step::decode(step).map_err(Cause::Invalid)?;
            let own = names.split_off(..step.len as usize * 8).unwrap_or_default();
            if !step.is_stored {
                let removed: Vec<u64> = column(own).collect();
                index.remove(worker, step.tier, &removed);
                continue;
            }
            let own_labels = labels.split_off(..step.len as usize * 8).unwrap_or_default();
            let pairs = column(own).zip(column(own_labels));
            blocks.clear();
            blocks.extend(pairs.map(|(engine_hash, local_hash)| Block { engine_hash, local_hash }));
            store(index, worker, &step, blocks)?;
        }
        Ok(())
    }
}

fn store(index: &RadixIndex, worker: Worker, step: &Step, blocks: &[Block]) -> Result<(), Cause> {
    let outcome = index.store(worker, step.tier, step.parent, step.seed, blocks);
    match outcome.rejected {
        Some(Rejection::Orphan) => return Err(Cause::Refused("the parent of a step is not held")),
        Some(Rejection::SelfReference) => {
            return Err(Cause::Invalid("a step in which a block is its own ancestor"));
        }
        Some(Rejection::SlotsExhausted) => return Err(Cause::Refused("no more workers")),
        None => {}
    }
    if outcome.refused > 0 {
        return Err(Cause::Refused("no more blocks"));
    }
    if outcome.moved > 0 {
        return Err(Cause::Invalid("a name with two meanings"));
    }
    Ok(())
}

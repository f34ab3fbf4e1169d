//! Writes a snapshot, one worker after the other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use super::format::{MAX_KEY_BYTES, STEP_BYTES, Section, Step, encode_head};
use super::{Cursor, Meta, Saved};
use crate::ids::Worker;
use crate::index::RadixIndex;
use crate::index::types::{Block, DumpEvent};

/// Writes the confirmed content of `index`: predictions are not saved.
///
/// `cursor` is called for each worker before its content is copied, so that a cursor is never newer
/// than its blocks. It must name a batch that is completely applied to the index. Batches in
/// between are part of the copy and are applied again after a load, which is harmless for sets of
/// blocks. With [`CountMode::Copies`](crate::index::CountMode::Copies) their blocks would count
/// twice: hold back the worker's events between its `cursor` and the next worker's, or return no
/// cursor.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a key that is too long or too many blocks for the format;
/// otherwise the error of `out`.
///
/// # Consistency
/// Each worker is saved as of one moment, workers as of different ones. Queries go on; events wait
/// while the names of one worker are copied ([`RadixIndex::dump_worker`]).
///
/// # Cost
/// 16 bytes per block, and memory for two copies of the largest worker.
pub fn save(
    index: &RadixIndex,
    meta: &Meta,
    cursor: impl Fn(Worker) -> Option<Cursor>,
    out: &mut impl Write,
) -> io::Result<Saved> {
    save_workers(index, &index.workers(), meta, cursor, out)
}

/// As [`save`], for these workers only, which must be ascending.
///
/// # Errors
/// As [`save`].
pub fn save_workers(
    index: &RadixIndex,
    workers: &[Worker],
    meta: &Meta,
    cursor: impl Fn(Worker) -> Option<Cursor>,
    out: &mut impl Write,
) -> io::Result<Saved> {
    debug_assert!(workers.is_sorted(), "readers find sections by their workers' order");
    if meta.key.len() > MAX_KEY_BYTES {
        let message = format!("key of {} bytes, at most {MAX_KEY_BYTES}", meta.key.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let head = encode_head(meta, workers);
    out.write_all(&head)?;
    let mut saved = Saved { workers: workers.len(), blocks: 0, bytes: head.len() as u64 };
    let mut body = Vec::new();
    for (number, &worker) in workers.iter().enumerate() {
        let cursor = cursor(worker);
        let events = index.dump_worker(worker);
        let (names, labels) = encode_body(&events, &mut body)?;
        let steps = events.len() as u64;
        drop(events);
        let checksum = xxh3_64(&body);
        let section = Section { number, worker, cursor, steps, names, labels, checksum };
        let header = section.encode();
        out.write_all(&header)?;
        out.write_all(&body)?;
        saved.blocks += labels;
        saved.bytes += (header.len() + body.len()) as u64;
    }
    out.flush()?;
    Ok(saved)
}

/// Writes steps, then names, then labels. Returns the number of names and labels.
fn encode_body(events: &[DumpEvent], body: &mut Vec<u8>) -> io::Result<(u64, u64)> {
    let (mut names, mut labels) = (0, 0);
    for event in events {
        match event {
            DumpEvent::Stored { blocks, .. } => {
                names += blocks.len();
                labels += blocks.len();
            }
            DumpEvent::Removed { names: removed, .. } => names += removed.len(),
        }
    }
    body.clear();
    body.reserve(events.len() * STEP_BYTES + (names + labels) * 8);
    for event in events {
        let (is_stored, tier, parent, seed, len) = match event {
            DumpEvent::Stored { tier, parent, seed, blocks } => {
                (true, *tier, *parent, *seed, blocks.len())
            }
            DumpEvent::Removed { tier, names } => (false, *tier, None, 0, names.len()),
        };
        let len = u32::try_from(len).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("a step of {len} blocks"))
        })?;
        Step { is_stored, tier, len, parent, seed }.encode(body);
    }
    let name = |block: &Block| block.engine_hash.to_le_bytes();
    for event in events {
        match event {
            DumpEvent::Stored { blocks, .. } => body.extend(blocks.iter().flat_map(name)),
            DumpEvent::Removed { names, .. } => {
                body.extend(names.iter().flat_map(|name| name.to_le_bytes()));
            }
        }
    }
    let label = |block: &Block| block.local_hash.to_le_bytes();
    for event in events {
        if let DumpEvent::Stored { blocks, .. } = event {
            body.extend(blocks.iter().flat_map(label));
        }
    }
    Ok((names as u64, labels as u64))
}

/// Writes a snapshot to `path` atomically: a reader of `path` finds either the complete old
/// snapshot or the complete new one, even after a crash of the machine.
///
/// It is first written to a file beside it, `<name>.<process>-<n>.partial`, which only a killed
/// process leaves behind.
///
/// # Errors
/// As [`save`], or the file system's error. `path` is unchanged then.
pub fn save_to_path(
    index: &RadixIndex,
    meta: &Meta,
    cursor: impl Fn(Worker) -> Option<Cursor>,
    path: &Path,
) -> io::Result<Saved> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let Some(name) = path.file_name() else {
        let message = format!("{} does not name a file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    };
    // A device would be replaced by a file.
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        let message = format!("{} exists and is not a file: name another path", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // Relaxed: the number only has to be unique.
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut partial = name.to_owned();
    partial.push(format!(".{}-{number}.partial", std::process::id()));
    let mut partial = Partial { path: path.with_file_name(partial), is_renamed: false };
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).open(&partial.path)?;
    let saved = save(index, meta, cursor, &mut file)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&partial.path, path)?;
    partial.is_renamed = true;
    sync_folder(path)?;
    Ok(saved)
}

/// A file that is deleted unless it was renamed.
struct Partial {
    path: PathBuf,
    is_renamed: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.is_renamed {
            // An error is already being returned; a leftover file does no harm.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes a rename durable.
#[cfg(unix)]
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

//! A key in the discovery folder of `kvflash.discovery.file`, for as long as this process lives:
//! `keys/<key>` contains the number of a lease and the value, `leases/<number>` is locked by the
//! process, and `lock` is held while keys change.

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use rustix::process::getuid;

use crate::error::{Error, Result, invalid};

const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// Maximum characters of a namespace or component, as in `kvflash.runtime.component`.
const NAME_CHARS_MAX: usize = 48;
/// What Python's `quote(key, safe="")` replaces.
const QUOTED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_').remove(b'.').remove(b'-').remove(b'~');

/// The place where a publisher is announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Namespace of the workers.
    pub namespace: String,
    /// Component of the workers.
    pub component: String,
    /// Number of the worker.
    pub worker_id: u64,
}

/// The announced data: how to receive one rank's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer<'a> {
    /// Endpoint of the events.
    pub endpoint: &'a str,
    /// Endpoint of their replay.
    pub replay_endpoint: &'a str,
    /// The data-parallel rank.
    pub dp_rank: u32,
    /// Tokens in a block.
    pub block_size: u32,
}

/// An announced publisher; dropping it withdraws the announcement.
#[derive(Debug)]
pub struct Announcement {
    folder: PathBuf,
    key: PathBuf,
    lease: PathBuf,
    /// The process that announced it: a fork withdraws nothing.
    process: u32,
    /// Locked as long as it is open.
    _held: File,
}

impl Announcement {
    /// Announces a publisher in the folder set by the environment.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is not valid in a key, and if the environment selects
    /// another kind of discovery; `Io` if the folder is unusable.
    pub fn put(place: &Place, offer: &Offer<'_>) -> Result<Self> {
        check_discovery()?;
        check_name("namespace", &place.namespace)?;
        check_name("component", &place.component)?;
        let folder = folder()?;
        let dp_rank = offer.dp_rank;
        let key = format!(
            "v1/events/{}/{}/{}/{dp_rank}",
            place.namespace, place.component, place.worker_id
        );
        let name = utf8_percent_encode(&key, QUOTED).to_string();
        let value = format!(
            "{{\"kind\": \"zmq\", \"endpoint\": \"{}\", \"replay_endpoint\": \"{}\", \"block_size\": {}}}",
            offer.endpoint, offer.replay_endpoint, offer.block_size
        );
        write(&folder, &name, &value)
            .map_err(|error| Error::Io(format!("discovery folder {}: {error}", folder.display())))
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // Without the lock, others delete the key once the lease is released.
        if let Ok(_lock) = lock(&self.folder) {
            let _ = fs::remove_file(&self.key);
        }
        let _ = fs::remove_file(&self.lease);
    }
}

/// A random number, at least 1, for a worker without one.
///
/// # Errors
/// `Io` if the machine has no randomness.
pub fn random_id() -> Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::Io(format!("/dev/urandom: {error}")))?;
    Ok((u64::from_le_bytes(bytes) >> 1).max(1))
}

/// Refuses a name that routers, which are Python, could not watch.
fn check_name(field: &str, name: &str) -> Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if (1..=NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(invalid(format!(
        "{field} must have 1 to {NAME_CHARS_MAX} of the characters A-Z a-z 0-9 _ -, got {name:?}"
    )))
}

fn check_discovery() -> Result<()> {
    for name in ["KVFLASH_DISCOVERY", "KVFLASH_STORE_KV", "DYN_STORE_KV"] {
        if let Some(kind) = env::var_os(name).filter(|kind| !kind.is_empty()) {
            if kind == "file" {
                return Ok(());
            }
            return Err(invalid(format!(
                "{name} is {}: libkvflash announces in the discovery folder of the machine only; \
                 give fixed ports and no namespace, and register them",
                kind.display()
            )));
        }
    }
    Ok(())
}

fn folder() -> Result<PathBuf> {
    let user = getuid().as_raw();
    let named = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let folder = named("KVFLASH_DISCOVERY_DIR").unwrap_or_else(|| {
        let base = named("XDG_RUNTIME_DIR").unwrap_or_else(|| PathBuf::from("/tmp"));
        base.join(format!("kvflash-{user}")).join("discovery")
    });
    let broken =
        |error: io::Error| Error::Io(format!("discovery folder {}: {error}", folder.display()));
    for path in [&folder, &folder.join("leases"), &folder.join("keys"), &folder.join("new")] {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(broken)?;
    }
    let status = fs::metadata(&folder).map_err(broken)?;
    if status.uid() != user || status.mode() & 0o022 != 0 {
        let text = format!(
            "discovery folder {} must be owned by user {user} and not be writable by others",
            folder.display()
        );
        return Err(Error::Io(text));
    }
    Ok(folder)
}

fn write(folder: &Path, name: &str, value: &str) -> io::Result<Announcement> {
    let id = random_id().map_err(io::Error::other)?;
    let draft = folder.join("new").join(format!("lease-{id:016x}"));
    let held = File::create(&draft)?;
    // Locked before others can see it, so that they do not take it for dead.
    locked(&held, FlockOperation::NonBlockingLockExclusive)?;
    let lease = folder.join("leases").join(format!("{id:016x}"));
    fs::rename(&draft, &lease)?;
    let key = folder.join("keys").join(name);
    let _lock = lock(folder)?;
    if let Some(other) = living_lease(folder, &key) {
        let _ = fs::remove_file(&lease);
        let text = format!("another publisher that lives (lease {other:x}) announces {name}");
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    let draft = folder.join("new").join(format!("key-{id:016x}"));
    File::create(&draft)?.write_all(format!("{id:x}\n{value}").as_bytes())?;
    fs::rename(&draft, &key)?;
    let process = std::process::id();
    Ok(Announcement { folder: folder.to_owned(), key, lease, process, _held: held })
}

/// The lease of a key, if its process is alive.
fn living_lease(folder: &Path, key: &Path) -> Option<u64> {
    let content = fs::read(key).ok()?;
    let head = content.split(|&byte| byte == b'\n').next()?;
    let id = u64::from_str_radix(std::str::from_utf8(head).ok()?, 16).ok()?;
    let file = File::open(folder.join("leases").join(format!("{id:016x}"))).ok()?;
    locked(&file, FlockOperation::NonBlockingLockShared).err().map(|_| id)
}

/// Holds the folder's lock until dropped. Its holders keep it while they write a file; only a
/// process that is stopped at that moment holds it longer.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::create(folder.join("lock"))?;
    let end = Instant::now() + LOCK_TIMEOUT;
    while let Err(error) = locked(&file, FlockOperation::NonBlockingLockExclusive) {
        if error.kind() != io::ErrorKind::WouldBlock || Instant::now() >= end {
            return Err(error);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Ok(file)
}

fn locked(file: &File, operation: FlockOperation) -> io::Result<()> {
    Ok(retry_on_intr(|| flock(file, operation))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_routers_can_watch() {
        let longest = "x".repeat(NAME_CHARS_MAX);
        for name in ["a", "Prod_1-b", &longest] {
            assert_eq!(check_name("namespace", name), Ok(()));
        }
        for name in ["", "a/b", "my.team", "a b", "caf\u{e9}", &format!("{longest}x")] {
            let text = check_name("component", name).expect_err(name).to_string();
            assert_eq!(
                text,
                format!(
                    "component must have 1 to 48 of the characters A-Z a-z 0-9 _ -, got {name:?}"
                )
            );
        }
    }
}

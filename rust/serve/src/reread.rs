//! Reloads values from files that change.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use kvflash_core::error::{Error, Result};
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::metrics::OutcomeLabel;

/// Size limit of a file.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Interval of the checks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Modification time, length, mode and owner of each file; `None` for a missing file.
type Looks = Vec<Option<(SystemTime, u64, u32, u32)>>;

/// A value read from files, and reloaded when one of them changes.
pub(crate) struct Reread<T> {
    paths: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T> + Send + Sync>,
    value: RwLock<Arc<T>>,
    /// The state of the files at the last read, even if they were invalid.
    seen: Mutex<Looks>,
    /// Whether they were invalid.
    is_refused: AtomicBool,
    renewals: Family<OutcomeLabel, Counter>,
}

impl<T: Send + Sync + 'static> Reread<T> {
    /// The result of `read` for the files at `paths`.
    ///
    /// # Errors
    /// As `read`.
    pub fn new(
        paths: Vec<PathBuf>,
        read: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        let seen = Mutex::new(looks(&paths));
        let value = RwLock::new(Arc::new(read()?));
        let (is_refused, renewals) = (AtomicBool::new(false), Family::default());
        Ok(Self { paths, read: Box::new(read), value, seen, is_refused, renewals })
    }

    /// The latest valid value.
    pub fn current(&self) -> Arc<T> {
        Arc::clone(&self.value.read())
    }

    /// Reloads the files if they have changed. If the new value is invalid, the previous one stays
    /// and the reason is logged.
    ///
    /// Cost: one system call per file while nothing changes.
    pub fn renew(&self) {
        let found = looks(&self.paths);
        if std::mem::replace(&mut *self.seen.lock(), found.clone()) == found {
            return;
        }
        let files = self.files();
        let outcome = match (self.read)() {
            Ok(renewed) => {
                *self.value.write() = Arc::new(renewed);
                tracing::info!(files, "the file was read again after a change");
                "renewed"
            }
            // One of several files may not be updated yet.
            Err(error) => {
                tracing::warn!(files, %error, "the changed file cannot be used: the previous contents stay in \
                                               force");
                "refused"
            }
        };
        self.is_refused.store(outcome == "refused", Ordering::Relaxed);
        self.renewals.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// A warning while the files are invalid. The reason may quote them, so only the log has it.
    pub fn trouble(&self) -> Option<String> {
        self.is_refused.load(Ordering::Relaxed).then(|| {
            format!(
                "{}: the changed file cannot be used, so its previous contents stay in force, and a restart would \
                 fail; the log says what is wrong",
                self.files()
            )
        })
    }

    fn files(&self) -> String {
        let files: Vec<_> = self.paths.iter().map(|path| path.display().to_string()).collect();
        files.join(", ")
    }

    /// Checks for changes every second, forever.
    pub async fn keep_renewing(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let this = Arc::clone(&self);
            // A file system may be slow. A panic was printed, and the next check follows.
            let _ = tokio::task::spawn_blocking(move || this.renew()).await;
        }
    }

    /// Counts changes in `registry`, by outcome.
    pub fn register(&self, registry: &mut Registry, name: &'static str, help: &'static str) {
        registry.register(name, help, self.renewals.clone());
    }
}

impl<T> fmt::Debug for Reread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reread").field("paths", &self.paths).finish_non_exhaustive()
    }
}

fn looks(paths: &[PathBuf]) -> Looks {
    let look = |path: &PathBuf| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len(), metadata.mode(), metadata.uid()))
    };
    paths.iter().map(look).collect()
}

/// The content of a file that `flag` names.
///
/// # Errors
/// `Config`, naming flag and file, for a file that is unreadable or larger than 1 MiB.
pub(crate) fn bytes_of(flag: &str, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| fault(flag, path, format!("can't be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(fault(flag, path, format!("is larger than {MAX_FILE_BYTES} bytes, the limit")));
    }
    Ok(bytes)
}

/// The error about a file that `flag` names.
pub(crate) fn fault(flag: &str, path: &Path, what: impl fmt::Display) -> Error {
    Error::Config(format!("{flag} {}: {what}", path.display()))
}

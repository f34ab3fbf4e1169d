//! Registrations over HTTP, kept in a file and restored after a restart.
//!
//! The file has one JSON line per change: `{"put": KEY, "body": {...}}` or `{"remove": KEY}`. When
//! a service starts, it is rewritten with the current registrations.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use kvflash_core::error::{Error, Result};
use kvflash_core::log_limit::LogLimit;
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A larger file is not a state file: it holds a few hundred bytes per worker.
const BYTES_MAX: u64 = 256 << 20;

/// Maximum obsolete lines before the file is rewritten.
const OLD_LINES_MAX: usize = 4_096;

/// Keys of registrations that could not be restored begin with this, and a number.
const REFUSED: &str = "refused/";

/// The registrations, kept in the file of `--state-file`, if it is set.
#[derive(Default)]
pub(crate) struct Registrations(OnceLock<StateFile>);

impl Registrations {
    /// Restores the content of `file` with `register`, and keeps registrations there from now on.
    /// One that `register` refuses stays in the file, for a start that can restore it.
    ///
    /// # Errors
    /// `Config`, naming the flag and the file, if it is unreadable, not writable, another kind of
    /// file, or the file of another service.
    pub fn restore<T: DeserializeOwned>(
        &self,
        file: Option<&Path>,
        mut register: impl FnMut(T) -> Result<(), String>,
    ) -> Result<()> {
        let Some(path) = file else { return Ok(()) };
        let state = StateFile::open(path)?;
        let parse = |(key, body): (String, Value)| match T::deserialize(&body) {
            Ok(new) => Ok((key, new)),
            Err(error) => {
                let why = format!(
                    "{key:?} is not a registration of this service ({error}): name this service's own file; if this \
                     is that file, remove the line"
                );
                Err(wrong(path, &why))
            }
        };
        let mut inner = state.inner.lock();
        let mut kept: Vec<(String, T)> =
            inner.kept.clone().into_iter().map(parse).collect::<Result<_>>()?;
        // Those that were put aside come last: another worker may have the id of one by now.
        kept.sort_by_key(|(key, ..)| key.starts_with(REFUSED));
        let mut count = 0;
        for (key, new) in kept {
            let name = key.strip_prefix(REFUSED).and_then(|rest| rest.split_once('/'));
            let name = name.map_or(&*key, |(_, name)| name);
            match register(new) {
                Ok(()) => {
                    state.rename(&mut inner, &key, name);
                    count += 1;
                }
                Err(why) => {
                    tracing::warn!(
                        key = name,
                        why,
                        "a registration of --state-file can't be restored; it stays in the file for the next start"
                    );
                    let aside = if name == key { inner.aside(name) } else { key.clone() };
                    state.rename(&mut inner, &key, &aside);
                    inner.refused.insert(aside, why);
                }
            }
        }
        state.warn(&inner);
        drop(inner);
        tracing::info!(count, path = %path.display(), "registrations are restored");
        // It is restored once.
        let _ = self.0.set(state);
        Ok(())
    }

    /// Tries a failed write again; call it on a timer. A disk that has room again must not wait for
    /// the next change.
    pub fn try_again(&self) {
        if let Some(state) = self.0.get() {
            let mut inner = state.inner.lock();
            state.try_again(&mut inner);
            state.warn(&inner);
        }
    }

    /// A warning while the last write to the file has failed, or registrations in it are not
    /// restored. During a write, the one from before it: nothing here waits for a disk.
    pub fn trouble(&self) -> Option<String> {
        self.0.get()?.warning.lock().clone()
    }

    /// Begins a change of the workers and of the file. Others wait until it is dropped, so that the
    /// file has the changes in the order in which they were made.
    pub fn change(&self) -> Changing<'_> {
        Changing(self.0.get().map(|state| {
            let mut inner = state.inner.lock();
            // A fault comes again with the next write, which reports it.
            let _ = state.follow(&mut inner);
            state.warn(&inner);
            (state, inner)
        }))
    }
}

/// A change in progress; without a file nothing is kept.
pub(crate) struct Changing<'a>(Option<(&'a StateFile, MutexGuard<'a, Inner>)>);

impl Changing<'_> {
    /// Records that `body` is registered as `key`.
    pub fn put(&mut self, key: &str, body: &impl Serialize) {
        if let Some((state, inner)) = &mut self.0 {
            state.save(inner, key, Some(json!(body)));
        }
    }

    /// Changes one field of the registration `key`; ignored without a registration.
    pub fn amend(&mut self, key: &str, field: &str, value: impl Serialize) {
        if let Some((state, inner)) = &mut self.0
            && let Some(mut body) = inner.kept.get(key).cloned()
        {
            body[field] = json!(value);
            state.save(inner, key, Some(body));
        }
    }

    /// Removes the registration `key`.
    pub fn remove(&mut self, key: &str) {
        if let Some((state, inner)) = &mut self.0
            && inner.kept.contains_key(key)
        {
            state.save(inner, key, None);
        }
    }

    /// Removes the registrations with this key prefix and a body that `is_meant` selects.
    pub fn remove_where(&mut self, prefix: &str, is_meant: impl Fn(&Value) -> bool) {
        let Some((state, inner)) = &mut self.0 else { return };
        let named = inner.kept.range(prefix.to_owned()..);
        let named = named.take_while(|(key, _)| key.starts_with(prefix));
        let meant = named.filter(|(_, body)| is_meant(body)).map(|(key, _)| key.clone());
        for key in meant.collect::<Vec<_>>() {
            state.save(inner, &key, None);
        }
    }
}

struct StateFile {
    path: PathBuf,
    begun: Instant,
    inner: Mutex<Inner>,
    /// See [`Registrations::trouble`]; set by those that write.
    warning: Mutex<Option<String>>,
}

struct Inner {
    file: File,
    /// The registrations, by key.
    kept: BTreeMap<String, Value>,
    /// Why a registration could not be restored, by key.
    refused: BTreeMap<String, String>,
    /// Lines in the file.
    lines: usize,
    /// Why the last write failed. It may have left a part of a line.
    fault: Option<String>,
    /// The file is missing, or its last line is cut off: the next write begins a new one.
    is_broken: bool,
    /// Limits log lines about a file that is not writable.
    log: LogLimit,
}

#[derive(Deserialize)]
struct Line {
    put: Option<String>,
    body: Option<Value>,
    remove: Option<String>,
}

impl StateFile {
    /// Reads the registrations, and rewrites the file.
    fn open(path: &Path) -> Result<Self> {
        let (kept, _) = read(path).map_err(|why| wrong(path, &why))?;
        let file = write_anew(path, &kept)
            .map_err(|error| wrong(path, &format!("can't write it: {error}")))?;
        let (refused, log) = Default::default();
        let (lines, is_broken, begun) = (kept.len(), false, Instant::now());
        let inner = Inner { file, lines, kept, refused, fault: None, is_broken, log };
        let (inner, warning) = (Mutex::new(inner), Mutex::default());
        Ok(Self { path: path.to_owned(), begun, inner, warning })
    }

    /// Moves a registration to another key; the file has it at each moment.
    fn rename(&self, inner: &mut Inner, key: &str, to: &str) {
        if key != to {
            let body = inner.kept.get(key).cloned();
            self.save(inner, to, body);
            self.save(inner, key, None);
        }
    }

    /// Warns of the present state from now on.
    fn warn(&self, inner: &Inner) {
        let first_refused = inner.refused.first_key_value();
        let trouble = match (&inner.fault, first_refused) {
            (Some(error), _) => Some(format!(
                "cannot be written, so changes of the workers are lost at a restart: {error}; it is tried again every \
                 second"
            )),
            (None, Some((key, why))) => Some(format!(
                "registrations that could not be restored: {}, such as {key}: {why}; the next start tries again, or \
                 stop the service and remove the line",
                inner.refused.len()
            )),
            (None, None) => None,
        };
        let path = self.path.display();
        *self.warning.lock() = trouble.map(|trouble| format!("--state-file {path}: {trouble}"));
    }

    /// Sets a registration, or removes it without a `body`. It counts even if the file can't have
    /// it: a full disk only affects the next restart.
    fn save(&self, inner: &mut Inner, key: &str, body: Option<Value>) {
        let written = self.write(inner, key, body.as_ref());
        inner.fault = written.as_ref().err().map(io::Error::to_string);
        self.warn(inner);
        if let Err(error) = written
            && let Some(held_back) = inner.log.pass(self.begun.elapsed().as_millis() as u64)
        {
            tracing::error!(
                path = %self.path.display(), %error, held_back,
                "a registration cannot be saved (--state-file): it is lost at a restart, unless it is saved by then; it is tried again every second"
            );
        }
    }

    /// Writes the registrations again after a failed write.
    fn try_again(&self, inner: &mut Inner) {
        if inner.fault.is_none() {
            return;
        }
        let written = self.follow(inner);
        // A process that has taken over has a file that can be written.
        if inner.fault.is_none() {
            return;
        }
        inner.fault =
            written.and_then(|()| self.rewrite(inner)).err().map(|error| error.to_string());
        if inner.fault.is_none() {
            tracing::info!(path = %self.path.display(), "the registrations are saved again (--state-file)");
        }
    }

    fn rewrite(&self, inner: &mut Inner) -> io::Result<()> {
        (inner.file, inner.lines) = (write_anew(&self.path, &inner.kept)?, inner.kept.len());
        inner.is_broken = false;
        Ok(())
    }

    /// Goes on with the file of a process that has taken over: its registrations count, not the
    /// ones here.
    fn follow(&self, inner: &mut Inner) -> io::Result<()> {
        let ours = inner.file.metadata()?;
        match fs::metadata(&self.path) {
            Ok(there) if there.ino() == ours.ino() && there.dev() == ours.dev() => {}
            Ok(_) => {
                let (kept, is_whole) = read(&self.path).map_err(io::Error::other)?;
                (inner.file, inner.lines) = (append(&self.path)?, kept.len());
                // The next line would be joined to one that was cut off.
                (inner.kept, inner.is_broken, inner.fault) = (kept, !is_whole, None);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => inner.is_broken = true,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn write(&self, inner: &mut Inner, key: &str, body: Option<&Value>) -> io::Result<()> {
        let followed = self.follow(inner);
        set(&mut inner.kept, key, body);
        followed?;
        let is_long = inner.lines > 2 * inner.kept.len() + OLD_LINES_MAX;
        if inner.fault.is_some() || inner.is_broken || is_long {
            return self.rewrite(inner);
        }
        inner.lines += 1;
        inner.file.write_all(line_of(key, body).as_bytes())
    }
}

impl Inner {
    /// A free key for a registration that can't be restored, out of the way of workers with its id.
    fn aside(&self, name: &str) -> String {
        let key = |number: usize| format!("{REFUSED}{number}/{name}");
        let taken = (0..).take_while(|number| self.kept.contains_key(&key(*number))).count();
        key(taken)
    }
}

fn set(kept: &mut BTreeMap<String, Value>, key: &str, body: Option<&Value>) {
    match body {
        Some(body) => drop(kept.insert(key.to_owned(), body.clone())),
        None => drop(kept.remove(key)),
    }
}

/// The registrations in a file, by key, and whether its last line is complete. A missing file has
/// none.
fn read(path: &Path) -> Result<(BTreeMap<String, Value>, bool), String> {
    let bytes = match fs::metadata(path) {
        Ok(found) if found.len() > BYTES_MAX => {
            return Err(format!("it has {} bytes; the limit is {BYTES_MAX}", found.len()));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        _ => fs::read(path).map_err(|error| format!("can't read it: {error}"))?,
    };
    let is_whole = bytes.last().is_none_or(|last| *last == b'\n');
    let mut kept = BTreeMap::new();
    // Not as text: the last line may end within a character.
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((at, line)) = lines.next() {
        match serde_json::from_slice(line) {
            Ok(Line { put: Some(key), body: Some(body), .. }) => drop(kept.insert(key, body)),
            Ok(Line { remove: Some(key), .. }) => drop(kept.remove(&key)),
            // The machine stopped during the last write.
            _ if (at > 0 || is_begun(line)) && lines.peek().is_none() && !is_whole => {
                tracing::warn!(
                    path = %path.display(), line = at + 1,
                    "the last line of --state-file is cut off: the change that it held is lost"
                );
            }
            _ => {
                return Err(format!(
                    "line {} is not a registration as kvflash writes it, such as \
                     {{\"body\": {{...}}, \"put\": \"worker/1\"}}: remove the line, or name another file",
                    at + 1
                ));
            }
        }
    }
    Ok((kept, is_whole))
}

fn wrong(path: &Path, why: &str) -> Error {
    Error::Config(format!("--state-file {}: {why}", path.display()))
}

/// Whether `line` is the beginning of a line of such a file, and not of another kind of file.
fn is_begun(line: &[u8]) -> bool {
    let begins = ["{\"body\":", "{\"put\":", "{\"remove\":"];
    begins
        .iter()
        .any(|begin| line.starts_with(begin.as_bytes()) || begin.as_bytes().starts_with(line))
}

fn line_of(key: &str, body: Option<&Value>) -> String {
    let line = match body {
        Some(body) => json!({ "put": key, "body": body }),
        None => json!({ "remove": key }),
    };
    format!("{line}\n")
}

/// Concurrent readers find either the old file or the new one.
fn write_anew(path: &Path, kept: &BTreeMap<String, Value>) -> io::Result<File> {
    // A name of its own: others may keep files in the folder, and processes in two containers, which
    // have the same id, may share it.
    let mut anew = path.as_os_str().to_owned();
    anew.push(format!(".{:016x}.tmp", rand::random::<u64>()));
    let anew = PathBuf::from(anew);
    let options = OpenOptions::new().write(true).create_new(true).mode(0o600).to_owned();
    let lines: String = kept.iter().map(|(key, body)| line_of(key, Some(body))).collect();
    let write = || {
        let mut file = options.open(&anew)?;
        file.write_all(lines.as_bytes())?;
        file.sync_all()?;
        fs::rename(&anew, path)
    };
    // No part of a file stays behind, such as on a full disk, whose error counts.
    write().inspect_err(|_| drop(fs::remove_file(&anew)))?;
    append(path)
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn at(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvflash-state-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder.join(name)
    }

    fn kept(path: &Path) -> Vec<(String, Value)> {
        read(path).unwrap().0.into_iter().collect()
    }

    /// The registrations in a file that can all be restored.
    fn opened(path: &Path) -> Registrations {
        let registrations = Registrations::default();
        registrations.restore(Some(path), |_: Value| Ok(())).unwrap();
        registrations
    }

    #[test]
    fn what_is_registered_comes_back() {
        let path = at("back.jsonl");
        let state = opened(&path);
        assert_eq!(kept(&path), []);
        state.change().put("worker/1", &json!({"url": "http://a:1"}));
        state.change().put("worker/2", &json!({"url": "http://b:1"}));
        state.change().put("worker/1", &json!({"url": "http://a:2"}));
        state.change().remove("worker/2");
        // A process takes over, then the old one writes once more.
        let next = opened(&path);
        assert_eq!(kept(&path), [("worker/1".to_owned(), json!({"url": "http://a:2"}))]);
        state.change().put("worker/3", &json!({}));
        next.change().put("worker/4", &json!({}));
        let text = fs::read_to_string(&path).unwrap();
        // The machine stopped within a line.
        fs::write(&path, text + "{\"put\": \"worker/9\", \"bo").unwrap();
        let keys: Vec<String> = kept(&path).into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["worker/1", "worker/3", "worker/4"]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_of_something_else_is_refused_and_left_alone() {
        let path = at("other");
        fs::write(&path, "[server]\nport = 1\n").unwrap();
        let error = StateFile::open(&path).err().unwrap().to_string();
        assert!(error.contains("line 1 is not a registration"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "[server]\nport = 1\n");
        let folder = StateFile::open(&std::env::temp_dir()).err().unwrap().to_string();
        assert!(folder.contains("can't read it"), "{folder}");
    }

    #[test]
    fn a_first_line_that_was_cut_off_is_no_reason_to_stop() {
        let path = at("first.jsonl");
        let state = opened(&path);
        state.change().put("worker/1", &json!({"url": "http://a:1"}));
        let line = fs::read_to_string(&path).unwrap();
        fs::write(&path, &line[..line.len() / 2]).unwrap();
        assert_eq!(kept(&path), []);
    }

    #[test]
    fn the_last_line_may_be_cut_off_anywhere() {
        let path = at("character.jsonl");
        let state = opened(&path);
        state.change().put("worker/1", &json!({"model": "a"}));
        let first = fs::read(&path).unwrap().len();
        state.change().put("worker/2", &json!({"model": "größer 模型"}));
        let whole = fs::read(&path).unwrap();
        for end in 0..=whole.len() {
            fs::write(&path, &whole[..end]).unwrap();
            // A line is complete without its end.
            let count = [first, whole.len()].iter().filter(|line| end + 1 >= **line).count();
            assert_eq!(kept(&path).len(), count, "{end}");
        }
        // Damage elsewhere is a fault.
        fs::write(&path, [b"\xff\n", &whole[..]].concat()).unwrap();
        assert!(read(&path).unwrap_err().starts_with("line 1 is not a registration"));
    }

    #[test]
    fn a_failed_write_is_told_and_made_good_by_the_next() {
        let folder = at("full");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.jsonl");
        let registrations = Registrations::default();
        registrations.restore(Some(&path), |_: Value| unreachable!("it is new")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        registrations.change().put("worker/1", &json!({}));
        // Those who look do not wait for a write, even if they have never looked before.
        let writing = registrations.change();
        let trouble = registrations.trouble().unwrap();
        drop(writing);
        assert!(trouble.contains("state.jsonl: cannot be written"), "{trouble}");
        assert_eq!(registrations.trouble(), Some(trouble));
        fs::create_dir_all(&folder).unwrap();
        registrations.change().put("worker/2", &json!({}));
        assert_eq!(registrations.trouble(), None);
        let kept = kept(&path);
        assert_eq!(kept, [("worker/1".to_owned(), json!({})), ("worker/2".to_owned(), json!({}))]);
    }

    #[test]
    fn a_failed_write_is_tried_again_on_a_timer_only() {
        let folder = at("room");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.jsonl");
        let registrations = opened(&path);
        fs::remove_dir_all(&folder).unwrap();
        registrations.change().put("worker/1", &json!({}));
        registrations.try_again();
        fs::create_dir_all(&folder).unwrap();
        assert!(registrations.trouble().is_some() && !path.exists(), "asking writes nothing");
        registrations.try_again();
        assert_eq!(registrations.trouble(), None);
        assert_eq!(kept(&path), [("worker/1".to_owned(), json!({}))]);
        registrations.change().put("worker/2", &json!({}));
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);

        // Another process has taken over: its file stays.
        fs::remove_dir_all(&folder).unwrap();
        registrations.change().put("worker/3", &json!({}));
        fs::create_dir_all(&folder).unwrap();
        fs::write(&path, "{\"body\":1,\"put\":\"worker/9\"}\n").unwrap();
        registrations.try_again();
        assert_eq!(registrations.trouble(), None);
        assert_eq!(kept(&path), [("worker/9".to_owned(), json!(1))]);
    }

    #[test]
    fn what_a_process_that_takes_over_keeps_is_not_written_over() {
        let path = at("taken.jsonl");
        let old = opened(&path);
        old.change().put("worker/1", &json!(1));
        let next = opened(&path);
        next.change().put("worker/2", &json!(2));
        // The old one could not write before, and has many lines of its own.
        let mut inner = old.0.get().unwrap().inner.lock();
        (inner.fault, inner.lines) = (Some("no space".to_owned()), 2 * OLD_LINES_MAX);
        drop(inner);
        old.change().remove("worker/1");
        assert_eq!(old.trouble(), None);
        next.change().put("worker/3", &json!(3));
        let wanted = [("worker/2".to_owned(), json!(2)), ("worker/3".to_owned(), json!(3))];
        assert_eq!(kept(&path), wanted);
    }

    #[test]
    fn a_change_is_made_to_what_a_process_that_takes_over_keeps() {
        let path = at("amended.jsonl");
        let old = opened(&path);
        old.change().put("worker/1", &json!({"url": "http://a:1", "draining": false}));
        old.change().put("worker/2", &json!({"url": "http://b:1"}));
        let next = opened(&path);
        next.change().put("worker/1", &json!({"url": "http://a:2", "draining": false}));
        next.change().put("worker/3", &json!({"url": "http://b:1"}));
        next.change().remove("worker/2");
        old.change().amend("worker/1", "draining", true);
        old.change().amend("worker/2", "draining", true);
        old.change().remove_where("worker/", |body| body["url"] == "http://b:1");
        let wanted = json!({"url": "http://a:2", "draining": true});
        assert_eq!(kept(&path), [("worker/1".to_owned(), wanted)]);
    }

    #[test]
    fn no_line_is_joined_to_one_that_was_cut_off() {
        let path = at("joined.jsonl");
        // The process that took over stopped within a line, or before its end.
        for (begun, is_kept) in [("{\"body\":2,\"pu", false), ("{\"body\":2,\"put\":\"b\"}", true)]
        {
            let old = opened(&path);
            let text = "{\"body\":1,\"put\":\"a\"}\n";
            fs::remove_file(&path).unwrap();
            fs::write(&path, format!("{text}{begun}")).unwrap();
            old.change().put("c", &json!(3));
            old.change().put("d", &json!(4));
            let keys: String = kept(&path).into_iter().map(|(key, _)| key).collect();
            assert_eq!(keys, if is_kept { "abcd" } else { "acd" });
        }
    }

    #[test]
    fn a_file_that_is_gone_is_written_anew() {
        let path = at("gone.jsonl");
        let registrations = opened(&path);
        registrations.change().put("worker/1", &json!(1));
        fs::remove_file(&path).unwrap();
        registrations.change().put("worker/2", &json!(2));
        let wanted = [("worker/1".to_owned(), json!(1)), ("worker/2".to_owned(), json!(2))];
        assert_eq!(kept(&path), wanted);
    }

    #[test]
    fn a_process_with_the_same_id_keeps_its_unfinished_file() {
        let folder = at("containers");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.jsonl");
        let theirs = folder.join(format!("state.jsonl.{}.tmp", std::process::id()));
        fs::write(&theirs, "unfinished").unwrap();
        opened(&path).change().put("worker/1", &json!(1));
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "unfinished");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    }

    #[test]
    fn a_failed_rewrite_leaves_no_file_behind() {
        let folder = at("failed");
        // A folder in the place of the file, which can't be replaced.
        let path = folder.join("state.jsonl");
        fs::create_dir_all(&path).unwrap();
        write_anew(&path, &BTreeMap::new()).unwrap_err();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn lines_that_count_no_more_go() {
        let path = at("many.jsonl");
        let state = opened(&path);
        for at in 0..3 * OLD_LINES_MAX {
            state.change().put("worker/1", &json!({ "url": at }));
        }
        state.change().remove("worker/2");
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= OLD_LINES_MAX + 3, "{lines}");
        let kept = kept(&path);
        assert_eq!(kept, [("worker/1".to_owned(), json!({"url": 3 * OLD_LINES_MAX - 1}))]);
    }

    #[test]
    fn what_is_refused_stays_for_the_next_start() {
        let path = at("refused.jsonl");
        let sibling = at("refused.new");
        fs::write(&sibling, "mine").unwrap();
        let state = opened(&path);
        state.change().put("worker/1", &json!(1));
        state.change().put("worker/2", &json!(2));
        let registrations = Registrations::default();
        let take = |body: u32| if body == 1 { Ok(()) } else { Err("--max-workers".to_owned()) };
        registrations.restore(Some(&path), take).unwrap();
        let trouble = registrations.trouble().unwrap();
        assert!(trouble.contains("1, such as refused/0/worker/2: --max-workers"), "{trouble}");
        // Another worker gets the id, and goes.
        registrations.change().put("worker/2", &json!(3));
        registrations.change().remove("worker/2");
        for starts in 0..2 {
            let next = Registrations::default();
            let mut seen = Vec::new();
            let take = |body: u32| {
                seen.push(body);
                if starts == 1 || body == 1 { Ok(()) } else { Err("--max-workers".to_owned()) }
            };
            next.restore(Some(&path), take).unwrap();
            seen.sort_unstable();
            assert_eq!((seen, next.trouble().is_some()), (vec![1, 2], starts == 0));
        }
        let kept = kept(&path);
        assert_eq!(kept, [("worker/1".to_owned(), json!(1)), ("worker/2".to_owned(), json!(2))]);
        assert_eq!(fs::read_to_string(sibling).unwrap(), "mine");
    }

    #[test]
    fn what_was_put_aside_takes_nobody_s_place() {
        let path = at("aside.jsonl");
        let state = opened(&path);
        state.change().put("refused/0/worker/2", &json!(1));
        state.change().put("worker/1", &json!(2));
        state.change().put("worker/2", &json!(3));
        let text = fs::read_to_string(&path).unwrap();
        let registrations = Registrations::default();
        let mut seen = Vec::new();
        let take = |body: u32| {
            seen.push(body);
            if body == 1 { Err("the id is in use".to_owned()) } else { Ok(()) }
        };
        registrations.restore(Some(&path), take).unwrap();
        assert_eq!(seen, [2, 3, 1]);
        assert!(registrations.trouble().unwrap().contains("refused/0/worker/2: the id is in use"));
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "nothing is written again");
    }

    #[test]
    fn the_file_of_another_service_is_refused_and_left_alone() {
        let path = at("service.jsonl");
        let state = opened(&path);
        state.change().put("worker/1", &json!({"url": "http://a:1"}));
        let text = fs::read_to_string(&path).unwrap();
        let take = |_: u32| unreachable!("it is no number");
        let error = Registrations::default().restore(Some(&path), take).unwrap_err().to_string();
        assert!(error.contains("\"worker/1\" is not a registration of this service"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn registrations_are_changed_one_by_one_and_by_prefix() {
        let path = at("changed.jsonl");
        let registrations = Registrations::default();
        registrations.change().put("worker/1", &json!({}));
        registrations.restore(None, |_: Value| unreachable!("there is no file")).unwrap();
        let state = opened(&path);
        state.change().put("worker/1", &json!(1));
        registrations.restore(Some(&path), |_: Value| Ok(())).unwrap();
        registrations.change().put("worker/3", &json!({"url": "u"}));
        registrations.change().amend("worker/3", "state", "draining");
        registrations.change().amend("worker/4", "state", "draining");
        registrations.change().put("worker/5", &json!({"url": "v"}));
        registrations
            .change()
            .remove_where("worker/", |body| *body == json!(1) || body["url"] == "v");
        let wanted = [("worker/3".to_owned(), json!({"url": "u", "state": "draining"}))];
        assert_eq!(kept(&path), wanted);
    }
}

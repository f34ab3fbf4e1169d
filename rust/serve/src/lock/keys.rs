//! The file of keys: `id:HASH:ROLE[:option=value,...]`, one key a line; HASH may be the word `certificate`.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use argon2::password_hash::PasswordHashString;
use kvflash_core::error::{Error, Result};
use kvflash_core::named;
use parking_lot::Mutex;
use rand::Rng;
use subtle::ConstantTimeEq;

use super::secret::{Digest256, Secret, digest_of, is_key_of};
use crate::reread::{Reread, bytes_of, fault};

pub(super) const KEYS_FLAG: &str = "--keys-file";

/// Keys of a file.
const MAX_KEYS: usize = 10_000;
/// Different salts of sha256 hashes: a presented key is hashed once for each.
const MAX_SALTS: usize = 64;
/// Keys with an argon2 hash: a presented key that is not known yet is compared with each.
const MAX_SLOW_KEYS: usize = 16;

/// Longest key that is looked at, bytes.
pub(super) const MAX_KEY_BYTES: usize = 1_024;
const MAX_NAME_BYTES: usize = 64;

named! {
    /// What the owner of a key may ask for, by the word for it in the file and in tokens.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Role {
        /// Everything: workers, settings, explanations, metrics, and the clients' API.
        Admin = "admin",
        /// The clients' API: `/v1/*` and the like.
        Client = "client",
        /// `/metrics` and `/health`.
        Metrics = "metrics",
    }
}

named! {
    /// Fields and headers that control an engine, by their name in the file and in metrics; they pass to it only
    /// where a client's key allows them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Pass {
        /// The field `kv_transfer_params`.
        KvTransferParams = "kv_transfer_params",
        /// The fields `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.
        Bootstrap = "bootstrap",
        /// The header `x-data-parallel-rank` and the fields of that meaning.
        DataParallelRank = "data_parallel_rank",
        /// Priorities, in fields and headers.
        Priority = "priority",
        /// The fields `chat_template` and `chat_template_kwargs`.
        ChatTemplate = "chat_template",
        /// The field `nvext`.
        Nvext = "nvext",
        /// Headers in which a gateway names the engine.
        GatewayHeaders = "gateway_headers",
    }
}

/// A line of the file, without what it says of the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Its name in logs and metrics.
    pub id: String,
    /// What its owner may ask for.
    pub role: Role,
    /// The tenant of a client; its own id where none is named.
    pub tenant: String,
    /// Requests a minute.
    pub rpm: Option<u64>,
    /// Prompt tokens a minute that no cache held.
    pub tpm: Option<u64>,
    /// Requests in flight at once.
    pub concurrency: Option<u64>,
    /// Whether its tenant shares no cached block with another tenant.
    pub is_isolated: bool,
    /// What passes through to engines.
    pub allow: Vec<Pass>,
}

impl Key {
    /// A key without limits, of a tenant of its own; none of the fields that control an engine passes.
    pub fn new(id: &str, role: Role) -> Self {
        Self {
            id: id.to_owned(),
            role,
            tenant: id.to_owned(),
            rpm: None,
            tpm: None,
            concurrency: None,
            is_isolated: false,
            allow: Vec::new(),
        }
    }
}

type ByDigest = HashMap<Digest256, Arc<Key>>;

/// The keys of a file.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    /// By salt, then by digest.
    fast: Vec<(Vec<u8>, ByDigest)>,
    slow: Vec<(PasswordHashString, Arc<Key>)>,
    /// By the DNS name of the certificate that the owner shows, in lower case.
    certified: HashMap<String, Arc<Key>>,
    /// Keys whose argon2 hash was compared once, by their digest with `pepper`: at most those of `slow`.
    verified: Mutex<ByDigest>,
    pepper: [u8; 32],
    roles: HashSet<Role>,
}

/// Where the keys are read from.
pub(crate) type KeysFile = Reread<Keys>;

/// What is known of a presented key without a slow comparison.
pub(super) enum Found {
    Key(Arc<Key>),
    /// Only [`Keys::compare`] can tell.
    Slow,
    Nothing,
}

impl Keys {
    /// The keys of the file at `path`, read again when it changes. A role that had a key stays
    /// closed when the file has none any more, for example because it is empty.
    ///
    /// # Errors
    /// `Config`, naming file, line, field, what came and what is legal.
    pub fn open(path: &Path) -> Result<KeysFile> {
        let (of, closed) = (path.to_owned(), Mutex::new(HashSet::new()));
        Reread::new(vec![path.to_owned()], move || {
            let mut keys = Self::read(&of)?;
            let mut closed = closed.lock();
            for role in closed.iter().filter(|role| !keys.roles.contains(*role)) {
                let (role, file) = (role.name(), of.display());
                tracing::error!(
                    role, %file,
                    "the file no longer has a key of this role: the role's paths stay closed to everybody until you \
                     add a key or restart the service"
                );
            }
            keys.roles.extend(closed.iter());
            closed.clone_from(&keys.roles);
            Ok(keys)
        })
    }

    fn read(path: &Path) -> Result<Self> {
        check_mode(path)?;
        let bytes = bytes_of(KEYS_FLAG, path)?;
        let text =
            String::from_utf8(bytes).map_err(|_| fault(KEYS_FLAG, path, "is not UTF-8 text"))?;
        Self::parse(&text).map_err(|why| fault(KEYS_FLAG, path, why))
    }

    /// # Errors
    /// Line, field, what came and what is legal; never a hash.
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let mut keys = Self::default();
        rand::rng().fill(&mut keys.pepper);
        let mut ids = HashSet::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = |why: String| format!("line {}: {why}", number + 1);
            let (key, secret) = parse_line(line).map_err(at)?;
            if !ids.insert(key.id.clone()) {
                return Err(at(format!("duplicate id {:?}", key.id)));
            }
            if ids.len() > MAX_KEYS {
                return Err(at(format!("there are more than {MAX_KEYS} keys, the limit")));
            }
            keys.roles.insert(key.role);
            keys.add(Arc::new(key), secret).map_err(at)?;
        }
        Ok(keys)
    }

    fn add(&mut self, key: Arc<Key>, secret: Secret) -> std::result::Result<(), String> {
        let (salt, digest) = match secret {
            Secret::Sha256 { salt, digest } => (salt, digest),
            Secret::Certificate => {
                // Ids differ; two that differ in case name one certificate.
                return match self.certified.insert(key.id.to_ascii_lowercase(), key) {
                    None => Ok(()),
                    Some(other) => {
                        Err(format!("the certificate already belongs to {:?}", other.id))
                    }
                };
            }
            Secret::Argon2(hash) => {
                if self.slow.len() >= MAX_SLOW_KEYS {
                    return Err(format!(
                        "there are more than {MAX_SLOW_KEYS} keys with an argon2 hash, the limit: create the \
                         others with `kvflash keys add`"
                    ));
                }
                self.slow.push((hash, key));
                return Ok(());
            }
        };
        let known = self.fast.iter().position(|(other, _)| *other == salt);
        let at = match known {
            Some(at) => at,
            None if self.fast.len() >= MAX_SALTS => {
                return Err(format!(
                    "there are more than {MAX_SALTS} different salts, the limit: several keys may share a salt"
                ));
            }
            None => {
                self.fast.push((salt, ByDigest::new()));
                self.fast.len() - 1
            }
        };
        match self.fast[at].1.insert(digest, key) {
            None => Ok(()),
            Some(other) => Err(format!("the key {:?} has the same hash", other.id)),
        }
    }

    /// Whether there is a key of this role.
    pub fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// Whether a key's tenant shares no cache with others.
    pub fn has_isolated(&self) -> bool {
        let fast = self.fast.iter().flat_map(|(_, keys)| keys.values());
        let slow = self.slow.iter().map(|(_, key)| key);
        fast.chain(slow).chain(self.certified.values()).any(|key| key.is_isolated)
    }

    /// Whether a line asks for a client's certificate.
    pub fn has_certified(&self) -> bool {
        !self.certified.is_empty()
    }

    /// The line of a client whose certificate, signed by an authority of ours, has these DNS names: that of the
    /// first name that has one.
    pub(super) fn find_certified(&self, names: &[String]) -> Option<Arc<Key>> {
        names.iter().find_map(|name| self.certified.get(&name.to_ascii_lowercase())).cloned()
    }

    /// Look for a presented key.
    ///
    /// # Cost
    /// A hash for each salt of the file; the look-ups' time depends on digests only, of which a client cannot
    /// choose even a part.
    pub(super) fn find(&self, presented: &[u8]) -> Found {
        if presented.is_empty() || presented.len() > MAX_KEY_BYTES {
            return Found::Nothing;
        }
        for (salt, keys) in &self.fast {
            let digest = digest_of(salt, presented);
            if let Some((known, key)) = keys.get_key_value(&digest)
                && bool::from(known.ct_eq(&digest))
            {
                return Found::Key(Arc::clone(key));
            }
        }
        if self.slow.is_empty() {
            return Found::Nothing;
        }
        let digest = digest_of(&self.pepper, presented);
        match self.verified.lock().get(&digest) {
            Some(key) => Found::Key(Arc::clone(key)),
            None => Found::Slow,
        }
    }

    /// Compare a presented key with the argon2 hashes, and remember it when it is one of them.
    ///
    /// # Cost
    /// Some tens of milliseconds for each such hash: never on a thread that serves.
    pub(super) fn compare(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let (_, key) = self.slow.iter().find(|(hash, _)| is_key_of(hash, presented))?;
        self.verified.lock().insert(digest_of(&self.pepper, presented), Arc::clone(key));
        Some(Arc::clone(key))
    }
}

/// Check the text of a file of keys.
///
/// # Errors
/// `Config`: what is `blamed`, line, field, what came and what is legal.
pub fn check_keys(text: &str, blamed: &str) -> Result<()> {
    Keys::parse(text).map(drop).map_err(|why| Error::Config(format!("{blamed}: {why}")))
}

/// Check one key's line of such a file.
///
/// # Errors
/// `Config`: what is `blamed`, field, what came and what is legal.
pub fn check_key(line: &str, blamed: &str) -> Result<()> {
    parse_line(line).map(drop).map_err(|why| Error::Config(format!("{blamed}: {why}")))
}

/// # Errors
/// `Config` for a file that every user of the machine may write: whoever can add a key has all rights.
fn check_mode(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o002 == 0 {
        return Ok(());
    }
    let mode = mode & 0o777;
    Err(fault(
        KEYS_FLAG,
        path,
        format!("every user may write to it (mode {mode:o}): run chmod 600"),
    ))
}

fn parse_line(line: &str) -> std::result::Result<(Key, Secret), String> {
    let mut fields = line.splitn(4, ':');
    let (Some(id), Some(hash), Some(role)) = (fields.next(), fields.next(), fields.next()) else {
        // Not the line: it may hold a key.
        return Err("must be id:HASH:ROLE[:option=value,...]; `kvflash keys add` writes one".into());
    };
    check_name("id", id)?;
    let role = Role::from_name(role)
        .ok_or_else(|| format!("role must be admin, client or metrics, got {:?}", short(role)))?;
    let secret = Secret::parse(hash).map_err(|why| format!("hash: {why}"))?;
    let mut key = Key::new(id, role);
    let options = fields.next().unwrap_or_default().split(',').filter(|text| !text.is_empty());
    let mut seen = HashSet::new();
    for option in options {
        let (name, value) = option.split_once('=').ok_or_else(|| {
            format!("option {:?} must be name=value, such as rpm=60", short(option))
        })?;
        if !seen.insert(name) {
            return Err(format!("duplicate option {name}"));
        }
        set_option(&mut key, name, value)?;
    }
    Ok((key, secret))
}

pub(super) fn set_option(
    key: &mut Key,
    name: &str,
    value: &str,
) -> std::result::Result<(), String> {
    const NAMES: &str = "tenant, rpm, tpm, concurrency, isolate, allow";
    if key.role != Role::Client && NAMES.split(", ").any(|known| known == name) {
        return Err(format!("option {name} is only for clients, the role is {}", key.role.name()));
    }
    let number = || match value.parse::<u64>() {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => Err(format!(
            "option {name} must be a whole number of at least 1, got {:?}",
            short(value)
        )),
    };
    match name {
        "tenant" => {
            check_name("option tenant", value)?;
            value.clone_into(&mut key.tenant);
        }
        "rpm" => key.rpm = number()?,
        "tpm" => key.tpm = number()?,
        "concurrency" => key.concurrency = number()?,
        "isolate" => {
            key.is_isolated = match value {
                "true" => true,
                "false" => false,
                other => {
                    let other = short(other);
                    return Err(format!("option isolate must be true or false, got {other:?}"));
                }
            }
        }
        "allow" => {
            for word in value.split('|') {
                let Some(pass) = Pass::from_name(word) else {
                    let names = Pass::ALL.map(Pass::name).join("|");
                    let word = short(word);
                    return Err(format!("option allow takes {names}, got {word:?}"));
                };
                key.allow.push(pass);
            }
        }
        other => {
            let other = short(other);
            return Err(format!("unknown option {other:?}; known options are {NAMES}"));
        }
    }
    Ok(())
}

/// Names are words that logs and metrics can have as they are.
fn check_name(field: &str, text: &str) -> std::result::Result<(), String> {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    if (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_legal) {
        return Ok(());
    }
    let text = short(text);
    Err(format!(
        "{field} must be 1 to {MAX_NAME_BYTES} letters, digits and any of . _ - @, got {text:?}"
    ))
}

pub(super) fn short(text: &str) -> String {
    text.chars().take(MAX_NAME_BYTES).collect()
}

#[cfg(test)]
pub(super) mod tests;

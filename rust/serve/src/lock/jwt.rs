//! Tokens of another server: JWTs, checked against its public keys, which a file holds.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use jsonwebtoken::errors::{Error as TokenError, ErrorKind};
use jsonwebtoken::jwk::{Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, Validation, decode, decode_header};
use kvflash_core::error::{Error, Result};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::keys::{Key, Role, set_option, short};
use super::secret::Digest256;
use crate::HttpSettings;
use crate::metrics::OutcomeLabel;
use crate::reread::{Reread, bytes_of, fault};

mod signature;
#[cfg(test)]
pub(super) mod tests;

pub(super) const JWKS_FLAG: &str = "--jwt-jwks-file";

/// What the clocks of two servers may differ by, in seconds.
const LEEWAY_S: u64 = 60;
/// Keys of a file.
const MAX_JWKS_KEYS: usize = 100;
/// Longest token that is looked at.
const MAX_TOKEN_BYTES: usize = 8 * 1024;
/// Tokens that were found right and are not checked again; beyond them the one that ends first goes.
const MAX_CACHED_TOKENS: usize = 10_000;
const MAX_SUBJECT_BYTES: usize = 128;

/// Claims that mean what the options of a line of `--keys-file` do.
const OPTIONS: [&str; 6] = ["tenant", "rpm", "tpm", "concurrency", "isolate", "allow"];

type Claims = Map<String, Value>;

/// Checks tokens. Their signatures are checked once, until the file of keys changes.
#[derive(Debug)]
pub(crate) struct Tokens {
    issuer: String,
    role_claim: String,
    pub(super) jwks: Arc<Reread<Jwks>>,
    checks: Family<OutcomeLabel, Counter>,
    cached: Gauge,
    evicted: Counter,
}

/// The public keys of a file, and the tokens that were right by them.
pub(crate) struct Jwks {
    keys: HashMap<String, Trusted>,
    known: Mutex<Known>,
}

/// A key, and what a token that it signed must have: the algorithm that the file names for it, among others.
struct Trusted {
    key: DecodingKey,
    validation: Validation,
}

/// Tokens that were found right, by their digest, with when they end.
#[derive(Default)]
struct Known {
    by_digest: HashMap<Digest256, (Arc<Key>, u64)>,
    by_end: BTreeSet<(u64, Digest256)>,
}

impl Known {
    /// Returns how many went for it.
    fn put(&mut self, digest: Digest256, key: Arc<Key>, end_s: u64) -> u64 {
        self.by_digest.insert(digest, (key, end_s));
        self.by_end.insert((end_s, digest));
        let mut gone = 0;
        while self.by_digest.len() > MAX_CACHED_TOKENS
            && let Some((_, first)) = self.by_end.pop_first()
        {
            self.by_digest.remove(&first);
            gone += 1;
        }
        gone
    }
}

impl Tokens {
    /// Nothing where no file of public keys is given.
    ///
    /// # Errors
    /// `Config`, naming the flag that is missing, or the file and what is wrong with it.
    pub fn open(settings: &HttpSettings) -> Result<Option<Self>> {
        let HttpSettings { jwt_jwks_file, jwt_issuer, jwt_audience, jwt_role_claim, .. } = settings;
        let given = (jwt_jwks_file, jwt_issuer, jwt_audience);
        let (path, issuer, audience) = match given {
            (None, None, None) => return Ok(None),
            (Some(path), Some(issuer), Some(audience)) => (path, issuer, audience),
            _ => {
                let what = format!(
                    "{JWKS_FLAG}, --jwt-issuer and --jwt-audience need each other: give all three, or none"
                );
                return Err(Error::Config(what));
            }
        };
        signature::install();
        let (of, wanted) = (path.clone(), (issuer.clone(), audience.clone()));
        let is_open = AtomicBool::new(false);
        let read = move || {
            let (keys, unused) = Jwks::read(&of, &wanted.0, &wanted.1)?;
            if keys.keys.is_empty() {
                let why = if unused.is_empty() { "it has no keys" } else { &unused };
                if !is_open.load(Ordering::Relaxed) {
                    return Err(fault(
                        JWKS_FLAG,
                        &of,
                        format!("has no key that can check a token: {why}"),
                    ));
                }
                tracing::error!(
                    file = %of.display(), why,
                    "the file no longer has a key that can verify a token: no token is accepted until you add one"
                );
            } else if !unused.is_empty() {
                tracing::info!("{JWKS_FLAG}: keys that check no token: {unused}");
            }
            is_open.store(true, Ordering::Relaxed);
            Ok(keys)
        };
        Ok(Some(Self {
            issuer: issuer.clone(),
            role_claim: jwt_role_claim.clone(),
            jwks: Arc::new(Reread::new(vec![path.clone()], read)?),
            checks: Family::default(),
            cached: Gauge::default(),
            evicted: Counter::default(),
        }))
    }

    /// A warning while the file can't be used, or no token can be accepted.
    pub fn trouble(&self) -> Option<String> {
        let is_closed = || {
            self.jwks.current().keys.is_empty().then(|| {
                format!("{JWKS_FLAG}: the file has no key that can check a token, so all tokens are refused")
            })
        };
        self.jwks.trouble().or_else(is_closed)
    }

    /// Who issues them.
    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Have checks, and changes of the file, counted in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Tokens that came with requests: cached (right, as before), verified, refused";
        registry.register("jwt_checks", help, self.checks.clone());
        let help = "Tokens that were found right and are not verified again";
        registry.register("jwt_cached_tokens", help, self.cached.clone());
        let help = "Tokens that are verified again because the table of tokens was full";
        registry.register("jwt_cached_tokens_evicted", help, self.evicted.clone());
        let help = "Reloads of --jwt-jwks-file, by outcome; the log has the reasons";
        self.jwks.register(registry, "jwks_renewals", help);
    }

    /// The owner of a token.
    ///
    /// # Errors
    /// What is wrong with it, in words, without the token.
    ///
    /// # Cost
    /// A digest for a token that is known, else a signature: 20 to 200 us.
    pub fn check(&self, token: &[u8], now_s: u64) -> std::result::Result<Arc<Key>, String> {
        let jwks = self.jwks.current();
        let digest: Digest256 = Sha256::digest(token).into();
        let count = |outcome| self.checks.get_or_create(&OutcomeLabel { outcome }).inc();
        let known = jwks.known.lock().by_digest.get(&digest).cloned();
        if let Some((key, end_s)) = known {
            let is_over = now_s > end_s;
            count(if is_over { "refused" } else { "cached" });
            return if is_over { Err(told(&ErrorKind::ExpiredSignature, "")) } else { Ok(key) };
        }
        let verified = self.verify(&jwks, token);
        count(if verified.is_ok() { "verified" } else { "refused" });
        let (key, end_s) = verified?;
        let key = Arc::new(key);
        let mut known = jwks.known.lock();
        self.evicted.inc_by(known.put(digest, Arc::clone(&key), end_s));
        self.cached.set(known.by_digest.len() as i64);
        Ok(key)
    }

    /// The owner of a token, and when it ends, in seconds since 1970.
    fn verify(&self, jwks: &Jwks, token: &[u8]) -> std::result::Result<(Key, u64), String> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(format!(
                "the token has {} bytes; the limit is {MAX_TOKEN_BYTES}",
                token.len()
            ));
        }
        let header = decode_header(token).map_err(|_| {
            "the token's header can't be read, or names an algorithm that is not allowed; none never is".to_owned()
        })?;
        if header.crit.is_some() {
            return Err(
                "the token has critical extensions (crit), of which none is known".to_owned()
            );
        }
        let id = header.kid.ok_or("the token does not name its key (kid)")?;
        let trusted = jwks.keys.get(&id).ok_or_else(|| {
            format!("the token's key (kid) {:?} is not in {JWKS_FLAG}", short(&id))
        })?;
        let decoded = decode::<Claims>(token, &trusted.key, &trusted.validation);
        let claims = decoded.map_err(|error: TokenError| told(error.kind(), &id))?.claims;
        // A list would be one of several issuers.
        if claims.get("iss").and_then(Value::as_str) != Some(&self.issuer) {
            return Err(told(&ErrorKind::InvalidIssuer, &id));
        }
        let exp = claims.get("exp").and_then(Value::as_f64).unwrap_or_default();
        let key = owner(&claims, &self.role_claim)?;
        Ok((key, (exp.round() as u64).saturating_add(LEEWAY_S)))
    }
}

/// Whether what came as a key is meant as a token.
pub(super) fn is_token(presented: &[u8]) -> bool {
    // A header in JSON begins so.
    presented.starts_with(b"eyJ") && presented.iter().filter(|byte| **byte == b'.').count() == 2
}

/// The time of now, in seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What the library says of a token, in words; it is that of the key `id`.
fn told(kind: &ErrorKind, id: &str) -> String {
    let id = short(id);
    match kind {
        ErrorKind::ExpiredSignature => "the token has expired (exp)".to_owned(),
        ErrorKind::ImmatureSignature => "the token is not valid yet (nbf)".to_owned(),
        ErrorKind::InvalidIssuer => {
            "the token's issuer (iss) is not that of --jwt-issuer".to_owned()
        }
        ErrorKind::InvalidAudience => {
            "the token's audience (aud) does not include that of --jwt-audience".to_owned()
        }
        ErrorKind::MissingRequiredClaim(name) => {
            format!("the token's claim {name} is missing, or has the wrong type")
        }
        ErrorKind::InvalidAlgorithm => {
            format!(
                "the token's algorithm (alg) is not the one that {JWKS_FLAG} names for the key {id:?}"
            )
        }
        ErrorKind::InvalidSignature => format!("the token was not signed with the key {id:?}"),
        _ => "the token can't be read".to_owned(),
    }
}

/// Who the claims are about.
fn owner(claims: &Claims, role_claim: &str) -> std::result::Result<Key, String> {
    let subject = claims.get("sub").and_then(Value::as_str).unwrap_or_default();
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@:|/+".contains(&byte);
    if !(1..=MAX_SUBJECT_BYTES).contains(&subject.len()) || !subject.bytes().all(is_legal) {
        return Err(format!(
            "the token's subject (sub) must be 1 to {MAX_SUBJECT_BYTES} letters, digits and any of . _ - @ : | / +, \
             got {:?}",
            short(subject)
        ));
    }
    let said = claims.get(role_claim).unwrap_or(&Value::Null);
    let roles = match said {
        Value::Array(roles) => roles.as_slice(),
        one => std::slice::from_ref(one),
    };
    let known = roles.iter().filter_map(Value::as_str).find_map(Role::from_name);
    let role = known.ok_or_else(|| {
        let got = short(&said.to_string());
        format!("the token's claim {role_claim} must be admin, client or metrics, got {got}")
    })?;
    let mut key = Key::new(subject, role);
    // Limits are for clients; an issuer may put a tenant into everybody's tokens.
    for name in OPTIONS.into_iter().filter(|_| role == Role::Client) {
        let text = match claims.get(name).unwrap_or(&Value::Null) {
            Value::Null => continue,
            Value::String(text) => text.clone(),
            Value::Array(words) => words
                .iter()
                .map(|word| word.as_str().unwrap_or_default())
                .collect::<Vec<_>>()
                .join("|"),
            other => other.to_string(),
        };
        set_option(&mut key, name, &text).map_err(|why| format!("the token's claims: {why}"))?;
    }
    Ok(key)
}

impl Jwks {
    /// The keys, and why others in the file can't be used.
    fn read(path: &Path, issuer: &str, audience: &str) -> Result<(Self, String)> {
        let wrong = |why: String| fault(JWKS_FLAG, path, why);
        Self::parse(&bytes_of(JWKS_FLAG, path)?, issuer, audience).map_err(wrong)
    }

    fn parse(
        bytes: &[u8],
        issuer: &str,
        audience: &str,
    ) -> std::result::Result<(Self, String), String> {
        #[derive(Deserialize)]
        struct Set {
            keys: Vec<Value>,
        }
        let set: Set = serde_json::from_slice(bytes)
            .map_err(|error| format!("must be a JWKS, {{\"keys\": [...]}}: {error}"))?;
        if set.keys.len() > MAX_JWKS_KEYS {
            return Err(format!("has {} keys; the limit is {MAX_JWKS_KEYS}", set.keys.len()));
        }
        let (mut keys, mut unused) = (HashMap::new(), Vec::new());
        for (at, value) in set.keys.into_iter().enumerate() {
            let name = value
                .get("kid")
                .and_then(Value::as_str)
                .map_or_else(|| format!("keys[{at}]"), |id| format!("{:?}", short(id)));
            match usable(value, issuer, audience) {
                Err(why) => unused.push(format!("{name}: {why}")),
                Ok((id, trusted)) => {
                    if keys.insert(id, trusted).is_some() {
                        return Err(format!("has two keys with the kid {name}"));
                    }
                }
            }
        }
        Ok((Self { keys, known: Mutex::default() }, unused.join("; ")))
    }
}

/// A key by which tokens can be checked, and its id.
///
/// # Errors
/// Why tokens can't be checked by it.
fn usable(
    value: Value,
    issuer: &str,
    audience: &str,
) -> std::result::Result<(String, Trusted), String> {
    let jwk: Jwk = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let common = &jwk.common;
    if common.public_key_use.as_ref().is_some_and(|meant| *meant != PublicKeyUse::Signature) {
        return Err("its use is not sig".to_owned());
    }
    let operations = common.key_operations.as_ref();
    if operations.is_some_and(|operations| !operations.contains(&KeyOperations::Verify)) {
        return Err("its key_ops do not include verify".to_owned());
    }
    let id = common.key_id.clone().filter(|id| !id.is_empty()).ok_or("it has no kid")?;
    let named = common.key_algorithm.ok_or("it has no alg")?;
    let algorithm: Algorithm = named
        .to_string()
        .parse()
        .map_err(|_| format!("its alg is {named}, which signs no token"))?;
    if algorithm.family() == AlgorithmFamily::Hmac {
        return Err(format!("its alg is {named}, and keys that sign must not be here"));
    }
    let key = DecodingKey::from_jwk(&jwk).map_err(|error| error.to_string())?;
    if key.family() != algorithm.family() {
        return Err(format!("its alg is {named}, which is for another kind of key"));
    }
    signature::check(algorithm, &key)?;
    let mut validation = Validation::new(algorithm);
    validation.leeway = LEEWAY_S;
    validation.validate_nbf = true;
    validation.set_issuer(&[issuer]);
    validation.set_audience(&[audience]);
    validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
    Ok((id, Trusted { key, validation }))
}

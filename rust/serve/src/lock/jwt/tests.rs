#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::PathBuf;

use axum::http::Request;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
use serde_json::json;

use super::super::entry::tests::told;
use super::super::{Face, Lock, Pass};
use super::*;

const ISSUER: &str = "https://issuer.example";
const AUDIENCE: &str = "kvflash";
const CHAT: &str = "/v1/chat/completions";

fn base64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// A server that issues tokens, with keys that it makes when a test begins.
struct Issuer {
    ecdsa: EcdsaKeyPair,
    ed25519: Ed25519KeyPair,
}

impl Issuer {
    fn new() -> Self {
        let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let made = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let ecdsa = EcdsaKeyPair::from_pkcs8(algorithm, made.as_ref(), &random).unwrap();
        let made = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        Self { ecdsa, ed25519: Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap() }
    }

    /// Its public keys, beside some that check no token.
    fn jwks(&self) -> Value {
        let point = self.ecdsa.public_key().as_ref();
        let (x, y) = (base64(&point[1..33]), base64(&point[33..]));
        json!({ "keys": [
            { "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "ec", "x": x, "y": y },
            { "kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "kid": "ed",
              "x": base64(self.ed25519.public_key()) },
            { "kty": "EC", "crv": "P-256", "kid": "no alg", "x": x, "y": y },
            { "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "enc", "kid": "enc", "x": x, "y": y },
            { "kty": "EC", "crv": "P-256", "alg": "RS256", "kid": "other kind", "x": x, "y": y },
            { "kty": "oct", "alg": "HS256", "kid": "hmac", "k": base64("a secret of both servers") },
            { "kty": "new", "alg": "XY1", "kid": "unknown" },
        ] })
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let message = format!("{}.{}", base64(header.to_string()), base64(claims.to_string()));
        let signature = match header["alg"].as_str().unwrap() {
            "EdDSA" => self.ed25519.sign(message.as_bytes()).as_ref().to_vec(),
            "none" => Vec::new(),
            // Whatever else is named, it is this.
            _ => {
                let made = self.ecdsa.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
                made.as_ref().to_vec()
            }
        };
        format!("{message}.{}", base64(signature))
    }

    fn token(&self, changes: Value) -> String {
        self.sign(&json!({ "alg": "ES256", "kid": "ec" }), &claims(changes))
    }
}

/// The claims of a token that is right, but for these; null takes one away.
fn claims(changes: Value) -> Value {
    let mut claims = json!({
        "iss": ISSUER, "aud": ["other", AUDIENCE], "sub": "ann", "exp": now_s() + 600, "kvflash_role": "client",
    });
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => claims.as_object_mut().unwrap().remove(name),
            value => claims.as_object_mut().unwrap().insert(name.clone(), value.clone()),
        };
    }
    claims
}

fn settings(name: &str, jwks: &Value) -> (HttpSettings, PathBuf) {
    let path = std::env::temp_dir().join(format!("kvflash-jwks-{name}-{}", std::process::id()));
    std::fs::write(&path, jwks.to_string()).unwrap();
    let settings = HttpSettings {
        jwt_jwks_file: Some(path.clone()),
        jwt_issuer: Some(ISSUER.to_owned()),
        jwt_audience: Some(AUDIENCE.to_owned()),
        ..HttpSettings::default()
    };
    (settings, path)
}

fn tokens(name: &str, issuer: &Issuer) -> Tokens {
    let (settings, path) = settings(name, &issuer.jwks());
    let tokens = Tokens::open(&settings).unwrap().unwrap();
    std::fs::remove_file(path).unwrap();
    tokens
}

fn error(tokens: &Tokens, token: &str) -> String {
    tokens.check(token.as_bytes(), now_s()).unwrap_err()
}

#[test]
fn a_token_that_is_right_names_its_owner() {
    let issuer = Issuer::new();
    let tokens = tokens("right", &issuer);
    let check = |token: &str| (*tokens.check(token.as_bytes(), now_s()).unwrap()).clone();
    assert_eq!(check(&issuer.token(json!({}))), Key::new("ann", Role::Client));
    let ed = issuer.sign(&json!({ "alg": "EdDSA", "kid": "ed" }), &claims(json!({})));
    assert_eq!(check(&ed), Key::new("ann", Role::Client));
    let limits = json!({
        "sub": "system:serviceaccount:ns:bob", "tenant": "blue", "rpm": 60, "tpm": "1000", "concurrency": 4,
        "isolate": true, "allow": ["nvext", "priority"], "aud": AUDIENCE, "nbf": now_s() + 50, "exp": now_s() - 50,
    });
    let bob = Key {
        tenant: "blue".into(),
        rpm: Some(60),
        tpm: Some(1_000),
        concurrency: Some(4),
        is_isolated: true,
        allow: vec![Pass::Nvext, Pass::Priority],
        ..Key::new("system:serviceaccount:ns:bob", Role::Client)
    };
    assert_eq!(check(&issuer.token(limits)), bob);
    // Limits say nothing of others, whose tokens may name their tenant for other servers.
    let roles = json!({ "kvflash_role": ["offline", "admin"], "tenant": "a b", "rpm": 5 });
    assert_eq!(check(&issuer.token(roles)), Key::new("ann", Role::Admin));
}

#[test]
fn what_is_wrong_with_a_token_is_told_and_the_token_is_not() {
    let issuer = Issuer::new();
    let tokens = tokens("wrong", &issuer);
    let long = "x".repeat(MAX_SUBJECT_BYTES + 1);
    for (changes, wanted) in [
        (json!({ "exp": now_s() - 70 }), "has expired (exp)"),
        (json!({ "exp": null }), "claim exp is missing"),
        (json!({ "exp": "soon" }), "claim exp is missing, or has the wrong type"),
        (json!({ "nbf": now_s() + 70 }), "not valid yet (nbf)"),
        (json!({ "iss": "https://other.example" }), "not that of --jwt-issuer"),
        (json!({ "iss": [ISSUER, "https://other.example"] }), "not that of --jwt-issuer"),
        (json!({ "iss": null }), "claim iss is missing"),
        (json!({ "aud": "other" }), "does not include that of --jwt-audience"),
        (json!({ "aud": null }), "claim aud is missing"),
        (json!({ "sub": null }), "claim sub is missing"),
        (json!({ "sub": "a b" }), "subject (sub) must be 1 to 128 letters"),
        (json!({ "sub": "" }), "subject (sub) must be"),
        (json!({ "sub": long }), "subject (sub) must be"),
        (
            json!({ "kvflash_role": null }),
            "kvflash_role must be admin, client or metrics, got null",
        ),
        (json!({ "kvflash_role": "root" }), "must be admin, client or metrics, got \"root\""),
        (json!({ "rpm": 0 }), "claims: option rpm must be a whole number of at least 1"),
        (json!({ "tenant": "a b" }), "claims: option tenant must be"),
        (json!({ "allow": [5] }), "claims: option allow takes"),
    ] {
        let token = issuer.token(changes.clone());
        let error = error(&tokens, &token);
        assert!(error.contains(wanted), "{changes}: {error}");
        assert!(token.split('.').all(|part| !error.contains(part)), "{error}");
    }
    let long = issuer.token(json!({ "padding": "x".repeat(MAX_TOKEN_BYTES) }));
    assert!(error(&tokens, &long).contains("the limit is 8192"));
}

#[test]
fn only_the_algorithm_of_a_key_that_is_named_counts() {
    let issuer = Issuer::new();
    let tokens = tokens("algorithm", &issuer);
    for (header, wanted) in [
        (json!({ "alg": "none", "kid": "ec" }), "none never is"),
        (
            json!({ "alg": "HS256", "kid": "ec" }),
            "not the one that --jwt-jwks-file names for the key \"ec\"",
        ),
        (json!({ "alg": "EdDSA", "kid": "ec" }), "not the one that"),
        (json!({ "alg": "ES384", "kid": "ec" }), "not the one that"),
        (json!({ "alg": "HS256", "kid": "hmac" }), "\"hmac\" is not in --jwt-jwks-file"),
        (json!({ "alg": "ES256", "kid": "no alg" }), "\"no alg\" is not in"),
        (json!({ "alg": "ES256", "kid": "enc" }), "\"enc\" is not in"),
        (json!({ "alg": "RS256", "kid": "other kind" }), "\"other kind\" is not in"),
        (json!({ "alg": "ES256", "kid": "fresh" }), "\"fresh\" is not in"),
        (json!({ "alg": "ES256" }), "does not name its key (kid)"),
        (json!({ "alg": "ES256", "kid": "ec", "crit": ["exp"] }), "critical extensions"),
    ] {
        let error = error(&tokens, &issuer.sign(&header, &claims(json!({}))));
        assert!(error.contains(wanted), "{header}: {error}");
    }
    // One that another server signed, and one that was changed.
    let other = Issuer::new();
    let header = json!({ "alg": "ES256", "kid": "ec", "jwk": other.jwks()["keys"][0] });
    for foreign in [other.token(json!({})), other.sign(&header, &claims(json!({})))] {
        assert!(error(&tokens, &foreign).contains("was not signed with the key \"ec\""));
    }
    let token = issuer.token(json!({}));
    let (message, signature) = token.rsplit_once('.').unwrap();
    let (header, _) = message.split_once('.').unwrap();
    let admin = base64(claims(json!({ "kvflash_role": "admin" })).to_string());
    assert!(error(&tokens, &format!("{header}.{admin}.{signature}")).contains("was not signed"));
}

#[test]
fn a_token_is_verified_once_until_it_ends_or_the_keys_change() {
    let issuer = Issuer::new();
    let (settings, path) = settings("once", &issuer.jwks());
    let tokens = Tokens::open(&settings).unwrap().unwrap();
    let count = |outcome| tokens.checks.get_or_create(&OutcomeLabel { outcome }).get();
    let token = issuer.token(json!({}));
    let now_s = now_s();
    for _ in 0..3 {
        tokens.check(token.as_bytes(), now_s).unwrap();
    }
    assert_eq!((count("verified"), count("cached"), count("refused")), (1, 2, 0));
    let late = tokens.check(token.as_bytes(), now_s + 600 + LEEWAY_S + 2).unwrap_err();
    assert!(late.contains("has expired"), "{late}");
    assert_eq!(count("refused"), 1);
    // The issuer has other keys now.
    let mut changed = Issuer::new().jwks();
    changed["more"] = json!("another length");
    std::fs::write(&path, changed.to_string()).unwrap();
    tokens.jwks.renew();
    assert!(tokens.check(token.as_bytes(), now_s).unwrap_err().contains("was not signed"));
    // What can't be read leaves the keys as they are; a file without keys takes them away.
    std::fs::write(&path, issuer.jwks().to_string()).unwrap();
    tokens.jwks.renew();
    std::fs::write(&path, "{").unwrap();
    tokens.jwks.renew();
    tokens.check(token.as_bytes(), now_s).unwrap();
    std::fs::write(&path, r#"{"keys": []}"#).unwrap();
    tokens.jwks.renew();
    assert!(tokens.check(token.as_bytes(), now_s).unwrap_err().contains("is not in"));
    assert!(tokens.trouble().unwrap().contains("all tokens are refused"));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_table_of_known_tokens_has_a_limit() {
    let (mut known, key) = (Known::default(), Arc::new(Key::new("a", Role::Client)));
    let digest = |n: u64| -> Digest256 { Sha256::digest(n.to_le_bytes()).into() };
    let most = MAX_CACHED_TOKENS as u64;
    // The later it came, the earlier it ends.
    for n in 0..most {
        assert_eq!(known.put(digest(n), Arc::clone(&key), 2 * most - n), 0);
    }
    assert_eq!(known.put(digest(most), Arc::clone(&key), 5 * most), 1);
    assert_eq!((known.by_digest.len(), known.by_end.len()), (MAX_CACHED_TOKENS, MAX_CACHED_TOKENS));
    assert!(!known.by_digest.contains_key(&digest(most - 1)), "that ended first");
    assert!(known.by_digest.contains_key(&digest(most)));
}

#[test]
fn a_file_without_a_usable_key_and_flags_alone_are_refused() {
    let mut one = Issuer::new().jwks();
    let keys = one["keys"].as_array().unwrap().clone();
    let parse = |value: &Value| {
        let parsed = Jwks::parse(value.to_string().as_bytes(), ISSUER, AUDIENCE);
        parsed.map(|(jwks, unused)| (jwks.keys.len(), unused))
    };
    assert_eq!(parse(&one).unwrap().0, 2);
    one["keys"] = json!(keys[2..]);
    let (settings, path) = settings("unusable", &one);
    let error = Tokens::open(&settings).err().unwrap().to_string();
    std::fs::remove_file(path).unwrap();
    for wanted in [
        "has no key that can check a token",
        "\"no alg\": it has no alg",
        "\"enc\": its use is not sig",
        "\"other kind\": its alg is RS256, which is for another kind of key",
        "\"hmac\": its alg is HS256, and keys that sign must not be here",
        "\"unknown\": ",
    ] {
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
    let point = &keys[0];
    assert!(
        parse(&json!({ "keys": [point, point] })).unwrap_err().contains("two keys with the kid")
    );
    assert!(parse(&json!({ "keys": vec![point; 101] })).unwrap_err().contains("the limit is 100"));
    assert!(parse(&json!([])).unwrap_err().contains("must be a JWKS"));
    let mut short = point.clone();
    short["x"] = json!(base64([1; 20]));
    assert!(parse(&json!({ "keys": [short] })).unwrap().1.contains("must have 65 bytes, got 53"));
    let mut settings = HttpSettings { jwt_issuer: Some(ISSUER.into()), ..HttpSettings::default() };
    assert!(Tokens::open(&settings).unwrap_err().to_string().contains("need each other"));
    settings.jwt_issuer = None;
    assert!(Tokens::open(&settings).unwrap().is_none());
}

/// What becomes of a request with this in `Authorization`, and the words of a refusal.
fn ask(lock: &Lock, path: &str, key: Option<&str>) -> (String, String) {
    let peer: SocketAddr = ([127, 0, 0, 1], 4_711).into();
    let mut request = Request::post(path).header("host", "localhost").body(()).unwrap();
    if let Some(key) = key {
        let value = format!("Bearer {key}").parse().unwrap();
        request.headers_mut().insert("authorization", value);
    }
    told(lock, peer, &request)
}

#[test]
fn tokens_close_every_side_and_open_that_of_their_role() {
    let issuer = Issuer::new();
    let (mut settings, path) = settings("lock", &issuer.jwks());
    let alone = Lock::new(&settings, Face::Api).unwrap();
    let keys = path.with_extension("keys");
    let hash = super::super::keys::tests::sha256("the key of bob", "salt one");
    std::fs::write(&keys, format!("bob:{hash}:client\n")).unwrap();
    settings.keys_file = Some(keys.clone());
    let both = Lock::new(&settings, Face::Api).unwrap();
    for path in [&path, &keys] {
        std::fs::remove_file(path).unwrap();
    }
    let of = |role: &str| issuer.token(json!({ "kvflash_role": role, "sub": role }));
    let (client, metrics, admin) = (of("client"), of("metrics"), of("admin"));
    let expired = issuer.token(json!({ "exp": 1 }));
    for lock in [&alone, &both] {
        for (path, key, wanted) in [
            (CHAT, None, "401 no_key"),
            ("/metrics", None, "401 no_key"),
            ("/workers", None, "401 no_key"),
            ("/live", None, "anonymous"),
            (CHAT, Some(&client), "client"),
            (CHAT, Some(&admin), "admin"),
            (CHAT, Some(&metrics), "403 role"),
            ("/metrics", Some(&metrics), "metrics"),
            ("/workers", Some(&client), "403 role"),
            ("/workers", Some(&admin), "admin"),
            (CHAT, Some(&expired), "401 token"),
            ("/live", Some(&expired), "anonymous"),
        ] {
            assert_eq!(ask(lock, path, key.map(String::as_str)).0, wanted, "{path}");
        }
        let (_, message) = ask(lock, CHAT, Some(&expired));
        assert!(message.starts_with("the token has expired (exp); send another one"), "{message}");
        assert!(ask(lock, CHAT, None).1.contains("a token of https://issuer.example"));
    }
    assert_eq!(ask(&both, CHAT, Some("the key of bob")).0, "bob");
    assert_eq!(ask(&alone, CHAT, Some("the key of bob")).0, "401 unknown_key");
    assert!(ask(&alone, CHAT, Some("x")).1.contains("the key is not a token (JWT)"));
}

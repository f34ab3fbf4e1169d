#![allow(clippy::unwrap_used)]

use axum::body::to_bytes;
use serde_json::Value;

use super::super::keys::tests::{argon2, sha256};
use super::*;

const PEER: ([u8; 4], u16) = ([10, 0, 0, 9], 4_711);

/// A lock with these keys, each `id:key:role`.
fn lock(name: &str, keys: &[&str]) -> Lock {
    let path = std::env::temp_dir().join(format!("kvflash-lock-{name}-{}", std::process::id()));
    let line = |text: &&str| {
        let [id, key, role] = text.split(':').collect::<Vec<_>>().try_into().unwrap();
        let hash = if key.starts_with("slow") { argon2(key) } else { sha256(key, "salt one") };
        format!("{id}:{hash}:{role}\n")
    };
    std::fs::write(&path, keys.iter().map(line).collect::<String>()).unwrap();
    let lock = Lock::new(Some(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    lock
}

fn request(path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::post(path).body(()).unwrap();
    for (name, value) in headers {
        let name: HeaderName = name.parse().unwrap();
        request.headers_mut().append(name, value.parse().unwrap());
    }
    request
}

/// What becomes of a request: the caller's name, or the status and cause of its refusal.
async fn outcome(lock: &Lock, path: &str, headers: &[(&str, &str)]) -> String {
    let request = request(path, headers);
    let told = |refusal: Refusal| format!("{} {}", refusal.reject.status.as_u16(), refusal.cause);
    match lock.look(&request, PEER.into()) {
        Verdict::Open(caller) => caller.name().to_owned(),
        Verdict::Refused(refusal) => told(refusal),
        Verdict::Slow(presented) => match lock.compare(&request, presented).await {
            Ok(caller) => format!("slowly {}", caller.name()),
            Err(refusal) => format!("slowly {}", told(refusal)),
        },
    }
}

#[tokio::test]
async fn a_key_of_a_role_closes_the_side_of_the_role() {
    const CHAT: &str = "/v1/chat/completions";
    let open = Lock::default();
    let clients = lock("clients", &["bob:kb:client"]);
    let all = lock("all", &["ann:ka:admin", "bob:kb:client", "eve:ke:metrics"]);
    let cases = [
        (&open, CHAT, None, "anonymous"),
        (&open, CHAT, Some("engine's own"), "anonymous"),
        (&clients, CHAT, None, "401 no_key"),
        (&clients, CHAT, Some("x"), "401 unknown_key"),
        (&clients, CHAT, Some("kb"), "bob"),
        (&clients, "/metrics", None, "anonymous"),
        (&clients, "/live", Some("x"), "anonymous"),
        (&all, "/ready", None, "anonymous"),
        (&all, CHAT, Some("kb"), "bob"),
        (&all, CHAT, Some("ka"), "ann"),
        (&all, CHAT, Some("ke"), "403 role"),
        (&all, "/metrics", None, "401 no_key"),
        (&all, "/health", Some("ke"), "eve"),
        (&all, "/health", Some("ka"), "ann"),
        (&all, "/metrics", Some("kb"), "403 role"),
        (&all, "/workers", None, "401 no_key"),
        (&all, "/workers", Some("ka"), "ann"),
        (&all, "/workers", Some("kb"), "403 role"),
        (&all, "/anything", Some("ke"), "403 role"),
    ];
    for (lock, path, key, wanted) in cases {
        let bearer = key.map(|key| format!("bearer {key}")).unwrap_or_default();
        let in_authorization = [("authorization", bearer.as_str())];
        let in_api_key = [("x-api-key", key.unwrap_or_default())];
        for headers in [in_authorization, in_api_key] {
            let headers = if key.is_some() { &headers[..] } else { &[] };
            assert_eq!(outcome(lock, path, headers).await, wanted, "{path} {headers:?}");
        }
    }
    let twice = [("authorization", "Bearer kb"), ("authorization", "Bearer kb")];
    assert_eq!(outcome(&clients, CHAT, &twice).await, "400 twice");
    // Another scheme is no key, and the other header may carry one.
    let basic = [("authorization", "Basic kb"), ("x-api-key", "kb")];
    assert_eq!(outcome(&clients, CHAT, &basic).await, "bob");
    assert_eq!(outcome(&clients, CHAT, &basic[..1]).await, "401 no_key");
}

#[tokio::test]
async fn a_slow_hash_is_compared_beside_and_remembered() {
    let lock = lock("slow", &["ann:slow one:client"]);
    let headers = [("x-api-key", "slow one")];
    assert_eq!(outcome(&lock, "/v1/models", &headers).await, "slowly ann");
    assert_eq!(outcome(&lock, "/v1/models", &headers).await, "ann");
    let wrong = [("x-api-key", "slow two")];
    assert_eq!(outcome(&lock, "/v1/models", &wrong).await, "slowly 401 unknown_key");
    // With so many waiting, others are sent away rather than kept.
    let waiting = lock.shared.waiting.acquire_many(COMPARISONS_WAITING as u32).await.unwrap();
    assert_eq!(outcome(&lock, "/v1/models", &wrong).await, "slowly 429 busy");
    assert_eq!(outcome(&lock, "/v1/models", &headers).await, "ann");
    drop(waiting);
}

#[tokio::test]
async fn a_refusal_has_the_form_of_its_api() {
    let lock = lock("forms", &["bob:kb:client"]);
    for (path, kind) in [
        ("/v1/messages", "authentication_error"),
        ("/v1/chat/completions", "invalid_request_error"),
    ] {
        let Verdict::Refused(refusal) = lock.look(&request(path, &[]), PEER.into()) else {
            panic!("{path} needs a key")
        };
        let response = lock.refuse(path, refusal);
        assert_eq!(response.status(), 401);
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let body = to_bytes(response.into_body(), 10_000).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["error"]["type"], kind);
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("--keys-file: Authorization: Bearer KEY"), "{message}");
    }
}

#[test]
fn a_key_goes_no_further_than_the_lock() {
    let headers = [("authorization", "Bearer kb"), ("x-api-key", "kb"), ("x-other", "1")];
    let mut known = request("/v1/models", &headers);
    let lock = lock("further", &["bob:kb:client"]);
    let Verdict::Open(caller) = lock.look(&known, PEER.into()) else { panic!("bob is known") };
    admit(&mut known, caller);
    assert_eq!(known.headers().keys().collect::<Vec<_>>(), ["x-other"]);
    assert_eq!(known.extensions().get::<Caller>().unwrap().name(), "bob");
    // Without keys of our own they are the engine's.
    let mut open = request("/v1/models", &headers);
    admit(&mut open, Caller::Anonymous);
    assert_eq!(open.headers().len(), 3);
}

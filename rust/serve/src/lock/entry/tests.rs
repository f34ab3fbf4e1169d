#![allow(clippy::unwrap_used)]

use axum::body::to_bytes;
use serde_json::Value;

use super::super::keys::tests::{argon2, sha256};
use super::*;
use crate::gateway::api::{RESPONSES, ROWS};

const PEER: ([u8; 4], u16) = ([10, 0, 0, 9], 4_711);

/// A lock with these keys, each `id:key:role`.
fn lock(name: &str, keys: &[&str]) -> Lock {
    lock_with(name, keys, |_| {})
}

/// The same with other settings.
fn lock_with(name: &str, keys: &[&str], edit: impl FnOnce(&mut HttpSettings)) -> Lock {
    let path = std::env::temp_dir().join(format!("kvflash-lock-{name}-{}", std::process::id()));
    let line = |text: &&str| {
        let [id, key, role] = text.split(':').collect::<Vec<_>>().try_into().unwrap();
        let hash = if key.starts_with("slow") { argon2(key) } else { sha256(key, "salt one") };
        format!("{id}:{hash}:{role}\n")
    };
    std::fs::write(&path, keys.iter().map(line).collect::<String>()).unwrap();
    let mut settings = HttpSettings { keys_file: Some(path.clone()), ..HttpSettings::default() };
    edit(&mut settings);
    let lock = Lock::new(&settings, Face::Api).unwrap();
    std::fs::remove_file(&path).unwrap();
    lock
}

fn request(path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::post(path).header("host", "localhost").body(()).unwrap();
    for (name, value) in headers {
        let name: HeaderName = name.parse().unwrap();
        request.headers_mut().append(name, value.parse().unwrap());
    }
    request
}

/// What becomes of a request: the caller's name, or the status and cause of its refusal.
async fn outcome(lock: &Lock, path: &str, headers: &[(&str, &str)]) -> String {
    tell(lock, PEER, &request(path, headers)).await
}

/// The same, and the words of a refusal; a slow comparison is not made.
pub(in crate::lock) fn told(
    lock: &Lock,
    peer: SocketAddr,
    request: &Request<()>,
) -> (String, String) {
    match lock.look(request, peer, &[]) {
        Verdict::Open(admitted) => (admitted.caller.name().to_owned(), String::new()),
        Verdict::Refused(Refusal { cause, reject }) => {
            (format!("{} {cause}", reject.status.as_u16()), reject.message)
        }
        Verdict::Answered(_) | Verdict::Slow(_) => ("beside".to_owned(), String::new()),
    }
}

async fn tell(lock: &Lock, peer: ([u8; 4], u16), request: &Request<()>) -> String {
    let told = |refusal: Refusal| format!("{} {}", refusal.reject.status.as_u16(), refusal.cause);
    match lock.look(request, peer.into(), &[]) {
        Verdict::Open(admitted) => admitted.caller.name().to_owned(),
        Verdict::Answered(response) => response.status().as_u16().to_string(),
        Verdict::Refused(refusal) => told(refusal),
        Verdict::Slow(key) => match lock.compare(request, peer.into(), key).await {
            Ok(admitted) => format!("slowly {}", admitted.caller.name()),
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

#[test]
fn a_client_that_hangs_up_does_not_free_the_place_of_its_comparison() {
    // One thread for comparisons, which is busy: the next one waits for it.
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build();
    let runtime = runtime.unwrap();
    let lock = lock("hangs-up", &["ann:slow one:client"]);
    let request = request("/v1/models", &[("x-api-key", "slow two")]);
    let Verdict::Slow(key) = lock.look(&request, PEER.into(), &[]) else {
        panic!("it is compared slowly")
    };
    let free = || {
        let Shared { waiting, comparing, .. } = &*lock.shared;
        (waiting.available_permits(), comparing.available_permits())
    };
    let (release, held) = std::sync::mpsc::channel::<()>();
    runtime.spawn_blocking(move || held.recv());
    runtime.block_on(async {
        let mut compared = Box::pin(lock.compare(&request, PEER.into(), key));
        tokio::select! {
            biased;
            _ = &mut compared => panic!("the thread is busy"),
            () = tokio::task::yield_now() => {}
        }
        drop(compared);
        assert_eq!(free(), (COMPARISONS_WAITING - 1, COMPARISONS_AT_ONCE - 1));
        drop(release);
        // It runs before what is queued after it.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        assert_eq!(free(), (COMPARISONS_WAITING, COMPARISONS_AT_ONCE));
    });
}

#[tokio::test]
async fn a_refusal_has_the_form_of_its_api() {
    let lock = lock("forms", &["bob:kb:client"]);
    for (path, kind) in [
        ("/v1/messages", "authentication_error"),
        ("/v1/chat/completions", "invalid_request_error"),
    ] {
        let request = request(path, &[]);
        let Verdict::Refused(refusal) = lock.look(&request, PEER.into(), &[]) else {
            panic!("{path} needs a key")
        };
        let response = lock.refuse(&request, PEER.into(), refusal);
        assert_eq!(response.status(), 401);
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let body = to_bytes(response.into_body(), 10_000).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["error"]["type"], kind);
        let message = body["error"]["message"].as_str().unwrap();
        assert!(
            message.ends_with(
                "--keys-file, of the role client, as Authorization: Bearer KEY or x-api-key: KEY"
            ),
            "{message}"
        );
    }
}

#[test]
fn a_key_goes_no_further_than_the_lock() {
    let headers = [("authorization", "Bearer kb"), ("x-api-key", "kb"), ("x-other", "1")];
    let mut known = request("/v1/models", &headers);
    let lock = lock("further", &["bob:kb:client"]);
    let Verdict::Open(admitted) = lock.look(&known, PEER.into(), &[]) else {
        panic!("bob is known")
    };
    admitted.enter(&mut known);
    assert_eq!(known.headers().keys().collect::<Vec<_>>(), ["host", "x-other"]);
    assert_eq!(known.extensions().get::<Caller>().unwrap().name(), "bob");
    // Without keys of our own they are the engine's.
    let mut open = request("/v1/models", &headers);
    let Verdict::Open(admitted) = Lock::default().look(&open, PEER.into(), &[]) else {
        panic!("all are let in")
    };
    admitted.enter(&mut open);
    assert_eq!(open.headers().len(), 4);
}

/// A lock without keys, with these settings, of a listener that others reach or that only this machine does.
fn keyless(is_loopback: bool, change: impl FnOnce(&mut HttpSettings)) -> Lock {
    let mut settings = HttpSettings::default();
    change(&mut settings);
    let address = if is_loopback { [127, 0, 0, 1] } else { [0, 0, 0, 0] };
    Lock::new(&settings, Face::Api).unwrap().at((address, 8_000).into())
}

#[tokio::test]
async fn without_keys_the_admin_side_is_this_machine_s() {
    let (here, there) = (([127, 0, 0, 1], 9), ([10, 0, 0, 9], 9));
    let wide = keyless(false, |_| {});
    let own = keyless(false, |settings| settings.admin_port = Some(9_000));
    let narrow = keyless(true, |_| {});
    let open = keyless(false, |settings| settings.open_admin = true);
    let behind = keyless(false, |settings| settings.trusted_proxies = "127.0.0.0/8".to_owned());
    let admin = own.clone().for_admin();
    let clients = lock("admin-clients", &["bob:kb:client"]).at(([0, 0, 0, 0], 8_000).into());
    let forwarded = [("x-forwarded-for", "127.0.0.1")];
    let bob = [("x-api-key", "kb")];
    for (lock, peer, path, headers, wanted) in [
        (&wide, here, "/workers", &[][..], "anonymous"),
        (&wide, there, "/workers", &[], "403 elsewhere"),
        (&wide, there, "/anything", &[], "403 elsewhere"),
        (&wide, there, "/workers", &forwarded, "403 elsewhere"),
        (&wide, here, "/workers", &forwarded, "403 elsewhere"),
        (&wide, there, "/metrics", &[], "anonymous"),
        (&wide, there, "/health", &[], "anonymous"),
        (&wide, there, "/v1/models", &[], "anonymous"),
        (&wide, there, "/ready", &[], "anonymous"),
        (&narrow, here, "/workers", &[], "anonymous"),
        (&narrow, here, "/workers", &forwarded, "403 elsewhere"),
        (&open, there, "/workers", &[], "anonymous"),
        (&behind, here, "/workers", &[], "403 elsewhere"),
        (&own, here, "/workers", &[], "403 admin"),
        (&own, there, "/v1/models", &[], "anonymous"),
        (&admin, there, "/workers", &[], "anonymous"),
        (&clients, there, "/workers", &bob, "403 elsewhere"),
        (&clients, here, "/workers", &bob, "bob"),
    ] {
        let told = tell(lock, peer, &request(path, headers)).await;
        assert_eq!(told, wanted, "{path} from {peer:?} {headers:?}");
    }
    let Verdict::Refused(refusal) = wide.look(&request("/workers", &[]), there.into(), &[]) else {
        panic!("it is refused")
    };
    for flag in ["--keys-file", "--admin-port", "--open-admin"] {
        assert!(refusal.reject.message.contains(flag), "{}", refusal.reject.message);
    }
}

#[tokio::test]
async fn web_pages_can_not_write() {
    const CHAT: &str = "/v1/chat/completions";
    let here = ([127, 0, 0, 1], 9);
    let narrow = keyless(true, |_| {});
    let wide = keyless(false, |_| {});
    let named = keyless(true, |settings| settings.allowed_hosts = "Chat.Example".to_owned());
    let shared = keyless(true, |settings| settings.cors_origin = "https://chat.example".to_owned());
    let with_keys = lock("web", &["ann:ka:admin"]).at(([0, 0, 0, 0], 8_000).into());
    let evil = ("origin", "http://evil.example");
    let rebound = ("host", "evil.example");
    let cross = ("sec-fetch-site", "cross-site");
    for (lock, method, path, headers, wanted) in [
        (&narrow, "POST", "/workers", &[][..], "anonymous"),
        (&narrow, "POST", "/workers", &[("origin", "http://localhost:8000")], "403 origin"),
        (
            &narrow,
            "POST",
            "/workers",
            &[("host", "localhost:8000"), ("origin", "http://localhost:8000")],
            "anonymous",
        ),
        (&narrow, "POST", "/workers", &[evil], "403 origin"),
        (&narrow, "POST", "/workers", &[("origin", "null")], "403 origin"),
        (&narrow, "DELETE", "/workers/7", &[cross], "403 origin"),
        (&narrow, "POST", "/workers", &[rebound], "403 host"),
        (&narrow, "GET", "/workers", &[rebound], "403 host"),
        (&narrow, "GET", "/metrics", &[rebound], "403 host"),
        (&narrow, "GET", "/live", &[rebound], "anonymous"),
        (&narrow, "POST", CHAT, &[evil], "403 origin"),
        (&narrow, "POST", CHAT, &[rebound, evil], "403 host"),
        (&narrow, "POST", CHAT, &[rebound], "anonymous"),
        (&narrow, "GET", "/v1/models", &[evil], "anonymous"),
        (&wide, "POST", "/workers", &[rebound], "403 host"),
        (&wide, "POST", CHAT, &[evil], "403 origin"),
        (
            &wide,
            "POST",
            CHAT,
            &[("host", "api.example"), ("origin", "https://api.example")],
            "anonymous",
        ),
        (&named, "GET", "/workers", &[("host", "chat.example:8000")], "anonymous"),
        (&shared, "POST", CHAT, &[("origin", "https://chat.example"), cross], "anonymous"),
        (&shared, "POST", CHAT, &[evil], "403 origin"),
        (&shared, "POST", "/workers", &[("origin", "https://chat.example")], "403 origin"),
        (&with_keys, "POST", "/workers", &[evil, cross, rebound, ("x-api-key", "ka")], "ann"),
        (&with_keys, "POST", "/workers", &[evil], "401 no_key"),
    ] {
        let mut asked = request(path, &[]);
        *asked.method_mut() = method.parse().unwrap();
        for (name, value) in headers {
            let name: HeaderName = name.parse().unwrap();
            asked.headers_mut().insert(name, value.parse().unwrap());
        }
        assert_eq!(tell(lock, here, &asked).await, wanted, "{method} {path} {headers:?}");
    }
}

#[tokio::test]
async fn pages_of_allowed_origins_can_read_refusals_too() {
    let settings =
        |settings: &mut HttpSettings| settings.cors_origin = "https://chat.example".into();
    let lock = lock_with("cors", &["ann:ka:client"], settings);
    for (path, origin, wanted) in [
        ("/v1/models", "https://chat.example", Some("https://chat.example")),
        ("/v1/models", "https://evil.example", None),
        ("/workers", "https://chat.example", None),
    ] {
        let asked = request(path, &[("origin", origin), ("x-api-key", "wrong")]);
        let Verdict::Refused(refusal) = lock.look(&asked, PEER.into(), &[]) else {
            panic!("the key is wrong")
        };
        let answer = lock.refuse(&asked, PEER.into(), refusal);
        assert!(answer.status().is_client_error());
        let told = answer.headers().get("access-control-allow-origin");
        assert_eq!(told.map(|told| told.to_str().unwrap()), wanted, "{path} {origin}");
        let shown = answer.headers().get("access-control-expose-headers");
        assert_eq!(shown.is_some(), wanted.is_some());
    }
}

#[tokio::test]
async fn pages_of_allowed_origins_are_told_what_they_may_send() {
    let shared =
        keyless(false, |settings| settings.cors_origin = "https://chat.example".to_owned());
    let asking = |origin: &str, path: &str| {
        let asked = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let mut request = request(path, &asked);
        *request.method_mut() = axum::http::Method::OPTIONS;
        request
    };
    let answered = |request: &Request<()>| shared.look(request, PEER.into(), &[]);
    let Verdict::Answered(told) = answered(&asking("https://chat.example", "/v1/models")) else {
        panic!("it is answered")
    };
    assert_eq!(told.status(), 204);
    assert_eq!(told.headers()["access-control-allow-origin"], "https://chat.example");
    assert_eq!(told.headers()["access-control-allow-headers"], "authorization,content-type");
    // Every method of the clients' API.
    let allowed = told.headers()["access-control-allow-methods"].to_str().unwrap();
    let allowed: Vec<_> = allowed.split(", ").collect();
    for row in ROWS.iter().chain(&RESPONSES) {
        assert!(allowed.contains(&row.method.as_str()), "{}", row.path);
    }
    for (origin, path) in
        [("https://evil.example", "/v1/models"), ("https://chat.example", "/workers")]
    {
        assert!(
            !matches!(answered(&asking(origin, path)), Verdict::Answered(_)),
            "{origin} {path}"
        );
    }
    // The answer itself says so, too.
    let mut posted = request("/v1/models", &[("origin", "https://chat.example")]);
    let Verdict::Open(admitted) = answered(&posted) else { panic!("it is let in") };
    let mut response = Response::new(());
    admitted.enter(&mut posted);
    admitted.leave(&mut response);
    assert_eq!(response.headers()["access-control-allow-origin"], "https://chat.example");
    assert_eq!(response.headers()["vary"], "origin");
}

#[tokio::test]
async fn a_request_says_once_where_it_goes_and_what_it_is_called() {
    let lock = Lock::default();
    let mut none = request("/v1/models", &[]);
    none.headers_mut().remove("host");
    assert_eq!(tell(&lock, PEER, &none).await, "400 host");
    *none.version_mut() = axum::http::Version::HTTP_10;
    assert_eq!(tell(&lock, PEER, &none).await, "anonymous");
    let two = request("/v1/models", &[("host", "other")]);
    assert_eq!(tell(&lock, PEER, &two).await, "400 host");
    let mut named = request("/v1/models", &[("x-request-id", "a"), ("x-request-id", "b")]);
    let Verdict::Open(admitted) = lock.look(&named, PEER.into(), &[]) else {
        panic!("it is let in")
    };
    admitted.enter(&mut named);
    assert_eq!(named.headers().get("x-request-id"), None);
}

#[tokio::test]
async fn what_this_process_has_sent_itself_is_refused() {
    let lock = Lock::default();
    let ours = format!("1.0 fred, {}", crate::via::VIA.to_str().unwrap());
    assert_eq!(outcome(&lock, "/health", &[("via", "1.1 a"), ("via", &ours)]).await, "508 loop");
    assert_eq!(outcome(&lock, "/health", &[("via", "1.1 kvflash-0, 1.1 a")]).await, "anonymous");
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    for (change, wanted) in [
        (
            Box::new(|s: &mut HttpSettings| s.admin_host = Some("::".into()))
                as Box<dyn Fn(&mut _)>,
            "--admin-host needs --admin-port",
        ),
        (
            Box::new(|s: &mut HttpSettings| (s.open_admin, s.admin_port) = (true, Some(1))),
            "choose one",
        ),
        (Box::new(|s: &mut HttpSettings| s.cors_origin = "chat".into()), "--cors-origin takes"),
    ] {
        let mut settings = HttpSettings::default();
        change(&mut settings);
        let error = Lock::new(&settings, Face::Api).map(drop).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

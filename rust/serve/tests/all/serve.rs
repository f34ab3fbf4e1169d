//! The indexer over real sockets: the short way of the questions, the limits of connections, the stop.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvflash_core::catalog::{Catalog, EngineFacts, Identity, ModelKey, Registration, Source};
use kvflash_core::hash::{SEED, local_hashes};
use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::Block;
use kvflash_serve::indexer::{IndexerApp, IndexerOptions};
use kvflash_serve::{App, Face, Http, HttpSettings, ServeLimits, Shutdown, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Whatever takes longer does not come.
const DEADLINE: Duration = Duration::from_secs(30);

fn catalog() -> Arc<Catalog> {
    let catalog = Arc::new(Catalog::default());
    let registration = Registration {
        worker: Worker::new(7, 0),
        key: ModelKey { model_name: "m".to_owned(), tenant_id: "default".to_owned() },
        block_size: Some(4),
        endpoint: "tcp://127.0.0.1:5557".to_owned(),
        replay_endpoint: None,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    };
    catalog.register(registration).unwrap();
    catalog
}

fn options() -> IndexerOptions {
    IndexerOptions { max_body_bytes: 200, ..IndexerOptions::default() }
}

struct Server {
    address: SocketAddr,
    shutdown: Shutdown,
    task: JoinHandle<std::io::Result<()>>,
}

async fn start(app: impl App, limits: ServeLimits) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, shutdown) = (listener.local_addr().unwrap(), Shutdown::default());
    let task = tokio::spawn(serve(listener, app, limits, shutdown.clone()));
    Server { address, shutdown, task }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A request on a connection of its own: what came back, without its date, headers in order.
    async fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> String {
        let mut stream = self.connect().await;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
        let answer = to_end(&mut stream).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let mut lines: Vec<_> =
            head.split("\r\n").filter(|line| !line.starts_with("date:")).collect();
        lines[1..].sort_unstable();
        format!("{}\n\n{body}", lines.join("\n"))
    }
}

async fn to_end(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    tokio::time::timeout(DEADLINE, stream.read_to_end(&mut bytes)).await.unwrap().unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_short_way_answers_as_the_router_does() {
    let catalog = catalog();
    let short = IndexerApp::new(Arc::clone(&catalog), options(), &Http::default()).unwrap();
    let long = IndexerApp::new(catalog, options(), &Http::default()).unwrap().router();
    let short = start(short, ServeLimits::default()).await;
    let long = start(long, ServeLimits::default()).await;
    let msgpack = "content-type: application/msgpack\r\n";
    let mut statuses = Vec::new();
    for (method, path, headers, body) in [
        ("POST", "/query", "", &br#"{"token_ids": [1, 2, 3, 4], "model_name": "m"}"#[..]),
        ("POST", "/query", "", br#"{"token_ids": [1, 2], "model_name": "\u006d", "more": {}}"#),
        ("POST", "/query", msgpack, b"\x82\xaamodel_name\xa1m\xa9token_ids\x91\x01"),
        (
            "POST",
            "/query",
            "accept: application/msgpack\r\n",
            br#"{"token_ids":[],"model_name":"m"}"#,
        ),
        ("POST", "/query_by_hash", "", br#"{"block_hashes": [-1, 5], "model_name": "m"}"#),
        ("POST", "/query_by_hash?x=1", "", br#"{"block_hashes": [], "model_name": "m"}"#),
        ("POST", "/query", "", br#"{"token_ids": [1, -2], "model_name": "m"}"#),
        ("POST", "/query", "", br#"{"token_ids": [1], "model_name": "other"}"#),
        (
            "POST",
            "/query",
            "",
            br#"{"token_ids":[],"model_name":"m","cache_salt":"a","additional_salt":"b"}"#,
        ),
        ("POST", "/query_by_hash", "", b"{"),
        ("POST", "/query", "", &[b' '; 201]),
        ("GET", "/query", "", b""),
        ("POST", "/query/", "", b""),
        ("GET", "/workers", "", b""),
    ] {
        let answer = short.ask(method, path, headers, body).await;
        assert_eq!(answer, long.ask(method, path, headers, body).await, "{method} {path}");
        statuses.push(answer.split(' ').nth(1).unwrap().to_owned());
    }
    let ok = ["200"; 6];
    assert_eq!(statuses[..6], ok);
    assert_eq!(statuses[6..], ["400", "404", "400", "400", "413", "405", "404", "200"]);
    let counts = |metrics: String| {
        let counted =
            |line: &&str| line.contains("requests_total") || line.contains("errors_total");
        let mut counts: Vec<_> = metrics.split('\n').filter(counted).map(str::to_owned).collect();
        counts.sort();
        counts
    };
    let counted = counts(short.ask("GET", "/metrics", "", b"").await);
    assert!(counted.iter().any(|line| line.contains(r#"endpoint="/query",method="POST"} 8"#)));
    assert_eq!(counted, counts(long.ask("GET", "/metrics", "", b"").await));
}

#[tokio::test]
async fn a_panic_ends_one_request_and_is_counted() {
    use axum::routing::get;
    let limits = ServeLimits::default();
    let panics = limits.panics.clone();
    let routes = axum::Router::new()
        .route("/well", get(async || "well"))
        .route("/broken", get(async || -> &'static str { panic!("on purpose") }));
    let server = start(routes, limits).await;
    let answer = server.ask("GET", "/broken", "", b"").await;
    assert!(
        answer.starts_with("HTTP/1.1 500 ") && answer.contains("connection: close"),
        "{answer}"
    );
    assert!(answer.contains("please report it") && !answer.contains("on purpose"), "{answer}");
    assert_eq!(panics.get(), 1);
    assert!(server.ask("GET", "/well", "", b"").await.ends_with("well"));
}

#[tokio::test]
async fn an_address_has_a_limit_of_connections_and_a_proxy_has_none() {
    let limits = |trusted: &str| {
        let settings = HttpSettings {
            max_connections_per_address: 2,
            trusted_proxies: trusted.to_owned(),
            ..HttpSettings::default()
        };
        Http::of(settings, Face::Control).unwrap().limits(Duration::ZERO)
    };
    let service = || IndexerApp::new(catalog(), options(), &Http::default()).unwrap();
    let server = start(service(), limits("10.0.0.0/8")).await;
    let (_first, _second) = (server.connect().await, server.connect().await);
    let mut third = server.connect().await;
    assert_eq!(third.read(&mut [0]).await.unwrap_or(0), 0, "it is closed");
    drop(_first);
    let mut answered = false;
    while !answered {
        let mut stream = server.connect().await;
        let asked = stream
            .write_all(b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: localhost\r\n\r\n");
        answered = asked.await.is_ok() && stream.read(&mut [0]).await.unwrap_or(0) == 1;
    }
    let open = start(service(), limits("10.0.0.0/8, 127.0.0.1, ::1")).await;
    let _all = [open.connect().await, open.connect().await, open.connect().await];
    assert!(open.ask("GET", "/health", "", b"").await.starts_with("HTTP/1.1 200"));
    let wrong = HttpSettings { trusted_proxies: "ten".to_owned(), ..HttpSettings::default() };
    assert!(Http::of(wrong, Face::Control).unwrap_err().to_string().contains("--trusted-proxies"));
}

#[tokio::test]
async fn health_of_an_indexer_is_empty_unless_its_state_file_fails() {
    let folder = std::env::temp_dir().join(format!("kvflash-health-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let state_file = Some(folder.join("state.jsonl"));
    let http = Http::of(HttpSettings { state_file, ..HttpSettings::default() }, Face::Control);
    let http = http.unwrap();
    let app = IndexerApp::new(catalog(), IndexerOptions::default(), &http).unwrap();
    let server = start(app.clone(), http.limits(Duration::ZERO)).await;
    let health = async || server.ask("GET", "/health", "", b"").await;
    let body =
        br#"{"instance_id":9,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4}"#;
    assert!(health().await.ends_with("\n\n"));
    std::fs::remove_dir_all(&folder).unwrap();
    let registered = server.ask("POST", "/register", "", body).await;
    assert!(registered.starts_with("HTTP/1.1 201 "), "{registered}");
    let failed = health().await;
    assert!(failed.starts_with("HTTP/1.1 200 "), "{failed}");
    let said = [r#""status":"degraded""#, r#""code":"state_file""#, r#""fix":"make the file"#];
    assert!(said.iter().all(|part| failed.contains(part)), "{failed}");
    std::fs::create_dir_all(&folder).unwrap();
    app.save_again();
    assert!(health().await.ends_with("\n\n"));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Connections that take all places, and those that take the places of probes, keep no probe out.
#[tokio::test]
async fn probes_are_answered_while_all_connections_are_taken() {
    let settings = HttpSettings { max_connections: 2, ..HttpSettings::default() };
    let http = Http::of(settings, Face::Control).unwrap();
    let limits = http.limits(Duration::ZERO);
    let crowded_out = limits.crowded_out.clone();
    let server = start(IndexerApp::new(catalog(), options(), &http).unwrap(), limits).await;
    let held = [server.connect().await, server.connect().await];
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(server.connect().await);
    }
    for path in ["/live", "/ready", "/health", "/metrics"] {
        let answer = server.ask("GET", path, "", b"").await;
        let is_known = !answer.starts_with("HTTP/1.1 404") && !answer.starts_with("HTTP/1.1 503");
        assert!(is_known, "{path}: {answer}");
    }
    let query = br#"{"token_ids":[],"model_name":"m"}"#;
    let refused = server.ask("POST", "/query", "", query).await;
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("retry-after"), "{refused}");
    assert!(refused.contains("connection: close") && refused.contains("--max-connections"));
    assert_eq!(crowded_out.get(), 105);
    // The oldest made room.
    assert_eq!(silent[0].read(&mut [0]).await.unwrap_or(0), 0);
    drop(held);
    let mut is_free = false;
    while !is_free {
        is_free = server.ask("POST", "/query", "", query).await.starts_with("HTTP/1.1 200 ");
    }
}

#[tokio::test]
async fn a_question_that_does_not_come_ends() {
    let body_timeout = Duration::from_millis(50);
    let settings = HttpSettings { body_timeout, ..HttpSettings::default() };
    let http = Http::of(settings, Face::Control).unwrap();
    let service = IndexerApp::new(catalog(), options(), &http).unwrap();
    let server = start(service, http.limits(Duration::ZERO)).await;
    for path in ["/query", "/query_by_hash", "/register"] {
        let mut stream = server.connect().await;
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 33\r\n\r\n{{");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 4_096];
        let read = tokio::time::timeout(DEADLINE, stream.read(&mut answer)).await.unwrap().unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]);
        assert!(answer.starts_with("HTTP/1.1 408 "), "{path}: {answer}");
        assert!(answer.contains("--body-timeout"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_slow_head_is_cut_off_whenever_it_comes() {
    let limits =
        ServeLimits { header_timeout: Duration::from_millis(100), ..ServeLimits::default() };
    let server =
        start(IndexerApp::new(catalog(), options(), &Http::default()).unwrap(), limits).await;
    let mut first = server.connect().await;
    first.write_all(b"POST /query HTTP/1.1\r\nhost:").await.unwrap();
    assert_eq!(to_end(&mut first).await, "");
    let mut kept = server.connect().await;
    let whole = "POST /query_by_hash HTTP/1.1\r\nhost: localhost\r\ncontent-length: 36\r\n\r\n\
                 {\"block_hashes\":[],\"model_name\":\"m\"}";
    for _ in 0..3 {
        kept.write_all(whole.as_bytes()).await.unwrap();
        let mut answer = [0; 4_096];
        let read = tokio::time::timeout(DEADLINE, kept.read(&mut answer)).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&answer[..read]).starts_with("HTTP/1.1 200 OK"));
        // Longer than a head may take: between two requests a connection may be idle.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    kept.write_all(b"POST /query HTTP/1.1\r\nhost:").await.unwrap();
    assert_eq!(to_end(&mut kept).await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_question_is_answered_after_the_stop() {
    let service = IndexerApp::new(catalog(), options(), &Http::default()).unwrap();
    let server = start(service, ServeLimits::default()).await;
    let mut stream = server.connect().await;
    let head =
        b"POST /query HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 33\r\n\r\n";
    stream.write_all(head).await.unwrap();
    // The question is being asked once its body is wanted.
    let mut wanted = [0; 25];
    tokio::time::timeout(DEADLINE, stream.read_exact(&mut wanted)).await.unwrap().unwrap();
    assert!(wanted.starts_with(b"HTTP/1.1 100 Continue"));
    let mut idle = server.connect().await;
    server.shutdown.stop();
    assert_eq!(to_end(&mut idle).await, "", "nobody waits for an idle connection");
    stream.write_all(br#"{"token_ids":[],"model_name":"m"}"#).await.unwrap();
    assert!(to_end(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
    tokio::time::timeout(DEADLINE, server.task).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

/// One thread, and no await between connecting and the stop: the server has accepted no connection
/// yet.
#[tokio::test]
async fn who_had_been_queued_at_the_stop_is_not_reset() {
    let service = IndexerApp::new(catalog(), options(), &Http::default()).unwrap();
    let server = start(service, ServeLimits::default()).await;
    let (mut asking, mut idle) = {
        let connect = || std::net::TcpStream::connect(server.address).unwrap();
        (connect(), connect())
    };
    let question = b"POST /query_by_hash HTTP/1.1\r\nhost: localhost\r\ncontent-length: 36\r\n\r\n\
                     {\"block_hashes\":[],\"model_name\":\"m\"}";
    std::io::Write::write_all(&mut asking, question).unwrap();
    server.shutdown.stop();
    let stopped = tokio::time::timeout(DEADLINE, server.task).await.unwrap();
    stopped.unwrap().unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut asking, &mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer:?}");
    assert_eq!(std::io::Read::read_to_string(&mut idle, &mut answer).unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn hashes_in_dumps_are_hidden_where_a_secret_says_so() {
    let locals = local_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], 4, SEED);
    let asked = async |secret: Option<&std::path::Path>| {
        let catalog = catalog();
        let name = |at: usize| u64::MAX - at as u64;
        let block =
            |(at, local): (usize, &u64)| Block { engine_hash: name(at), local_hash: *local };
        let blocks: Vec<Block> = locals.iter().enumerate().map(block).collect();
        let model = catalog.model("m", "default").unwrap();
        model.index.store(Worker::new(7, 0), Tier::Device, None, SEED, &blocks);
        let hash_secret_file = secret.map(std::path::Path::to_owned);
        let settings = HttpSettings { hash_secret_file, ..HttpSettings::default() };
        let http = Http::of(settings, Face::Control).unwrap();
        let service = IndexerApp::new(catalog, options(), &http).unwrap();
        let server = start(service, ServeLimits::default()).await;
        let mut answers = Vec::new();
        for path in ["/dump", "/dump?format=snapshot", "/digest"] {
            answers.push(server.ask("GET", path, "", b"").await);
        }
        let hash = locals[0].to_string();
        let body = format!(r#"{{"model_name": "m", "block_hashes": [{hash}]}}"#);
        answers.push(server.ask("POST", "/query_by_hash", "", body.as_bytes()).await);
        server.shutdown.stop();
        server.task.await.unwrap().unwrap();
        answers
    };
    let path = std::env::temp_dir().join(format!("kvflash-hash-secret-{}", std::process::id()));
    std::fs::write(&path, "0123456789abcdef").unwrap();
    let (open, hidden) = (asked(None).await, asked(Some(&path)).await);
    for word in locals.iter().map(u64::to_string).chain([u64::MAX.to_string()]) {
        assert!(open[0].contains(&word), "{}", open[0]);
        assert!(!hidden[0].contains(&word), "{}", hidden[0]);
    }
    assert!(open[1].starts_with("HTTP/1.1 200"));
    assert!(hidden[1].starts_with("HTTP/1.1 403") && hidden[1].contains("--hash-secret-file"));
    assert_ne!(open[2], hidden[2]);
    // Questions are the same as before.
    assert_eq!(open[3], hidden[3]);
    let settings = HttpSettings { hash_secret_file: Some(path), ..HttpSettings::default() };
    let http = Http::of(settings, Face::Control).unwrap();
    let options = IndexerOptions { peers: vec!["http://a:1".to_owned()], ..options() };
    let error = IndexerApp::new(catalog(), options, &http).err().unwrap().to_string();
    assert!(error.contains("--hash-secret-file with --peers"), "{error}");
}

//! The engines' double: decent but for its answers, which a test gives.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{JoinHandle, JoinSet};

use super::stage::{BLOCK, DEADLINE};

/// An engine's reaction to a request.
#[derive(Clone)]
enum Manner {
    /// The test answers.
    Hand,
    /// Every request gets this status and body.
    Answer(u16, Value),
    /// Every request gets this text as its body.
    Say(u16, String),
    /// Every request gets what this makes of its body.
    Reply(Reply),
    /// The connection is closed without a byte.
    Close,
    /// One answer of status 103 after the other, and nothing else.
    Hesitate,
}

/// Status and body that an engine answers to a body.
type Reply = Arc<dyn Fn(&Value) -> (u16, Value) + Send + Sync>;
/// The tokens that an engine makes of a body of `/tokenize`; `None` where it does not take it.
type Renderer = Arc<dyn Fn(&Value) -> Option<Vec<u32>> + Send + Sync>;

struct State {
    manner: Mutex<Manner>,
    health: AtomicU16,
    /// Health checks so far.
    checked: AtomicUsize,
    /// It keeps a connection after an answer, and closes it when the next request comes.
    closes_kept: AtomicBool,
    models: Mutex<Value>,
    /// What it tells at other paths.
    told: Mutex<HashMap<String, Value>>,
    renderer: Mutex<Option<Renderer>>,
    /// Requests to `/tokenize` that it answered.
    tokenized: AtomicUsize,
    /// Bytes of bodies that have arrived.
    arrived: AtomicUsize,
    bodies: Mutex<Vec<Value>>,
    paths: Mutex<Vec<String>>,
    methods: Mutex<Vec<String>>,
    /// Its renderer's answer to any request; `None`: it has no renderer.
    rendered: Mutex<Option<Value>>,
    sender: UnboundedSender<Asked>,
}

/// An engine on a port of its own. Dropping it ends it as a killed process does.
pub struct Engine {
    pub url: String,
    /// Its number at the frontend.
    pub id: u64,
    state: Arc<State>,
    asked: UnboundedReceiver<Asked>,
    task: JoinHandle<()>,
}

/// A request as an engine got it, and the connection to answer on. Dropping it closes that.
pub struct Asked {
    pub headers: HashMap<String, String>,
    pub body: Value,
    stream: TcpStream,
}

impl Engine {
    /// One that serves `m` and adapters of it, and answers at once.
    pub async fn start(adapters: &[&str]) -> Self {
        Self::with(adapters, 65_536).await
    }

    /// The same with a limit of tokens.
    pub async fn with(adapters: &[&str], max_model_len: u64) -> Self {
        Self::serving("m", adapters, max_model_len).await
    }

    /// One of another model.
    pub async fn of(model: &str) -> Self {
        Self::serving(model, &[], 65_536).await
    }

    async fn serving(model: &str, adapters: &[&str], max_model_len: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, asked) = unbounded_channel();
        let mut models =
            vec![json!({ "id": model, "parent": null, "max_model_len": max_model_len })];
        models.extend(adapters.iter().map(|name| json!({ "id": name, "parent": model })));
        let state = Arc::new(State {
            manner: Mutex::new(Manner::Answer(200, json!({ "choices": [] }))),
            health: AtomicU16::new(200),
            checked: AtomicUsize::new(0),
            closes_kept: AtomicBool::new(false),
            models: Mutex::new(json!({ "object": "list", "data": models })),
            told: Mutex::new([("/version".to_owned(), json!({ "version": "1.2.3" }))].into()),
            renderer: Mutex::default(),
            tokenized: AtomicUsize::new(0),
            arrived: AtomicUsize::new(0),
            bodies: Mutex::default(),
            paths: Mutex::default(),
            methods: Mutex::default(),
            rendered: Mutex::default(),
            sender,
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&state)));
        Self { url, id: 0, state, asked, task }
    }

    /// From now on the test answers.
    pub fn by_hand(self) -> Self {
        *self.state.manner.lock() = Manner::Hand;
        self
    }

    /// From now on it answers `/tokenize`, too.
    pub fn renders(&self, render: impl Fn(&Value) -> Option<Vec<u32>> + Send + Sync + 'static) {
        *self.state.renderer.lock() = Some(Arc::new(render));
    }

    /// How often it did.
    pub fn tokenized(&self) -> usize {
        self.state.tokenized.load(Ordering::SeqCst)
    }

    /// Bytes of bodies that have arrived so far, also of those that go on; with the lengths of chunks.
    pub fn arrived(&self) -> usize {
        self.state.arrived.load(Ordering::SeqCst)
    }

    /// Another engine takes its place, with these names of its model.
    pub fn becomes(&self, names: &[&str]) {
        let cards: Vec<Value> = names.iter().map(|name| json!({ "id": name })).collect();
        *self.state.models.lock() = json!({ "object": "list", "data": cards });
    }

    /// From now on it tells this at `path`.
    pub fn tells(&self, path: &str, told: Value) {
        self.state.told.lock().insert(path.to_owned(), told);
    }

    pub fn tells_no_more(&self, path: &str) {
        self.state.told.lock().remove(path);
    }

    pub fn answers(&self, status: u16, body: Value) {
        *self.state.manner.lock() = Manner::Answer(status, body);
    }

    /// From now on it answers what `reply` makes of a request's body.
    pub fn replies(&self, reply: impl Fn(&Value) -> (u16, Value) + Send + Sync + 'static) {
        *self.state.manner.lock() = Manner::Reply(Arc::new(reply));
    }

    pub fn says(&self, status: u16, body: &str) {
        *self.state.manner.lock() = Manner::Say(status, body.to_owned());
    }

    pub fn hesitates(&self) {
        *self.state.manner.lock() = Manner::Hesitate;
    }

    pub fn closes(&self) {
        *self.state.manner.lock() = Manner::Close;
    }

    /// From now on it keeps connections, and closes each of them when the next request comes.
    pub fn closes_kept(&self) {
        self.state.closes_kept.store(true, Ordering::SeqCst);
    }

    /// Health checks that it answered.
    pub fn checked(&self) -> usize {
        self.state.checked.load(Ordering::SeqCst)
    }

    pub fn health(&self, status: u16) {
        self.state.health.store(status, Ordering::SeqCst);
    }

    /// The next request; answered by the test.
    pub async fn next(&mut self) -> Asked {
        tokio::time::timeout(DEADLINE, self.asked.recv()).await.expect("no request came").unwrap()
    }

    /// Bodies of the requests so far.
    pub fn bodies(&self) -> Vec<Value> {
        self.state.bodies.lock().clone()
    }

    /// Paths of the requests so far.
    pub fn paths(&self) -> Vec<String> {
        self.state.paths.lock().clone()
    }

    /// Methods of the requests so far.
    pub fn methods(&self) -> Vec<String> {
        self.state.methods.lock().clone()
    }

    /// From now on it renders every request to this.
    pub fn renders_any(&self, rendered: Value) {
        *self.state.rendered.lock() = Some(rendered);
    }

    pub fn count(&self) -> usize {
        self.state.bodies.lock().len()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Asked {
    /// The whole answer.
    pub async fn answer(mut self, status: u16, body: &Value) {
        whole(&mut self.stream, status, &body.to_string()).await;
    }

    /// The smallest decent one.
    pub async fn done(self) {
        self.answer(200, &json!({ "choices": [] })).await;
    }

    /// Begin a stream of events.
    pub async fn begin(&mut self) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        self.stream.write_all(head.as_bytes()).await.unwrap();
    }

    pub async fn event(&mut self, data: &str) {
        self.write(&format!("data: {data}\n\n")).await;
    }

    /// A chunk of the answer.
    pub async fn write(&mut self, text: &str) {
        let chunk = format!("{:x}\r\n{text}\r\n", text.len());
        self.stream.write_all(chunk.as_bytes()).await.unwrap();
    }

    pub async fn end(mut self) {
        self.event("[DONE]").await;
        self.close().await;
    }

    /// The end of the answer, whatever its last event was.
    pub async fn close(mut self) {
        self.stream.write_all(b"0\r\n\r\n").await.unwrap();
    }

    /// Until the frontend closes the connection.
    pub async fn gone(mut self) {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(DEADLINE, self.stream.read_to_end(&mut rest)).await;
        let _reset = closed.expect("the frontend stayed");
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(converse(stream, Arc::clone(&state)));
    }
}

async fn converse(mut stream: TcpStream, state: Arc<State>) {
    let Some(Request { method, path, headers, body }) = read(&mut stream, &state.arrived).await
    else {
        return;
    };
    let told = state.told.lock().get(&path).map(Value::to_string);
    let (status, answer) = match path.as_str() {
        _ if told.is_some() => (200, told.unwrap_or_default()),
        "/health" => {
            state.checked.fetch_add(1, Ordering::SeqCst);
            (state.health.load(Ordering::SeqCst), "{}".to_owned())
        }
        "/v1/models" => (200, state.models.lock().to_string()),
        "/metrics" => (200, format!("vllm:cache_config_info{{block_size=\"{BLOCK}\"}} 1\n")),
        path if path.ends_with("/render") => match &*state.rendered.lock() {
            Some(rendered) => (200, rendered.to_string()),
            None => (404, json!({ "detail": "Not Found" }).to_string()),
        },
        _ => {
            // An upload is not JSON.
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let renderer = state.renderer.lock().clone().filter(|_| path == "/tokenize");
            if let Some(render) = renderer {
                state.tokenized.fetch_add(1, Ordering::SeqCst);
                let (status, answer) = match render(&body) {
                    Some(tokens) => (200, json!({ "tokens": tokens })),
                    None => (404, json!({ "error": "no such door" })),
                };
                whole(&mut stream, status, &answer.to_string()).await;
                return;
            }
            state.bodies.lock().push(body.clone());
            state.paths.lock().push(path);
            state.methods.lock().push(method);
            let manner = state.manner.lock().clone();
            match manner {
                Manner::Answer(status, answer) => (status, answer.to_string()),
                Manner::Say(status, text) => (status, text),
                Manner::Reply(reply) => {
                    let (status, answer) = reply(&body);
                    (status, answer.to_string())
                }
                Manner::Close => return,
                Manner::Hesitate => {
                    while stream.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {
                        tokio::task::yield_now().await;
                    }
                    return;
                }
                Manner::Hand => {
                    let _ended = state.sender.send(Asked { headers, body, stream });
                    return;
                }
            }
        }
    };
    if state.closes_kept.load(Ordering::SeqCst) {
        write(&mut stream, status, "keep-alive", &answer).await;
        let _next = read(&mut stream, &state.arrived).await;
    } else {
        whole(&mut stream, status, &answer).await;
    }
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

/// A request; `None` where the connection ends before.
async fn read(stream: &mut TcpStream, arrived: &AtomicUsize) -> Option<Request> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next()?.split(' ').map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let headers: HashMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.get("content-length").map(|length| length.parse::<usize>().unwrap());
    let is_chunked = headers.contains_key("transfer-encoding");
    let mut body = bytes.split_off(end + 4);
    arrived.fetch_add(body.len(), Ordering::SeqCst);
    while match is_chunked {
        true => !body.ends_with(b"0\r\n\r\n"),
        false => body.len() < length.unwrap_or(0),
    } {
        let bytes = stream.read_buf(&mut body).await.ok()?;
        arrived.fetch_add(bytes, Ordering::SeqCst);
        if bytes == 0 {
            return None;
        }
    }
    Some(Request { method, path, headers, body })
}

async fn whole(stream: &mut TcpStream, status: u16, body: &str) {
    write(stream, status, "close", body).await;
}

async fn write(stream: &mut TcpStream, status: u16, connection: &str, body: &str) {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: {connection}\r\ncontent-length: {length}\r\n\r\n"
    );
    let _gone = stream.write_all(format!("{head}{body}").as_bytes()).await;
}

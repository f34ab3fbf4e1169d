//! Checks a worker's addresses and tokenizer when it joins: wrong sockets or different tokens
//! silently disable all reuse.

use std::time::Duration;

use kvflash_core::fleet::port_of;
use kvflash_core::ids::Worker;
use kvflash_core::select::WorkerReason;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::app::App;
use super::engine::Engine;
use super::forms::texts;
use super::parity::{Tokenized, tokenize};

/// Longest wait for a socket's response.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The kind of peer at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// A ZMQ socket that publishes.
    Publisher,
    /// A ZMQ socket that answers, such as a replay socket.
    Answerer,
    /// A web server.
    Http,
    /// None, or an unknown kind; its listener reports more.
    Unknown,
}

/// Checks `engine` unless it is known to be correct; faults appear in `/health`, and in the log
/// when they change.
pub(super) async fn inspect(app: &App, engine: &Engine) {
    if engine.member.is_some() || engine.inspection.lock().is_settled {
        return;
    }
    let mut faults = Vec::new();
    let are_sockets_known = inspect_sockets(app, engine, &mut faults).await;
    let is_text_known = inspect_tokenizer(app, engine, &mut faults).await;
    let mut inspection = engine.inspection.lock();
    inspection.is_settled = faults.is_empty() && are_sockets_known && is_text_known;
    if inspection.faults == faults {
        return;
    }
    for WorkerReason { code, message, fix, .. } in &faults {
        tracing::warn!(worker = engine.id, code, fix, "{message}");
    }
    if faults.is_empty() {
        tracing::info!(worker = engine.id, "the worker's sockets and tokenizer are now correct");
    }
    inspection.faults = faults;
}

fn fault(engine: &Engine, code: &'static str, seen: &str, fix: &'static str) -> WorkerReason {
    let worker = Worker::new(engine.id, 0).to_string();
    let message = format!("worker {}: {seen}", engine.id);
    WorkerReason { code, worker, message, fix }
}

/// Whether both sockets have answered.
async fn inspect_sockets(app: &App, engine: &Engine, faults: &mut Vec<WorkerReason>) -> bool {
    let events = app.fleet.events_of(engine.id).remove(&0);
    let Some(events) = events.filter(|_| app.uses_events) else { return true };
    let replay = events.replay_endpoint.as_deref();
    let at_events = peer_at(&events.endpoint).await;
    let at_replay = match replay {
        Some(replay) => Some(peer_at(replay).await),
        None => None,
    };
    let (events, replay) = (&events.endpoint, replay.unwrap_or_default());
    let mut add = |code, seen: String, fix| faults.push(fault(engine, code, &seen, fix));
    match (at_events, at_replay) {
        (Peer::Answerer, Some(Peer::Publisher)) => add(
            "events_and_replay_swapped",
            format!(
                "events={events} is a replay socket and replay={replay} an event socket: they are swapped"
            ),
            "swap the addresses of events= and replay=",
        ),
        (Peer::Answerer, _) => add(
            "events_is_replay",
            format!("events={events} is a replay socket, which publishes no events"),
            "set events= to `endpoint` of the engine's --kv-events-config, and replay= to its `replay_endpoint`",
        ),
        (Peer::Http, _) => add(
            "events_is_http",
            format!("events={events} is the port of a web server, which publishes no events"),
            "set events= to `endpoint` of the engine's --kv-events-config (vLLM's default port is 5557)",
        ),
        (_, Some(Peer::Publisher)) => add(
            "replay_is_events",
            format!("replay={replay} is an event socket: lost batches cannot be requested there"),
            "set replay= to `replay_endpoint` of the engine's --kv-events-config",
        ),
        _ => {}
    }
    if at_replay == Some(Peer::Http) {
        add(
            "replay_is_http",
            format!(
                "replay={replay} is the port of a web server: lost batches cannot be requested there"
            ),
            "set replay= to `replay_endpoint` of the engine's --kv-events-config",
        );
    }
    at_events != Peer::Unknown && at_replay != Some(Peer::Unknown)
}

/// The kind of peer at `address`; local addresses are not checked.
async fn peer_at(address: &str) -> Peer {
    let Some(target) = port_of(address).and_then(|_| address.strip_prefix("tcp://")) else {
        return Peer::Publisher;
    };
    // The engine's notation for the interface that it binds to.
    let target = target.replacen("*:", "127.0.0.1:", 1);
    match greet(&target, &greeting()).await.as_deref() {
        Some(said) if said.first() == Some(&0xff) => return socket_type(said),
        _ => {}
    }
    // A web server may wait for the end of the line that the greeting looks like.
    match greet(&target, b"GET / HTTP/1.0\r\n\r\n").await.as_deref() {
        Some(said) if said.starts_with(b"HTTP/") => Peer::Http,
        _ => Peer::Unknown,
    }
}

/// Sends `words` and reads until the reply names a socket, is not a ZMQ greeting, ends, or takes
/// too long.
async fn greet(target: &str, words: &[u8]) -> Option<Vec<u8>> {
    let greeted = async {
        let mut stream = TcpStream::connect(target).await.ok()?;
        stream.write_all(words).await.ok()?;
        let mut said = Vec::new();
        let mut piece = [0; 512];
        while said.len() < 4 * piece.len() {
            match stream.read(&mut piece).await {
                Ok(count) if count > 0 => said.extend_from_slice(&piece[..count]),
                // A reset after data still is a reply.
                _ => break,
            }
            if said[0] != 0xff && said.len() >= 5 || socket_type(&said) != Peer::Unknown {
                break;
            }
        }
        (!said.is_empty()).then_some(said)
    };
    tokio::time::timeout(TIMEOUT / 2, greeted).await.ok().flatten()
}

/// The greeting of ZMTP 3.0 with the NULL mechanism. A peer replies with its own, and with its
/// READY command.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// The socket type in a peer's READY command, after its greeting.
fn socket_type(said: &[u8]) -> Peer {
    const PROPERTY: &[u8] = b"\x0bSocket-Type\x00\x00\x00";
    let Some(at) = memchr::memmem::find(said, PROPERTY) else { return Peer::Unknown };
    let value = &said[at + PROPERTY.len()..];
    let Some((length, value)) = value.split_first() else { return Peer::Unknown };
    match value.get(..usize::from(*length)) {
        Some(b"PUB" | b"XPUB") => Peer::Publisher,
        Some(b"ROUTER" | b"REP") => Peer::Answerer,
        _ => Peer::Unknown,
    }
}

/// Whether the local tokenizer has been compared with the engine's. Without a local one the
/// engine's is used anyway.
async fn inspect_tokenizer(app: &App, engine: &Engine, faults: &mut Vec<WorkerReason>) -> bool {
    let Some(text) = app.fleet.pool_of(engine.id).and_then(|pool| app.text_of(&pool)) else {
        return true;
    };
    let name = {
        let notes = engine.notes.lock();
        notes.models.iter().find(|(_, parent)| parent.is_none()).map(|(name, _)| name.clone())
    };
    for sample in texts() {
        let Ok(own) = text.model.completion_tokens(&sample, true) else { return true };
        let body = json!({ "model": name, "prompt": sample, "add_special_tokens": true });
        let theirs = match tokenize(app, engine, &body).await {
            Tokenized::Tokens(theirs) => theirs,
            Tokenized::Failed => return false,
            Tokenized::Refused(status) => {
                if !std::mem::replace(&mut engine.inspection.lock().has_told_untold, true) {
                    tracing::info!(
                        worker = engine.id,
                        status = status.as_u16(),
                        "the engine has no /tokenize, so its tokens cannot be compared with those of --tokenizer"
                    );
                }
                return true;
            }
        };
        if own != theirs {
            let seen = format!(
                "--tokenizer gives {} tokens for {sample:?}, the engine {}{}: it is the tokenizer of another model, \
                 so prompts that the frontend tokenizes never match the engine's cache; prompts that the engine \
                 tokenizes do",
                own.len(),
                theirs.len(),
                if own.len() == theirs.len() { " different ones" } else { "" },
            );
            faults.push(fault(
                engine,
                "tokenizer_differs",
                &seen,
                "set --tokenizer to the folder of the model that the engine serves, or remove it: kvflash then \
                 uses the engine's own /tokenize",
            ));
            return true;
        }
    }
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// A server that answers every connection with `answer`, in two pieces.
    async fn server(answer: Vec<u8>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (one, two) = answer.split_at(answer.len() / 2);
                let mut asked = [0; 16];
                let _ = stream.read(&mut asked).await;
                let _ = stream.write_all(one).await;
                let _ = stream.write_all(two).await;
            }
        });
        address
    }

    fn ready(socket_type: &str) -> Vec<u8> {
        let mut said = greeting().to_vec();
        said.extend_from_slice(&[4, 26 + socket_type.len() as u8, 5]);
        said.extend_from_slice(b"READY\x0bSocket-Type\x00\x00\x00");
        said.push(socket_type.len() as u8);
        said.extend_from_slice(socket_type.as_bytes());
        said
    }

    #[tokio::test]
    async fn sockets_say_what_they_are() {
        for (answer, peer) in [
            (ready("PUB"), Peer::Publisher),
            (ready("XPUB"), Peer::Publisher),
            (ready("ROUTER"), Peer::Answerer),
            (ready("PULL"), Peer::Unknown),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), Peer::Http),
            (b"SSH-2.0-x\r\n".to_vec(), Peer::Unknown),
            (Vec::new(), Peer::Unknown),
        ] {
            let address = server(answer.clone()).await;
            assert_eq!(peer_at(&address).await, peer, "{}", String::from_utf8_lossy(&answer));
        }
        assert_eq!(peer_at("ipc:///tmp/engine").await, Peer::Publisher);
        // This server ignores the greeting and answers only a line of HTTP.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut asked = [0; 3];
                let _ = stream.read_exact(&mut asked).await;
                if &asked == b"GET" {
                    let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\n\r\n").await;
                }
                open.push(stream);
            }
        });
        assert_eq!(peer_at(&address).await, Peer::Http);
    }
}

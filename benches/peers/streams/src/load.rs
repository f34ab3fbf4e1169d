//! Reads many streams at once and says how they came.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Barrier;

/// All streams start within this time, so that the accept queue is not what is measured.
const RAMP: Duration = Duration::from_millis(500);

/// What became of one stream.
struct Outcome {
    first: Duration,
    /// Between one token and the next, microseconds; tokens that came together have 0.
    gaps_us: Vec<u32>,
    tokens: usize,
    fault: Option<String>,
}

pub async fn run(url: &str, streams: usize, tokens: usize) {
    let uri: Uri = format!("{url}/v1/chat/completions").parse().expect("a URL");
    let authority = uri.authority().expect("host:port").to_string();
    let start = Arc::new(Barrier::new(streams + 1));
    let mut tasks = Vec::new();
    for number in 0..streams {
        let (authority, start) = (authority.clone(), Arc::clone(&start));
        tasks.push(tokio::spawn(async move {
            start.wait().await;
            tokio::time::sleep(RAMP * number as u32 / streams as u32).await;
            let began = Instant::now();
            one(&authority, number, tokens, began).await.unwrap_or_else(|fault| Outcome {
                first: began.elapsed(),
                gaps_us: Vec::new(),
                tokens: 0,
                fault: Some(fault),
            })
        }));
    }
    start.wait().await;
    let began = Instant::now();
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.expect("a stream that is read"));
    }
    let seconds = began.elapsed().as_secs_f64();
    let received: usize = outcomes.iter().map(|outcome| outcome.tokens).sum();
    let mut gaps: Vec<u32> = outcomes.iter().flat_map(|o| o.gaps_us.iter().copied()).collect();
    let mut firsts: Vec<u32> = outcomes.iter().map(|o| o.first.as_micros() as u32).collect();
    let mut longest: Vec<u32> =
        outcomes.iter().filter_map(|o| o.gaps_us.iter().copied().max()).collect();
    let faults: Vec<&String> = outcomes.iter().filter_map(|o| o.fault.as_ref()).collect();
    println!(
        "{}",
        serde_json::json!({
            "streams": streams, "tokens": received, "seconds": seconds,
            "tokens_per_s": received as f64 / seconds,
            "gap_p50_ms": quantile(&mut gaps, 0.5), "gap_p99_ms": quantile(&mut gaps, 0.99),
            "longest_gap_p50_ms": quantile(&mut longest, 0.5), "gap_max_ms": quantile(&mut longest, 1.0),
            "first_p50_ms": quantile(&mut firsts, 0.5), "first_p99_ms": quantile(&mut firsts, 0.99),
            "failed": faults.len(), "fault": faults.first(),
        })
    );
}

fn quantile(values: &mut [u32], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.sort_unstable();
    let at = ((values.len() - 1) as f64 * share).round() as usize;
    f64::from(values[at]) / 1_000.0
}

async fn one(
    authority: &str,
    number: usize,
    tokens: usize,
    began: Instant,
) -> Result<Outcome, String> {
    let socket = TcpStream::connect(authority).await.map_err(|e| format!("connect: {e}"))?;
    socket.set_nodelay(true).map_err(|e| e.to_string())?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(|e| e.to_string())?;
    tokio::spawn(async move { drop(connection.await) });
    // Sixty-four conversations, a kilobyte each before they differ.
    let shared = format!("Conversation {}. ", number % 64).repeat(60);
    let body = serde_json::json!({
        "model": "tiny-llama", "stream": true, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": format!("{shared} Question {number}?")}],
    });
    let request = Request::post("/v1/chat/completions")
        .header("host", authority)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(|e| e.to_string())?;
    let response = sender.send_request(request).await.map_err(|e| format!("send: {e}"))?;
    if !response.status().is_success() {
        return Err(format!("status {}", response.status()));
    }
    let mut body = response.into_body();
    let mut outcome =
        Outcome { first: Duration::ZERO, gaps_us: Vec::new(), tokens: 0, fault: None };
    let (mut rest, mut last, mut is_done) = (Vec::new(), None::<Instant>, false);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|e| format!("read: {e}"))?.into_data() else { continue };
        rest.extend_from_slice(&data);
        let now = Instant::now();
        while let Some(end) = memchr::memmem::find(&rest, b"\n\n") {
            let event: Vec<u8> = rest.drain(..end + 2).collect();
            if event.starts_with(b"data: [DONE]") {
                is_done = true;
                continue;
            }
            let Some(found) = token_of(&event) else { continue };
            if found != outcome.tokens {
                return Err(format!("token {found} came where {} was due", outcome.tokens));
            }
            match last {
                None => outcome.first = now - began,
                Some(last) => outcome.gaps_us.push((now - last).as_micros() as u32),
            }
            last = Some(now);
            outcome.tokens += 1;
        }
    }
    if outcome.tokens != tokens || !is_done {
        let text = String::from_utf8_lossy(&rest).into_owned();
        outcome.fault = Some(format!("ended after {} of {tokens} tokens: {text}", outcome.tokens));
    }
    Ok(outcome)
}

/// The number in `<7>`; `None` for an event without one.
fn token_of(event: &[u8]) -> Option<usize> {
    let from = memchr::memchr(b'<', event)? + 1;
    let to = from + memchr::memchr(b'>', &event[from..])?;
    std::str::from_utf8(&event[from..to]).ok()?.parse().ok()
}

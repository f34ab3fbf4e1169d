//! Engines without a model, each on a port of its own.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::time::Interval;

pub async fn serve(first_port: u16, count: u16, interval_us: u64) {
    let mut servers = Vec::new();
    for port in first_port..first_port + count {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("a free port");
        servers.push(tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.expect("a connection");
                socket.set_nodelay(true).expect("an open socket");
                let answer = service_fn(move |request| answer(request, interval_us));
                let serving = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), answer);
                // A router that closes its connection is no error.
                tokio::spawn(async move { drop(serving.await) });
            }
        }));
    }
    println!("ready");
    for server in servers {
        server.await.expect("a server that runs");
    }
}

async fn answer(
    request: Request<Incoming>,
    interval_us: u64,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, Infallible> {
    let text = |text: &str| Full::new(Bytes::from(text.to_owned())).boxed_unsync();
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let response = match (parts.method, parts.uri.path()) {
        (Method::GET, "/v1/models") => text(
            r#"{"object":"list","data":[{"id":"tiny-llama","object":"model","created":0,"owned_by":"x","root":"tiny-llama","max_model_len":131072}]}"#,
        ),
        (Method::POST, "/v1/chat/completions") => {
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            // Some routers write the later name for it.
            let tokens = [&body["max_tokens"], &body["max_completion_tokens"]];
            let tokens = tokens.into_iter().find_map(serde_json::Value::as_u64).unwrap_or(1);
            let interval = (interval_us > 0)
                .then(|| tokio::time::interval(Duration::from_micros(interval_us)));
            let stream = Stream { next: 0, tokens, interval };
            return Ok(Response::builder()
                .header("content-type", "text/event-stream")
                .body(stream.boxed_unsync())
                .expect("a legal head"));
        }
        (Method::GET, "/get_server_info" | "/server_info" | "/get_model_info" | "/model_info") => {
            text(
                r#"{"model_path":"tiny-llama","tokenizer_path":"tiny-llama","is_generation":true}"#,
            )
        }
        _ => text("{}"),
    };
    Ok(Response::builder()
        .header("content-type", "application/json")
        .body(response)
        .expect("a legal head"))
}

/// Numbered events, each as large as a real token's.
struct Stream {
    next: u64,
    tokens: u64,
    interval: Option<Interval>,
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.next > self.tokens {
            return Poll::Ready(None);
        }
        if let Some(interval) = &mut self.interval {
            std::task::ready!(interval.poll_tick(cx));
        }
        let at = self.next;
        self.next += 1;
        let event = if at == self.tokens {
            "data: [DONE]\n\n".to_owned()
        } else {
            format!(
                "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"tiny-llama\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"<{at}>\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
            )
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(event)))))
    }
}

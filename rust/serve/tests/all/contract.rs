//! The gateway contract over every path that is served: an answer and a stream with their usage, errors, workers that
//! are not there, clients that leave, requests that are wrong. After each of them nothing is booked any more.

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::engine::{Asked, Engine};
use super::stage::{Answer, Stage, until, with};

/// Bodies may be so long here, bytes.
const BODY_BYTES: usize = 2_000;
const MULTIPART: &str = "multipart/form-data; boundary=b";

/// The API form in which a path refuses, streams and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    OpenAi,
    Responses,
    Anthropic,
}
use Form::{Anthropic, OpenAi, Responses};

#[derive(Debug, Clone)]
struct Row {
    path: &'static str,
    form: Form,
    /// A request that is right, but for its model; an upload has none of these fields.
    fields: Option<Value>,
}

/// Every path that takes a request for a worker.
fn rows() -> Vec<Row> {
    let messages = json!([{"role": "user", "content": "hello"}]);
    let json = |path, form, fields| Row { path, form, fields: Some(fields) };
    let rank = json!({ "query": "q", "documents": ["a", "b"] });
    let score = json!({ "text_1": "a", "text_2": "b" });
    let sound = |path| Row { path, form: OpenAi, fields: None };
    vec![
        json("/v1/chat/completions", OpenAi, json!({ "messages": messages })),
        json("/v1/completions", OpenAi, json!({ "prompt": "hello" })),
        json("/v1/responses", Responses, json!({ "input": "hello", "request_id": "resp_1" })),
        json("/v1/messages", Anthropic, json!({ "messages": messages, "max_tokens": 5 })),
        json("/v1/messages/count_tokens", Anthropic, json!({ "messages": messages })),
        json("/inference/v1/generate", OpenAi, json!({ "token_ids": [1, 2] })),
        json("/generate", OpenAi, json!({ "text": "hello" })),
        json("/v1/embeddings", OpenAi, json!({ "input": "hello" })),
        json("/v1/rerank", OpenAi, rank.clone()),
        json("/v2/rerank", OpenAi, rank.clone()),
        json("/rerank", OpenAi, rank),
        json("/v1/score", OpenAi, score.clone()),
        json("/score", OpenAi, score),
        json("/classify", OpenAi, json!({ "input": "hello" })),
        json("/pooling", OpenAi, json!({ "input": "hello" })),
        sound("/v1/audio/transcriptions"),
        sound("/v1/audio/translations"),
        json("/v1/audio/speech", OpenAi, json!({ "input": "hello", "voice": "alloy" })),
        json("/tokenize", OpenAi, json!({ "prompt": "hello" })),
        json("/detokenize", OpenAi, json!({ "tokens": [1] })),
    ]
}

fn upload(model: &[u8], bytes: usize) -> Vec<u8> {
    let head = |name: &str| format!("--b\r\ncontent-disposition: form-data; name={name}\r\n\r\n");
    let (model_head, file_head) = (head("\"model\""), head("\"file\"; filename=\"a.wav\""));
    let sound = vec![b'x'; bytes];
    [model_head.as_bytes(), model, b"\r\n", file_head.as_bytes(), &sound, b"\r\n--b--\r\n"].concat()
}

impl Row {
    /// Whether a model runs for it.
    fn runs_model(&self) -> bool {
        !["/v1/messages/count_tokens", "/tokenize", "/detokenize"].contains(&self.path)
    }

    fn kind(&self) -> &'static str {
        if self.fields.is_none() { MULTIPART } else { "application/json" }
    }

    /// The body of a request that is right, for this model.
    fn body(&self, model: &str) -> Vec<u8> {
        match &self.fields {
            None => upload(model.as_bytes(), 100),
            Some(fields) => with(fields.clone(), json!({ "model": model })).to_string().into(),
        }
    }

    /// Send a request that is right.
    fn send(&self, stage: &Stage) -> JoinHandle<Answer> {
        stage.upload_beside(self.path, self.kind(), self.body("m"))
    }

    /// The same as a stream.
    fn stream(&self, stage: &Stage) -> JoinHandle<Answer> {
        let mut body = self.body("m");
        if let Some(fields) = &self.fields {
            let fields = with(fields.clone(), json!({ "model": "m", "stream": true }));
            body = fields.to_string().into();
        }
        stage.upload_beside(self.path, self.kind(), body)
    }

    /// An engine's usage of 9 tokens, 6 of them from its cache.
    fn usage(&self) -> Value {
        match self.form {
            OpenAi => {
                json!({ "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 6}, "completion_tokens": 2 })
            }
            Responses => {
                json!({ "input_tokens": 9, "input_tokens_details": {"cached_tokens": 6}, "output_tokens": 2 })
            }
            Anthropic => {
                json!({ "input_tokens": 3, "cache_read_input_tokens": 6, "output_tokens": 2 })
            }
        }
    }

    /// The last events of a whole stream.
    fn last_events(&self) -> String {
        let usage = self.usage();
        match self.form {
            OpenAi => format!("data: {}\n\ndata: [DONE]\n\n", json!({ "usage": usage })),
            Responses => {
                let event = json!({ "type": "response.completed", "response": {"usage": usage} });
                format!("event: response.completed\ndata: {event}\n\n")
            }
            Anthropic => {
                let told = json!({ "type": "message_delta", "usage": usage });
                let stop = json!({ "type": "message_stop" });
                format!(
                    "event: message_delta\ndata: {told}\n\nevent: message_stop\ndata: {stop}\n\n"
                )
            }
        }
    }

    /// An engine's own refusal.
    fn refusal(&self) -> Value {
        let (kind, message) = ("invalid_request_error", "temperature must be positive");
        match self.form {
            Anthropic => json!({ "type": "error", "error": {"type": kind, "message": message} }),
            OpenAi | Responses => json!({ "error": {
                "message": message, "type": kind, "param": "temperature", "code": 400
            } }),
        }
    }

    /// Check that it was refused in its API's form; the error.
    fn refused(&self, answer: &Answer, status: u16, param: Option<&str>) -> Value {
        let (path, told) = (self.path, answer.json());
        assert_eq!(answer.status, status, "{path}: {told}");
        let names = |value: &Value| -> Vec<String> {
            value.as_object().unwrap().keys().map(String::to_owned).collect()
        };
        let (mut outer, mut inner) = (names(&told), names(&told["error"]));
        outer.sort();
        inner.sort();
        if self.form == Anthropic {
            assert_eq!(
                (outer, &told["type"]),
                (vec!["error".into(), "type".into()], &json!("error"))
            );
            assert_eq!(inner, ["message", "type"], "{path}: {told}");
        } else {
            assert_eq!(outer, ["error"], "{path}: {told}");
            assert_eq!(inner, ["code", "message", "param", "type"], "{path}: {told}");
            assert_eq!(told["error"]["code"], status, "{path}: {told}");
            assert_eq!(told["error"]["param"].as_str(), param, "{path}: {told}");
        }
        assert!(told["error"]["type"].is_string(), "{path}: {told}");
        assert!(!told["error"]["message"].as_str().unwrap().is_empty(), "{path}: {told}");
        told["error"].clone()
    }
}

fn stage() -> Stage {
    Stage::new(|options| {
        options.own.max_body_bytes = BODY_BYTES;
        options.own.max_upload_bytes = BODY_BYTES;
    })
}

/// Tokens are counted as the engine told them if a model ran, and nothing is booked.
async fn used(stage: &Stage, row: &Row) {
    let path = row.path;
    stage.until_idle().await;
    let counted = if row.runs_model() { (6.0, 9.0) } else { (0.0, 0.0) };
    for (name, tokens) in [("delivered", counted.0), ("input", counted.1)] {
        stage.until_metric(&format!("tokens_total{{stage=\"{name}\"}}"), tokens).await;
    }
    let label = format!("requests_total{{endpoint=\"{path}\",status=\"200\"}}");
    assert_eq!(stage.metric(&label).await, 1.0, "{path}");
    assert_eq!(stage.metric("clients_gone_total").await, 0.0, "{path}");
    assert_eq!(stage.metric("streams_broken_total").await, 0.0, "{path}");
}

#[tokio::test]
async fn the_table_has_every_path_that_is_served() {
    let stage = stage();
    let answer = stage.post("/nothing", &json!({})).await;
    let (_, served) = answer.text().split_once("the APIs served are ").unwrap();
    let served: Vec<_> = served.split('"').next().unwrap().split(", ").collect();
    let more = ["/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/models"];
    let paths: Vec<_> = rows().iter().map(|row| row.path).chain(more).collect();
    assert_eq!(served, paths);
}

#[tokio::test]
async fn an_answer_comes_as_its_engine_gave_it_and_its_usage_is_read() {
    for row in rows() {
        let stage = stage();
        let engine = stage.engine().await;
        let whole = json!({ "id": 1, "usage": row.usage() });
        engine.answers(200, whole.clone());
        let answer = row.send(&stage).await.unwrap();
        assert_eq!((answer.status, answer.json()), (200, whole), "{}", row.path);
        assert_eq!((answer.worker(), engine.paths()), (engine.id, vec![row.path.to_owned()]));
        used(&stage, &row).await;
    }
}

const FIRST_EVENT: &str = "data: {\"n\": 1}\n\n";

/// A stream of which the engine has sent the first event.
async fn begun(stage: &Stage, row: &Row) -> (JoinHandle<Answer>, Asked) {
    let mut engine = stage.engine().await.by_hand();
    let asking = row.stream(stage);
    let mut asked = engine.next().await;
    asked.begin().await;
    asked.write(FIRST_EVENT).await;
    (asking, asked)
}

#[tokio::test]
async fn a_stream_comes_to_its_end() {
    for row in rows() {
        let stage = stage();
        let (asking, mut asked) = begun(&stage, &row).await;
        let last = row.last_events();
        asked.write(&last).await;
        asked.close().await;
        let answer = asking.await.unwrap();
        assert_eq!((answer.status, answer.is_broken), (200, false), "{}", row.path);
        assert_eq!(answer.text(), format!("{FIRST_EVENT}{last}"), "{}", row.path);
        used(&stage, &row).await;
    }
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_of_its_api() {
    for row in rows() {
        let stage = stage();
        let (asking, asked) = begun(&stage, &row).await;
        drop(asked);
        let answer = asking.await.unwrap();
        let path = row.path;
        assert_eq!((answer.status, answer.is_broken), (200, false), "{path}");
        let events: Vec<_> = answer.text().split("\n\n").filter(|one| !one.is_empty()).collect();
        assert_eq!(events[0], "data: {\"n\": 1}", "{path}");
        let data = match row.form {
            OpenAi => events[1].strip_prefix("data: "),
            Responses | Anthropic => events[1].strip_prefix("event: error\ndata: "),
        };
        let event: Value = serde_json::from_str(data.unwrap()).unwrap();
        let (kind, rest) = match row.form {
            OpenAi => (Value::Null, vec!["data: [DONE]"]),
            Responses | Anthropic => (json!("error"), vec![]),
        };
        assert_eq!((&event["type"], &events[2..]), (&kind, &*rest), "{path}");
        let message = event["error"]["message"].as_str().unwrap();
        // With the cause: "reading a body" alone is no reason.
        let (said, cause) = message.split_once(" from connection: ").unwrap();
        assert!(said.contains("broke off the answer: ") && !cause.is_empty(), "{message}");
        assert_eq!(event.get("sequence_number"), (row.form == Responses).then_some(&json!(1)));
        stage.until_idle().await;
        assert_eq!(stage.metric("streams_broken_total").await, 1.0, "{path}");
    }
}

#[tokio::test]
async fn a_stream_that_outlasts_the_stop_says_so() {
    for row in rows() {
        let stage = stage();
        let (asking, mut asked) = begun(&stage, &row).await;
        stage.cut_off();
        asked.event("{\"n\": 2}").await;
        let answer = asking.await.unwrap();
        assert_eq!((answer.status, answer.is_broken), (200, false), "{}", row.path);
        let last = answer.text().split("\n\n").find(|one| one.contains("\"message\""));
        assert!(last.is_some_and(|one| one.contains("--drain-timeout")), "{}", answer.text());
        asked.gone().await;
        stage.until_idle().await;
        let workers = stage.get("/workers").await;
        assert_eq!(workers[0]["failures"], 0, "{}: the engine is not at fault", row.path);
    }
}

#[tokio::test]
async fn an_engines_own_refusal_is_passed_on_and_asked_for_once() {
    for row in rows() {
        let stage = stage();
        let engines = [stage.engine().await, stage.engine().await];
        engines.iter().for_each(|engine| engine.answers(400, row.refusal()));
        let answer = row.send(&stage).await.unwrap();
        assert_eq!((answer.status, answer.json()), (400, row.refusal()), "{}", row.path);
        assert_eq!(engines.iter().map(Engine::count).sum::<usize>(), 1, "{}", row.path);
        stage.until_idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_refuses_connections_is_replaced_by_another() {
    for row in rows() {
        let stage = stage();
        let (gone, there) = (stage.engine().await, stage.engine().await);
        drop(gone);
        for _ in 0..2 {
            let answer = row.send(&stage).await.unwrap();
            assert_eq!((answer.status, answer.worker()), (200, there.id), "{}", row.path);
        }
        let failed = stage.metric("attempts_failed_total{cause=\"connect\"}").await;
        assert!((1.0..=2.0).contains(&failed), "{}: {failed}", row.path);
        drop(there);
        let answer = row.send(&stage).await.unwrap();
        row.refused(&answer, 502, None);
        stage.until_idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_booking_and_its_engine() {
    for row in rows() {
        for has_begun in [false, true] {
            let stage = stage();
            let mut engine = stage.engine().await.by_hand();
            let asking = row.stream(&stage);
            let mut asked = engine.next().await;
            let active = "worker_active_requests{worker=\"1:0\"}";
            stage.until_metric(active, 1.0).await;
            if has_begun {
                asked.begin().await;
                asked.write("data: {\"n\": 1}\n\n").await;
                // It is with the client once it is counted as the first token.
                until("the first byte", async || {
                    stage.metric("first_byte_seconds_count").await > 0.5
                })
                .await;
            }
            asking.abort();
            asked.gone().await;
            stage.until_idle().await;
            stage.until_metric("clients_gone_total", 1.0).await;
            assert_eq!(engine.count(), 1, "{}", row.path);
        }
    }
}

#[tokio::test]
async fn the_time_between_the_chunks_of_a_stream_is_measured() {
    let stage = stage();
    let mut engine = stage.engine().await.by_hand();
    let asking = stage
        .send_to("/v1/completions", json!({ "model": "m", "prompt": "hello", "stream": true }));
    let mut asked = engine.next().await;
    asked.begin().await;
    for chunk in 0..3 {
        asked.event(r#"{"choices": [{"text": "a"}]}"#).await;
        stage.until_metric("first_byte_seconds_count", 1.0).await;
        stage.until_metric("inter_token_seconds_count", f64::from(chunk)).await;
    }
    // It has no tokens.
    asked.write(": a comment\n\n").await;
    asked.end().await;
    assert_eq!(asking.await.unwrap().status, 200);
    assert_eq!(stage.metric("inter_token_seconds_count").await, 2.0);
}

#[tokio::test]
async fn a_wrong_request_is_refused_in_its_apis_form_and_sent_to_nobody() {
    for row in rows() {
        let stage = stage();
        let engine = stage.engine().await;
        let send = async |kind: &str, body: Vec<u8>| stage.upload(row.path, kind, body).await;
        let unknown = send(row.kind(), row.body("nobody")).await;
        let error = row.refused(&unknown, 404, Some("model"));
        assert!(error["message"].as_str().unwrap().contains("\"nobody\" is not served"), "{error}");
        let large = match &row.fields {
            None => upload(b"m", BODY_BYTES),
            Some(_) => vec![b' '; BODY_BYTES + 1],
        };
        row.refused(&send(row.kind(), large).await, 413, None);
        if row.fields.is_none() {
            row.refused(&send(row.kind(), upload(b"\xff", 100)).await, 400, Some("model"));
            row.refused(&send("application/json", b"{}".to_vec()).await, 400, None);
        } else {
            for body in ["{\"model\": \"m\"", "[]", "5", "", "{\"model\": \"m\"} x"] {
                row.refused(&send(row.kind(), body.into()).await, 400, None);
            }
            for (field, value) in [("model", json!(5)), ("cache_salt", json!([]))] {
                let body = with(row.fields.clone().unwrap(), json!({ field: value }));
                let answer = send(row.kind(), body.to_string().into()).await;
                let error = row.refused(&answer, 400, Some(field));
                assert!(error["message"].as_str().unwrap().starts_with(field), "{error}");
            }
        }
        assert_eq!(engine.count(), 0, "{}", row.path);
        stage.until_idle().await;
    }
}

//! The contract of requests that name a response: they go to the worker that keeps it, and nowhere else.

use axum::http::Method;
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Answer, Stage};

const RESPONSES: &str = "/v1/responses";

/// Methods, and what stands behind the id.
const ROWS: [(Method, &str); 3] =
    [(Method::GET, ""), (Method::DELETE, ""), (Method::POST, "/cancel")];

/// Three engines, the path of a response, and which of them keeps it.
async fn kept(stage: &Stage) -> (Vec<Engine>, usize, String) {
    let mut engines = Vec::new();
    for _ in 0..3 {
        engines.push(stage.engine().await);
    }
    let first = stage.post(RESPONSES, &json!({ "model": "m", "input": "hello" })).await;
    let keeper = engines.iter().position(|engine| engine.id == first.worker()).unwrap();
    let id = engines[keeper].bodies()[0]["request_id"].as_str().unwrap().to_owned();
    (engines, keeper, format!("{RESPONSES}/{id}"))
}

/// Check that it was refused in OpenAI's form, and that nothing is booked.
async fn refused(stage: &Stage, answer: &Answer, status: u16, param: Option<&str>) -> String {
    let told: Value = answer.json();
    let error = &told["error"];
    assert_eq!((answer.status, error["param"].as_str()), (status, param), "{told}");
    assert_eq!(error["code"], status, "{told}");
    stage.until_idle().await;
    error["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn they_go_to_the_worker_that_keeps_it_and_count_no_tokens() {
    for (method, suffix) in ROWS {
        // Models that are served beside it do not matter: the id says who is asked.
        let stage = Stage::new(|_| ());
        let _other = stage.add(Engine::of("other").await, json!({})).await;
        let first = Engine::of("m").await;
        let keeper = stage.add(first, json!({})).await;
        let _ = stage.post(RESPONSES, &json!({ "model": "m", "input": "hello" })).await;
        let id = keeper.bodies()[0]["request_id"].as_str().unwrap().to_owned();
        let path = format!("{RESPONSES}/{id}{suffix}");
        let usage = json!({ "input_tokens": 9, "input_tokens_details": {"cached_tokens": 6} });
        let whole = json!({ "id": id, "usage": usage });
        keeper.answers(200, whole.clone());
        let answer = stage.beside(method.clone(), &path).await.unwrap();
        assert_eq!((answer.status, answer.json()), (200, whole), "{method} {path}");
        assert_eq!((answer.worker(), keeper.paths().pop()), (keeper.id, Some(path)));
        assert_eq!((keeper.methods().pop(), keeper.count()), (Some(method.to_string()), 2));
        stage.until_idle().await;
        for name in ["delivered", "input"] {
            assert_eq!(stage.metric(&format!("tokens_total{{stage=\"{name}\"}}")).await, 0.0);
        }
        let label =
            format!("requests_total{{endpoint=\"/v1/responses/{{id}}{suffix}\",status=\"200\"}}");
        assert_eq!(stage.metric(&label).await, 1.0, "{label}");
    }
}

#[tokio::test]
async fn a_removal_may_be_answered_without_a_word() {
    let stage = Stage::new(|_| ());
    let (engines, keeper, path) = kept(&stage).await;
    engines[keeper].says(204, "");
    let answer = stage.beside(Method::DELETE, &path).await.unwrap();
    assert_eq!((answer.status, answer.worker()), (204, engines[keeper].id));
    let worker = stage.get(&format!("/workers/{}", engines[keeper].id)).await;
    assert_eq!((&worker["healthy"], &worker["failures"]), (&json!(true), &json!(0)));
    stage.until_idle().await;
}

#[tokio::test]
async fn a_stream_of_a_response_is_passed_on_and_breaks_in_its_form() {
    let stage = Stage::new(|_| ());
    let mut keeper = stage.engine().await;
    let _ = stage.post(RESPONSES, &json!({ "model": "m", "input": "hello" })).await;
    let id = keeper.bodies()[0]["request_id"].as_str().unwrap().to_owned();
    keeper = keeper.by_hand();
    let path = format!("{RESPONSES}/{id}?stream=true&starting_after=1");
    let asking = stage.beside(Method::GET, &path);
    let mut asked = keeper.next().await;
    asked.begin().await;
    asked.write("event: response.created\ndata: {\"n\": 1}\n\n").await;
    drop(asked);
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.is_broken), (200, false));
    assert_eq!(keeper.paths().pop(), Some(path.clone()));
    let (first, end) = answer.text().split_once("\n\n").unwrap();
    assert_eq!(first, "event: response.created\ndata: {\"n\": 1}");
    assert!(end.contains("event: error\ndata: {"), "{end}");
    stage.until_idle().await;
    stage.until_healthy(keeper.id, true).await;
    let asking = stage.beside(Method::GET, &path);
    let asked = keeper.next().await;
    asking.abort();
    asked.gone().await;
    stage.until_idle().await;
}

#[tokio::test]
async fn an_engines_own_word_about_a_response_is_passed_on() {
    for (method, suffix) in ROWS {
        let stage = Stage::new(|_| ());
        let (engines, keeper, path) = kept(&stage).await;
        let told = json!({ "error": {"message": "Response with id 'x' not found.", "code": 404} });
        engines[keeper].answers(404, told.clone());
        let path = format!("{path}{suffix}");
        let answer = stage.beside(method.clone(), &path).await.unwrap();
        assert_eq!((answer.status, answer.json()), (404, told), "{method} {path}");
        // One that has no such path.
        engines[keeper].answers(405, json!({ "detail": "Method Not Allowed" }));
        let answer = stage.beside(method.clone(), &path).await.unwrap();
        let message = refused(&stage, &answer, 501, None).await;
        let wanted = format!("does not serve {method} {RESPONSES}/{{id}}{suffix}");
        assert!(message.contains(&wanted), "{message}");
        assert_eq!(engines.iter().map(Engine::count).sum::<usize>(), 3);
    }
}

#[tokio::test]
async fn a_worker_that_is_gone_is_told_and_nobody_else_is_asked() {
    for (method, suffix) in ROWS {
        let stage = Stage::new(|_| ());
        let (mut engines, keeper, path) = kept(&stage).await;
        let path = format!("{path}{suffix}");
        let gone = engines.remove(keeper);
        let id = gone.id;
        drop(gone);
        let answer = stage.beside(method.clone(), &path).await.unwrap();
        refused(&stage, &answer, 502, None).await;
        stage.remove(id).await;
        let answer = stage.beside(method.clone(), &path).await.unwrap();
        let message = refused(&stage, &answer, 404, Some("response_id")).await;
        assert!(message.contains("the worker that kept it is gone"), "{message}");
        for id in ["resp_1", "resp_1%2F..%2Fx_kv00000000000000ff0", "resp_1_kv0"] {
            let path = format!("{RESPONSES}/{id}{suffix}");
            let answer = stage.beside(method.clone(), &path).await.unwrap();
            let message = refused(&stage, &answer, 404, Some("response_id")).await;
            assert!(
                message.starts_with(&format!("Response with id '{id}' not found")),
                "{message}"
            );
        }
        assert_eq!(engines.iter().map(Engine::count).sum::<usize>(), 0);
        let answer = stage.beside(Method::PUT, &path).await.unwrap();
        refused(&stage, &answer, 405, None).await;
    }
}

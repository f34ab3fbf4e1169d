//! Large uploads go on to a worker as they come, once their model is known.

use std::io;

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

use super::engine::Engine;
use super::stage::{Answer, Part, Stage, until};

const PATH: &str = "/v1/audio/transcriptions";
const KIND: &str = "multipart/form-data; boundary=b";
const MIB: usize = 1024 * 1024;

fn field(name: &str, value: &str) -> String {
    format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
}

const FILE: &str =
    "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";

fn say(client: &UnboundedSender<Part>, bytes: impl Into<Vec<u8>>) {
    client.send(Ok(bytes.into())).expect("the frontend reads");
}

/// An upload for `model` of which more than the frontend holds was sent, and has arrived at `engine`.
async fn begun(
    stage: &Stage,
    engine: &Engine,
    model: &str,
) -> (UnboundedSender<Part>, JoinHandle<Answer>) {
    let (client, answer) = stage.upload_slowly(PATH, KIND);
    say(&client, field("model", model) + FILE);
    say(&client, vec![b'x'; 2 * MIB]);
    until("the beginning", async || engine.arrived() > 2 * MIB).await;
    (client, answer)
}

#[tokio::test]
async fn a_large_upload_reaches_its_worker_while_it_comes() {
    let stage = Stage::new(|options| options.own.model_alias = vec!["sound=m".to_owned()]);
    let engine = stage.engine().await;
    for model in ["m", "sound"] {
        let before = engine.arrived();
        let (client, answer) = begun(&stage, &engine, model).await;
        assert!(!answer.is_finished());
        say(&client, vec![b'y'; MIB]);
        say(&client, "\r\n--b--\r\n");
        drop(client);
        let answer = answer.await.expect("no panic");
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(engine.arrived() - before > 3 * MIB);
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn an_upload_that_names_its_model_late_is_held() {
    let stage = Stage::new(|_| ());
    let engine = stage.engine().await;
    let (client, answer) = stage.upload_slowly(PATH, KIND);
    say(&client, FILE);
    say(&client, vec![b'x'; 2 * MIB]);
    say(&client, "\r\n".to_owned() + &field("model", "m"));
    tokio::task::yield_now().await;
    assert_eq!(engine.arrived(), 0);
    say(&client, "--b--\r\n");
    drop(client);
    assert_eq!(answer.await.expect("no panic").status, 200);
}

#[tokio::test]
async fn a_client_that_breaks_off_its_upload_is_at_fault() {
    let stage = Stage::new(|options| options.own.max_upload_bytes = 3 * MIB);
    let engine = stage.engine().await;
    let (client, answer) = begun(&stage, &engine, "m").await;
    client.send(Err(io::ErrorKind::ConnectionReset.into())).expect("the frontend reads");
    let answer = answer.await.expect("no panic");
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("ended before its declared length"), "{}", answer.text());

    let (client, answer) = begun(&stage, &engine, "m").await;
    say(&client, vec![b'x'; MIB]);
    let answer = answer.await.expect("no panic");
    assert_eq!(answer.status, 413, "{}", answer.text());
    assert!(answer.text().contains("--max-upload-bytes"), "{}", answer.text());

    stage.until_healthy(engine.id, true).await;
    assert_eq!(engine.count(), 0);
    stage.until_metric("bodies_refused_total{cause=\"cut_off\"}", 1.0).await;
    stage.until_metric("bodies_refused_total{cause=\"too_large\"}", 1.0).await;
    stage.until_idle().await;
}

#[tokio::test]
async fn an_upload_that_a_worker_has_begun_goes_to_no_other() {
    let stage = Stage::new(|options| options.own.max_upload_bytes = 8 * MIB);
    // The first is gone, which is found out when the request is sent: the second gets all of it.
    let (gone, engine) = (stage.engine().await, stage.engine().await);
    drop(gone);
    let (client, answer) = begun(&stage, &engine, "m").await;
    drop(client);
    assert_eq!(answer.await.expect("no panic").status, 200);

    engine.closes();
    let other = stage.engine().await;
    let mut told = 0;
    for _ in 0..2 {
        let (client, answer) = stage.upload_slowly(PATH, KIND);
        say(&client, field("model", "m") + FILE);
        say(&client, vec![b'x'; 2 * MIB]);
        drop(client);
        let answer = answer.await.expect("no panic");
        told += usize::from(answer.status == 502 && answer.text().contains("can't be sent twice"));
    }
    assert_eq!((told, other.count()), (1, 1));
    stage.until_idle().await;
}

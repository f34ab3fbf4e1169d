//! One answer for each request: before the first byte another worker is tried, after it never.

use std::time::Duration;

use serde_json::json;

use super::engine::Engine;
use super::stage::{DEADLINE, Stage, prompt, until, with};

#[tokio::test]
async fn a_worker_that_closes_is_replaced_by_another() {
    let stage = Stage::new(|_| ());
    let (bad, good) = (stage.engine().await, stage.engine().await);
    bad.closes();
    for n in 0..2 {
        stage.until_healthy(bad.id, true).await;
        let answer = stage.ask(&prompt(n..n + 40)).await;
        assert_eq!((answer.status, answer.worker()), (200, good.id));
    }
    assert_eq!((good.count(), bad.count() >= 1), (2, true));
    let failed = stage.metric("attempts_failed_total{cause=\"no_answer\"}").await;
    assert_eq!(failed as usize, bad.count());
    stage.until_idle().await;
}

#[tokio::test]
async fn every_worker_is_tried_once_and_the_last_failure_is_told() {
    let stage = Stage::new(|_| ());
    let engines = [stage.engine().await, stage.engine().await];
    engines.iter().for_each(|engine| engine.closes());
    let answer = stage.ask(&prompt(0..40)).await;
    assert_eq!(answer.status, 502);
    assert!(answer.text().contains("no worker answered; tried ["), "{}", answer.text());
    assert_eq!(engines.map(|engine| engine.count()), [1, 1]);
    stage.until_idle().await;
}

#[tokio::test]
async fn a_client_may_allow_fewer_attempts_and_never_more() {
    let stage = Stage::new(|options| options.own.max_attempts = 2);
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(stage.engine().await);
    }
    engines.iter().for_each(|engine| engine.answers(503, json!({ "error": "busy" })));
    let sent = || engines.iter().map(|engine| engine.count()).sum::<usize>();
    for (value, expected) in [("1", 1), ("99999999999999999999", 3)] {
        let answer = stage.ask_with(&[("x-kvflash-max-attempts", value)], &prompt(0..40)).await;
        assert_eq!((answer.status, sent()), (503, expected), "{value}");
        // Two workers refused the request, whatever the limit.
        let end = if value == "1" {
            "; the limit of attempts is 1 (--max-attempts"
        } else {
            "; two workers"
        };
        assert!(answer.text().contains(end), "{}", answer.text());
    }
    for value in ["0", "-1", "two", "1.5"] {
        let answer = stage.ask_with(&[("x-kvflash-max-attempts", value)], &prompt(0..40)).await;
        assert_eq!((answer.status, sent()), (400, 3));
        assert!(answer.text().contains("x-kvflash-max-attempts"), "{}", answer.text());
        assert!(answer.text().contains("--max-attempts"), "{}", answer.text());
    }
}

#[tokio::test]
async fn a_refused_request_is_tried_at_one_more_worker() {
    let stage = Stage::new(|_| ());
    let mut engines = Vec::new();
    for _ in 0..5 {
        engines.push(stage.engine().await);
    }
    engines.iter().for_each(|engine| engine.answers(503, json!({ "error": "busy" })));
    let answer = stage.ask(&prompt(0..40)).await;
    assert_eq!((answer.status, answer.header("retry-after").is_some()), (503, true));
    assert_eq!(engines.iter().map(|engine| engine.count()).sum::<usize>(), 2);
    // A refusal says nothing of an engine's health.
    let workers = stage.get("/workers").await;
    assert!(workers.as_array().unwrap().iter().all(|worker| worker["healthy"] == true));
}

#[tokio::test]
async fn a_wrong_request_is_sent_once() {
    let stage = Stage::new(|_| ());
    let engines = [stage.engine().await, stage.engine().await];
    engines.iter().for_each(|engine| engine.answers(400, json!({ "error": "bad prompt" })));
    let answer = stage.ask(&prompt(0..40)).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("bad prompt")));
    assert_eq!(engines.iter().map(|engine| engine.count()).sum::<usize>(), 1);
    stage.until_idle().await;
}

#[tokio::test]
async fn an_engine_s_error_is_told_as_a_failure() {
    let stage = Stage::new(|_| ());
    let engine = stage.engine().await;
    for (status, outcome) in [(200, "complete"), (400, "failed"), (500, "failed")] {
        engine.answers(status, json!({ "choices": [] }));
        let id = format!("of-{status}");
        let answer = stage.ask_with(&[("x-request-id", id.as_str())], &prompt(0..40)).await;
        assert_eq!(answer.status, status);
        let told = stage.get(&format!("/why/{id}")).await;
        assert_eq!(told["decisions"][0]["outcome"], outcome, "{told}");
    }
}

#[tokio::test]
async fn silence_before_the_first_byte_is_a_failed_attempt() {
    let stage = Stage::new(|options| options.own.first_byte_timeout = Duration::from_secs(600));
    let mut hangs = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let held = hangs.next().await;
    let good = stage.engine().await;
    stage.skip(Duration::from_secs(599)).await;
    assert!(!asking.is_finished());
    stage.skip(Duration::from_secs(1)).await;
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.worker()), (200, good.id));
    held.gone().await;
    stage.until_idle().await;
}

#[tokio::test]
async fn a_booking_does_not_expire_while_its_request_waits() {
    let stage = Stage::new(|options| {
        options.routing.selector.router.load.expiry_ms = 60_000;
        options.own.health_interval = Duration::from_secs(3_600);
    });
    let mut engine = stage.engine().await.by_hand();
    let asking = stage.send("a", with(prompt(0..40), json!({ "stream": true })));
    let mut asked = engine.next().await;
    let active = "worker_active_requests{worker=\"1:0\"}";
    let wait = async || {
        for _ in 0..28 {
            stage.skip(Duration::from_secs(10)).await;
            stage.expire();
            assert_eq!(stage.metric(active).await, 1.0);
        }
    };
    wait().await;
    asked.begin().await;
    asked.event("{\"n\": 1}").await;
    stage.until_metric("worker_active_prefill_tokens{worker=\"1:0\"}", 0.0).await;
    wait().await;
    asked.end().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_idle().await;
    assert_eq!(stage.metric("load_expired_total").await, 0.0);
}

#[tokio::test]
async fn the_last_silence_is_a_gateway_timeout() {
    let stage = Stage::new(|options| options.own.first_byte_timeout = Duration::from_secs(600));
    let mut hangs = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let _held = hangs.next().await;
    stage.skip(Duration::from_secs(600)).await;
    let answer = asking.await.unwrap();
    assert_eq!(answer.status, 504, "{}", answer.text());
    stage.until_idle().await;
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_and_is_never_repeated() {
    let stage = Stage::new(|_| ());
    let mut breaks = stage.engine().await.by_hand();
    let asking = stage.send("a", with(prompt(0..40), json!({ "stream": true })));
    let mut asked = breaks.next().await;
    let other = stage.engine().await;
    asked.begin().await;
    asked.event("{\"n\": 1}").await;
    drop(asked);
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.is_broken), (200, false));
    let events: Vec<_> = answer.text().split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!((events.len(), events[0]), (3, "data: {\"n\": 1}"));
    assert!(events[1].contains("\"code\":502"), "{}", events[1]);
    assert_eq!(events[2], "data: [DONE]");
    assert_eq!(other.count(), 0);
    stage.until_idle().await;
}

#[tokio::test]
async fn silence_within_a_stream_breaks_it() {
    let stage = Stage::new(|options| options.own.stream_idle_timeout = Duration::from_secs(300));
    let mut engine = stage.engine().await.by_hand();
    let asking = stage.send("a", with(prompt(0..40), json!({ "stream": true })));
    let mut asked = engine.next().await;
    asked.begin().await;
    asked.event("{\"n\": 1}").await;
    // The wait begins when the event has gone through.
    stage.until_metric("worker_active_prefill_tokens{worker=\"1:0\"}", 0.0).await;
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    stage.skip(Duration::from_secs(301)).await;
    let answer = asking.await.unwrap();
    assert!(answer.text().contains("--stream-idle-timeout"), "{}", answer.text());
    asked.gone().await;
    stage.until_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_booking_and_its_engine() {
    let stage = Stage::new(|_| ());
    let mut engine = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    stage.until_metric("worker_active_requests{worker=\"1:0\"}", 1.0).await;
    asking.abort();
    asked.gone().await;
    stage.until_idle().await;
    assert_eq!(stage.metric("clients_gone_total").await, 1.0);
}

#[tokio::test]
async fn requests_in_flight_have_a_limit() {
    let stage = Stage::new(|options| options.own.max_concurrent_requests = 1);
    let mut engine = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    let refused = stage.ask(&prompt(0..40)).await;
    assert_eq!((refused.status, refused.header("retry-after").is_some()), (429, true));
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_idle().await;
}

#[tokio::test]
async fn requests_whose_bodies_come_late_are_within_the_limit() {
    let stage = Stage::new(|options| options.own.max_concurrent_requests = 1);
    let mut engine = stage.engine().await.by_hand();
    let (client, late) = stage.upload_slowly("/v1/completions", "application/json");
    let body = prompt(0..40).to_string();
    let (beginning, rest) = body.split_at(body.len() / 2);
    client.send(Ok(beginning.into())).expect("the frontend reads");
    tokio::task::yield_now().await;
    // It began while there was room, which another one took before its body came.
    let asking = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    client.send(Ok(rest.into())).expect("the frontend reads");
    drop(client);
    assert_eq!(late.await.expect("no panic").status, 429);
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_idle().await;
}

#[tokio::test]
async fn readiness_fails_while_it_is_full_where_that_is_wanted() {
    for is_wanted in [false, true] {
        let stage = Stage::new(|options| {
            options.own.max_concurrent_requests = 1;
            options.own.ready_fails_when_full = is_wanted;
        });
        let mut engine = stage.engine().await.by_hand();
        let asking = stage.send("a", prompt(0..40));
        let asked = engine.next().await;
        stage.skip(Duration::from_secs(9)).await;
        assert_eq!(stage.get("/ready").await["ready"], true, "it may be a burst");
        asked.done().await;
        assert_eq!(asking.await.unwrap().status, 200);
        // Under overload the next request takes its slot at once.
        let asking = stage.send("a", prompt(0..40));
        let asked = engine.next().await;
        stage.skip(Duration::from_secs(1)).await;
        let full = stage.get("/ready").await;
        assert_eq!(full["ready"], !is_wanted);
        assert!(
            !is_wanted || full["reason"].as_str().unwrap().contains("--max-concurrent-requests")
        );
        asked.done().await;
        assert_eq!(asking.await.unwrap().status, 200);
        stage.until_idle().await;
        stage.skip(Duration::from_secs(1)).await;
        assert_eq!(stage.get("/ready").await["ready"], true);
        let asking = stage.send("a", prompt(0..40));
        let asked = engine.next().await;
        assert_eq!(stage.get("/ready").await["ready"], true, "it was not full in between");
        asked.done().await;
        assert_eq!(asking.await.unwrap().status, 200);
        stage.until_idle().await;
    }
}

#[tokio::test]
async fn sick_workers_get_nothing_until_they_are_well() {
    let stage = Stage::new(|_| ());
    let (sick, well) = (stage.engine().await, stage.engine().await);
    sick.health(500);
    stage.skip(Duration::from_secs(2)).await;
    stage.until_healthy(sick.id, false).await;
    for n in 0..4 {
        assert_eq!(stage.ask(&prompt(n..n + 40)).await.worker(), well.id);
    }
    well.health(500);
    stage.skip(Duration::from_secs(2)).await;
    stage.until_healthy(well.id, false).await;
    let refused = stage.ask(&prompt(0..40)).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    sick.health(200);
    until("a check", async || {
        stage.skip(Duration::from_secs(1)).await;
        stage.get("/workers").await[0]["healthy"] == true
    })
    .await;
    assert_eq!(stage.ask(&prompt(0..40)).await.worker(), sick.id);
}

#[tokio::test]
async fn a_worker_that_was_removed_gets_nothing_and_ends_what_it_has() {
    let stage = Stage::new(|_| ());
    let mut leaves = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let asked = leaves.next().await;
    let stays = stage.engine().await;
    stage.remove(leaves.id).await;
    for n in 0..4 {
        assert_eq!(stage.ask(&prompt(n..n + 40)).await.worker(), stays.id);
    }
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
    assert_eq!(leaves.count(), 1);
}

#[tokio::test]
async fn a_request_that_ends_its_worker_ends_two_at_most_and_then_one() {
    let stage = Stage::new(|_| ());
    let mut engines = Vec::new();
    for _ in 0..6 {
        engines.push(stage.engine().await);
    }
    engines.iter().for_each(|engine| engine.closes());
    let poison = prompt(0..40);
    let sent = || engines.iter().map(|engine| engine.count()).sum::<usize>();
    let answer = stage.ask(&poison).await;
    assert_eq!((answer.status, sent()), (502, 2));
    assert!(answer.text().contains("two workers lost the request"), "{}", answer.text());
    for engine in &engines {
        stage.until_healthy(engine.id, true).await;
    }
    let answer = stage.ask(&poison).await;
    assert_eq!((answer.status, sent()), (502, 3));
    assert!(answer.text().contains("less than 60 s ago"), "{}", answer.text());
    for engine in &engines {
        stage.until_healthy(engine.id, true).await;
    }
    assert_eq!((stage.ask(&prompt(1..41)).await.status, sent()), (502, 5), "another body");
    stage.until_idle().await;
}

#[tokio::test]
async fn workers_that_are_not_there_are_passed_over_however_many() {
    let stage = Stage::new(|_| ());
    let mut gone = Vec::new();
    for _ in 0..4 {
        gone.push(stage.engine().await);
    }
    let there = stage.engine().await;
    drop(gone);
    for n in 0..4 {
        assert_eq!(stage.ask(&prompt(n..n + 40)).await.worker(), there.id);
    }
}

#[tokio::test]
async fn whoever_waits_for_a_worker_that_fails_its_checks_goes_elsewhere() {
    let stage = Stage::new(|_| ());
    let mut stalls = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let held = stalls.next().await;
    let good = stage.engine().await;
    stalls.health(500);
    stage.skip(Duration::from_secs(3)).await;
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.worker()), (200, good.id));
    held.gone().await;
    assert_eq!(stage.metric("attempts_failed_total{cause=\"unwell\"}").await, 1.0);
    stage.until_idle().await;
}

/// Also while the frontend stops.
#[tokio::test]
async fn whoever_waits_for_a_removed_worker_that_fails_its_checks_goes_elsewhere() {
    for is_stopping in [false, true] {
        let stage = Stage::new(|_| ());
        let mut stalls = stage.engine().await.by_hand();
        let asking = stage.send("a", prompt(0..40));
        let held = stalls.next().await;
        let good = stage.engine().await;
        if is_stopping {
            stage.stop();
        } else {
            stage.remove(stalls.id).await;
        }
        stalls.health(500);
        // Much less than --first-byte-timeout.
        for _ in 0..10 {
            stage.skip(Duration::from_secs(1)).await;
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
        }
        let answer = tokio::time::timeout(DEADLINE, asking).await.expect("it waits still").unwrap();
        assert_eq!((answer.status, answer.worker()), (200, good.id));
        held.gone().await;
        stage.until_idle().await;
    }
}

#[tokio::test]
async fn a_removed_worker_that_closes_its_port_ends_what_it_has() {
    // Time that moves on ends no check.
    let hour = Duration::from_secs(3_600);
    let stage = Stage::new(|options| options.own.health_interval = hour);
    let mut leaves = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..40));
    let asked = leaves.next().await;
    let _other = stage.engine().await;
    let id = leaves.id;
    stage.remove(id).await;
    drop(leaves);
    for _ in 0..10 {
        stage.skip(Duration::from_secs(1)).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    asked.done().await;
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.worker()), (200, id));
}

#[tokio::test]
async fn what_is_no_answer_is_a_failed_attempt() {
    for status in [302, 204, 200] {
        let stage = Stage::new(|_| ());
        let (odd, good) = (stage.engine().await, stage.engine().await);
        odd.says(status, "");
        for n in 0..2 {
            stage.until_healthy(odd.id, true).await;
            let answer = stage.ask(&prompt(n..n + 40)).await;
            assert_eq!((answer.status, answer.worker()), (200, good.id), "{status}");
        }
    }
}

#[tokio::test]
async fn a_check_that_meets_a_closing_connection_is_repeated_on_a_new_one() {
    let stage = Stage::new(|options| options.own.health_interval = Duration::from_millis(10));
    let engine = Engine::start(&[]).await;
    engine.closes_kept();
    let engine = stage.add(engine, json!({})).await;
    let checked = engine.checked();
    until("ten more checks", async || engine.checked() >= checked + 10).await;
    let worker = &stage.get("/workers").await[0];
    assert_eq!((&worker["healthy"], &worker["failures"]), (&json!(true), &json!(0)), "{worker}");
    let id = engine.id;
    drop(engine);
    stage.until_healthy(id, false).await;
}

#[tokio::test]
async fn a_worker_that_never_comes_to_its_answer_is_given_up() {
    let stage = Stage::new(|_| ());
    let (odd, good) = (stage.engine().await, stage.engine().await);
    odd.hesitates();
    for n in 0..2 {
        stage.until_healthy(odd.id, true).await;
        let answer = stage.ask(&prompt(n..n + 40)).await;
        assert_eq!((answer.status, answer.worker()), (200, good.id));
    }
}

#[tokio::test]
async fn a_model_that_no_worker_knows_any_more_is_404() {
    for (says, wanted) in [
        ("The model `m` does not exist.", "does not serve model \\\"m\\\" any more"),
        // Any other 404 is the engine's own answer.
        ("no such item", "\"no such item\""),
    ] {
        let stage = Stage::new(|options| options.own.health_interval = Duration::from_secs(3_600));
        let engine = stage.engine().await;
        engine.answers(404, json!({ "error": { "message": says } }));
        let answer = stage.ask(&prompt(0..40)).await;
        assert_eq!(
            (answer.status, answer.text().contains(wanted)),
            (404, true),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn a_worker_that_became_another_s_is_asked_for_its_models_again() {
    let stage = Stage::new(|options| options.own.health_interval = Duration::from_secs(3_600));
    let (other, good) = (stage.engine().await, stage.engine().await);
    other.becomes(&["n"]);
    other.answers(404, json!({ "error": { "message": "The model `m` does not exist." } }));
    // A request that meets it goes to another worker.
    for n in 0..4 {
        let answer = stage.ask(&prompt(n..n + 40)).await;
        assert_eq!((answer.status, answer.worker()), (200, good.id));
    }
    until("its new model", async || {
        stage.ask(&prompt(0..40)).await;
        stage.get("/v1/models").await.to_string().contains("\"n\"")
    })
    .await;
    for n in 0..4 {
        let answer = stage.ask(&prompt(n..n + 40)).await;
        assert_eq!((answer.status, answer.worker()), (200, good.id));
    }
}

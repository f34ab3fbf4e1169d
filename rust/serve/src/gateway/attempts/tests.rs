//! Tests of the retries of a failed request.

use axum::http::StatusCode;

use super::*;

fn failed() -> Failed {
    Failed::new("test", "why", StatusCode::BAD_GATEWAY)
}

#[test]
fn what_nobody_had_is_tried_freely() {
    let retries = Arc::new(Retries::default());
    let mut attempts = retries.begin();
    assert!((0..100).all(|_| attempts.failed(&failed().unsent(), b"a", 1).is_none()));
}

#[test]
fn what_one_lost_has_one_more_and_the_same_again_none() {
    let retries = Arc::new(Retries::default());
    let mut attempts = retries.begin();
    assert_eq!(attempts.failed(&failed().died(), b"a", 1), None);
    assert!(attempts.failed(&failed().died(), b"a", 1).unwrap().contains("two workers"));
    let mut again = retries.begin();
    assert!(again.failed(&failed().died(), b"a", 1).unwrap().contains("the same request"));
    let mut other = retries.begin();
    assert_eq!(other.failed(&failed().lost(), b"b", 1), None);
    assert_eq!(retries.begin().failed(&failed().died(), b"b", 1), None, "one loss is none");
    retries.begin().answered(b"a");
    assert_eq!(retries.begin().failed(&failed().died(), b"a", 1), None, "it was answered");
}

#[tokio::test(start_paused = true)]
async fn suspects_are_forgotten() {
    let retries = Arc::new(Retries::default());
    retries.suspect(b"a");
    assert!(retries.is_suspect(b"a"));
    tokio::time::advance(SUSPECT_TIME).await;
    assert!(!retries.is_suspect(b"a"));
    for n in 0..3 * MAX_SUSPECTS {
        retries.suspect(&n.to_le_bytes());
    }
    assert_eq!(retries.suspects.lock().since.len(), MAX_SUSPECTS);
}

#[test]
fn retries_are_few_beside_what_is_in_flight() {
    let retries = Arc::new(Retries::default());
    let mut all = Vec::new();
    let mut retry = |in_flight| {
        let mut attempts = retries.begin();
        let why = attempts.failed(&failed(), b"a", in_flight);
        all.push(attempts);
        why.is_none()
    };
    assert_eq!((0..20).filter(|_| retry(20)).count(), 10);
    assert_eq!((0..20).filter(|_| retry(75)).count(), 5);
    all.clear();
    let mut attempts = retries.begin();
    assert_eq!(attempts.failed(&failed(), b"a", 1), None);
    assert!(attempts.failed(&failed(), b"a", 1).unwrap().contains("refused"));
}

//! Tests of the limits and of their buckets.

use kvflash_core::clock::ManualClock;

use super::*;
use crate::tenant::tests::key;

fn meters() -> (Meters, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    (Meters::new(Arc::<ManualClock>::clone(&clock)), clock)
}

#[test]
fn requests_a_minute_come_back_one_by_one() {
    let (meters, clock) = meters();
    let key = Key { rpm: Some(2), ..key("a") };
    for _ in 0..2 {
        drop(meters.begin(&key).unwrap());
    }
    let reject = meters.begin(&key).err().unwrap();
    assert_eq!((reject.status.as_u16(), reject.retry_after_s), (429, Some(30)));
    assert!(reject.message.contains("2 requests a minute are the limit (rpm)"));
    drop(meters.begin(&self::key("b")).unwrap());
    clock.advance(30_000);
    drop(meters.begin(&key).unwrap());
    assert!(meters.begin(&key).is_err());
    let counts = meters.all().into_iter().find(|(id, ..)| id == "a").unwrap().1;
    assert_eq!((counts.served, counts.requests), (3, 2));
}

#[test]
fn only_what_no_cache_held_is_charged_and_only_once_it_is_computed() {
    let (meters, clock) = meters();
    let key = Key { tpm: Some(600), ..key("a") };
    let first = meters.begin(&key).unwrap();
    first.charge(700).unwrap();
    let reject = meters.begin(&key).err().unwrap();
    assert_eq!(reject.retry_after_s, Some(11), "a debt of 100 and one more token");
    // The worker held most of it.
    first.computes(100);
    let second = meters.begin(&key).unwrap();
    second.charge(500).unwrap();
    let third = meters.begin(&key).err().unwrap();
    assert!(third.message.contains("uncached prompt tokens"), "{}", third.message);
    // No worker answered it.
    drop(second);
    meters.begin(&key).unwrap().charge(500).unwrap();
    let usage = |input, cached| Usage {
        input_tokens: Some(input),
        cached_tokens: cached,
        output_tokens: None,
    };
    first.used(usage(700, None));
    first.used(usage(700, Some(620)));
    drop(first);
    clock.advance(60_000);
    let mut headers = HeaderMap::new();
    meters.tell(&key, &mut headers);
    assert_eq!(headers["x-ratelimit-remaining-tokens"], "600");
    assert_eq!(meters.all()[0].1.uncached_tokens, 80, "as the engine says");
}

#[test]
fn requests_at_once_have_a_limit_and_a_dropped_one_makes_room() {
    let (meters, _) = meters();
    let key = Key { concurrency: Some(1), ..key("a") };
    let running = meters.begin(&key).unwrap();
    let reject = meters.begin(&key).err().unwrap();
    let wanted = "the limit of requests in flight is reached: 1 (concurrency)";
    assert!(reject.message.contains(wanted), "{}", reject.message);
    drop(running);
    drop(meters.begin(&key).unwrap());
    assert_eq!(meters.all()[0].2, 0);
}

#[test]
fn headers_tell_what_is_left() {
    let (meters, _) = meters();
    let key = Key { rpm: Some(60), tpm: Some(600), ..key("a") };
    let running = meters.begin(&key).unwrap();
    running.charge(15).unwrap();
    let mut headers = HeaderMap::new();
    meters.tell(&key, &mut headers);
    let told: Vec<&str> = REQUEST_HEADERS
        .iter()
        .chain(&TOKEN_HEADERS)
        .map(|name| headers[*name].to_str().unwrap())
        .collect();
    assert_eq!(told, ["60", "59", "1s", "600", "585", "1.5s"]);
    let mut none = HeaderMap::new();
    meters.tell(&self::key("b"), &mut none);
    assert!(none.is_empty());
}

#[test]
fn keys_that_are_idle_are_forgotten_at_the_limit() {
    let (meters, clock) = meters();
    let limited = Key { rpm: Some(60), ..key("used") };
    drop(meters.begin(&limited).unwrap());
    for n in 1..MAX_METERS {
        drop(meters.begin(&key(&n.to_string())).unwrap());
    }
    drop(meters.begin(&key("one more")).unwrap());
    let ids: Vec<String> = meters.all().into_iter().map(|(id, ..)| id).collect();
    assert!(ids.len() == 2 && ids.contains(&"used".to_owned()), "{ids:?}");
    clock.advance(60_000);
}

#[test]
fn one_more_client_than_are_counted_is_refused() {
    let (meters, clock) = meters();
    let limited = |n: usize| Key { rpm: Some(60), ..key(&n.to_string()) };
    for n in 0..MAX_METERS {
        drop(meters.begin(&limited(n)).unwrap());
    }
    let reject = meters.begin(&limited(MAX_METERS)).err().unwrap();
    assert_eq!((reject.status.as_u16(), reject.retry_after_s), (429, Some(1)));
    assert!(
        reject.message.contains("10000 other clients have limits in use"),
        "{}",
        reject.message
    );
    let mut headers = HeaderMap::new();
    meters.tell(&limited(MAX_METERS), &mut headers);
    assert!(headers.is_empty() && meters.all().len() == MAX_METERS);
    // Those that are counted go on, and one that has not asked for long makes room.
    drop(meters.begin(&limited(0)).unwrap());
    clock.advance(1_000);
    drop(meters.begin(&limited(MAX_METERS)).unwrap());
}

fn bucket(per_minute: u64) -> Bucket {
    let mut bucket = Bucket::default();
    bucket.limit_to(Some(per_minute), 1_000);
    bucket
}

#[test]
fn a_minute_fills_it_and_more_does_not() {
    let mut bucket = bucket(60);
    bucket.take(60.0);
    assert_eq!((bucket.remaining(), bucket.wait_ms(1.0), bucket.reset_ms()), (0, 1_000, 60_000));
    bucket.fill(2_500);
    assert_eq!((bucket.remaining(), bucket.wait_ms(1.0), bucket.wait_ms(2.0)), (1, 0, 500));
    bucket.fill(3_600_000);
    assert_eq!((bucket.remaining(), bucket.is_full()), (60, true));
    // A clock that steps back changes nothing.
    bucket.take(1.0);
    bucket.fill(10);
    assert_eq!(bucket.remaining(), 59);
}

#[test]
fn a_debt_is_waited_for() {
    let mut bucket = bucket(60);
    bucket.take(90.0);
    assert_eq!((bucket.remaining(), bucket.wait_ms(1.0)), (0, 31_000));
    bucket.take(-200.0);
    assert_eq!(bucket.remaining(), 60, "no more is given back than fits");
}

#[test]
fn another_limit_does_not_bring_back_what_was_used() {
    let mut bucket = bucket(60);
    bucket.take(50.0);
    bucket.limit_to(Some(600), 1_000);
    assert_eq!(bucket.remaining(), 10);
    bucket.limit_to(Some(5), 1_000);
    assert_eq!(bucket.remaining(), 5);
    bucket.limit_to(None, 1_000);
    bucket.take(1e9);
    assert_eq!((bucket.wait_ms(1e9), bucket.is_full()), (0, true));
}

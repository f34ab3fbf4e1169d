//! Requests that wait before a worker with a number of places.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use std::time::Duration;

use kvflash_core::clock::ManualClock;
use kvflash_core::error::Error;
use kvflash_core::fair::LineOrder;
use kvflash_core::select::{QueueOptions, QueueThreshold};
use parking_lot::Mutex;

use super::*;

/// Two workers, each with places. Requests want one of them, or either.
#[derive(Default)]
struct Workers(Mutex<[usize; 2]>);

impl Workers {
    fn take(&self, wanted: Option<usize>) -> Result<usize> {
        let mut places = self.0.lock();
        let found = (0..2).find(|at| wanted.is_none_or(|one| one == *at) && places[*at] > 0);
        let at = found.ok_or_else(|| Error::MustWait("full".into()))?;
        places[at] -= 1;
        Ok(at)
    }

    fn give(&self, at: usize, queue: &Queue) {
        self.0.lock()[at] += 1;
        queue.call();
    }
}

struct Bench {
    queue: Arc<Queue>,
    workers: Workers,
    clock: Arc<ManualClock>,
}

type Request<'a> = Pin<Box<dyn Future<Output = Result<usize>> + 'a>>;

impl Bench {
    fn new(order: LineOrder, limit: usize, max_wait: Duration) -> Self {
        let clock = Arc::new(ManualClock::default());
        let threshold = QueueThreshold { batches: 1.0, batched_tokens: 1 };
        let options = QueueOptions { threshold, order, limit, max_wait };
        options.check().unwrap();
        let queue = Arc::new(Queue::new(&options, Arc::<ManualClock>::clone(&clock)));
        Self { queue, workers: Workers::default(), clock }
    }

    fn ask(&self, wanted: Option<usize>, wish: Wish, isl_tokens: u64) -> Request<'_> {
        self.clock.advance(1_000);
        Box::pin(async move {
            let is_open = || wanted.is_none();
            pass(&self.queue, &wish, isl_tokens, || 0, is_open, || self.workers.take(wanted)).await
        })
    }

    fn plain(&self, wanted: Option<usize>) -> Request<'_> {
        self.ask(wanted, Wish::default(), 10)
    }
}

/// Poll all, in order, until none has news.
fn poll(requests: &mut [Option<Request<'_>>]) -> Vec<(usize, Result<usize>)> {
    let mut done = Vec::new();
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..requests.len() + 2 {
        for (at, slot) in requests.iter_mut().enumerate() {
            let Some(request) = slot else { continue };
            if let Poll::Ready(outcome) = request.as_mut().poll(&mut context) {
                *slot = None;
                done.push((at, outcome));
            }
        }
    }
    done
}

fn in_runtime(test: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _inside = runtime.enter();
    test();
}

const LONG: Duration = Duration::from_secs(3_600);

#[test]
fn those_that_wait_leave_in_their_order_one_for_each_place() {
    for (order, expected) in [
        (LineOrder::Fcfs, [3, 0, 1, 2]),
        (LineOrder::Lcfs, [3, 2, 1, 0]),
        (LineOrder::Wspt, [3, 1, 2, 0]),
    ] {
        in_runtime(|| {
            let bench = Bench::new(order, 10, LONG);
            let urgent = Wish { strict_priority: 1, priority_jump: 0.0 };
            let mut requests = Vec::new();
            for (isl, wish) in [(30, None), (10, None), (20, None), (90, Some(urgent))] {
                requests.push(Some(bench.ask(None, wish.unwrap_or_default(), isl)));
                assert!(poll(&mut requests).is_empty());
            }
            let stats = bench.queue.stats();
            assert_eq!((stats.pending, stats.pending_isl_tokens), (4, 150));
            for next in expected {
                bench.workers.give(0, &bench.queue);
                let done = poll(&mut requests);
                assert_eq!(done.len(), 1, "{order:?}");
                assert_eq!(done[0].0, next, "{order:?}");
            }
            let stats = bench.queue.stats();
            assert_eq!((stats.pending, stats.pending_isl_tokens, stats.placed_total), (0, 0, 4));
            // With room no request waits.
            bench.workers.give(1, &bench.queue);
            let mut one = [Some(bench.plain(None))];
            assert_eq!(poll(&mut one), [(0, Ok(1))]);
            assert_eq!(bench.queue.stats().placed_total, 4);
        });
    }
}

#[test]
fn one_that_is_choosy_holds_up_nobody() {
    in_runtime(|| {
        let bench = Bench::new(LineOrder::Fcfs, 10, LONG);
        let mut requests: Vec<_> = [Some(0), Some(0), Some(1), None, None]
            .map(|wanted| Some(bench.plain(wanted)))
            .into_iter()
            .collect();
        assert!(poll(&mut requests).is_empty());
        bench.workers.give(1, &bench.queue);
        assert_eq!(poll(&mut requests), [(2, Ok(1))]);
        // Two places at once: both are taken though only one word was said of each.
        bench.workers.0.lock()[1] += 2;
        bench.queue.call();
        assert_eq!(poll(&mut requests), [(3, Ok(1)), (4, Ok(1))]);
        // A newcomer for whom there is room passes those that want another worker.
        bench.workers.0.lock()[1] += 1;
        requests.push(Some(bench.plain(None)));
        assert_eq!(poll(&mut requests), [(5, Ok(1))]);
        bench.workers.give(0, &bench.queue);
        assert_eq!(poll(&mut requests), [(0, Ok(0))]);
        assert_eq!(bench.queue.stats().pending, 1);
    });
}

#[test]
fn those_behind_a_choosy_one_are_reached_whatever_happens_while_it_tries() {
    in_runtime(|| {
        let bench = Bench::new(LineOrder::Fcfs, 10, LONG);
        let wish = Wish::default();
        let (left, left_behind) = (Cell::new(0), Cell::new(None));
        // Something happens during each of its next hundred tries.
        let restless = || {
            if left.get() > 0 {
                left.set(left.get() - 1);
                bench.queue.call();
            }
            bench.workers.take(Some(0))
        };
        let behind = || {
            let taken = bench.workers.take(None);
            left_behind.set(taken.is_ok().then(|| left.get()));
            taken
        };
        let choosy: Request<'_> = Box::pin(pass(&bench.queue, &wish, 10, || 0, || false, restless));
        let open: Request<'_> = Box::pin(pass(&bench.queue, &wish, 10, || 0, || true, behind));
        let mut requests = [Some(choosy), Some(open)];
        assert!(poll(&mut requests).is_empty());
        left.set(100);
        bench.workers.give(1, &bench.queue);
        assert_eq!(poll(&mut requests), [(1, Ok(1))]);
        assert!(left_behind.get().is_some_and(|left| left > 90), "{left_behind:?}");
    });
}

#[test]
fn whoever_leaves_passes_its_try_on() {
    in_runtime(|| {
        let bench = Bench::new(LineOrder::Fcfs, 10, LONG);
        let mut requests: Vec<_> = (0..3).map(|_| Some(bench.plain(None))).collect();
        assert!(poll(&mut requests).is_empty());
        // The first one is woken, but has left before that.
        bench.workers.give(0, &bench.queue);
        requests[0] = None;
        assert_eq!(poll(&mut requests), [(1, Ok(0))]);
        requests[2] = None;
        let stats = bench.queue.stats();
        assert_eq!((stats.pending, stats.placed_total, stats.left_total), (0, 1, 2));
        // No request waits or tries: the next one passes at once.
        bench.workers.give(0, &bench.queue);
        assert_eq!(poll(&mut [Some(bench.plain(None))]), [(0, Ok(0))]);
    });
}

#[test]
fn a_full_line_refuses_and_a_long_wait_ends() {
    in_runtime(|| {
        let bench = Bench::new(LineOrder::Fcfs, 1, LONG);
        let mut requests: Vec<_> = (0..2).map(|_| Some(bench.plain(None))).collect();
        let done = poll(&mut requests);
        let [(1, Err(Error::Overloaded(text)))] = &done[..] else { panic!("{done:?}") };
        assert!(text.starts_with("1 requests wait") && text.contains("router_queue_limit"));
        assert_eq!(bench.queue.stats().refused_total, 1);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let bench = Bench::new(LineOrder::Fcfs, 1, Duration::from_millis(1));
    let late = runtime.block_on(bench.plain(None)).unwrap_err();
    let Error::AllBusy(text) = &late else { panic!("{late:?}") };
    assert!(text.contains("0.001 s (router_queue_timeout)"), "{text}");
    let stats = bench.queue.stats();
    assert_eq!((stats.pending, stats.expired_total), (0, 1));
}

#[test]
fn what_comes_up_meanwhile_ends_the_wait() {
    in_runtime(|| {
        let bench = Bench::new(LineOrder::Fcfs, 9, LONG);
        let is_gone = Mutex::new(false);
        let book = || match *is_gone.lock() {
            true => Err(Error::NoWorker("gone".into())),
            false => bench.workers.take(None),
        };
        let wish = Wish::default();
        let request: Request<'_> = Box::pin(pass(&bench.queue, &wish, 1, || 0, || true, book));
        let mut requests = vec![Some(request), Some(bench.plain(None))];
        assert!(poll(&mut requests).is_empty());
        *is_gone.lock() = true;
        bench.workers.give(0, &bench.queue);
        let done = poll(&mut requests);
        assert!(matches!(done[0], (0, Err(Error::NoWorker(_)))), "{done:?}");
        assert_eq!(done[1], (1, Ok(0)));
        assert_eq!(bench.queue.stats().failed_total, 1);
    });
}

//! Work on prompts that takes longer than a millisecond: on separate threads, and in fair turns.

use std::sync::Arc;
use std::time::Duration;

use kvflash_core::clock::Clock;
use kvflash_core::error::Result;
use kvflash_core::fair::{ClientName, Cost, FairConfig, Standing};
use parking_lot::Mutex;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use tokio::time::{Instant, sleep};

use super::aside::block_in_place;
use super::gateway::turn::{FairnessOptions, Identity, WaitingRoom};
use super::metrics::{add, seconds_histogram};

/// Runs as many jobs at once as there are cores; clients with waiting jobs take turns by bytes. A
/// client is identified by key or address, because one client can't have many of these.
pub(crate) struct Compute {
    room: Arc<WaitingRoom>,
    threads: Arc<Threads>,
    cores: usize,
    waited: Histogram,
}

/// If cores are scarce, the serving threads take precedence: a long prompt waits some milliseconds
/// more, and no short one waits for it.
const NICENESS: i32 = 5;

/// The fast tokenizer has word tables per thread, up to some hundred MiB: threads that are idle for
/// this long end, which frees the memory.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// The longest wait has passed while other jobs had their turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy;

impl Compute {
    /// Jobs wait for at most `max_wait`.
    ///
    /// # Errors
    /// `Config` for an invalid time.
    pub fn new(max_wait: Duration, clock: Arc<dyn Clock>, registry: &mut Registry) -> Result<Self> {
        let queue = FairConfig {
            max_queued: 65_536,
            max_queued_per_client: 65_536,
            max_wait_ms: (max_wait.as_millis() as u64).max(1),
            ..FairConfig::default()
        };
        let (weights, identity) = (Vec::new(), Identity::default());
        let options = FairnessOptions { queue, max_running: 1, weights, identity };
        let help = "Time that prompts waited for a core to be tokenized on; short and cached prompts do not wait";
        let waited = add(registry, "tokenize_wait_seconds", help, seconds_histogram());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Arc::new(Threads { cores, pool: Mutex::default() });
        Ok(Self { room: Arc::new(WaitingRoom::new(options, clock)?), threads, cores, waited })
    }

    /// Calls `job`, which processes `bytes` of a prompt of `client`, in turn. Other connections
    /// continue meanwhile.
    ///
    /// # Errors
    /// [`Busy`].
    pub async fn run<T: Send>(
        &self,
        client: ClientName<'_>,
        bytes: usize,
        job: impl FnOnce() -> T + Send,
    ) -> Result<T, Busy> {
        let cost = Cost { input_tokens: bytes as u64, cached_tokens: 0 };
        let began = Instant::now();
        let turn = self.room.turn(client, cost, Standing::default(), self.cores).await;
        self.waited.observe(began.elapsed().as_secs_f64());
        let turn = turn.map_err(|_| Busy)?;
        // It is charged whatever its result.
        turn.charges(true);
        let done = match self.threads.use_pool() {
            Some(pool) => block_in_place(|| pool.install(job)),
            None => block_in_place(job),
        };
        drop(turn);
        Ok(done)
    }
}

/// The threads for jobs: started when there is work, ended after [`IDLE_TIME`] without.
struct Threads {
    cores: usize,
    pool: Mutex<Option<Pool>>,
}

struct Pool {
    threads: Arc<ThreadPool>,
    used: Instant,
}

impl Threads {
    /// The pool for a job; `None` if the system provides no threads: then the caller's thread does
    /// the work.
    fn use_pool(self: &Arc<Self>) -> Option<Arc<ThreadPool>> {
        let mut pool = self.pool.lock();
        if let Some(pool) = &mut *pool {
            pool.used = Instant::now();
            return Some(Arc::clone(&pool.threads));
        }
        let threads = Arc::new(self.start().ok()?);
        *pool = Some(Pool { threads: Arc::clone(&threads), used: Instant::now() });
        drop(pool);
        tokio::spawn(Arc::clone(self).end_when_idle());
        Some(threads)
    }

    fn start(&self) -> std::result::Result<ThreadPool, ThreadPoolBuildError> {
        ThreadPoolBuilder::new()
            .num_threads(self.cores)
            .thread_name(|at| format!("kvflash-text-{at}"))
            .start_handler(|_| {
                // Linux has per-thread priorities; on other systems they are unchanged.
                #[cfg(target_os = "linux")]
                let _ =
                    rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
            })
            .build()
    }

    /// One task per pool, which ends with it.
    async fn end_when_idle(self: Arc<Self>) {
        loop {
            sleep(IDLE_TIME).await;
            let mut pool = self.pool.lock();
            let is_idle = pool.as_ref().is_none_or(|pool| {
                Arc::strong_count(&pool.threads) == 1 && pool.used.elapsed() >= IDLE_TIME
            });
            if is_idle {
                *pool = None;
                return;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use kvflash_core::clock::ManualClock;

    use super::*;

    /// Time limit of the tests.
    const DEADLINE: Duration = Duration::from_secs(30);

    #[test]
    fn long_prompts_hold_up_nobody_who_serves() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build();
        let runtime = runtime.unwrap();
        let clock = Arc::new(ManualClock::default());
        let compute = Compute::new(DEADLINE, clock, &mut Registry::default()).unwrap();
        let (compute, gate) = (Arc::new(compute), Arc::new(Mutex::new(())));
        let (begun, has_begun) = mpsc::channel();
        let held = gate.lock();
        let jobs: Vec<_> = (0..2 * compute.cores)
            .map(|_| {
                let (compute, gate, begun) =
                    (Arc::clone(&compute), Arc::clone(&gate), begun.clone());
                runtime.spawn(async move {
                    let job = || {
                        begun.send(()).unwrap();
                        drop(gate.lock());
                    };
                    compute.run("a client".into(), 60_000, job).await.unwrap();
                })
            })
            .collect();
        for _ in 0..compute.cores {
            has_begun.recv_timeout(DEADLINE).unwrap();
        }
        let (served, is_served) = mpsc::channel();
        let other = runtime.spawn(async move { served.send(()).unwrap() });
        let outcome = is_served.recv_timeout(DEADLINE);
        let is_one_more = has_begun.try_recv().is_ok();
        drop(held);
        for task in jobs.into_iter().chain([other]) {
            runtime.block_on(task).unwrap();
        }
        outcome.expect("the only serving thread was held up");
        assert!(!is_one_more, "more at once than there are cores");
        assert_eq!(has_begun.try_iter().count(), compute.cores);
    }

    #[tokio::test(start_paused = true)]
    async fn threads_without_work_end() {
        let clock = Arc::new(ManualClock::default());
        let compute = Compute::new(DEADLINE, clock, &mut Registry::default()).unwrap();
        let run = || compute.run("".into(), 60_000, rayon::current_thread_index);
        let is_started = || compute.threads.pool.lock().is_some();
        assert!(!is_started());
        for _ in 0..2 {
            assert!(run().await.unwrap().is_some());
            sleep(IDLE_TIME / 2).await;
            assert!(run().await.unwrap().is_some());
            sleep(IDLE_TIME * 3 / 4).await;
            assert!(is_started(), "they had work meanwhile");
            sleep(IDLE_TIME * 2).await;
            assert!(!is_started());
        }
    }
}

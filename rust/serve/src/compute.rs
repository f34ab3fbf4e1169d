//! Work on prompts that takes longer than a millisecond: beside the threads that serve, and in fair turns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::{Cost, FairConfig, Options};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::aside::block_in_place;
use super::gateway::turn::{FairnessOptions, WaitingRoom, client_name};
use super::metrics::seconds_histogram;

/// As many jobs at once as there are cores; clients whose jobs wait take turns by the bytes of them. Whose
/// they are is told by key or address, which one client cannot have many of.
pub(crate) struct Compute {
    room: Arc<WaitingRoom>,
    pool: ThreadPool,
    cores: usize,
    waited: Histogram,
}

/// Where cores are short, the threads that serve go first: a long prompt waits some milliseconds more, and no
/// short one waits for it.
const NICENESS: i32 = 5;

/// Others had their turns for as long as one may wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy;

impl Compute {
    /// Jobs wait for at most `max_wait`.
    ///
    /// # Errors
    /// `Config` for a time that is none, or where the system grants no threads.
    pub fn new(max_wait: Duration, clock: Arc<dyn Clock>, registry: &mut Registry) -> Result<Self> {
        let queue = FairConfig {
            max_queued: 65_536,
            max_queued_per_client: 65_536,
            max_wait_ms: (max_wait.as_millis() as u64).max(1),
            ..FairConfig::default()
        };
        let options = FairnessOptions { queue, max_running: 1, weights: Vec::new() };
        let waited = seconds_histogram();
        registry.register_with_unit(
            "tokenize_wait",
            "Time that prompts waited for a core to be made into tokens on; short and known ones do not",
            Unit::Seconds,
            Histogram::clone(&waited),
        );
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = ThreadPoolBuilder::new()
            .num_threads(cores)
            .thread_name(|at| format!("kvflash-text-{at}"))
            .start_handler(|_| {
                // Linux has priorities of threads; elsewhere they stay as they are.
                #[cfg(target_os = "linux")]
                let _ =
                    rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
            })
            .build()
            .map_err(|error| Error::Config(format!("could not start threads: {error}")))?;
        Ok(Self { room: Arc::new(WaitingRoom::new(&options, clock)?), pool, cores, waited })
    }

    /// Call `job`, which concerns `bytes` of a prompt of the client that `headers` and `address` tell, when it
    /// is its turn. Other connections go on meanwhile.
    ///
    /// # Errors
    /// [`Busy`].
    pub async fn run<T: Send>(
        &self,
        headers: &HeaderMap,
        address: Option<&str>,
        bytes: usize,
        job: impl FnOnce() -> T + Send,
    ) -> Result<T, Busy> {
        let client = client_name(None, headers, address);
        let cost = Cost { input_tokens: bytes as u64, cached_tokens: 0, output_tokens: Some(0) };
        let began = Instant::now();
        let turn = self.room.turn(&client, cost, Options::default(), self.cores).await;
        self.waited.observe(began.elapsed().as_secs_f64());
        let turn = turn.map_err(|_| Busy)?;
        // It is paid for whatever comes of it.
        turn.answered();
        let done = block_in_place(|| self.pool.install(job));
        drop(turn);
        Ok(done)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use kvflash_core::clock::ManualClock;
    use parking_lot::Mutex;

    use super::*;

    /// Whatever takes longer does not come.
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
                    compute.run(&HeaderMap::new(), Some("a client"), 60_000, job).await.unwrap();
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
}

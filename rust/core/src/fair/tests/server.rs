//! An engine in steps: every running request generates a token in each, and as many run as its
//! memory holds at their longest.

use super::super::*;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Job {
    pub(super) client: usize,
    pub(super) input: u64,
    pub(super) output: u64,
}

pub(super) struct Server {
    pub(super) queue: FairQueue<Job>,
    pub(super) memory: u64,
    pub(super) used: u64,
    pub(super) running: Vec<(Grant, Job, u64)>,
    /// Service of each client, weighted.
    pub(super) service: Vec<f64>,
    /// Tokens that all answers had.
    pub(super) generated: u64,
    pub(super) now_ms: u64,
}

impl Server {
    pub(super) fn new(config: FairConfig, memory: u64, clients: usize) -> Self {
        Self {
            queue: FairQueue::new(config).unwrap(),
            memory,
            used: 0,
            running: Vec::new(),
            service: vec![0.0; clients],
            generated: 0,
            now_ms: 0,
        }
    }

    pub(super) fn name(client: usize) -> String {
        format!("client {client}")
    }

    pub(super) fn push(&mut self, job: Job) {
        let cost = Cost { input_tokens: job.input, ..Cost::default() };
        let name = Self::name(job.client);
        self.queue.push(name.as_str(), job, cost, Standing::default(), self.now_ms).unwrap();
    }

    /// Requests of `client` that wait.
    pub(super) fn waiting(&self, client: usize) -> usize {
        let name = Self::name(client);
        self.queue.clients().find(|one| one.client == name).map_or(0, |one| one.queued)
    }

    /// One step; `seen` is called after everything that changes what a client has had.
    pub(super) fn step(&mut self, mut seen: impl FnMut(&Self)) {
        loop {
            let room = self.memory - self.used;
            let Some(granted) = self.queue.pop(self.now_ms, |job| job.input + job.output <= room)
            else {
                break;
            };
            let job = granted.item;
            self.used += job.input + job.output;
            self.service[job.client] += price(job.input as f64, 0.0);
            self.running.push((granted.grant, job, 0));
            seen(self);
        }
        // Work-conserving: every job fits when it is alone.
        assert!(!self.running.is_empty() || self.queue.is_empty());
        for at in 0..self.running.len() {
            let (grant, job, done) = self.running[at];
            let charged = |tokens: u64| price(job.input as f64, tokens as f64);
            self.service[job.client] += charged(done + 1) - charged(done);
            self.generated += 1;
            self.running[at].2 += 1;
            self.queue.tokens(grant, 1);
            seen(self);
        }
        let (ended, running) =
            self.running.drain(..).partition(|&(_, job, done)| done >= job.output);
        self.running = running;
        let ended: Vec<(Grant, Job, u64)> = ended;
        for (grant, job, _) in ended {
            self.used -= job.input + job.output;
            assert!(self.queue.finish(grant, Used::default()));
        }
        self.now_ms += 1;
        for client in self.queue.clients() {
            assert!(client.counter.is_finite() && client.counter >= 0.0, "{client:?}");
        }
    }

    /// The paper's bound on how far apart two backlogged clients can get, with prompts up to
    /// `longest_input`.
    pub(super) fn bound(&self, longest_input: u64) -> f64 {
        2.0 * price(longest_input as f64, 0.0).max(price(0.0, self.memory as f64))
    }
}

/// How far the difference between each two of `clients` has swung.
pub(super) struct Swing {
    clients: Vec<usize>,
    lowest: Vec<f64>,
    highest: Vec<f64>,
}

impl Swing {
    pub(super) fn new(clients: Vec<usize>) -> Self {
        let pairs = clients.len() * clients.len();
        Self {
            clients,
            lowest: vec![f64::INFINITY; pairs],
            highest: vec![f64::NEG_INFINITY; pairs],
        }
    }

    pub(super) fn see(&mut self, service: &[f64]) {
        for (row, &a) in self.clients.iter().enumerate() {
            for (column, &b) in self.clients.iter().enumerate() {
                let at = row * self.clients.len() + column;
                let ahead = service[a] - service[b];
                self.lowest[at] = self.lowest[at].min(ahead);
                self.highest[at] = self.highest[at].max(ahead);
            }
        }
    }

    /// The most that one had more than another one in any interval.
    pub(super) fn widest(&self) -> f64 {
        let swings = self.highest.iter().zip(&self.lowest).map(|(high, low)| high - low);
        swings.fold(0.0, f64::max)
    }
}

//! What a run brought.

use super::engine::Totals;
use super::workload::Workload;

/// What a token of the prompt and one of the answer count as service: the fair queue's prices.
const INPUT_PRICE: f64 = 1.0;
const OUTPUT_PRICE: f64 = 2.0;

/// Figures of one run. "In the window" is up to the last arrival.
#[derive(Debug, Default)]
pub struct Outcome {
    window_us: u64,
    clients: Vec<usize>,
    inputs: Vec<u64>,
    is_light: Vec<bool>,
    cached_of: Vec<u64>,
    /// By request, in microseconds; `u64::MAX` before the first token.
    ttft_us: Vec<u64>,
    /// Mean times between two tokens of an answer, by request.
    gaps_us: Vec<u64>,
    cached: u64,
    best: u64,
    input: u64,
    /// Service of each client, in the window and in all.
    served: Vec<f64>,
    wanted: Vec<f64>,
    /// Tokens that prompts and answers had in the window, cached ones included.
    tokens: u64,
    engines: Vec<Totals>,
    end_us: u64,
}

impl Outcome {
    pub fn new(workload: &Workload) -> Self {
        let requests = &workload.requests;
        Self {
            window_us: requests.last().map_or(0, |request| request.at_us),
            clients: requests.iter().map(|request| request.client).collect(),
            inputs: requests.iter().map(|request| request.input).collect(),
            is_light: workload.clients.iter().map(|client| client.is_light).collect(),
            cached_of: vec![0; requests.len()],
            ttft_us: vec![u64::MAX; requests.len()],
            served: vec![0.0; workload.clients.len()],
            wanted: vec![0.0; workload.clients.len()],
            ..Self::default()
        }
    }

    /// A request was admitted by an engine that had `cached` tokens of it, where one had `best`.
    pub fn admitted(&mut self, number: usize, cached: u64, best: u64) {
        self.cached_of[number] = cached;
        self.cached += cached;
        self.best += best;
        self.input += self.inputs[number];
    }

    /// A request that came at `at_us` got a token. True for the first one.
    pub fn token(&mut self, number: usize, at_us: u64, now_us: u64) -> bool {
        let is_first = self.ttft_us[number] == u64::MAX;
        let (mut tokens, mut service) = (1, OUTPUT_PRICE);
        if is_first {
            self.ttft_us[number] = now_us - at_us;
            let input = self.inputs[number];
            tokens += input;
            service += INPUT_PRICE * (input - self.cached_of[number]) as f64;
        }
        let client = self.clients[number];
        self.wanted[client] += service;
        if now_us <= self.window_us {
            self.served[client] += service;
            self.tokens += tokens;
        }
        is_first
    }

    /// A request has ended, `decode_us` after its first token.
    pub fn finished(&mut self, output: u64, decode_us: u64) {
        self.gaps_us.extend(decode_us.checked_div(output - 1));
    }

    pub fn end(&mut self, engines: Vec<Totals>, now_us: u64) {
        self.engines = engines;
        self.end_us = now_us;
    }

    /// Prompt tokens that engines reused, of all.
    pub fn hit_rate(&self) -> f64 {
        self.cached as f64 / self.input as f64
    }

    /// The same of what the best engine had at each moment.
    pub fn of_best(&self) -> f64 {
        self.cached as f64 / self.best.max(1) as f64
    }

    /// Time to the first token that `share` of the requests stay within, in milliseconds.
    pub fn ttft_ms(&self, share: f64, only_light: bool) -> f64 {
        let all = self.ttft_us.iter().zip(&self.clients);
        let wanted = all.filter(|&(_, &client)| !only_light || self.is_light[client]);
        quantile_ms(wanted.map(|(&ttft_us, _)| ttft_us).collect(), share)
    }

    /// Mean time between two tokens of an answer that `share` of the requests stay within, in milliseconds.
    pub fn gap_ms(&self, share: f64) -> f64 {
        quantile_ms(self.gaps_us.clone(), share)
    }

    /// The busiest engine's part over the mean.
    pub fn spread(&self, part: impl Fn(&Totals) -> u64) -> f64 {
        let most = self.engines.iter().map(&part).max().unwrap_or(0);
        let sum: u64 = self.engines.iter().map(part).sum();
        (most * self.engines.len() as u64) as f64 / sum as f64
    }

    pub fn prefill_spread(&self) -> f64 {
        self.spread(|totals| totals.prefilled)
    }

    pub fn request_spread(&self) -> f64 {
        self.spread(|totals| totals.requests)
    }

    /// Tokens of prompts and answers a second, in the window.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / (self.window_us as f64 / 1e6)
    }

    /// Service a second in the window, cached tokens left out.
    pub fn work_per_s(&self) -> f64 {
        self.served.iter().sum::<f64>() / (self.window_us as f64 / 1e6)
    }

    /// When the last answer was complete, in seconds.
    pub fn makespan_s(&self) -> f64 {
        self.end_us as f64 / 1e6
    }

    pub fn preemptions(&self) -> u64 {
        self.engines.iter().map(|totals| totals.preemptions).sum()
    }

    /// Jain's index over what clients were served in the window, each over its max-min fair share of the
    /// service that there was: 1 where nobody has more than its share while another one wants for its own.
    pub fn jain(&self) -> f64 {
        let shares = max_min(self.served.iter().sum(), &self.wanted);
        let ratios = self.served.iter().zip(&shares).filter(|(_, share)| **share > 0.0);
        let ratios: Vec<f64> = ratios.map(|(served, share)| served / share).collect();
        let sum: f64 = ratios.iter().sum();
        let squares: f64 = ratios.iter().map(|ratio| ratio * ratio).sum();
        sum * sum / (ratios.len() as f64 * squares)
    }
}

fn quantile_ms(mut times_us: Vec<u64>, share: f64) -> f64 {
    times_us.sort_unstable();
    times_us[((times_us.len() - 1) as f64 * share) as usize] as f64 / 1e3
}

/// Give out `total`: all get alike, nobody more than it wants.
fn max_min(total: f64, wanted: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let (mut left, mut shares) = (total, vec![0.0; wanted.len()]);
    for (given, &client) in order.iter().enumerate() {
        shares[client] = wanted[client].min(left / (wanted.len() - given) as f64);
        left -= shares[client];
    }
    shares
}

//! What a run brought.

use kvflash_core::fair::price;

use crate::engine::Totals;
use crate::workload::Workload;

/// One request's way.
#[derive(Debug, Clone, Copy, Default)]
pub struct Way {
    /// Whose it was.
    pub client: usize,
    /// Tokens of its prompt.
    pub input: u64,
    /// Of these, tokens that its engine had cached.
    pub cached: u64,
    /// Which engine served it.
    pub engine: usize,
    /// When it came; its first token and its last one so much later, in microseconds.
    pub at_us: u64,
    /// See `at_us`; `None` before it.
    pub ttft_us: Option<u64>,
    /// See `at_us`; `None` before it.
    pub end_us: Option<u64>,
    /// Mean time between two tokens of its answer; `None` for answers of one.
    pub gap_us: Option<u64>,
}

/// Figures of one run. "In the window" is up to the last arrival.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By request, in the order of their arrival.
    pub ways: Vec<Way>,
    is_light: Vec<bool>,
    best: u64,
    /// Service by client and time, to be cut at the window's end.
    service: Vec<(u64, usize, f64, u64)>,
    engines: Vec<Totals>,
    end_us: u64,
}

impl Outcome {
    pub(crate) fn new(workload: &Workload) -> Self {
        let is_light = workload.clients.iter().map(|client| client.is_light).collect();
        Self { is_light, ..Self::default() }
    }

    /// A request came; its number.
    pub(crate) fn arrived(&mut self, client: usize, input: u64, at_us: u64) -> usize {
        self.ways.push(Way { client, input, at_us, ..Way::default() });
        self.ways.len() - 1
    }

    /// A request was given to an engine.
    pub(crate) fn sent(&mut self, number: usize, engine: usize) {
        self.ways[number].engine = engine;
    }

    /// A request was admitted by an engine that had `cached` tokens of it, where one had `best`.
    pub(crate) fn admitted(&mut self, number: usize, cached: u64, best: u64) {
        self.ways[number].cached = cached;
        self.best += best;
    }

    /// A request got a token. True for the first one.
    pub(crate) fn token(&mut self, number: usize, now_us: u64) -> bool {
        let way = &mut self.ways[number];
        let is_first = way.ttft_us.is_none();
        let (mut tokens, mut prefilled) = (1, 0);
        if is_first {
            way.ttft_us = Some(now_us - way.at_us);
            tokens += way.input;
            prefilled = way.input - way.cached;
        }
        let service = price(prefilled as f64, 1.0);
        self.service.push((now_us, way.client, service, tokens));
        is_first
    }

    /// A request has ended, `decode_us` after its first token.
    pub(crate) fn finished(&mut self, number: usize, output: u64, decode_us: u64, now_us: u64) {
        let way = &mut self.ways[number];
        way.gap_us = decode_us.checked_div(output - 1);
        way.end_us = Some(now_us - way.at_us);
    }

    pub(crate) fn end(&mut self, engines: Vec<Totals>, now_us: u64) {
        self.engines = engines;
        self.end_us = now_us;
    }

    fn window_us(&self) -> u64 {
        self.ways.last().map_or(0, |way| way.at_us)
    }

    /// Prompt tokens of all requests, and how many of them engines found in their caches at the first admission. Tokens
    /// that are computed again after a preemption do not count.
    pub fn tokens(&self) -> (u64, u64) {
        let sum = |of: fn(&Way) -> u64| self.ways.iter().map(of).sum();
        (sum(|way| way.input), sum(|way| way.cached))
    }

    /// Prompt tokens that engines found in their caches at the first admission, of all.
    pub fn hit_rate(&self) -> f64 {
        let (input, cached) = self.tokens();
        cached as f64 / input as f64
    }

    /// The same of what the best engine had at each moment.
    pub fn of_best(&self) -> f64 {
        self.tokens().1 as f64 / self.best.max(1) as f64
    }

    /// Time to the first token that `share` of the requests stay within, in milliseconds.
    pub fn ttft_ms(&self, share: f64, only_light: bool) -> f64 {
        let wanted = self.ways.iter().filter(|way| !only_light || self.is_light[way.client]);
        quantile_ms(wanted.filter_map(|way| way.ttft_us).collect(), share)
    }

    /// Mean time to the first token, in milliseconds.
    pub fn mean_ttft_ms(&self) -> f64 {
        let all = self.ways.iter().filter_map(|way| way.ttft_us);
        all.sum::<u64>() as f64 / self.ways.len() as f64 / 1e3
    }

    /// Mean time between two tokens of an answer that `share` of the requests stay within, in milliseconds.
    pub fn gap_ms(&self, share: f64) -> f64 {
        quantile_ms(self.ways.iter().filter_map(|way| way.gap_us).collect(), share)
    }

    /// Time to the last token that `share` of the requests stay within, in milliseconds.
    pub fn end_to_end_ms(&self, share: f64) -> f64 {
        quantile_ms(self.ways.iter().filter_map(|way| way.end_us).collect(), share)
    }

    /// Share of the requests whose first token came within `base_ms` and `per_token_ms` for each token of the prompt,
    /// and whose tokens came within `gap_ms` of each other on average.
    pub fn goodput(&self, base_ms: f64, per_token_ms: f64, gap_ms: f64) -> f64 {
        let is_good = |way: &&Way| {
            let within_ms = base_ms + per_token_ms * way.input as f64;
            way.ttft_us.is_some_and(|us| us as f64 / 1e3 <= within_ms)
                && way.gap_us.is_none_or(|us| us as f64 / 1e3 <= gap_ms)
        };
        self.ways.iter().filter(is_good).count() as f64 / self.ways.len() as f64
    }

    /// The busiest engine's part over the mean.
    pub fn spread(&self, part: impl Fn(&Totals) -> u64) -> f64 {
        let most = self.engines.iter().map(&part).max().unwrap_or(0);
        let sum: u64 = self.engines.iter().map(part).sum();
        (most * self.engines.len() as u64) as f64 / sum.max(1) as f64
    }

    /// Tokens of prompts and answers a second, in the window.
    pub fn tokens_per_s(&self) -> f64 {
        self.per_s(|&(.., tokens)| tokens as f64)
    }

    /// Service a second, in the window.
    pub fn work_per_s(&self) -> f64 {
        self.per_s(|&(_, _, service, _)| service)
    }

    fn per_s(&self, of: impl Fn(&(u64, usize, f64, u64)) -> f64) -> f64 {
        let window_us = self.window_us();
        let within = self.service.iter().filter(|(at_us, ..)| *at_us <= window_us);
        within.map(of).sum::<f64>() / (window_us as f64 / 1e6)
    }

    /// When the last answer was complete, in seconds.
    pub fn makespan_s(&self) -> f64 {
        self.end_us as f64 / 1e6
    }

    /// Requests that gave their blocks back and began again.
    pub fn preemptions(&self) -> u64 {
        self.engines.iter().map(|totals| totals.preemptions).sum()
    }

    /// Share of the time in which engines were in a step.
    pub fn utilization(&self) -> f64 {
        let busy: u64 = self.engines.iter().map(|totals| totals.busy_us).sum();
        busy as f64 / (self.end_us * self.engines.len() as u64) as f64
    }

    /// Jain's index over what clients were served in the window, each over its max-min fair share of the
    /// service that there was: 1 where nobody has more than its share while another one wants for its own.
    pub fn jain(&self) -> f64 {
        let (mut served, mut wanted) =
            (vec![0.0; self.is_light.len()], vec![0.0; self.is_light.len()]);
        let window_us = self.window_us();
        for &(at_us, client, service, _) in &self.service {
            wanted[client] += service;
            if at_us <= window_us {
                served[client] += service;
            }
        }
        let shares = max_min(served.iter().sum(), &wanted);
        let ratios = served.iter().zip(&shares).filter(|(_, share)| **share > 0.0);
        let ratios: Vec<f64> = ratios.map(|(served, share)| served / share).collect();
        let sum: f64 = ratios.iter().sum();
        let squares: f64 = ratios.iter().map(|ratio| ratio * ratio).sum();
        sum * sum / (ratios.len() as f64 * squares)
    }
}

fn quantile_ms(mut times_us: Vec<u64>, share: f64) -> f64 {
    times_us.sort_unstable();
    let at = (times_us.len().saturating_sub(1) as f64 * share) as usize;
    times_us.get(at).map_or(0.0, |us| *us as f64 / 1e3)
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

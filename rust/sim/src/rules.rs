//! What other routers do, from their papers and documents, as policies of kvflash's own router.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use hashbrown::HashMap;
use kvflash_core::ids::Worker;
use kvflash_core::policy::{CandidateCost, Candidates, Choice, Context, Reason, RoutePolicy};
use rand::{Rng, RngCore};

use crate::lru::Lru;

kvflash_core::named! {
    /// A router that somebody else has built.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Rule {
        /// New prefill tokens times requests: "Simple is better: multiplication may be all you need for LLM request
        /// scheduling".
        LMetric = "LMetric",
        /// The cache-aware policy of SGLang's router: an own tree of what was sent where, a threshold, and the fewest
        /// requests where loads differ too much. Defaults of sglang-router 0.3.
        SgLang = "SGLang, cache-aware",
        /// The default profile of the endpoint picker of llm-d and the Gateway API: prefix 3, queue 2, KV usage 2.
        LlmD = "llm-d, weighted scorers",
        /// E2 of "Preble: efficient distributed prompt scheduling for LLM serving".
        Preble = "Preble, E2",
    }
}

impl Rule {
    /// A policy that follows it, for engines of `capacity_tokens`.
    pub fn policy(self, capacity_tokens: u64) -> Arc<dyn RoutePolicy> {
        Arc::new(Peer { rule: self, capacity_tokens, state: Mutex::default() })
    }
}

/// Work of the last three minutes: when, and how much.
#[derive(Debug, Default)]
struct Recent {
    each: VecDeque<(u64, f64)>,
    sum: f64,
}

impl Recent {
    const WINDOW_MS: u64 = 180_000;

    fn sum(&mut self, now_ms: u64) -> f64 {
        while let Some(&(at_ms, work)) = self.each.front() {
            if at_ms + Self::WINDOW_MS > now_ms {
                break;
            }
            self.each.pop_front();
            self.sum -= work;
        }
        self.sum
    }

    fn add(&mut self, now_ms: u64, work: f64) {
        self.each.push_back((now_ms, work));
        self.sum += work;
    }
}

#[derive(Debug, Default)]
struct State {
    sent: HashMap<Worker, Lru>,
    recent: HashMap<Worker, Recent>,
}

#[derive(Debug)]
struct Peer {
    rule: Rule,
    capacity_tokens: u64,
    state: Mutex<State>,
}

/// What a token of an answer counts in Preble's loads, in tokens of prefill.
const DECODE_WORK: f64 = 2.0;
/// The answer that is expected.
const ANSWER_TOKENS: f64 = 200.0;

impl Peer {
    fn most_blocks(&self, block_size: u32) -> usize {
        let tokens = match self.rule {
            // Characters of its tree, four to a token.
            Rule::SgLang => (1 << 26) / 4,
            _ => self.capacity_tokens,
        };
        (tokens / u64::from(block_size.max(1))) as usize
    }

    /// What was sent to a worker, the least recently used blocks forgotten.
    fn sent<'a>(
        &self,
        sent: &'a mut HashMap<Worker, Lru>,
        worker: Worker,
        block_size: u32,
    ) -> &'a mut Lru {
        sent.entry(worker).or_insert_with(|| Lru::new(self.most_blocks(block_size)))
    }

    /// Leading blocks of the prompt that were sent to each candidate.
    fn matched(
        &self,
        sent: &mut HashMap<Worker, Lru>,
        context: &Context<'_>,
        found: &Candidates<'_>,
    ) -> Vec<usize> {
        let size = context.request.block_size;
        let of = |worker| self.sent(sent, worker, size).matched(context.sequence_hashes);
        found.list.iter().map(|one| one.worker).map(of).collect()
    }

    /// What each candidate costs.
    fn costs(&self, context: &Context<'_>, found: &Candidates<'_>) -> Vec<f64> {
        let state = &mut *self.state.lock().expect("nobody panics with it");
        let request = &context.request;
        let all = 0..found.len();
        let requests = |at: usize| f64::from(found.requests(at));
        match self.rule {
            Rule::LMetric => all
                .map(|at| {
                    let new = request.uncached_tokens(&found.list[at])
                        + found.list[at].load.prefill_tokens;
                    new as f64 * (requests(at) + 1.0)
                })
                .collect(),
            Rule::SgLang => {
                let matched = self.matched(&mut state.sent, context, found);
                let most = all.clone().map(requests).fold(0.0, f64::max);
                let least = all.clone().map(requests).fold(f64::MAX, f64::min);
                let best = matched.iter().copied().max().unwrap_or(0);
                let share = best as f64 / context.sequence_hashes.len().max(1) as f64;
                match () {
                    () if most - least > 64.0 && most > 1.5 * least => all.map(requests).collect(),
                    () if share > 0.3 => matched.iter().map(|blocks| -(*blocks as f64)).collect(),
                    // The smallest tree.
                    () => {
                        found.list.iter().map(|one| state.sent[&one.worker].len() as f64).collect()
                    }
                }
            }
            Rule::LlmD => {
                let queue = |at: usize| found.metrics(at).utilization.unwrap_or(0.0);
                let most = all.clone().map(queue).fold(0.0, f64::max);
                let least = all.clone().map(queue).fold(f64::MAX, f64::min);
                all.map(|at| {
                    let blocks = context.sequence_hashes.len().max(1) as f64;
                    let prefix = f64::from(found.list[at].overlap_blocks) / blocks;
                    let short =
                        if most > least { (most - queue(at)) / (most - least) } else { 1.0 };
                    let free = 1.0 - found.metrics(at).gpu_kv_usage.unwrap_or(0.0);
                    -(3.0 * prefix + 2.0 * short + 2.0 * free)
                })
                .collect()
            }
            Rule::Preble => {
                let blocks = context.sequence_hashes.len();
                let size = f64::from(request.block_size);
                let matched = self.matched(&mut state.sent, context, found);
                let loads: Vec<f64> = found
                    .list
                    .iter()
                    .map(|one| state.recent.entry(one.worker).or_default().sum(context.now_ms))
                    .collect();
                let best = matched.iter().copied().max().unwrap_or(0);
                let least = loads.iter().copied().fold(f64::MAX, f64::min);
                let explore = |at: usize| {
                    let new = request.isl_tokens as f64 - matched[at] as f64 * size;
                    let is_full = state.sent[&found.list[at].worker].is_full();
                    // What is pushed out is expected to be wanted again as often as not.
                    loads[at] + new + if is_full { 0.5 * new } else { 0.0 }
                };
                let is_exploit = 2 * best > blocks
                    && all.clone().any(|at| matched[at] == best && loads[at] <= 2.0 * least + 1e4);
                match is_exploit {
                    true => all
                        .map(|at| if matched[at] == best { loads[at] } else { f64::MAX })
                        .collect(),
                    false => all.map(explore).collect(),
                }
            }
        }
    }
}

impl RoutePolicy for Peer {
    fn name(&self) -> &str {
        self.rule.name()
    }

    fn needs_tokens(&self) -> bool {
        true
    }

    fn choose(
        &self,
        context: &Context<'_>,
        found: &Candidates<'_>,
        told: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let costs = self.costs(context, found);
        found.fill(told, |index| costs[index]);
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let ties: Vec<usize> = (0..costs.len()).filter(|&at| costs[at] == least).collect();
        let index = *ties.get(rng.random_range(0..ties.len().max(1)))?;
        let reason = Reason::LowestCost;
        Some(Choice { index, ties: ties.len(), margin: None, reason, score: None })
    }

    fn routed(&self, context: &Context<'_>, found: &Candidates<'_>, choice: &Choice) {
        if !matches!(self.rule, Rule::SgLang | Rule::Preble) {
            return;
        }
        let worker = found.list[choice.index].worker;
        let size = context.request.block_size;
        let state = &mut *self.state.lock().expect("nobody panics with it");
        let sent = self.sent(&mut state.sent, worker, size);
        let cached = sent.matched(context.sequence_hashes) as f64 * f64::from(size);
        sent.add(context.sequence_hashes);
        let work = context.request.isl_tokens as f64 - cached + DECODE_WORK * ANSWER_TOKENS;
        state.recent.entry(worker).or_default().add(context.now_ms, work);
    }
}

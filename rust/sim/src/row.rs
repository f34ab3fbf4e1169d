//! The ways to route that are compared.

use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, EngineFacts, Identity, ModelKey, Registration, Source,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::fair::Discipline;
use kvflash_core::ids::Worker;
use kvflash_core::load::LoadConfig;
use kvflash_core::policy::{AUTO, KvScale, Profile, Settings, registry};
use kvflash_core::select::{Overlap, Policies, Report, RouterConfig, Selector, SelectorConfig};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::rules::Rule;

/// One way to route.
#[derive(Debug, Clone)]
pub struct Row {
    /// How tables call it.
    pub name: String,
    /// A policy or a weighted strategy of kvflash.
    pub strategy: &'static str,
    /// Somebody else's rule instead.
    pub rule: Option<Rule>,
    /// Engines' events are heard.
    pub has_events: bool,
    /// Without events a worker's own history stands for its cache, not what was sent there within 120 s: `auto` only.
    pub has_histories: bool,
    /// What a block to prefill costs: `kv` only.
    pub weight: f64,
    /// Credit of a cached block, and whether blocks of running requests count: `kv` only.
    pub credit: f64,
    /// See `credit`.
    pub tracks_active_blocks: bool,
    /// Who waits in front of it, and how many run at once for each worker.
    pub fairness: Option<(Discipline, usize)>,
}

impl Row {
    /// A policy with its defaults.
    pub fn new(strategy: &'static str) -> Self {
        Self {
            name: format!("`{strategy}`"),
            strategy,
            rule: None,
            has_events: true,
            has_histories: strategy == AUTO,
            weight: 1.0,
            credit: 1.0,
            tracks_active_blocks: true,
            fairness: None,
        }
    }

    fn named(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    fn peer(rule: Rule) -> Self {
        Self { rule: Some(rule), ..Self::new("least-request") }.named(rule.name())
    }

    fn credit_2() -> Self {
        let row = Self { credit: 2.0, tracks_active_blocks: false, ..Self::new("kv") };
        row.named("`kv`, credit 2, without active blocks")
    }

    /// `kv` behind a queue.
    pub fn fair(discipline: Discipline, max_running: usize) -> Self {
        let fairness = Some((discipline, max_running));
        Self { fairness, ..Self::new("kv") }.named(&format!("`kv` behind `{discipline}`"))
    }

    /// The rows of the matrix.
    pub fn matrix() -> Vec<Self> {
        let mut rows = vec![
            Self::new(AUTO),
            Self::new("kv"),
            Self { weight: 8.0, ..Self::new("kv") }.named("`kv`, weight 8"),
            Self::credit_2(),
        ];
        rows.extend(
            ["prefix-cache", "session-affinity", "least-request", "round_robin"].map(Self::new),
        );
        rows.extend(Rule::ALL.map(Self::peer));
        rows
    }

    /// Every policy and every queue. A queue lets `max_running` requests run for each worker.
    pub fn all(max_running: usize) -> Vec<Self> {
        let blind = |strategy| {
            let row = Self { has_events: false, ..Self::new(strategy) };
            row.named(&format!("`{strategy}` without events"))
        };
        let timed = Self { has_histories: false, ..blind(AUTO) };
        let timed = timed.named("`auto` without events, for 120 s");
        let mut rows = vec![Self::new(AUTO), blind(AUTO), timed, Self::new("kv"), Self::credit_2()];
        rows.push(Self { credit: 2.0, ..Self::new("kv") }.named("`kv`, credit 2"));
        rows.push(blind("kv"));
        rows.extend(["round_robin", "random", "least_loaded", "power_of_two"].map(Self::new));
        rows.extend([Self::new("prefix-cache"), blind("prefix-cache")]);
        rows.extend(
            [
                "vtc-basic",
                "least-request",
                "least-kv-cache",
                "least-latency",
                "throughput",
                "session-affinity",
                "prefix-cache:2,least-request:1",
            ]
            .map(Self::new),
        );
        rows.extend(Discipline::ALL.map(|discipline| Self::fair(discipline, max_running)));
        rows
    }

    /// Whether its policy cuts the prompt's text.
    pub fn needs_text(&self) -> bool {
        self.strategy.contains("prefix-cache") && !self.has_events
    }

    /// How often engines' metrics are asked for, in microseconds: llm-d asks twenty times a second.
    pub fn probe_us(&self) -> u64 {
        if self.rule == Some(Rule::LlmD) { 50_000 } else { 2_000_000 }
    }

    /// A selector over `workers`, as the frontend makes it.
    ///
    /// # Panics
    /// Where the row's names are none of kvflash's.
    pub fn selector(
        &self,
        workers: &[Worker],
        block_size: u32,
        capacity_tokens: u64,
        clock: &Arc<ManualClock>,
        seed: u64,
    ) -> Selector {
        let ttl_ms = if self.has_events { 5_000 } else { 120_000 };
        let options = CatalogOptions {
            predicted_ttl_ms: ttl_ms,
            max_predicted: (1_048_576, 838_860),
            has_histories: self.has_histories && !self.has_events,
            ..CatalogOptions::default()
        };
        let catalog = Catalog::new(options, Arc::<ManualClock>::clone(clock));
        let key = ModelKey { model_name: "mock-model".into(), tenant_id: "default".into() };
        let model = catalog.model_or_create(&key, Some(block_size)).expect("it is the first one");
        for &worker in workers.iter().filter(|_| self.has_events) {
            let registration = Registration {
                worker,
                key: key.clone(),
                block_size: Some(block_size),
                endpoint: format!("tcp://127.0.0.1:{}", 5_000 + worker.instance_id),
                replay_endpoint: None,
                capacity_blocks: None,
                identity: Identity::default(),
                facts: EngineFacts::default(),
                source: Source::Zmq,
            };
            catalog.register(registration).expect("each registers once");
        }
        let mut rng = SmallRng::seed_from_u64(seed);
        let active = match self.rule {
            Some(rule) => rule.policy(capacity_tokens),
            None => registry::build(self.strategy, &Settings::new(Profile::Document), &mut rng)
                .expect("the names are those of the registry"),
        };
        let config = SelectorConfig {
            router: RouterConfig {
                // A stream that is alive is heard of before it expires.
                load: LoadConfig { block_size, expiry_ms: u64::MAX, ..LoadConfig::default() },
                track_active_blocks: self.tracks_active_blocks,
                overlap_score_weight: self.weight,
                scale: KvScale { overlap_score_credit: self.credit, ..KvScale::default() },
                seed,
                ..RouterConfig::default()
            },
            overlap: if self.has_events {
                Overlap::EventsAndPredictions
            } else {
                Overlap::Predictions
            },
            journal_bytes: 0,
            ..SelectorConfig::default()
        };
        let policies = Policies { active, ..Policies::default() };
        let clock = Arc::<ManualClock>::clone(clock);
        let selector = Selector::with_policies(config, policies, model, clock)
            .expect("the configuration is legal");
        selector.set_workers(workers).expect("there are few");
        let kv_total_blocks = Some(capacity_tokens / u64::from(block_size));
        for worker in workers {
            selector.busy.report(*worker, &Report { kv_total_blocks, ..Report::default() });
        }
        selector
    }
}

//! The policies and disciplines that are compared, by the flags that choose them.

use std::sync::Arc;

use kvflash::catalog::{Catalog, CatalogOptions, EngineFacts, Identity, ModelKey, Registration};
use kvflash::clock::ManualClock;
use kvflash::fair::Discipline;
use kvflash::ids::Worker;
use kvflash::policy::{AUTO, KvScale, Policy, Profile, Settings, registry};
use kvflash::router::{Policies, RouterConfig};
use kvflash::select::{Overlap, Selector, SelectorConfig};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// One way to route.
#[derive(Debug, Clone)]
pub struct Row {
    /// How the table calls it.
    pub name: String,
    /// A policy or a weighted strategy.
    pub strategy: &'static str,
    /// Engines' events are heard.
    pub has_events: bool,
    /// Credit of a cached block, and whether blocks of running requests count: `kv` only.
    pub credit: f64,
    pub tracks_active_blocks: bool,
    /// Who waits in front of it, and how many run at once for each worker.
    pub fairness: Option<(Discipline, usize)>,
}

impl Row {
    pub fn new(strategy: &'static str) -> Self {
        Self {
            name: format!("`{strategy}`"),
            strategy,
            has_events: true,
            credit: 1.0,
            tracks_active_blocks: true,
            fairness: None,
        }
    }

    /// `kv` behind a queue.
    pub fn fair(discipline: Discipline, max_running: usize) -> Self {
        let fairness = Some((discipline, max_running));
        Self { name: format!("`kv` behind `{discipline}`"), fairness, ..Self::new("kv") }
    }

    /// Every row of the table. A queue lets `max_running` requests run for each worker.
    pub fn all(max_running: usize) -> Vec<Self> {
        let named = |name: &str, row: Self| Self { name: name.into(), ..row };
        let mut rows = vec![
            Self::new(AUTO),
            named("`auto` without events", Self { has_events: false, ..Self::new(AUTO) }),
            Self::new("kv"),
            named(
                "`kv`, credit 2, without active blocks",
                Self { credit: 2.0, tracks_active_blocks: false, ..Self::new("kv") },
            ),
            named("`kv`, credit 2", Self { credit: 2.0, ..Self::new("kv") }),
            named("`kv` without events", Self { has_events: false, ..Self::new("kv") }),
        ];
        rows.extend(["round_robin", "random", "least_loaded", "power_of_two"].map(Self::new));
        rows.push(Self::new("prefix-cache"));
        let blind = Self { has_events: false, ..Self::new("prefix-cache") };
        rows.push(named("`prefix-cache` without events", blind));
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
        let disciplines =
            [Discipline::Fcfs, Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred];
        rows.extend(disciplines.map(|discipline| Self::fair(discipline, max_running)));
        rows
    }

    /// Whether its policy cuts the prompt's text.
    pub fn needs_text(&self) -> bool {
        self.strategy.contains("prefix-cache") && !self.has_events
    }

    /// A selector over `workers`, as the frontend makes it.
    pub fn selector(
        &self,
        workers: &[Worker],
        block_size: u32,
        clock: &Arc<ManualClock>,
    ) -> Selector {
        let ttl_ms = if self.has_events { 5_000 } else { 120_000 };
        let options = CatalogOptions {
            predicted_ttl_ms: ttl_ms,
            max_predicted: (1_048_576, 838_860),
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
            };
            catalog.register(registration).expect("each registers once");
        }
        let built_in = self.strategy.parse::<Policy>().ok();
        let mut rng = SmallRng::seed_from_u64(1);
        let named = built_in.is_none().then(|| {
            registry::build(self.strategy, &Settings::new(Profile::Document), &mut rng)
                .expect("the names are those of the registry")
        });
        let config = SelectorConfig {
            router: RouterConfig {
                policy: built_in.unwrap_or_default(),
                block_size,
                estimates_queue: self.strategy == AUTO,
                track_active_blocks: self.tracks_active_blocks,
                scale: KvScale { overlap_score_credit: self.credit, ..KvScale::default() },
                // A stream that is alive is heard of before it expires.
                expiry_ms: u64::MAX,
                seed: 1,
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
        let policies = Policies { active: named, ..Policies::default() };
        let clock = Arc::<ManualClock>::clone(clock);
        let selector = Selector::with_policies(config, policies, model, clock)
            .expect("the configuration is legal");
        selector.set_workers(workers).expect("there are few");
        selector
    }
}

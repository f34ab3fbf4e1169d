//! The operator's routing settings, for every service that routes.

use std::time::Duration;

use serde_json::Value;

use super::DEFAULT_JOURNAL_BYTES;
use crate::catalog::DEFAULT_MAX_BLOCKS;
use crate::error::{Error, Result};
use crate::load::PrefillSpeed;
use crate::policy::{AUTO, KvScale, Policy};
use crate::settings;
use crate::settings::{Concern, Legal, Setting, Shape};

/// `None`, "auto" or tokens per second.
impl Shape for PrefillSpeed {
    const KIND: &'static str = "speed";
    const IS_OPTIONAL: bool = true;

    fn read(value: Value) -> Result<Self> {
        match &value {
            Value::Null => Ok(Self::Unknown),
            Value::String(word) if word == "auto" => Ok(Self::Learned),
            Value::Number(speed) => Ok(Self::Told(speed.as_f64().unwrap_or_default())),
            _ => Err(Error::invalid(format!("must be a number or \"auto\", got {value}"))),
        }
    }

    fn value(&self) -> Value {
        match self {
            Self::Unknown => Value::Null,
            Self::Learned => "auto".into(),
            Self::Told(speed) => (*speed).into(),
        }
    }
}

settings! {
    /// Which policy chooses.
    ModeSettings { "Routing": {
        /// auto (default), kv, round-robin, random, least-loaded, ...; see docs/policies.md
        ///
        /// A [policy](policies.md), several with weights such as `prefix-cache:2,least-request:1`,
        /// or a class of your own
        policy: Option<String> = None, (), "--router-mode POLICY DYN_ROUTER_MODE";
        /// Defaults of AIBrix's policies: as documented (default) or as its code has them
        ///
        /// See [the two profiles](policies.md#the-two-profiles)
        policy_profile: Option<String> = None, &["document", "aibrix-compat"], "--policy-profile";
        /// Run up to 4 policies beside the deciding one, to compare them in /metrics
        ///
        /// A policy may have settings of its own (`kv:overlap_score_weight=8`); see
        /// [shadow](policies.md#shadow)
        shadow_policies: Vec<String> = Vec::new(), (), "--shadow-policy POLICY";
        /// Keep a session on its worker until it has been idle for this long; None: off
        ///
        /// Applies in every mode; see [sessions](routing.md#sessions)
        session_affinity_ttl_s: Option<u64> = None, 1..=31_536_000,
            "--router-session-affinity-ttl-secs SECONDS DYN_ROUTER_SESSION_AFFINITY_TTL_SECS";
        /// Balance by load alone and ignore caches
        ///
        /// A preset: kv mode with credit 0, no events, no assumed reuse. Cannot be combined with flags that contradict it
        load_aware: bool = false, (), "--load-aware";
    } }
}

settings! {
    /// What a worker costs.
    CostSettings { "Cost of a worker (kv mode)": {
        /// Cost of a block to prefill, relative to a running block; 0 ignores caches
        ///
        /// At 0, kvflash does not listen to events
        overlap_score_weight: f64 = 1.0, 0.0..,
            "--kv-overlap-score-weight --router-kv-overlap-score-weight \
             DYN_KV_OVERLAP_SCORE_WEIGHT DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT";
        /// Saving of a cached block, in blocks to prefill; above 1 favors caches
        ///
        /// At 0, cached blocks save nothing, and kvflash does not listen to events
        overlap_score_credit: f64 = 1.0, 0.0..,
            "--router-kv-overlap-score-credit DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT";
        /// How fast that credit decays on workers with more queued prefill
        ///
        /// Compared with the worker that has the least queued prefill
        overlap_score_credit_decay: f64 = 0.0, 0.0..,
            "--router-kv-overlap-score-credit-decay DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY";
        /// Saving of a block held in host memory only, in blocks to prefill
        host_cache_hit_weight: f64 = 0.75, 0.0..,
            "--router-host-cache-hit-weight DYN_ROUTER_HOST_CACHE_HIT_WEIGHT";
        /// Saving of a block held on disk only, in blocks to prefill
        ///
        /// Includes shared storage. 0: blocks on disk do not count
        disk_cache_hit_weight: f64 = 0.25, 0.0..,
            "--router-disk-cache-hit-weight DYN_ROUTER_DISK_CACHE_HIT_WEIGHT";
        /// Weight of the uncached prefill cost
        prefill_load_scale: f64 = 1.0, 0.0..,
            "--router-prefill-load-scale DYN_ROUTER_PREFILL_LOAD_SCALE";
        /// Prefill speed, to discount prompts in progress; auto learns it
        ///
        /// With `auto`, kvflash learns it from each worker's times to the first token
        prefill_tokens_per_s: PrefillSpeed = PrefillSpeed::Unknown, 0.001..,
            "--router-prefill-tokens-per-second N|auto";
        /// Cost of each running request, in blocks
        active_request_weight: f64 = 0.0, 0.0..,
            "--router-active-request-weight --router-decode-active-request-weight \
             DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT";
        /// Randomness of the choice; 0 takes the cheapest worker
        ///
        /// Above 0, the probability of a worker is proportional to `exp(-(cost / range) / temperature)`
        temperature: f64 = 0.0, 0.0.., "--router-temperature DYN_ROUTER_TEMPERATURE";
        /// Tokens per KV block; learned from the engines if not given
        ///
        /// A router refuses workers with another block size; a frontend never counts their caches
        block_size: Option<u32> = None, 1..=u64::from(u32::MAX),
            "--kv-cache-block-size TOKENS DYN_KV_CACHE_BLOCK_SIZE";
    } }
}

settings! {
    /// What counts as a worker's load.
    LoadSettings { "Load that counts": {
        /// Count the blocks of running requests; off for prefill-only workers
        track_active_blocks: bool = true, (),
            "--track-active-blocks --router-track-active-blocks --no-track-active-blocks \
             --no-router-track-active-blocks DYN_ROUTER_TRACK_ACTIVE_BLOCKS";
        /// Count generated blocks as well as prompt blocks
        ///
        /// Generated blocks then count in `decode_blocks`
        track_output_blocks: bool = false, (),
            "--router-track-output-blocks --no-router-track-output-blocks \
             DYN_ROUTER_TRACK_OUTPUT_BLOCKS";
        /// Count prompt tokens until the first token; off for decode-only workers
        ///
        /// Pools of prefill workers always count them
        track_prefill_tokens: bool = true, (),
            "--track-prefill-tokens --router-track-prefill-tokens --no-track-prefill-tokens \
             --no-router-track-prefill-tokens DYN_ROUTER_TRACK_PREFILL_TOKENS";
        /// Count a block that several running requests share only once
        assume_kv_reuse: bool = true, (),
            "--assume-kv-reuse --router-assume-kv-reuse --no-assume-kv-reuse \
             --no-router-assume-kv-reuse DYN_ROUTER_ASSUME_KV_REUSE";
        /// Free a request's load after this long without activity
        active_request_expiry_secs: Duration = Duration::from_secs(300), 1.0..,
            "--active-request-expiry SECONDS DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS";
    } }
}

settings! {
    /// Where knowledge of caches comes from, and how long it is valid.
    CacheSettings { "Knowledge of caches": {
        /// Listen to the engines' KV events; off: assume that prompts stay cached where they were sent
        ///
        /// See [without events](routing.md#without-events)
        use_kv_events: bool = true, (),
            "--kv-events --router-kv-events --no-kv-events --no-router-kv-events DYN_KV_EVENTS \
             DYN_ROUTER_KV_EVENTS";
        /// Without events: how long a prompt counts as cached
        ///
        /// Counted from the last time the prompt was sent; queries do not renew it. If the [size of the
        /// cache](routing.md#without-events) is known, `auto` uses that instead, unless you set this flag
        router_ttl_s: Duration = Duration::from_secs(120), 0.0..=31_536_000.0,
            "--router-ttl --router-ttl-secs SECONDS DYN_ROUTER_TTL DYN_ROUTER_TTL_SECS";
        /// Maximum blocks that count as cached without events, over all workers
        ///
        /// With events, the limit of predictions
        router_max_tree_size: usize = 1_048_576, 1..=1 << 40,
            "--router-max-tree-size BLOCKS DYN_ROUTER_MAX_TREE_SIZE";
        /// Share of --router-max-tree-size that remains after the oldest blocks are dropped
        ///
        /// kvflash drops the least recently sent blocks, the deepest of them first
        router_prune_target_ratio: f64 = 0.8, 0.0..=1.0,
            "--router-prune-target-ratio DYN_ROUTER_PRUNE_TARGET_RATIO";
        /// With events: how long a prompt counts as cached before its events arrive
        ///
        /// `0` or `None`: no predictions; see [predictions](routing.md#predictions)
        predicted_ttl_s: Option<Duration> = Some(Duration::from_secs(5)), 0.0..=86_400.0,
            "--router-predicted-ttl-secs SECONDS DYN_ROUTER_PREDICTED_TTL_SECS";
    } }
}

settings! {
    /// When a worker counts as busy, and how requests wait.
    BusySettings { "Busy workers": {
        /// Send no requests to workers with more than this share of their blocks in use
        active_decode_blocks_threshold: Option<f64> = None, 0.0..=1.0,
            "--active-decode-blocks-threshold --busy-threshold \
             DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD DYN_BUSY_THRESHOLD";
        /// Send no requests to workers with more than this many tokens left to prefill
        active_prefill_tokens_threshold: Option<u64> = None, 0..=u64::MAX,
            "--active-prefill-tokens-threshold TOKENS DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD";
        /// The same limit as a multiple of the worker's largest batch
        ///
        /// If a worker's largest batch is unknown, kvflash assumes 10,000,000 tokens
        active_prefill_tokens_threshold_frac: Option<f64> = None, 0.0..,
            "--active-prefill-tokens-threshold-frac DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC";
    }
    "Queue": {
        /// Queue requests while every worker has more than this many batches to prefill; None: never
        router_queue_threshold: Option<f64> = None, 0.0..,
            "--router-queue-threshold DYN_ROUTER_QUEUE_THRESHOLD";
        /// Order of the queue: first come, last come, or shortest prefill
        router_queue_policy: String = "fcfs".to_owned(), &["fcfs", "lcfs", "wspt"],
            "--router-queue-policy DYN_ROUTER_QUEUE_POLICY";
        /// Maximum queued requests per model; more are refused with 429
        ///
        /// The answer carries `Retry-After: 1`
        router_queue_limit: usize = 1_024, 1..=10_000_000, "--router-queue-limit";
        /// Longest wait in the queue before a request is refused with 503
        ///
        /// The answer carries `Retry-After: 1`
        router_queue_timeout_s: Duration = Duration::from_secs(60), 0.001..=86_400.0,
            "--router-queue-timeout SECONDS";
        /// Largest batch (in tokens) of workers that do not report it
        ///
        /// Runtime workers report it in their card; set it for OpenAI engines
        router_queue_batched_tokens: u64 = 10_000_000, 1..=1 << 62,
            "--router-queue-batched-tokens TOKENS";
    } }
}

settings! {
    /// What is kept of decisions.
    DecisionSettings { "Decisions": {
        /// Memory for past decisions (GET /why/{request_id}); 0 keeps none
        decision_journal_bytes: usize = DEFAULT_JOURNAL_BYTES, Legal::Bytes(1, true),
            "--decision-journal SIZE";
        /// Log every decision, with the cost of every worker in auto and kv mode
        ///
        /// See [cost of kv](routing.md#cost-of-kv)
        log_decisions: bool = false, (), "--log-decisions";
        /// Refuse requests until this many workers were healthy (router: registered) at once
        ///
        /// Until then the service refuses requests with 503
        min_initial_workers: usize = 0, 0..=65_535,
            "--min-initial-workers --router-min-initial-workers COUNT \
             DYN_ROUTER_MIN_INITIAL_WORKERS";
        /// Seed for random choices, to make runs repeatable
        seed: Option<u64> = None, 0..=u64::MAX, "--seed";
    } }
}

settings! {
    /// How much an index may hold.
    IndexSettings { "Index": {
        /// Maximum blocks in the index of one model; 0: no limit
        ///
        /// A block counts once for every worker and tier that holds it. At the limit the index refuses new
        /// blocks; see [how many you need](indexer.md#memory)
        max_blocks: usize = DEFAULT_MAX_BLOCKS, 0..=1 << 48, "--max-blocks BLOCKS";
        /// Maximum memory of one model's index, such as 8GiB; 0: no limit
        ///
        /// Near the limit the index drops the least recently stored blocks
        index_memory_bytes: usize = 0, Legal::Bytes(1 << 20, true), "--index-memory SIZE";
    } }
}

settings! {
    /// Where the index is.
    RemoteSettings { "Index": {
        /// Also answer the indexer's API: /query, /query_by_hash, /dump, /digest
        serve_indexer: bool = false, (), "--serve-indexer";
        /// Ask this kvflash indexer, or the one in discovery, instead of listening to events
        ///
        /// Without a URL: the [one in discovery](indexer.md#engines-without-registration). Its
        /// instance ids are the workers' ids; see [with an indexer](router.md#with-an-indexer)
        remote_indexer: Option<String> = None, Legal::Bare("discovery"), "--use-remote-indexer URL";
        /// Longest wait for the remote indexer; after it, route by load and recently sent prompts alone
        remote_indexer_deadline: Duration = Duration::from_millis(50),
            0.001..=60.0, "--remote-indexer-deadline SECONDS";
    }
    "Compatibility": {
        /// Accepted for compatibility; has no effect
        router_event_threads: u64 = 4, 1..=1_024, "--router-event-threads DYN_ROUTER_EVENT_THREADS";
    } }
}

settings! {
    /// How events come, and what replicas tell each other. Nothing of it is the core's.
    ClusterSettings { "Replicas": {
        /// How events arrive: zmq needs no server; nats uses the one in NATS_SERVER
        ///
        /// With nats, workers that publish on sockets work as well; the NATS server must be reachable at the start
        event_plane: String = "zmq".to_owned(), &["zmq", "nats"], "--event-plane DYN_EVENT_PLANE";
        /// Deprecated; use --event-plane nats
        durable_kv_events: bool = false, (),
            "--router-durable-kv-events --durable-kv-events DYN_ROUTER_DURABLE_KV_EVENTS \
             DYN_DURABLE_KV_EVENTS";
        /// Share load with other routers of the same workers; requires discovery
        ///
        /// Over NATS with `--event-plane nats`, else over ZMQ
        router_replica_sync: bool = false, (),
            "--router-replica-sync --no-router-replica-sync DYN_ROUTER_REPLICA_SYNC";
        /// With nats: take a snapshot when a stream has more than this many messages; None: never
        router_snapshot_threshold: Option<u64> = Some(1_000_000), 1..=1 << 62,
            "--router-snapshot-threshold MESSAGES DYN_ROUTER_SNAPSHOT_THRESHOLD";
        /// With nats: erase the stream and its snapshot for all replicas, and start over
        router_reset_states: bool = false, (),
            "--router-reset-states --no-router-reset-states DYN_ROUTER_RESET_STATES";
    } }
}

/// Every setting of a service that routes, in the order of the help.
pub fn routing_table() -> Vec<Setting> {
    [
        ModeSettings::table(),
        CostSettings::table(),
        LoadSettings::table(),
        CacheSettings::table(),
        BusySettings::table(),
        DecisionSettings::table(),
        IndexSettings::table(),
        RemoteSettings::table(),
    ]
    .concat()
}

impl CostSettings {
    /// How `kv` weighs its terms.
    pub fn scale(&self) -> KvScale {
        KvScale {
            overlap_score_credit: self.overlap_score_credit,
            overlap_score_credit_decay: self.overlap_score_credit_decay,
            prefill_load_scale: self.prefill_load_scale,
            active_request_weight: self.active_request_weight,
        }
    }

    /// Whether caches count at all.
    pub fn weighs_overlap(&self) -> bool {
        self.scale().weighs_overlap(self.overlap_score_weight)
    }

    /// The default policy: `auto`, or `kv` if a setting of its cost was changed.
    pub fn default_policy(&self, load: &LoadSettings) -> &'static str {
        let is_plain = self.scale().is_plain()
            && self.overlap_score_weight == 1.0
            && load.track_active_blocks
            && load.track_prefill_tokens
            && load.assume_kv_reuse
            && self.prefill_tokens_per_s == PrefillSpeed::Unknown;
        if is_plain { AUTO } else { "kv" }
    }
}

/// What was set and changes nothing, one sentence each, with what to do about it; `policy` is the
/// name of the one that decides.
pub fn without_effect(
    policy: &str,
    cost: &CostSettings,
    caches: &CacheSettings,
    busy: &BusySettings,
) -> Vec<String> {
    const OF_FORMULA: [&str; 5] = [
        "--kv-overlap-score-weight",
        "--router-kv-overlap-score-credit",
        "--router-kv-overlap-score-credit-decay",
        "--router-prefill-load-scale",
        "--router-active-request-weight",
    ];
    let mut found = Vec::new();
    // `kv` stands in for a policy in Python.
    let is_kv = policy == Policy::Kv.name() || policy.starts_with("python:");
    let of_kv = "leave out --router-mode, or set it to kv";
    for name in cost.changed() {
        // Without weight, no policy has events.
        if OF_FORMULA.contains(&name) && !is_kv && cost.weighs_overlap() {
            found.push(format!("{name} has no effect under policy {policy}; {of_kv}"));
        } else if name == "--router-temperature" && !is_kv && policy != AUTO {
            found.push(format!("{name} has no effect under policy {policy}; {of_kv} or auto"));
        }
    }
    for name in caches.changed() {
        if name == "--router-ttl" && caches.use_kv_events {
            found.push(format!(
                "{name} has no effect with KV events; add --no-kv-events, or set \
                 --router-predicted-ttl-secs"
            ));
        } else if name == "--router-predicted-ttl-secs" && !caches.use_kv_events {
            found.push(format!("{name} has no effect without KV events; set --router-ttl"));
        }
    }
    if busy.router_queue_threshold.is_none() {
        let named = busy.changed().into_iter().filter(|name| name.starts_with("--router-queue-"));
        found.extend(named.map(|name| {
            format!(
                "{name} has no effect without --router-queue-threshold: no request waits; add it"
            )
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_nothing_is_named() {
        let cost = CostSettings {
            overlap_score_weight: 2.0,
            temperature: 0.5,
            host_cache_hit_weight: 0.5,
            ..CostSettings::default()
        };
        let caches =
            CacheSettings { router_ttl_s: Duration::from_secs(9), ..CacheSettings::default() };
        let busy = BusySettings { router_queue_limit: 7, ..BusySettings::default() };
        let named =
            |policy: &str, cost: &CostSettings, caches: &CacheSettings, busy: &BusySettings| {
                let told = without_effect(policy, cost, caches, busy);
                let names = told.iter().filter_map(|text| text.split(' ').next());
                names.map(str::to_owned).collect::<Vec<_>>()
            };
        let (weight, temperature) = ("--kv-overlap-score-weight", "--router-temperature");
        let (ttl, limit) = ("--router-ttl", "--router-queue-limit");
        let of = |policy| named(policy, &cost, &caches, &busy);
        assert_eq!(of("round-robin"), [weight, temperature, ttl, limit]);
        assert_eq!(of("auto"), [weight, ttl, limit]);
        assert_eq!(of("kv"), [ttl, limit]);
        assert_eq!(of("python:mine:Own"), [ttl, limit]);
        // Without weight no events are listened to, under every policy.
        let deaf = CostSettings { overlap_score_weight: 0.0, temperature: 0.0, ..cost };
        let caches = CacheSettings { use_kv_events: false, ..caches };
        let busy = BusySettings { router_queue_threshold: Some(1.0), ..busy };
        assert!(named("auto", &deaf, &caches, &busy).is_empty());
        let caches = CacheSettings { predicted_ttl_s: None, ..caches };
        assert_eq!(named("kv", &deaf, &caches, &busy), ["--router-predicted-ttl-secs"]);
        let idle = (CostSettings::default(), CacheSettings::default(), BusySettings::default());
        assert!(named("random", &idle.0, &idle.1, &idle.2).is_empty());
    }
}

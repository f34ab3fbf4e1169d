//! What the router counts besides the common metrics.

use std::sync::atomic::Ordering;

use kvflash_core::select::QueueStats;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::super::metrics::{ModelLabel, escape, seconds_histogram};
use super::fleet::Fleet;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OutcomeLabel {
    pub outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabel {
    model: String,
    tenant: String,
    worker: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct QueueLabel {
    model: String,
    tenant: String,
    outcome: &'static str,
}

#[derive(Debug, Clone)]
pub(super) struct RouterMetrics {
    /// Tokens of the prompts of all reservations.
    pub input: Counter,
    /// Of these, tokens that the best worker could have reused.
    pub available: Counter,
    /// Of these, tokens that the chosen worker was expected to reuse.
    pub selected: Counter,
    pub selections: Family<OutcomeLabel, Counter>,
    /// Time that reservations took where they may have to wait.
    pub queue_seconds: Histogram,
    queued: Family<QueueLabel, Counter>,
    queue_pending: Family<ModelLabel, Gauge>,
    queue_pending_tokens: Family<ModelLabel, Gauge>,
    pub load_expired: Counter,
    reservations: Family<ModelLabel, Gauge>,
    journal_records: Gauge,
    journal_bytes: Gauge,
    journal_dropped: Counter,
    workers: Family<ModelLabel, Gauge>,
    busy_workers: Family<ModelLabel, Gauge>,
    worker_active_blocks: Family<WorkerLabel, Gauge>,
    worker_active_prefill: Family<WorkerLabel, Gauge>,
    worker_active_requests: Family<WorkerLabel, Gauge>,
    worker_prefill_rate: Family<WorkerLabel, Gauge>,
}

impl RouterMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let stages: Family<StageLabel, Counter> = Family::default();
        let stage = |stage| stages.get_or_create_owned(&StageLabel { stage });
        let metrics = Self {
            input: stage("input"),
            available: stage("available"),
            selected: stage("selected"),
            selections: Family::default(),
            queue_seconds: seconds_histogram(),
            queued: Family::default(),
            queue_pending: Family::default(),
            queue_pending_tokens: Family::default(),
            load_expired: Counter::default(),
            reservations: Family::default(),
            journal_records: Gauge::default(),
            journal_bytes: Gauge::default(),
            journal_dropped: Counter::default(),
            workers: Family::default(),
            busy_workers: Family::default(),
            worker_active_blocks: Family::default(),
            worker_active_prefill: Family::default(),
            worker_active_requests: Family::default(),
            worker_prefill_rate: Family::default(),
        };
        registry.register(
            "prompt_tokens",
            "Tokens of reserved prompts: all, those that the best worker holds, those that the chosen one holds",
            stages,
        );
        registry.register(
            "router_selections",
            "Requests for a worker by outcome; only reserved ones change anything",
            metrics.selections.clone(),
        );
        registry.register_with_unit(
            "queue_wait",
            "Time that reservations took, refused ones included (--router-queue-threshold)",
            Unit::Seconds,
            metrics.queue_seconds.clone(),
        );
        registry.register(
            "queued",
            "Requests of a model that waited for a worker with room to prefill, by what became of them",
            metrics.queued.clone(),
        );
        for (name, help, family) in [
            (
                "queue_pending_requests",
                "Requests of a model that wait for a worker with room to prefill",
                &metrics.queue_pending,
            ),
            ("queue_pending_isl_tokens", "Tokens of their prompts", &metrics.queue_pending_tokens),
        ] {
            registry.register(name, help, family.clone());
        }
        registry.register(
            "load_expired",
            "Reservations of which nothing was heard for so long that their load was freed",
            metrics.load_expired.clone(),
        );
        for (name, help, family) in [
            ("router_workers", "Registered workers", &metrics.workers),
            ("router_busy_workers", "Workers above a threshold", &metrics.busy_workers),
            ("router_reservations", "Reservations that are active", &metrics.reservations),
        ] {
            registry.register(name, help, family.clone());
        }
        registry.register_with_unit(
            "decision_journal",
            "Memory of past decisions",
            Unit::Bytes,
            metrics.journal_bytes.clone(),
        );
        registry.register(
            "decision_journal_records",
            "Past decisions that are kept",
            metrics.journal_records.clone(),
        );
        registry.register(
            "decision_journal_dropped",
            "Past decisions that gave way to later ones",
            metrics.journal_dropped.clone(),
        );
        for (name, help, family) in [
            (
                "worker_active_blocks",
                "Distinct blocks of active requests",
                &metrics.worker_active_blocks,
            ),
            (
                "worker_active_prefill_tokens",
                "Prompt tokens still to be prefilled",
                &metrics.worker_active_prefill,
            ),
            ("worker_active_requests", "Active requests", &metrics.worker_active_requests),
            (
                "worker_prefill_tokens_per_second",
                "Prompt tokens a second that first tokens have shown, where prefill speed counts",
                &metrics.worker_prefill_rate,
            ),
        ] {
            registry.register(name, help, family.clone());
        }
        metrics
    }

    /// Read what families tell of now.
    pub fn refill(&self, fleet: &Fleet) {
        self.clear();
        for pool in fleet.pools() {
            let (model, tenant) = (escape(&pool.key.model_name), escape(&pool.key.tenant_id));
            let loads = pool.selector.loads();
            let busy = pool.selector.busy.busy(loads.iter().copied());
            let label = ModelLabel { model: model.clone(), tenant: tenant.clone() };
            if let Some(queue) = &pool.queue {
                self.tell_queue(&label, &queue.stats());
            }
            for (family, value) in [
                (&self.workers, pool.members().all().count()),
                (&self.busy_workers, busy.len()),
                (&self.reservations, pool.selector.reserved()),
            ] {
                family.get_or_create(&label).set(value as i64);
            }
            for load in loads {
                let worker = load.worker.to_string();
                let label = WorkerLabel { model: model.clone(), tenant: tenant.clone(), worker };
                self.worker_active_blocks.get_or_create(&label).set(load.blocks as i64);
                self.worker_active_prefill.get_or_create(&label).set(load.prefill_tokens as i64);
                self.worker_active_requests.get_or_create(&label).set(i64::from(load.requests));
                if let Some(per_s) = load.prefill_tokens_per_s {
                    self.worker_prefill_rate.get_or_create(&label).set(per_s as i64);
                }
            }
        }
        let journal = fleet.journal.stats();
        self.journal_records.set(journal.records as i64);
        self.journal_bytes.set(journal.bytes as i64);
        self.journal_dropped.inner().store(journal.dropped_total, Ordering::Relaxed);
    }

    /// Who waits for a worker with room to prefill, and what became of those who did.
    fn tell_queue(&self, label: &ModelLabel, stats: &QueueStats) {
        self.queue_pending.get_or_create(label).set(stats.pending as i64);
        self.queue_pending_tokens.get_or_create(label).set(stats.pending_isl_tokens as i64);
        let ModelLabel { model, tenant } = label;
        for (outcome, count) in stats.outcomes() {
            let label = QueueLabel { model: model.clone(), tenant: tenant.clone(), outcome };
            self.queued.get_or_create(&label).inc_by(count);
        }
    }

    /// Families that are read anew at each scrape, so that who left leaves no label behind.
    fn clear(&self) {
        let Self { queue_pending, queue_pending_tokens, queued, .. } = self;
        [queue_pending, queue_pending_tokens].into_iter().for_each(Family::clear);
        queued.clear();
        let Self { workers, busy_workers, reservations, .. } = self;
        [workers, busy_workers, reservations].into_iter().for_each(Family::clear);
        for family in [
            &self.worker_active_blocks,
            &self.worker_active_prefill,
            &self.worker_active_requests,
            &self.worker_prefill_rate,
        ] {
            family.clear();
        }
    }
}

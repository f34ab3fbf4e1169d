//! The router's metrics besides the common ones.

use kvflash_core::select::QueueStats;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::fleet::Fleet;
use crate::metrics::{ModelLabel, OutcomeLabel, escape, metrics, seconds_histogram};

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

metrics! {
    #[derive(Debug, Clone)]
    pub(super) struct RouterMetrics {
        @stages "prompt_tokens",
            "Prompt tokens of reservations by stage: all, cached at the best worker, cached at the chosen worker":
            pub input, pub available, pub selected;
        pub selections: Family<OutcomeLabel, Counter> = "router_selections",
            "Requests for a worker, by outcome; only reservations are booked";
        pub queue_seconds: Histogram = "queue_wait",
            [Seconds] "Time that reservations took, refused ones included (--router-queue-threshold)",
            seconds_histogram();
        queued: Family<QueueLabel, Counter> = "queued",
            "Requests of a model that waited for a worker with room to prefill, by outcome";
        queue_pending: Family<ModelLabel, Gauge> = "queue_pending_requests",
            "Requests of a model that wait for a worker with room to prefill";
        queue_pending_tokens: Family<ModelLabel, Gauge> = "queue_pending_isl_tokens",
            "Prompt tokens of the requests that wait for a worker with room to prefill";
        pub load_expired: Counter = "load_expired",
            "Reservations freed as leaked, without activity for --active-request-expiry";
        workers: Family<ModelLabel, Gauge> = "router_workers", "Registered workers";
        busy_workers: Family<ModelLabel, Gauge> = "router_busy_workers",
            "Workers above a threshold";
        draining_workers: Family<ModelLabel, Gauge> = "router_draining_workers",
            "Workers that take no new requests (PATCH /workers/{id})";
        reservations: Family<ModelLabel, Gauge> = "router_reservations",
            "Active reservations";
        worker_active_blocks: Family<WorkerLabel, Gauge> = "worker_active_blocks",
            "Distinct blocks of active requests";
        worker_active_prefill: Family<WorkerLabel, Gauge> = "worker_active_prefill_tokens",
            "Prompt tokens still to be prefilled";
        worker_active_requests: Family<WorkerLabel, Gauge> = "worker_active_requests",
            "Active requests";
        worker_prefill_rate: Family<WorkerLabel, Gauge> = "worker_prefill_tokens_per_second",
            "Measured prefill speed in prompt tokens per second (--router-prefill-tokens-per-second)";
    }
}

impl RouterMetrics {
    /// Updates the families of current values.
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
                (&self.draining_workers, pool.selector.draining.all().len()),
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
    }

    /// Requests that wait for a worker with room to prefill, and outcomes of earlier ones.
    fn tell_queue(&self, label: &ModelLabel, stats: &QueueStats) {
        self.queue_pending.get_or_create(label).set(stats.pending as i64);
        self.queue_pending_tokens.get_or_create(label).set(stats.pending_isl_tokens as i64);
        let ModelLabel { model, tenant } = label;
        for (outcome, count) in stats.outcomes() {
            let label = QueueLabel { model: model.clone(), tenant: tenant.clone(), outcome };
            self.queued.get_or_create(&label).inc_by(count);
        }
    }

    /// Clears families that are rebuilt at each scrape, so that departed workers leave no labels
    /// behind.
    fn clear(&self) {
        let Self { queue_pending, queue_pending_tokens, queued, .. } = self;
        [queue_pending, queue_pending_tokens].into_iter().for_each(Family::clear);
        queued.clear();
        let Self { workers, busy_workers, draining_workers, reservations, .. } = self;
        [workers, busy_workers, draining_workers, reservations].into_iter().for_each(Family::clear);
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

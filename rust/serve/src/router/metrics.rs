//! The router's metrics besides the common ones.

use std::fmt;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::fleet::Fleet;
use crate::metrics::{OutcomeLabel, metrics, seconds_histogram};
use crate::page::{Page, and, column, of_model};

metrics! {
    #[derive(Debug, Clone)]
    pub(super) struct RouterMetrics {
        @stages "prompt_tokens",
            "Prompt tokens of reservations by stage: all, cached at the best worker, cached at the chosen worker":
            pub input, pub available, pub selected;
        pub selections: Family<OutcomeLabel, Counter> = "router_selections",
            "Requests for a worker, by outcome; only reservations are booked";
        pub queue_seconds: Histogram = "queue_wait_seconds",
            "Time that reservations took, refused ones included (--router-queue-threshold)",
            seconds_histogram();
        pub load_expired: Counter = "load_expired",
            "Reservations freed as leaked, without activity for --active-request-expiry";
    }
}

/// Writes what a scrape reads from the workers.
pub(super) fn write_fleet(fleet: &Fleet, page: &mut Page<'_>) -> fmt::Result {
    let pools: Vec<_> = fleet.pools().into_iter().map(|pool| (of_model(&pool.key), pool)).collect();
    let workers = column(&pools, |pool| pool.members().all().count());
    page.gauges("router_workers", "Registered workers", workers)?;
    let busy = column(&pools, |pool| pool.selector.busy.busy(pool.selector.loads()).len());
    page.gauges("router_busy_workers", "Workers above a threshold", busy)?;
    let draining = column(&pools, |pool| pool.selector.draining.all().len());
    let help = "Workers that take no new requests (PATCH /workers/{id})";
    page.gauges("router_draining_workers", help, draining)?;
    let reserved = column(&pools, |pool| pool.selector.reserved());
    page.gauges("router_reservations", "Active reservations", reserved)?;
    let loads = pools.iter().flat_map(|(of, pool)| {
        pool.selector.loads().into_iter().map(move |load| (and(of, "worker", load.worker), load))
    });
    page.loads(&loads.collect::<Vec<_>>())?;
    let queues =
        pools.iter().filter_map(|(of, pool)| Some((of.clone(), pool.queue.as_ref()?.stats())));
    page.queues(queues)
}

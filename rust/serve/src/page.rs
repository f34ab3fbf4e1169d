//! Metrics that are read when a scrape comes, so that workers that have left leave no series behind.

use std::borrow::Cow;
use std::fmt::{self, Display};

use kvflash_core::catalog::{Catalog, ModelKey};
use kvflash_core::index::IndexStats;
use kvflash_core::load::WorkerLoad;
use kvflash_core::select::QueueStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// The labels of a row; without any, it is the metric's only one.
pub(crate) type Labels = Vec<(Cow<'static, str>, String)>;

static UNITS: [(&str, Unit); 2] = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)];

/// A name without its unit, and the unit, if it ends in one.
pub(crate) fn split_unit(name: &str) -> (&str, Option<&'static Unit>) {
    let split = UNITS.iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, Some(unit))));
    split.unwrap_or((name, None))
}

/// Calls a function for the metrics of each scrape.
pub(crate) struct Pages<F>(pub F);

impl<F> fmt::Debug for Pages<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pages")
    }
}

impl<F: Fn(&mut Page<'_>) -> fmt::Result + Send + Sync + 'static> Collector for Pages<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut Page(encoder))
    }
}

/// Writes one metric after the other. A name ends in its unit; a metric without rows is left out.
pub(crate) struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    pub fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        self.gauges(name, help, [(Labels::new(), value)])
    }

    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        value: impl EncodeCounterValue,
    ) -> fmt::Result {
        self.counters(name, help, [(Labels::new(), value)])
    }

    pub fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        self.rows(MetricType::Gauge, name, help, rows, |row, value| row.encode_gauge(value))
    }

    pub fn counters<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        self.rows(MetricType::Counter, name, help, rows, |row, value| {
            row.encode_counter::<NoLabelSet, V, f64>(value, None)
        })
    }

    fn rows<V>(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Labels, V)>,
        write: impl Fn(&mut MetricEncoder<'_>, &V) -> fmt::Result,
    ) -> fmt::Result {
        let mut rows = rows.into_iter().peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        let (name, unit) = split_unit(name);
        // As a registry ends the help of its own metrics.
        let mut metric = self.0.encode_descriptor(name, &format!("{help}."), unit, kind)?;
        for (labels, value) in rows {
            match labels.is_empty() {
                true => write(&mut metric, &value)?,
                false => write(&mut metric.encode_family(&labels)?, &value)?,
            }
        }
        Ok(())
    }

    /// What `GET /ready` and `GET /health` answer, for alerts.
    pub fn state(&mut self, is_ready: bool, warnings: usize) -> fmt::Result {
        let help = "1 = GET /ready answers 200: requests are accepted";
        self.gauge("ready", help, u32::from(is_ready))?;
        self.gauge("health_warnings", "Warnings in GET /health", warnings as u64)
    }

    /// What all services tell of their indexes; returns it for what only some tell.
    pub fn indexes(&mut self, catalog: &Catalog) -> Result<Vec<(Labels, IndexStats)>, fmt::Error> {
        let models = catalog.models();
        let models: Vec<_> =
            models.iter().map(|model| (of_model(&model.key), model.index.stats())).collect();
        let held = column(&models, |stats| stats.memberships);
        self.gauges("index_blocks", "Blocks held, one per worker and tier that holds it", held)?;
        let unique = column(&models, |stats| stats.unique_blocks);
        self.gauges("index_unique_blocks", "Different blocks held by any worker", unique)?;
        self.gauges("index_bytes", "Memory of the index", column(&models, |stats| stats.bytes))?;
        self.counters(
            "index_evicted_blocks",
            "Blocks that the index dropped at a limit, although their workers may still hold them",
            column(&models, |stats| stats.evicted_blocks_total),
        )?;
        Ok(models)
    }

    /// What is booked at each worker.
    pub fn loads(&mut self, loads: &[(Labels, WorkerLoad)]) -> fmt::Result {
        self.gauges(
            "worker_active_blocks",
            "Blocks of requests in flight, shared ones counted once",
            column(loads, |load| load.active.blocks),
        )?;
        self.gauges(
            "worker_active_prefill_tokens",
            "Prompt tokens still to be prefilled, as booked here",
            column(loads, |load| load.active.prefill_tokens),
        )?;
        self.gauges(
            "worker_active_requests",
            "Requests in flight, as booked here",
            column(loads, |load| load.active.requests),
        )?;
        self.gauges(
            "worker_prefill_tokens_per_second",
            "Measured prefill speed in prompt tokens per second (--router-prefill-tokens-per-second)",
            loads.iter().filter_map(|(of, load)| Some((of.clone(), load.prefill_tokens_per_s? as i64))),
        )
    }

    /// Queues for a worker with room to prefill, each with labels of its own: a sum would fall when
    /// one of them ends.
    pub fn queues(&mut self, queues: impl Iterator<Item = (Labels, QueueStats)>) -> fmt::Result {
        let queues: Vec<_> = queues.collect();
        self.gauges(
            "queue_pending_requests",
            "Requests of a model that wait for a worker with room to prefill",
            column(&queues, |stats| stats.pending),
        )?;
        self.gauges(
            "queue_pending_isl_tokens",
            "Prompt tokens of the requests that wait for a worker with room to prefill",
            column(&queues, |stats| stats.pending_isl_tokens),
        )?;
        let outcomes = queues.iter().flat_map(|(labels, stats)| {
            stats.outcomes().map(|(outcome, count)| (and(labels, "outcome", outcome), count))
        });
        let help = "Requests of a model that waited for a worker with room to prefill, by outcome";
        self.counters("queued", help, outcomes)
    }
}

/// One figure of all rows.
pub(crate) fn column<T, V>(
    rows: &[(Labels, T)],
    figure: impl Fn(&T) -> V,
) -> impl Iterator<Item = (Labels, V)> {
    rows.iter().map(move |(labels, row)| (labels.clone(), figure(row)))
}

pub(crate) fn label(key: &'static str, value: impl Display) -> Labels {
    and(&[], key, value)
}

pub(crate) fn of_model(key: &ModelKey) -> Labels {
    and(&label("model", &key.model_name), "tenant", &key.tenant_id)
}

/// A label's value for the text format, which the encoder writes as it is.
pub(crate) fn escaped(value: impl Display) -> String {
    value.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The labels, and one more.
pub(crate) fn and(
    labels: &[(Cow<'static, str>, String)],
    key: &'static str,
    value: impl Display,
) -> Labels {
    labels.iter().cloned().chain([(Cow::Borrowed(key), escaped(value))]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_labels_end_no_line_and_no_value() {
        assert_eq!(and(&[], "model", "a\"b\\c\nd"), [("model".into(), "a\\\"b\\\\c\\nd".into())]);
    }
}

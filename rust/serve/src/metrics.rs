//! Metrics in the Prometheus text format: the response, and values read from the catalog.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use kvflash_core::catalog::Catalog;
use kvflash_core::error::{Error, Result};
use kvflash_core::select::{Journal, JournalStats};
use parking_lot::RwLock;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Maximum length of a prefix.
const MAX_PREFIX_BYTES: usize = 64;

/// Label of what is counted by kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub kind: &'static str,
}

/// Label of per-model metrics.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ModelLabel {
    pub model: String,
    pub tenant: String,
}

/// Label of HTTP metrics. Paths are the routes of the API, never a client's input.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLabel {
    pub endpoint: Cow<'static, str>,
    pub status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabel {
    pub outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CauseLabel {
    pub cause: &'static str,
}

/// Default prefix of metric names.
pub(super) const PREFIX: &str = "kvflash";

/// Label of counters of prompt tokens, one per stage.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct StageLabel {
    pub stage: &'static str,
}

/// Defines a struct of metrics with a function that registers them. Each is declared once: `field:
/// type = "name", "help";`, with its unit in brackets before the help, and with a constructor if it
/// has no default. `@stages "name", "help": fields` are counters of one metric, labelled by field
/// name.
macro_rules! metrics {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(@stages $stages:literal, $about:literal: $($stage_vis:vis $stage:ident),+;)?
            $($(#[$doc:meta])* $field_vis:vis $field:ident: $kind:ty
                = $metric:literal, $([$unit:ident])? $help:literal $(, $new:expr)?;)+
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[doc = $about] $stage_vis $stage: Counter,)+)?
            $($(#[$doc])* #[doc = $help] $field_vis $field: $kind,)+
        }

        impl $name {
            $vis fn register(registry: &mut Registry) -> Self {
                $(let stages = Family::<$crate::metrics::StageLabel, Counter>::default();
                registry.register($stages, $about, stages.clone());)?
                $(let $field: $kind = $crate::metrics::metrics!(@new $($new)?);
                $crate::metrics::metrics!(@register registry, $metric, $help, $field $(, $unit)?);)+
                Self {
                    $($($stage: {
                        let stage = stringify!($stage);
                        stages.get_or_create_owned(&$crate::metrics::StageLabel { stage })
                    },)+)?
                    $($field,)+
                }
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
    (@register $registry:ident, $metric:literal, $help:literal, $field:ident) => {
        $registry.register($metric, $help, $field.clone())
    };
    (@register $registry:ident, $metric:literal, $help:literal, $field:ident, $unit:ident) => {
        $registry.register_with_unit($metric, $help, Unit::$unit, $field.clone())
    };
}
pub(super) use metrics;

metrics! {
    /// Metrics of requests, events and indexes.
    pub(super) struct CommonFigures {
        pub requests: Family<RequestLabel, Counter> = "requests", "HTTP requests answered";
        pub request_seconds: Histogram = "request_duration",
            [Seconds] "Time from a request's head to its answer's head", seconds_histogram();
        events: Family<KindLabel, Gauge> = "events",
            "Engine events of all publishers since the start, by kind";
        blocks: Family<ModelLabel, Gauge> = "index_blocks",
            "Blocks held, one per worker and tier that holds it";
        unique_blocks: Family<ModelLabel, Gauge> = "index_unique_blocks",
            "Different blocks held by any worker";
        index_bytes: Family<ModelLabel, Gauge> = "index", [Bytes] "Memory of the index";
        evicted_blocks: Family<ModelLabel, Counter> = "index_evicted_blocks",
            "Blocks that the index dropped at a limit, although their workers may still hold them";
        predicted_blocks: Family<ModelLabel, Gauge> = "index_predicted_blocks",
            "Blocks that workers are predicted to hold soon";
        workers: Family<ModelLabel, Gauge> = "index_workers", "Workers with indexed blocks";
        journal_bytes: Gauge = "decision_journal", [Bytes] "Memory of past decisions";
        journal_records: Gauge = "decision_journal_records", "Past decisions in memory";
        journal_dropped: Counter = "decision_journal_dropped",
            "Past decisions dropped for newer ones";
    }
}

/// The metrics of every service, and the responses to scrapes.
pub(super) struct CommonMetrics {
    registry: Mutex<Registry>,
    /// Held by the scrape in progress.
    turn: tokio::sync::Mutex<()>,
    figures: CommonFigures,
    /// Metrics of other parts, as lines of the text format.
    pub more: RwLock<String>,
}

impl Deref for CommonMetrics {
    type Target = CommonFigures;

    fn deref(&self) -> &CommonFigures {
        &self.figures
    }
}

/// 50 us to 100 s, three steps per decade.
pub(super) fn seconds_histogram() -> Histogram {
    let steps = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5];
    Histogram::new(steps.into_iter().chain([1.0, 2.0, 5.0, 10.0, 30.0, 100.0]))
}

impl CommonMetrics {
    pub fn new() -> (Self, Registry) {
        let mut registry = Registry::with_prefix(PREFIX);
        let figures = CommonFigures::register(&mut registry);
        let (registry_kept, turn, more) = Default::default();
        let metrics = Self { registry: registry_kept, turn, figures, more };
        (metrics, registry)
    }

    /// Sets the registry, once everything is registered.
    pub fn seal(&self, registry: Registry) {
        *self.registry.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = registry;
    }

    /// The exposition text, with names that begin with `prefix`: registered metrics, families
    /// updated now by `refill`, the values of the catalog and of the `journal`, and those of other
    /// parts.
    ///
    /// # Consistency
    /// Scrapes are serialized, so none sees families that another one has cleared and not yet
    /// filled.
    ///
    /// # Cost
    /// Thousands of workers take tens of milliseconds: other connections continue meanwhile.
    pub async fn expose_with(
        &self,
        catalog: &Catalog,
        journal: &Journal,
        prefix: &str,
        refill: impl FnOnce(),
    ) -> Response {
        let _turn = self.turn.lock().await;
        super::aside::block_in_place(|| {
            refill();
            self.read(catalog, &journal.stats());
            let registry = self.registry.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            exposition_with(&registry, &self.more.read(), prefix)
        })
    }

    fn read(&self, catalog: &Catalog, journal: &JournalStats) {
        self.journal_records.set(journal.records as i64);
        self.journal_bytes.set(journal.bytes as i64);
        self.journal_dropped.inner().store(journal.dropped_total, Ordering::Relaxed);
        for (kind, value) in catalog.event_counts().entries() {
            self.events.get_or_create(&KindLabel { kind }).set(value as i64);
        }
        // Rebuilt at each scrape, so that a removed index leaves no labels behind.
        let of_models = [
            &self.blocks,
            &self.unique_blocks,
            &self.index_bytes,
            &self.predicted_blocks,
            &self.workers,
        ];
        of_models.into_iter().for_each(|family| family.clear());
        self.evicted_blocks.clear();
        for model in catalog.models() {
            let label = ModelLabel {
                model: escape(&model.key.model_name),
                tenant: escape(&model.key.tenant_id),
            };
            let stats = model.index.stats();
            self.blocks.get_or_create(&label).set(stats.memberships as i64);
            self.unique_blocks.get_or_create(&label).set(stats.unique_blocks as i64);
            self.index_bytes.get_or_create(&label).set(stats.bytes as i64);
            // The index counts; the scrape reads its current count.
            let evicted = self.evicted_blocks.get_or_create(&label);
            evicted.inner().store(stats.evicted_blocks_total, Ordering::Relaxed);
            self.predicted_blocks.get_or_create(&label).set(stats.predicted as i64);
            self.workers.get_or_create(&label).set(stats.workers as i64);
        }
    }
}

/// A registry as the response to a scrape; its names begin with `prefix`.
pub(super) fn exposition(registry: &Registry, prefix: &str) -> Response {
    exposition_with(registry, "", prefix)
}

fn exposition_with(registry: &Registry, more: &str, prefix: &str) -> Response {
    let mut text = String::with_capacity(16 * 1024);
    // Writing to a String cannot fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, registry);
    // Its last line must stay the last.
    let end = text.rfind("# EOF").unwrap_or(text.len());
    text.insert_str(end, more);
    let text = if prefix == PREFIX { text } else { renamed(&text, prefix) };
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

/// An exposition with its names changed to begin with `prefix`.
fn renamed(text: &str, prefix: &str) -> String {
    let mut renamed = String::with_capacity(text.len());
    for line in text.lines() {
        let heads = ["# HELP ", "# TYPE ", "# UNIT ", ""];
        let head = heads.into_iter().find(|head| line.starts_with(head)).unwrap_or_default();
        renamed.push_str(head);
        match line[head.len()..].strip_prefix(PREFIX) {
            Some(rest) if rest.starts_with('_') => {
                renamed.push_str(prefix);
                renamed.push_str(rest);
            }
            _ => renamed.push_str(&line[head.len()..]),
        }
        renamed.push('\n');
    }
    renamed
}

/// Checks the prefix of metric names.
///
/// # Errors
/// `Config`, with what is legal.
pub(super) fn check_prefix(prefix: &str) -> Result<()> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = |c: char| c.is_ascii_alphabetic() || c == '_';
    if prefix.len() <= MAX_PREFIX_BYTES && prefix.starts_with(begins) && prefix.chars().all(is_word)
    {
        return Ok(());
    }
    Err(Error::Config(format!(
        "--metrics-prefix must be 1 to {MAX_PREFIX_BYTES} letters, digits and underscores and must not begin \
         with a digit, got {prefix:?}"
    )))
}

/// Escapes a label's value for the text format; the encoder does not.
pub(super) fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_as_asked_and_nothing_else_changes() {
        let text = "# HELP kvflash_a kvflash_a of kvflash.\n# TYPE kvflash_a counter\n\
                    # UNIT kvflash_b_seconds seconds\nkvflash_a_total{model=\"kvflash_x\"} 1\n\
                    kvflashy_total 2\n# EOF\n";
        let expected = "# HELP mine_a kvflash_a of kvflash.\n# TYPE mine_a counter\n\
                        # UNIT mine_b_seconds seconds\nmine_a_total{model=\"kvflash_x\"} 1\n\
                        kvflashy_total 2\n# EOF\n";
        assert_eq!(renamed(text, "mine"), expected);
        for legal in ["a", "_a1", "dynamo_frontend"] {
            check_prefix(legal).unwrap();
        }
        for wrong in ["", "1a", "a-b", "a b", &"a".repeat(65)] {
            let error = check_prefix(wrong).unwrap_err().to_string();
            assert!(error.contains("--metrics-prefix"), "{error}");
        }
    }
}

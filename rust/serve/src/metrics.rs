//! Metrics in the Prometheus text format: the response, and values read from the catalog.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use kvflash_core::catalog::Catalog;
use kvflash_core::error::{Error, Result};
use kvflash_core::select::Journal;
use parking_lot::RwLock;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use super::page::{Page, Pages, column, label, split_unit};

/// Maximum length of a prefix.
const MAX_PREFIX_BYTES: usize = 64;

/// Label of what is counted by kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub kind: &'static str,
}

/// Label of HTTP metrics. Paths are the routes of the API, never a client's input.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    endpoint: Cow<'static, str>,
    status: u16,
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

/// Registers a metric, whose name ends in its unit.
pub(crate) fn add<M: Metric + Clone>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    metric: M,
) -> M {
    match split_unit(name) {
        (name, None) => registry.register(name, help, metric.clone()),
        (name, Some(unit)) => registry.register_with_unit(name, help, unit.clone(), metric.clone()),
    }
    metric
}

/// Defines a struct of metrics with a function that registers them. Each is declared once: `field:
/// type = "name", "help";`, with a constructor if it has no default. `@stages "name", "help":
/// fields` are counters of one metric, labelled by field name.
macro_rules! metrics {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(@stages $stages:literal, $about:literal: $($stage_vis:vis $stage:ident),+;)?
            $($(#[$doc:meta])* $field_vis:vis $field:ident: $kind:ty
                = $metric:literal, $help:literal $(, $new:expr)?;)+
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[doc = $about] $stage_vis $stage: Counter,)+)?
            $($(#[$doc])* #[doc = $help] $field_vis $field: $kind,)+
        }

        impl $name {
            $vis fn register(registry: &mut Registry) -> Self {
                use $crate::metrics::{self as of, add};
                $(let stages = Family::<of::StageLabel, Counter>::default();
                let stages = add(registry, $stages, $about, stages);)?
                Self {
                    $($($stage: stages
                        .get_or_create_owned(&of::StageLabel { stage: stringify!($stage) }),)+)?
                    $($field: add(registry, $metric, $help, of::metrics!(@new $($new)?)),)+
                }
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
}
pub(super) use metrics;

metrics! {
    /// Metrics of requests.
    struct CommonFigures {
        requests: Family<RequestLabel, Counter> = "requests", "HTTP requests answered";
        request_seconds: Histogram = "request_duration_seconds",
            "Time from a request's head to its answer's head", seconds_histogram();
    }
}

/// The metrics of a frontend and a router, and the responses to scrapes.
pub(super) struct CommonMetrics {
    registry: Registry,
    /// Held by the scrape in progress.
    turn: tokio::sync::Mutex<()>,
    figures: CommonFigures,
    /// Metrics of other parts, as lines of the text format.
    pub more: RwLock<String>,
}

/// 50 us to 100 s, three steps per decade.
pub(super) fn seconds_histogram() -> Histogram {
    let steps = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5];
    Histogram::new(steps.into_iter().chain([1.0, 2.0, 5.0, 10.0, 30.0, 100.0]))
}

/// A registry for the metrics of a frontend or a router.
pub(super) fn new_registry() -> Registry {
    Registry::with_prefix(PREFIX)
}

impl CommonMetrics {
    /// `registry` has everything else.
    pub fn new(mut registry: Registry) -> Self {
        let (turn, more) = Default::default();
        Self { figures: CommonFigures::register(&mut registry), registry, turn, more }
    }

    /// Counts a request that was answered.
    pub fn count(&self, endpoint: Cow<'static, str>, response: &Response, started: Instant) {
        let label = RequestLabel { endpoint, status: response.status().as_u16() };
        self.figures.requests.get_or_create(&label).inc();
        self.figures.request_seconds.observe(started.elapsed().as_secs_f64());
    }

    /// The exposition text, with names that begin with `prefix`: registered metrics, those that
    /// `read` reads now, those of indexes, events and past decisions, and those of other parts.
    ///
    /// # Cost
    /// Thousands of workers take tens of milliseconds: other connections continue meanwhile.
    pub async fn expose(
        &self,
        catalog: &Arc<Catalog>,
        journal: &Arc<Journal>,
        prefix: &str,
        read: impl Fn(&mut Page<'_>) -> fmt::Result + Send + Sync + 'static,
    ) -> Response {
        let _turn = self.turn.lock().await;
        let (catalog, journal) = (Arc::clone(catalog), Arc::clone(journal));
        let mut now = new_registry();
        now.register_collector(Box::new(Pages(move |page: &mut Page<'_>| {
            read(page)?;
            read_common(page, &catalog, &journal)
        })));
        let registries = [&self.registry, &now];
        super::aside::block_in_place(|| exposition(registries, &self.more.read(), prefix))
    }
}

fn read_common(page: &mut Page<'_>, catalog: &Catalog, journal: &Journal) -> fmt::Result {
    let events = catalog.event_counts();
    let events = events.entries().map(|(kind, value)| (label("kind", kind), value));
    page.gauges("events", "Engine events of all publishers since the start, by kind", events)?;
    let models = page.indexes(catalog)?;
    let predicted = column(&models, |stats| stats.predicted);
    let help = "Blocks that workers are predicted to hold soon";
    page.gauges("index_predicted_blocks", help, predicted)?;
    let workers = column(&models, |stats| stats.workers);
    page.gauges("index_workers", "Workers with indexed blocks", workers)?;
    let journal = journal.stats();
    page.gauge("decision_journal_bytes", "Memory of past decisions", journal.bytes)?;
    page.gauge("decision_journal_records", "Past decisions in memory", journal.records)?;
    let help = "Past decisions dropped for newer ones";
    page.counter("decision_journal_dropped", help, journal.dropped_total)
}

/// Registries and further lines as the response to a scrape; the names begin with `prefix`.
pub(super) fn exposition<'a>(
    registries: impl IntoIterator<Item = &'a Registry>,
    more: &str,
    prefix: &str,
) -> Response {
    let mut text = String::with_capacity(16 * 1024);
    // Writing to a String cannot fail.
    for registry in registries {
        let _ = encode_registry(&mut text, registry);
    }
    text.push_str(more);
    let _ = encode_eof(&mut text);
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

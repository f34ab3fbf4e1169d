//! Worker selection for Python: one component's workers, their index and their load.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvflash_core::catalog::{self, ModelKey, dump_events};
use kvflash_core::clock::{Clock, SystemClock};
use kvflash_core::error::Error;
use kvflash_core::fleet::Hearing;
use kvflash_core::hash;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::{EngineMetrics, Sample};
use kvflash_core::select::{
    Ask, Overlap, Queue, QueueOptions, Request, Selector, StartGate, Thresholds, Usage,
};
use kvflash_serve::{FoundWorkers, RoutingOptions};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use super::bookings::Bookings;
use super::buffer::tokens;
use super::catalog::Catalog;
use super::decider::{Decider, Decisions, Desk, Selected, selected};
use super::error::{Fault, Raised, released};
use super::policy_desk::PolicyDesk;
use super::query::{SHORT_TOKENS, detached};
use super::router_ask::Options;
use super::select::routing;
use super::settings::{finish, given};

/// One component's workers, for its event loop.
struct Component {
    selector: Arc<Selector>,
    queue: Option<Arc<Queue>>,
    start: StartGate,
}

impl Component {
    /// Whether requests are accepted: once enough workers have been present at the same time.
    fn started(&self) -> Result<(), Error> {
        self.start.check(|| {
            let ids: HashSet<_> =
                self.selector.loads().into_iter().map(|load| load.worker.instance_id).collect();
            ids.len()
        })
    }
}

impl Decisions for Component {
    fn find(&self, _model: Option<&str>, _pinned: Option<u64>) -> Result<Desk, Error> {
        self.started()?;
        Ok(Desk { selector: Arc::clone(&self.selector), queue: self.queue.clone() })
    }

    fn is_slow(&self) -> bool {
        self.selector.desk().is_some()
    }
}

/// Chooses workers for prompts, and tracks the load of each worker.
///
/// The core of :class:`kvflash.routing.KvPushRouter`; it opens no sockets. Several may live in one
/// process. ``options`` of a call is a dict with any of ``overlap_score_weight``,
/// ``overlap_score_credit``, ``prefill_load_scale``, ``router_temperature``, ``assume_kv_reuse``,
/// ``worker_id``, ``dp_rank``, ``allowed_worker_ids``, ``lora_name``, ``lora_path``,
/// ``cache_salt``, ``mm`` and ``embeds`` (as for compute_block_hash_for_seq), ``user``, ``prompt``
/// (its text, for policies), ``session_key`` and ``session_worker`` (id and rank), ``priority``,
/// ``strict_priority``, ``expected_output_tokens``; ``None`` is the same as absent, an unknown name
/// is refused.
///
/// Raises:
///     ConfigError: A setting out of range, or an unknown policy, by name.
///     InvalidArgumentError: A block size of 0, or a threshold out of range, by name.
///
/// Cost: O(tokens) to hash, O(blocks + workers) to decide; microseconds. Prompts of more than 8,192
/// tokens release the GIL, and so does every call that asks a policy in Python, which waits at most
/// for that policy's deadline.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterCore {
    catalog: Arc<catalog::Catalog>,
    clock: Arc<SystemClock>,
    selector: Arc<Selector>,
    workers: FoundWorkers,
    /// Tokens in a block.
    #[pyo3(get)]
    block_size: u32,
    /// Whether events can change a decision: they are on, and overlap has a weight.
    #[pyo3(get)]
    uses_events: bool,
    component: Arc<Component>,
}

impl RouterCore {
    /// As [`asked`](Self::asked), for a choice: a policy in Python is asked first.
    fn chosen<T: Send>(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        then: impl FnOnce(&Ask<'_>) -> Result<T, Error> + Send,
    ) -> Raised<T> {
        self.component.started()?;
        self.asked(py, token_ids, options, |request| {
            let advice = request.ask(None, None, |ask| self.selector.advice(ask));
            request.ask(None, advice.as_ref(), then)
        })
    }

    /// Hash the prompt and call `then` with the request, without the GIL if that pays off or a
    /// policy in Python may be asked.
    fn asked<T: Send>(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        then: impl FnOnce(&Request) -> Result<T, Error> + Send,
    ) -> Raised<T> {
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let options = Options::of(options)?;
        let is_long = ids.len() > SHORT_TOKENS || self.selector.desk().is_some();
        Ok(detached(py, is_long, || then(&options.request(&self.selector, ids, None)))?)
    }
}

#[pymethods]
impl RouterCore {
    #[new]
    #[pyo3(signature = (
        *, block_size, policy_desk=None, model_name="default", tenant_id="default",
        max_requests=65_536, **settings
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        block_size: u32,
        policy_desk: Option<Py<PolicyDesk>>,
        model_name: &str,
        tenant_id: &str,
        max_requests: usize,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Self> {
        let mut given = given(settings)?;
        let (options, limits) = routing(&mut given, policy_desk.as_ref())?;
        finish(given)?;
        let RoutingOptions { selector: mut config, policies, queue, .. } = options;
        let block_size = hash::check_block_size(block_size)?;
        let load = &mut config.router.load;
        (load.block_size, load.max_requests) = (block_size, max_requests);
        let uses_events = config.overlap != Overlap::Predictions && config.router.weighs_overlap();
        let clock = Arc::new(SystemClock::default());
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        let key = ModelKey { model_name: model_name.to_owned(), tenant_id: tenant_id.to_owned() };
        let model = catalog.model_or_create(&key, Some(block_size))?;
        let selector = Selector::with_policies(config, policies, model, clock.clone())?;
        let selector = Arc::new(selector);
        queue.as_ref().map_or(Ok(()), QueueOptions::check)?;
        let component = Component {
            queue: queue.map(|options| {
                let clock: Arc<dyn Clock> = clock.clone();
                Queue::serving(&options, &selector, &clock)
            }),
            selector: Arc::clone(&selector),
            start: StartGate::new(options.min_initial_workers, "be there", "min_initial_workers"),
        };
        let component = Arc::new(component);
        let hearing = if uses_events { Hearing::All } else { Hearing::Nothing };
        let workers =
            FoundWorkers::of_selector(Arc::clone(&catalog), Arc::clone(&selector), hearing);
        Ok(Self { catalog, clock, selector, workers, block_size, uses_events, component })
    }

    /// The catalog of its models, engines and their blocks; the transport reads its orders and
    /// delivers frames here.
    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    /// The bookings shared with replicas.
    #[getter]
    fn bookings(&self) -> Bookings {
        let selector = Arc::clone(&self.selector);
        let outbox = Arc::clone(selector.outbox());
        Bookings::new(outbox, Box::new(move || vec![Arc::clone(&selector)]))
    }

    /// The name of the routing policy.
    #[getter]
    fn policy(&self) -> &str {
        self.selector.policy_name()
    }

    /// Counters of policies and shadow policies: name, label, label value, value.
    ///
    /// Names lack the program's prefix; those of counters end in ``_total``.
    fn policy_samples(&self) -> Vec<(String, String, String, f64)> {
        let mut samples = Vec::new();
        let mut note = |sample: Sample<'_>| {
            let (label, value) = sample.label;
            let entry = (sample.name.into(), label.into(), value.into(), sample.value);
            samples.push(entry);
        };
        self.selector.policies().samples(self.selector.now_ms(), &mut note);
        samples
    }

    /// Whether the first replay of every subscription is over, or can't come.
    #[getter]
    fn is_caught_up(&self, py: Python<'_>) -> bool {
        py.detach(|| self.catalog.is_caught_up())
    }

    /// Add or change a worker of discovery; it counts as one of this model, whatever its card says.
    ///
    /// Args:
    ///     worker: As :meth:`Router.put_worker` takes it. A worker with another number of ranks is a
    ///         new one. Ranks whose events can't be subscribed to are logged, and take requests.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault.
    ///     OverloadedError: More than 65,535 ranks.
    fn put_worker(&self, py: Python<'_>, worker: &str) -> Raised<InstanceId> {
        released(py, || self.workers.put(worker))
    }

    /// As :meth:`Frontend.set_worker_state`; requests pinned to a draining one go elsewhere.
    fn set_worker_state(&self, py: Python<'_>, instance_id: InstanceId, state: &str) -> Raised<()> {
        released(py, || self.workers.set_state(instance_id, state))
    }

    /// Remove a worker, its blocks and its requests; NotFoundError for an unknown one.
    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> Raised<()> {
        released(py, || self.workers.remove(instance_id))
    }

    /// Record what an engine reports of itself, for policies; omitted figures keep their value.
    ///
    /// Returns:
    ///     Whether the worker is known.
    ///
    /// Raises:
    ///     InvalidArgumentError: An unknown figure, or one out of range, by name.
    fn report_metrics(
        &self,
        worker_id: u64,
        dp_rank: u32,
        metrics: HashMap<String, f64>,
    ) -> Raised<bool> {
        let metrics = EngineMetrics::from_fields(metrics)?;
        let worker = Worker::new(worker_id, dp_rank);
        if self.selector.busy.reported(worker).is_none() {
            return Ok(false);
        }
        self.selector.engines.update(worker, metrics);
        Ok(true)
    }

    /// Set the busy thresholds; ``None`` removes one.
    ///
    /// Raises:
    ///     InvalidArgumentError: A threshold is out of range, by name.
    #[pyo3(signature = (
        *, active_decode_blocks_threshold, active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac
    ))]
    fn set_busy_thresholds(
        &self,
        active_decode_blocks_threshold: Option<f64>,
        active_prefill_tokens_threshold: Option<u64>,
        active_prefill_tokens_threshold_frac: Option<f64>,
    ) -> Raised<()> {
        let thresholds = Thresholds {
            active_decode_blocks: active_decode_blocks_threshold,
            active_prefill_tokens: active_prefill_tokens_threshold,
            active_prefill_tokens_frac: active_prefill_tokens_threshold_frac,
        };
        Ok(self.selector.busy.set_thresholds(thresholds)?)
    }

    /// The worker that would be selected now, with a new draw where chance decides; books nothing.
    ///
    /// Returns:
    ///     Instance, rank, overlap in blocks, and the seed of the draw: passed as the option
    ///         ``seed`` it repeats the choice.
    ///
    /// Raises:
    ///     NoWorkerError: No worker is registered or allowed, or the pinned one is gone.
    ///     AllBusyError: All of these are busy.
    ///     InvalidArgumentError: An empty prompt, or an invalid option.
    #[pyo3(signature = (token_ids, options=None))]
    fn query(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Selected> {
        let selection = self.chosen(py, token_ids, options, |ask| self.selector.query(ask))?;
        Ok(selected(&selection))
    }

    /// As :meth:`query`, and book it under ``request_id`` until :meth:`free`.
    ///
    /// Raises:
    ///     ConflictError: A request of that name is active.
    ///     OverloadedError: ``max_requests`` are active.
    #[pyo3(signature = (token_ids, request_id, options=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        request_id: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Selected> {
        let reserve = |ask: &Ask<'_>| self.selector.reserve(request_id, ask);
        Ok(selected(&self.chosen(py, token_ids, options, reserve)?))
    }

    /// A booker for an event loop; creates a new object.
    #[getter]
    fn decider(&self) -> Raised<Decider> {
        Ok(Decider::new(self.component.clone())?)
    }

    /// Queued requests, ``pending`` and ``pending_isl_tokens``, and outcomes of earlier ones.
    ///
    /// The outcomes are ``placed``, ``refused``, ``expired``, ``failed`` and ``left``, each with
    /// ``_total``.
    fn queue_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.component.queue.as_ref().map(|queue| queue.stats()).unwrap_or_default();
        let pending = [
            ("pending".to_owned(), stats.pending as u64),
            ("pending_isl_tokens".to_owned(), stats.pending_isl_tokens),
        ];
        let outcomes = stats.outcomes().into_iter();
        let outcomes = outcomes.map(|(outcome, count)| (format!("{outcome}_total"), count));
        pending.into_iter().chain(outcomes).into_py_dict(py)
    }

    /// The prompt of a reserved request is prefilled.
    ///
    /// Raises:
    ///     NotFoundError: No request of that name is active.
    fn mark_prefill_complete(&self, request_id: &str) -> Raised<()> {
        Ok(self.selector.mark_prefill_completed(request_id)?)
    }

    /// Record activity of a reserved request. False if it is not active.
    fn touch(&self, request_id: &str) -> bool {
        self.selector.touch(request_id)
    }

    /// End a reserved request. False if it was not active, which is not an error.
    #[pyo3(signature = (request_id, *, input_tokens=None, cached_tokens=None, output_tokens=None))]
    fn free(
        &self,
        request_id: &str,
        input_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        output_tokens: Option<u64>,
    ) -> bool {
        let usage = Usage { input_tokens, cached_tokens, output_tokens }.plausible();
        self.selector.note_used(request_id, usage);
        self.selector.free(request_id)
    }

    /// Each worker's load if it took the prompt; books nothing.
    ///
    /// Returns:
    ///     For each: worker_id, dp_rank, potential_prefill_tokens, potential_decode_blocks,
    ///     active_requests, overlap_blocks.
    #[pyo3(signature = (token_ids, options=None))]
    fn potential_loads<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Vec<Bound<'py, PyDict>>> {
        let loads = self.asked(py, token_ids, options, |request| {
            request.ask(None, None, |ask| self.selector.potential_loads(ask))
        })?;
        let rows = loads.into_iter().map(|load| {
            let row = [
                ("worker_id", load.worker.instance_id),
                ("dp_rank", load.worker.dp_rank.into()),
                ("potential_prefill_tokens", load.prefill_tokens),
                ("potential_decode_blocks", load.decode_blocks),
                ("active_requests", load.active_requests.into()),
                ("overlap_blocks", load.overlap_blocks.into()),
            ];
            row.into_py_dict(py)
        });
        Ok(rows.collect::<PyResult<_>>()?)
    }

    /// The decisions made for a request, and its outcome; a JSON list.
    ///
    /// Raises:
    ///     NotFoundError: No decision of that request is kept.
    fn why(&self, request_id: &str) -> Raised<String> {
        let found = self.selector.journal.find(request_id);
        if found.is_empty() {
            return Err(Fault::from(Error::NotFound(format!(
                "no decision is stored for request {request_id:?}"
            ))));
        }
        let now_ms = self.clock.now_ms();
        let decisions: Vec<_> = found.iter().map(|record| record.whole(now_ms)).collect();
        Ok(serde_json::Value::from(decisions).to_string())
    }

    /// All blocks in the index, as a JSON list of router events.
    fn dump_events(&self, py: Python<'_>) -> String {
        py.detach(|| {
            let events: Vec<String> =
                dump_events(&self.selector.model().index).map(|event| event.to_json()).collect();
            format!("[{}]", events.join(","))
        })
    }

    /// Sums over all workers.
    ///
    /// Returns:
    ///     workers, requests, prefill_tokens, blocks, reserved, predicted_blocks.
    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let totals = self.selector.totals();
        let entries = [
            ("workers", totals.workers as u64),
            ("requests", totals.requests),
            ("prefill_tokens", totals.prefill_tokens),
            ("blocks", totals.blocks),
            ("reserved", self.selector.reserved() as u64),
            ("predicted_blocks", self.selector.model().index.stats().predicted as u64),
        ];
        entries.into_py_dict(py)
    }

    /// Expire old entries. Returns the number of expired bookings. Call it every second.
    fn tick(&self, py: Python<'_>) -> usize {
        py.detach(|| {
            let expired = self.selector.tick();
            if let Some(queue) = &self.component.queue {
                // Prefill progress is estimated over time, so a queued request may fit now.
                queue.call();
            }
            expired
        })
    }
}

//! Selection for Python: one component's workers, their index and their load.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::bookings::Bookings;
use super::catalog::Catalog;
use super::error::{OrRaise, raise};
use super::index;
use super::indexer::seconds;
use super::query::{SHORT_TOKENS, detached};
use super::router_ask::Options;
use super::select::Foresight;
use crate::catalog::{self, Identity, ModelKey, Registration, dump_events};
use crate::clock::{Clock, SystemClock};
use crate::error::Error;
use crate::ids::Worker;
use crate::policy::KvScale;
use crate::router::RouterConfig;
use crate::select::{Ask, Outcome, Report, Reservation, Selector, SelectorConfig, Thresholds};

/// Tenant of a router's own index; the cache salt keeps clients apart.
const TENANT: &str = "default";

/// Chooses workers for prompts, and keeps account of who is busy with what.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterCore {
    catalog: Arc<catalog::Catalog>,
    clock: Arc<SystemClock>,
    selector: Arc<Selector>,
    key: ModelKey,
    block_size: u32,
    uses_events: bool,
}

/// A request that was given to a worker; its load is freed with it at the latest.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterBooking {
    held: Mutex<Option<Reservation>>,
    #[pyo3(get)]
    worker_id: u64,
    #[pyo3(get)]
    dp_rank: u32,
    #[pyo3(get)]
    overlap_blocks: u32,
}

#[pymethods]
impl RouterBooking {
    fn first_token(&self) {
        if let Some(held) = &*self.held.lock() {
            held.first_token();
        }
    }

    fn touch(&self) {
        if let Some(held) = &*self.held.lock() {
            held.touch();
        }
    }

    fn output_block(&self, py: Python<'_>, fraction: f64) -> PyResult<()> {
        let held = self.held.lock();
        held.as_ref().map_or(Ok(()), |held| held.add_output_block(fraction)).or_raise(py)
    }

    fn cached(&self, tokens: u64) {
        if let Some(held) = &*self.held.lock() {
            held.cached(tokens);
        }
    }

    #[pyo3(signature = (*, is_complete=false))]
    fn free(&self, is_complete: bool) {
        if let Some(held) = self.held.lock().take()
            && is_complete
        {
            held.ended(Outcome::Complete);
        }
    }
}

impl RouterCore {
    /// Hash the prompt and call `then` with the question, without the GIL where that pays.
    fn asked<T: Send>(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        then: impl FnOnce(&Ask<'_>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let ids = index::token_ids(token_ids)?;
        let ids: &[u32] = &ids.as_slice();
        let options = Options::of(py, options)?;
        detached(py, ids.len() > SHORT_TOKENS, || {
            let (lora, salt) = (options.lora_name.as_deref(), options.cache_salt.as_deref());
            let prompt = self.selector.prompt(ids, lora, salt);
            then(&options.ask(&prompt, &|worker| options.allows(worker)))
        })
        .or_raise(py)
    }
}

#[pymethods]
impl RouterCore {
    #[new]
    #[pyo3(signature = (
        *, block_size, model_name="default", overlap_score_weight=1.0, temperature=0.0, use_kv_events=true,
        track_active_blocks=true, assume_kv_reuse=true, track_prefill_tokens=true,
        active_request_expiry_s=300.0, predicted_ttl_s=5.0, router_ttl_s=120.0,
        router_max_tree_size=1_048_576, router_prune_target_ratio=0.8,
        active_decode_blocks_threshold=None, active_prefill_tokens_threshold=None,
        active_prefill_tokens_threshold_frac=None, max_requests=65_536, max_blocks=33_554_432,
        index_memory_bytes=0, decision_journal_bytes=16_777_216, seed=None,
        overlap_score_credit=1.0, overlap_score_credit_decay=0.0, prefill_load_scale=1.0,
        active_request_weight=0.0
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        block_size: u32,
        model_name: &str,
        overlap_score_weight: f64,
        temperature: f64,
        use_kv_events: bool,
        track_active_blocks: bool,
        assume_kv_reuse: bool,
        track_prefill_tokens: bool,
        active_request_expiry_s: f64,
        predicted_ttl_s: f64,
        router_ttl_s: f64,
        router_max_tree_size: usize,
        router_prune_target_ratio: f64,
        active_decode_blocks_threshold: Option<f64>,
        active_prefill_tokens_threshold: Option<u64>,
        active_prefill_tokens_threshold_frac: Option<f64>,
        max_requests: usize,
        max_blocks: usize,
        index_memory_bytes: usize,
        decision_journal_bytes: usize,
        seed: Option<u64>,
        overlap_score_credit: f64,
        overlap_score_credit_decay: f64,
        prefill_load_scale: f64,
        active_request_weight: f64,
    ) -> PyResult<Self> {
        let block_size = index::block_size(py, block_size)?;
        let expiry = seconds(py, "active_request_expiry_s", active_request_expiry_s)?;
        let foresight = Foresight::new(
            py,
            use_kv_events,
            predicted_ttl_s,
            router_ttl_s,
            router_max_tree_size,
            router_prune_target_ratio,
        )?;
        let config = SelectorConfig {
            router: RouterConfig {
                block_size,
                overlap_score_weight,
                scale: KvScale {
                    overlap_score_credit,
                    overlap_score_credit_decay,
                    prefill_load_scale,
                    active_request_weight,
                },
                temperature,
                track_active_blocks,
                assume_kv_reuse,
                track_prefill_tokens,
                expiry_ms: expiry.as_millis() as u64,
                seed: seed.unwrap_or_else(rand::random),
                max_requests,
                ..RouterConfig::default()
            },
            overlap: foresight.overlap,
            thresholds: Thresholds {
                active_decode_blocks: active_decode_blocks_threshold,
                active_prefill_tokens: active_prefill_tokens_threshold,
                active_prefill_tokens_frac: active_prefill_tokens_threshold_frac,
            },
            journal_bytes: decision_journal_bytes,
        };
        let clock = Arc::new(SystemClock::default());
        let limits = foresight.limit(max_blocks, index_memory_bytes);
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        let key = ModelKey { model_name: model_name.to_owned(), tenant_id: TENANT.to_owned() };
        let model = catalog.model_or_create(&key, Some(block_size)).or_raise(py)?;
        let selector = Selector::new(config, model, clock.clone()).or_raise(py)?;
        let uses_events = use_kv_events && overlap_score_weight > 0.0 && overlap_score_credit > 0.0;
        let selector = Arc::new(selector);
        Ok(Self { catalog, clock, selector, key, block_size, uses_events })
    }

    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    #[getter]
    fn bookings(&self) -> Bookings {
        let selector = Arc::clone(&self.selector);
        let outbox = Arc::clone(selector.outbox());
        Bookings::new(outbox, Box::new(move |call| call(&selector)))
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.block_size
    }

    #[getter]
    fn uses_events(&self) -> bool {
        self.uses_events
    }

    fn set_workers(&self, py: Python<'_>, workers: Vec<(u64, u32)>) -> PyResult<()> {
        let workers: Vec<Worker> =
            workers.into_iter().map(|(id, rank)| Worker::new(id, rank)).collect();
        py.detach(|| self.selector.set_workers(&workers)).or_raise(py)?;
        Ok(())
    }

    #[pyo3(signature = (worker_id, dp_rank, endpoint, replay_endpoint=None))]
    fn subscribe(
        &self,
        py: Python<'_>,
        worker_id: u64,
        dp_rank: u32,
        endpoint: String,
        replay_endpoint: Option<String>,
    ) -> PyResult<()> {
        let registration = Registration {
            worker: Worker::new(worker_id, dp_rank),
            key: self.key.clone(),
            block_size: Some(self.block_size),
            endpoint,
            replay_endpoint,
            capacity_blocks: None,
            identity: Identity::default(),
        };
        py.detach(|| self.catalog.register(registration)).or_raise(py)?;
        Ok(())
    }

    fn unsubscribe(&self, py: Python<'_>, worker_id: u64, dp_rank: u32) -> bool {
        let name = &self.key.model_name;
        let gone =
            py.detach(|| self.catalog.unregister(worker_id, name, Some(TENANT), Some(dp_rank)));
        gone.is_ok()
    }

    #[pyo3(signature = (
        worker_id, dp_rank=0, *, kv_used_blocks=None, active_decode_blocks=None,
        active_prefill_tokens=None, kv_total_blocks=None, max_num_batched_tokens=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn report(
        &self,
        worker_id: u64,
        dp_rank: u32,
        kv_used_blocks: Option<u64>,
        active_decode_blocks: Option<u64>,
        active_prefill_tokens: Option<u64>,
        kv_total_blocks: Option<u64>,
        max_num_batched_tokens: Option<u64>,
    ) -> bool {
        let report = Report {
            kv_used_blocks,
            active_decode_blocks,
            active_prefill_tokens,
            kv_total_blocks,
            max_num_batched_tokens,
        };
        self.selector.busy.report(Worker::new(worker_id, dp_rank), &report)
    }

    fn busy_workers(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.selector.busy.busy(self.selector.loads()))
    }

    #[pyo3(signature = (
        *, active_decode_blocks_threshold, active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac
    ))]
    fn set_busy_thresholds(
        &self,
        py: Python<'_>,
        active_decode_blocks_threshold: Option<f64>,
        active_prefill_tokens_threshold: Option<u64>,
        active_prefill_tokens_threshold_frac: Option<f64>,
    ) -> PyResult<()> {
        let thresholds = Thresholds {
            active_decode_blocks: active_decode_blocks_threshold,
            active_prefill_tokens: active_prefill_tokens_threshold,
            active_prefill_tokens_frac: active_prefill_tokens_threshold_frac,
        };
        self.selector.busy.set_thresholds(thresholds).or_raise(py)
    }

    #[pyo3(signature = (token_ids, options=None))]
    fn preview(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(u64, u32, u32)> {
        let (selection, _) =
            self.asked(py, token_ids, options, |ask| self.selector.preview(ask))?;
        let Worker { instance_id, dp_rank } = selection.worker;
        Ok((instance_id, dp_rank, selection.overlap_blocks))
    }

    #[pyo3(signature = (token_ids, request_id, options=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        request_id: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(u64, u32, u32)> {
        let reserve = |ask: &Ask<'_>| self.selector.reserve(request_id, ask);
        let selection = self.asked(py, token_ids, options, reserve)?;
        let Worker { instance_id, dp_rank } = selection.worker;
        Ok((instance_id, dp_rank, selection.overlap_blocks))
    }

    #[pyo3(signature = (token_ids, options=None, *, request_id=None))]
    fn book(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        request_id: Option<&str>,
    ) -> PyResult<RouterBooking> {
        let select = |ask: &Ask<'_>| self.selector.select(&Ask { request_id, ..*ask });
        let (held, selection) = self.asked(py, token_ids, options, select)?;
        Ok(RouterBooking {
            held: Mutex::new(Some(held)),
            worker_id: selection.worker.instance_id,
            dp_rank: selection.worker.dp_rank,
            overlap_blocks: selection.overlap_blocks,
        })
    }

    fn mark_prefill_complete(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        self.selector.mark_prefill_completed(request_id).or_raise(py)
    }

    fn touch(&self, request_id: &str) -> bool {
        self.selector.touch(request_id)
    }

    fn free(&self, request_id: &str) -> bool {
        self.selector.free(request_id)
    }

    #[pyo3(signature = (token_ids, options=None))]
    fn potential_loads<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let loads = self.asked(py, token_ids, options, |ask| self.selector.potential_loads(ask))?;
        let list = PyList::empty(py);
        for load in loads {
            let entry = PyDict::new(py);
            entry.set_item("worker_id", load.worker.instance_id)?;
            entry.set_item("dp_rank", load.worker.dp_rank)?;
            entry.set_item("potential_prefill_tokens", load.potential_prefill_tokens)?;
            entry.set_item("potential_decode_blocks", load.potential_decode_blocks)?;
            entry.set_item("active_requests", load.active_requests)?;
            entry.set_item("overlap_blocks", load.overlap_blocks)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    #[pyo3(signature = (token_ids, options=None))]
    fn explain(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<String> {
        let (_, record) = self.asked(py, token_ids, options, |ask| self.selector.preview(ask))?;
        Ok(record.decision().to_string())
    }

    fn why(&self, py: Python<'_>, request_id: &str) -> PyResult<String> {
        let found = self.selector.journal.find(request_id);
        if found.is_empty() {
            let message = format!("no decision is kept for request {request_id:?}");
            return Err(raise(py, &Error::NotFound(message)));
        }
        let now_ms = self.clock.now_ms();
        let decisions: Vec<_> = found.iter().map(|record| record.whole(now_ms)).collect();
        Ok(serde_json::Value::from(decisions).to_string())
    }

    fn dump_events(&self, py: Python<'_>) -> String {
        py.detach(|| {
            let events: Vec<String> =
                dump_events(&*self.selector.model().index).map(|event| event.to_json()).collect();
            format!("[{}]", events.join(","))
        })
    }

    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let totals = self.selector.totals();
        let entry = PyDict::new(py);
        entry.set_item("workers", totals.workers)?;
        entry.set_item("requests", totals.requests)?;
        entry.set_item("prefill_tokens", totals.prefill_tokens)?;
        entry.set_item("blocks", totals.blocks)?;
        entry.set_item("reserved", self.selector.reserved())?;
        entry.set_item("predicted_blocks", self.selector.model().index.stats().predicted)?;
        Ok(entry)
    }

    fn tick(&self, py: Python<'_>) -> usize {
        py.detach(|| self.selector.tick())
    }
}

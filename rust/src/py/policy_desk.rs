//! The queue of questions to a policy in Python, and its answers.

use std::sync::Arc;

use kvflash_core::error::Error;
use kvflash_core::policy::desk::{Asked, Failure, Interests, Task};
use kvflash_core::policy::{Advice, Desk, Ended, News, OutsideCandidate, OutsideRequest};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyTuple};

use super::error::{Fault, Raised};
use super::time::seconds;

/// Asks a policy in Python on behalf of a service; users subclass :class:`kvflash.Policy`.
///
/// Args:
///     name: The policy's name.
///     deadline_s: Longest wait for an answer; at least 0.001.
///     routed, finished, removed: Whether the policy handles these events.
///
/// Raises:
///     ConfigError: An invalid deadline.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct PolicyDesk {
    pub inner: Arc<Desk>,
}

#[pymethods]
impl PolicyDesk {
    #[new]
    #[pyo3(signature = (name, *, deadline_s=0.005, routed=false, finished=false, removed=false))]
    fn new(
        name: &str,
        deadline_s: f64,
        routed: bool,
        finished: bool,
        removed: bool,
    ) -> Raised<Self> {
        let deadline_ms = seconds("deadline_s", deadline_s)?.as_millis() as u64;
        if deadline_ms == 0 {
            return Err(Fault::from(Error::Config(format!(
                "deadline_s must be at least 0.001, got {deadline_s}"
            ))));
        }
        let interests = Interests { routed, finished, removed };
        Ok(Self { inner: Arc::new(Desk::new(name, deadline_ms, interests)) })
    }

    /// Wait, without the GIL, for the next task; ``None`` once it is closed.
    ///
    /// Returns:
    ///     ``("choose", PolicyQuestion, None)``, ``("routed", PolicyRequest, PolicyCandidate)``,
    ///     ``("finished", PolicyEnded, None)`` or ``("removed", worker_id, dp_rank)``.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(task) = py.detach(|| self.inner.next()) else { return Ok(None) };
        let told = match task {
            Task::Answer(asked) => {
                ("choose", PolicyQuestion::new(py, asked)?, py.None()).into_pyobject(py)?
            }
            Task::Note(News::Routed(request, candidate)) => {
                let candidate = PolicyCandidate::new(py, 0, &candidate)?;
                ("routed", PolicyRequest::from(*request), candidate).into_pyobject(py)?
            }
            Task::Note(News::Finished(ended)) => {
                ("finished", PolicyEnded::from(ended), py.None()).into_pyobject(py)?
            }
            Task::Note(News::Removed(worker)) => {
                ("removed", worker.instance_id, worker.dp_rank).into_pyobject(py)?
            }
        };
        Ok(Some(told))
    }

    /// Ask nothing more; waiting requests are decided without the policy.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// A question that waits for its answer; dropping it unanswered counts as a failure.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct PolicyQuestion {
    asked: Mutex<Option<Asked>>,
    /// The request to place.
    #[pyo3(get)]
    request: Py<PolicyRequest>,
    /// The workers that may take it.
    #[pyo3(get)]
    candidates: Py<PyList>,
}

impl PolicyQuestion {
    fn new(py: Python<'_>, mut asked: Asked) -> PyResult<Self> {
        let request = std::mem::take(&mut asked.question.request);
        let candidates = asked.question.candidates.iter().enumerate();
        let candidates: PyResult<Vec<_>> =
            candidates.map(|(at, one)| PolicyCandidate::new(py, at, one)).collect();
        Ok(Self {
            asked: Mutex::new(Some(asked)),
            request: Py::new(py, PolicyRequest::from(request))?,
            candidates: PyList::new(py, candidates?)?.unbind(),
        })
    }
}

#[pymethods]
impl PolicyQuestion {
    /// Answer with a score for each candidate; ``None`` excludes a candidate.
    ///
    /// False if the number of scores is wrong, or one is not finite.
    fn answer(&self, scores: Vec<Option<f64>>) -> bool {
        let Some(asked) = self.asked.lock().take() else { return false };
        let is_legal = scores.len() == asked.question.candidates.len()
            && scores.iter().flatten().all(|score| score.is_finite());
        let answer = if is_legal {
            Ok(Advice::new(&asked.question, &scores))
        } else {
            Err(Failure::Nonsense)
        };
        asked.answer(answer);
        is_legal
    }

    /// Give no answer: the policy failed, or its choice is invalid.
    #[pyo3(signature = (*, is_nonsense=false))]
    fn fail(&self, is_nonsense: bool) {
        if let Some(asked) = self.asked.lock().take() {
            asked.answer(Err(if is_nonsense { Failure::Nonsense } else { Failure::Raised }));
        }
    }
}

/// A request, as a policy sees it.
#[pyclass(frozen, get_all, module = "kvflash._core")]
pub(super) struct PolicyRequest {
    /// The requested model.
    model: String,
    /// Length of the prompt in tokens; estimated if unknown.
    isl_tokens: u64,
    /// Tokens in a block; 0 while unknown.
    block_size: u32,
    /// Its text in UTF-8, without the surrounding JSON; token ids have four bytes each.
    prompt: Vec<u8>,
    /// The model's own tokens, a new list each time; empty while unknown.
    token_ids: Vec<u32>,
    /// The client's user, if it named one.
    user: Option<String>,
    /// Its session, if the client named one.
    session_key: Option<String>,
    /// The worker and rank that the client named.
    session_worker: Option<(u64, u32)>,
}

impl From<OutsideRequest> for PolicyRequest {
    fn from(request: OutsideRequest) -> Self {
        Self {
            model: request.model.into(),
            isl_tokens: request.isl_tokens,
            block_size: request.block_size,
            prompt: request.prompt.into(),
            token_ids: request.token_ids.into(),
            user: request.user.map(String::from),
            session_key: request.session_key.map(String::from),
            session_worker: request.session_worker.map(|one| (one.instance_id, one.dp_rank)),
        }
    }
}

/// A worker that may take a request.
#[pyclass(frozen, get_all, module = "kvflash._core")]
pub(super) struct PolicyCandidate {
    /// Its position among the candidates.
    index: usize,
    /// The engine instance.
    worker_id: u64,
    /// Its data-parallel rank.
    dp_rank: u32,
    /// Leading blocks of the prompt that it holds, or soon will.
    overlap_blocks: u32,
    /// How many of these are only predicted.
    predicted_blocks: u32,
    /// Running requests.
    active_requests: u32,
    /// Distinct blocks in use.
    active_blocks: u64,
    /// Prompt tokens still to be prefilled.
    queued_tokens: u64,
    /// What the request would cost, by the policy ``kv``.
    cost: f64,
    /// Its engine's own report: running_requests, gpu_kv_usage and others.
    metrics: Py<PyDict>,
}

impl PolicyCandidate {
    fn new(py: Python<'_>, index: usize, one: &OutsideCandidate) -> PyResult<Self> {
        let OutsideCandidate { candidate, metrics, terms } = one;
        let load = candidate.load;
        Ok(Self {
            index,
            worker_id: candidate.worker.instance_id,
            dp_rank: candidate.worker.dp_rank,
            overlap_blocks: candidate.overlap_blocks,
            predicted_blocks: candidate.predicted_blocks,
            active_requests: load.requests,
            active_blocks: load.blocks,
            queued_tokens: load.prefill_tokens,
            cost: terms.cost,
            metrics: metrics.reported().into_py_dict(py)?.unbind(),
        })
    }
}

/// A request that has ended, and its usage.
#[pyclass(frozen, get_all, module = "kvflash._core")]
pub(super) struct PolicyEnded {
    /// The model.
    model: String,
    /// The client's user, if it named one.
    user: Option<String>,
    /// The engine instance that answered.
    worker_id: u64,
    /// Its data-parallel rank.
    dp_rank: u32,
    /// Tokens of the prompt.
    input_tokens: u64,
    /// Of these, tokens that the engine had cached.
    cached_tokens: u64,
    /// Tokens of the answer.
    output_tokens: u64,
    /// Seconds from the decision to the end.
    duration_s: f64,
}

impl From<Ended> for PolicyEnded {
    fn from(ended: Ended) -> Self {
        Self {
            model: ended.model.into(),
            user: ended.user.map(String::from),
            worker_id: ended.worker.instance_id,
            dp_rank: ended.worker.dp_rank,
            input_tokens: ended.input_tokens,
            cached_tokens: ended.cached_tokens,
            output_tokens: ended.output_tokens,
            duration_s: ended.duration_ms as f64 / 1_000.0,
        }
    }
}

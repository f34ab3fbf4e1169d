//! One engine behind the frontend: its health and properties; and the engines of one model, as
//! requests find them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use kvflash_core::fleet::EventSpec;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::named;
use kvflash_core::select::WorkerReason;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::engine_spec::{EngineSpec, base_of};
use super::runtime::message::Formats;
use super::runtime::plane::Plane;
use super::runtime::spec::{LoadReport, WorkerSpec};
use super::runtime::texts::ModelText;
use crate::fleet::{self, PREFILL_TENANT};
use crate::gateway::api::Api;
use crate::gateway::turn::WaitingRoom;

/// One of this many requests with possible ids is sent without them: only then the engine's count
/// of its prompt's tokens shows whether the ids are still correct.
const REQUESTS_PER_CHECK: u32 = 64;

/// One engine.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub id: InstanceId,
    pub spec: EngineSpec,
    /// `http://host:port` without a trailing slash and `/v1`.
    pub base: String,
    healthy: AtomicBool,
    removed: AtomicBool,
    /// Paths of the engine's renderer that it refused as unknown.
    pub lacks: Mutex<BTreeSet<&'static str>>,
    pub requests: AtomicU64,
    pub failures: AtomicU64,
    pub notes: Mutex<EngineNotes>,
    /// Whether it accepts token ids, and tells them.
    pub ids: Mutex<IdNotes>,
    /// What was found of its sockets and tokenizer.
    pub inspection: Mutex<Inspection>,
    /// Its runtime data, if it is a worker of the runtime.
    pub member: Option<Arc<Member>>,
    /// The tokenizer named in its spec, once it is loaded.
    pub text: OnceLock<Arc<ModelText>>,
    /// Triggers an early health check.
    pub doubt: Notify,
    /// Notifies requests that wait for a first byte of a failed check.
    unwell: Notify,
    /// Number of requests waiting for a first byte.
    waiting: AtomicU64,
    /// A request failed there, and no check has finished since.
    in_doubt: AtomicBool,
    /// An answer said that it does not know what was asked for, which may be its model.
    knows_less: AtomicBool,
}

impl Engine {
    pub fn new(id: InstanceId, spec: EngineSpec) -> Self {
        let base = base_of(&spec.url).to_owned();
        Self { id, spec, base, ..Self::default() }
    }

    /// A worker of the runtime, which discovery has reported; it is healthy until a request fails.
    pub fn of_member(member: Arc<Member>) -> Self {
        let spec = EngineSpec {
            instance_id: Some(member.spec.id),
            dp_size: member.spec.dp_size(),
            is_prefill: member.spec.is_prefill(),
            url: member.spec.address(),
            ..EngineSpec::default()
        };
        let (id, healthy) = (member.spec.id, AtomicBool::new(true));
        Self { healthy, member: Some(member), ..Self::new(id, spec) }
    }

    // Relaxed throughout: the flags are independent; a reader with an outdated value tries a worker
    // that fails, and continues with the next one.
    pub fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Why it takes no requests; `None` if it is healthy.
    pub fn why_unhealthy(&self) -> Option<String> {
        let why = || self.notes.lock().last_error.clone();
        (!self.is_healthy()).then(|| why().unwrap_or_else(|| "not checked yet".into()))
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Relaxed)
    }

    /// The tokenizer named in its card.
    pub fn text(&self) -> Option<Arc<ModelText>> {
        let of_member = self.member.as_ref().and_then(|member| member.text.clone());
        of_member.or_else(|| self.text.get().cloned())
    }

    /// Whether `name` is among its reported models and adapters.
    pub fn serves(&self, name: &str) -> bool {
        self.notes.lock().models.iter().any(|(served, _)| served == name)
    }

    /// Whether it reads `cache_salt` in requests of this API. Of Anthropic's Messages only engines that are known to:
    /// SGLang, which has no version, and older ones of vLLM ignore it there.
    ///
    /// # Source
    /// `AnthropicMessagesRequest` of vLLM 0.32, `convert_anthropic_to_openai_request` of SGLang.
    pub fn takes_salt(&self, api: Api) -> bool {
        let is_known = || {
            let release = self.notes.lock().version.as_deref().and_then(release_of);
            release.is_some_and(|release| release >= (0, 32, 0))
        };
        api != Api::Messages || is_known()
    }

    /// It answered 404: another engine with other models may have taken its place.
    pub fn unknown(&self) {
        self.knows_less.store(true, Ordering::Relaxed);
        self.doubt.notify_one();
    }

    /// Whether it has answered 404 since the last call.
    pub fn take_unknown(&self) -> bool {
        self.knows_less.swap(false, Ordering::Relaxed)
    }

    /// Ends new requests. Requests that wait for its first byte continue as long as it passes
    /// checks.
    pub fn remove(&self) {
        self.removed.store(true, Ordering::Relaxed);
        self.healthy.store(false, Ordering::Relaxed);
        self.in_doubt.store(true, Ordering::Relaxed);
        self.doubt.notify_one();
    }

    /// Records a passed health check. Returns whether the engine was unhealthy before.
    pub fn recovered(&self) -> bool {
        let mut notes = self.notes.lock();
        (notes.last_error, notes.last_status) = (None, None);
        drop(notes);
        self.in_doubt.store(false, Ordering::Relaxed);
        !self.healthy.swap(true, Ordering::Relaxed)
    }

    /// Records a failed check, and the status if that was wrong: requests that wait for its first
    /// byte also go to other workers.
    pub fn check_failed(&self, why: &str, status: Option<u16>) {
        let was_healthy = self.is_healthy();
        self.failed_with(why, status);
        if was_healthy || self.in_doubt.swap(false, Ordering::Relaxed) {
            self.unwell.notify_waiters();
        }
    }

    /// Waits for `work`, a first byte, until a check of the engine fails: then `None`.
    pub async fn while_well<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        struct Waiting<'a>(&'a AtomicU64);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.unwell.notified() => None,
        }
    }

    /// Whether any request waits for its first byte.
    pub fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Records that the engine was unreachable or misbehaved; it gets no requests until a check
    /// passes.
    pub fn failed(&self, why: &str) {
        self.failed_with(why, None);
    }

    fn failed_with(&self, why: &str, status: Option<u16>) {
        let before = self.notes.lock().fail(why, status);
        self.failures.fetch_add(1, Ordering::Relaxed);
        if self.healthy.swap(false, Ordering::Relaxed) {
            self.in_doubt.store(true, Ordering::Relaxed);
            tracing::warn!(worker = self.id, url = self.base, why, "worker is unhealthy");
        } else if before.is_none() && !self.is_removed() {
            // It may be starting, or may never come up.
            tracing::warn!(worker = self.id, url = self.base, why, "worker is not healthy yet");
        }
        self.doubt.notify_one();
    }
}

/// The numbers of a version such as 0.32.0rc1.
pub(super) fn release_of(version: &str) -> Option<(u32, u32, u32)> {
    let mut parts = version.splitn(3, '.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part[..digits].parse().ok()
    });
    Some((parts.next()??, parts.next()??, parts.next()??))
}

/// Properties and state of an engine.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineNotes {
    /// Model and adapters it serves: (name, base model of an adapter).
    pub models: Vec<(String, Option<String>)>,
    /// Longest prompt plus answer, tokens.
    pub max_model_len: Option<u64>,
    /// Blocks of its cache.
    pub capacity_blocks: Option<u64>,
    /// Tokens in a block, from its metrics.
    pub block_size: Option<u32>,
    /// Its version string.
    pub version: Option<String>,
    /// Start of its process, seconds since 1970, from its metrics.
    pub started_s: Option<f64>,
    /// Properties reported by its server, if it is SGLang's and was asked.
    pub server: Option<ServerNotes>,
    /// The last error, as text.
    pub last_error: Option<String>,
    /// The status that it answered with, if that is the error, and a check found it.
    pub last_status: Option<u16>,
    /// What is wrong with a runtime worker's card and events, by part: it serves nevertheless, and checks of its health
    /// change nothing about it.
    pub faults: BTreeMap<&'static str, String>,
}

impl EngineNotes {
    /// Sets the last error and the status that is its cause; returns the error before it.
    pub fn fail(&mut self, why: impl ToString, status: Option<u16>) -> Option<String> {
        self.last_status = status;
        self.last_error.replace(why.to_string())
    }

    /// The last error, or else what is wrong with its card and events.
    pub fn error(&self) -> Option<String> {
        let faults = || self.faults.values().map(String::as_str).collect::<Vec<_>>().join("; ");
        let error = self.last_error.clone().unwrap_or_else(faults);
        (!error.is_empty()).then_some(error)
    }
}

/// Results of the last inspection of a worker.
#[derive(Debug, Default)]
pub(crate) struct Inspection {
    pub faults: Vec<WorkerReason>,
    /// Everything was checked and is correct: no further inspection.
    pub is_settled: bool,
    /// The missing `/tokenize` was already logged.
    pub has_told_untold: bool,
}

/// Properties reported by an SGLang server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerNotes {
    /// Event endpoints of its ranks; empty without events.
    pub events: BTreeMap<u32, EventSpec>,
    pub dp_size: u32,
    /// Tokens in a block of its events.
    pub block_size: Option<u32>,
    /// The result, or why there is none, for people.
    pub note: String,
}

/// A worker's own side of an engine.
#[derive(Debug)]
pub(crate) struct Member {
    pub spec: WorkerSpec,
    pub plane: Plane,
    pub text: Option<Arc<ModelText>>,
    pub formats: Formats,
    /// Its last report of each rank.
    pub loads: Mutex<BTreeMap<u32, LoadReport>>,
}

impl Member {
    /// What its card says, as engines tell it over HTTP.
    pub fn notes(&self) -> EngineNotes {
        let card = &self.spec.card;
        let base = (card.model_name.clone(), None);
        let adapter = |name: &String| (name.clone(), Some(card.model_name.clone()));
        EngineNotes {
            models: std::iter::once(base).chain(card.lora_names.iter().map(adapter)).collect(),
            max_model_len: card.context_length,
            capacity_blocks: card.total_kv_blocks,
            block_size: card.kv_cache_block_size,
            ..EngineNotes::default()
        }
    }
}

/// All engines that serve one base model, or all that prefill for it.
pub(crate) type Pool = fleet::Pool<Engine, Option<Arc<WaitingRoom>>>;
pub(crate) type Members = fleet::Members<Engine>;

impl Members {
    /// Whether `worker` may take a request that was already at the `tried` engines.
    pub fn is_eligible(&self, worker: Worker, tried: &[InstanceId]) -> bool {
        !tried.contains(&worker.instance_id)
            && self.get(worker.instance_id).is_some_and(|engine| engine.is_healthy())
    }

    pub fn healthy(&self) -> usize {
        self.all().filter(|engine| engine.is_healthy()).count()
    }

    /// The longest context that all of them accept; `None` if none has reported it.
    pub fn max_model_len(&self) -> Option<u64> {
        self.all().filter_map(|engine| engine.notes.lock().max_model_len).min()
    }

    pub fn are_all_healthy(&self) -> bool {
        self.all().all(|engine| engine.is_healthy())
    }
}

impl Pool {
    /// Number of its workers that may get requests.
    pub fn serving(&self) -> usize {
        let draining = self.selector.draining.all();
        let is_open = |id: &InstanceId| draining.binary_search(id).is_err();
        let members = self.members();
        members.all().filter(|engine| engine.is_healthy() && is_open(&engine.id)).count()
    }

    /// Whether its workers prefill for others.
    pub fn prefills(&self) -> bool {
        self.key.tenant_id == PREFILL_TENANT
    }

    /// Whether requests may wait, for their turn or for a worker with room.
    pub fn is_queued(&self) -> bool {
        self.waiting.is_some() || self.queue.is_some()
    }

    /// Of the healthy HTTP engines accepted by `fits`, the one with the fewest requests; ties
    /// rotate with `turn`.
    ///
    /// # Cost
    /// Reads every worker's load.
    pub fn least_busy(&self, turn: usize, fits: impl Fn(&Engine) -> bool) -> Option<Arc<Engine>> {
        let requests = self.in_flight();
        let members = self.members();
        let is_fit = |one: &&Arc<Engine>| one.member.is_none() && one.is_healthy() && fits(one);
        let mut fitting: Vec<_> = members.all().filter(is_fit).collect();
        let first = turn % fitting.len().max(1);
        fitting.rotate_left(first);
        let least = fitting
            .into_iter()
            .min_by_key(|one| requests.get(&one.id).copied().unwrap_or_default());
        least.cloned()
    }
}

/// The route of requests for a served name.
#[derive(Clone)]
pub(crate) struct Route {
    pub pool: Arc<Pool>,
    /// The name, if workers of the pool may lack it: an adapter, or another name of the model.
    pub extra_name: Option<String>,
    pub is_adapter: bool,
}

impl Route {
    /// The adapter, if the name is one.
    pub fn lora_name(&self) -> Option<&str> {
        self.extra_name.as_deref().filter(|_| self.is_adapter)
    }

    /// Whether `engine` has the name.
    pub fn is_served_by(&self, engine: &Engine) -> bool {
        self.extra_name.as_deref().is_none_or(|name| engine.serves(name))
    }
}

named! {
    /// The field of a request with its prompt's ids.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Field {
        /// A completion's own field.
        Prompt = "prompt",
        /// A chat's.
        ///
        /// # Source
        /// vLLM 0.32 `_reused_prompt_token_ids`: needs no KV connector; tool choice and stops still
        /// come from the messages.
        KvTransferParams = "kv_transfer_params.prompt_token_ids",
        /// A chat's.
        ///
        /// # Source
        /// SGLang 0.5.23 `OpenAIServingChat._process_messages`.
        InputIds = "input_ids",
    }
}

/// Whether an engine accepts token ids, and in which field; and whether it tells those of its prompts.
#[derive(Debug, Default)]
pub(crate) struct IdNotes {
    /// The fields for ids of completions and of chats; `None` if there is none.
    pub completions: Option<Field>,
    pub chats: Option<Field>,
    /// Requests that might have gone with ids.
    asked_for: u32,
    /// The start of the engine at which it was tested.
    pub tested: Option<u64>,
    /// Why it gets no more ids, as text, if an answer contradicted.
    pub why: Option<String>,
    /// It told the ids of a prompt.
    pub has_told: bool,
    /// The start of the engine since which it is not asked for them.
    pub asked_in_vain: Option<u64>,
}

impl IdNotes {
    /// `None` for APIs whose prompts are sent unchanged.
    pub fn field_mut(&mut self, api: Api) -> Option<&mut Option<Field>> {
        match api {
            Api::Chat => Some(&mut self.chats),
            Api::Completions => Some(&mut self.completions),
            _ => None,
        }
    }

    /// The field for the ids of the next request; `None` also for the few requests that reveal the
    /// engine's own count.
    pub fn next(&mut self, api: Api) -> Option<Field> {
        let field = (*self.field_mut(api)?)?;
        self.asked_for = self.asked_for.wrapping_add(1);
        (!self.asked_for.is_multiple_of(REQUESTS_PER_CHECK)).then_some(field)
    }

    /// The state in `GET /workers`.
    pub fn view(&self) -> Value {
        json!({
            "asked": self.tested.is_some(),
            "chat": self.chats.map(Field::name),
            "completions": self.completions.map(Field::name),
            "why_not": self.why,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_request_in_so_many_goes_without() {
        let mut ids = IdNotes::default();
        assert_eq!(ids.next(Api::Chat), None);
        ids.chats = Some(Field::InputIds);
        let sent = (0..640).filter(|_| ids.next(Api::Chat).is_some()).count();
        assert_eq!((sent, ids.next(Api::Completions)), (630, None));
    }
}

//! Shared state of the frontend: options, fleet, metrics.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::policy::{AUTO, Policy};
use kvflash_core::select::StartGate;
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use super::engine::{Engine, Pool, Route};
use super::fleet::Fleet;
use super::metrics::FrontendMetrics;
use super::options::Aliases;
use super::options::{EnforceDisagg, FrontendOptions};
use super::parity::Parity;
use super::proxy::Upstream;
use super::runtime::message::Formats;
use super::runtime::texts::{ModelText, ModelTexts, Tokenizers};
use super::taught::Taught;
use crate::aside::Aside;
use crate::body::Intake;
use crate::compute::Compute;
use crate::gateway::attempts::{Failed, Retries};
use crate::indexer::query_routes;
use crate::metrics::{CauseLabel, CommonMetrics, KindLabel, new_registry};
use crate::remote::RemoteIndexer;
use crate::state_file::Registrations;
use crate::tenant::SaltSecret;
use crate::tenant::limit::Meters;
use crate::{Lock, Role};

/// Being full for this long is not a burst.
const FULL_TIME: Duration = Duration::from_secs(10);

/// A slot that is free for less than this is one that the next request waited for.
const FREE_TIME: Duration = Duration::from_secs(1);

/// How long the limit of requests in flight has been reached.
#[derive(Debug, Default)]
pub(crate) struct Full {
    since: Option<Instant>,
    /// Since when a slot is free again.
    until: Option<Instant>,
}

impl Full {
    /// The last slot was taken.
    pub fn begin(&mut self) {
        self.forget();
        self.since.get_or_insert_with(Instant::now);
        self.until = None;
    }

    /// A slot is free.
    pub fn end(&mut self) {
        self.until.get_or_insert_with(Instant::now);
    }

    fn forget(&mut self) {
        if self.until.is_some_and(|until| until.elapsed() >= FREE_TIME) {
            *self = Self::default();
        }
    }

    fn is_long(&mut self) -> bool {
        self.forget();
        self.since.is_some_and(|since| since.elapsed() >= FULL_TIME)
    }
}

/// Maximum names in a refusal.
const SHOWN_NAMES: usize = 20;

/// A name that clients may use as the model.
pub(crate) struct Name {
    pub name: String,
    /// The model that it stands for; for an adapter its base model.
    pub root: String,
    /// The base model.
    pub base: String,
    /// The base model, if it is an adapter's own name.
    pub parent: Option<String>,
}

/// Shared state of the frontend.
pub(crate) struct App {
    pub options: FrontendOptions,
    pub catalog: Arc<Catalog>,
    pub fleet: Fleet,
    /// Model aliases for clients, if there are any.
    pub aliases: Option<Aliases>,
    pub upstream: Upstream,
    /// Tokenizers named by `--tokenizer`.
    pub texts: ModelTexts,
    pub tokenizers: Tokenizers,
    /// Those that `--reasoning-parser` and `--tool-call-parser` name.
    pub formats: Formats,
    /// Whether the engines make the same tokens.
    pub parity: Parity,
    /// What engines told of conversations that are not tokenized here.
    pub taught: Taught,
    /// Engines' events are used.
    pub uses_events: bool,
    /// Answers carry the header that leads a client back to its worker.
    pub keeps_sessions: bool,
    pub common: CommonMetrics,
    pub metrics: FrontendMetrics,
    /// The caller's warnings about failed matching.
    pub outside_warnings: RwLock<Vec<String>>,
    /// Builds responses that list every worker.
    pub aside: Aside,
    /// Tokenizes prompts that take longer than a millisecond.
    pub compute: Compute,
    pub intake: Intake,
    /// The same for uploads, with a separate limit.
    pub uploads: Intake,
    pub retries: Arc<Retries>,
    /// Usage of clients with keys.
    pub meters: Meters,
    /// Derives the salts of tenants with an isolated cache.
    pub salts: Option<SaltSecret>,
    /// Workers that were registered over HTTP.
    pub registrations: Registrations,
    /// The remote indexer, if it replaces the catalog.
    pub remote: Option<RemoteIndexer>,
    /// The indexer's routes, if they are served.
    pub questions: Option<Router>,
    /// Requests in flight.
    pub in_flight: AtomicUsize,
    /// How long their limit has been reached.
    pub full: Mutex<Full>,
    /// Whether enough workers have been present at the same time.
    start: StartGate,
}

impl App {
    /// A frontend without engines.
    ///
    /// # Errors
    /// `Config`, naming the flag or the tokenizer's file.
    pub fn new(
        options: FrontendOptions,
        catalog: Arc<Catalog>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        options.check()?;
        let tokenizers = Tokenizers::default();
        let texts = ModelTexts::open(&options.tokenizer, &tokenizers, options.tokenizer_cache)?;
        let formats = Formats::of_flags(
            options.reasoning_parser.as_deref(),
            options.tool_call_parser.as_deref(),
        )?;
        let mut registry = new_registry();
        let metrics = FrontendMetrics::register(&mut registry);
        metrics.show_causes();
        let remote = options.routing.register(&options.http, &clock, &mut registry)?;
        let intake = options.http.intake(options.max_body_bytes, &mut registry).refusing_unread();
        let compute = Compute::new(options.tokenize_timeout, Arc::clone(&clock), &mut registry)?;
        let common = CommonMetrics::new(registry);
        let questions = || query_routes(&catalog, &intake, &options.http);
        let questions = options.routing.serve_indexer.then(questions).transpose()?;
        let salts = options.salt_secret_file.as_deref().map(SaltSecret::open).transpose()?;
        check_clients(options.http.lock(), salts.is_some())?;
        let meters = Meters::new(Arc::clone(&clock));
        let (wanted, uploads) = (options.routing.min_initial_workers, options.max_upload_bytes);
        Ok(Self {
            start: StartGate::new(wanted, "be healthy", "--min-initial-workers"),
            uses_events: options.routing.uses_events(),
            keeps_sessions: options.routing.policy_name() == "session-affinity",
            fleet: Fleet::new(options.clone(), Arc::clone(&catalog), clock),
            upstream: Upstream::new(&options, options.api_key()?.as_deref())?,
            aliases: match options.model_alias.as_slice() {
                [] => None,
                texts => Some(Aliases::parse(texts)?),
            },
            taught: Taught::new(options.taught_cache),
            options,
            catalog,
            texts,
            tokenizers,
            formats,
            parity: Parity::default(),
            common,
            metrics,
            outside_warnings: RwLock::default(),
            aside: Aside::default(),
            compute,
            uploads: intake.clone().up_to(uploads, "--max-upload-bytes"),
            intake,
            retries: Arc::default(),
            meters,
            salts,
            registrations: Registrations::default(),
            remote,
            questions,
            in_flight: AtomicUsize::new(0),
            full: Mutex::default(),
        })
    }

    /// The tokenizer of a model: from `--tokenizer` for the model, else from a worker's card, else
    /// from `--tokenizer` for all models.
    pub fn text_of(&self, pool: &Pool) -> Option<Arc<ModelText>> {
        let of_card = || {
            let members = pool.members();
            members.all().find_map(|engine| engine.text())
        };
        self.texts.of(&pool.name).or_else(of_card).or_else(|| self.texts.of_all())
    }

    /// The pool and the text of an engine that is asked about tokens: a healthy one over HTTP that decodes, and
    /// for which prompts are tokenized here.
    pub fn tokenized(&self, engine: &Engine) -> Option<(Arc<Pool>, Arc<ModelText>)> {
        let is_asked = engine.member.is_none() && !engine.spec.is_prefill && engine.is_healthy();
        let pool = self.fleet.pool_of(engine.id).filter(|_| is_asked)?;
        let text = self.text_of(&pool).filter(|_| pool.selector.needs_tokens())?;
        Some((pool, text))
    }

    /// The route of requests for `model`, which an `alias` may stand for.
    ///
    /// # Errors
    /// `NotFound`, with the served names; `NoWorker` while nothing is served yet.
    pub fn route(&self, model: &str, alias: Option<&str>) -> Result<Route> {
        let route = self.fleet.route(model)?;
        route.ok_or_else(|| match alias {
            Some(alias) => self.not_served(alias, Some(model)),
            None => self.not_served(model, None),
        })
    }

    /// The error if no worker serves `name`, or the `model` behind the alias, with the served
    /// names.
    pub fn not_served(&self, name: &str, model: Option<&str>) -> Error {
        let mut names: Vec<String> = self.names().into_iter().map(|served| served.name).collect();
        names.sort_unstable();
        names.truncate(SHOWN_NAMES);
        let served = names.join(", ");
        Error::NotFound(match model {
            Some(model) => format!(
                "alias {name:?} stands for {model:?}, which no worker serves; served models are {served}"
            ),
            None => format!("the model {name:?} is not served; served models are {served}"),
        })
    }

    /// Names for clients: served models and adapters, then their aliases. Models hidden by an alias
    /// are omitted.
    pub fn names(&self) -> Vec<Name> {
        let served = self.fleet.served();
        let parents: HashMap<&str, Option<&str>> =
            served.iter().map(|(name, parent)| (name.as_str(), parent.as_deref())).collect();
        let aliases =
            self.aliases.iter().flat_map(Aliases::all).filter_map(|(alias, mut models)| {
                let (target, parent) = models.find_map(|model| parents.get_key_value(model))?;
                let base = parent.unwrap_or(target).to_owned();
                Some(Name {
                    name: alias.to_owned(),
                    root: (*target).to_owned(),
                    base,
                    parent: None,
                })
            });
        let aliases: Vec<Name> = aliases.collect();
        let is_hidden = |name: &str| self.aliases.as_ref().is_some_and(|all| all.has(name));
        let own = served.into_iter().filter(|(name, _)| !is_hidden(name));
        let own = own.map(|(name, parent)| {
            let root = parent.clone().unwrap_or_else(|| name.clone());
            Name { base: root.clone(), name, root, parent }
        });
        own.chain(aliases).collect()
    }

    /// Whether the decode workers of this model may not prefill (`--enforce-disagg`).
    pub fn enforces_prefill(&self, model: &str) -> bool {
        match self.options.enforce_disagg {
            EnforceDisagg::Off => false,
            EnforceDisagg::UntilFirstPrefill => self.fleet.had_prefill(model),
            EnforceDisagg::Always => true,
        }
    }

    /// Models that have decode workers, but no prefill worker, which they must have; `Err` if no
    /// other model can be served.
    pub fn without_prefill(&self) -> Result<Vec<String>, Vec<String>> {
        let pools = self.fleet.pools();
        let decoding = pools.iter().filter(|pool| !pool.prefills() && pool.serving() > 0);
        let (refused, served): (Vec<_>, Vec<_>) = decoding.partition(|pool| {
            let prefills = || self.fleet.prefill_pool(&pool.name);
            self.enforces_prefill(&pool.name) && prefills().is_none_or(|pool| pool.serving() == 0)
        });
        let names = refused.iter().map(|pool| pool.name.clone()).collect();
        if served.is_empty() && !refused.is_empty() { Err(names) } else { Ok(names) }
    }

    /// Counts a request that was refused by this process.
    pub fn refused(&self, cause: &'static str) {
        self.metrics.refused.get_or_create(&CauseLabel { cause }).inc();
    }

    /// Counts a dropped field or header of a client's request that would control an engine.
    pub fn dropped(&self, kind: &'static str) {
        self.metrics.dropped.get_or_create(&KindLabel { kind }).inc();
    }

    /// Whether the limit of requests in flight has been reached for a while, gaps of less than a
    /// second included.
    pub fn is_full(&self) -> bool {
        let mut full = self.full.lock();
        if self.in_flight() < self.options.max_concurrent_requests {
            full.end();
        }
        full.is_long()
    }

    /// The comparisons of tokens with engines of the models that are served.
    pub fn compared(&self) -> &Parity {
        let pools = self.fleet.pools();
        self.parity.keep(|model| pools.iter().any(|pool| pool.name == model));
        &self.parity
    }

    /// Whether the policy decides by what engines' events tell of their caches.
    pub fn routes_by_events(&self) -> bool {
        self.uses_events && [AUTO, Policy::Kv.name()].contains(&self.options.routing.policy_name())
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether requests are accepted: once enough workers have been healthy at the same time.
    ///
    /// # Errors
    /// `NoWorker`, with the number of missing workers.
    pub fn started(&self) -> Result<()> {
        self.start
            .check(|| self.fleet.engines().iter().filter(|engine| engine.is_healthy()).count())
    }

    /// Counts a failed attempt at `engine`, and marks it as suspect if it is at fault.
    pub fn attempt_failed(&self, failed: &Failed, engine: &Engine, what: &'static str) {
        let Failed { cause, message, .. } = failed;
        self.metrics.attempts_failed.get_or_create(&CauseLabel { cause }).inc();
        if failed.is_engine_at_fault {
            engine.failed(message);
        }
        tracing::warn!(worker = engine.id, cause, why = message, "{what}");
    }
}

/// Checks the prerequisites of the keys, and logs what clients without keys may do.
///
/// # Errors
/// `Config` for a key of an isolated tenant without a secret for its salt.
fn check_clients(lock: &Lock, has_salts: bool) -> Result<()> {
    if lock.has_isolated() && !has_salts {
        return Err(Error::Config(
            "--keys-file has a client key with isolate=true, which needs --salt-secret-file: a file with a secret of \
             16 bytes or more, the same for every replica"
                .to_owned(),
        ));
    }
    if !lock.has(Role::Client) {
        tracing::warn!(
            "clients need no keys (--keys-file), so fields that control engines pass from requests to engines: \
             kv_transfer_params, bootstrap_*, x-data-parallel-rank, priority, chat_template, nvext; see \
             docs/tenants.md"
        );
    }
    Ok(())
}

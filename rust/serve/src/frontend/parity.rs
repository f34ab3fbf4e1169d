//! Checks that local tokenization equals the engines': a corpus of forms is compared once for each
//! model and engine version, and then periodically. Forms that differ are left to the engines' own
//! renderer.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use kvflash_core::text::{self, TextModel};
use parking_lot::{Mutex, RwLock};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::app::App;
use super::engine::{Engine, Pool};
use super::forms::{Form, Forms, Standing, examples};
use crate::gateway::api::Api;
use crate::gateway::as_chat::chat_of;
use crate::gateway::body::{Body, Envelope, ask_body};
use crate::metrics::OutcomeLabel;
use crate::page::{Labels, and, label};

/// Time to the next comparison after one without an answer from the engine.
const RETRY_TIME: Duration = Duration::from_secs(300);
/// Consecutive matching comparisons after which a form that differed is rendered locally again.
const AGREEMENTS: u32 = 2;
/// The response to an example is a few hundred tokens.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// Version name of engines without one.
const NO_VERSION: &str = "unknown";

/// The outcome of comparing one form.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// No comparison was possible, with the reason.
    NotCompared(String),
    Agrees,
    /// The tokens differ, with the first difference.
    Differs(String),
}

/// Results for one form at engines of one version.
#[derive(Debug, Clone)]
struct FormRecord {
    outcome: Outcome,
    /// It differed, and has not matched often enough since: engines render it.
    is_remote: bool,
    agreed: u32,
}

/// Results for the engines of one version.
#[derive(Debug, Default)]
struct Record {
    is_running: bool,
    /// When the last comparison ended, and when the next one may begin.
    ended: Option<Instant>,
    due: Option<Instant>,
    forms: BTreeMap<Form, FormRecord>,
}

/// The results of all comparisons.
///
/// # Cost
/// A record for each model and version of the current engines.
#[derive(Default)]
pub(crate) struct Parity {
    /// By model and version.
    records: Mutex<BTreeMap<(String, String), Record>>,
    /// Of each model that was compared.
    standings: RwLock<HashMap<String, Standing>>,
}

impl Parity {
    /// Of the model of this name; nothing is proven before a comparison.
    pub fn standing(&self, model: &str) -> Standing {
        self.standings.read().get(model).copied().unwrap_or_default()
    }

    /// The state for `/health`: by model and version.
    pub fn view(&self) -> Value {
        let mut view = json!({});
        for ((model, version), record) in &*self.records.lock() {
            let mut forms = json!({});
            for (form, record) in &record.forms {
                let (outcome, why) = match &record.outcome {
                    Outcome::NotCompared(why) => ("not compared", Some(why)),
                    Outcome::Agrees => ("agrees", None),
                    Outcome::Differs(how) => ("differs", Some(how)),
                };
                let renderer = if record.is_remote { "engine" } else { "frontend" };
                forms[form.name()] =
                    json!({ "outcome": outcome, "why": why, "renderer": renderer });
            }
            view[model][version] = json!({
                "compared_s_ago": record.ended.map(|at| at.elapsed().as_secs()),
                "forms": forms,
            });
        }
        view
    }

    /// Reasons for reduced reuse, as text.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for ((model, version), record) in &*self.records.lock() {
            let remote: Vec<_> =
                record.forms.iter().filter(|(_, record)| record.is_remote).collect();
            let Some((_, first)) = remote.first() else { continue };
            let how = match &first.outcome {
                Outcome::Differs(how) => how.as_str(),
                _ => "the last comparison agreed, one more is needed",
            };
            let forms = names(remote.iter().map(|(form, _)| **form));
            warnings.push(format!(
                "model {model}: prompts of the forms {forms} get different tokens here and at engines of version \
                 {version} ({how}); the engines render them. Fix: {SAME_MODEL}"
            ));
        }
        warnings
    }

    /// Per form, whether its tokens agree.
    pub fn rows(&self) -> Vec<(Labels, i64)> {
        let records = self.records.lock();
        let forms = records.iter().flat_map(|((model, version), record)| {
            let version = and(&label("model", model), "version", version);
            record.forms.iter().filter_map(move |(form, record)| {
                let value = match record.outcome {
                    Outcome::NotCompared(_) => return None,
                    Outcome::Agrees => 1,
                    Outcome::Differs(_) => 0,
                };
                Some((and(&version, "form", form.name()), value))
            })
        });
        forms.collect()
    }

    /// Drops the records of models that are not served any more. Their standings stay: until the next comparison the
    /// engines go on to render what differed.
    pub fn keep(&self, is_served: impl Fn(&str) -> bool) {
        self.records.lock().retain(|(model, _), record| record.is_running || is_served(model));
    }

    /// Claims the comparison of a version, if it is due. Records of versions in `live` are kept,
    /// others of the model are dropped.
    fn claim(&self, model: &str, version: &str, live: &[String]) -> bool {
        let mut records = self.records.lock();
        records.retain(|(of, version), record| {
            of != model || record.is_running || live.contains(version)
        });
        let record = records.entry((model.to_owned(), version.to_owned())).or_default();
        let is_due = !record.is_running && record.due.is_none_or(|due| due <= Instant::now());
        record.is_running |= is_due;
        is_due
    }

    /// Records the end of a comparison; `None` if the engine did not answer.
    fn ended(
        &self,
        model: &str,
        version: &str,
        outcomes: Option<BTreeMap<Form, Outcome>>,
        interval: Duration,
    ) {
        let mut records = self.records.lock();
        let Some(record) = records.get_mut(&(model.to_owned(), version.to_owned())) else { return };
        record.is_running = false;
        let now = Instant::now();
        let Some(outcomes) = outcomes else {
            record.due = Some(now + RETRY_TIME.min(interval));
            return;
        };
        (record.ended, record.due) = (Some(now), Some(now + interval));
        let (mut differ, mut agree_again, mut unknown) =
            (Changed::new(), Changed::new(), Changed::new());
        for (form, outcome) in outcomes {
            let before = record.forms.get(&form);
            let was_remote = before.is_some_and(|record| record.is_remote);
            let next = FormRecord::after(before, outcome);
            match &next.outcome {
                Outcome::Differs(how) if !was_remote => differ.push((form, how.clone())),
                Outcome::Agrees if was_remote && !next.is_remote => {
                    agree_again.push((form, String::new()));
                }
                Outcome::NotCompared(why) if before.is_none() => unknown.push((form, why.clone())),
                _ => {}
            }
            record.forms.insert(form, next);
        }
        tell(model, version, &differ, &agree_again, &unknown);
        let mut standing = Standing { proven: Forms::ALL, remote: Forms::NONE };
        for record in records.iter().filter(|((of, _), _)| of == model).map(|(_, record)| record) {
            let of = |is: fn(&FormRecord) -> bool| {
                let found = record.forms.iter().filter(|(_, record)| is(record));
                found.fold(Forms::NONE, |forms, (form, _)| forms.with(*form))
            };
            let proven = of(|record| record.outcome == Outcome::Agrees && !record.is_remote);
            standing.proven = standing.proven.and(proven);
            standing.remote = standing.remote.or(of(|record| record.is_remote));
        }
        self.standings.write().insert(model.to_owned(), standing);
    }
}

impl FormRecord {
    fn after(before: Option<&Self>, outcome: Outcome) -> Self {
        let was_remote = before.is_some_and(|record| record.is_remote);
        let agreed = match outcome {
            Outcome::Agrees => before.map_or(0, |record| record.agreed) + 1,
            _ => 0,
        };
        let is_remote = match outcome {
            Outcome::Differs(_) => true,
            Outcome::Agrees => was_remote && agreed < AGREEMENTS,
            Outcome::NotCompared(_) => was_remote,
        };
        Self { outcome, is_remote, agreed }
    }
}

/// Forms that one comparison changed, each with the reason in words.
type Changed = Vec<(Form, String)>;

/// Logs one line of each kind of change.
fn tell(model: &str, version: &str, differ: &Changed, agree_again: &Changed, unknown: &Changed) {
    let forms = |changed: &Changed| names(changed.iter().map(|(form, _)| *form));
    if let Some((_, how)) = differ.first() {
        tracing::warn!(
            model,
            version,
            forms = forms(differ),
            how,
            "prompts of these forms get different tokens here and at the engines, which render them from now \
             on; {SAME_MODEL}"
        );
    }
    if !agree_again.is_empty() {
        tracing::info!(
            model,
            version,
            forms = forms(agree_again),
            "prompts of these forms get the same tokens again and are rendered here"
        );
    }
    if let Some((_, why)) = unknown.first() {
        let forms = forms(unknown);
        tracing::info!(model, version, forms, why, "prompts of these forms were not compared");
    }
}

const SAME_MODEL: &str =
    "set --tokenizer to the folder of the model that the engines serve, with its chat template";

fn names(forms: impl Iterator<Item = Form>) -> String {
    forms.map(Form::name).collect::<Vec<_>>().join(", ")
}

/// Compares the tokens of the model that `engine` serves, if that is due: once per version, then at
/// `--parity-interval`.
pub(super) fn compare_if_due(app: &Arc<App>, engine: &Arc<Engine>) {
    let interval = app.options.parity_interval;
    let found = app.tokenized(engine).filter(|_| !interval.is_zero());
    let Some((pool, text)) = found else { return };
    let version = version_of(engine);
    let live: Vec<String> = pool.members().all().map(|engine| version_of(engine)).collect();
    if !app.parity.claim(&pool.name, &version, &live) {
        return;
    }
    let (app, engine) = (
        Arc::clone(app),
        pool.least_busy(0, |one| version_of(one) == version).unwrap_or(Arc::clone(engine)),
    );
    tokio::spawn(async move {
        let outcomes = tokio::select! {
            outcomes = compare(&app, &text.model, &engine, &pool) => outcomes,
            () = app.options.http.shutdown().wait() => None,
        };
        let outcome = if outcomes.is_some() { "compared" } else { "failed" };
        app.metrics.parity_probes.get_or_create(&OutcomeLabel { outcome }).inc();
        app.parity.ended(&pool.name, &version, outcomes, interval);
    });
}

fn version_of(engine: &Engine) -> String {
    let version = engine.notes.lock().version.clone();
    version.unwrap_or_else(|| NO_VERSION.to_owned())
}

/// Compares all examples, one after the other; `None` if the engine does not answer.
async fn compare(
    app: &App,
    text: &TextModel,
    engine: &Engine,
    pool: &Pool,
) -> Option<BTreeMap<Form, Outcome>> {
    let mut outcomes = BTreeMap::<Form, Outcome>::new();
    let adapter = {
        let notes = engine.notes.lock();
        notes.models.iter().find(|(_, parent)| parent.is_some()).map(|(name, _)| name.clone())
    };
    for (form, body) in examples() {
        if !matches!(outcomes.get(&form), None | Some(Outcome::Agrees)) {
            continue;
        }
        let name = match form {
            Form::Adapter => adapter.as_deref(),
            _ => Some(&*pool.name),
        };
        let outcome = match name {
            None => Outcome::NotCompared("no adapter is served".to_owned()),
            Some(name) => compare_one(app, text, engine, name, form, &body).await?,
        };
        outcomes.insert(form, outcome);
    }
    Some(outcomes)
}

async fn compare_one(
    app: &App,
    text: &TextModel,
    engine: &Engine,
    name: &str,
    form: Form,
    body: &Body,
) -> Option<Outcome> {
    let chat = match form.api() {
        Some(api) => Some(chat_of(api, body)?),
        None => None,
    };
    let envelope = &chat.as_ref().unwrap_or(body).read::<Envelope<'_>>().ok()?;
    let prompt = envelope.prompt.map(|raw| serde_json::from_str::<String>(raw.get()));
    let prompt = prompt.transpose().ok()?;
    let own = match &prompt {
        Some(prompt) => text.completion_tokens(prompt, true).map(text::Prompt::Tokens),
        None => text.chat_tokens(&envelope.chat(None)),
    };
    let own = match own {
        Ok(text::Prompt::Tokens(tokens)) => tokens,
        Ok(text::Prompt::Unsupported(why)) => return Some(Outcome::NotCompared(why)),
        Ok(_) => return None,
        Err(error) => return Some(Outcome::NotCompared(error.to_string())),
    };
    let told = match form.api().and_then(Api::renderer) {
        None => tokens_of(app, engine, "/tokenize", ask_body(envelope, name, prompt, &[])).await,
        Some(path) => {
            let body = body.with(&[("model", Some(json!(name)))]);
            tokens_of(app, engine, path, body.into()).await
        }
    };
    match told {
        Tokenized::Tokens(theirs) => Some(match difference(&own, &theirs) {
            None => Outcome::Agrees,
            Some(how) => Outcome::Differs(how),
        }),
        Tokenized::Refused(status) => {
            let path = form.api().and_then(Api::renderer).unwrap_or("/tokenize");
            let why = format!("the engine's {path} answers {status}");
            Some(Outcome::NotCompared(why))
        }
        Tokenized::Failed => None,
    }
}

/// The difference between two prompts; `None` if they are equal.
fn difference(own: &[u32], theirs: &[u32]) -> Option<String> {
    if own == theirs {
        return None;
    }
    let at = own.iter().zip(theirs).take_while(|(own, theirs)| own == theirs).count();
    Some(format!("{} tokens here, {} there, different from token {at} on", own.len(), theirs.len()))
}

/// An engine's response to `/tokenize`.
pub(crate) enum Tokenized {
    Tokens(Vec<u32>),
    /// It has no such endpoint, or does not accept this prompt.
    Refused(StatusCode),
    /// No response, or an error of the engine.
    Failed,
}

/// Requests the tokens of a prompt from `engine`.
pub(crate) async fn tokenize(app: &App, engine: &Engine, body: &Value) -> Tokenized {
    tokens_of(app, engine, "/tokenize", body.to_string().into_bytes()).await
}

/// Requests the tokens of a request from `engine` at `path`.
async fn tokens_of(app: &App, engine: &Engine, path: &str, body: Vec<u8>) -> Tokenized {
    #[derive(Deserialize)]
    struct Answer {
        /// The alias is the name that renderers use.
        #[serde(alias = "token_ids")]
        tokens: Vec<u32>,
    }
    let timeout = app.options.tokenize_timeout;
    match app.upstream.post_json(&engine.spec, path, body, MAX_ANSWER_BYTES, timeout).await {
        Ok((status, _)) if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => {
            Tokenized::Failed
        }
        Ok((status, answer)) => match serde_json::from_slice::<Answer>(&answer) {
            Ok(answer) => Tokenized::Tokens(answer.tokens),
            Err(_) => Tokenized::Refused(status),
        },
        Err(_) => Tokenized::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_that_differed_is_rendered_here_after_two_agreements_in_a_row() {
        let differs = || Outcome::Differs("x".to_owned());
        let unknown = || Outcome::NotCompared("x".to_owned());
        let remote = |outcomes: Vec<Outcome>| {
            let mut record = None;
            let next = |outcome| {
                record = Some(FormRecord::after(record.as_ref(), outcome));
                record.as_ref().is_some_and(|record| record.is_remote)
            };
            outcomes.into_iter().map(next).collect::<Vec<_>>()
        };
        let agrees = || Outcome::Agrees;
        assert_eq!(remote(vec![agrees(), unknown(), agrees()]), [false; 3]);
        assert_eq!(remote(vec![differs(), agrees(), agrees()]), [true, true, false]);
        assert_eq!(
            remote(vec![agrees(), agrees(), differs(), agrees(), differs(), agrees(), agrees()]),
            [false, false, true, true, true, true, false]
        );
        // A missing comparison proves nothing, and does not count as consecutive.
        assert_eq!(
            remote(vec![differs(), agrees(), unknown(), agrees(), agrees()]),
            [true, true, true, true, false]
        );
    }

    #[test]
    fn differences_say_where() {
        assert_eq!(difference(&[1, 2], &[1, 2]), None);
        let how = difference(&[1, 2, 3], &[1, 4]);
        assert_eq!(how.as_deref(), Some("3 tokens here, 2 there, different from token 1 on"));
    }
}

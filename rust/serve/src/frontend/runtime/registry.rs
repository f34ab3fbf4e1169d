//! Runtime workers come, change and go. Discovery says whether a worker is there; a failed
//! connection, or a ping without an answer while requests wait, puts it in doubt for a moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::select::Report;
use kvflash_core::text::model_folder;
use parking_lot::Mutex;

use super::super::app::App;
use super::super::engine::{Engine, Member};
use super::plane::{Cause, Plane};
use super::spec::{LoadReport, ModelInput, WorkerSpec};
use super::texts::ModelText;
use crate::Shutdown;

/// Add a worker or change it. Must be called within a tokio runtime.
///
/// # Errors
/// `Config` naming the field or the tokenizer's file, `Overloaded` at a limit.
pub(crate) fn put(app: &Arc<App>, json: &str) -> Result<InstanceId> {
    let spec = WorkerSpec::parse(json)?;
    let id = spec.id;
    let taken = take(app, spec);
    app.fleet.note_refused(id, taken.as_ref().err());
    taken
}

fn take(app: &Arc<App>, spec: WorkerSpec) -> Result<InstanceId> {
    let (id, events) = (spec.id, spec.events.clone());
    let known = app.fleet.engine(id);
    let engine = match known {
        Some(engine)
            if engine.member.as_ref().is_some_and(|old| old.spec.is_same_but_events(&spec)) =>
        {
            engine
        }
        Some(engine) if engine.member.is_none() => {
            return Err(Error::Conflict(format!(
                "worker id {id} is already registered as {}",
                engine.base
            )));
        }
        other => {
            // Loaded before the old one goes: a card that can't be served changes nothing.
            let text = text(app, &spec)?;
            let (formats, wrong) = app.formats.of_card(&spec.card);
            let state = app.fleet.state_of(id);
            if other.is_some() {
                // NotFound only says that it left by itself.
                let _ = app.fleet.remove(id);
            }
            let plane = Plane::new(&spec, app.options.connect_timeout, &app.upstream);
            let loads = Mutex::new(BTreeMap::new());
            let member = Arc::new(Member { plane, text, formats, loads, spec });
            let engine = app.fleet.add_member(Arc::clone(&member))?;
            if let Some(error) = wrong {
                // It still serves; reasoning and tool calls stay in the text.
                tracing::warn!(worker = id, %error, "cannot parse its answers");
                engine.notes.lock().faults.insert("card", error.to_string());
            }
            // Another card does not bring it back into service.
            app.fleet.set_state(id, state)?;
            let (interval, shutdown) =
                (app.options.health_interval, app.options.http.shutdown().clone());
            tokio::spawn(watch(Arc::clone(&engine), member, interval, shutdown));
            engine
        }
    };
    let subscribed = app.fleet.change_events(id, events);
    let mut notes = engine.notes.lock();
    notes.faults.remove("events");
    if let Err(error) = subscribed {
        // It serves without them: its cache is not known and earns no credit.
        tracing::error!(worker = id, %error, "cannot subscribe to its events");
        notes.faults.insert("events", format!("events: {error}"));
    }
    drop(notes);
    Ok(id)
}

/// The tokenizer of a worker: what --tokenizer says of its model, else its card's, else what --tokenizer says of
/// all models.
fn text(app: &App, spec: &WorkerSpec) -> Result<Option<Arc<ModelText>>> {
    if let Some(text) = app.texts.of(&spec.card.model_name) {
        return Ok(Some(text));
    }
    let named = spec.card.tokenizer.as_deref();
    let open = |named: &str| {
        let folder = model_folder(named).map_err(|error| {
            Error::Config(format!("worker {}: its card's tokenizer {error}", spec.id))
        })?;
        app.tokenizers.open(&folder, app.options.tokenizer_cache)
    };
    let opened = named.map(open);
    match (opened, &app.texts.of_all()) {
        (Some(Ok(text)), _) => Ok(Some(text)),
        (Some(Err(error)), Some(own)) => {
            tracing::warn!(worker = spec.id, %error, "using --tokenizer instead of the card's tokenizer");
            Ok(Some(Arc::clone(own)))
        }
        (None, Some(own)) => Ok(Some(Arc::clone(own))),
        // Only text that is cut into tokens here needs a tokenizer here.
        (_, None) if spec.is_prefill() || spec.card.model_input == ModelInput::Text => Ok(None),
        (Some(Err(error)), None) => Err(error),
        (None, None) => Err(Error::Config(
            "its card names no tokenizer folder, and the frontend has no --tokenizer: pass the model's folder to \
             register_llm (model_path), or set --tokenizer"
                .to_owned(),
        )),
    }
}

/// Take a worker's own report of its load.
///
/// # Errors
/// `Config` naming the field; `NotFound` for a worker that is not registered.
pub(crate) fn report(app: &App, json: &str) -> Result<()> {
    let report = LoadReport::parse(json)?;
    let unknown = || Error::NotFound(format!("no runtime worker {} is registered", report.id));
    let engine = app.fleet.engine(report.id).ok_or_else(unknown)?;
    let member = engine.member.as_ref().ok_or_else(unknown)?;
    if report.dp_rank >= engine.spec.dp_size {
        return Err(Error::Config(format!(
            "load report of worker {}: dp_rank must be below {}, got {}",
            report.id, engine.spec.dp_size, report.dp_rank
        )));
    }
    let told = Report {
        kv_used_blocks: report.kv_used_blocks,
        kv_total_blocks: report.kv_total_blocks,
        active_decode_blocks: report.active_decode_blocks,
        active_prefill_tokens: report.active_prefill_tokens,
        max_num_batched_tokens: None,
    };
    if let Some(pool) = app.fleet.pool_of(report.id) {
        pool.selector.busy.report(Worker::new(report.id, report.dp_rank), &told);
    }
    member.loads.lock().insert(report.dp_rank, report);
    Ok(())
}

/// Pauses between two looks at a worker in doubt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Look after a worker until it is removed or the service stops. While requests wait for its first byte it is asked
/// every `interval`, also after that: one that is frozen takes no requests with it.
async fn watch(engine: Arc<Engine>, member: Arc<Member>, interval: Duration, shutdown: Shutdown) {
    let mut pause = FIRST_PAUSE;
    while engine.is_waited_for() || !(engine.is_removed() || shutdown.is_stopped()) {
        if engine.is_healthy() {
            tokio::select! {
                () = engine.doubt.notified() => {}
                () = tokio::time::sleep(interval) => {}
                () = shutdown.wait(), if !shutdown.is_stopped() => {}
            }
            if engine.is_healthy() && !engine.is_waited_for() {
                continue;
            }
        } else {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = shutdown.wait(), if !shutdown.is_stopped() => {}
            }
        }
        // Only a silent worker fails this check.
        let is_looking = engine.is_healthy() || engine.is_removed();
        match member.plane.ping(&member.spec).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                if !engine.is_removed() && engine.recovered() {
                    tracing::info!(worker = engine.id, url = engine.base, "worker is healthy");
                }
            }
            // It closes its port before it ends, and still answers what it has.
            Err(error) if is_looking && error.cause != Cause::Silent => {}
            Err(error) => {
                pause = (pause * 2).min(LONGEST_PAUSE);
                engine.check_failed(&error.message, None);
            }
        }
    }
}

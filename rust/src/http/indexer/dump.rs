//! GET /dump, made worker by worker while it is sent.

use std::convert::Infallible;
use std::fmt::Write;
use std::iter::once;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;

use crate::catalog::{ModelIndex, dump_worker};
use crate::ids::Worker;

/// `{"model:tenant": {"block_size": N, "events": [...]}, ...}`; events are numbered from 0 in each model.
///
/// # Cost
/// One worker's events in memory at a time, however slowly the client reads.
pub(super) fn dump_body(models: Vec<Arc<ModelIndex>>) -> Body {
    let parts = models.into_iter().enumerate().flat_map(|(at, model)| {
        let head = model_head(at, &model);
        let workers = model.index.workers();
        let mut event_id = 0;
        let events = workers.into_iter().map(move |worker| {
            // Sorting a large worker's blocks takes milliseconds: other connections go on meanwhile.
            tokio::task::block_in_place(|| worker_events(&model, worker, &mut event_id))
        });
        once(head).chain(events).chain(once("]}".to_owned()))
    });
    let parts = once("{".to_owned()).chain(parts).chain(once("}".to_owned()));
    let chunks = parts.filter(|part| !part.is_empty()).map(|part| Ok(Bytes::from(part)));
    Body::from_stream(stream::iter(chunks.map(|chunk: Result<Bytes, Infallible>| chunk)))
}

fn model_head(at: usize, model: &ModelIndex) -> String {
    let separator = if at == 0 { "" } else { "," };
    let key = serde_json::Value::from(model.key.to_string());
    let block_size = serde_json::Value::from(model.block_size());
    format!("{separator}{key}:{{\"block_size\":{block_size},\"events\":[")
}

fn worker_events(model: &ModelIndex, worker: Worker, event_id: &mut u64) -> String {
    let mut text = String::new();
    for event in dump_worker(model.index.as_ref(), worker) {
        let separator = if *event_id == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{}", event.numbered(*event_id).to_json());
        *event_id += 1;
    }
    text
}

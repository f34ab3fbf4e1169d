//! GET /dump and GET /digest: the content of the index, created publisher by publisher while it is
//! sent.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write;
use std::iter::once;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::stream;
use kvflash_core::catalog::{self, Catalog, ModelIndex, ModelKey, Part};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::super::Reject;
use super::mask::HashMask;

/// Media type of the binary form.
pub(super) const DUMP_TYPE: &str = "application/vnd.kvflash.dump";

/// Maximum concurrent dumps.
const DUMPS_MAX: usize = 4;

/// A dump without reads for so long no longer counts as concurrent.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// Filter of a dump.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DumpQuery {
    pub format: Option<String>,
    pub model_name: Option<String>,
    pub tenant_id: Option<String>,
}

impl DumpQuery {
    fn wants(&self, key: &ModelKey) -> bool {
        let is_fit = |wanted: &Option<String>, name: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == name)
        };
        is_fit(&self.model_name, &key.model_name) && is_fit(&self.tenant_id, &key.tenant_id)
    }
}

/// Dumps in progress, by their last reads.
#[derive(Default)]
pub(super) struct Dumps(Mutex<Vec<Arc<Mutex<Instant>>>>);

/// The right to read a dump; released when dropped.
pub(super) struct Reading(Arc<Mutex<Instant>>);

impl Dumps {
    /// # Errors
    /// 503 at the limit of concurrent dumps.
    pub fn begin(&self) -> Result<Reading, Reject> {
        let mut readers = self.0.lock();
        readers.retain(|reader| Arc::strong_count(reader) > 1);
        let is_busy = |reader: &&Arc<Mutex<Instant>>| reader.lock().elapsed() <= IDLE_TIME;
        if readers.iter().filter(is_busy).count() >= DUMPS_MAX {
            let message = format!("{DUMPS_MAX} dumps are being read, which is the limit");
            return Err(Reject::momentary(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        let asked = Arc::new(Mutex::new(Instant::now()));
        readers.push(Arc::clone(&asked));
        Ok(Reading(asked))
    }
}

impl Reading {
    fn ask(&self) {
        *self.0.lock() = Instant::now();
    }
}

/// Models selected by `query`, each with its parts.
fn models(catalog: &Catalog, query: &DumpQuery) -> Vec<(Arc<ModelIndex>, Vec<Part>)> {
    let mut parts: BTreeMap<ModelKey, Vec<Part>> = BTreeMap::new();
    for part in catalog::parts(catalog) {
        parts.entry(part.model.key.clone()).or_default().push(part);
    }
    let models = catalog.models().into_iter().filter(|model| query.wants(&model.key));
    models
        .map(|model| {
            let parts = parts.remove(&model.key).unwrap_or_default();
            (model, parts)
        })
        .collect()
}

/// `{"model:tenant": {"block_size": N, "model_name": .., "tenant_id": .., "events": [...], "watermarks":
/// [...]}, ...}`; events are numbered from 0 in each model.
///
/// # Cost
/// Holds one publisher's events in memory at a time, however slowly the client reads.
pub(super) fn json_body(
    catalog: &Catalog,
    query: &DumpQuery,
    reading: Reading,
    mask: Option<HashMask>,
) -> Body {
    let all = models(catalog, query).into_iter().enumerate();
    let chunks = all.flat_map(move |(at, (model, parts))| {
        let (mut event_id, mask) = (0, mask.clone());
        let mut marks: Vec<String> = Vec::new();
        // One element more than there are parts: the last one closes the model.
        let mut parts = parts.into_iter();
        let mut is_open = true;
        let body = std::iter::from_fn(move || {
            if let Some(part) = parts.next() {
                return Some(part_events(&part, &mut event_id, &mut marks, mask.as_ref()));
            }
            std::mem::take(&mut is_open)
                .then(|| format!("],\"watermarks\":[{}]}}", marks.join(",")))
        });
        once(model_head(at, &model)).chain(body)
    });
    body(once("{".to_owned()).chain(chunks).chain(once("}".to_owned())), reading)
}

fn body(chunks: impl Iterator<Item = impl Into<Bytes>> + Send + 'static, reading: Reading) -> Body {
    let chunks = chunks.map(move |chunk| {
        reading.ask();
        let chunk: Bytes = chunk.into();
        chunk
    });
    let chunks = chunks.filter(|chunk| !chunk.is_empty()).map(Ok::<_, Infallible>);
    Body::from_stream(stream::iter(chunks))
}

fn model_head(at: usize, model: &ModelIndex) -> String {
    let separator = if at == 0 { "" } else { "," };
    let [key, model_name, tenant_id] =
        [&model.key.to_string(), &model.key.model_name, &model.key.tenant_id]
            .map(|name| Value::from(name.as_str()));
    let block_size = Value::from(model.block_size());
    format!(
        "{separator}{key}:{{\"block_size\":{block_size},\"model_name\":{model_name},\
         \"tenant_id\":{tenant_id},\"events\":["
    )
}

fn part_events(
    part: &Part,
    event_id: &mut u64,
    marks: &mut Vec<String>,
    mask: Option<&HashMask>,
) -> String {
    // Sorting a large worker's blocks takes milliseconds: other connections continue meanwhile.
    let (events, mark) = tokio::task::block_in_place(|| {
        let (mut events, mark) = part.events();
        if let Some(mask) = mask {
            events.iter_mut().for_each(|event| mask.event(event));
        }
        (events, mark)
    });
    marks.push(serde_json::to_string(&mark).unwrap_or_default());
    let mut text = String::new();
    for event in events {
        let separator = if *event_id == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{}", event.numbered(*event_id).to_json());
        *event_id += 1;
    }
    text
}

/// The binary format, defined in `catalog/transfer.rs`.
pub(super) fn binary_body(catalog: &Catalog, query: &DumpQuery, reading: Reading) -> Body {
    let parts = models(catalog, query).into_iter().flat_map(|(_, parts)| parts);
    let chunks = parts.map(|part| tokio::task::block_in_place(|| part.encode()));
    let head = once(catalog::MAGIC.to_vec());
    body(head.chain(chunks).chain(once(vec![0; 8])), reading)
}

/// GET /digest: the content of the index in a few bytes per worker, by model; replicas with equal
/// content answer equally.
///
/// # Cost
/// Holds one worker's blocks in memory at a time, 48 bytes each.
pub(super) fn digests(
    catalog: &Catalog,
    query: &DumpQuery,
    reading: &Reading,
    mask: Option<&HashMask>,
) -> Vec<Value> {
    let digest_of = |(model, parts): (Arc<ModelIndex>, Vec<Part>)| {
        let mut workers = Vec::new();
        for part in parts {
            reading.ask();
            workers.extend(tokio::task::block_in_place(|| part.digests()));
        }
        workers.sort_unstable_by_key(|digest| digest.worker);
        if let Some(mask) = mask {
            workers
                .iter_mut()
                .for_each(|digest| digest.digest = mask.word("digest", digest.digest));
        }
        let mut hash = Xxh3::new();
        for digest in &workers {
            let words = [digest.worker.instance_id, digest.worker.dp_rank.into(), digest.digest];
            words.iter().for_each(|word| hash.update(&word.to_le_bytes()));
        }
        let of_worker = |one: &catalog::Digest| {
            json!({
                "instance_id": one.worker.instance_id,
                "dp_rank": one.worker.dp_rank,
                "blocks": one.blocks,
                "digest": format!("{:016x}", one.digest),
                "last_sequence": one.last_sequence,
            })
        };
        let blocks: usize = workers.iter().map(|digest| digest.blocks).sum();
        // An empty model has no digest, so that replicas that never heard of it agree.
        (blocks > 0).then(|| {
            json!({
                "model_name": model.key.model_name,
                "tenant_id": model.key.tenant_id,
                "block_size": model.block_size(),
                "blocks": blocks,
                "digest": format!("{:016x}", hash.digest()),
                "workers": workers.iter().map(of_worker).collect::<Vec<_>>(),
            })
        })
    };
    models(catalog, query).into_iter().filter_map(digest_of).collect()
}

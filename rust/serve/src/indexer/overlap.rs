//! Responses of POST /query and /query_by_hash, written during the search: they list every worker
//! of a model, and with thousands of them the writing is most of the work.

use std::cell::RefCell;

use kvflash_core::catalog::{Catalog, ModelIndex, PromptNames, Reuse};
use kvflash_core::error::Result;
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use kvflash_core::index::{self, Matches};

use super::form::Form;

/// Approximate bytes per worker in a response, for a single allocation.
const BYTES_PER_WORKER: usize = 112;

/// One worker in the response; all counts in tokens, tiers cumulative.
#[derive(Debug, Clone, Copy)]
struct Row {
    worker: Worker,
    gpu: u64,
    cpu: u64,
    disk: u64,
}

/// A thread's query buffers.
#[derive(Default)]
struct Room {
    matches: Matches,
    exact: Vec<Reuse>,
    rows: Vec<Row>,
    frequencies: Vec<u32>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// The response for a prompt, as JSON.
///
/// # Errors
/// `NotFound` for an unknown model and tenant.
pub fn query_tokens(
    catalog: &Catalog,
    (model_name, tenant_id): (&str, &str),
    token_ids: &[u32],
    keys: &NameKeys<'_>,
) -> Result<Vec<u8>> {
    let model = catalog.model(model_name, tenant_id)?;
    Ok(find_tokens(&model, token_ids, keys, Form::Json))
}

/// The response for a prompt.
pub(super) fn find_tokens(
    model: &ModelIndex,
    token_ids: &[u32],
    keys: &NameKeys<'_>,
    form: Form,
) -> Vec<u8> {
    let names = model.names(token_ids, keys);
    find(model, &model.locals(token_ids, keys), &names, token_ids.len() as u64, form)
}

/// The response for local block hashes. For workers with several cache groups it needs the prompt's
/// tokens, unless their events say which block a name stands for.
pub(super) fn find_hashes(model: &ModelIndex, locals: &[u64], form: Form) -> Vec<u8> {
    let tokens = locals.len() as u64 * u64::from(model.block_size().unwrap_or(0)) + 1;
    find(model, locals, &PromptNames::default(), tokens, form)
}

/// Registered workers without a match have zeros. Empty while the index has no block size.
fn find(
    model: &ModelIndex,
    locals: &[u64],
    names: &PromptNames,
    tokens: u64,
    form: Form,
) -> Vec<u8> {
    ROOM.with_borrow_mut(|room| {
        let Room { matches, exact, rows, frequencies } = room;
        rows.clear();
        frequencies.clear();
        if let Some(block_size) = model.block_size() {
            model.find(locals, names, tokens, matches, exact);
            index::frequencies(matches.as_slice(), frequencies);
            matches.sort();
            merge(matches, exact, &model.workers(), block_size, rows);
        }
        write(rows, frequencies, form)
    })
}

/// All workers in ascending order. Token-exact results replace whole blocks.
fn merge(
    matches: &Matches,
    exact: &[Reuse],
    registered: &[Worker],
    block_size: u32,
    rows: &mut Vec<Row>,
) {
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_size);
    let none = |worker: &Worker| Row { worker: *worker, gpu: 0, cpu: 0, disk: 0 };
    let mut rest = registered;
    for found in matches.as_slice() {
        let before = rest.partition_point(|worker| *worker < found.worker);
        rows.extend(rest[..before].iter().map(none));
        let is_registered = rest.get(before) == Some(&found.worker);
        rest = &rest[before + usize::from(is_registered)..];
        rows.push(Row {
            worker: found.worker,
            gpu: tokens(found.device),
            cpu: tokens(found.host),
            // Shared storage counts as disk, as in the published API.
            disk: tokens(found.disk.max(found.external)),
        });
    }
    rows.extend(rest.iter().map(none));
    for reuse in exact {
        if let Ok(at) = rows.binary_search_by_key(&reuse.worker, |row| row.worker) {
            let Reuse { worker, device, host, disk } = *reuse;
            rows[at] = Row { worker, gpu: device.into(), cpu: host.into(), disk: disk.into() };
        }
    }
}

fn write(rows: &[Row], frequencies: &[u32], form: Form) -> Vec<u8> {
    let out = Vec::with_capacity(64 + rows.len() * BYTES_PER_WORKER + frequencies.len() * 6);
    match form {
        Form::Json => Pen::<true>(out).write(rows, frequencies),
        Form::Msgpack => Pen::<false>(out).write(rows, frequencies),
    }
}

/// Writes a response. Keys are strings in both formats, because not every msgpack reader accepts
/// others; they are names of fields and digits, so nothing needs escaping.
///
/// Writing to a Vec can't fail, and no response has 2^32 entries.
struct Pen<const IS_JSON: bool>(Vec<u8>);

impl<const IS_JSON: bool> Pen<IS_JSON> {
    fn write(mut self, rows: &[Row], frequencies: &[u32]) -> Vec<u8> {
        let instances = || rows.chunk_by(|a, b| a.worker.instance_id == b.worker.instance_id);
        let count = instances().count();
        self.open_map(3);
        self.key("scores");
        self.open_map(count);
        for ranks in instances() {
            self.key(itoa::Buffer::new().format(ranks[0].worker.instance_id));
            self.ranks(ranks);
        }
        self.close(b'}');
        self.key("frequencies");
        self.open_list(frequencies.len());
        frequencies.iter().for_each(|workers| self.number(u64::from(*workers)));
        self.close(b']');
        self.key("instances");
        self.open_map(count);
        for ranks in instances() {
            let best = |count: fn(&Row) -> u64| ranks.iter().map(count).max().unwrap_or(0);
            let (gpu, cpu, disk) = (best(|row| row.gpu), best(|row| row.cpu), best(|row| row.disk));
            self.key(itoa::Buffer::new().format(ranks[0].worker.instance_id));
            self.open_map(5);
            self.key("longest_matched");
            self.number(gpu.max(cpu).max(disk));
            self.key("gpu");
            self.number(gpu);
            self.key("dp");
            self.ranks(ranks);
            self.key("cpu");
            self.number(cpu);
            self.key("disk");
            self.number(disk);
            self.close(b'}');
        }
        self.close(b'}');
        self.close(b'}');
        self.0
    }

    fn ranks(&mut self, ranks: &[Row]) {
        self.open_map(ranks.len());
        for row in ranks {
            self.key(itoa::Buffer::new().format(row.worker.dp_rank));
            self.number(row.gpu);
        }
        self.close(b'}');
    }

    fn open_map(&mut self, len: usize) {
        match IS_JSON {
            true => self.0.push(b'{'),
            false => _ = rmp::encode::write_map_len(&mut self.0, len as u32),
        }
    }

    fn open_list(&mut self, len: usize) {
        match IS_JSON {
            true => self.0.push(b'['),
            false => _ = rmp::encode::write_array_len(&mut self.0, len as u32),
        }
    }

    /// Ends a map or a list; in msgpack, its length does.
    fn close(&mut self, end: u8) {
        if IS_JSON {
            self.0.push(end);
        }
    }

    /// Begins an entry of JSON.
    fn separate(&mut self) {
        if !matches!(self.0.last(), None | Some(b'{' | b'[' | b':')) {
            self.0.push(b',');
        }
    }

    fn key(&mut self, key: &str) {
        match IS_JSON {
            true => {
                self.separate();
                self.0.push(b'"');
                self.0.extend_from_slice(key.as_bytes());
                self.0.extend_from_slice(b"\":");
            }
            false => _ = rmp::encode::write_str(&mut self.0, key),
        }
    }

    fn number(&mut self, number: u64) {
        match IS_JSON {
            true => {
                self.separate();
                self.0.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
            }
            false => _ = rmp::encode::write_uint(&mut self.0, number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvflash_core::ids::Tier;
    use kvflash_core::index::{Block, DEFAULT_SEED, RadixIndex};

    #[test]
    fn answer_is_in_tokens_with_zeros_for_the_registered_rest() {
        let index = RadixIndex::default();
        let block = |n: u64| Block { engine_hash: n, local_hash: n };
        let store = |worker, tier, parent: Option<u64>, blocks: &[Block]| {
            index.store(worker, tier, parent, DEFAULT_SEED, blocks);
        };
        store(Worker::new(1, 0), Tier::Device, None, &[block(1), block(2)]);
        store(Worker::new(1, 0), Tier::Host, Some(2), &[block(3)]);
        store(Worker::new(1, 1), Tier::Device, None, &[block(1)]);
        store(Worker::new(1, 1), Tier::External, Some(1), &[block(2), block(3), block(4)]);
        store(Worker::new(10, 0), Tier::Device, None, &[block(1)]);
        let mut matches = Matches::default();
        index.find_matches(&[1, 2, 3, 4], &mut matches);
        matches.sort();
        let (mut rows, mut frequencies) = (Vec::new(), Vec::new());
        let registered = [Worker::new(0, 3), Worker::new(1, 0), Worker::new(2, 1)];
        merge(&matches, &[], &registered, 16, &mut rows);
        index::frequencies(matches.as_slice(), &mut frequencies);
        let wanted = serde_json::json!({
            "scores": {"0": {"3": 0}, "1": {"0": 32, "1": 16}, "2": {"1": 0}, "10": {"0": 16}},
            "frequencies": [3, 1],
            "instances": {
                "0": {"longest_matched": 0, "gpu": 0, "dp": {"3": 0}, "cpu": 0, "disk": 0},
                "1": {"longest_matched": 64, "gpu": 32, "dp": {"0": 32, "1": 16}, "cpu": 48, "disk": 64},
                "2": {"longest_matched": 0, "gpu": 0, "dp": {"1": 0}, "cpu": 0, "disk": 0},
                "10": {"longest_matched": 16, "gpu": 16, "dp": {"0": 16}, "cpu": 16, "disk": 16},
            },
        });
        let json = write(&rows, &frequencies, Form::Json);
        assert_eq!(String::from_utf8_lossy(&json), wanted.to_string(), "no space, keys in order");
        let msgpack = write(&rows, &frequencies, Form::Msgpack);
        let read: serde_json::Value = rmp_serde::from_slice(&msgpack).expect("what was written");
        assert_eq!(read, wanted);
        let empty = write(&[], &[], Form::Json);
        assert_eq!(empty, br#"{"scores":{},"frequencies":[],"instances":{}}"#);
    }
}

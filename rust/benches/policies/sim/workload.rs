//! What is played: a recorded trace, one of the same shape, and tenants of very unequal appetite.

use std::path::Path;

use hashbrown::HashMap;
use kvflash::index::DEFAULT_SEED;
use kvflash::select::Prompt;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// One request.
#[derive(Debug, Clone)]
pub struct Request {
    pub at_us: u64,
    /// Whose it is; a place in [`Workload::clients`].
    pub client: usize,
    pub input: u64,
    pub output: u64,
    /// Ids of the prompt's full blocks: equal ids stand for equal text behind equal text.
    pub ids: Box<[u64]>,
}

/// Requests in the order of their arrival.
#[derive(Debug)]
pub struct Workload {
    pub name: String,
    pub block_size: u64,
    pub requests: Vec<Request>,
    pub clients: Vec<Client>,
    /// Hashed once for all that play it.
    pub prompts: Vec<Prompt>,
}

#[derive(Debug, Clone)]
pub struct Client {
    pub name: String,
    /// Asks for less than its share.
    pub is_light: bool,
}

/// Blocks of recorded traces.
const TRACE_BLOCK: u64 = 512;
/// Blocks of traces made here: the mocker's.
const OWN_BLOCK: u64 = 64;

impl Workload {
    fn new(
        name: String,
        block_size: u64,
        mut requests: Vec<Request>,
        clients: Vec<Client>,
    ) -> Self {
        requests.sort_by_key(|request| request.at_us);
        let prompt = |request: &Request| {
            let locals = request.ids.iter().map(|id| local_hash(*id)).collect();
            let prompt = Prompt::of_hashes(locals, block_size as u32, DEFAULT_SEED);
            Prompt { isl_tokens: request.input, ..prompt }
        };
        let prompts = requests.iter().map(prompt).collect();
        Self { name, block_size, requests, clients, prompts }
    }

    /// A recorded trace (JSON lines with `timestamp` in ms, lengths and `hash_ids` of 512 tokens),
    /// `speed` times as fast. It names no clients: each conversation is one.
    ///
    /// # Errors
    /// In words, with the file and the line.
    pub fn recorded(path: &Path, speed: f64) -> Result<Self, String> {
        #[derive(serde::Deserialize)]
        struct Line {
            timestamp: u64,
            input_length: u64,
            output_length: u64,
            hash_ids: Vec<u64>,
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let (mut requests, mut conversations) = (Vec::new(), HashMap::new());
        for (at, line) in text.lines().enumerate() {
            let line: Line = serde_json::from_str(line)
                .map_err(|error| format!("{} line {}: {error}", path.display(), at + 1))?;
            let full = (line.input_length / TRACE_BLOCK) as usize;
            // All begin alike; what comes behind is the conversation's own.
            let second = line.hash_ids.get(1).copied().unwrap_or(u64::MAX - at as u64);
            let next = conversations.len();
            requests.push(Request {
                at_us: (line.timestamp as f64 * 1e3 / speed) as u64,
                client: *conversations.entry(second).or_insert(next),
                input: line.input_length,
                output: line.output_length,
                ids: line.hash_ids[..full.min(line.hash_ids.len())].into(),
            });
        }
        Ok(Self::conversations("recorded", requests, conversations.len()))
    }

    /// Conversations of the shape of the Mooncake trace: as many and as long, with as much to reuse.
    pub fn made_up(count: usize, speed: f64) -> Self {
        let mut rng = SmallRng::seed_from_u64(7);
        let (mut requests, mut open) = (Vec::new(), Vec::<(usize, Vec<u64>)>::new());
        let (mut clients, mut next_id, mut at_s) = (0, 1, 0.0);
        while requests.len() < count {
            at_s += exponential(&mut rng, 0.294);
            // Two of five are a later turn.
            let is_new = open.is_empty() || rng.random_bool(0.61);
            if is_new {
                open.push((clients, vec![0]));
                clients += 1;
            }
            let which = if is_new { open.len() - 1 } else { rng.random_range(0..open.len()) };
            let (client, said) = &mut open[which];
            let more = log_normal(&mut rng, if is_new { 4_500.0 } else { 1_800.0 }, 1.1);
            let more = more.min(100_000.0) as u64 + 100;
            let mut ids = said.clone();
            let input = (ids.len() as u64 * TRACE_BLOCK + more).min(126_000);
            while ((ids.len() + 1) as u64) * TRACE_BLOCK <= input {
                ids.push(next_id);
                next_id += 1;
            }
            *said = ids.clone();
            let (client, output) = (*client, log_normal(&mut rng, 300.0, 0.6).clamp(1.0, 2_000.0));
            let at_us = (at_s * 1e6 / speed) as u64;
            requests.push(Request { at_us, client, input, output: output as u64, ids: ids.into() });
            if open.len() > 300 {
                open.swap_remove(rng.random_range(0..200));
            }
        }
        Self::conversations("generated", requests, clients)
    }

    fn conversations(name: &str, requests: Vec<Request>, clients: usize) -> Self {
        let client = |n| Client { name: format!("conversation {n}"), is_light: true };
        let clients = (0..clients).map(client).collect();
        Self::new(name.into(), TRACE_BLOCK, requests, clients)
    }

    /// Tenants for `seconds`: 4 that flood with batches, 8 that are on and off, 48 that chat. Ten system prompts
    /// are shared.
    pub fn tenants(seed: u64, seconds: f64, flood: f64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut maker = Maker { next_id: 0, requests: Vec::new() };
        let systems: Vec<Vec<u64>> = (0..10).map(|n| maker.blocks(8 + 8 * n)).collect();
        let mut clients = Vec::new();
        let mut client = |kind: &str, is_light| {
            clients.push(Client { name: format!("{kind} {}", clients.len()), is_light });
            clients.len() - 1
        };
        for system in &systems[..4] {
            let client = client("flood", false);
            let mut at_s = 0.1 * seconds;
            while at_s < 0.8 * seconds {
                at_s += exponential(&mut rng, 1.0 / flood);
                let more = rng.random_range(1_000..7_000);
                let output = rng.random_range(50..300);
                maker.turn(client, at_s, &mut system.clone(), more, output);
            }
        }
        for system in &systems[..8] {
            let client = client("on/off", true);
            let mut at_s = rng.random_range(0.0..20.0);
            while at_s < seconds {
                // 10 s of three a second, then 30 s of nothing.
                let until_s = at_s + 10.0;
                while at_s < until_s && at_s < seconds {
                    at_s += exponential(&mut rng, 0.33);
                    let more = rng.random_range(200..3_000);
                    let output = rng.random_range(50..250);
                    maker.turn(client, at_s, &mut system.clone(), more, output);
                }
                at_s += 30.0;
            }
        }
        for light in 0..48 {
            let client = client("chat", true);
            let mut at_s = rng.random_range(0.0..10.0);
            let mut said = systems[light % 10].clone();
            while at_s < seconds {
                let more = rng.random_range(50..800);
                let output = rng.random_range(50..400);
                maker.turn(client, at_s, &mut said, more, output);
                if said.len() > 160 || rng.random_bool(0.1) {
                    said = systems[light % 10].clone();
                }
                at_s += 2.0 + exponential(&mut rng, 8.0);
            }
        }
        Self::new("tenants".into(), OWN_BLOCK, maker.requests, clients)
    }
}

struct Maker {
    next_id: u64,
    requests: Vec<Request>,
}

impl Maker {
    fn blocks(&mut self, count: u64) -> Vec<u64> {
        let first = self.next_id;
        self.next_id += count;
        (first..self.next_id).collect()
    }

    /// A prompt of what was said and `more` tokens, which are said then.
    fn turn(&mut self, client: usize, at_s: f64, said: &mut Vec<u64>, more: u64, output: u64) {
        let input = said.len() as u64 * OWN_BLOCK + more;
        said.extend(self.blocks(more / OWN_BLOCK));
        let (at_us, ids) = ((at_s * 1e6) as u64, said.as_slice().into());
        self.requests.push(Request { at_us, client, input, output, ids });
    }
}

/// The content of a block, as the index knows it.
pub fn local_hash(id: u64) -> u64 {
    mixed(id + 1)
}

fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The prompt's token ids as bytes, for policies that cut text: four bytes a token.
pub fn text(request: &Request, number: usize, block_size: u64, text: &mut Vec<u8>) {
    text.clear();
    text.reserve(4 * request.input as usize + 8);
    let rest = request.input - request.ids.len() as u64 * block_size;
    let full = request.ids.iter().map(|id| (*id, block_size));
    for (id, tokens) in full.chain([(u64::MAX / 2 + number as u64, rest)]) {
        let start = mixed(id + 1);
        let words = 0..tokens.div_ceil(2);
        words.for_each(|n| text.extend_from_slice(&mixed(start ^ n).to_le_bytes()));
    }
    text.truncate(4 * request.input as usize);
}

fn exponential(rng: &mut SmallRng, mean: f64) -> f64 {
    -f64::ln(rng.random_range(1e-12..1.0)) * mean
}

fn log_normal(rng: &mut SmallRng, median: f64, sigma: f64) -> f64 {
    // The sum of twelve uniform draws is close enough to a normal one.
    let normal: f64 = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    median * (sigma * normal).exp()
}

//! What is played: sessions of turns, from recorded traces or made here.

use std::path::Path;
use std::sync::Arc;

use hashbrown::HashMap;
use kvflash_core::index::DEFAULT_SEED;
use kvflash_core::select::Prompt;

use crate::timing::Timing;

/// One request of a session.
#[derive(Debug, Clone)]
pub struct Turn {
    /// From the end of the answer before it, or for the first one from the session's start.
    pub pause_us: u64,
    /// Tokens of the prompt; at least 1.
    pub input: u64,
    /// Tokens of the answer; at least 1.
    pub output: u64,
    /// Ids of the full blocks of prompt and answer: equal ids stand for equal text behind equal text. Blocks of the
    /// answer may be left out; they are nobody else's then.
    pub ids: Arc<[u64]>,
}

/// Requests that follow one another.
#[derive(Debug, Clone)]
pub struct Session {
    /// Whose it is; a place in [`Workload::clients`].
    pub client: usize,
    /// When it starts.
    pub at_us: u64,
    /// At least one.
    pub turns: Vec<Turn>,
}

/// Whose sessions there are.
#[derive(Debug, Clone)]
pub struct Client {
    /// What policies are told.
    pub name: String,
    /// Asks for less than its share.
    pub is_light: bool,
}

/// Sessions in the order of their start.
#[derive(Debug, Clone)]
pub struct Workload {
    /// How tables call it.
    pub name: String,
    /// Tokens in a block.
    pub block_size: u64,
    /// The sessions.
    pub sessions: Vec<Session>,
    /// Whose they are.
    pub clients: Vec<Client>,
    /// Sessions wait in line, and so many requests are under way at once: whoever has waited longest has the next turn.
    /// Starts and pauses count for nothing then.
    pub at_once: Option<usize>,
}

impl Workload {
    /// `sessions` of one client each.
    pub fn of_sessions(name: &str, block_size: u64, mut sessions: Vec<Session>) -> Self {
        sessions.sort_by_key(|session| session.at_us);
        let clients = (0..sessions.len())
            .map(|n| Client { name: format!("session {n}"), is_light: true })
            .collect();
        sessions.iter_mut().enumerate().for_each(|(n, session)| session.client = n);
        Self { name: name.into(), block_size, sessions, clients, at_once: None }
    }

    /// Requests of all sessions.
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// Leave the sessions that start once `count` requests are there.
    pub fn truncate(&mut self, count: usize) {
        let mut seen = 0;
        self.sessions.retain(|session| {
            seen += session.turns.len();
            seen <= count || seen == session.turns.len()
        });
    }

    /// Answers of one token: what engines do that only prefill.
    pub fn prefill_only(mut self) -> Self {
        for turn in self.sessions.iter_mut().flat_map(|session| &mut session.turns) {
            turn.output = 1;
        }
        self.name += ", prefill only";
        self
    }

    /// What a prompt is to kvflash.
    pub fn prompt(&self, turn: &Turn) -> Prompt {
        let full = (turn.input / self.block_size) as usize;
        let ids = &turn.ids[..full.min(turn.ids.len())];
        let locals = ids.iter().map(|id| local_hash(*id)).collect();
        let prompt = Prompt::of_hashes(locals, self.block_size as u32, DEFAULT_SEED);
        Prompt { isl_tokens: turn.input, ..prompt }
    }

    /// Seconds of work that an engine with an endless cache would have with all of it, in batches of
    /// `batch` answers.
    pub fn work_s(&self, timing: &Timing, batch: f64) -> f64 {
        let mut seen = hashbrown::HashSet::new();
        let mut us = 0.0;
        for turn in self.sessions.iter().flat_map(|session| &session.turns) {
            let new = turn.ids.iter().filter(|id| seen.insert(**id)).count() as u64;
            let cached = (turn.ids.len() as u64 - new) * self.block_size;
            let (cached, input) = (cached.min(turn.input - 1) as f64, turn.input as f64);
            let uncached = input - cached;
            us += timing.prefill_us * uncached
                + timing.attention_us * uncached * (cached + uncached / 2.0)
                + turn.output as f64
                    * (timing.step_us / batch + timing.sequence_us + timing.context_us * input);
        }
        us / 1e6
    }

    /// Move the starts of sessions so that `workers` engines have `load` (1 is all they can do with an endless cache)
    /// on average until the last one starts.
    pub fn at_load(mut self, load: f64, workers: usize, timing: &Timing) -> Self {
        let last_us = self.sessions.last().map_or(0, |session| session.at_us).max(1);
        let wanted_us = self.work_s(timing, 8.0) / (load * workers as f64) * 1e6;
        let factor = wanted_us / last_us as f64;
        for session in &mut self.sessions {
            session.at_us = (session.at_us as f64 * factor) as u64;
        }
        self
    }

    /// A recorded trace of conversations (JSON lines with `timestamp` in ms, lengths and `hash_ids` of 512 tokens),
    /// `speed` times as fast, each request when it came. It names no clients: each conversation is one. Stamps are
    /// rounded to 3 s; the requests of one stamp are spread over them.
    ///
    /// # Errors
    /// In words, with the file and the line.
    pub fn conversations(path: &Path, speed: f64) -> Result<Self, String> {
        const BLOCK: u64 = 512;
        #[derive(serde::Deserialize)]
        struct Line {
            timestamp: u64,
            input_length: u64,
            output_length: u64,
            hash_ids: Vec<u64>,
        }
        let lines = read_lines::<Line>(path)?;
        let mut stamps: HashMap<u64, (u64, u64)> = HashMap::new();
        for line in &lines {
            stamps.entry(line.timestamp).or_default().0 += 1;
        }
        let (mut sessions, mut clients) = (Vec::new(), HashMap::new());
        for (at, line) in lines.into_iter().enumerate() {
            let (count, seen) = stamps.get_mut(&line.timestamp).expect("all were counted");
            let at_ms = line.timestamp as f64 + 3_000.0 * *seen as f64 / *count as f64;
            *seen += 1;
            let full = (line.input_length / BLOCK) as usize;
            // All begin alike; what comes behind is the conversation's own.
            let second = line.hash_ids.get(1).copied().unwrap_or(u64::MAX - at as u64);
            let next = clients.len();
            sessions.push(Session {
                at_us: (at_ms * 1e3 / speed) as u64,
                client: *clients.entry(second).or_insert(next),
                turns: vec![Turn {
                    pause_us: 0,
                    input: line.input_length.max(1),
                    output: line.output_length.max(1),
                    ids: line.hash_ids[..full.min(line.hash_ids.len())].into(),
                }],
            });
        }
        let clients = (0..clients.len())
            .map(|n| Client { name: format!("conversation {n}"), is_light: true })
            .collect();
        sessions.sort_by_key(|session| session.at_us);
        let name = "conversations".into();
        Self { name, block_size: BLOCK, sessions, clients, at_once: None }.of_some(path)
    }

    /// Recorded sessions of a coding agent (one a line: `requests` of `[t, input, output, api_s, think_s, [[first_id,
    /// count], ...]]`), each request after the answer before it. At most `turns` of a session count, prompts of more than
    /// `longest` tokens end it, and pauses last `most_pause_s` at the most.
    ///
    /// # Errors
    /// In words, with the file and the line.
    pub fn agents(
        path: &Path,
        turns: usize,
        longest: u64,
        most_pause_s: f64,
    ) -> Result<Self, String> {
        type Request = (f64, u64, u64, f64, f64, Vec<(u64, u64)>);
        #[derive(serde::Deserialize)]
        struct Line {
            block_size: u64,
            tool_tokens: u64,
            system_tokens: u64,
            requests: Vec<Request>,
        }
        let mut sessions = Vec::new();
        let mut block_size = 64;
        for (number, line) in read_lines::<Line>(path)?.into_iter().enumerate() {
            block_size = line.block_size;
            // Tools and system prompt of the same length are the same.
            let shared = (line.tool_tokens + line.system_tokens) / line.block_size;
            let common = (line.tool_tokens << 24 | line.system_tokens) << 16;
            let id = |block: u64, at: u64| match at < shared {
                true => common + at,
                false => (number as u64 + 1) << 40 | block,
            };
            let fitting = line.requests.into_iter().take_while(|request| request.1 <= longest);
            let turns: Vec<Turn> = fitting
                .take(turns)
                .map(|(_, input, output, _, think_s, runs)| {
                    let blocks = runs.iter().flat_map(|&(first, count)| first..first + count);
                    let blocks = blocks.take((input / line.block_size) as usize);
                    let ids = blocks.enumerate().map(|(at, block)| id(block, at as u64));
                    let pause_us = (think_s.min(most_pause_s) * 1e6) as u64;
                    let (input, output) = (input.max(1), output.clamp(1, 4_000));
                    Turn { pause_us, input, output, ids: ids.collect() }
                })
                .collect();
            if !turns.is_empty() {
                // Evenly, so that load can be set afterwards; the order is the file's.
                let at_us = number as u64 * 1_000_000;
                sessions.push(Session { client: 0, at_us, turns });
            }
        }
        Self::of_sessions("coding agents", block_size, sessions).of_some(path)
    }

    fn of_some(self, path: &Path) -> Result<Self, String> {
        match self.sessions.is_empty() {
            true => Err(format!("{}: has no request that can be played", path.display())),
            false => Ok(self),
        }
    }
}

fn read_lines<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let line = |(at, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|error| format!("{} line {}: {error}", path.display(), at + 1))
    };
    text.lines().enumerate().map(line).collect()
}

/// The content of a block, as the index knows it.
pub fn local_hash(id: u64) -> u64 {
    mixed(id.wrapping_add(1))
}

fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The prompt's token ids as bytes, for policies that cut text: four bytes a token.
pub fn text(turn: &Turn, number: usize, block_size: u64, text: &mut Vec<u8>) {
    let full = ((turn.input / block_size) as usize).min(turn.ids.len());
    let rest = turn.input - full as u64 * block_size;
    text.clear();
    text.reserve(4 * turn.input as usize + 8);
    let blocks = turn.ids[..full].iter().map(|id| (*id, block_size));
    for (id, tokens) in blocks.chain([(u64::MAX / 2 + number as u64, rest)]) {
        let start = mixed(id.wrapping_add(1));
        let words = 0..tokens.div_ceil(2);
        words.for_each(|n| text.extend_from_slice(&mixed(start ^ n).to_le_bytes()));
    }
    text.truncate(4 * turn.input as usize);
}

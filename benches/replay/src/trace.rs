//! Requests: read from a trace file, or made up in a similar shape.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

/// One request of a trace.
///
/// # Source
/// The open traces of Mooncake (FAST'25): one JSON object a line. Ids name blocks of 512 tokens; equal
/// ids mean equal content and equal content before it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Request {
    /// Tokens of the prompt.
    pub input_length: u64,
    /// Tokens generated.
    pub output_length: u64,
    /// What the prompt's tokens are, a block of 512 at a time.
    pub hash_ids: Vec<u64>,
}

/// A small seeded source of numbers (SplitMix64), the same everywhere.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `end`, which is not 0. The bias of the remainder is of no account here.
    pub fn below(&mut self, end: usize) -> usize {
        (self.roll() % end as u64) as usize
    }

    /// Above 0, up to 1.
    fn unit(&mut self) -> f64 {
        ((self.roll() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Log-normal: half of them below `median`.
    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        median * (sigma * normal).exp()
    }

    /// Puts `items` in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

/// Spreads a number over 64 bits.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// Reads a trace.
///
/// # Errors
/// When the file can't be read, or a line is not a request.
pub fn read(path: &Path) -> io::Result<Vec<Request>> {
    let lines = BufReader::new(File::open(path)?).lines();
    lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect()
}

/// Tokens that one id stands for.
pub const ID_TOKENS: u64 = 512;

/// Makes up `requests` requests: conversations that begin with a common system prompt, whose turns
/// repeat all that was said before; many run at a time.
pub fn generate(requests: usize, seed: u64) -> Vec<Request> {
    /// Conversations that are open at a time.
    const OPEN: usize = 400;
    let mut dice = Dice::new(seed);
    let mut next_id = 4;
    let mut open: Vec<(Vec<u64>, u64)> = Vec::new();
    let mut made = Vec::with_capacity(requests);
    while made.len() < requests {
        let mut at = dice.below(OPEN);
        if at >= open.len() {
            // Everybody shares the first id; two of three a longer system prompt as well.
            let ids = if dice.below(3) == 0 { vec![0] } else { vec![0, 1, 2, 3] };
            let tokens = ids.len() as u64 * ID_TOKENS;
            at = open.len();
            open.push((ids, tokens));
        }
        let (ids, tokens) = &mut open[at];
        let input = *tokens + dice.log_normal(2_500.0, 1.1).min(60_000.0) as u64 + 1;
        let output = dice.log_normal(250.0, 0.9).min(2_000.0) as u64 + 1;
        while (ids.len() as u64) < input.div_ceil(ID_TOKENS) {
            ids.push(next_id);
            next_id += 1;
        }
        made.push(Request { input_length: input, output_length: output, hash_ids: ids.clone() });
        // An id that was not full stands for other tokens once more is said.
        ids.truncate((input / ID_TOKENS) as usize);
        *tokens = input + output;
        if *tokens > 100_000 || dice.below(4) == 0 {
            open.swap_remove(at);
        }
    }
    made
}

/// Stretches every prompt: each id becomes `factor` ids, and the tokens grow with them.
pub fn stretch(requests: &mut [Request], factor: u64) {
    for request in requests {
        request.input_length *= factor;
        request.hash_ids = request
            .hash_ids
            .iter()
            .flat_map(|id| (0..factor).map(move |part| id * factor + part))
            .collect();
    }
}

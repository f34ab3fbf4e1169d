//! Prompt tokens still to be prefilled over time: a prompt in progress is partly done.

use std::collections::BTreeMap;

/// Observed tokens needed before a worker's speed is used.
const FEWEST_TOKENS: u64 = 4_096;
/// Milliseconds of work after which an observation counts half.
const MEMORY_MS: f64 = 30_000.0;

/// Expected duration of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Takes {
    /// Unknown.
    Unknown,
    /// This many milliseconds, learned from the worker's earlier prompts.
    About(u64),
    /// This many milliseconds, as configured or given.
    Told(u64),
}

impl Takes {
    /// The time of `tokens` prompt tokens at `told` tokens per second.
    pub fn told(tokens: u64, per_s: f64) -> Self {
        Self::Told(ms_of(tokens, per_s))
    }

    fn ms(self) -> Option<u64> {
        match self {
            Self::Unknown => None,
            Self::About(ms) | Self::Told(ms) => Some(ms),
        }
    }
}

fn ms_of(tokens: u64, per_s: f64) -> u64 {
    // Saturates, like every cast from float to integer.
    (tokens as f64 * 1_000.0 / per_s).ceil() as u64
}

/// One prompt.
#[derive(Debug, Clone, Copy)]
struct Prefill {
    tokens: u64,
    takes: Takes,
}

impl Prefill {
    fn is_told(&self) -> bool {
        matches!(self.takes, Takes::Told(_))
    }
}

/// A worker's speed as observed from first tokens; recent ones weigh more.
///
/// Between two first tokens the worker has processed the prompt of the second one, in any order and
/// with any concurrency: the speed is tokens by busy time, so that long prompts weigh more than
/// short ones.
#[derive(Debug, Default)]
struct Shown {
    tokens: f64,
    busy_ms: f64,
    /// Tokens observed in total, not reduced by halving.
    total: u64,
    /// Time of the last first token, or of the start of work.
    since_ms: u64,
}

impl Shown {
    fn see(&mut self, tokens: u64, now_ms: u64) {
        self.tokens += tokens as f64;
        self.total = self.total.saturating_add(tokens);
        self.busy_ms += now_ms.saturating_sub(self.since_ms) as f64;
        self.since_ms = now_ms;
        if self.busy_ms > MEMORY_MS {
            self.tokens /= 2.0;
            self.busy_ms /= 2.0;
        }
    }

    /// Tokens per second, once enough was observed. Less than a millisecond counts as one.
    fn per_s(&self) -> Option<f64> {
        let is_enough = self.total >= FEWEST_TOKENS;
        is_enough.then(|| self.tokens * 1_000.0 / self.busy_ms.max(1.0))
    }
}

/// The prompts that one worker still has to prefill, in order of arrival.
///
/// The oldest one is assumed to be in progress since it became the oldest. The time elapsed since
/// then is deducted; if it takes longer than given, the rest continues at its rate. A prompt
/// without a given duration can at most be completed itself: a worker that hangs must not look
/// idle.
#[derive(Debug, Default)]
pub(super) struct Prefills {
    /// By number; the lowest is the oldest.
    waiting: BTreeMap<u64, Prefill>,
    /// The oldest again: every decision asks about it at every worker.
    oldest: Option<Prefill>,
    tokens: u64,
    /// Of these, prompts without a given duration.
    untold: usize,
    /// Since when the oldest one is the oldest.
    since_ms: u64,
    shown: Shown,
}

impl Prefills {
    /// Adds a prompt; `number` is higher than all before. One without work does not wait: its first token says nothing of
    /// those behind it.
    pub fn push(&mut self, number: u64, tokens: u64, takes: Takes, now_ms: u64) {
        if tokens == 0 {
            return;
        }
        let prefill = Prefill { tokens, takes };
        if self.waiting.is_empty() {
            self.since_ms = now_ms;
            self.shown.since_ms = now_ms;
            self.oldest = Some(prefill);
        }
        self.tokens += tokens;
        self.untold += usize::from(!prefill.is_told());
        self.waiting.insert(number, prefill);
    }

    /// Expected duration of `tokens` here, from earlier prompts.
    pub fn learned(&self, tokens: u64) -> Takes {
        self.per_s().map_or(Takes::Unknown, |per_s| Takes::About(ms_of(tokens, per_s)))
    }

    /// Observed prompt tokens per second; `None` until enough was observed.
    pub fn per_s(&self) -> Option<f64> {
        self.shown.per_s()
    }

    /// Adds the tokens of a prompt that counts until it is done, if time is not considered.
    pub fn add(&mut self, tokens: u64) {
        self.tokens += tokens;
    }

    /// Removes tokens that were [added](Self::add).
    pub fn subtract(&mut self, tokens: u64) {
        self.tokens -= tokens;
    }

    /// Records a first token. Repeating it changes nothing.
    pub fn complete(&mut self, number: u64, now_ms: u64) {
        if let Some(done) = self.waiting.get(&number) {
            // A given duration is no observation.
            if !done.is_told() {
                self.shown.see(done.tokens, now_ms);
            }
            self.remove(number, now_ms);
        }
    }

    /// Removes a prompt that is no longer needed. Repeating it changes nothing.
    pub fn remove(&mut self, number: u64, now_ms: u64) {
        let is_oldest = self.waiting.first_key_value().is_some_and(|(first, _)| *first == number);
        let Some(gone) = self.waiting.remove(&number) else { return };
        self.tokens -= gone.tokens;
        self.untold -= usize::from(!gone.is_told());
        if is_oldest {
            self.since_ms = now_ms;
            self.oldest = self.waiting.first_key_value().map(|(_, oldest)| *oldest);
        }
    }

    /// Tokens of all prompts, as if nothing had been done.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Estimated remaining tokens.
    pub fn left(&self, now_ms: u64) -> u64 {
        let Some(oldest) = self.oldest else { return self.tokens };
        let Some(expected_ms) = oldest.takes.ms() else { return self.tokens };
        let elapsed_ms = now_ms.saturating_sub(self.since_ms);
        let most = if self.untold > 0 { oldest.tokens } else { self.tokens };
        self.tokens - done_of(oldest.tokens, elapsed_ms, expected_ms.max(1)).min(most)
    }
}

/// `tokens * elapsed_ms / expected_ms`, rounded down.
fn done_of(tokens: u64, elapsed_ms: u64, expected_ms: u64) -> u64 {
    // A division of 128 bits is a slow call, which hardly any numbers need.
    tokens.checked_mul(elapsed_ms).map_or_else(
        || {
            let done = u128::from(tokens) * u128::from(elapsed_ms) / u128::from(expected_ms);
            u64::try_from(done).unwrap_or(u64::MAX)
        },
        |product| product / expected_ms,
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn number(id: &Value) -> u64 {
        id.as_str().unwrap().trim_start_matches('r').parse().unwrap()
    }

    fn ms(seconds: &Value) -> u64 {
        seconds.as_u64().unwrap() * 1_000
    }

    #[test]
    fn recorded_decays_hold() {
        let text = include_str!("../../../../tests/vectors/prefill_decay_cases.json");
        let cases: Vec<Value> = serde_json::from_str(text).unwrap();
        assert_eq!(cases.len(), 5);
        for case in &cases {
            let (id, input, expected) = (&case["id"], &case["input"], &case["expected"]);
            let mut all: Vec<(u64, &Value)> = Vec::new();
            for one in input["prefills"].as_array().unwrap() {
                all.push((ms(&one["at_s"]), one));
            }
            let mut prefills = Prefills::default();
            for (at_ms, one) in all {
                let expected_ms = one["duration_s"].as_u64().map(|seconds| seconds * 1_000);
                prefills.push(
                    number(&one["id"]),
                    one["tokens"].as_u64().unwrap(),
                    expected_ms.map_or(Takes::Unknown, Takes::Told),
                    at_ms,
                );
            }
            if let Some(ops) = input["ops"].as_array() {
                let after: Vec<u64> = ops
                    .iter()
                    .map(|op| {
                        prefills.remove(number(&op[1]), 0);
                        prefills.tokens()
                    })
                    .collect();
                assert_eq!(Value::from(after), expected["sum_after_each"], "{id}");
                continue;
            }
            if let Some(gone) = input.get("remove") {
                prefills.remove(number(&gone[0]), ms(&gone[1]));
            }
            let asked = input["query_at_s"].as_array().unwrap();
            let left: Vec<u64> = asked.iter().map(|at| prefills.left(ms(at))).collect();
            assert_eq!(Value::from(left), expected["active_tokens"], "{id}");
        }
    }

    #[test]
    fn what_is_done_is_the_same_for_numbers_of_any_size() {
        let large = [1, 7, 1_000, u64::from(u32::MAX), u64::MAX / 3, u64::MAX];
        for (tokens, elapsed_ms) in large.into_iter().flat_map(|one| large.map(|two| (one, two))) {
            for expected_ms in large {
                let done = u128::from(tokens) * u128::from(elapsed_ms) / u128::from(expected_ms);
                let most = u64::try_from(done).unwrap_or(u64::MAX);
                assert_eq!(done_of(tokens, elapsed_ms, expected_ms), most);
            }
        }
    }

    #[test]
    fn the_oldest_is_always_the_first_that_waits() {
        let mut prefills = Prefills::default();
        for step in 1..400_u64 {
            let number = step * 37 % 23;
            match step % 3 {
                0 => prefills.complete(step.saturating_sub(number), step),
                1 => prefills.remove(step.saturating_sub(2 * number), step),
                _ => prefills.push(step, number, Takes::About(number), step),
            }
            let first = prefills.waiting.first_key_value().map(|(_, one)| (one.tokens, one.takes));
            assert_eq!(prefills.oldest.map(|one| (one.tokens, one.takes)), first);
        }
        assert!(!prefills.waiting.is_empty());
    }

    #[test]
    fn what_has_no_expectation_stays_until_it_is_done() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.left(5), 0);
        prefills.push(1, 100, Takes::Unknown, 0);
        prefills.push(2, 50, Takes::Told(10), 0);
        assert_eq!(prefills.left(1_000), 150);
        prefills.remove(1, 1_000);
        assert_eq!((prefills.left(1_005), prefills.left(2_000)), (25, 0));
        // A clock that steps back counts as standing still.
        assert_eq!(prefills.left(0), 50);
        prefills.push(3, 7, Takes::Told(0), 3_000);
        assert_eq!(prefills.left(u64::MAX), 0);
    }

    #[test]
    fn a_speed_is_learned_from_first_tokens_and_forgotten_with_time() {
        let mut prefills = Prefills::default();
        let mut now_ms = 1_000_000;
        let mut prefill = |prefills: &mut Prefills, number, tokens, takes_ms| {
            // Idle time is not work.
            now_ms += 60_000;
            prefills.push(number, tokens, prefills.learned(tokens), now_ms);
            now_ms += takes_ms;
            prefills.complete(number, now_ms);
            prefills.complete(number, now_ms + 5_000);
            now_ms
        };
        prefill(&mut prefills, 1, 4_000, 500);
        assert_eq!((prefills.per_s(), prefills.learned(800)), (None, Takes::Unknown));
        let now_ms = prefill(&mut prefills, 2, 4_000, 500);
        assert_eq!((prefills.per_s(), prefills.learned(800)), (Some(8_000.0), Takes::About(100)));

        // Two at a time, the later one done first; an abandoned one is no observation.
        prefills.push(3, 6_000, prefills.learned(6_000), now_ms);
        prefills.push(4, 2_000, prefills.learned(2_000), now_ms);
        prefills.push(5, 9_000, prefills.learned(9_000), now_ms);
        assert_eq!(prefills.left(now_ms + 375), 14_000);
        prefills.remove(5, now_ms + 400);
        prefills.complete(4, now_ms + 900);
        prefills.complete(3, now_ms + 1_000);
        assert_eq!(prefills.per_s(), Some(8_000.0));

        let mut slower = |number| prefill(&mut prefills, number, 10_000, 10_000);
        (10..30).for_each(|number| _ = slower(number));
        let learned = prefills.per_s().unwrap();
        assert!((1_000.0..1_100.0).contains(&learned), "{learned}");
    }

    #[test]
    fn prompts_without_work_leave_the_speed_as_it_is() {
        let mut prefills = Prefills::default();
        prefills.push(1, 8_000, Takes::Unknown, 0);
        prefills.complete(1, 1_000);
        for number in 2..100 {
            prefills.push(number, 0, prefills.learned(0), 1_000 * number);
            prefills.complete(number, 1_000 * number + 500);
        }
        assert_eq!(prefills.per_s(), Some(8_000.0));
    }

    #[test]
    fn prompts_without_work_do_not_stand_before_others() {
        let mut prefills = Prefills::default();
        prefills.push(1, 0, Takes::About(0), 0);
        prefills.push(2, 1_000, Takes::About(1_000), 0);
        assert_eq!(prefills.left(400), 600);
        prefills.complete(1, 400);
        assert_eq!(prefills.left(400), 600);
    }

    #[test]
    fn a_slow_worker_s_speed_is_learned_and_stays_so() {
        let mut prefills = Prefills::default();
        for number in 1..200 {
            let now_ms = number * 10_000;
            prefills.push(number, 1_000, prefills.learned(1_000), now_ms);
            prefills.complete(number, now_ms + 10_000);
            assert_eq!(prefills.per_s(), (number > 4).then_some(100.0));
        }
    }

    #[test]
    fn a_worker_that_hangs_does_not_look_idle_for_what_was_learned_of_it() {
        let mut prefills = Prefills::default();
        prefills.push(1, 8_000, Takes::Unknown, 0);
        prefills.complete(1, 1_000);
        for number in 2..5 {
            prefills.push(number, 800, prefills.learned(800), 1_000);
        }
        assert_eq!((prefills.left(1_050), prefills.left(1_100)), (2_000, 1_600));
        assert_eq!(prefills.left(60_000), 1_600);
    }
}

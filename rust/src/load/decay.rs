//! Prompt tokens still to be prefilled, as time passes: what has been worked on for a while is done in part.

use std::collections::BTreeMap;

/// One prompt.
#[derive(Debug, Clone, Copy)]
struct Prefill {
    tokens: u64,
    /// How long it should take; `None` where nobody can tell.
    expected_ms: Option<u64>,
}

/// The prompts that one worker has still to prefill, in the order in which they came.
///
/// The oldest one is taken for the one that is worked on, since it became the oldest. What it should
/// have used up by now is taken off; where it takes longer than expected the rest goes on at its rate, but
/// for a prompt of which nobody can tell how long it takes.
#[derive(Debug, Default)]
pub(super) struct Prefills {
    /// By number; the lowest is the oldest.
    waiting: BTreeMap<u64, Prefill>,
    tokens: u64,
    /// Of these, prompts without an expectation.
    unknown: usize,
    /// Since when the oldest one is the oldest.
    since_ms: u64,
}

impl Prefills {
    /// One more; `number` is higher than all before.
    pub fn push(&mut self, number: u64, tokens: u64, expected_ms: Option<u64>, now_ms: u64) {
        if self.waiting.is_empty() {
            self.since_ms = now_ms;
        }
        self.tokens += tokens;
        self.unknown += usize::from(expected_ms.is_none());
        self.waiting.insert(number, Prefill { tokens, expected_ms });
    }

    /// Tokens of one more that is counted until it is done, where nobody looks at the time.
    pub fn add(&mut self, tokens: u64) {
        self.tokens += tokens;
    }

    /// Tokens that were [added](Self::add) are done.
    pub fn subtract(&mut self, tokens: u64) {
        self.tokens -= tokens;
    }

    /// It is done, or not needed any more. Saying it again changes nothing.
    pub fn remove(&mut self, number: u64, now_ms: u64) {
        let is_oldest = self.waiting.first_key_value().is_some_and(|(first, _)| *first == number);
        let Some(gone) = self.waiting.remove(&number) else { return };
        self.tokens -= gone.tokens;
        self.unknown -= usize::from(gone.expected_ms.is_none());
        if is_oldest {
            self.since_ms = now_ms;
        }
    }

    /// Tokens of all of them, as if nothing had been done.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens that should be left by now.
    pub fn left(&self, now_ms: u64) -> u64 {
        let Some((_, oldest)) = self.waiting.first_key_value() else { return self.tokens };
        let Some(expected_ms) = oldest.expected_ms else { return self.tokens };
        let elapsed_ms = now_ms.saturating_sub(self.since_ms);
        let done =
            u128::from(oldest.tokens) * u128::from(elapsed_ms) / u128::from(expected_ms.max(1));
        let most = if self.unknown > 0 { oldest.tokens } else { self.tokens };
        self.tokens - u64::try_from(done).map_or(most, |done| done.min(most))
    }
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
        let text = include_str!("../../../tests/vectors/prefill_decay_cases.json");
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
                    expected_ms,
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
    fn what_has_no_expectation_stays_until_it_is_done() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.left(5), 0);
        prefills.push(1, 100, None, 0);
        prefills.push(2, 50, Some(10), 0);
        assert_eq!(prefills.left(1_000), 150);
        prefills.remove(1, 1_000);
        assert_eq!((prefills.left(1_005), prefills.left(2_000)), (25, 0));
        // Time that goes back is no time.
        assert_eq!(prefills.left(0), 50);
        prefills.push(3, 7, Some(0), 3_000);
        assert_eq!(prefills.left(u64::MAX), 0);
    }
}

//! Learns answer lengths, prefill times, and which workers are slower than others.

/// Time after which an observation of answers or workers counts 1/e, in milliseconds.
const ANSWERS_MS: f64 = 60_000.0;
const PACE_MS: f64 = 30_000.0;
/// Assumed length of an answer until one is known, in tokens, and the weight of this guess in
/// answers.
const ANSWER_TOKENS: f64 = 200.0;
const GUESS: f64 = 1.0;
/// Share of its knowledge that the regression keeps with each first token.
const KEEP: f64 = 0.995;
/// First tokens needed before the regression is used, and the interval at which workers are
/// compared.
const FEWEST: u32 = 32;
const COMPARE: u32 = 16;
/// Maximum first tokens in a worker's own mean.
const OWN: f64 = 32.0;
/// Assumed prefill time of a token until one is known, in milliseconds; the guess's weight, in
/// tokens squared; bounds.
const TOKEN_MS: f64 = 0.2;
const GUESS_PROMPTS: f64 = 100_000.0;
const TOKEN_MS_BOUNDS: (f64, f64) = (0.005, 5.0);
/// Assumed time of a decode step until one is known, in tokens of prefill, and its upper bound.
const STEP_TOKENS: f64 = 150.0;
const STEP_TOKENS_MOST: f64 = 1_000.0;
/// Maximum time of a step that one answer shows, in tokens of prefill: more is an engine that hangs
/// or a client that hardly reads.
const SHOWN_TOKENS_MOST: f64 = 10.0 * STEP_TOKENS_MOST;
/// Maximum time that one prompt or one whole answer shows, as a multiple of the expected time, for
/// the same reason.
const SHOWN_TIMES_MOST: f64 = 10.0;
/// Maximum tokens that one answer counts: more is probably an engine that counts wrongly.
const ANSWER_MOST: u64 = 16_384;
/// Share of its last whole answers that a worker's means keep with each one: about the last three.
const KEEP_LAST: f64 = 0.7;
/// Bounds of slowness; values with a logarithm near 0 count as normal.
const BOUNDS: (f64, f64) = (0.1, 20.0);
const LEAST_LN: f64 = 0.05;

/// Recent mean length of answers.
#[derive(Debug, Clone, Default)]
pub(super) struct Answers {
    tokens: f64,
    count: f64,
    at_ms: u64,
}

impl Answers {
    /// Records the end of an answer of `tokens`.
    pub fn see(&mut self, tokens: f64, now_ms: u64) {
        self.fade(now_ms);
        self.tokens += tokens.min(ANSWER_MOST as f64);
        self.count += 1.0;
    }

    fn fade(&mut self, now_ms: u64) {
        let kept = (-(now_ms.saturating_sub(self.at_ms) as f64) / ANSWERS_MS).exp();
        self.tokens *= kept;
        self.count *= kept;
        self.at_ms = self.at_ms.max(now_ms);
    }

    /// Expected tokens of an answer, from the last minutes.
    pub fn mean_tokens(&mut self, now_ms: u64) -> f64 {
        // A slightly outdated value does no harm, and saves the exponential.
        if now_ms.saturating_sub(self.at_ms) > 1_000 {
            self.fade(now_ms);
        }
        (self.tokens + GUESS * ANSWER_TOKENS) / (self.count + GUESS)
    }
}

/// Time to the first token, or to the end of unstreamed answers, against prefill tokens before it,
/// over all workers.
#[derive(Debug, Default)]
pub(super) struct Prefills {
    /// Sums of: 1, work, milliseconds, work x work, work x ms.
    sums: [f64; 5],
    seen: u32,
}

/// Adds one observation to fading sums.
fn observe<const N: usize>(sums: &mut [f64; N], one: [f64; N]) {
    for (sum, one) in sums.iter_mut().zip(one) {
        *sum = *sum * KEEP + one;
    }
}

impl Prefills {
    /// Records a first token after `ms`, with `work` tokens before it. Returns ln(time / expected
    /// time), once there is an expectation.
    pub fn see(&mut self, work: f64, ms: f64) -> Option<f64> {
        let ms = ms.max(1.0);
        let expected = (self.seen > 0).then(|| {
            let (base, slope) = self.line();
            (base + slope * work).max(1.0)
        });
        let shown = expected.map_or(ms, |expected| ms.min(SHOWN_TIMES_MOST * expected));
        let residual =
            expected.filter(|_| self.seen >= FEWEST).map(|expected| (ms / expected).ln());
        observe(&mut self.sums, [1.0, work, shown, work * work, work * shown]);
        // Stays known when it wraps around.
        self.seen = self.seen.checked_add(1).unwrap_or(FEWEST);
        residual.filter(|ln| ln.is_finite())
    }

    /// Fixed milliseconds, and milliseconds per token; neither is negative.
    fn line(&self) -> (f64, f64) {
        let weight = self.sums[0];
        let [_, work, ms, work_work, work_ms] = self.sums.map(|sum| sum / weight);
        let variance = work_work - work * work;
        let covariance = work_ms - work * ms;
        if variance <= 1.0 || covariance <= 0.0 {
            return (ms, 0.0);
        }
        let slope = (covariance / variance).min(ms / work.max(1.0));
        ((ms - slope * work).max(0.0), slope)
    }

    /// Whether it is time to compare workers with each other.
    pub fn is_time_to_compare(&self) -> bool {
        self.seen >= FEWEST && self.seen.is_multiple_of(COMPARE)
    }

    /// Prefill seconds per token; 0 before any observation.
    pub fn seconds_per_token(&self) -> f64 {
        if self.seen > 0 { self.line().1 / 1_000.0 } else { 0.0 }
    }
}

/// Total time of answers against uncached prompt tokens and answer tokens.
///
/// Without streams the first token is not observed. The time that each prompt token adds to the
/// total then gives the prefill time. Everything an answer takes also depends on its worker's load,
/// and so does the length of the uncached rest: only answers that one worker gave in a row are
/// compared with each other.
#[derive(Debug, Default)]
pub(super) struct Wholes {
    /// Sums of products of deviations: prompt x prompt, prompt x answer, answer x answer,
    /// prompt x ms, answer x ms.
    products: [f64; 5],
    /// Sums of: 1, ln(ms), ln(answer tokens). Their means are those of a typical answer, which one
    /// that hangs hardly changes.
    typical: [f64; 3],
}

/// The last few answers of one worker.
#[derive(Debug, Default)]
pub(super) struct LastWholes {
    count: f64,
    /// Means of prompt tokens, answer tokens and milliseconds.
    means: [f64; 3],
}

impl Wholes {
    /// Records an answer of `answer` tokens that ended `ms` after its request with `prompt`
    /// uncached tokens was routed; `last` are those of its worker.
    pub fn see(&mut self, last: &mut LastWholes, prompt: f64, answer: f64, ms: f64) {
        let answer = answer.min(ANSWER_MOST as f64);
        let ms = self.shown_ms(prompt, answer, ms);
        let is_first = last.count == 0.0;
        let [mean_prompt, mean_answer, mean_ms] = last.means;
        let (p, a, t) = (prompt - mean_prompt, answer - mean_answer, ms - mean_ms);
        last.count = last.count * KEEP_LAST + 1.0;
        for (mean, off) in last.means.iter_mut().zip([p, a, t]) {
            *mean += off / last.count;
        }
        if !is_first {
            observe(&mut self.products, [p * p, p * a, a * a, p * t, a * t]);
        }
    }

    /// The time of an answer of which an engine that hangs has no part.
    fn shown_ms(&mut self, prompt: f64, answer: f64, ms: f64) -> f64 {
        let [count, ln_ms, ln_answer] = self.typical;
        let ln = answer.max(1.0).ln();
        observe(&mut self.typical, [1.0, ms.max(1.0).ln(), ln]);
        if count == 0.0 {
            return ms;
        }
        let longer = (ln - ln_answer / count).max(0.0);
        let expected = (ln_ms / count + longer).exp() + self.ms_per_token() * prompt;
        ms.min(SHOWN_TIMES_MOST * expected)
    }

    /// Milliseconds that a prompt token adds; a guess until there are answers.
    pub fn ms_per_token(&self) -> f64 {
        let [pp, pa, aa, pm, am] = self.products;
        let (pp, aa) = (pp + GUESS_PROMPTS, aa + 1.0);
        let pm = pm + GUESS_PROMPTS * TOKEN_MS;
        let of_token = (pm * aa - am * pa) / (pp * aa - pa * pa);
        if of_token.is_finite() {
            of_token.clamp(TOKEN_MS_BOUNDS.0, TOKEN_MS_BOUNDS.1)
        } else {
            TOKEN_MS
        }
    }

    /// Prefill time of `tokens`.
    pub fn prefill_ms(&self, tokens: u64) -> u64 {
        (tokens as f64 * self.ms_per_token()).ceil() as u64
    }
}

/// Time of a decode step: between two tokens of an answer, over all workers.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// Sums of steps and of milliseconds.
    sums: [f64; 2],
}

impl Steps {
    /// Records an answer that took `steps` steps in the `ms` after its prefill, of which each token
    /// takes `token_ms`. Steps without time show nothing: the answer was buffered, or its prefill
    /// took less than expected.
    pub fn see(&mut self, steps: u64, ms: f64, token_ms: f64) {
        if steps > 0 && ms > 0.0 {
            let each_ms = (ms / steps as f64).min(SHOWN_TOKENS_MOST * token_ms);
            let count = steps.min(ANSWER_MOST) as f64;
            observe(&mut self.sums, [count, count * each_ms]);
        }
    }

    /// Milliseconds of a step; 0 before any answer.
    pub fn ms(&self) -> f64 {
        let [steps, ms] = self.sums;
        if steps > 0.0 { ms / steps } else { 0.0 }
    }

    /// A step's time in tokens of prefill, each of which takes `token_ms`.
    pub fn tokens(&self, token_ms: f64) -> f64 {
        let ms = self.ms();
        if ms > 0.0 { (ms / token_ms).min(STEP_TOKENS_MOST) } else { STEP_TOKENS }
    }
}

/// One worker's times relative to expectations.
#[derive(Debug, Default)]
pub(super) struct Pace {
    mean: f64,
    variance: f64,
    count: f64,
    seen_ms: u64,
    /// Natural logarithm of the slowness at the last comparison.
    ln: f64,
}

impl Pace {
    /// Records ln(time / expected time) of one of its first tokens.
    pub fn see(&mut self, ln: f64, now_ms: u64) {
        // Data that faded during silence stays faded, so that a rarely used worker is not judged by
        // old times.
        let kept = self.kept(now_ms);
        self.ln *= kept;
        self.count = (self.count * kept + 1.0).min(OWN);
        let off = ln - self.mean;
        self.mean += off / self.count;
        self.variance += (off * off - self.variance) / self.count;
        self.seen_ms = now_ms;
    }

    /// Compares workers with each other: effects that all share are not slowness.
    ///
    /// # Cost
    /// O(workers log workers).
    pub fn compare<'a>(all: impl Iterator<Item = &'a mut Self>) {
        let mut known: Vec<&mut Self> = all.filter(|one| one.count > 0.0).collect();
        if known.len() < 2 {
            known.iter_mut().for_each(|one| one.ln = 0.0);
            return;
        }
        let mut means: Vec<f64> = known.iter().map(|one| one.mean).collect();
        means.sort_unstable_by(f64::total_cmp);
        let median = f64::midpoint(means[(means.len() - 1) / 2], means[means.len() / 2]);
        for one in known {
            let off = one.mean - median;
            // Differences that may be chance are ignored.
            let error = 9.0 * one.variance / one.count;
            let share = if off == 0.0 { 0.0 } else { (1.0 - error / (off * off)).max(0.0) };
            let ln = (off * share).clamp(BOUNDS.0.ln(), BOUNDS.1.ln());
            // Otherwise a worker marginally slower than other idle ones would get no requests at
            // all.
            one.ln = if ln.abs() < LEAST_LN { 0.0 } else { ln };
        }
    }

    /// Its time per token as a multiple of the normal. Without new data it returns to normal, so
    /// that a worker that recovered is tried again.
    pub fn slowness(&self, now_ms: u64) -> f64 {
        if self.ln == 0.0 {
            return 1.0;
        }
        (self.ln * self.kept(now_ms)).exp()
    }

    /// The share of knowledge that is left after silence.
    fn kept(&self, now_ms: u64) -> f64 {
        (-(now_ms.saturating_sub(self.seen_ms) as f64) / PACE_MS).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_worker_is_found_and_one_that_recovers_is_tried_again() {
        let (mut prefills, mut paces) = (Prefills::default(), [(); 4].map(|()| Pace::default()));
        let mut now_ms = 0;
        for turn in 0..400_u64 {
            let worker = turn as usize % 4;
            let work = 100.0 + (turn * 37 % 900) as f64;
            let ms = (5.0 + 0.1 * work) * if worker == 2 { 3.0 } else { 1.0 };
            now_ms += 10;
            if let Some(ln) = prefills.see(work, ms) {
                paces[worker].see(ln, now_ms);
            }
            if prefills.is_time_to_compare() {
                Pace::compare(paces.iter_mut());
            }
        }
        let slow: Vec<f64> = paces.iter().map(|pace| pace.slowness(now_ms)).collect();
        assert!((slow[2] - 3.0).abs() < 0.5, "{slow:?}");
        assert!([0, 1, 3].iter().all(|at| (slow[*at] - 1.0).abs() < 0.1), "{slow:?}");
        assert!(paces[2].slowness(now_ms + 60_000) < 1.2);
    }

    #[test]
    fn workers_are_compared_however_many_answers_were_seen() {
        let mut prefills = Prefills { seen: u32::MAX, ..Prefills::default() };
        let compared = (0..64).filter(|_| {
            prefills.see(1.0, 1.0);
            prefills.is_time_to_compare()
        });
        assert_eq!(compared.count(), 64 / COMPARE as usize);
    }

    #[test]
    fn what_a_prompt_token_takes_is_learned_from_whole_answers() {
        let (mut wholes, mut last) = (Wholes::default(), LastWholes::default());
        assert_eq!(wholes.prefill_ms(1_000), 200);
        for turn in 0..400_u64 {
            let (prompt, answer) = (f64::from(turn as u32 * 37 % 900), f64::from(turn as u32 % 50));
            wholes.see(&mut last, prompt, answer, 30.0 + 0.05 * prompt + 12.0 * answer);
        }
        assert!((wholes.ms_per_token() - 0.05).abs() < 0.002, "{}", wholes.ms_per_token());
    }

    #[test]
    fn load_that_comes_with_long_prompts_is_not_taken_for_their_prefill() {
        let (mut wholes, mut last) = (Wholes::default(), [(); 2].map(|()| LastWholes::default()));
        for turn in 0..800_u32 {
            // One worker has all that is uncached, and is busier; so are both as time goes on.
            let worker = turn as usize % 2;
            let load = 100.0 * worker as f64 + 0.2 * f64::from(turn);
            let prompt = 4.0 * load + f64::from(turn * 37 % 900);
            wholes.see(&mut last[worker], prompt, 8.0, 50.0 + load + 0.05 * prompt);
        }
        assert!((wholes.ms_per_token() - 0.05).abs() < 0.005, "{}", wholes.ms_per_token());
    }

    #[test]
    fn a_step_is_a_guess_until_answers_come_and_bounded_then() {
        let mut steps = Steps::default();
        // No step, a buffered answer, and a prefill that was expected to take longer.
        for (count, ms) in [(0, 500.0), (8, 0.0), (8, -5.0)] {
            steps.see(count, ms, 0.02);
        }
        assert_eq!((steps.ms(), steps.tokens(0.04)), (0.0, STEP_TOKENS));
        (0..2_000).for_each(|_| steps.see(8, 96.0, 0.02));
        assert!((steps.ms() - 12.0).abs() < 1e-6 && (steps.tokens(0.02) - 600.0).abs() < 1e-6);
        assert_eq!(steps.tokens(1e-9), STEP_TOKENS_MOST);
        // Answers that an engine sends at once leave the time of a step as it is.
        (0..200).for_each(|_| steps.see(400, 0.0, 0.02));
        assert!((steps.ms() - 12.0).abs() < 1e-6, "{}", steps.ms());
    }

    #[test]
    fn an_engine_that_hangs_or_counts_wrongly_hardly_changes_the_time_of_a_step() {
        let after = |count: u64, ms: f64| {
            let mut steps = Steps::default();
            (0..1_000).for_each(|_| steps.see(200, 2_400.0, 0.1));
            (0..64).for_each(|_| steps.see(10, 300_000.0, 0.1));
            let hung_ms = steps.ms();
            (0..1_000).for_each(|_| steps.see(200, 2_400.0, 0.1));
            steps.see(count, ms, 0.1);
            (hung_ms, steps.ms())
        };
        let (hung_ms, wrong_ms) = after(u64::from(u32::MAX), 1_000.0);
        assert!(hung_ms < 40.0, "{hung_ms}");
        assert!(wrong_ms > 8.0, "{wrong_ms}");
    }

    #[test]
    fn an_answer_counted_wrongly_changes_the_length_for_a_few_minutes() {
        let mut answers = Answers::default();
        (0..100).for_each(|at| answers.see(100.0, at * 600));
        answers.see(f64::from(u32::MAX), 60_000);
        assert!(answers.mean_tokens(60_000) < 500.0, "{}", answers.mean_tokens(60_000));
        (100..400).for_each(|at| answers.see(100.0, at * 600));
        let mean = answers.mean_tokens(240_000);
        assert!((mean - 100.0).abs() < 15.0, "{mean}");
    }

    #[test]
    fn prompts_behind_one_that_hung_hardly_change_what_a_token_takes() {
        let normal = |turn: u32| 100.0 + f64::from(turn * 37 % 900);
        for (count, work) in [(1, 1_000.0), (16, 1_000.0), (16, 100.0)] {
            let mut prefills = Prefills::default();
            (0..1_000).for_each(|turn| _ = prefills.see(normal(turn), 5.0 + 0.05 * normal(turn)));
            // Each of them is still seen as slow.
            (0..count)
                .for_each(|_| assert!(prefills.see(work, 300_000.0).is_some_and(|ln| ln > 5.0)));
            let (base, slope) = prefills.line();
            assert!(base + slope * 1_000.0 < 500.0, "{count} of {work}: {base} + {slope}");
            (0..600).for_each(|turn| _ = prefills.see(normal(turn), 5.0 + 0.05 * normal(turn)));
            let (base, slope) = prefills.line();
            assert!(
                (slope - 0.05).abs() < 0.02 && base < 15.0,
                "{count} of {work}: {base} + {slope}"
            );
        }
    }

    #[test]
    fn what_a_token_takes_is_learned_anew_from_a_few_long_prompts() {
        let mut prefills = Prefills::default();
        (0..40).for_each(|_| _ = prefills.see(10.0, 2.0));
        (0..40).for_each(|_| _ = prefills.see(30_000.0, 1_500.0));
        let slope = prefills.line().1;
        assert!((slope - 0.05).abs() < 0.01, "{slope}");
    }

    #[test]
    fn a_whole_answer_that_hung_or_is_counted_wrongly_is_soon_forgotten() {
        let wrong = f64::from(u32::MAX);
        for (count, answer, ms, soon) in
            [(1, 10.0, 300_000.0, 600), (16, 10.0, 300_000.0, 1_200), (1, wrong, 700.0, 2_500)]
        {
            let (mut wholes, mut last) = (Wholes::default(), LastWholes::default());
            let see = |wholes: &mut Wholes, last: &mut LastWholes, turn: u32| {
                let (prompt, answer) = (f64::from(turn * 37 % 900), f64::from(turn % 50));
                wholes.see(last, prompt, answer, 30.0 + 0.05 * prompt + 12.0 * answer);
            };
            (0..1_000).for_each(|turn| see(&mut wholes, &mut last, turn));
            (0..count).for_each(|_| wholes.see(&mut last, 900.0, answer, ms));
            assert!(wholes.ms_per_token() < 4.0, "{count} of {answer}: {}", wholes.ms_per_token());
            (0..soon).for_each(|turn| see(&mut wholes, &mut last, turn));
            let token_ms = wholes.ms_per_token();
            assert!((token_ms - 0.05).abs() < 0.025, "{count} of {answer}: {token_ms}");
        }
    }

    #[test]
    fn scatter_is_no_slowness() {
        let mut paces = [(); 2].map(|()| Pace::default());
        for turn in 0..64 {
            let ln = if turn % 2 == 0 { 1.0 } else { -1.0 };
            paces[0].see(ln + 0.1, turn);
            paces[1].see(ln, turn);
        }
        Pace::compare(paces.iter_mut());
        assert_eq!(paces.map(|pace| pace.slowness(64)), [1.0, 1.0]);
    }

    #[test]
    fn answers_are_a_guess_until_they_are_known_and_after_they_are_forgotten() {
        let mut answers = Answers::default();
        assert_eq!(answers.mean_tokens(0), 200.0);
        (0..100).for_each(|_| answers.see(10.0, 1_000));
        assert!((answers.mean_tokens(1_000) - 11.9).abs() < 0.1);
        assert!(answers.mean_tokens(3_600_000) > 199.0);
    }
}

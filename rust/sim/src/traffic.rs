//! Workloads that are made here, each from a seed.

use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::workload::{Client, Session, Turn, Workload};

/// Tokens in a block.
const BLOCK: u64 = 64;

/// Makes sessions whose blocks nobody else has, beside those that are shared on purpose.
struct Maker {
    rng: SmallRng,
    next_id: u64,
    sessions: Vec<Session>,
}

/// What was said so far.
#[derive(Clone, Default)]
struct Said {
    tokens: u64,
    ids: Vec<u64>,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self { rng: SmallRng::seed_from_u64(seed), next_id: 1, sessions: Vec::new() }
    }

    /// Go on with text of its own.
    fn say(&mut self, said: &mut Said, tokens: u64) {
        said.tokens += tokens;
        while (said.ids.len() as u64 + 1) * BLOCK <= said.tokens {
            said.ids.push(self.next_id);
            self.next_id += 1;
        }
    }

    /// Text of full blocks, to be shared.
    fn shared(&mut self, tokens: u64) -> Said {
        let mut said = Said::default();
        self.say(&mut said, tokens / BLOCK * BLOCK);
        said
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -f64::ln(self.rng.random_range(1e-12..1.0)) * mean
    }

    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        // The sum of twelve uniform draws is close enough to a normal one.
        let normal: f64 = (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0;
        median * (sigma * normal).exp()
    }

    fn tokens(&mut self, median: f64, sigma: f64, most: u64) -> u64 {
        (self.log_normal(median, sigma) as u64).clamp(8, most)
    }

    /// One of `count`, the first ones more often.
    fn popular(&mut self, count: usize) -> usize {
        let weight = |n: usize| 1.0 / (n + 1) as f64;
        let sum: f64 = (0..count).map(weight).sum();
        let mut left = self.rng.random_range(0.0..sum);
        (0..count)
            .find(|&n| {
                left -= weight(n);
                left < 0.0
            })
            .unwrap_or(0)
    }

    /// A turn that adds `more` tokens and gets an answer, which the next turn repeats.
    fn turn(&mut self, said: &mut Said, pause_s: f64, more: u64, output: u64) -> Turn {
        self.say(said, more);
        let input = said.tokens;
        self.say(said, output);
        let ids: Arc<[u64]> = said.ids.as_slice().into();
        Turn { pause_us: (pause_s * 1e6) as u64, input, output, ids }
    }

    fn session(&mut self, at_s: f64, turns: Vec<Turn>) {
        self.sessions.push(Session { client: 0, at_us: (at_s * 1e6) as u64, turns });
    }

    /// A chat over `said`.
    fn chat(&mut self, at_s: f64, mut said: Said, turns: usize, pause_s: f64, answer: f64) {
        let turns = (0..turns)
            .map(|number| {
                let pause_s = if number == 0 { 0.0 } else { 1.0 + self.exponential(pause_s) };
                let more = self.tokens(150.0, 0.8, 4_000);
                let output = self.tokens(answer, 0.6, 2_000);
                self.turn(&mut said, pause_s, more, output)
            })
            .collect();
        self.session(at_s, turns);
    }

    fn into(self, name: &str) -> Workload {
        Workload::of_sessions(name, BLOCK, self.sessions)
    }
}

kvflash_core::named! {
    /// Kinds of traffic, the one without a load last.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Traffic {
        /// Conversations of the shape of the Mooncake trace, each request when it comes.
        Conversations = "conversations",
        /// Agents whose prompts grow to 100,000 tokens, a request a few seconds after each answer.
        Agents = "coding agents",
        /// Chats behind eight system prompts.
        Chat = "chat",
        /// Questions about two hundred documents, some much more often than others.
        Documents = "documents",
        /// Chats, most of which start together every now and then.
        Bursts = "bursts",
        /// Chats; in the middle an unseen prompt of 30,000 tokens is suddenly wanted by many.
        Hot = "hot prefix",
        /// Short prompts, answers of thousands of tokens.
        LongAnswers = "long answers",
        /// No two prompts have anything in common.
        Unshared = "nothing shared",
        /// Chats, documents, agents and batches side by side.
        Mixed = "mixed",
        /// Conversations behind three system prompts that take turns, eight requests at once, as a load test has it.
        InLine = "in line",
    }
}

impl Traffic {
    /// About `requests` requests. When sessions start matters only in relation to each other; see
    /// [`Workload::at_load`].
    pub fn make(self, seed: u64, requests: usize) -> Workload {
        let mut maker = Maker::new(seed);
        match self {
            Self::Chat => chats(&mut maker, requests, &|_, at_s| at_s),
            Self::Bursts => chats(&mut maker, requests, &|count, at_s| {
                // Three of four sessions start in the first tenth of each of twelve stretches.
                let length = count as f64 / 12.0;
                let (stretch, within) = ((at_s / length).floor(), at_s % length / length);
                let within =
                    if within < 0.75 { within * 0.133 } else { 0.1 + (within - 0.75) * 3.6 };
                (stretch + within) * length
            }),
            Self::Hot => hot(&mut maker, requests),
            Self::Documents => documents(&mut maker, requests, 0.0),
            Self::LongAnswers => long_answers(&mut maker, requests),
            Self::Unshared => unshared(&mut maker, requests, 0.0),
            Self::Mixed => {
                let quarter = requests / 4;
                chats(&mut maker, quarter, &|_, at_s| at_s);
                let last_s =
                    maker.sessions.iter().map(|one| one.at_us).max().unwrap_or(1) as f64 / 1e6;
                documents(&mut maker, quarter, last_s);
                unshared(&mut maker, quarter, last_s);
                agents(&mut maker, quarter, last_s);
            }
            Self::Conversations => return conversations(maker, requests),
            Self::Agents => agents(&mut maker, requests, 0.0),
            Self::InLine => return in_line(maker, requests),
        }
        maker.into(self.name())
    }
}

fn chats(maker: &mut Maker, requests: usize, when: &dyn Fn(usize, f64) -> f64) {
    let systems: Vec<Said> = (0..8).map(|n| maker.shared(512 << (n % 4))).collect();
    let count = requests / 5;
    let mut at_s = 0.0;
    for _ in 0..count {
        at_s += maker.exponential(1.0);
        let system = systems[maker.popular(8)].clone();
        let turns = maker.rng.random_range(2..9);
        maker.chat(when(count, at_s), system, turns, 15.0, 200.0);
    }
}

fn hot(maker: &mut Maker, requests: usize) {
    // Starts are scaled afterwards: the rush takes a fiftieth of the time.
    let others = requests * 7 / 10;
    chats(maker, others, &|_, at_s| at_s);
    let last_s = maker.sessions.iter().map(|one| one.at_us).max().unwrap_or(1) as f64 / 1e6;
    let prefix = maker.shared(30_000);
    for _ in 0..requests - others {
        let mut said = prefix.clone();
        let at_s = last_s * (0.5 + 0.02 * maker.rng.random::<f64>());
        let (more, output) = (maker.tokens(100.0, 0.5, 1_000), maker.tokens(120.0, 0.5, 600));
        let turn = maker.turn(&mut said, 0.0, more, output);
        maker.session(at_s, vec![turn]);
    }
}

/// Starts over `last_s` seconds, or one a second where that is 0.
fn starts(maker: &mut Maker, count: usize, last_s: f64) -> Vec<f64> {
    let mut at_s = 0.0;
    let mean = if last_s > 0.0 { last_s / count as f64 } else { 1.0 };
    (0..count)
        .map(|_| {
            at_s += maker.exponential(mean);
            at_s
        })
        .collect()
}

fn documents(maker: &mut Maker, requests: usize, last_s: f64) {
    let documents: Vec<Said> = (0..200)
        .map(|_| {
            let tokens = maker.tokens(9_000.0, 0.7, 40_000);
            maker.shared(tokens)
        })
        .collect();
    for at_s in starts(maker, requests / 2, last_s) {
        let document = documents[maker.popular(documents.len())].clone();
        let turns = maker.rng.random_range(1..4);
        maker.chat(at_s, document, turns, 20.0, 150.0);
    }
}

fn long_answers(maker: &mut Maker, requests: usize) {
    let systems: Vec<Said> = (0..4).map(|_| maker.shared(256)).collect();
    for at_s in starts(maker, requests, 0.0) {
        let mut said = systems[maker.popular(4)].clone();
        let (more, output) = (maker.tokens(400.0, 0.8, 4_000), maker.tokens(1_200.0, 0.5, 4_000));
        let turn = maker.turn(&mut said, 0.0, more, output);
        maker.session(at_s, vec![turn]);
    }
}

fn unshared(maker: &mut Maker, requests: usize, last_s: f64) {
    for at_s in starts(maker, requests, last_s) {
        let mut said = Said::default();
        let (more, output) = (maker.tokens(1_500.0, 1.2, 30_000), maker.tokens(200.0, 0.8, 2_000));
        let turn = maker.turn(&mut said, 0.0, more, output);
        maker.session(at_s, vec![turn]);
    }
}

fn agents(maker: &mut Maker, requests: usize, last_s: f64) {
    let tools: Vec<Said> = (0..3).map(|n| maker.shared(9_000 + 4_000 * n)).collect();
    let turns = 25;
    for at_s in starts(maker, (requests / turns).max(1), last_s) {
        let mut said = tools[maker.popular(3)].clone();
        let first = maker.tokens(15_000.0, 0.8, 60_000);
        let turns = (0..turns)
            .map(|number| {
                let is_first = number == 0;
                let pause_s = if is_first { 0.0 } else { maker.log_normal(8.0, 0.9).min(120.0) };
                let more = if is_first { first } else { maker.tokens(900.0, 1.2, 12_000) };
                let output = maker.tokens(220.0, 0.8, 2_500);
                maker.turn(&mut said, pause_s, more, output)
            })
            .collect();
        maker.session(at_s, turns);
    }
}

fn in_line(mut maker: Maker, requests: usize) -> Workload {
    const TURNS: usize = 8;
    let systems: Vec<Said> = (0..3)
        .map(|_| {
            let tokens = maker.rng.random_range(1_800..3_500);
            maker.shared(tokens)
        })
        .collect();
    for _ in 0..requests / TURNS {
        let mut said = systems[maker.rng.random_range(0..systems.len())].clone();
        let turns = (0..TURNS).map(|_| {
            let more = maker.rng.random_range(180..900);
            maker.turn(&mut said, 0.0, more, 64)
        });
        let turns = turns.collect();
        maker.session(0.0, turns);
    }
    Workload { at_once: Some(8), ..maker.into(Traffic::InLine.name()) }
}

fn conversations(mut maker: Maker, requests: usize) -> Workload {
    const BLOCK: u64 = 512;
    let (mut open, mut clients, mut at_s) = (Vec::<(usize, Vec<u64>)>::new(), 0, 0.0);
    let mut sessions = Vec::new();
    while sessions.len() < requests {
        at_s += maker.exponential(1.0);
        // Two of five are a later turn.
        let is_new = open.is_empty() || maker.rng.random_bool(0.61);
        if is_new {
            open.push((clients, vec![0]));
            clients += 1;
        }
        let last = open.len() - 1;
        let which = if is_new { last } else { maker.rng.random_range(0..=last) };
        let more = maker.log_normal(if is_new { 4_500.0 } else { 1_800.0 }, 1.1);
        let more = more.min(100_000.0) as u64 + 100;
        let (client, said) = &mut open[which];
        let input = (said.len() as u64 * BLOCK + more).min(126_000);
        while ((said.len() + 1) as u64) * BLOCK <= input {
            said.push(maker.next_id);
            maker.next_id += 1;
        }
        let (client, ids) = (*client, said.as_slice().into());
        let output = maker.tokens(300.0, 0.6, 2_000);
        let turns = vec![Turn { pause_us: 0, input, output, ids }];
        sessions.push(Session { client, at_us: (at_s * 1e6) as u64, turns });
        if open.len() > 300 {
            let gone = maker.rng.random_range(0..200);
            open.swap_remove(gone);
        }
    }
    let client = |n| Client { name: format!("conversation {n}"), is_light: true };
    let clients = (0..clients).map(client).collect();
    Workload {
        name: Traffic::Conversations.name().into(),
        block_size: BLOCK,
        sessions,
        clients,
        at_once: None,
    }
}

/// Tenants for `seconds`: 4 that flood with batches, 8 that are on and off, 48 that chat. Ten system prompts
/// are shared.
pub fn tenants(seed: u64, seconds: f64, flood: f64) -> Workload {
    let mut maker = Maker::new(seed);
    let systems: Vec<Said> = (0..10).map(|n| maker.shared((8 + 8 * n) * BLOCK)).collect();
    let mut clients = Vec::new();
    let mut client = |kind: &str, is_light| {
        clients.push(Client { name: format!("{kind} {}", clients.len()), is_light });
        clients.len() - 1
    };
    let mut sessions = Vec::new();
    let mut one = |maker: &mut Maker, client, at_s: f64, said: &mut Said, more, output| {
        let turn = maker.turn(said, 0.0, more, output);
        sessions.push(Session { client, at_us: (at_s * 1e6) as u64, turns: vec![turn] });
    };
    for system in &systems[..4] {
        let client = client("flood", false);
        let mut at_s = 0.1 * seconds;
        while at_s < 0.8 * seconds {
            at_s += maker.exponential(1.0 / flood);
            let more = maker.rng.random_range(1_000..7_000);
            let output = maker.rng.random_range(50..300);
            one(&mut maker, client, at_s, &mut system.clone(), more, output);
        }
    }
    for system in &systems[..8] {
        let client = client("on/off", true);
        let mut at_s = maker.rng.random_range(0.0..20.0);
        while at_s < seconds {
            // 10 s of three a second, then 30 s of nothing.
            let until_s = at_s + 10.0;
            while at_s < until_s && at_s < seconds {
                at_s += maker.exponential(0.33);
                let more = maker.rng.random_range(200..3_000);
                let output = maker.rng.random_range(50..250);
                one(&mut maker, client, at_s, &mut system.clone(), more, output);
            }
            at_s += 30.0;
        }
    }
    for light in 0..48 {
        let client = client("chat", true);
        let mut at_s = maker.rng.random_range(0.0..10.0);
        let mut said = systems[light % 10].clone();
        while at_s < seconds {
            let more = maker.rng.random_range(50..800);
            let output = maker.rng.random_range(50..400);
            one(&mut maker, client, at_s, &mut said, more, output);
            if said.ids.len() > 160 || maker.rng.random_bool(0.1) {
                said = systems[light % 10].clone();
            }
            at_s += 2.0 + maker.exponential(8.0);
        }
    }
    sessions.sort_by_key(|session| session.at_us);
    Workload { name: "tenants".into(), block_size: BLOCK, sessions, clients, at_once: None }
}

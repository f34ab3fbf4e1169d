//! The queue itself.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::config::{Discipline, FairConfig, price};
use super::order::Standing;
use super::ready::{Clients, Place, Waiting};
use super::request::{ClientName, Cost, FairStats, Grant, Granted, Refusal, Refused, Ticket, Used};
use crate::error::{Error, Result};

/// Longest name of a client, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Part of the requests that wait which one group may have: parts of a whole.
const GROUP_SHARE: (usize, usize) = (3, 4);

/// Maximum remembered clients. At the limit the idle one with the lowest counter is forgotten.
const MAX_CLIENTS: usize = 65_536;

/// Most clients with a weight of their own.
const MAX_WEIGHTS: usize = 65_536;

/// Bounds of the time after which a refused client should retry, in milliseconds.
const RETRY_MS: std::ops::RangeInclusive<u64> = 1_000..=60_000;

#[derive(Debug)]
struct Running {
    slot: u32,
    input: f64,
    output: f64,
    predicted: f64,
    /// Charged to its client so far, before its weight.
    paid: f64,
    /// The counter of its client, or group, just before it was admitted.
    started_at: f64,
}

/// One model's waiting requests, and the counters of its clients.
///
/// # Cost
/// O(log clients + log requests) for every call.
#[derive(Debug)]
pub struct FairQueue<T> {
    config: FairConfig,
    pub(super) clients: Clients<T>,
    /// [`MAX_CLIENTS`], except in tests.
    pub(super) max_clients: usize,
    weights: HashMap<Box<str>, f64>,
    /// Waiting requests, the oldest first.
    pub(super) places: BTreeMap<Ticket, (u32, Place)>,
    running: BTreeMap<Grant, Running>,
    /// Requests that have timed out.
    dropped: Vec<T>,
    /// The least value that a counter counts as (`vtc-max-fair`).
    pub(super) floor: f64,
    /// The highest counter.
    highest: f64,
    next_ticket: u64,
    next_grant: u64,
    /// Time of the last admission, and the mean time between two, in milliseconds.
    pace: Option<(u64, f64)>,
    stats: FairStats,
}

impl<T> FairQueue<T> {
    /// An empty queue.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first field that is out of range.
    pub fn new(config: FairConfig) -> Result<Self> {
        config.validate()?;
        let clients = Clients::new(config.discipline != Discipline::Fcfs);
        Ok(Self {
            config,
            clients,
            max_clients: MAX_CLIENTS,
            weights: HashMap::new(),
            places: BTreeMap::new(),
            running: BTreeMap::new(),
            dropped: Vec::new(),
            floor: 0.0,
            highest: 0.0,
            next_ticket: 0,
            next_grant: 0,
            pace: None,
            stats: FairStats::default(),
        })
    }

    /// Gives `client` a larger (above 1) or smaller share than others; charges are divided by it.
    /// Earlier charges are not changed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a weight that is not finite and above 0, a name that is too
    /// long, or more than 65,536 clients with weights.
    pub fn set_weight(&mut self, client: &str, weight: f64) -> Result<()> {
        check_name(client)?;
        if !(weight.is_finite() && weight > 0.0) {
            return Err(Error::invalid(format!(
                "the weight of client {client:?} must be finite and above 0, got {weight}"
            )));
        }
        if self.weights.len() >= MAX_WEIGHTS && !self.weights.contains_key(client) {
            return Err(Error::invalid(format!("more than {MAX_WEIGHTS} clients with weights")));
        }
        self.weights.insert(client.into(), weight);
        self.clients.set_weight(client, weight);
        Ok(())
    }

    /// Have a request wait. Requests of the same client with a greater `standing` go first; it gains
    /// nothing over other clients, for which there are weights.
    ///
    /// # Errors
    /// `Refused` if too many wait, with the time after which to retry.
    pub fn push<'a>(
        &mut self,
        client: impl Into<ClientName<'a>>,
        item: T,
        cost: Cost,
        standing: Standing,
        now_ms: u64,
    ) -> Result<Ticket, Refused> {
        let client = client.into();
        let slot = match self.admit_client(client) {
            Ok(slot) => slot,
            Err(refusal) => return Err(self.refuse(client, refusal)),
        };
        self.lift(slot);
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let waiting = Waiting {
            item,
            input: self.chargeable(cost.input_tokens, cost.cached_tokens),
            deadline_ms: now_ms.saturating_add(self.config.max_wait_ms),
        };
        let place = (Reverse(standing), ticket.0);
        self.clients.change_queue(slot, |queue| queue.insert(place, waiting));
        self.places.insert(ticket, (slot, place));
        Ok(ticket)
    }

    /// The next request, if it fits: the one of the client with the lowest counter, where a group counts as
    /// one client and has its own clients take turns likewise. No other goes before it.
    ///
    /// Its client is charged for the prompt and, with predictions, for the answer.
    pub fn pop(&mut self, now_ms: u64, fits: impl FnOnce(&T) -> bool) -> Option<Granted<T>> {
        self.drop_late(now_ms);
        self.raise_floor();
        let slot = self.clients.first_in_turn()?;
        let (&place, waiting) = self.clients.at(slot).queue.first_key_value()?;
        if !fits(&waiting.item) {
            return None;
        }
        let waiting = self.take(slot, place)?;
        let predicted = match self.config.discipline {
            Discipline::VtcPred => self.clients.at(slot).predictor.length(),
            _ => 0.0,
        };
        let started_at = self.clients.counter(slot).max(self.floor);
        let paid = price(waiting.input, predicted);
        self.clients.change(slot, |client| client.running += 1);
        self.clients.change_counter(slot, |counter| *counter = started_at);
        self.charge(slot, paid);
        let grant = Grant(self.next_grant);
        self.next_grant += 1;
        let input = waiting.input;
        let running = Running { slot, input, output: 0.0, predicted, paid, started_at };
        self.running.insert(grant, running);
        self.stats.admitted_total += 1;
        self.pace = Some(match self.pace {
            None => (now_ms, 0.0),
            // About the last dozen admissions count.
            Some((last_ms, mean)) => {
                (now_ms, mean + (now_ms.saturating_sub(last_ms) as f64 - mean) / 16.0)
            }
        });
        Some(Granted { grant, item: waiting.item })
    }

    /// Charges `tokens` more generated tokens to an admitted request. No effect if it has ended.
    pub fn tokens(&mut self, grant: Grant, tokens: u64) {
        let Some(running) = self.running.get_mut(&grant) else { return };
        running.output += tokens as f64;
        let due = price(running.input, running.output.max(running.predicted));
        let (slot, more) = (running.slot, due - running.paid);
        running.paid = due;
        self.charge(slot, more);
    }

    /// Ends an admitted request, for whatever reason, and corrects its charges. False if it has
    /// already ended.
    pub fn finish(&mut self, grant: Grant, used: Used) -> bool {
        let Some(running) = self.running.remove(&grant) else { return false };
        let slot = running.slot;
        let output = used.output_tokens.map_or(running.output, |tokens| tokens as f64);
        let input = match used.input_tokens {
            Some((tokens, cached)) => self.chargeable(tokens, cached),
            None => running.input,
        };
        self.clients.change(slot, |client| {
            client.running -= 1;
            client.predictor.learn(output);
        });
        self.charge(slot, price(input, output) - running.paid);
        true
    }

    /// Removes a queued request; `None` if it is no longer queued.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        let (slot, place) = *self.places.get(&ticket)?;
        let waiting = self.take(slot, place)?;
        self.stats.cancelled_total += 1;
        Some(waiting.item)
    }

    /// Requests that have timed out, longest wait first. Call it on a timer: it costs nothing if
    /// there are none.
    pub fn expire(&mut self, now_ms: u64) -> Vec<T> {
        self.drop_late(now_ms);
        std::mem::take(&mut self.dropped)
    }

    /// Statistics of the whole queue.
    pub fn stats(&self) -> FairStats {
        FairStats {
            queued: self.places.len(),
            running: self.running.len(),
            clients: self.clients.len(),
            ..self.stats
        }
    }

    /// Prompt tokens that are charged, with cached ones at their share.
    fn chargeable(&self, tokens: u64, cached: u64) -> f64 {
        let cached = cached.min(tokens);
        (tokens - cached) as f64 + cached as f64 * self.config.cached_share
    }

    fn admit_client(&mut self, name: ClientName<'_>) -> Result<u32, Refusal> {
        check_name(name.client).map_err(Refusal::Name)?;
        name.group.map_or(Ok(()), check_name).map_err(Refusal::Name)?;
        // Dropped requests that were not fetched yet take room, too.
        if self.places.len() + self.dropped.len() >= self.config.max_queued {
            return Err(Refusal::QueueFull);
        }
        if name.group.is_some_and(|group| self.clients.queued_of(group) >= self.most_of_group()) {
            return Err(Refusal::ClientQueueFull);
        }
        if let Some(slot) = self.clients.slot(name) {
            let is_full = self.clients.at(slot).queue.len() >= self.config.max_queued_per_client;
            return if is_full { Err(Refusal::ClientQueueFull) } else { Ok(slot) };
        }
        if self.clients.len() >= self.max_clients {
            if !self.clients.forget_idle() {
                return Err(Refusal::TooManyClients);
            }
            self.stats.forgotten_clients_total += 1;
        }
        let weight = self.weights.get(name.client).copied().unwrap_or(1.0);
        Ok(self.clients.add(name, self.floor, weight))
    }

    /// Most requests of a group that wait: with endless clients it leaves room for others all the same.
    fn most_of_group(&self) -> usize {
        let (parts, whole) = GROUP_SHARE;
        (self.config.max_queued.saturating_mul(parts) / whole).max(1)
    }

    fn refuse(&mut self, name: ClientName<'_>, refusal: Refusal) -> Refused {
        let own = self.clients.slot(name).map_or(0, |slot| self.clients.at(slot).queue.len());
        let (count, error) = match &refusal {
            Refusal::QueueFull => {
                let limit = self.config.max_queued;
                let error = format!(
                    "{limit} requests wait for their turn, the limit (--max-concurrent-requests)"
                );
                (&mut self.stats.refused_queue_total, Error::Overloaded(error))
            }
            Refusal::ClientQueueFull => {
                let limit = self.config.max_queued_per_client;
                let error = match name.group.filter(|_| own < limit) {
                    None => format!(
                        "{own} requests of client {:?} wait, the limit (--fairness-queue-limit)",
                        name.client
                    ),
                    Some(group) => format!(
                        "{} requests of {group} wait, over all its client names; the limit is three quarters of \
                         --max-concurrent-requests",
                        self.clients.queued_of(group)
                    ),
                };
                (&mut self.stats.refused_client_queue_total, Error::Overloaded(error))
            }
            Refusal::TooManyClients => {
                let limit = self.max_clients;
                let error = format!("{limit} clients have requests, the limit; try again later");
                (&mut self.stats.refused_clients_total, Error::Overloaded(error))
            }
            Refusal::Name(error) => (&mut self.stats.refused_names_total, error.clone()),
        };
        *count += 1;
        // By then half of the queue will have been admitted.
        let pace_ms = self.pace.map_or(0.0, |(_, mean)| mean);
        let waiting = if own > 0 { own } else { self.places.len() };
        let retry_after_ms = (pace_ms * waiting as f64 / 2.0) as u64;
        let retry_after_ms = retry_after_ms.clamp(*RETRY_MS.start(), *RETRY_MS.end());
        Refused { refusal, retry_after_ms, error }
    }

    /// A client that was idle must not keep credit from that time.
    fn lift(&mut self, slot: u32) {
        if !self.clients.at(slot).queue.is_empty() {
            return;
        }
        if self.config.discipline != Discipline::Fcfs {
            self.clients.lift_within(slot);
        }
        if !self.clients.is_waiting(slot) && self.config.discipline.lifts_on_arrival() {
            self.clients.lift(slot);
        }
    }

    /// `vtc-max-fair`: raises lower counters to where the service is.
    fn raise_floor(&mut self) {
        if self.config.discipline == Discipline::VtcMaxFair && !self.places.is_empty() {
            let last = self.running.last_key_value().map(|(_, running)| running.started_at);
            self.floor = self.floor.max(last.unwrap_or(self.highest));
        }
    }

    fn charge(&mut self, slot: u32, service: f64) {
        self.highest = self.highest.max(self.clients.charge(slot, service));
    }

    /// Removes a waiting request.
    fn take(&mut self, slot: u32, place: Place) -> Option<Waiting<T>> {
        let waiting = self.clients.change_queue(slot, |queue| queue.remove(&place))?;
        self.places.remove(&Ticket(place.1));
        Some(waiting)
    }

    fn drop_late(&mut self, now_ms: u64) {
        while let Some((_, &(slot, place))) = self.places.first_key_value()
            && self.clients.at(slot).queue[&place].deadline_ms <= now_ms
            && let Some(waiting) = self.take(slot, place)
        {
            self.stats.expired_total += 1;
            self.dropped.push(waiting.item);
        }
    }
}

fn check_name(client: &str) -> Result<()> {
    let bytes = client.len();
    if bytes > MAX_NAME_BYTES {
        return Err(Error::invalid(format!(
            "the client's name has {bytes} bytes; the limit is {MAX_NAME_BYTES}"
        )));
    }
    Ok(())
}

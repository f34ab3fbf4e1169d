//! The workers of the table, each with a small number and its counters.

use hashbrown::HashMap;
use slab::Slab;

use super::decay::Prefills;
use super::holders::WHOLE;
use crate::ids::Worker;

/// Maximum workers of one model; slots are 16-bit numbers.
pub const MAX_WORKERS: usize = u16::MAX as usize;

/// The booked and unfinished requests of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ActiveLoad {
    /// Their number.
    pub requests: u32,
    /// Their prompt tokens that are still to be prefilled, or estimated to be.
    pub prefill_tokens: u64,
    /// Of these, the estimated rest; all of them without an estimate.
    pub queued_tokens: u64,
    /// Their prompt tokens, prefilled or not.
    pub context_tokens: u64,
    /// Their distinct blocks, rounded to whole ones.
    pub blocks: u64,
    /// Number of the table's last booking on this worker, counted from 1; 0 for none.
    pub last_booked: u64,
}

/// What is known of one worker, as booked by this router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerLoad {
    /// The worker.
    pub worker: Worker,
    /// Its requests.
    pub active: ActiveLoad,
    /// Observed prompt tokens per second; `None` if speed is not observed, or until enough was
    /// observed.
    pub prefill_tokens_per_s: Option<u64>,
}

/// Counters of one worker. Only [`super::ActiveSequences`] changes them, together with the request.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: u32,
    pub(super) context_tokens: u64,
    pub(super) prefills: Prefills,
    /// The same prompts, reduced by elapsed time.
    pub(super) queue: Prefills,
    /// Distinct blocks, each as a whole.
    pub(super) blocks: u64,
    /// Their discount from whole blocks, in units of `1 / WHOLE`.
    pub(super) discount: u64,
    pub(super) last_booked: u64,
}

impl Counters {
    fn is_idle(&self) -> bool {
        (self.requests, self.prefills.tokens(), self.blocks, self.discount) == (0, 0, 0, 0)
    }
}

#[derive(Debug)]
struct Slot {
    worker: Worker,
    /// Its position in the order.
    rank: usize,
    counters: Counters,
}

/// Workers by slot, slots by worker, and slots in worker order.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Slab<Slot>,
    capacity: usize,
    by_worker: HashMap<Worker, u16>,
    /// Used slots in worker order, which makes every walk deterministic.
    order: Vec<u16>,
}

impl Slots {
    /// Maximum number of slots ever used at once: every slot is below it.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn slot(&self, worker: Worker) -> Option<u16> {
        self.by_worker.get(&worker).copied()
    }

    pub(super) fn counters(&mut self, slot: u16) -> &mut Counters {
        &mut self.slots[usize::from(slot)].counters
    }

    /// The slots of `workers`. Those in worker order, which is common for long stretches, cost a
    /// comparison instead of a look-up.
    pub(super) fn slots_of<T: Copy>(&self, workers: &[(Worker, T)], mut found: impl FnMut(u16, T)) {
        let mut next = 0;
        for &(worker, value) in workers {
            let guess = self.order.get(next).map(|&slot| (slot, self.taken(slot).worker));
            if let Some((slot, _)) = guess.filter(|&(_, guess)| guess == worker) {
                next += 1;
                found(slot, value);
            } else if let Some(slot) = self.slot(worker) {
                next = self.taken(slot).rank + 1;
                found(slot, value);
            }
        }
    }

    /// Workers in order.
    pub(super) fn workers(&self) -> impl ExactSizeIterator<Item = (u16, Worker)> + '_ {
        self.order.iter().map(|&slot| (slot, self.taken(slot).worker))
    }

    /// Loads in worker order, with their slots, as estimated for `now_ms`; `estimates`: see
    /// [`LoadConfig::estimates_queue`](super::LoadConfig::estimates_queue).
    pub(super) fn loads(
        &self,
        now_ms: u64,
        estimates: bool,
    ) -> impl ExactSizeIterator<Item = (u16, WorkerLoad)> + '_ {
        self.order.iter().map(move |&slot| (slot, self.taken(slot).load(now_ms, estimates)))
    }

    /// Assigns a slot with empty counters to each of `workers`, which have none yet.
    pub(super) fn add(&mut self, workers: &[Worker]) {
        for &worker in workers {
            let new = Slot { worker, rank: 0, counters: Counters::default() };
            let slot = self.slots.insert(new);
            self.capacity = self.capacity.max(slot + 1);
            self.by_worker.insert(worker, slot as u16);
            self.order.push(slot as u16);
        }
        let slots = &self.slots;
        // Stable: it is fast for what is in order but for its end.
        self.order.sort_by_key(|&slot| slots[usize::from(slot)].worker);
        self.rank();
    }

    /// Removes `workers`, whose counters are zero; their slots are reused.
    pub(super) fn remove(&mut self, workers: &[Worker]) {
        for worker in workers {
            let Some(slot) = self.by_worker.remove(worker) else { continue };
            let gone = self.slots.remove(usize::from(slot));
            debug_assert!(gone.counters.is_idle(), "no request, no load");
        }
        if !workers.is_empty() {
            self.order.retain(|&slot| self.slots.contains(usize::from(slot)));
            self.rank();
        }
    }

    fn rank(&mut self) {
        for (rank, &slot) in self.order.iter().enumerate() {
            self.slots[usize::from(slot)].rank = rank;
        }
    }

    fn taken(&self, slot: u16) -> &Slot {
        &self.slots[usize::from(slot)]
    }
}

impl Slot {
    #[inline]
    fn load(&self, now_ms: u64, estimates: bool) -> WorkerLoad {
        let Counters { requests, context_tokens, prefills, queue, blocks, discount, last_booked } =
            &self.counters;
        let unit = u64::from(WHOLE);
        let active = ActiveLoad {
            requests: *requests,
            prefill_tokens: prefills.left(now_ms),
            queued_tokens: if estimates { queue.left(now_ms) } else { prefills.left(now_ms) },
            context_tokens: *context_tokens,
            blocks: (blocks * unit - discount + unit / 2) / unit,
            last_booked: *last_booked,
        };
        WorkerLoad {
            worker: self.worker,
            active,
            prefill_tokens_per_s: prefills.per_s().map(|per_s| per_s.round() as u64),
        }
    }
}

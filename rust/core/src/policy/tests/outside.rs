//! Policies outside the core: what comes of a question, and who is chosen by an answer.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::super::desk::{Answer, Asked, Failure, Interests, MAX_NEWS, MAX_QUESTIONS, Task};
use super::super::*;
use super::pods::{candidate, context};
use crate::ids::Worker;

const ALL: Interests = Interests { routed: true, finished: true, removed: true };

fn desk(interests: Interests) -> Arc<Desk> {
    Arc::new(Desk::new("mine", 5, interests))
}

fn question(requests: &[u32]) -> Question {
    let context = context(0);
    let candidates = requests.iter().enumerate().map(|(id, &requests)| {
        let candidate = candidate(id, Some(requests));
        let terms = context.request.terms(Policy::Kv, &candidate);
        OutsideCandidate { candidate, metrics: EngineMetrics::default(), terms }
    });
    Question { request: OutsideRequest::of(&context), candidates: candidates.collect() }
}

fn ask(desk: &Desk) -> (u64, Receiver<Answer>) {
    let (sender, receiver) = channel();
    let number = desk.ask(question(&[0, 0]), move |answer| {
        // A test may have ended.
        let _heard = sender.send(answer);
    });
    (number, receiver)
}

fn asked(desk: &Desk) -> Asked {
    match desk.next() {
        Some(Task::Answer(asked)) => asked,
        other => panic!("{other:?}"),
    }
}

fn count(desk: &Desk, outcome: &str) -> f64 {
    let mut found = None;
    desk.samples(&mut |sample| {
        if sample.label == ("outcome", outcome) {
            found = Some(sample.value);
        }
    });
    found.unwrap()
}

#[test]
fn who_leaves_takes_the_question_along() {
    let desk = desk(ALL);
    let [first, left, last] = std::array::from_fn(|_| ask(&desk));
    let in_hand = asked(&desk);
    desk.withdraw(left.0);
    assert_eq!(left.1.recv().unwrap(), Err(Failure::Closed));
    // A call in progress stays, and no request is stuck because of it: there was time.
    desk.withdraw(first.0);
    in_hand.answer(Ok(Advice::default()));
    asked(&desk).answer(Ok(Advice::default()));
    assert!(last.1.recv().unwrap().is_ok());
    let full: Vec<_> = (0..MAX_QUESTIONS).map(|_| ask(&desk)).collect();
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Full));
    desk.withdraw(full[7].0);
    desk.withdraw(full[7].0);
    assert!(ask(&desk).1.try_recv().is_err(), "one place is free");
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Full));
}

#[test]
fn a_policy_that_does_not_come_back_is_not_waited_for_again() {
    let desk = desk(ALL);
    let questions: [_; 3] = std::array::from_fn(|_| ask(&desk));
    asked(&desk).answer(Ok(Advice::default()));
    let in_hand = asked(&desk);
    // Slow as it is, it took something since this one came, and that one it has answered.
    desk.take_back(questions[2].0);
    desk.take_back(questions[0].0);
    let behind = ask(&desk).1;
    assert!(behind.try_recv().is_err(), "behind what it is busy with");
    // Now it has nothing to say about what it took.
    desk.take_back(questions[1].0);
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Stuck));
    in_hand.answer(Ok(Advice::default()));
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Stuck), "it has not come back");
    asked(&desk).answer(Ok(Advice::default()));
    assert!(behind.recv().unwrap().is_ok());
    let again = ask(&desk).1;
    assert!(again.try_recv().is_err(), "asked again");
    assert_eq!(desk.settle(Err(Failure::Stuck), 1), None);
    assert_eq!(count(&desk, "stuck"), 1.0);
    desk.close();
}

#[test]
fn a_policy_that_is_stuck_in_news_is_not_waited_for_either() {
    let desk = desk(ALL);
    desk.tell(|| News::Removed(Worker::new(1, 0)), |wanted| wanted.removed);
    assert!(matches!(desk.next(), Some(Task::Note(_))));
    let (number, late) = ask(&desk);
    desk.take_back(number);
    assert_eq!(late.recv().unwrap(), Err(Failure::Closed));
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Stuck));
    assert_eq!(desk.settle(Err(Failure::Stuck), 1), None);
    let trouble = desk.trouble().unwrap();
    assert!(trouble.contains("a call has not returned within 5 ms"), "{trouble}");
}

#[test]
fn every_question_gets_one_answer_whatever_becomes_of_it() {
    let desk = desk(ALL);
    let (_, answered) = ask(&desk);
    let advice = Advice::new(&question(&[0, 0]), &[None, Some(2.0)]);
    asked(&desk).answer(Ok(advice.clone()));
    assert_eq!(answered.recv().unwrap(), Ok(advice));
    let (_, dropped) = ask(&desk);
    drop(asked(&desk));
    assert_eq!(dropped.recv().unwrap(), Err(Failure::Closed));
    // Taken back it is no task any more; what is in hand already can't be taken back.
    let (number, taken) = ask(&desk);
    let (_, other) = ask(&desk);
    desk.take_back(number);
    assert_eq!(taken.recv().unwrap(), Err(Failure::Closed));
    let in_hand = asked(&desk);
    desk.take_back(number + 1);
    assert!(other.try_recv().is_err());
    assert_eq!(ask(&desk).1.recv().unwrap(), Err(Failure::Stuck), "it is still busy with that");
    in_hand.answer(Err(Failure::Raised));
    assert_eq!(other.recv().unwrap(), Err(Failure::Raised));
    desk.tell(|| News::Removed(Worker::new(1, 0)), |wanted| wanted.removed);
    assert!(matches!(desk.next(), Some(Task::Note(_))), "it has come back");
    let (_, waiting) = ask(&desk);
    desk.close();
    assert!(desk.next().is_none());
    for one in [waiting, ask(&desk).1] {
        assert_eq!(one.recv().unwrap(), Err(Failure::Closed));
    }
}

#[test]
fn questions_and_news_have_limits_of_their_own() {
    let desk = desk(ALL);
    for _ in 0..MAX_NEWS + 3 {
        desk.tell(|| News::Removed(Worker::new(1, 0)), |wanted| wanted.removed);
    }
    let waiting: Vec<_> = (0..MAX_QUESTIONS).map(|_| ask(&desk)).collect();
    let (_, refused) = ask(&desk);
    assert_eq!(refused.recv().unwrap(), Err(Failure::Full));
    desk.take_back(waiting[5].0);
    let (_, next) = ask(&desk);
    assert!(next.try_recv().is_err());
    let mut dropped = 0.0;
    desk.samples(&mut |sample| {
        if sample.name == "outside_policy_dropped_news_total" {
            dropped = sample.value;
        }
    });
    assert_eq!(dropped, 3.0);
    for _ in 0..MAX_NEWS {
        assert!(matches!(desk.next(), Some(Task::Note(_))));
    }
    for _ in 0..MAX_QUESTIONS {
        drop(asked(&desk));
    }
    // Events without an interested policy are not delivered.
    let deaf = self::desk(Interests::default());
    deaf.tell(|| unreachable!("nobody asks"), |wanted| wanted.routed);
    deaf.close();
}

#[test]
fn what_there_is_instead_of_advice_is_counted() {
    let desk = desk(ALL);
    for failure in [Failure::Late, Failure::Late, Failure::Nonsense] {
        assert_eq!(desk.settle(Err(failure), 1), None);
    }
    let trouble = desk.trouble().unwrap();
    assert!(
        trouble
            .starts_with("policy mine gave no decision 3 times in a row (nonsense), so kv decides"),
        "{trouble}"
    );
    assert!(desk.settle(Ok(Advice::default()), 1).is_some());
    assert_eq!(desk.trouble(), None);
    let counts = ["late", "raised", "nonsense", "full", "closed"].map(|one| count(&desk, one));
    assert_eq!(counts, [2.0, 0.0, 1.0, 0.0, 0.0]);
}

/// The choice among workers with these request counts, after all others have left.
fn chosen(advice: Option<&Advice>, left: &[(usize, u32)]) -> (u64, Reason, Option<f64>) {
    let outside = Outside::new(desk(ALL));
    let list: Vec<_> = left.iter().map(|&(id, requests)| candidate(id, Some(requests))).collect();
    let context = Context { advice, ..context(0) };
    let found = Candidates::new(&list);
    let mut terms = Vec::new();
    let mut rng = SmallRng::seed_from_u64(1);
    let choice = outside.choose(&context, &found, &mut terms, &mut rng).unwrap();
    assert_eq!(terms.len(), list.len());
    (list[choice.index].worker.instance_id, choice.reason, choice.score)
}

#[test]
fn the_highest_score_that_may_take_it_wins_and_kv_without_any() {
    let advice = Advice::new(&question(&[0; 4]), &[Some(1.0), Some(3.0), None, Some(2.0)]);
    let all = [(0, 0), (1, 9), (2, 0), (3, 0)];
    assert_eq!(chosen(Some(&advice), &all), (1, Reason::HighestScore, Some(3.0)));
    assert_eq!(chosen(Some(&advice), &[(0, 0), (2, 0), (3, 0)]).0, 3);
    assert_eq!(chosen(Some(&advice), &[(0, 0), (2, 0)]).0, 0);
    // Only those that were never to be taken are left, or such as were not asked about.
    assert_eq!(chosen(Some(&advice), &[(2, 0), (7, 0)]).2, None);
    assert_eq!(chosen(None, &all).2, None);
    // Equal scores: the cheaper one.
    let equal = Advice::new(&question(&[0; 3]), &[Some(1.0); 3]);
    let mut busy = [candidate(0, Some(1)), candidate(1, Some(1)), candidate(2, Some(1))];
    for (at, one) in busy.iter_mut().enumerate() {
        one.load.blocks = [9, 2, 5][at];
    }
    let context = Context { advice: Some(&equal), ..context(0) };
    let mut rng = SmallRng::seed_from_u64(1);
    let choice = Outside::new(desk(ALL))
        .choose(&context, &Candidates::new(&busy), &mut Vec::new(), &mut rng)
        .unwrap();
    assert_eq!((choice.index, choice.ties, choice.margin), (1, 3, Some(0.0)));
}

#[test]
fn what_really_happened_is_told_in_order_and_followed_advice_is_counted() {
    let desk = desk(ALL);
    let outside = Outside::new(Arc::clone(&desk));
    let list = [candidate(0, Some(0)), candidate(1, Some(0))];
    let found = Candidates::new(&list);
    let advice = Advice::new(&question(&[0, 0]), &[Some(0.0), Some(1.0)]);
    let mut rng = SmallRng::seed_from_u64(1);
    for advice in [Some(&advice), Some(&Advice::default()), None] {
        let context = Context { advice, ..context(0) };
        let choice = outside.choose(&context, &found, &mut Vec::new(), &mut rng).unwrap();
        outside.routed(&context, &found, &choice);
    }
    outside.removed(Worker::new(1, 0));
    assert_eq!((count(&desk, "followed"), count(&desk, "outdated")), (1.0, 1.0));
    let Some(Task::Note(News::Routed(request, first))) = desk.next() else { panic!() };
    assert_eq!((&*request.model, first.candidate.worker), ("m", Worker::new(1, 0)));
    for _ in 0..2 {
        assert!(matches!(desk.next(), Some(Task::Note(News::Routed(..)))));
    }
    let Some(Task::Note(News::Removed(worker))) = desk.next() else { panic!() };
    assert_eq!(worker, Worker::new(1, 0));
    // When the policy goes, no request waits at its desk any more.
    drop(outside);
    assert!(desk.next().is_none());
}

//! The scheduler: who goes when, who gives way, who is refused.

use proptest::prelude::*;
use timetable_engine::{
    kv::KvCacheManager,
    request::RequestKey,
    scheduler::{AddRequestError, Scheduler, SchedulerLimits},
};

fn scheduler(rows: usize, budget: usize, num_blocks: usize, block_size: usize) -> Scheduler {
    Scheduler::new(
        SchedulerLimits {
            max_num_seqs: rows,
            max_num_batched_tokens: budget,
            max_model_len: 64,
            num_speculative_tokens: 0,
        },
        KvCacheManager::new(num_blocks, block_size, true),
    )
}

/// The token that a request's model would give: a function of the whole history, so that a wrong history shows.
fn next_token(history: &[u32]) -> u32 {
    history.iter().fold(17, |sum: u32, &token| {
        sum.wrapping_mul(31).wrapping_add(token)
    }) % 1000
}

/// One step without a model. Returns (key, tokens) of the rows.
fn step(scheduler: &mut Scheduler) -> Vec<(RequestKey, usize)> {
    let rows: Vec<_> = scheduler
        .schedule()
        .rows
        .iter()
        .map(|row| (row.key, row.num_tokens))
        .collect();
    scheduler.complete();
    for &(key, _) in &rows {
        let request = scheduler.request(key);
        if request.num_computed() == request.tokens().len() {
            let token = next_token(request.tokens());
            scheduler.append(key, token);
        }
    }
    rows
}

/// The recurrent states of requests.
fn states(scheduler: &Scheduler, keys: &[RequestKey]) -> Vec<u32> {
    let of = |key: &RequestKey| scheduler.request(*key).state();
    keys.iter().map(of).collect()
}

#[test]
fn a_running_request_has_a_state_of_its_own_and_gives_it_back() {
    let mut scheduler = scheduler(2, 8, 5, 4);
    let keys: Vec<RequestKey> = (1..4)
        .map(|token| scheduler.add(vec![token; 4], Some(9)).unwrap())
        .collect();
    assert_eq!(states(&scheduler, &keys), [0, 0, 0], "nothing runs");
    step(&mut scheduler);
    assert_eq!(states(&scheduler, &keys), [1, 2, 0]);
    // Four blocks: the younger loses its own, and its state, when the older needs a third.
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    assert_eq!(states(&scheduler, &keys), [1, 0, 0]);
    assert_eq!(scheduler.request(keys[1]).num_computed(), 0);
    scheduler.finish(keys[0]);
    step(&mut scheduler);
    let given: Vec<u32> = states(&scheduler, &keys[1..]);
    assert!(
        given.iter().all(|state| (1..=2).contains(state)),
        "{given:?}"
    );
    assert_ne!(given[0], given[1]);
}

#[test]
fn running_requests_go_first_and_prompts_are_cut_to_the_budget() {
    let mut scheduler = scheduler(4, 8, 40, 4);
    let a = scheduler.add(vec![1; 3], None).unwrap();
    let b = scheduler.add(vec![2; 9], None).unwrap();
    let c = scheduler.add(vec![3; 2], None).unwrap();
    assert_eq!(step(&mut scheduler), [(a, 3), (b, 5)]);
    assert_eq!(
        step(&mut scheduler),
        [(a, 1), (c, 2), (b, 4)],
        "decodes first, then by length"
    );
    assert_eq!(step(&mut scheduler), [(a, 1), (b, 1), (c, 1)]);
}

#[test]
fn rows_are_limited() {
    let mut scheduler = scheduler(2, 64, 40, 4);
    let keys: Vec<_> = (0..3)
        .map(|_| scheduler.add(vec![1; 2], None).unwrap())
        .collect();
    assert_eq!(step(&mut scheduler).len(), 2);
    scheduler.finish(keys[0]);
    assert_eq!(step(&mut scheduler), [(keys[1], 1), (keys[2], 2)]);
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let mut scheduler = scheduler(2, 16, 5, 4);
    assert_eq!(
        scheduler.add(vec![], None),
        Err(AddRequestError::EmptyPrompt)
    );
    assert_eq!(
        scheduler.add(vec![1], Some(0)),
        Err(AddRequestError::NoTokensAsked)
    );
    let error = scheduler.add(vec![1; 64], None).unwrap_err();
    assert_eq!(
        error,
        AddRequestError::PromptTooLong {
            prompt_len: 64,
            max_model_len: 64
        }
    );
    assert!(error.to_string().contains("--max-model-len"), "{error}");
    assert_eq!(
        scheduler.add(vec![1; 10], Some(20)),
        Err(AddRequestError::NeverFits {
            needed: 8,
            available: 4,
            block_size: 4
        })
    );
    // 10 + 7 tokens: the last one needs no keys and values.
    scheduler.add(vec![1; 10], Some(7)).unwrap();
    let key = scheduler.add(vec![1; 10], None).unwrap();
    while scheduler.num_running() + scheduler.num_waiting() == 2 {
        step(&mut scheduler);
        let first = RequestKey(0);
        if scheduler.request(first).is_at_limit() {
            assert_eq!(scheduler.finish(first).tokens().len(), 17);
        }
    }
    while !scheduler.request(key).is_at_limit() {
        step(&mut scheduler);
    }
    assert_eq!(
        scheduler.request(key).tokens().len(),
        17,
        "an open end stops where the cache ends"
    );
}

#[test]
fn the_youngest_gives_way_and_comes_back_first() {
    let mut scheduler = scheduler(4, 32, 5, 4);
    let old = scheduler.add(vec![1; 7], Some(9)).unwrap();
    let young = scheduler.add(vec![2; 7], Some(9)).unwrap();
    let waiting = scheduler.add(vec![3; 3], Some(2)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!(scheduler.num_running(), 2);
    // Both want a third block; there is none.
    let rows = step(&mut scheduler);
    assert_eq!(rows, [(old, 1)]);
    assert_eq!(scheduler.last_schedule().preempted, [young]);
    assert_eq!(scheduler.request(young).num_preemptions(), 1);
    assert_eq!(scheduler.request(young).num_computed(), 0);
    scheduler.finish(old);
    // The head of its prompt is still cached. Row slots are handed out last freed first: it was served before `waiting`.
    assert_eq!(step(&mut scheduler), [(waiting, 3), (young, 5)]);
    assert_eq!(scheduler.request(young).slot(), Some(3));
    assert_eq!(scheduler.request(waiting).slot(), Some(2));
}

#[test]
fn a_failed_step_leaves_no_cached_prefix() {
    let mut scheduler = scheduler(4, 32, 20, 4);
    let key = scheduler.add(vec![5; 9], None).unwrap();
    scheduler.schedule();
    let start = scheduler.request(key).num_computed();
    scheduler.withdraw(key, start);
    scheduler.finish(key);
    let again = scheduler.add(vec![5; 9], None).unwrap();
    assert_eq!(step(&mut scheduler), [(again, 9)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Whatever the limits, with a cache so small that requests push each other out: every request gets exactly its tokens.
    #[test]
    fn every_request_ends_with_its_own_tokens(
        rows in 1..6usize,
        budget in 1..40usize,
        num_blocks in 9..24usize,
        block_size in 1..6usize,
        requests in prop::collection::vec((0..3u32, 1..20usize, 1..16usize), 1..14),
    ) {
        let mut scheduler = scheduler(rows, budget, num_blocks, block_size);
        let mut expected = std::collections::HashMap::new();
        for (family, len, max_tokens) in requests {
            let prompt: Vec<u32> = (0..len as u32).map(|index| family * 50 + index).collect();
            let Ok(key) = scheduler.add(prompt.clone(), Some(max_tokens)) else { continue };
            let mut tokens = prompt;
            for _ in 0..max_tokens {
                tokens.push(next_token(&tokens));
            }
            expected.insert(key, tokens);
        }
        let mut steps = 0;
        while scheduler.num_running() + scheduler.num_waiting() > 0 {
            let done = step(&mut scheduler);
            prop_assert!(!done.is_empty(), "no progress");
            prop_assert!(done.len() <= rows);
            prop_assert!(done.iter().map(|row| row.1).sum::<usize>() <= budget);
            for (key, _) in done {
                if scheduler.request(key).is_at_limit() {
                    let request = scheduler.finish(key);
                    prop_assert_eq!(request.tokens(), &expected.remove(&key).unwrap()[..]);
                }
            }
            steps += 1;
            prop_assert!(steps < 100_000, "livelock");
        }
        prop_assert!(expected.is_empty());
        prop_assert_eq!(scheduler.kv().pool().num_free(), num_blocks - 1);
    }
}

#[test]
fn drafts_have_what_nobody_else_needs() {
    let speculating = |budget, num_blocks| {
        let limits = SchedulerLimits {
            max_num_seqs: 3,
            max_num_batched_tokens: budget,
            max_model_len: 64,
            num_speculative_tokens: 4,
        };
        Scheduler::new(limits, KvCacheManager::new(num_blocks, 4, true))
    };
    let rows = |scheduler: &mut Scheduler| -> Vec<(RequestKey, usize, usize)> {
        let rows = &scheduler.schedule().rows;
        rows.iter()
            .map(|row| (row.key, row.num_tokens, row.num_drafts))
            .collect()
    };
    // Six tokens a step: each row has its next one, and what is left goes to the first.
    let mut scheduler = speculating(6, 40);
    let [a, b, c] = [1, 2, 3].map(|token| scheduler.add(vec![token; 2], None).unwrap());
    step(&mut scheduler);
    for key in [a, b, c] {
        scheduler.set_drafts(key, &[7; 4]);
    }
    assert_eq!(rows(&mut scheduler), [(a, 4, 3), (b, 1, 0), (c, 1, 0)]);
    scheduler.complete();
    // One of three was right: the row gave two tokens, of which the last is to be computed.
    scheduler.settle_drafts(a, 3, 1);
    scheduler.append(a, 7);
    scheduler.append(a, 8);
    let request = scheduler.request(a);
    assert_eq!((request.num_computed(), request.tokens().len()), (4, 5));
    assert!(request.drafts().is_empty());

    // Two blocks are in use and one is free, which the second row needs for its next token.
    let mut scheduler = speculating(64, 4);
    let a = scheduler.add(vec![1; 3], Some(5)).unwrap();
    let b = scheduler.add(vec![2; 4], Some(4)).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(a, &[7; 4]);
    assert_eq!(rows(&mut scheduler), [(a, 1, 0), (b, 1, 0)]);
    assert_eq!(scheduler.num_preemptions(), 0);
}

//! Tenants in the scheduler: who gets how much of a step, whose turn it is, who gives way.

use proptest::prelude::*;
use timetable_engine::{
    kv::{BlockHash, KvCacheManager},
    request::RequestKey,
    scheduler::{Owner, Scheduler, SchedulerLimits, SegmentKey, TenantIndex, TenantShare},
};

/// Tenants 1, 2, … with these weights; with a segment of their own each if `apart`. Tenant 0 is nobody.
fn scheduler(
    (rows, budget, num_blocks): (usize, usize, usize),
    weights: &[f64],
    apart: bool,
    max_segments: usize,
) -> Scheduler {
    let of = |(index, &weight): (usize, &f64)| TenantShare {
        weight,
        slot: if apart { index as u32 + 1 } else { 0 },
    };
    let tenants = weights.iter().enumerate().map(of);
    let tenants: Vec<_> = std::iter::once(TenantShare::default())
        .chain(tenants)
        .collect();
    Scheduler::with_tenants(
        SchedulerLimits {
            max_num_seqs: rows,
            max_num_batched_tokens: budget,
            max_model_len: 4096,
            num_speculative_tokens: 0,
        },
        KvCacheManager::new(num_blocks, 4, true),
        &tenants,
        max_segments,
    )
}

fn owner(tenant: u32) -> Owner {
    let name = format!("t{tenant}").parse().unwrap();
    Owner {
        tenant: TenantIndex(tenant),
        prefix_root: match tenant {
            0 => BlockHash::default(),
            _ => BlockHash::of_tenant(&name),
        },
    }
}

/// One step without a model: (tenant, key, tokens) of the rows.
fn step(scheduler: &mut Scheduler) -> Vec<(u32, RequestKey, usize)> {
    let rows: Vec<_> = scheduler
        .schedule()
        .rows
        .iter()
        .map(|row| (row.tenant.0, row.key, row.num_tokens))
        .collect();
    scheduler.complete();
    for &(_, key, _) in &rows {
        let request = scheduler.request(key);
        if request.num_computed() == request.tokens().len() {
            scheduler.append(key, 7);
        }
    }
    rows
}

/// As `step`, and what has its last token ends.
fn step_and_finish(scheduler: &mut Scheduler) -> Vec<(u32, RequestKey, usize)> {
    let rows = step(scheduler);
    for &(_, key, _) in &rows {
        if scheduler.request(key).is_at_limit() {
            scheduler.finish(key);
        }
    }
    rows
}

fn tokens_of(rows: &[(u32, RequestKey, usize)], tenant: u32) -> usize {
    let of = rows.iter().filter(|row| row.0 == tenant);
    of.map(|row| row.2).sum()
}

#[test]
fn tokens_are_dealt_by_weight_while_tenants_compete() {
    let mut scheduler = scheduler((8, 40, 2000), &[1.0, 3.0], false, 4);
    // A prompt that fills many steps, first come.
    let mut next = 0;
    let mut prompt = || {
        next += 1;
        vec![next; 500]
    };
    scheduler.add_for(owner(1), prompt(), Some(4)).unwrap();
    assert_eq!(tokens_of(&step(&mut scheduler), 1), 40, "nobody else");
    for tenant in [1, 2, 2, 1] {
        scheduler.add_for(owner(tenant), prompt(), Some(4)).unwrap();
    }
    for _ in 0..10 {
        let rows = step(&mut scheduler);
        assert_eq!((tokens_of(&rows, 1), tokens_of(&rows, 2)), (10, 30));
    }
}

#[test]
fn what_one_tenant_cannot_use_others_get() {
    let mut scheduler = scheduler((8, 40, 2000), &[1.0, 1.0], false, 4);
    scheduler.add_for(owner(1), vec![1; 3], Some(50)).unwrap();
    scheduler.add_for(owner(2), vec![2; 900], Some(2)).unwrap();
    assert_eq!(tokens_of(&step(&mut scheduler), 2), 37);
    for _ in 0..5 {
        let rows = step(&mut scheduler);
        assert_eq!((tokens_of(&rows, 1), tokens_of(&rows, 2)), (1, 39));
    }
    // A cached prefix needs less than its length: the rest of its part goes to the other.
    scheduler.add_for(owner(1), vec![9; 30], Some(40)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    scheduler.add_for(owner(1), vec![9; 30], Some(2)).unwrap();
    let rows = step(&mut scheduler);
    assert_eq!(tokens_of(&rows, 1), 1 + 1 + 2, "28 of 30 are cached");
    assert_eq!(tokens_of(&rows, 1) + tokens_of(&rows, 2), 40);
}

#[test]
fn a_free_row_goes_to_the_tenant_with_the_fewest_for_its_weight() {
    let mut scheduler = scheduler((4, 64, 400), &[1.0, 1.0], false, 4);
    for index in 0..6 {
        scheduler
            .add_for(owner(1), vec![index; 3], Some(5))
            .unwrap();
    }
    let second = scheduler.add_for(owner(2), vec![90; 3], Some(5)).unwrap();
    let rows = step(&mut scheduler);
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().any(|row| row.1 == second), "it came last");
}

/// Rows of one builder stand together, decodes first among them, and a builder sees indexes of its own rows only.
#[test]
fn rows_stand_by_segment() {
    let mut scheduler = scheduler((8, 64, 400), &[1.0, 1.0], true, 4);
    let mut keys = Vec::new();
    for tenant in [2, 1, 0, 2] {
        keys.push(
            scheduler
                .add_for(owner(tenant), vec![tenant; 3], Some(9))
                .unwrap(),
        );
    }
    step(&mut scheduler);
    keys.push(scheduler.add_for(owner(1), vec![5; 4], Some(9)).unwrap());
    let rows = step(&mut scheduler);
    let expected = [(0, 2, 1), (1, 1, 1), (1, 4, 4), (2, 0, 1), (2, 3, 1)];
    assert_eq!(
        rows,
        expected.map(|(tenant, key, n)| (tenant, keys[key], n))
    );
    let slot = |key: usize| scheduler.request(keys[key]).slot();
    assert_eq!((slot(0), slot(3)), (Some(7), Some(6)));
    assert_eq!((slot(1), slot(4)), (Some(7), Some(6)));
    assert_eq!(slot(2), Some(7), "each segment has a table of its own");
}

/// A tenant whom a candidate is tried on has a segment of its own, behind its slot's, and keeps its row's index.
#[test]
fn a_candidates_rows_stand_apart() {
    let mut scheduler = scheduler((8, 64, 400), &[1.0, 1.0], false, 4);
    let keys: Vec<_> = [1, 2, 0]
        .map(|tenant| {
            scheduler
                .add_for(owner(tenant), vec![tenant; 3], Some(9))
                .unwrap()
        })
        .into();
    step(&mut scheduler);
    let slot = scheduler.request(keys[0]).slot();
    scheduler.set_candidate(TenantIndex(1), true);
    let order =
        |rows: Vec<(u32, RequestKey, usize)>| rows.iter().map(|row| row.0).collect::<Vec<_>>();
    assert_eq!(order(step(&mut scheduler)), [2, 0, 1]);
    assert_eq!(scheduler.request(keys[0]).slot(), slot);
    scheduler.set_candidate(TenantIndex(1), false);
    assert_eq!(order(step(&mut scheduler)), [1, 2, 0]);
}

/// With one segment in a step, tenants with builders of their own take turns, and over time still get their shares.
#[test]
fn segments_beyond_the_most_wait_their_turn() {
    let mut scheduler = scheduler((16, 8, 4000), &[1.0, 3.0, 1.0], true, 1);
    for index in 0..4 {
        for tenant in 1..4 {
            let prompt = vec![10 * tenant + index; 1000];
            scheduler.add_for(owner(tenant), prompt, Some(4)).unwrap();
        }
    }
    let mut served = [0; 4];
    for _ in 0..100 {
        let rows = step(&mut scheduler);
        let of_one = rows.iter().all(|row| row.0 == rows[0].0);
        assert!(of_one && !rows.is_empty(), "{rows:?}");
        served[rows[0].0 as usize] += rows.iter().map(|row| row.2).sum::<usize>();
    }
    assert_eq!(served.iter().sum::<usize>(), 800, "every step is full");
    let near = |found: usize, expected: usize| found.abs_diff(expected) <= 8;
    assert!(
        near(served[1], 160) && near(served[2], 480) && near(served[3], 160),
        "{served:?}"
    );
}

#[test]
fn blocks_are_taken_from_the_tenant_that_holds_the_most_for_its_weight() {
    let mut scheduler = scheduler((8, 64, 13), &[1.0, 1.0], false, 4);
    let first = scheduler.add_for(owner(1), vec![1; 15], Some(20)).unwrap();
    let greedy = scheduler.add_for(owner(1), vec![2; 15], Some(20)).unwrap();
    let other = scheduler.add_for(owner(2), vec![3; 14], Some(12)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!(scheduler.num_running(), 3, "12 blocks are in use");
    let mut preempted = Vec::new();
    for _ in 0..3 {
        step(&mut scheduler);
        preempted.extend_from_slice(&scheduler.last_schedule().preempted);
    }
    // The other came last and would be the victim of today's rule; tenant 1 has twice its blocks, and its oldest stays.
    assert_eq!(preempted, [greedy]);
    assert!(scheduler.request(first).slot().is_some());
    assert!(scheduler.request(other).slot().is_some());
}

#[test]
fn equal_prompts_of_two_tenants_share_no_block() {
    let mut scheduler = scheduler((8, 64, 400), &[1.0, 1.0], false, 4);
    let prompt: Vec<u32> = (0..33).collect();
    let blocks = |scheduler: &Scheduler, key| scheduler.request(key).blocks().to_vec();
    let add = |scheduler: &mut Scheduler, tenant| {
        let key = scheduler.add_for(owner(tenant), prompt.clone(), Some(20));
        step(scheduler);
        key.unwrap()
    };
    let keys: Vec<_> = (0..3).map(|tenant| add(&mut scheduler, tenant)).collect();
    assert_eq!(scheduler.kv().prefix_stats().1, 0, "no hit");
    let again = add(&mut scheduler, 1);
    assert_eq!(scheduler.kv().prefix_stats().1, 32);
    assert_eq!(
        blocks(&scheduler, again)[..8],
        blocks(&scheduler, keys[1])[..8]
    );
    let mut all: Vec<u32> = keys
        .iter()
        .flat_map(|&key| blocks(&scheduler, key))
        .collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Whatever the weights, sizes and segments, with a cache so small that requests push each other out: every step is as full
    /// as it can be told to be, every request ends with its tokens, every block comes back.
    #[test]
    fn every_request_of_every_tenant_ends(
        rows in 1..6usize,
        budget in 1..40usize,
        num_blocks in 9..24usize,
        weights in prop::collection::vec(0.1..10.0f64, 1..4),
        apart: bool,
        max_segments in 1..3usize,
        requests in prop::collection::vec((0..4u32, 1..20usize, 1..16usize), 1..20),
    ) {
        let mut scheduler = scheduler((rows, budget, num_blocks), &weights, apart, max_segments);
        let mut open = 0;
        for (index, (tenant, len, max_tokens)) in requests.into_iter().enumerate() {
            let tenant = tenant % (weights.len() as u32 + 1);
            let prompt = vec![index as u32 % 3; len];
            open += usize::from(scheduler.add_for(owner(tenant), prompt, Some(max_tokens)).is_ok());
        }
        let mut steps = 0;
        while open > 0 {
            let done = step(&mut scheduler);
            prop_assert!(!done.is_empty(), "no progress");
            prop_assert!(done.len() <= rows);
            prop_assert!(done.iter().map(|row| row.2).sum::<usize>() <= budget);
            let mut segments: Vec<SegmentKey> = scheduler.last_schedule().rows.iter().map(|row| row.segment).collect();
            prop_assert!(segments.is_sorted());
            segments.dedup();
            prop_assert!(segments.len() <= max_segments);
            for (_, key, _) in done {
                if scheduler.request(key).is_at_limit() {
                    scheduler.finish(key);
                    open -= 1;
                }
            }
            steps += 1;
            prop_assert!(steps < 100_000, "livelock");
        }
        prop_assert_eq!(scheduler.kv().pool().num_free(), num_blocks - 1);
    }

    /// Under saturation tokens go by weight, and no step has room while anybody waits for tokens.
    #[test]
    fn under_saturation_tokens_go_by_weight(
        weights in prop::collection::vec(0.2..5.0f64, 2..5),
        budget in 8..200usize,
        apart: bool,
        decodes in 0..6usize,
    ) {
        let mut scheduler = scheduler((1000, budget, 1 << 16), &weights, apart, 8);
        let mut served = vec![0; weights.len() + 1];
        let mut next = 0;
        for tenant in 1..=weights.len() as u32 {
            for _ in 0..decodes {
                next += 1;
                scheduler.add_for(owner(tenant), vec![next; 2], Some(500)).unwrap();
            }
        }
        let steps = 300;
        for _ in 0..steps {
            for tenant in 1..=weights.len() as u32 {
                if scheduler.num_of_tenant(TenantIndex(tenant)).1 < 2 + decodes {
                    for _ in 0..3 {
                        next += 1;
                        scheduler.add_for(owner(tenant), vec![next; 300], Some(1)).unwrap();
                    }
                }
            }
            let rows = step_and_finish(&mut scheduler);
            prop_assert_eq!(rows.iter().map(|row| row.2).sum::<usize>(), budget);
            for (tenant, _, tokens) in rows {
                served[tenant as usize] += tokens;
            }
        }
        let sum: f64 = weights.iter().sum();
        for (index, weight) in weights.iter().enumerate() {
            let fair = (steps * budget) as f64 * weight / sum;
            let found = served[index + 1] as f64;
            prop_assert!((found - fair).abs() <= 2.0 + 0.01 * fair, "{served:?} {weights:?}");
        }
    }

    /// A tenant that is alone is scheduled as nobody in particular is, to the row and the block, whatever others are configured.
    #[test]
    fn one_tenant_alone_is_scheduled_as_without_tenants(
        rows in 1..6usize,
        budget in 1..40usize,
        num_blocks in 9..24usize,
        requests in prop::collection::vec((0..3u32, 1..20usize, 1..16usize), 1..14),
    ) {
        let mut plain = Scheduler::new(
            SchedulerLimits { max_num_seqs: rows, max_num_batched_tokens: budget, max_model_len: 4096, num_speculative_tokens: 0 },
            KvCacheManager::new(num_blocks, 4, true),
        );
        let mut tenants = scheduler((rows, budget, num_blocks), &[0.3, 2.0, 5.0], true, 1);
        for (family, len, max_tokens) in requests {
            let prompt: Vec<u32> = (0..len as u32).map(|index| family * 50 + index).collect();
            let a = plain.add(prompt.clone(), Some(max_tokens));
            prop_assert_eq!(a, tenants.add_for(owner(2), prompt, Some(max_tokens)));
        }
        while plain.num_running() + plain.num_waiting() > 0 {
            let of = |rows: Vec<(u32, RequestKey, usize)>| rows.into_iter().map(|row| (row.1, row.2)).collect::<Vec<_>>();
            let (a, b) = (of(step(&mut plain)), of(step(&mut tenants)));
            prop_assert_eq!(&a, &b);
            prop_assert_eq!(&plain.last_schedule().preempted, &tenants.last_schedule().preempted);
            for (key, _) in a {
                prop_assert_eq!(plain.request(key).blocks(), tenants.request(key).blocks());
                prop_assert_eq!(plain.request(key).slot(), tenants.request(key).slot());
                if plain.request(key).is_at_limit() {
                    plain.finish(key);
                    tenants.finish(key);
                }
            }
        }
    }
}

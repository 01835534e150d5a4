//! Random corruptions of good metadata: each is refused, or leaves what is executed as it was.
//!
//! "As it was" is decided by an independent reading of the record (`meaning`), not by the verifier: which keys each query
//! attends to, which partial results are merged, and every number that a launch relies on.

use std::collections::BTreeMap;

use proptest::prelude::*;
use timetable_attention::{
    Grant, Verifier,
    types::{
        Metadata,
        flash_attn::TileOrder,
        flashinfer::{Decode, Plan, Prefill},
    },
};

use crate::{
    clever,
    support::{Batch, Random},
};

/// The vectors of a record that a builder gives by value.
fn vectors(metadata: &mut Metadata) -> Vec<(&'static str, &mut Vec<i32>)> {
    match metadata {
        Metadata::FlashAttn(record) => {
            let mut found = vec![("num_splits", &mut record.schedule.num_splits)];
            if let TileOrder::Rows(order) = &mut record.schedule.tile_order {
                found.push(("tile_order", order));
            }
            found
        }
        Metadata::Flashinfer(record) => {
            let mut found = Vec::new();
            if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                found.extend(plan_vectors(plan));
            }
            if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
                found.extend(plan_vectors(plan));
            }
            found
        }
        _ => Vec::new(),
    }
}

fn plan_vectors(plan: &mut Plan) -> [(&'static str, &mut Vec<i32>); 8] {
    [
        ("paged_kv_indptr", &mut plan.paged_kv_indptr),
        ("paged_kv_last_page_len", &mut plan.paged_kv_last_page_len),
        ("seq_lens", &mut plan.seq_lens),
        ("request_indices", &mut plan.work.request_indices),
        ("qo_tile_indices", &mut plan.work.qo_tile_indices),
        ("kv_tile_indices", &mut plan.work.kv_tile_indices),
        ("worker_indptr", &mut plan.work.worker_indptr),
        ("merge_indptr", &mut plan.work.merge_indptr),
    ]
}

/// The kinds of corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Sign,
    OneMore,
    OneLess,
    SwapNeighbours,
    SwapFar,
    OthersValue,
    Duplicate,
    Drop,
    Append,
    Huge,
    WrapAround,
    Zero,
    Shift,
    Reverse,
    Clear,
    Scalar,
}

const KINDS: [Kind; 16] = [
    Kind::Sign,
    Kind::OneMore,
    Kind::OneLess,
    Kind::SwapNeighbours,
    Kind::SwapFar,
    Kind::OthersValue,
    Kind::Duplicate,
    Kind::Drop,
    Kind::Append,
    Kind::Huge,
    Kind::WrapAround,
    Kind::Zero,
    Kind::Shift,
    Kind::Reverse,
    Kind::Clear,
    Kind::Scalar,
];

/// Corrupts one place; gives the field.
fn corrupt(metadata: &mut Metadata, kind: Kind, random: &mut Random) -> Option<&'static str> {
    if kind == Kind::Scalar {
        return Some(corrupt_scalar(metadata, random));
    }
    let mut fields = vectors(metadata);
    let count = fields.len();
    if count == 0 {
        return None;
    }
    let (field, values) = fields.swap_remove(random.between(0, count as i64 - 1) as usize);
    if values.is_empty() {
        return None;
    }
    let at = random.between(0, values.len() as i64 - 1) as usize;
    let other = random.between(0, values.len() as i64 - 1) as usize;
    match kind {
        Kind::Sign => values[at] = values[at].wrapping_neg().wrapping_sub(1),
        Kind::OneMore => values[at] = values[at].wrapping_add(1),
        Kind::OneLess => values[at] = values[at].wrapping_sub(1),
        Kind::SwapNeighbours => {
            let last = values.len() - 1;
            values.swap(at, (at + 1).min(last));
        }
        Kind::SwapFar => values.swap(at, other),
        Kind::OthersValue => values[at] = values[other],
        Kind::Duplicate => values.insert(at, values[at]),
        Kind::Drop => drop(values.remove(at)),
        Kind::Append => values.push(values[other]),
        Kind::Huge => values[at] = 1 << 30,
        Kind::WrapAround => values[at] = random.pick(&[i32::MAX, i32::MIN, -1]),
        Kind::Zero => values[at] = 0,
        Kind::Shift => values[at..]
            .iter_mut()
            .for_each(|value| *value = value.wrapping_add(1)),
        Kind::Reverse => values[at.min(other)..=at.max(other)].reverse(),
        Kind::Clear => values.clear(),
        Kind::Scalar => unreachable!("handled above"),
    }
    Some(field)
}

fn corrupt_scalar(metadata: &mut Metadata, random: &mut Random) -> &'static str {
    let change = |value: &mut u32, random: &mut Random| {
        *value = match random.between(0, 4) {
            0 => value.wrapping_add(1),
            1 => value.wrapping_sub(1),
            2 => 0,
            3 => u32::MAX,
            _ => 1 << 30,
        };
    };
    let mut fields: Vec<(&'static str, &mut u32)> = Vec::new();
    match metadata {
        Metadata::FlashAttn(record) => fields.extend([
            ("num_actual_tokens", &mut record.num_actual_tokens),
            ("max_query_len", &mut record.max_query_len),
            ("max_seq_len", &mut record.max_seq_len),
            ("max_num_splits", &mut record.schedule.max_num_splits),
        ]),
        Metadata::Flashinfer(record) => {
            fields.extend([
                ("num_actual_tokens", &mut record.num_actual_tokens),
                ("num_decodes", &mut record.num_decodes),
                ("num_decode_tokens", &mut record.num_decode_tokens),
                ("num_prefills", &mut record.num_prefills),
                ("num_prefill_tokens", &mut record.num_prefill_tokens),
            ]);
            if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                fields.extend([
                    ("kv_chunk_size", &mut plan.work.kv_chunk_size),
                    ("cta_tile_q", &mut plan.work.cta_tile_q),
                    ("page_size", &mut plan.page_size),
                ]);
            }
            if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
                fields.extend([
                    ("kv_chunk_size", &mut plan.work.kv_chunk_size),
                    ("cta_tile_q", &mut plan.work.cta_tile_q),
                    ("num_qo_heads", &mut plan.num_qo_heads),
                ]);
            }
        }
        _ => {}
    }
    let at = random.between(0, fields.len() as i64 - 1) as usize;
    let (field, value) = fields.swap_remove(at);
    change(value, random);
    field
}

/// What a kernel does with the record: enough to tell an inert change from a harmful one.
fn check_meaning(batch: &Batch, metadata: &Metadata) -> Result<(), String> {
    let cam = &batch.step.cam;
    let longest_query = batch
        .step
        .cam
        .query_start_loc_cpu
        .windows(2)
        .map(|w| w[1] - w[0])
        .max()
        .unwrap_or(0);
    match metadata {
        Metadata::FlashAttn(record) => {
            let rows = cam.num_reqs as usize;
            let schedule = &record.schedule;
            ensure(record.num_actual_tokens == cam.num_actual_tokens, "tokens")?;
            ensure(
                record.max_query_len as i64 >= longest_query as i64,
                "unwritten queries",
            )?;
            ensure(
                record.max_query_len <= cam.max_query_len.max(longest_query as u32),
                "launch",
            )?;
            let longest = batch
                .step
                .tensors
                .seq_lens
                .iter()
                .copied()
                .max()
                .unwrap_or(0);
            ensure(record.max_seq_len as i64 >= longest as i64, "unread keys")?;
            ensure(
                record.max_seq_len <= batch.config.scheduler.max_model_len,
                "launch",
            )?;
            ensure(
                (1..=batch.config.max_num_splits).contains(&schedule.max_num_splits),
                "scratch",
            )?;
            ensure(
                schedule.num_splits.is_empty() || schedule.num_splits.len() == rows,
                "rows",
            )?;
            let within =
                |&splits: &i32| splits >= 1 && splits as i64 <= schedule.max_num_splits as i64;
            ensure(schedule.num_splits.iter().all(within), "splits")?;
            if let TileOrder::Rows(order) = &schedule.tile_order {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                ensure(
                    sorted == (0..rows as i32).collect::<Vec<_>>(),
                    "permutation",
                )?;
            }
            Ok(())
        }
        Metadata::Flashinfer(record) => {
            ensure(record.num_actual_tokens == cam.num_actual_tokens, "tokens")?;
            ensure(
                record.num_decodes.checked_add(record.num_prefills) == Some(cam.num_reqs),
                "rows",
            )?;
            let sum = record
                .num_decode_tokens
                .checked_add(record.num_prefill_tokens);
            ensure(sum == Some(cam.num_actual_tokens), "tokens")?;
            let decodes = record.num_decodes as usize;
            if record.num_prefills > 0 {
                ensure(
                    cam.query_start_loc_cpu[decodes] as u32 == record.num_decode_tokens,
                    "part",
                )?;
            }
            ensure(record.decode.is_some() == (decodes > 0), "decode")?;
            ensure(
                record.prefill.is_some() == (record.num_prefills > 0),
                "prefill",
            )?;
            if let Some(Decode::Wrapper(plan)) = &record.decode {
                attends(batch, plan, 0, decodes, true)?;
            }
            if let Some(Prefill::Wrapper(plan)) = &record.prefill {
                attends(batch, plan, decodes, cam.num_reqs as usize, false)?;
            }
            Ok(())
        }
        _ => Err("no meaning".to_owned()),
    }
}

fn ensure(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Runs the work list symbolically: every needed key of every tile once, partial results in places of their own.
fn attends(
    batch: &Batch,
    plan: &Plan,
    start: usize,
    end: usize,
    decode: bool,
) -> Result<(), String> {
    let cam = &batch.step.cam;
    let (page, chunk, tile) = (
        plan.page_size as i64,
        plan.work.kv_chunk_size as i64,
        plan.work.cta_tile_q as i64,
    );
    let parallel = &batch.config.parallel;
    let heads = batch.config.attention.num_heads * if decode { parallel.dcp_world_size } else { 1 };
    ensure(plan.num_qo_heads == heads, "heads")?;
    ensure(
        page == i64::from(batch.config.kv_cache_spec.block_size),
        "page",
    )?;
    ensure(chunk > 0 && chunk % page == 0 && tile > 0, "chunk")?;
    let rows = end - start;
    ensure(
        plan.seq_lens.len() == rows && plan.paged_kv_last_page_len.len() == rows,
        "rows",
    )?;
    ensure(
        plan.paged_kv_indptr.len() == rows + 1 && plan.paged_kv_indptr[0] == 0,
        "pages",
    )?;
    let mut wanted = BTreeMap::new();
    let mut tiles = 0usize;
    let group = i64::from(plan.num_qo_heads / plan.num_kv_heads);
    for row in 0..rows {
        let query = i64::from(
            cam.query_start_loc_cpu[start + row + 1] - cam.query_start_loc_cpu[start + row],
        );
        let mut len = i64::from(cam.seq_lens_cpu_upper_bound[start + row]);
        if parallel.dcp_world_size > 1 {
            let mut local = Vec::new();
            let own = if decode { len } else { len - query };
            timetable_attention::types::batch::dcp_local_seq_lens_into(
                &[own as i32],
                parallel.dcp_world_size,
                parallel.dcp_rank,
                parallel.cp_kv_cache_interleave_size,
                &mut local,
            );
            len = i64::from(local[0]);
        }
        ensure(i64::from(plan.seq_lens[row]) == len, "length")?;
        let pages = i64::from(plan.paged_kv_indptr[row + 1]) - i64::from(plan.paged_kv_indptr[row]);
        ensure(pages == (len + page - 1) / page, "pages")?;
        let last = if len == 0 {
            0
        } else {
            len - (pages - 1) * page
        };
        ensure(
            i64::from(plan.paged_kv_last_page_len[row]) == last,
            "last page",
        )?;
        for index in 0..(query * group + tile - 1) / tile {
            let last_token = (((index + 1) * tile - 1) / group).min(query - 1);
            let first_token = index * tile / group;
            let sharded = parallel.dcp_world_size > 1;
            let high = if plan.causal && !sharded {
                len - query + last_token + 1
            } else {
                len
            };
            let slack = i64::from(batch.config.scheduler.num_speculative_tokens);
            let low = match plan.window_left {
                left if left >= 0 && !sharded => {
                    len - query + first_token - i64::from(left) - slack
                }
                _ => 0,
            };
            wanted.insert(
                (row as i64, index),
                (low.max(0), high, tiles, (len + chunk - 1) / chunk),
            );
            tiles += 1;
        }
    }
    let work = &plan.work;
    let items = work.request_indices.len();
    ensure(
        work.qo_tile_indices.len() == items && work.kv_tile_indices.len() == items,
        "columns",
    )?;
    let rises = |sums: &[i32]| {
        sums.first() == Some(&0)
            && sums.last().copied().map(i64::from) == Some(items as i64)
            && sums.windows(2).all(|w| w[0] <= w[1])
    };
    ensure(
        rises(&work.worker_indptr) && work.worker_indptr.len() > 1,
        "workers",
    )?;
    let device = &batch.config.device;
    let most = (device.num_workers * device.ctas_per_worker) as usize;
    ensure(work.worker_indptr.len() - 1 <= most, "worker count")?;
    ensure(
        rises(&work.merge_indptr) && work.merge_indptr.len() == tiles + 1,
        "merges",
    )?;
    let mut covered: BTreeMap<(i64, i64), Vec<i64>> = BTreeMap::new();
    for item in 0..items {
        let at = (
            i64::from(work.request_indices[item]),
            i64::from(work.qo_tile_indices[item]),
        );
        ensure(wanted.contains_key(&at), "tile")?;
        covered
            .entry(at)
            .or_default()
            .push(i64::from(work.kv_tile_indices[item]));
    }
    for (at, &(low, high, tile, chunks)) in &wanted {
        let mut found = covered.remove(at).unwrap_or_default();
        found.sort_unstable();
        let places = i64::from(work.merge_indptr[tile + 1] - work.merge_indptr[tile]);
        ensure(found.len() as i64 == places, "places")?;
        ensure(places <= i64::from(batch.config.max_num_splits), "splits")?;
        ensure(places <= 1 || work.split_kv, "merge")?;
        ensure(
            found.windows(2).all(|w| w[1] == w[0] + 1),
            "each chunk once",
        )?;
        ensure(
            found.iter().all(|&part| part >= 0 && part < chunks.max(1)),
            "chunk exists",
        )?;
        for key in [low, high - 1] {
            if low < high {
                ensure(found.contains(&(key / chunk)), "key is attended to")?;
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn clever_metadata_passes(seed: u64) {
        let batch = Batch::random(seed);
        let mut random = Random(!seed);
        let made = [clever::flash_attn(&batch, &mut random), clever::flashinfer(&batch, &mut random)];
        for metadata in &made {
            let found = batch.with(Grant::Exact, |ctx| Verifier::new().verify(metadata, ctx));
            prop_assert_eq!(found, Ok(()), "{:?}", metadata);
            prop_assert_eq!(check_meaning(&batch, metadata), Ok(()));
        }
    }

    #[test]
    fn every_corruption_is_refused_or_inert(seed: u64) {
        let batch = Batch::random(seed);
        let mut random = Random(!seed);
        let mut verifier = Verifier::new();
        let made = [clever::flash_attn(&batch, &mut random), clever::flashinfer(&batch, &mut random)];
        for good in &made {
            for kind in KINDS {
                let mut metadata = good.clone();
                let Some(field) = corrupt(&mut metadata, kind, &mut random) else {
                    continue;
                };
                let verdict = batch.with(Grant::Exact, |ctx| verifier.verify(&metadata, ctx));
                if verdict.is_ok() {
                    let meaning = check_meaning(&batch, &metadata);
                    prop_assert_eq!(meaning, Ok(()), "{:?} of {} passed: {:?}", kind, field, metadata);
                }
            }
        }
    }
}

/// Corruptions must mostly be refused, or the test above would prove nothing: how many, over a fixed set of batches.
#[test]
fn corruptions_of_every_kind_are_refused() {
    let mut refused: BTreeMap<Kind, (u32, u32)> = BTreeMap::new();
    for seed in 0..200 {
        let batch = Batch::random(seed);
        let mut random = Random(!seed);
        let made = [
            clever::flash_attn(&batch, &mut random),
            clever::flashinfer(&batch, &mut random),
        ];
        for good in &made {
            for kind in KINDS {
                let mut metadata = good.clone();
                if corrupt(&mut metadata, kind, &mut random).is_some() && metadata != *good {
                    let verdict =
                        batch.with(Grant::Exact, |ctx| Verifier::new().verify(&metadata, ctx));
                    let counts = refused.entry(kind).or_default();
                    counts.0 += u32::from(verdict.is_err());
                    counts.1 += 1;
                }
            }
        }
    }
    for kind in KINDS {
        let (bad, all) = refused[&kind];
        println!("{kind:?}: {bad} of {all} refused");
        assert!(bad > 0, "{kind:?}: none of {all} refused");
    }
}

//! Good records of the MLA backends. What passes is run (`latent.rs`) and read (`reading.rs`).

use timetable_types::{
    BuilderConfig, Causal, Family, Input, KvCacheSpecKind, LaunchPromise, Matrix, Metadata, Tensor,
    TensorSlice,
    batch::ContextWorkspace,
    flash_mla::{DecodeSchedule, Metadata as Record, MlaSchedulerMetadataCall, TileSchedule},
};

use super::{Base, MIXED, PADDED, base, no_edit, promise};
use crate::case::{Case, Random, config};

pub fn bases() -> Vec<Base> {
    const FAMILY: Family = Family::FlashMla;
    let edited = |edit: fn(&Case, &mut Record)| {
        move |case: &Case, metadata: &mut Metadata| match metadata {
            Metadata::FlashMla(record) => edit(case, record),
            _ => panic!("another family"),
        }
    };
    let case = |config: BuilderConfig, rows: &[(usize, usize)], padding| {
        Case::new(mla(config), Causal::All(true), rows, padding, no_edit)
    };
    let prefills = [(5, 45), (3, 3), (2, 35), (1, 21)];
    let mut bases = vec![
        base(
            "mixed, tiles",
            FAMILY,
            case(config(), &MIXED, PADDED),
            edited(|_, record| {
                // Three pages and two.
                tiles(
                    record,
                    &[
                        [0, 0, 0, 2, 0],
                        [0, 2, 1, 1, 1],
                        [1, 1, 1, 2, 1],
                        [2, 0, 2, 0, 0],
                    ],
                    vec![0, 2, 4],
                    2,
                );
            }),
        ),
        base(
            "mixed, a scheduler call",
            FAMILY,
            case(config(), &MIXED, (0, 0)),
            edited(scheduler_call),
        ),
        base(
            "chunks",
            FAMILY,
            case(config(), &prefills, PADDED),
            edited(|case, record| chunks(case, record, 32)),
        ),
        base(
            "two ranks",
            FAMILY,
            case(super::sharded(), &MIXED, PADDED),
            edited(|case, record| chunks(case, record, 64)),
        ),
        base(
            "two ranks, chunks",
            FAMILY,
            case(super::sharded(), &prefills, (0, 0)),
            edited(|case, record| chunks(case, record, 64)),
        ),
    ];
    let mut captured = base(
        "captured",
        FAMILY,
        case(config(), &[(1, 40), (1, 70), (1, 3), (1, 33)], (2, 2)),
        edited(scheduler_call),
    );
    captured.case.promise = Some(LaunchPromise {
        max_num_splits: 3,
        ..promise(3, 0, 1, Some(1))
    });
    bases.push(captured);
    bases
}

/// The latent's rank and the rotary part are the head's 32 elements.
pub fn mla(mut config: BuilderConfig) -> BuilderConfig {
    config.kv_cache_spec.kind = KvCacheSpecKind::MlaAttention;
    config.kv_cache_spec.num_kv_heads = 1;
    config.attention.kv_lora_rank = 24;
    config.attention.qk_rope_head_dim = 8;
    config
}

/// Chunks of another workspace, and another schedule.
pub fn random(case: &Case, record: &mut Record, random: &mut Random) {
    chunks(case, record, random.pick(&[1, 32, 100, 4_000]));
    if record.decode.is_none() {
        return;
    }
    match random.below(3) {
        0 => {}
        1 => scheduler_call(case, record),
        _ => random_tiles(case, record, random),
    }
}

/// Pages dealt out one part after the other, in random portions.
fn random_tiles(case: &Case, record: &mut Record, random: &mut Random) {
    let size = case.config.kv_cache_spec.block_size as i32;
    let lens = &case.step.tensors.seq_lens[..record.num_decodes as usize];
    let (mut parts, mut splits) = (Vec::new(), vec![0]);
    let rows = lens.len();
    // A padded row has no keys, and is passed over.
    let next = |row: usize| (row..rows).find(|&row| lens[row] > 0).unwrap_or(rows);
    let mut part = [next(0) as i32, 0, 0, 0, 0];
    for (row, len) in lens.iter().enumerate() {
        let pages = (len + size - 1) / size;
        let (mut page, mut split) = (0, 0);
        while page < pages {
            page += 1 + random.below((pages - page) as usize) as i32;
            (part[2], part[3]) = (row as i32, page);
            // A part ends within a request, or after some of them.
            let is_done = page == pages;
            split += 1;
            if !is_done || next(row + 1) == rows || random.chance(2) {
                parts.push(part);
                part = match is_done {
                    true => [next(row + 1) as i32, 0, 0, 0, 0],
                    false => [row as i32, page, 0, 0, split],
                };
            }
        }
        splits.push(splits[row] + split);
    }
    if parts.is_empty() {
        parts.push([rows as i32, 0, rows as i32, 0, 0]);
    }
    let most = splits.windows(2).map(|pair| pair[1] - pair[0]).max();
    tiles(record, &parts, splits, most.unwrap_or(0) as u32);
}

fn chunks(case: &Case, record: &mut Record, rows: u32) {
    let Some(prefill) = &mut record.prefill else {
        return;
    };
    let first = record.num_decodes as usize;
    let starts = &case.step.tensors.query_start_loc[first..];
    let rebased: Vec<i32> = starts.iter().map(|start| start - starts[0]).collect();
    let lens = case.step.tensors.seq_lens[first..].iter();
    let contexts = lens.zip(rebased.windows(2));
    let contexts = contexts
        .map(|(len, pair)| len - (pair[1] - pair[0]))
        .collect();
    prefill.chunked_context = ContextWorkspace::new(&case.config, rows)
        .expect("a workspace")
        .chunked_context(contexts, &rebased)
        .expect("a plan");
}

fn tiles(record: &mut Record, parts: &[[i32; 5]], splits: Vec<i32>, most: u32) {
    let decode = record.decode.as_mut().expect("decodes");
    decode.max_num_splits = most;
    decode.schedule = DecodeSchedule::Tiles(TileSchedule {
        tile_scheduler_metadata: Tensor::Matrix(Matrix {
            rows: parts.len() as u32,
            columns: 8,
            values: parts
                .iter()
                .flat_map(|part| part.iter().copied().chain([0; 3]))
                .collect(),
        }),
        num_splits: Tensor::Values(splits),
    });
}

fn scheduler_call(case: &Case, record: &mut Record) {
    let (rows, all) = (record.num_decodes, case.step.cam.num_reqs);
    let decode = record.decode.as_mut().expect("decodes");
    let starts = match rows == all {
        true => Tensor::Input(Input::QueryStartLoc),
        false => Tensor::Slice(TensorSlice {
            source: Input::QueryStartLoc,
            start: 0,
            end: rows + 1,
        }),
    };
    decode.query_start_loc = Some(starts.clone());
    let splits = case.config.max_num_splits.min(3);
    decode.max_num_splits = splits;
    decode.schedule = DecodeSchedule::FlashAttn(MlaSchedulerMetadataCall {
        batch_size: rows,
        max_seqlen_q: decode.max_query_len,
        max_seqlen_k: decode.max_seq_len,
        num_heads_q: case.config.attention.num_heads * case.config.parallel.dcp_world_size,
        num_heads_kv: 1,
        headdim: 8,
        headdim_v: 24,
        cache_seqlens: decode.seq_lens.clone(),
        qkv_dtype: case.config.attention.model_dtype,
        cu_seqlens_q: starts,
        page_size: case.config.kv_cache_spec.block_size,
        causal: true,
        num_splits: splits,
        scheduler_metadata_len: 17,
    });
}

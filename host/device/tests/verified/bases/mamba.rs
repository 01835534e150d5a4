//! The Mamba family's good records: each type, with and without speculation. What `bases` says of them.

use timetable_attention::plain_builder;
use timetable_types::{
    Causal, Extra, ExtraValue, Family, Input, KvCacheSpecKind, MambaCacheMode, MambaSpec,
    MambaType, Metadata, Tensor, mamba,
};

use crate::{
    bases::Base,
    case::{Case, Random, config},
    recurrent::Recurrent,
};

/// A row: query tokens, keys.
type Row = (usize, usize);

const MIXED: [Row; 4] = [(1, 40), (1, 17), (20, 52), (9, 9)];
const VERIFIED: [Row; 4] = [(4, 40), (2, 17), (20, 52), (9, 9)];
const APART: [Row; 5] = [(4, 40), (20, 52), (3, 17), (9, 9), (4, 21)];
const DECODES: [Row; 3] = [(1, 40), (1, 17), (1, 3)];
const ALONE: [Row; 3] = [(4, 40), (4, 17), (4, 30)];

/// Rows of `mamba_type`; those of up to 1 + `drafts` tokens verify, if drafts there are.
fn case(
    mamba_type: MambaType,
    (drafts, mode, chunk_size): (u32, MambaCacheMode, u32),
    rows: &[Row],
    padding: (usize, usize),
) -> Case {
    let mut case = Case::new(
        config(),
        Causal::All(true),
        rows,
        padding,
        |config, step| {
            config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
            config.kv_cache_spec.mamba = Some(MambaSpec {
                mamba_type,
                cache_mode: mode,
                num_speculative_blocks: drafts,
                chunk_size,
            });
            config.scheduler.num_speculative_tokens = drafts;
            // Blocks of each row's own, with room for the states of drafts; rows of padding point to the null block.
            let width = step.tensors.block_table_width + drafts as usize;
            let own = 1..=(rows.len() * width) as i32;
            let padding = (step.cam.num_reqs as usize - rows.len()) * width;
            let table = own.chain(std::iter::repeat_n(0, padding)).collect();
            step.tensors.block_table = table;
            step.tensors.block_table_width = width;
            step.cam.block_table_width = width as u32;
            let verifies = |&(query, keys): &Row| keys > query && query <= 1 + drafts as usize;
            step.cam.is_prefilling = rows.iter().map(|row| u8::from(!verifies(row))).collect();
            if drafts > 0 {
                let all = step.cam.num_reqs as usize;
                let count = |row: &Row| if verifies(row) { row.0 as i32 - 1 } else { -1 };
                let mut of_row: Vec<i32> = rows.iter().map(count).collect();
                of_row.resize(all, -1);
                step.cam.extras = vec![
                    Extra {
                        name: "num_accepted_tokens".to_owned(),
                        value: ExtraValue::Device(all as u32),
                    },
                    Extra {
                        name: "num_decode_draft_tokens_cpu".to_owned(),
                        value: ExtraValue::Host(of_row),
                    },
                ];
            }
        },
    );
    case.num_blocks = 1 + case.step.tensors.block_table.len() as u32;
    if drafts > 0 {
        let all = case.step.cam.num_reqs as i32;
        let accepted = (0..all).map(|row| 1 + (row * 2 + 1) % (1 + drafts as i32));
        case.extras = vec![("num_accepted_tokens", accepted.collect())];
    }
    case.recurrent = Some(Recurrent::new(&case, rows));
    case
}

fn base(name: &'static str, case: Case, edit: impl FnOnce(&mut mamba::Metadata)) -> Base {
    let mut builder = plain_builder(Family::Mamba, &case.config).expect("a plain builder");
    let built = builder.build(&case.step.cam, false);
    let Metadata::Mamba(mut metadata) = built.expect("plain metadata") else {
        panic!("another family");
    };
    edit(&mut metadata);
    Base {
        name,
        case,
        metadata: Metadata::Mamba(metadata),
    }
}

pub fn bases() -> Vec<Base> {
    use MambaCacheMode::{Align, None as Each};
    use MambaType::{Gdn, Linear, Mamba1, Mamba2, ShortConv};
    const PADDED: (usize, usize) = (1, 3);
    let plain = |_: &mut mamba::Metadata| {};
    vec![
        base(
            "mamba1, mixed",
            case(Mamba1, (0, Each, 0), &MIXED, PADDED),
            plain,
        ),
        base(
            "mamba1, decodes",
            case(Mamba1, (0, Align, 0), &DECODES, (1, 1)),
            plain,
        ),
        base(
            "short conv, verified",
            case(ShortConv, (3, Each, 0), &VERIFIED, PADDED),
            plain,
        ),
        base(
            "mamba2, mixed",
            case(Mamba2, (0, Align, 8), &MIXED, PADDED),
            |metadata| {
                // Chunks may be shorter than they must.
                if let mamba::Metadata::Mamba2(metadata) = metadata {
                    metadata.cu_chunk_seqlen_p.insert(1, 2);
                    metadata.seq_idx_p.insert(0, 0);
                    let last = metadata.last_chunk_indices_p.iter_mut();
                    last.for_each(|chunk| *chunk += 1);
                }
            },
        ),
        base(
            "mamba2, verified",
            case(Mamba2, (3, Align, 16), &VERIFIED, PADDED),
            plain,
        ),
        base(
            "mamba2, verified alone",
            case(Mamba2, (3, Each, 16), &ALONE, (0, 0)),
            |metadata| {
                if let mamba::Metadata::Mamba2(metadata) = metadata
                    && let Some(accepted) = &mut metadata.base.num_accepted_tokens
                {
                    accepted.tensor = Tensor::Extra("num_accepted_tokens".to_owned());
                }
            },
        ),
        base("linear", case(Linear, (0, Each, 0), &MIXED, PADDED), plain),
        base(
            "gdn, mixed",
            case(Gdn, (0, Each, 8), &MIXED, PADDED),
            |metadata| {
                if let mamba::Metadata::Gdn(metadata) = metadata {
                    metadata.non_spec_query_start_loc = metadata
                        .non_spec_query_start_loc
                        .take()
                        .map(|starts| timetable_types::PaddedTensor {
                            tensor: Tensor::Input(Input::QueryStartLoc),
                            ..starts
                        });
                }
            },
        ),
        base(
            "gdn, decodes",
            case(Gdn, (0, Align, 8), &DECODES, (1, 1)),
            plain,
        ),
        base(
            "gdn, verified apart",
            case(Gdn, (3, Each, 8), &APART, PADDED),
            plain,
        ),
        base(
            "gdn, verified alone",
            case(Gdn, (3, Align, 8), &ALONE, (1, 2)),
            |metadata| {
                if let mamba::Metadata::Gdn(metadata) = metadata {
                    metadata.uniform_spec_sequence_length = Some(4);
                    // In the buffers of a captured graph.
                    for padded in [
                        &mut metadata.spec_query_start_loc,
                        &mut metadata.spec_state_indices_tensor,
                        &mut metadata.num_accepted_tokens,
                    ]
                    .into_iter()
                    .flatten()
                    {
                        padded.rows += 1;
                    }
                }
            },
        ),
    ]
}

/// A random step of a random type, and plain metadata for it.
pub fn random_base(random: &mut Random) -> Base {
    let mamba_type = random.pick(MambaType::ALL);
    let takes_drafts = !matches!(mamba_type, MambaType::Mamba1 | MambaType::Linear);
    let drafts = match takes_drafts && random.chance(2) {
        true => random.pick(&[1, 3]),
        false => 0,
    };
    let mode = random.pick(MambaCacheMode::ALL);
    let mut rows = Vec::new();
    for _ in 0..random.below(5) {
        let query = 1 + random.below(1 + drafts as usize);
        rows.push((query, query + 1 + random.below(60)));
    }
    for _ in 0..random.below(3) + usize::from(rows.is_empty()) {
        let query = 5 + random.below(40);
        rows.push((query, query + random.pick(&[0, 0, 5, 16, 60])));
    }
    let chunk = random.pick(&[1, 8, 16, 64]);
    let padding = random.pick(&[(0, 0), (0, 0), (1, 1), (2, 3)]);
    base(
        "random",
        case(mamba_type, (drafts, mode, chunk), &rows, padding),
        |_| {},
    )
}

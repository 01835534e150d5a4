//! The record of any batch: its counts and chunks cover every token once, and padding behind a batch changes nothing of it. What
//! the field's builders made of recorded batches: `tests/tests/builders_conformance`.

use mamba_builder::FieldRecord;
use proptest::prelude::*;
use timetable_guest::{
    Builder,
    testing::{batch, config},
    types::{
        BuilderConfig, CommonAttentionMetadata, Extra, ExtraValue, KvCacheSpecKind, MambaCacheMode,
        MambaSpec, MambaType, Tensor,
        mamba::{GdnMetadata, Mamba2Metadata, Metadata},
    },
};

fn of_type(mamba_type: MambaType, drafts: u32) -> BuilderConfig {
    let mut config = config();
    config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
    config.kv_cache_spec.mamba = Some(MambaSpec {
        mamba_type,
        cache_mode: MambaCacheMode::None,
        num_speculative_blocks: drafts,
        chunk_size: 64,
    });
    config.scheduler.num_speculative_tokens = drafts;
    config
}

fn built(config: &BuilderConfig, common: &CommonAttentionMetadata) -> Metadata {
    let mut builder = FieldRecord::create(config.clone()).expect("it serves the configuration");
    builder.build(common, false).expect("it builds")
}

fn mamba2(common: &CommonAttentionMetadata) -> Mamba2Metadata {
    match built(&of_type(MambaType::Mamba2, 0), common) {
        Metadata::Mamba2(metadata) => metadata,
        other => panic!("another type's: {other:?}"),
    }
}

fn gdn(common: &CommonAttentionMetadata, drafts: u32) -> GdnMetadata {
    match built(&of_type(MambaType::Gdn, drafts), common) {
        Metadata::Gdn(metadata) => metadata,
        other => panic!("another type's: {other:?}"),
    }
}

/// `rows` rows and `tokens` tokens of padding behind the batch.
fn pad(mut common: CommonAttentionMetadata, rows: usize, tokens: u32) -> CommonAttentionMetadata {
    let end = *common.query_start_loc_cpu.last().expect("a start");
    common.num_reqs += rows as u32;
    common.num_actual_tokens += tokens;
    common
        .query_start_loc_cpu
        .extend(std::iter::repeat_n(end, rows));
    common
        .seq_lens_cpu_upper_bound
        .extend(std::iter::repeat_n(0, rows));
    common
}

proptest! {
    #[test]
    fn chunks_of_any_prefills_cover_each_token_once_and_end_on_the_grid(
        decodes in 0..9_usize,
        prefills in prop::collection::vec((2..700_u32, 0..900_u32), 1..6),
    ) {
        let mut rows = vec![(1, 40); decodes];
        rows.extend(prefills.iter().map(|&(tokens, context)| (tokens, tokens + context)));
        let metadata = mamba2(&batch(&rows));
        let base = &metadata.base;
        prop_assert_eq!((base.num_decodes, base.num_prefills), (decodes as u32, prefills.len() as u32));
        let ends = &metadata.cu_chunk_seqlen_p;
        let (mut done, mut chunk) = (0, 0);
        for (row, &(tokens, context)) in prefills.iter().enumerate() {
            let end = done + tokens as i32;
            let first = done;
            while done < end {
                prop_assert_eq!(metadata.seq_idx_p[chunk], row as i32);
                let until = ends[chunk + 1];
                prop_assert!(done < until && until <= end && until - done <= 64);
                // Chunks end where the sequence's do.
                prop_assert!(until == end || (until - first + context as i32) % 64 == 0);
                (done, chunk) = (until, chunk + 1);
            }
            prop_assert_eq!(metadata.last_chunk_indices_p[row], chunk as i32 - 1);
        }
        prop_assert_eq!(metadata.seq_idx_p.len(), chunk);
        prop_assert_eq!(metadata.prep_initial_states, prefills.iter().any(|&(_, context)| context > 0));
    }

    #[test]
    fn padding_behind_a_batch_adds_no_chunk(
        prefills in prop::collection::vec((2..300_u32, 0..300_u32), 1..5),
        rows in 1..5_usize,
        tokens in 0..20_u32,
    ) {
        let batch: CommonAttentionMetadata = batch(
            &prefills.iter().map(|&(tokens, context)| (tokens, tokens + context)).collect::<Vec<_>>(),
        );
        let padded = pad(batch.clone(), rows, tokens);
        let (plain, padded_mamba2) = (mamba2(&batch), mamba2(&padded));
        prop_assert_eq!(&plain.cu_chunk_seqlen_p, &padded_mamba2.cu_chunk_seqlen_p);
        prop_assert_eq!(&plain.seq_idx_p, &padded_mamba2.seq_idx_p);
        let (plain, padded) = (gdn(&batch, 0), gdn(&padded, 0));
        prop_assert_eq!(&plain.chunk_indices, &padded.chunk_indices);
        prop_assert_eq!(plain.num_prefills, padded.num_prefills);
        prop_assert_eq!(plain.num_prefill_tokens, padded.num_prefill_tokens);
    }

    #[test]
    fn every_row_of_gdn_verifies_or_prefills_where_any_verifies(
        drafts in prop::collection::vec(prop::option::of(0..=3_i32), 1..9),
    ) {
        // A row without drafts is a prefill of 20 tokens.
        let rows: Vec<(u32, u32)> = drafts
            .iter()
            .map(|drafts| drafts.map_or((20, 32), |drafts| (drafts as u32 + 1, 50)))
            .collect();
        let mut common = batch(&rows);
        common.extras = vec![
            Extra {
                name: "num_accepted_tokens".to_owned(),
                value: ExtraValue::Device(rows.len() as u32),
            },
            Extra {
                name: "num_decode_draft_tokens_cpu".to_owned(),
                value: ExtraValue::Host(drafts.iter().map(|drafts| drafts.unwrap_or(-1)).collect()),
            },
        ];
        let metadata = gdn(&common, 3);
        let verified = drafts.iter().flatten().count();
        prop_assert_eq!(metadata.num_spec_decodes, verified as u32);
        if verified == 0 {
            prop_assert_eq!(metadata.num_prefills, rows.len() as u32);
            return Ok(());
        }
        prop_assert_eq!(metadata.num_decodes, 0);
        prop_assert_eq!(metadata.num_prefills as usize, rows.len() - verified);
        let tokens = metadata.num_spec_decode_tokens + metadata.num_prefill_tokens;
        prop_assert_eq!(tokens, common.num_actual_tokens);
        let masks = metadata.spec_sequence_masks.map(|masks| masks.tensor);
        let named: Vec<u32> = (0..rows.len() as u32).filter(|&row| drafts[row as usize].is_some()).collect();
        prop_assert_eq!(masks, Some(Tensor::RowMask(named)));
    }
}

#[test]
fn what_cannot_be_served_is_declined_with_its_remedy() {
    for (config, text) in [
        (config(), "kv_cache_spec.mamba is missing"),
        (
            of_type(MambaType::Mamba1, 3),
            "Mamba1 layers keep no state for each draft; serve the model without speculation",
        ),
        (
            {
                let mut config = of_type(MambaType::Gdn, 0);
                config
                    .kv_cache_spec
                    .mamba
                    .as_mut()
                    .expect("given")
                    .chunk_size = 0;
                config
            },
            "kv_cache_spec.mamba.chunk_size is 0; it must be from 1 to 2^30",
        ),
    ] {
        let error = FieldRecord::create(config).err().expect("declined");
        assert!(error.message.contains(text), "{}", error.message);
    }
    let mut builder = FieldRecord::create(of_type(MambaType::Gdn, 3)).expect("it serves");
    let mut common = batch(&[(4, 40), (4, 30)]);
    common.extras = vec![Extra {
        name: "num_decode_draft_tokens_cpu".to_owned(),
        value: ExtraValue::Host(vec![3, 3]),
    }];
    let error = builder.build(&common, false).expect_err("declined");
    assert!(
        error
            .message
            .contains("2 rows verify drafts, and num_accepted_tokens is not given"),
        "{}",
        error.message
    );
    common.query_start_loc_cpu.pop();
    let error = builder.build(&common, false).expect_err("declined");
    assert!(
        error
            .message
            .contains("query_start_loc_cpu has 2 entries for 2 requests; it must have 3"),
        "{}",
        error.message
    );
}

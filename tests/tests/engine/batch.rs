//! The persistent batch: tables and slots agree, whatever was in the rows before.

use proptest::prelude::*;
use timetable_attention::{
    Grant, PAD_SLOT_ID, Refusal, VerifyContext,
    batch::{GroupStep, PaddingValues, StepTensors, pad_step},
    verify_step,
};
use timetable_engine::{
    AttentionPlan, EngineConfig,
    batch::{BatchRow, BatchShape, InputBatch, feed_reference},
};
use timetable_tests::drive;

fn shape(block_size: usize, kernel_block_size: usize) -> BatchShape {
    BatchShape {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_model_len: 1024,
        block_size,
        kernel_block_size,
    }
}

fn row<'a>(num_computed: usize, tokens: &'a [u32], blocks: &'a [u32]) -> BatchRow<'a> {
    BatchRow {
        req_idx: 0,
        state: 0,
        epoch: 1,
        num_computed,
        tokens,
        feed: None,
        drafts: &[],
        blocks,
        is_prefilling: false,
        wants_logits: true,
    }
}

/// What the verifier says of the batch's own tensors, with a cache of `num_blocks` blocks.
fn verified(batch: &InputBatch, max_model_len: usize, num_blocks: u32) -> Result<(), Refusal> {
    let engine = EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_model_len: Some(max_model_len),
        block_size: batch.kernel_block_size(),
        ..EngineConfig::default()
    };
    let model = drive::tiny_llama();
    let plan = AttentionPlan::new(&engine, model.config()).unwrap();
    let group = &plan.groups()[0];
    verify_step(&VerifyContext {
        config: &plan
            .builder_config(group, &engine, model.config(), batch.table_width())
            .unwrap(),
        common: batch.common(),
        inputs: &batch.inputs(),
        promise: None,
        grant: Grant::Exact,
        num_blocks,
    })
}

/// Field case 12.
#[test]
fn case_12_lengths_beyond_the_table_and_blocks_beyond_the_cache_are_refused() {
    let mut batch = InputBatch::new(BatchShape {
        max_model_len: 1024,
        ..shape(256, 256)
    })
    .unwrap();
    assert_eq!(batch.table_width(), 4);
    for (seq_len, num_blocks, accepted) in [(1024, 6, true), (1025, 6, false), (1024, 5, false)] {
        batch.begin();
        batch.push(&row(seq_len - 1, &[0], &[1, 2, 3, 5, 4]));
        let verdict = verified(&batch, 1024, num_blocks);
        assert_eq!(
            verdict.is_ok(),
            accepted,
            "{seq_len} tokens, {num_blocks} blocks: {verdict:?}"
        );
    }
}

/// Field case 6.
#[test]
fn case_6_a_token_beyond_its_row_of_blocks_has_no_slot() {
    let mut batch = InputBatch::new(shape(4, 4)).unwrap();
    batch.begin();
    batch.push(&row(6, &[0; 4], &[7, 3]));
    assert_eq!(
        batch.inputs().slot_mapping,
        [14, 15, PAD_SLOT_ID, PAD_SLOT_ID]
    );
    let refused = batch.check().unwrap_err();
    assert_eq!(
        (refused.row, refused.num_blocks, refused.position),
        (0, 2, 8)
    );
    batch.begin();
    batch.push(&row(3, &[0; 5], &[7, 3]));
    assert_eq!(batch.inputs().slot_mapping, [31, 12, 13, 14, 15]);
    assert_eq!(batch.check(), Ok(()));
    assert_eq!(verified(&batch, 1024, 100), Ok(()));
}

/// Field case 9.
#[test]
fn case_9_manager_blocks_are_split_for_the_kernels() {
    let mut batch = InputBatch::new(shape(256, 128)).unwrap();
    batch.begin();
    batch.push(&row(200, &[0], &[3]));
    assert_eq!(batch.inputs().slot_mapping, [968]);
    assert_eq!((968 / 128, 968 % 128), (7, 72));
    assert_eq!(batch.inputs().block_table.row(0)[..2], [6, 7]);
    batch.begin();
    batch.push(&BatchRow {
        epoch: 2,
        ..row(400, &[0], &[5, 2])
    });
    assert_eq!(batch.inputs().block_table.row(0)[..4], [10, 11, 4, 5]);
    let error = InputBatch::new(shape(200, 128)).err().unwrap();
    assert!(
        error.to_string().contains("200") && error.to_string().contains("128"),
        "{error}"
    );
}

/// A token that the host does not know yet is a reference after the known ones; it counts like any other.
#[test]
fn a_reference_stands_for_a_token_that_is_not_known() {
    let mut batch = InputBatch::new(shape(16, 16)).unwrap();
    batch.begin();
    batch.push(&BatchRow {
        feed: Some(feed_reference(3)),
        ..row(20, &[], &[4, 9])
    });
    batch.push(&BatchRow {
        epoch: 2,
        feed: Some(77),
        ..row(3, &[5, 6], &[2])
    });
    assert_eq!(batch.token_ids(), [-4, 5, 6, 77]);
    assert_eq!(batch.positions(), [20, 3, 4, 5]);
    assert_eq!(batch.inputs().slot_mapping, [148, 35, 36, 37]);
    assert_eq!(batch.logits_rows(), [0, 3]);
    assert_eq!((batch.num_actual_reqs(), batch.num_actual_tokens()), (2, 4));
    assert_eq!(verified(&batch, 1024, 10), Ok(()));
}

/// A batch looks for the graph that the rule book's words give it: decodes have one token each, and a prompt's last token over
/// existing context counts as one.
#[test]
fn a_batch_says_what_graph_it_needs() {
    let mut batch = InputBatch::new(shape(16, 16)).unwrap();
    let query = |batch: &mut InputBatch, rows: &[(usize, usize, bool)]| {
        batch.begin();
        for (index, &(num_computed, num_tokens, is_prefilling)) in rows.iter().enumerate() {
            batch.push(&BatchRow {
                epoch: 1 + index as u64,
                is_prefilling,
                ..row(num_computed, &vec![1; num_tokens], &[1, 2, 3, 4])
            });
        }
        let query = batch.query();
        assert_eq!(query.num_reqs as usize, rows.len());
        (
            query.num_tokens,
            query.uniform_token_count,
            query.max_query_len,
        )
    };
    let decodes = [(5, 1, false), (9, 1, false)];
    assert_eq!(query(&mut batch, &decodes), (2, Some(1), Some(1)));
    let last_of_a_prompt = [(5, 1, false), (9, 1, true)];
    assert_eq!(query(&mut batch, &last_of_a_prompt), (2, Some(1), Some(1)));
    let first_of_a_prompt = [(5, 1, false), (0, 1, true)];
    assert_eq!(query(&mut batch, &first_of_a_prompt), (2, None, None));
    let mixed = [(5, 1, false), (0, 7, true)];
    assert_eq!(query(&mut batch, &mixed), (8, None, None));
}

proptest! {
    /// Padding is the rule book's, and the changes of the table that were recorded, taken now and then, give the host's table.
    #[test]
    fn padding_is_the_rule_books_and_changes_are_recorded(
        steps in prop::collection::vec(
            (
                prop::collection::vec((0..6u64, 1..20usize, 0..60usize), 1..7),
                (0..3usize, 0..40usize),
                any::<bool>(),
            ),
            1..12,
        ),
    ) {
        let mut batch = InputBatch::new(shape(8, 4)).unwrap();
        let width = batch.table_width();
        let mut device = vec![0; 8 * width];
        let blocks = |epoch: u64, len: usize| -> Vec<u32> {
            (0..len.div_ceil(8) as u32).map(|index| 1 + epoch as u32 * 20 + index).collect()
        };
        for (rows, (more_rows, more_tokens), taken) in steps {
            batch.begin();
            let mut seen = std::collections::HashSet::new();
            let rows: Vec<_> = rows.into_iter().filter(|row| seen.insert(row.0)).collect();
            for &(epoch, num_tokens, num_computed) in &rows {
                let tokens = vec![3; num_tokens];
                batch.push(&BatchRow {
                    req_idx: epoch as u32,
                    state: 0,
                    epoch: epoch + 1,
                    ..row(num_computed, &tokens, &blocks(epoch, num_computed + num_tokens))
                });
            }
            let inputs = batch.inputs();
            let step = GroupStep {
                cam: batch.common().clone(),
                tensors: StepTensors {
                    query_start_loc: inputs.query_start_loc.to_vec(),
                    seq_lens: inputs.seq_lens.to_vec(),
                    block_table: inputs.block_table.data.to_vec(),
                    block_table_width: width,
                    slot_mapping: inputs.slot_mapping.to_vec(),
                    positions: inputs.positions.to_vec(),
                    ..StepTensors::default()
                },
            };
            let real = batch.num_actual_tokens();
            let (to_rows, to_tokens) = (rows.len() + more_rows.min(8 - rows.len()), real + more_tokens);
            batch.pad(to_tokens, None).unwrap();
            prop_assert_eq!(batch.common().num_reqs as usize, rows.len());
            prop_assert_eq!(batch.common().num_actual_tokens as usize, real);
            prop_assert_eq!(batch.inputs().slot_mapping.len(), to_tokens);
            prop_assert_eq!(verified(&batch, 1024, 1000), Ok(()));

            batch.pad(to_tokens, Some(to_rows)).unwrap();
            let padding = PaddingValues::default();
            let mut expected = pad_step(&step, to_tokens as u32, to_rows as u32, padding).unwrap();
            // The rule book says nothing of the running requests' indexes, but the verifier wants as many as rows.
            expected.cam.req_idx.resize(to_rows, 0);
            prop_assert_eq!(batch.common(), &expected.cam);
            let inputs = batch.inputs();
            prop_assert_eq!(inputs.query_start_loc, &expected.tensors.query_start_loc[..]);
            prop_assert_eq!(inputs.seq_lens, &expected.tensors.seq_lens[..]);
            prop_assert_eq!(inputs.block_table.data, &expected.tensors.block_table[..]);
            prop_assert_eq!(inputs.slot_mapping, &expected.tensors.slot_mapping[..]);
            prop_assert_eq!(inputs.positions, &expected.tensors.positions[..]);
            prop_assert!(batch.token_ids()[real..].iter().all(|&id| id == 0));
            prop_assert_eq!(batch.token_ids().len(), to_tokens);
            prop_assert_eq!(verified(&batch, 1024, 1000), Ok(()));
            prop_assert!(batch.pad(real.saturating_sub(1), Some(9)).is_err());
            if taken {
                for update in batch.table_updates() {
                    let start = update.row * width + update.first_column;
                    device[start..start + update.entries.len()].copy_from_slice(update.entries);
                }
                batch.clear_table_updates();
                prop_assert_eq!(batch.table_updates().count(), 0);
                let host = batch.inputs().block_table.data;
                prop_assert_eq!(&device[..host.len()], host);
            }
        }
    }

    /// However rows move between steps: a row shows its blocks, zeros after them; slots and positions follow from them.
    #[test]
    fn tables_and_slots_agree(
        ratio in 1..4usize,
        kernel in 1..9usize,
        steps in prop::collection::vec(
            prop::collection::vec((0..6u64, 1..40usize, 0..60usize), 0..8),
            1..12,
        ),
    ) {
        let block_size = ratio * kernel;
        let mut batch = InputBatch::new(shape(block_size, kernel)).unwrap();
        // One growing request per epoch: its blocks are a function of the epoch, so that growth only appends.
        let blocks = |epoch: u64, len: usize| -> Vec<u32> {
            (0..len.div_ceil(block_size) as u32).map(|index| 1 + epoch as u32 * 200 + index).collect()
        };
        for rows in steps {
            batch.begin();
            let mut seen = std::collections::HashSet::new();
            let rows: Vec<_> = rows.into_iter().filter(|row| seen.insert(row.0)).collect();
            for &(epoch, num_tokens, num_computed) in &rows {
                let tokens: Vec<u32> = (0..num_tokens as u32).collect();
                batch.push(&BatchRow {
                    epoch: epoch + 1,
                    ..row(num_computed, &tokens, &blocks(epoch, num_computed + num_tokens))
                });
            }
            let inputs = batch.inputs();
            let mut token = 0;
            for (index, &(epoch, num_tokens, num_computed)) in rows.iter().enumerate() {
                let seq_len = num_computed + num_tokens;
                let table = inputs.block_table.row(index);
                let held = blocks(epoch, seq_len);
                for (column, &entry) in table.iter().enumerate() {
                    let expected = held
                        .get(column / ratio)
                        .map_or(0, |&block| block as usize * ratio + column % ratio);
                    prop_assert_eq!(entry as usize, expected, "row {} column {}", index, column);
                }
                prop_assert_eq!(inputs.query_start_loc[index] as usize, token);
                prop_assert_eq!(inputs.seq_lens[index] as usize, seq_len);
                for position in num_computed..seq_len {
                    prop_assert_eq!(inputs.positions[token], position as i64);
                    let slot = table[position / kernel] as usize * kernel + position % kernel;
                    prop_assert_eq!(inputs.slot_mapping[token], slot as i64);
                    token += 1;
                }
                prop_assert_eq!(batch.logits_rows()[index], token - 1);
            }
            prop_assert_eq!(inputs.slot_mapping.len(), token);
            prop_assert_eq!(*inputs.query_start_loc.last().unwrap() as usize, token);
        }
    }
}

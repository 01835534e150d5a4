//! Properties that hold for every batch, 10,000 random ones each.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use timetable_attention::PAD_SLOT_ID;
use timetable_attention::batch::{
    self, BlockTables, ContextParallel, GatheredTable, GroupStep, GroupTableConfig, PaddingValues,
    ReorderRequest, SlotRule, StepTensors,
};
use timetable_attention::graphs::{CudagraphDispatcher, RuntimeMode};
use timetable_attention::types::CudagraphMode;
use timetable_attention::types::batch::{
    self as vectors, BatchRows, ContextBudget, ContextRows, DecodeRule, PAD,
};

fn cases() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(10_000)
    }
}

/// A live step: per row at least one query, and context before it.
fn steps(max_rows: usize, max_query: i32, max_context: i32) -> impl Strategy<Value = GroupStep> {
    prop::collection::vec((1..=max_query, 0..=max_context), 1..=max_rows).prop_map(|rows| {
        let width = 4;
        let mut query_start_loc = vec![0];
        for (query, _) in &rows {
            query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + query);
        }
        let tokens = query_start_loc[rows.len()];
        let seq_lens: Vec<i32> = rows
            .iter()
            .map(|(query, context)| query + context)
            .collect();
        let max_query_len = rows.iter().map(|row| row.0).max().unwrap_or(0) as u32;
        let max_seq_len = seq_lens.iter().copied().max().unwrap_or(0) as u32;
        let tensors = StepTensors {
            query_start_loc,
            block_table: (0..(rows.len() * width) as i32).collect(),
            block_table_width: width,
            slot_mapping: (100..100 + i64::from(tokens)).collect(),
            positions: (0..i64::from(tokens)).collect(),
            seq_lens: seq_lens.clone(),
            ..StepTensors::default()
        };
        GroupStep::new(tensors, seq_lens, tokens as u32, max_query_len, max_seq_len)
    })
}

/// The region of a row, as the reorder rule names them.
fn region(request: &ReorderRequest, threshold: u32) -> u32 {
    match (
        request.num_computed_tokens,
        request.num_scheduled_tokens <= threshold,
    ) {
        (0, _) => 3,
        (_, false) => 2,
        (computed, true) if computed < request.num_prompt_tokens => 1,
        _ => 0,
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn dcp_shares_sum_to_the_length(
        seq_lens in prop::collection::vec(0..=i32::MAX / 2, 0..20), ranks in 1u32..=9, interleave in 1u32..=129,
    ) {
        let all = vectors::dcp_local_seq_lens_all_ranks(&seq_lens, ranks, interleave);
        for (row, &len) in seq_lens.iter().enumerate() {
            let shares = &all[row * ranks as usize..(row + 1) * ranks as usize];
            prop_assert_eq!(shares.iter().map(|&share| i64::from(share)).sum::<i64>(), i64::from(len));
            prop_assert!(shares.windows(2).all(|w| w[0] >= w[1]), "earlier ranks hold no less: {:?}", shares);
            let bound = vectors::dcp_local_seq_len_upper_bound(len as u32, ranks, interleave);
            prop_assert!(shares.iter().all(|&share| share as u32 <= bound));
        }
    }

    #[test]
    fn slots_over_ranks_partition_the_positions(
        block_size in 1u32..=16, runs in 1u32..=4, ranks in 1u32..=4, len in 1i64..200,
    ) {
        // A block holds whole runs, as the field requires of interleave sizes.
        let (interleave, block_size) = (block_size, block_size * runs);
        let virtual_block = i64::from(block_size * ranks);
        // Blocks of a rank: a permutation, so that two of them never meet.
        let row: Vec<i32> = (0..=(len / virtual_block) as i32).rev().collect();
        let positions: Vec<i64> = (0..len).collect();
        let mut owned = vec![0; len as usize];
        let mut local = Vec::new();
        for rank in 0..ranks {
            let context_parallel = Some(ContextParallel { size: ranks, rank, interleave });
            let mut slots = vec![0; len as usize];
            let beyond = SlotRule { block_size, context_parallel }.slots_of_request(&row, &positions, &mut slots);
            prop_assert_eq!(beyond, 0);
            let held: Vec<i64> = slots.iter().copied().filter(|&slot| slot != PAD_SLOT_ID).collect();
            let distinct: BTreeSet<i64> = held.iter().copied().collect();
            prop_assert_eq!(distinct.len(), held.len(), "two positions in one slot");
            for (count, &slot) in owned.iter_mut().zip(&slots) {
                *count += usize::from(slot != PAD_SLOT_ID);
            }
            vectors::dcp_local_seq_lens_into(&[len as i32], ranks, rank, interleave, &mut local);
            prop_assert_eq!(held.len() as i32, local[0]);
        }
        prop_assert!(owned.iter().all(|&count| count == 1), "each position has one rank: {:?}", owned);
    }

    #[test]
    fn a_position_without_context_parallelism_has_the_slot_of_its_block(
        block_size in 1u32..=33, positions in prop::collection::vec(0i64..300, 1..40), blocks in 1usize..20,
    ) {
        let row: Vec<i32> = (0..blocks as i32).map(|block| 1000 - block).collect();
        let mut slots = vec![0; positions.len()];
        let rule = SlotRule { block_size, context_parallel: None };
        let beyond = rule.slots_of_request(&row, &positions, &mut slots);
        let size = i64::from(block_size);
        let mut without = 0;
        for (&position, &slot) in positions.iter().zip(&slots) {
            match row.get((position / size) as usize) {
                Some(&id) => prop_assert_eq!(slot, i64::from(id) * size + position % size),
                None => {
                    without += 1;
                    prop_assert_eq!(slot, PAD_SLOT_ID);
                }
            }
        }
        prop_assert_eq!(beyond, without);
    }

    #[test]
    fn micro_batches_recombine_to_the_batch(step in steps(12, 9, 20), parts in 1usize..=4, padding in 0u32..5) {
        let real = step.cam.num_actual_tokens as usize;
        let (rows, tokens) = (step.cam.num_reqs + padding, step.cam.num_actual_tokens + padding);
        let padded = batch::pad_step(&step, tokens, rows, PaddingValues::default()).unwrap();
        let scheduled: Vec<u32> = step.naive_query_lens().iter().map(|&len| len as u32).collect();
        let cut = batch::maybe_create_ubatch_slices(&scheduled, tokens as usize, parts, None);
        let slices = batch::pad_ubatch_slices(&cut, tokens as usize, rows as usize);
        if batch::is_last_ubatch_empty(real as u32, tokens, parts as u32) || tokens as usize / parts == 0 {
            // The runner does not cut such a step; the rule refuses it rather than make a part of padding alone.
            if parts > 1 {
                prop_assert!(batch::split_attn_metadata(&slices, &padded).is_err());
            }
            return Ok(());
        }
        let made = batch::split_attn_metadata(&slices, &padded).unwrap();
        let mut slots = Vec::new();
        let mut queries = vec![0; rows as usize];
        let mut last_len = BTreeMap::new();
        for (slice, part) in slices.iter().zip(&made) {
            prop_assert_eq!(part.cam.num_actual_tokens as usize, part.tensors.slot_mapping.len());
            slots.extend_from_slice(&part.tensors.slot_mapping);
            for (i, len) in part.naive_query_lens().into_iter().enumerate() {
                let row = slice.requests.start + i;
                let seen = part.tensors.seq_lens[i];
                // Queries of a part see the keys up to themselves: those of later parts are not counted.
                prop_assert_eq!(seen - len, padded.compute_num_computed_tokens()[row] + queries[row]);
                queries[row] += len;
                last_len.insert(row, seen);
                prop_assert_eq!(part.tensors.table().row(i), padded.tensors.table().row(row));
            }
        }
        prop_assert_eq!(&slots, &padded.tensors.slot_mapping);
        prop_assert_eq!(queries, padded.naive_query_lens());
        let lens: Vec<i32> = last_len.into_values().collect();
        prop_assert_eq!(&lens, &padded.tensors.seq_lens);
        // Both runner generations cut alike.
        for (slice, part) in slices.iter().zip(&made) {
            prop_assert_eq!(&batch::slice_input_batch(slice, &padded).tensors, &part.tensors);
        }
    }

    #[test]
    fn reorder_is_a_stable_permutation(
        rows in prop::collection::vec((1u32..8, 0u32..4, 1u32..6), 0..40), threshold in 1u32..5,
    ) {
        let requests: Vec<ReorderRequest> = rows
            .iter()
            .map(|&(num_scheduled_tokens, num_computed_tokens, num_prompt_tokens)| ReorderRequest {
                num_scheduled_tokens,
                num_computed_tokens,
                num_prompt_tokens,
            })
            .collect();
        let mut order: Vec<usize> = (0..requests.len()).collect();
        let reorder = batch::reorder_batch_to_split_decodes_and_prefills(&requests, threshold);
        reorder.apply(&mut order);
        let distinct: BTreeSet<usize> = order.iter().copied().collect();
        prop_assert_eq!(distinct.len(), requests.len(), "a permutation");
        let regions: Vec<u32> = order.iter().map(|&row| region(&requests[row], threshold)).collect();
        prop_assert!(regions.windows(2).all(|w| w[0] <= w[1]), "regions in order: {:?}", regions);
        // Rows that stood in their region have not moved, and the moved ones of a region keep their order.
        let mut last_moved = [None; 4];
        for (place, &row) in order.iter().enumerate() {
            let at = regions[place] as usize;
            if row == place {
                continue;
            }
            prop_assert!(regions[row] != region(&requests[row], threshold), "row {} moved within its region", row);
            prop_assert!(last_moved[at] < Some(row), "rows of region {} changed order", at);
            last_moved[at] = Some(row);
        }
        // A second time nothing moves.
        let sorted: Vec<ReorderRequest> = order.iter().map(|&row| requests[row]).collect();
        prop_assert!(!batch::reorder_batch_to_split_decodes_and_prefills(&sorted, threshold).modified());
    }

    #[test]
    fn padding_then_unpadding_gives_the_step_back(step in steps(10, 6, 20), rows in 0u32..9, tokens in 0u32..9) {
        let (num_reqs, num_tokens) = (step.cam.num_reqs, step.cam.num_actual_tokens);
        let padded = batch::pad_step(&step, num_tokens + tokens, num_reqs + rows, PaddingValues::default()).unwrap();
        prop_assert_eq!(padded.tensors.slot_mapping.len() as u32, num_tokens + tokens);
        prop_assert!(padded.tensors.query_start_loc.windows(2).all(|w| w[0] <= w[1]));
        let mut back = padded.unpadded(num_tokens, num_reqs);
        back.tensors.positions.clone_from(&step.tensors.positions);
        prop_assert_eq!(back, step);
    }

    #[test]
    fn pages_are_those_of_division(
        seq_lens in prop::collection::vec(0..=i32::MAX - (1 << 20), 0..40), page_size in 1u32..=1 << 20,
    ) {
        let (mut counts, mut indptr, mut last) = (Vec::new(), Vec::new(), Vec::new());
        vectors::page_counts_into(&seq_lens, page_size, &mut counts);
        let total = vectors::paged_kv_indptr_into(&seq_lens, page_size, &mut indptr);
        vectors::last_page_lens_into(&seq_lens, page_size, &mut last);
        let mut sum = 0;
        for (row, &len) in seq_lens.iter().enumerate() {
            let pages = (len as u32).div_ceil(page_size);
            prop_assert_eq!(counts[row] as u32, pages);
            prop_assert_eq!(i64::from(indptr[row]), sum.min(i64::from(i32::MAX)));
            sum += i64::from(pages);
            let in_last = if len == 0 { 0 } else { (len as u32 - 1) % page_size + 1 };
            prop_assert_eq!(last[row] as u32, in_last);
        }
        prop_assert_eq!(total as i64, sum);
    }

    #[test]
    fn a_split_follows_its_rules_row_by_row(
        query_lens in prop::collection::vec(0i32..6, 1..70), flags in prop::collection::vec(0u8..2, 0..70),
        decode_threshold in 1u32..6, require_uniform: bool, treat_short_extends_as_decodes: bool, padding in 0u32..4,
    ) {
        let mut query_start_loc = vec![0];
        for len in &query_lens {
            query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + len);
        }
        let num_actual_tokens = query_start_loc[query_lens.len()] as u32 + padding;
        let max_query_len = query_lens.iter().copied().max().unwrap_or(0) as u32;
        let rows = BatchRows {
            query_start_loc: &query_start_loc,
            seq_lens: &[],
            is_prefilling: &flags,
            num_actual_tokens,
            max_query_len,
        };
        let rule = DecodeRule { decode_threshold, require_uniform, treat_short_extends_as_decodes };
        let split = vectors::split_decodes_and_prefills(&rows, rule).unwrap();
        let threshold = decode_threshold as i32;
        let is_prefill = |row: usize| {
            let len = query_lens[row];
            let by_length = if query_lens[0] > threshold {
                true
            } else if require_uniform && (decode_threshold > 1 || !treat_short_extends_as_decodes || max_query_len > 1) {
                len != 0 && len != query_lens[0]
            } else {
                len > threshold
            };
            let flagged = flags.get(row).is_some_and(|&flag| flag != 0) && len != 0;
            by_length || (!treat_short_extends_as_decodes && flagged)
        };
        let first = (0..query_lens.len()).find(|&row| is_prefill(row)).unwrap_or(query_lens.len());
        prop_assert_eq!(split.num_decodes as usize, first);
        prop_assert_eq!((split.num_decodes + split.num_prefills) as usize, query_lens.len());
        prop_assert_eq!(split.num_decode_tokens + split.num_prefill_tokens, num_actual_tokens);
    }

    #[test]
    fn virtual_rows_show_each_query_its_chunk(step in steps(8, 40, 60), blocks in 1u32..4, block in 1u32..6) {
        let chunk = blocks * block;
        let mut step = step;
        // Wide enough for every key.
        let width = step.tensors.seq_lens.iter().map(|&len| len as usize / block as usize + 1).max().unwrap();
        step.tensors.block_table_width = width;
        step.tensors.block_table = (0..(step.batch_size() * width) as i32).collect();
        let (made, columns) = batch::make_local_attention_virtual_batches(chunk, &step, block).unwrap();
        let bound = batch::max_virtual_rows(step.batch_size(), step.cam.num_actual_tokens as usize, chunk);
        prop_assert!(made.batch_size() <= bound);
        let query_lens = made.naive_query_lens();
        let mut done = step.compute_num_computed_tokens();
        let table = made.tensors.table();
        for (row, (&queries, &keys)) in query_lens.iter().zip(&made.tensors.seq_lens).enumerate() {
            let source = columns.rows[row] as usize;
            // The last key of the row is its last query, and its first key begins that query's chunk.
            let last = done[source] + queries - 1;
            let chunk_start = last / chunk as i32 * chunk as i32;
            prop_assert_eq!(keys, last - chunk_start + 1);
            prop_assert!(queries <= keys);
            for column in 0..(keys as u32).div_ceil(block) as usize {
                let block_of_key = chunk_start as usize / block as usize + column;
                prop_assert_eq!(table.row(row)[column], step.tensors.table().row(source)[block_of_key]);
            }
            done[source] += queries;
        }
        prop_assert_eq!(&done, &step.tensors.seq_lens);
    }

    #[test]
    fn context_chunks_cover_each_context_once(
        context_lens in prop::collection::vec(0i32..300, 0..10), ranks in 1u32..=4, interleave in 1u32..=4,
        blocks in 1i32..=4,
    ) {
        // The workspace holds whole blocks on every rank, as the field's does.
        let round = (ranks * interleave) as i32;
        let align = round * 2;
        let max_context_chunk = align * blocks;
        let rows = ContextRows { dcp_world_size: ranks, interleave };
        let row_budget = max_context_chunk / ranks as i32;
        let budget = ContextBudget { row_budget, max_context_chunk, split_alignment: align, rows };
        let chunks = vectors::plan_mla_context_chunks(&context_lens, budget).unwrap();
        let mut covered = vec![0; context_lens.len()];
        for chunk in &chunks {
            let mut used = 0;
            for (i, (&start, &len)) in chunk.starts.iter().zip(&chunk.seq_lens).enumerate() {
                let request = chunk.request_start as usize + i;
                prop_assert_eq!(start, covered[request], "in order, without a gap");
                prop_assert!(len > 0 && len <= max_context_chunk);
                prop_assert!(i == 0 || start == 0, "only the first may continue");
                covered[request] += len;
                used += rows.padded(start + len) - rows.padded(start);
            }
            prop_assert_eq!(chunk.is_continuation, chunk.starts[0] > 0);
            prop_assert_eq!(chunk.request_end - chunk.request_start, chunk.starts.len() as u32);
            prop_assert!(used <= row_budget, "{} rows in a workspace of {}", used, row_budget);
        }
        prop_assert_eq!(covered, context_lens);
    }

    #[test]
    fn scan_chunks_end_on_the_sequence_grid(
        rows in prop::collection::vec((0i32..40, 0i32..60, 0i32..60), 0..8), chunk_size in 1i32..17,
    ) {
        let mut starts = vec![0];
        for (len, ..) in &rows {
            starts.push(starts[starts.len() - 1] + len);
        }
        let computed: Vec<i32> = rows.iter().map(|row| row.1).collect();
        let offsets: Vec<i32> = rows.iter().map(|row| if row.2 < row.0 { row.2 } else { 0 }).collect();
        let chunks = vectors::mamba_compute_chunk_metadata(chunk_size, &computed, &starts, &offsets);
        let ends = &chunks.cu_chunk_seqlen;
        prop_assert_eq!(ends[ends.len() - 1], starts[rows.len()]);
        for (chunk, w) in ends.windows(2).enumerate() {
            let row = chunks.seq_idx[chunk] as usize;
            prop_assert!(w[1] > w[0] && w[1] - w[0] <= chunk_size);
            let end = computed[row] + w[1] - starts[row];
            let on_grid = end % chunk_size == 0;
            let at_end = w[1] == starts[row + 1];
            let at_checkpoint = offsets[row] > 0 && w[1] == starts[row] + offsets[row];
            prop_assert!(on_grid || at_end || at_checkpoint, "chunk {} ends nowhere", chunk);
        }
        for (row, &checkpoint) in chunks.checkpoint_chunk_indices.iter().enumerate() {
            if offsets[row] > 0 {
                prop_assert_eq!(ends[checkpoint as usize + 1], starts[row] + offsets[row]);
            } else {
                prop_assert_eq!(checkpoint, PAD);
            }
        }
    }

    #[test]
    fn a_gathered_table_never_shows_another_request(
        steps in prop::collection::vec((prop::collection::vec(0i32..6, 0..6), 0usize..3), 1..5),
        lens in prop::collection::vec(0usize..5, 6),
    ) {
        let config = GroupTableConfig {
            block_size: 4,
            max_num_blocks_per_req: 4,
            slot_mapping_enabled: true,
            dcp_sharded: false,
        };
        let mut tables = BlockTables::new(6, &[config], None);
        for (request, &len) in lens.iter().enumerate() {
            let ids: Vec<i32> = (0..len as i32).map(|block| 100 * (request as i32 + 1) + block).collect();
            tables.append_block_ids(request, &[&ids], true).unwrap();
        }
        let mut gathered = GatheredTable::new(9, 4);
        for (idx_mapping, padding) in &steps {
            let rows = idx_mapping.len() + padding;
            tables.gather(0, idx_mapping, rows, &mut gathered);
            for row in 0..rows {
                let blocks = idx_mapping.get(row).map_or(&[][..], |&request| tables.row(0, request as usize));
                let mut want = blocks.to_vec();
                want.resize(4, 0);
                prop_assert_eq!(gathered.table().row(row), want.as_slice());
            }
        }
    }

    #[test]
    fn a_dispatched_graph_holds_the_batch(
        queries in 1u32..=4, requests in 1u32..100, max_num_seqs in 1u32..80, mode in 0usize..5, uniform: bool,
    ) {
        let mode = CudagraphMode::ALL[mode];
        let sizes: Vec<u32> = (1..=16).map(|n| 4 * n * queries).collect();
        let dispatcher = CudagraphDispatcher::new(mode, queries, max_num_seqs, &sizes, &[0]).unwrap();
        let num_tokens = requests * queries;
        let (runs, graph) = dispatcher.dispatch(num_tokens, uniform, 0, |_| true).unwrap();
        prop_assert!(graph.num_tokens >= num_tokens);
        match runs {
            RuntimeMode::None => prop_assert_eq!(graph.num_tokens, num_tokens),
            RuntimeMode::Piecewise => prop_assert_eq!(graph.num_reqs, None),
            RuntimeMode::Full => {
                let rows = graph.num_reqs.unwrap();
                prop_assert!(rows <= max_num_seqs);
                prop_assert!(!graph.uniform || rows * queries == graph.num_tokens);
            }
        }
        prop_assert!(runs == RuntimeMode::None || dispatcher.keys(runs).any(|key| key == graph));
    }
}

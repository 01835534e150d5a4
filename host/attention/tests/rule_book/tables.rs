//! Block tables, slots, Mamba states' columns, multimodal spans.

use serde_json::{Value, json};
use timetable_attention::BlockTable;
use timetable_attention::batch::{
    self, BlockTables, ContextParallel, GatheredTable, GroupTableConfig, SlotRule,
    slot_mapping_into,
};
use timetable_attention::types::{self, MambaCacheMode, MmDocRange};

use crate::harness::{FieldError, Tally, flag, int, ints, list, run, uint};

pub fn block_table_compute_slot_mapping() -> Tally {
    run("block_table_compute_slot_mapping", |input| {
        let rule = SlotRule {
            block_size: uint(&input["block_size"]),
            context_parallel: Some(ContextParallel {
                size: uint(&input["dcp_world_size"]),
                rank: uint(&input["dcp_rank"]),
                interleave: uint(&input["cp_kv_cache_interleave_size"]),
            }),
        };
        let rows = list(&input["block_ids"], ints);
        let mut slots = vec![-7; int(&input["max_num_batched_tokens"]) as usize];
        let positions = list(&input["positions"], int);
        let starts = ints(&input["query_start_loc"]);
        slot_mapping_into(
            rule,
            |row| Some(rows[row].as_slice()),
            &starts,
            &positions,
            &mut slots,
        );
        Ok(json!(slots))
    })
}

fn mrv2_groups(input: &Value) -> Vec<GroupTableConfig> {
    list(&input["block_sizes"], uint)
        .iter()
        .enumerate()
        .map(|(g, &block_size)| GroupTableConfig {
            block_size,
            max_num_blocks_per_req: int(&input["max_num_blocks_per_group"][g]) as usize,
            slot_mapping_enabled: flag(&input["slot_mapping_enabled"][g]),
            dcp_sharded: flag(&input["dcp_sharded"][g]),
        })
        .collect()
}

pub fn mrv2_block_tables() -> Tally {
    run("mrv2_block_tables", |input| {
        let groups = mrv2_groups(input);
        let context_parallel = ContextParallel {
            size: uint(&input["cp_size"]),
            rank: uint(&input["cp_rank"]),
            interleave: uint(&input["cp_interleave"]),
        };
        let max_num_reqs = int(&input["max_num_reqs"]) as usize;
        let mut tables = BlockTables::new(max_num_reqs, &groups, Some(context_parallel));
        let Some(block_ids) = input.get("block_ids") else {
            // The one recorded refusal: its case keeps no block ids; its text says request 6, group 0, six blocks.
            let ids: Vec<Vec<i32>> = groups
                .iter()
                .enumerate()
                .map(|(g, group)| {
                    vec![
                        1;
                        if g == 0 {
                            group.max_num_blocks_per_req + 1
                        } else {
                            1
                        }
                    ]
                })
                .collect();
            let ids: Vec<&[i32]> = ids.iter().map(Vec::as_slice).collect();
            let error = tables
                .append_block_ids(6, &ids, true)
                .expect_err("a row beyond its capacity");
            return Err(FieldError::new("RuntimeError", &error));
        };
        let idx_mapping = ints(&input["idx_mapping"]);
        for (row, ids) in list(block_ids, |request| list(request, ints))
            .iter()
            .enumerate()
        {
            let ids: Vec<&[i32]> = ids.iter().map(Vec::as_slice).collect();
            let request = idx_mapping[row] as usize;
            tables
                .append_block_ids(request, &ids, true)
                .map_err(|error| FieldError::new("RuntimeError", &error))?;
        }
        let reqs_padded = int(&input["num_reqs_padded"]) as usize;
        let starts = ints(&input["query_start_loc"]);
        let positions = list(&input["positions"], int);
        let mut gathered = Vec::new();
        let mut slot_mappings = Vec::new();
        for (g, group) in groups.iter().enumerate() {
            let width = group.max_num_blocks_per_req;
            let mut destination = GatheredTable::filled_with(-9, reqs_padded, width);
            tables.gather(g, &idx_mapping, reqs_padded, &mut destination);
            let table = destination.table();
            gathered.push(
                (0..reqs_padded)
                    .map(|row| json!(table.row(row)))
                    .collect::<Value>(),
            );
            let mut slots = vec![-7; int(&input["num_tokens_padded"]) as usize];
            tables.compute_slot_mapping(g, &idx_mapping, &starts, &positions, &mut slots);
            slot_mappings.push(slots);
        }
        Ok(json!({"gathered": gathered, "slot_mappings": slot_mappings}))
    })
}

pub fn mamba_get_block_table_tensor() -> Tally {
    run("mamba_get_block_table_tensor", |input| {
        let rows = list(&input["block_table"], ints);
        let (data, width) = (rows.concat(), rows[0].len());
        let mode = if input["mamba_cache_mode"] == "align" {
            MambaCacheMode::Align
        } else {
            MambaCacheMode::None
        };
        let (states, columns) = batch::mamba_get_block_table_tensor(
            BlockTable { data: &data, width },
            &ints(&input["seq_lens"]),
            uint(&input["block_size"]),
            uint(&input["num_speculative_blocks"]),
            mode,
        )
        .map_err(|error| FieldError::new("RuntimeError", &error))?;
        Ok(states.chunks(columns).map(|row| json!(row)).collect())
    })
}

pub fn mm_prefix_ranges() -> Tally {
    run("mm_prefix_ranges", |input| {
        let by_row = input["mm_req_doc_ranges"]
            .as_object()
            .expect("ranges by row");
        let mut ranges = Vec::new();
        for (row, spans) in by_row {
            let row = row.parse().expect("a row");
            ranges.extend(list(spans, |s| MmDocRange {
                row,
                start: uint(&s[0]),
                end: uint(&s[1]),
            }));
        }
        let starts = ints(&input["query_start_loc"]);
        let num_tokens = starts[starts.len() - 1] as usize;
        let seq_lens = ints(&input["seq_lens"]);
        let pairs = |list: &[i32]| list.chunks(2).map(|pair| json!(pair)).collect::<Value>();
        let queries = batch::fill_mm_prefix_query_ranges(&starts, &seq_lens, &ranges, num_tokens);
        let padded = types::batch::compute_mm_prefix_ranges(seq_lens.len(), &ranges);
        Ok(json!({
            "fill_mm_prefix_query_ranges": match queries {
                Some(rows) => json!({"n": num_tokens, "rows": pairs(&rows)}),
                None => json!({"n": 0, "rows": []}),
            },
            "compute_mm_prefix_range_tensor": padded
                .map(|ranges| ranges.data.chunks(2 * ranges.max_ranges).map(pairs).collect::<Value>()),
        }))
    })
}

#[test]
fn block_table_compute_slot_mapping_conforms() {
    block_table_compute_slot_mapping().check();
}

#[test]
fn mrv2_block_tables_conforms() {
    mrv2_block_tables().check();
}

#[test]
fn mamba_get_block_table_tensor_conforms() {
    mamba_get_block_table_tensor().check();
}

#[test]
fn mm_prefix_ranges_conforms() {
    mm_prefix_ranges().check();
}

//! Evaluates the symbolic tensors that these builders return, straightforwardly and independently of the product's own
//! resolver: an error in that one cannot hide here.

use serde_json::{Value, json};
use timetable_types::{BuilderConfig, ConvChunks, DcpSource, Input, StateColumn, Tensor};

use crate::vectors::Tensors;

/// The tensor's value as JSON; `indptr` is the sibling `paged_kv_indptr` of a page gather.
pub fn resolve(tensor: &Tensor, step: &Tensors, config: &BuilderConfig, indptr: &[i32]) -> Value {
    match tensor {
        Tensor::Input(input) => whole(*input, step),
        Tensor::Slice(slice) => {
            let rows = whole(slice.source, step);
            json!(rows.as_array().expect("rows")[slice.start as usize..slice.end as usize])
        }
        Tensor::Values(values) => json!(values),
        Tensor::RebasedQueryStartLoc(rows) => {
            let starts = &step.query_start_loc[rows.start as usize..=rows.end as usize];
            json!(
                starts
                    .iter()
                    .map(|start| start - starts[0])
                    .collect::<Vec<_>>()
            )
        }
        Tensor::CuPageCounts(rows) => {
            let page = i64::from(config.kv_cache_spec.block_size);
            let mut sums = vec![0];
            for len in &step.seq_lens[rows.start as usize..rows.end as usize] {
                sums.push(sums[sums.len() - 1] + (len + page - 1) / page);
            }
            json!(sums)
        }
        Tensor::GatherPages(rows) => {
            let mut pages = Vec::new();
            for (i, row) in (rows.start as usize..rows.end as usize).enumerate() {
                let count = (indptr[i + 1] - indptr[i]) as usize;
                pages.extend_from_slice(&step.block_table[row][..count]);
            }
            json!(pages)
        }
        Tensor::DcpLocal(local) => {
            let parallel = &config.parallel;
            let (ranks, rank, run) = (
                i64::from(parallel.dcp_world_size),
                i64::from(parallel.dcp_rank),
                i64::from(parallel.cp_kv_cache_interleave_size),
            );
            let shares = (local.rows.start as usize..local.rows.end as usize).map(|row| {
                let query = step.query_start_loc[row + 1] - step.query_start_loc[row];
                let keys = match local.source {
                    DcpSource::SeqLens => step.seq_lens[row],
                    DcpSource::ContextLens => step.seq_lens[row] - query,
                };
                // Token i lies on rank (i / run) mod ranks.
                (0..keys)
                    .filter(|token| token / run % ranks == rank)
                    .count()
            });
            json!(shares.collect::<Vec<_>>())
        }
        Tensor::HasContext(rows) => {
            let rows = rows.start as usize..rows.end as usize;
            let starts = &step.query_start_loc;
            let has = rows.map(|row| step.seq_lens[row] > starts[row + 1] - starts[row]);
            json!(has.collect::<Vec<_>>())
        }
        Tensor::StateIndices(gather) => {
            let block = i64::from(config.kv_cache_spec.block_size);
            let states = gather.rows.iter().map(|&row| {
                let row = row as usize;
                let column = match gather.column {
                    StateColumn::First => 0,
                    StateColumn::LastToken => ((step.seq_lens[row] - 1).max(0) / block) as usize,
                };
                match &step.block_table[row][column..column + gather.width as usize] {
                    [state] => json!(state),
                    states => json!(states),
                }
            });
            json!(states.collect::<Vec<_>>())
        }
        Tensor::RowMask(rows) => {
            let named = |row: &usize| rows.contains(&(*row as u32));
            let all = 0..step.seq_lens.len();
            json!(all.map(|row| named(&row)).collect::<Vec<_>>())
        }
        Tensor::RowTokens(rows) => {
            let starts = &step.query_start_loc;
            let tokens = rows
                .iter()
                .flat_map(|&row| starts[row as usize]..starts[row as usize + 1]);
            json!(tokens.collect::<Vec<_>>())
        }
        Tensor::Extra(name) => json!(extra(name, step)),
        Tensor::ExtraRows(gather) => {
            let all = extra(&gather.name, step);
            let rows = gather.rows.iter().map(|&row| all[row as usize]);
            json!(rows.collect::<Vec<_>>())
        }
        Tensor::ConvChunkRows(chunks) => conv_chunks(chunks, step, |row, _| row),
        Tensor::ConvChunkOffsets(chunks) => conv_chunks(chunks, step, |_, offset| offset),
        other => panic!("these builders return no {other:?}"),
    }
}

fn extra<'s>(name: &str, step: &'s Tensors) -> &'s [i64] {
    assert_eq!(name, "num_accepted_tokens");
    step.num_accepted_tokens.as_ref().expect("it is given")
}

fn conv_chunks(chunks: &ConvChunks, step: &Tensors, value: impl Fn(i64, i64) -> i64) -> Value {
    let mut buffer = Vec::new();
    let starts = &step.query_start_loc[chunks.rows.start as usize..=chunks.rows.end as usize];
    for (row, pair) in starts.windows(2).enumerate() {
        let mut offset = 0;
        while pair[0] + offset * i64::from(chunks.block_m) < pair[1] {
            buffer.push(value(row as i64, offset));
            offset += 1;
        }
    }
    buffer.resize(chunks.length as usize, -1);
    json!(buffer)
}

fn whole(input: Input, step: &Tensors) -> Value {
    match input {
        Input::QueryStartLoc => json!(step.query_start_loc),
        Input::SeqLens => json!(step.seq_lens),
        Input::BlockTable => json!(step.block_table),
        Input::SlotMapping => json!(step.slot_mapping),
        other => panic!("these builders refer to no {other:?}"),
    }
}

/// The recorded value of a tensor field: `{"$same": input}` stands for the input itself.
pub fn recorded(value: &Value, step: &Tensors) -> Value {
    match value["$same"].as_str() {
        None => value.clone(),
        Some("query_start_loc") => whole(Input::QueryStartLoc, step),
        Some("seq_lens") => whole(Input::SeqLens, step),
        Some("block_table_tensor") => whole(Input::BlockTable, step),
        Some("slot_mapping") => whole(Input::SlotMapping, step),
        Some(other) => panic!("no input {other}"),
    }
}

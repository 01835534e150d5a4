//! Metadata for a step: as the host's plain builder and the reference builders make it, and at random, made here and nowhere
//! else, so that a builder's mistake cannot hide one of the device's. It must never know a device.

use std::ops::Range;

use rand::Rng;
use rand_pcg::Pcg64Mcg;
use timetable_attention::plain_builder;
use timetable_reference::native_twin;
use timetable_types::{
    DcpLocal, DcpSource, Dtype, Family, Input, Matrix, Metadata, RowRange, Scratch, Tensor,
    TensorSlice,
    flash_mla::{
        ChunkedContext, ContextChunk, DcpContextChunk, DecodeSchedule, Metadata as Record,
        MlaDecode, MlaPrefill, MlaSchedulerMetadataCall, TileSchedule,
    },
};

use crate::batch::Batch;

/// Of every rank, by the host's plain builder.
pub fn plain(batch: &Batch) -> Vec<Metadata> {
    let ranks = batch.ranks.iter();
    ranks
        .map(|rank| {
            let mut builder = plain_builder(Family::FlashMla, &rank.config).expect("a builder");
            builder.build(&rank.step.cam, false).expect("metadata")
        })
        .collect()
}

/// Of every rank, by the reference builder called `name`, with a workspace of `rows` rows.
pub fn reference(batch: &Batch, name: &str, rows: u32) -> Vec<Metadata> {
    let ranks = batch.ranks.iter();
    ranks
        .map(|rank| {
            let mut config = rank.config.clone();
            let option = (
                "chunked_prefill_workspace_size".to_owned(),
                rows.to_string(),
            );
            config.options.push(option);
            let mut builder = native_twin(name, &config).expect("a builder");
            builder.build(&rank.step.cam, false).expect("metadata")
        })
        .collect()
}

pub fn record(metadata: &Metadata) -> &Record {
    match metadata {
        Metadata::FlashMla(record) => record,
        _ => panic!("another family"),
    }
}

/// One context's run in a chunk: (prefill, first key, keys).
type Piece = (usize, usize, usize);

/// Of every rank: the first `decodes` rows decode, by any valid schedule, the others prefill, by any valid chunk plan.
pub fn random(rng: &mut Pcg64Mcg, batch: &Batch, decodes: usize) -> Vec<Metadata> {
    let plan = random_plan(rng, batch, decodes);
    let tokens = batch.first_token(decodes) as u32;
    let rows = batch.ranks[0].step.tensors.seq_lens.len() as u32;
    let prefills = rows - decodes as u32;
    let choice = rng.random_range(0..3);
    (0..batch.ranks.len())
        .map(|rank| {
            let cam = &batch.ranks[rank].step.cam;
            let world = batch.layout.world;
            let longest = |rows: Range<usize>, rank: Option<usize>| {
                let lens = batch.rows[rows].iter();
                lens.map(|row| rank.map_or(row.1, |rank| batch.layout.held(row.1, rank)))
                    .max()
                    .unwrap_or(0) as u32
            };
            let max_seq_len = match world > 1 && decodes > 0 {
                true => longest(0..decodes, Some(rank)),
                false => cam.max_seq_len,
            };
            Metadata::FlashMla(Record {
                num_reqs: rows,
                max_query_len: cam.max_query_len,
                max_seq_len,
                num_actual_tokens: batch.num_tokens as u32,
                query_start_loc: Tensor::Input(Input::QueryStartLoc),
                slot_mapping: Tensor::Input(Input::SlotMapping),
                num_decodes: decodes as u32,
                num_decode_tokens: if prefills == 0 {
                    batch.num_tokens as u32
                } else {
                    tokens
                },
                num_prefills: prefills,
                causal: true,
                head_dim: batch.layout.sizes.head_size() as u32,
                prefill: (prefills > 0).then(|| prefill(batch, rank, decodes, &plan)),
                decode: (decodes > 0).then(|| decode(rng, batch, decodes, max_seq_len, choice)),
            })
        })
        .collect()
}

fn slice(source: Input, start: usize, end: usize, all: usize) -> Tensor {
    match (start, end) == (0, all) {
        true => Tensor::Input(source),
        false => Tensor::Slice(TensorSlice {
            source,
            start: start as u32,
            end: end as u32,
        }),
    }
}

fn decode(
    rng: &mut Pcg64Mcg,
    batch: &Batch,
    rows: usize,
    max_seq_len: u32,
    choice: u32,
) -> MlaDecode {
    let all = batch.ranks[0].step.tensors.seq_lens.len();
    let sharded = batch.layout.world > 1;
    let whole = slice(Input::SeqLens, 0, rows, all);
    let seq_lens = match sharded {
        true if rng.random() => slice(Input::DcpLocalSeqLens, 0, rows, all),
        true => Tensor::DcpLocal(DcpLocal {
            source: DcpSource::SeqLens,
            rows: RowRange {
                start: 0,
                end: rows as u32,
            },
        }),
        false => whole.clone(),
    };
    let starts = slice(Input::QueryStartLoc, 0, rows + 1, all + 1);
    let of = &batch.rows[..rows.min(batch.rows.len())];
    let max_query_len = of.iter().map(|row| row.0).max().unwrap_or(0) as u32;
    let (schedule, max_num_splits) = match choice {
        0 if !sharded => tiles(rng, batch, rows),
        1 => {
            let splits = rng.random_range(0..=8);
            let config = &batch.ranks[0].config;
            let call = MlaSchedulerMetadataCall {
                batch_size: rows as u32,
                max_seqlen_q: max_query_len,
                max_seqlen_k: max_seq_len,
                num_heads_q: config.attention.num_heads * batch.layout.world as u32,
                num_heads_kv: 1,
                headdim: config.attention.qk_rope_head_dim,
                headdim_v: config.attention.kv_lora_rank,
                cache_seqlens: seq_lens.clone(),
                qkv_dtype: Dtype::Float32,
                cu_seqlens_q: starts.clone(),
                page_size: batch.layout.block_size as u32,
                causal: true,
                num_splits: splits,
                scheduler_metadata_len: 1,
            };
            (DecodeSchedule::FlashAttn(call), splits)
        }
        _ => (DecodeSchedule::Lazy, 0),
    };
    MlaDecode {
        block_table: slice(Input::BlockTable, 0, rows, all),
        seq_lens,
        dcp_tot_seq_lens: sharded.then_some(whole),
        query_start_loc: Some(starts),
        max_query_len,
        max_seq_len,
        max_num_splits,
        schedule,
    }
}

/// Pages dealt out to parts at random, in order; a padded row has none.
fn tiles(rng: &mut Pcg64Mcg, batch: &Batch, rows: usize) -> (DecodeSchedule, u32) {
    let lens = &batch.ranks[0].step.tensors.seq_lens[..rows];
    let size = batch.layout.block_size as i32;
    let pages: Vec<i32> = lens.iter().map(|len| (len + size - 1) / size).collect();
    let next = |row: usize| (row..rows).find(|&row| pages[row] > 0).unwrap_or(rows);
    let total: i32 = pages.iter().sum();
    let parts = rng.random_range(1..=7);
    let mut cuts: Vec<i32> = (1..parts).map(|_| rng.random_range(0..=total)).collect();
    cuts.push(total);
    cuts.sort_unstable();
    let mut table = Vec::new();
    let mut counts = vec![0; rows];
    let (mut row, mut page, mut done) = (next(0), 0, 0);
    for cut in cuts {
        let split = if page > 0 { counts[row] } else { 0 };
        table.extend([row as i32, page, row as i32, page, split, 0, 0, 0]);
        let at = table.len() - 8;
        while done < cut {
            let taken = (cut - done).min(pages[row] - page);
            counts[row] += 1;
            page += taken;
            done += taken;
            table[at + 2..at + 4].copy_from_slice(&[row as i32, page]);
            if page == pages[row] {
                (row, page) = (next(row + 1), 0);
            }
        }
    }
    let mut sums = vec![0];
    for count in &counts {
        sums.push(sums[sums.len() - 1] + count);
    }
    let schedule = TileSchedule {
        tile_scheduler_metadata: Tensor::Matrix(Matrix {
            rows: parts as u32,
            columns: 8,
            values: table,
        }),
        num_splits: Tensor::Values(sums),
    };
    let most = counts.iter().copied().max().unwrap_or(0) as u32;
    (DecodeSchedule::Tiles(schedule), most)
}

/// Chunks of consecutive contexts; the last of a chunk may be cut, at a multiple of whole rounds of blocks.
fn random_plan(rng: &mut Pcg64Mcg, batch: &Batch, decodes: usize) -> Vec<Vec<Piece>> {
    let layout = &batch.layout;
    let align = layout.block_size * if layout.world > 1 { layout.world } else { 1 };
    let rows = &batch.rows[decodes.min(batch.rows.len())..];
    let (mut chunks, mut open): (Vec<Vec<Piece>>, Vec<Piece>) = (Vec::new(), Vec::new());
    for (row, &(query, keys)) in rows.iter().enumerate() {
        let context = keys - query;
        let mut start = 0;
        while start < context {
            let left = context - start;
            let pieces = (left - 1) / align;
            if pieces > 0 && rng.random() {
                let len = align * rng.random_range(1..=pieces);
                open.push((row, start, len));
                chunks.push(std::mem::take(&mut open));
                start += len;
            } else {
                open.push((row, start, left));
                start = context;
            }
        }
        // A request without context ends a run.
        if !open.is_empty() && (context == 0 || rng.random()) {
            chunks.push(std::mem::take(&mut open));
        }
    }
    if !open.is_empty() {
        chunks.push(open);
    }
    chunks
}

fn sums(values: &[i32]) -> Vec<i32> {
    let mut sums = vec![0];
    for value in values {
        sums.push(sums[sums.len() - 1] + value);
    }
    sums
}

fn prefill(batch: &Batch, rank: usize, decodes: usize, plan: &[Vec<Piece>]) -> MlaPrefill {
    let layout = &batch.layout;
    let all = batch.ranks[0].step.tensors.seq_lens.len();
    let starts = &batch.ranks[0].step.tensors.query_start_loc[decodes..];
    let starts: Vec<i32> = starts.iter().map(|start| start - starts[0]).collect();
    let lens = &batch.ranks[0].step.tensors.seq_lens[decodes..];
    let query_lens: Vec<i32> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let contexts = lens.iter().zip(&query_lens);
    let contexts: Vec<i32> = contexts.map(|(len, query)| len - query).collect();
    // Rows that every rank has room for, all the same: whole rounds.
    let round = layout.world * layout.interleave;
    let padded = |tokens: usize| match layout.world {
        1 => tokens,
        _ => tokens.div_ceil(round) * layout.interleave,
    };
    let chunks: Vec<ContextChunk> = plan
        .iter()
        .enumerate()
        .map(|(index, pieces)| {
            let first = pieces[0].0;
            let end = pieces[pieces.len() - 1].0 + 1;
            let keys: Vec<i32> = pieces.iter().map(|piece| piece.2 as i32).collect();
            let own: Vec<i32> = starts[first..=end]
                .iter()
                .map(|at| at - starts[first])
                .collect();
            let local_starts: Vec<i32> =
                pieces.iter().map(|piece| padded(piece.1) as i32).collect();
            let local: Vec<i32> = pieces
                .iter()
                .map(|&(_, start, len)| (padded(start + len) - padded(start)) as i32)
                .collect();
            let dcp = (layout.world > 1).then(|| DcpContextChunk {
                padded_local_cu_seq_lens: sums(&local),
                padded_local_seq_lens: local.clone(),
                local_context_lens_allranks: pieces
                    .iter()
                    .flat_map(|piece| {
                        let context = contexts[piece.0] as usize;
                        (0..layout.world).map(move |rank| layout.held(context, rank) as i32)
                    })
                    .collect(),
                padded_local_token_to_seq: Tensor::SegmentIds,
                local_starts: local_starts.clone(),
            });
            ContextChunk {
                index: index as u32,
                request_slice: RowRange {
                    start: first as u32,
                    end: end as u32,
                },
                token_slice: RowRange {
                    start: starts[first] as u32,
                    end: starts[end] as u32,
                },
                continuation_token_end: starts[first + 1] as u32,
                is_continuation: pieces[0].1 > 0,
                num_context_tokens: keys.iter().sum::<i32>() as u32,
                max_query_len: own
                    .windows(2)
                    .map(|pair| pair[1] - pair[0])
                    .max()
                    .unwrap_or(0) as u32,
                query_start_loc: own,
                cu_seq_lens: sums(&keys),
                starts: local_starts,
                max_seq_len: keys.iter().copied().max().unwrap_or(0) as u32,
                seq_lens: keys,
                token_to_seq: Tensor::SegmentIds,
                all_rows_active: true,
                num_local_context_tokens: local.iter().sum::<i32>() as u32,
                dcp,
            }
        })
        .collect();
    let empty = query_lens.iter().zip(&contexts).zip(&starts);
    let empty_token_slices = empty
        .filter(|((_, context), _)| **context <= 0)
        .map(|((query, _), start)| RowRange {
            start: *start as u32,
            end: (start + query) as u32,
        })
        .collect();
    MlaPrefill {
        block_table: slice(Input::BlockTable, decodes, all, all),
        query_start_loc: Tensor::RebasedQueryStartLoc(RowRange {
            start: decodes as u32,
            end: all as u32,
        }),
        max_query_len: batch.ranks[rank].step.cam.max_query_len,
        chunked_context: (!chunks.is_empty()).then(|| ChunkedContext {
            workspace: Scratch {
                shape: vec![1 << 20, layout.sizes.head_size() as u32],
                dtype: Dtype::Float32,
            },
            context_lens: contexts,
            chunks,
            empty_token_slices,
        }),
        q_data_type: Dtype::Float32,
        output_dtype: Dtype::Float32,
        query_lens_cpu: query_lens,
        use_dense_mha: false,
    }
}

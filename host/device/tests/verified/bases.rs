//! Good metadata to start from: for each family enough records that every field of the contract has a value in one of them.
//! A new family adds a suite here. It must never know how records are broken.

#[path = "bases/flash_mla.rs"]
mod flash_mla;
#[path = "bases/mamba.rs"]
mod mamba;
#[path = "bases/triton_attn.rs"]
mod triton_attn;

use timetable_attention::{Grant, plain_builder};
use timetable_types::{
    BuilderConfig, Causal, DcpLocal, DcpSource, EncoderInputs, Family, Input, KvCacheSpecKind,
    LaunchPromise, Matrix, Metadata, MmDocRange, PageSelection, RowRange, Tensor, TensorSlice,
    flash_attn::{self, TileOrder},
    flashinfer::{
        self, Decode, Plan, Prefill, TrtllmDecode, TrtllmKernel, TrtllmPrefill, WorkList,
    },
};

use crate::case::{Case, Random, config};

/// One good record and its step.
pub struct Base {
    pub name: &'static str,
    pub case: Case,
    pub metadata: Metadata,
}

/// The mutation suite of a family; a family without rules has none.
pub fn suite(family: Family) -> Option<Vec<Base>> {
    match family {
        Family::FlashAttn => Some(flash_attn_bases()),
        Family::Flashinfer => Some(flashinfer_bases()),
        Family::TritonAttn => Some(triton_attn::bases()),
        Family::FlashMla => Some(flash_mla::bases()),
        Family::Mamba => Some(mamba::bases()),
    }
}

/// A random step of a random layer, and good metadata for it with random splits, chunks, tiles and orders.
pub fn random_base(family: Family, random: &mut Random) -> Base {
    if family == Family::Mamba {
        return mamba::random_base(random);
    }
    let is_latent = family == Family::FlashMla;
    let mut config = match random.chance(3) && !is_latent {
        true => windowed(random.pick(&[1, 7, 16, 33, 64])),
        false => config(),
    };
    let (heads, kv_heads) = random.pick(&[(4, 2), (6, 2), (8, 1), (3, 3), (1, 1)]);
    config.attention.num_heads = heads;
    config.kv_cache_spec.num_kv_heads = kv_heads;
    if is_latent {
        config = flash_mla::mla(config);
    }
    config.kv_cache_spec.block_size = random.pick(&[1, 4, 16, 24, 48]);
    config.max_num_splits = random.pick(&[1, 4, 16]);
    config.device.num_workers = random.pick(&[1, 4, 40]);
    let mut rows = Vec::new();
    for _ in 0..random.below(5) {
        rows.push((1, 1 + random.below(90)));
    }
    for _ in 0..random.below(3) + usize::from(rows.is_empty()) {
        let query = 2 + random.below(40);
        rows.push((query, query + random.pick(&[0, 0, 5, 16, 60])));
    }
    let padding = random.pick(&[(0, 0), (0, 0), (1, 0), (2, 3)]);
    // The MLA backends have causal groups only.
    let causal = Causal::All(!random.chance(5) || is_latent);
    let case = Case::new(config, causal, &rows, padding, no_edit);
    base("random", family, case, |case, metadata| {
        let most = case.config.max_num_splits;
        match metadata {
            Metadata::FlashAttn(record) => {
                let count = case.step.cam.num_reqs as usize;
                record.schedule.max_num_splits = most;
                record.schedule.num_splits = (0..count)
                    .map(|_| 1 + random.below(most as usize) as i32)
                    .collect();
                let mut order: Vec<i32> = (0..count as i32).collect();
                for place in (1..count).rev() {
                    order.swap(place, random.below(place + 1));
                }
                record.schedule.tile_order = TileOrder::Rows(order);
            }
            Metadata::Flashinfer(record) => {
                let page = case.config.kv_cache_spec.block_size;
                let least = case.step.cam.max_seq_len.div_ceil(most);
                let chunk = least.next_multiple_of(page) + page * random.below(3) as u32;
                split(case, record, chunk, random.pick(&[16, 64, 128]));
                if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                    in_order(&mut plan.work);
                }
            }
            Metadata::TritonAttn(record) => triton_attn::random(case, record, random),
            Metadata::FlashMla(record) => flash_mla::random(case, record, random),
            _ => panic!("another family"),
        }
    })
}

const MIXED: [(usize, usize); 4] = [(1, 40), (1, 17), (20, 52), (9, 30)];
const PADDED: (usize, usize) = (1, 3);

fn plain(family: Family, case: &Case) -> Metadata {
    plain_builder(family, &case.config)
        .expect("a plain builder")
        .build(&case.step.cam, false)
        .expect("plain metadata")
}

fn no_edit(_: &mut BuilderConfig, _: &mut timetable_attention::batch::GroupStep) {}

fn base(
    name: &'static str,
    family: Family,
    case: Case,
    edit: impl FnOnce(&Case, &mut Metadata),
) -> Base {
    let mut metadata = plain(family, &case);
    edit(&case, &mut metadata);
    Base {
        name,
        case,
        metadata,
    }
}

fn flash_attn_bases() -> Vec<Base> {
    const FAMILY: Family = Family::FlashAttn;
    let edited = |edit: fn(&Case, &mut flash_attn::Metadata)| {
        move |case: &Case, metadata: &mut Metadata| match metadata {
            Metadata::FlashAttn(record) => edit(case, record),
            _ => panic!("another family"),
        }
    };
    let all = Causal::All(true);
    let mut bases = vec![
        base(
            "mixed",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, no_edit),
            edited(|case, record| {
                record.schedule.max_num_splits = 3;
                record.schedule.num_splits = vec![3, 1, 2, 1, 1];
                record.schedule.tile_order = TileOrder::Rows(vec![2, 0, 4, 1, 3]);
                record.max_num_splits = 2;
                record.scheduler_metadata = Some(scheduler_call(case, record));
            }),
        ),
        base(
            "windowed, not causal",
            FAMILY,
            Case::new(windowed(24), Causal::All(false), &MIXED, (0, 0), no_edit),
            edited(|_, record| {
                record.schedule.max_num_splits = 4;
                record.schedule.num_splits = vec![4, 2, 3, 1];
            }),
        ),
        base(
            "flags per request",
            FAMILY,
            Case::new(config(), Causal::PerRequest, &MIXED, PADDED, no_edit),
            edited(|_, record| {
                record.schedule.max_num_splits = 2;
                record.schedule.num_splits = vec![2; 5];
            }),
        ),
        base(
            "encoder",
            FAMILY,
            Case::new(
                config(),
                Causal::All(false),
                &[(3, 40), (1, 17), (2, 30)],
                (0, 0),
                |config, step| {
                    config.kv_cache_spec.kind = KvCacheSpecKind::CrossAttention;
                    // The decoder's own lengths are another matter.
                    let lens = step.tensors.seq_lens.clone();
                    step.cam.encoder = Some(EncoderInputs {
                        encoder_seq_lens_cpu: lens.clone(),
                    });
                    step.tensors.encoder_seq_lens = Some(lens);
                    step.tensors.seq_lens = vec![5, 9, 2];
                    step.cam.seq_lens_cpu_upper_bound = vec![5, 9, 2];
                    step.cam.max_seq_len = 9;
                },
            ),
            edited(|_, _| {}),
        ),
        base(
            "two ranks",
            FAMILY,
            Case::new(sharded(), all.clone(), &MIXED, PADDED, no_edit),
            edited(|case, record| {
                record.num_decode_reqs = 2;
                record.num_decode_tokens = 2;
                record.num_prefill_reqs = 2;
                record.num_prefill_tokens = 29;
                record.scheduler_metadata = Some(scheduler_call(case, record));
            }),
        ),
        base(
            "spans",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, |_, step| {
                let range = |row, start, end| MmDocRange { row, start, end };
                step.cam.mm_req_doc_ranges = vec![range(2, 35, 44), range(3, 2, 25)];
            }),
            edited(|_, _| {}),
        ),
        base(
            "prefix windows",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, |config, step| {
                config.attention.use_rswa = true;
                config.attention.rswa_window = 24;
                step.tensors.rswa_prefix_lens = Some(vec![8, 3, 16, 5, 0]);
            }),
            edited(|_, _| {}),
        ),
    ];
    let mut captured = base(
        "captured",
        FAMILY,
        Case::new(
            config(),
            all,
            &[(1, 40), (1, 70), (1, 3), (1, 33)],
            (2, 2),
            no_edit,
        ),
        edited(|_, record| {
            record.schedule.max_num_splits = 3;
            record.schedule.num_splits = vec![2, 3, 1, 2, 1, 1];
        }),
    );
    captured.case.promise = Some(promise(3, 10, 1, Some(1)));
    bases.push(captured);
    bases
}

fn promise(
    max_num_splits: u32,
    max_work_items: u32,
    max_query_len: u32,
    uniform_query_len: Option<u32>,
) -> LaunchPromise {
    LaunchPromise {
        max_num_splits,
        max_work_items,
        scratch_bytes: 0,
        max_query_len,
        uniform_query_len,
    }
}

fn windowed(window: u32) -> BuilderConfig {
    let mut config = config();
    config.kv_cache_spec.kind = KvCacheSpecKind::SlidingWindow;
    config.kv_cache_spec.sliding_window = Some(window);
    config.attention.sliding_windows = vec![window as i32];
    config.attention.logits_soft_cap = Some(5.1);
    config
}

/// Rank 1 of 2, one token each in turn.
fn sharded() -> BuilderConfig {
    let mut config = config();
    config.kv_cache_spec.dcp_sharded = true;
    config.kv_cache_spec.num_kv_heads = 1;
    config.parallel.dcp_world_size = 2;
    config.parallel.dcp_rank = 1;
    config
}

fn scheduler_call(case: &Case, record: &flash_attn::Metadata) -> flash_attn::SchedulerMetadataCall {
    let (config, common) = (&case.config, &case.step.cam);
    let world = config.parallel.dcp_world_size;
    let (keys, lens) = match &record.dcp_context_kv_lens {
        Some(lens) => (record.max_dcp_context_kv_len, lens.clone()),
        None => (record.max_seq_len, record.seq_lens.clone()),
    };
    flash_attn::SchedulerMetadataCall {
        batch_size: common.num_reqs,
        max_seqlen_q: record.max_query_len,
        max_seqlen_k: keys,
        num_heads_q: config.attention.num_heads * world,
        num_heads_kv: config.kv_cache_spec.num_kv_heads,
        headdim: config.kv_cache_spec.head_size,
        cache_seqlens: lens,
        qkv_dtype: config.attention.model_dtype,
        cu_seqlens_q: Tensor::Input(Input::QueryStartLoc),
        page_size: config.kv_cache_spec.block_size,
        causal: world == 1,
        window_size: (-1, -1),
        num_splits: record.max_num_splits,
        scheduler_metadata_len: 21,
    }
}

type PlanEdit = fn(&Case, &mut flashinfer::Metadata);

fn flashinfer_bases() -> Vec<Base> {
    const FAMILY: Family = Family::Flashinfer;
    let edited = |edit: PlanEdit| {
        move |case: &Case, metadata: &mut Metadata| match metadata {
            Metadata::Flashinfer(record) => edit(case, record),
            _ => panic!("another family"),
        }
    };
    let all = Causal::All(true);
    let mixed = |config| Case::new(config, Causal::All(true), &MIXED, PADDED, no_edit);
    let mut bases = vec![
        base(
            "mixed",
            FAMILY,
            mixed(config()),
            edited(|case, record| {
                split(case, record, 16, 16);
                decode(record).qo_indptr = Tensor::Slice(TensorSlice {
                    source: Input::QueryStartLoc,
                    start: 0,
                    end: 3,
                });
            }),
        ),
        base(
            "windowed",
            FAMILY,
            mixed(windowed(24)),
            edited(|case, record| {
                split(case, record, 32, 16);
                in_order(&mut decode(record).work);
                in_order(&mut prefill(record).work);
            }),
        ),
        base(
            "not causal, all prefills",
            FAMILY,
            Case::new(config(), Causal::All(false), &MIXED, (0, 0), no_edit),
            edited(|case, record| split(case, record, 32, 64)),
        ),
        base(
            "TensorRT-LLM",
            FAMILY,
            mixed(generated(TrtllmKernel::TrtllmGen)),
            edited(|_, record| {
                let rows = RowRange { start: 2, end: 5 };
                record.decode = Some(Decode::Trtllm(trtllm_decode(TrtllmKernel::TrtllmGen)));
                record.prefill = Some(Prefill::Trtllm(TrtllmPrefill {
                    block_tables: slice(Input::BlockTable, 2, 5),
                    seq_lens: slice(Input::SeqLens, 2, 5),
                    cum_seq_lens_q: Tensor::RebasedQueryStartLoc(rows.clone()),
                    cum_seq_lens_kv: Tensor::CuPageCounts(rows),
                    max_q_len: 20,
                    max_seq_len: 52,
                }));
            }),
        ),
        base(
            "XQA",
            FAMILY,
            Case::new(
                generated(TrtllmKernel::Xqa),
                all.clone(),
                &[(3, 40), (2, 17), (20, 52)],
                PADDED,
                no_edit,
            ),
            edited(|case, record| {
                let mut trtllm = trtllm_decode(TrtllmKernel::Xqa);
                trtllm.q_len_per_req = 3;
                trtllm.q_cu_seq_lens = Some(slice(Input::QueryStartLoc, 0, 3));
                trtllm.mask = Some(Matrix {
                    rows: 5,
                    columns: 2,
                    values: vec![1, 0, 3, 0, 7, 0, 1, 0, 3, 0],
                });
                reparted(case, record, 2, 5);
                record.decode = Some(Decode::Trtllm(trtllm));
            }),
        ),
        base(
            "two ranks",
            FAMILY,
            mixed(sharded()),
            edited(|case, record| split(case, record, 16, 16)),
        ),
        base(
            "two ranks, TensorRT-LLM",
            FAMILY,
            mixed({
                let mut config = sharded();
                config.device.trtllm_attention = true;
                config
            }),
            edited(|_, record| {
                record.decode = Some(Decode::Trtllm(TrtllmDecode {
                    seq_lens: Tensor::DcpLocal(DcpLocal {
                        source: DcpSource::SeqLens,
                        rows: RowRange { start: 0, end: 2 },
                    }),
                    dcp_query_start_loc: Some(slice(Input::QueryStartLoc, 0, 3)),
                    ..trtllm_decode(TrtllmKernel::TrtllmGen)
                }));
            }),
        ),
    ];
    let mut selected = base(
        "selected blocks",
        FAMILY,
        mixed(config()),
        edited(|case, record| {
            // Rows have 3, 2, 4 and 2 pages; the third's queries begin in its column 2, the fourth's in its column 1.
            select(decode(record), &[&[0, 2], &[1]], &[40, 17]);
            select(prefill(record), &[&[0, 2, 3], &[0, 1], &[]], &[52, 30, 0]);
            split(case, record, 16, 16);
        }),
    );
    selected.case.grant = Grant::Subset;
    bases.push(selected);
    let mut captured = base(
        "captured",
        FAMILY,
        Case::new(
            config(),
            all,
            &[(1, 40), (1, 70), (1, 3), (1, 33)],
            (2, 2),
            no_edit,
        ),
        edited(|case, record| {
            split(case, record, 32, 16);
            decode(record).cudagraph_batch_size = 6;
        }),
    );
    captured.case.promise = Some(promise(3, 12, 1, Some(1)));
    bases.push(captured);
    bases
}

fn slice(source: Input, start: u32, end: u32) -> Tensor {
    Tensor::Slice(TensorSlice { source, start, end })
}

fn generated(kernel: TrtllmKernel) -> BuilderConfig {
    let mut config = config();
    config.device.trtllm_attention = true;
    config.device.xqa = kernel == TrtllmKernel::Xqa;
    config
}

fn trtllm_decode(kernel: TrtllmKernel) -> TrtllmDecode {
    TrtllmDecode {
        kernel,
        block_tables: slice(Input::BlockTable, 0, 2),
        seq_lens: slice(Input::SeqLens, 0, 2),
        max_seq_len: 40,
        q_len_per_req: 1,
        q_cu_seq_lens: None,
        mask: None,
        dcp_query_start_loc: None,
    }
}

fn decode(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.decode {
        Some(Decode::Wrapper(plan)) => plan,
        _ => panic!("no decode plan"),
    }
}

fn prefill(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.prefill {
        Some(Prefill::Wrapper(plan)) => plan,
        _ => panic!("no prefill plan"),
    }
}

/// The same step with its first `decodes` rows as decodes; the prefill plan is that of the rows after them.
fn reparted(case: &Case, record: &mut flashinfer::Metadata, decodes: u32, tokens: u32) {
    let common = &case.step.cam;
    let rows = RowRange {
        start: decodes,
        end: common.num_reqs,
    };
    record.num_decodes = decodes;
    record.num_decode_tokens = tokens;
    record.num_prefills = common.num_reqs - decodes;
    record.num_prefill_tokens = common.num_actual_tokens - tokens;
    // The plain builder took all rows for prefills.
    let plan = prefill(record);
    let skip = decodes as usize;
    let pages = plan.paged_kv_indptr[skip];
    plan.paged_kv_indptr = plan.paged_kv_indptr[skip..]
        .iter()
        .map(|sum| sum - pages)
        .collect();
    plan.paged_kv_last_page_len.drain(..skip);
    plan.seq_lens.drain(..skip);
    plan.qo_indptr = Tensor::RebasedQueryStartLoc(rows.clone());
    plan.paged_kv_indices = Tensor::GatherPages(rows);
    let starts = case.step.tensors.query_start_loc[skip..].to_vec();
    plan.work = work(plan, &starts, (64, 64), 4);
}

/// Chosen columns of each row, whose lengths are `lens`.
fn select(plan: &mut Plan, columns: &[&[u32]], lens: &[i32]) {
    let Tensor::GatherPages(rows) = plan.paged_kv_indices.clone() else {
        panic!("no gathered pages");
    };
    let page = plan.page_size as i32;
    let mut sum = 0;
    plan.paged_kv_indptr = vec![0];
    for (row, (chosen, len)) in columns.iter().zip(lens).enumerate() {
        sum += chosen.len() as i32;
        plan.paged_kv_indptr.push(sum);
        let left_out = (len + page - 1) / page - chosen.len() as i32;
        plan.seq_lens[row] = (len - left_out * page).max(0);
    }
    plan.paged_kv_indices = Tensor::SelectPages(PageSelection {
        rows,
        columns: columns.concat(),
    });
}

/// Both parts' work in chunks of `chunk` keys and tiles of `tile` rows, dealt out backwards to all workers.
fn split(case: &Case, record: &mut flashinfer::Metadata, chunk: u32, tile: u32) {
    let starts = &case.step.tensors.query_start_loc;
    let decodes = record.num_decodes as usize;
    let workers = case.config.device.num_workers as usize;
    if let Some(Decode::Wrapper(plan)) = &mut record.decode {
        plan.work = work(plan, &starts[..=decodes], (chunk, tile), workers);
    }
    if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
        plan.work = work(plan, &starts[decodes..], (chunk, tile), workers);
    }
}

/// The items tile by tile, chunk by chunk.
fn in_order(work: &mut WorkList) {
    work.request_indices.reverse();
    work.qo_tile_indices.reverse();
    work.kv_tile_indices.reverse();
}

/// A work list of everything that each tile needs: chunks before its window and after its last key are left out.
fn work(plan: &Plan, starts: &[i32], (chunk, tile): (u32, u32), workers: usize) -> WorkList {
    let group = plan.num_qo_heads / plan.num_kv_heads;
    let sharded = plan.dcp_world_size > 1;
    let whole = matches!(plan.paged_kv_indices, Tensor::GatherPages(_));
    let (mut items, mut merge_indptr) = (Vec::new(), vec![0]);
    for (row, &len) in plan.seq_lens.iter().enumerate() {
        let query = starts[row + 1] - starts[row];
        for index in 0..(query as u32 * group).div_ceil(tile) {
            let first = (index * tile / group) as i32;
            let last = ((((index + 1) * tile - 1) / group) as i32).min(query - 1);
            let high = match plan.causal && !sharded {
                true => len - query + last + 1,
                false => len,
            };
            let low = match plan.window_left {
                left if left >= 0 && whole && !sharded => len - query + first - left,
                _ => 0,
            };
            let chunks = low.max(0) as u32 / chunk..(high.max(0) as u32).div_ceil(chunk).max(1);
            for part in chunks {
                items.push((row as i32, index as i32, part as i32));
            }
            merge_indptr.push(items.len() as i32);
        }
    }
    let split_kv = merge_indptr.windows(2).any(|pair| pair[1] - pair[0] > 1);
    items.reverse();
    let workers = items.len().clamp(1, workers);
    WorkList {
        kv_chunk_size: chunk,
        cta_tile_q: tile,
        request_indices: items.iter().map(|item| item.0).collect(),
        qo_tile_indices: items.iter().map(|item| item.1).collect(),
        kv_tile_indices: items.iter().map(|item| item.2).collect(),
        worker_indptr: (0..=workers)
            .map(|worker| (worker * items.len() / workers) as i32)
            .collect(),
        merge_indptr,
        split_kv,
    }
}

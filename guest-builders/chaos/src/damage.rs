//! Damage to metadata: any field of a record, made wrong by a seed. It must never know which damage a verifier should refuse.

mod mamba;

use timetable_guest::types::{
    Causal, Dtype, Input, KvCacheLayout, PaddedTensor, RowRange, Scratch, Tensor, TensorSlice,
    flash_attn::{self, TileOrder},
    flashinfer::{self, Decode, Plan, PlanFunction, Prefill},
};

use crate::{Command, Mischief, command::Random};

mod flash_mla;
mod triton_attn;

/// A field, by reference.
pub enum Place<'m> {
    /// An unsigned number.
    U32(&'m mut u32),
    /// An unsigned number or none.
    MaybeU32(&'m mut Option<u32>),
    /// A signed number.
    I32(&'m mut i32),
    /// A real number.
    F64(&'m mut f64),
    /// A real number or none.
    MaybeF64(&'m mut Option<f64>),
    /// A flag.
    Flag(&'m mut bool),
    /// A list.
    List(&'m mut Vec<i32>),
    /// A reference to a tensor.
    Tensor(&'m mut Tensor),
    /// A reference or none.
    MaybeTensor(&'m mut Option<Tensor>),
    /// An element type.
    Dtype(&'m mut Dtype),
    /// A cache layout.
    Layout(&'m mut KvCacheLayout),
    /// A plan function.
    Function(&'m mut PlanFunction),
    /// A causal flag.
    Causal(&'m mut Causal),
    /// Scratch, as a shape.
    Scratch(&'m mut Scratch),
    /// A reference within a buffer of so many rows.
    Padded(&'m mut PaddedTensor),
    /// A range of rows, by value.
    Range(&'m mut RowRange),
}

impl Place<'_> {
    /// Has it elements, of which one can be missing or there twice?
    fn has_elements(&self) -> bool {
        match self {
            Place::List(list) => !list.is_empty(),
            Place::Scratch(_) => true,
            _ => false,
        }
    }

    const fn is_tensor(&self) -> bool {
        matches!(self, Place::Tensor(_) | Place::Padded(_))
    }
}

/// A record whose fields can be damaged.
pub trait Damage {
    /// The fields' names.
    const FIELDS: &'static [&'static str];

    /// The fields that this record has, by name.
    fn places(&mut self) -> Vec<(&'static str, Place<'_>)>;

    /// Two lists or more: those that this record has; where it has too few, tensors become lists, by value.
    fn lists(&mut self) -> Vec<&mut Vec<i32>> {
        let (mut lists, mut tensors) = (Vec::new(), Vec::new());
        for (_, place) in self.places() {
            match place {
                Place::List(list) => lists.push(list),
                Place::Tensor(tensor) => tensors.push(tensor),
                Place::Padded(padded) => tensors.push(&mut padded.tensor),
                _ => {}
            }
        }
        let missing = 2_usize.saturating_sub(lists.len());
        for tensor in tensors.into_iter().take(missing) {
            *tensor = Tensor::Values(Vec::new());
            if let Tensor::Values(list) = tensor {
                lists.push(list);
            }
        }
        lists
    }

    /// Good metadata, in one of several ways: `turn` chooses.
    fn vary(&mut self, turn: u64);

    /// Damages the command's field, or one that the seed chooses, in its way.
    fn damage(&mut self, command: &Command) {
        let mut random = Random::new(u64::from(command.seed));
        let mut places = self.places();
        places.retain(|(name, _)| command.field.as_ref().is_none_or(|field| field == name));
        if matches!(command.mischief, Mischief::Drop | Mischief::Duplicate) {
            // A record without lists has tensors, which have rows.
            let has_lists = places.iter().any(|(_, place)| place.has_elements());
            places.retain(|(_, place)| match has_lists {
                true => place.has_elements(),
                false => place.is_tensor(),
            });
        }
        if places.is_empty() {
            return;
        }
        let at = random.below(places.len());
        let (_, place) = places.swap_remove(at);
        hit(place, command.mischief, &mut random);
    }

    /// Puts one list of `len` zeros into two fields: the same memory twice.
    fn alias_lists(&mut self, len: usize) {
        let list = zeros(len);
        let mut again = Some(
            // SAFETY: none that Rust knows: two owners of one allocation, which is the point. Both are lowered into the result
            // and read by the host, which refuses them; the instance is never entered again.
            unsafe { Vec::from_raw_parts(list.as_ptr().cast_mut(), list.len(), list.capacity()) },
        );
        let mut first = Some(list);
        for field in self.lists() {
            if let Some(list) = first.take().or_else(|| again.take()) {
                *field = list;
            }
        }
        // A record with fewer lists keeps what is left from being freed twice.
        std::mem::forget((first, again));
    }

    /// Puts a list of `len` zeros into the first field that is one.
    fn put_long_list(&mut self, len: usize) {
        if let Some(field) = self.lists().into_iter().next() {
            *field = zeros(len);
        }
    }
}

/// Zeros that cost nothing: a guest's fresh memory has no other.
fn zeros(len: usize) -> Vec<i32> {
    let mut list: Vec<i32> = Vec::with_capacity(len);
    if cfg!(target_arch = "wasm32") {
        // SAFETY: wasm memory is always initialised, and every bit pattern is an i32.
        unsafe { list.set_len(len) };
    } else {
        list.resize(len, 0);
    }
    list
}

fn hit(place: Place<'_>, mischief: Mischief, random: &mut Random) {
    let wild = mischief == Mischief::Wild;
    let more = random.below(2) == 0;
    match place {
        Place::U32(value) if wild => *value = pick(random, &[u32::MAX, 1 << 30, 1 << 31]),
        Place::U32(value) => {
            *value = if more {
                value.wrapping_add(1)
            } else {
                value.wrapping_sub(1)
            };
        }
        Place::MaybeU32(value) => match value {
            Some(value) => hit(Place::U32(value), mischief, random),
            None => *value = Some(1),
        },
        Place::I32(value) => *value = number(*value, wild, more, random),
        Place::F64(value) if wild => *value = pick(random, &[f64::NAN, f64::INFINITY, -1e300]),
        Place::F64(value) => *value += if more { 1.0 } else { -1.0 },
        Place::MaybeF64(value) => {
            *value = match value {
                Some(_) if wild => None,
                Some(value) => Some(*value + 1.0),
                None => Some(30.0),
            };
        }
        Place::Flag(flag) => *flag = !*flag,
        Place::List(list) => damage_list(list, mischief, more, random),
        Place::Tensor(tensor) => damage_tensor(tensor, mischief, more, random),
        Place::MaybeTensor(tensor) => match tensor {
            Some(tensor) => damage_tensor(tensor, mischief, more, random),
            None => *tensor = Some(Tensor::Input(Input::SlotMapping)),
        },
        Place::Dtype(dtype) => *dtype = another(*dtype, Dtype::ALL),
        Place::Layout(layout) => *layout = another(*layout, KvCacheLayout::ALL),
        Place::Function(function) => {
            // The two decode functions are both right for a decode.
            *function = match function {
                PlanFunction::BatchDecodePlan | PlanFunction::FastDecodePlan => {
                    PlanFunction::BatchPrefillPlan
                }
                _ => PlanFunction::BatchDecodePlan,
            };
        }
        Place::Causal(causal) => {
            *causal = match causal {
                Causal::All(_) if wild => Causal::PerRequest,
                Causal::All(flag) => Causal::All(!*flag),
                Causal::PerRequest => Causal::All(true),
            };
        }
        Place::Scratch(scratch) => damage_numbers(&mut scratch.shape, mischief, more, random),
        Place::Padded(padded) => match (mischief, random.below(3)) {
            (Mischief::OffByOne | Mischief::Wild, 0) => {
                hit(Place::U32(&mut padded.rows), mischief, random);
            }
            (Mischief::OffByOne | Mischief::Wild, 1) => {
                padded.fill = number(padded.fill, wild, more, random);
            }
            _ => damage_tensor(&mut padded.tensor, mischief, more, random),
        },
        Place::Range(rows) if wild => {
            *rows = RowRange {
                start: u32::MAX,
                end: 0,
            }
        }
        Place::Range(rows) => step(rows, more),
    }
}

/// A shape, or rows that are named.
fn damage_numbers(numbers: &mut Vec<u32>, mischief: Mischief, more: bool, random: &mut Random) {
    let at = random.below(numbers.len().max(1));
    match mischief {
        Mischief::Duplicate => numbers.insert(at, numbers.get(at).copied().unwrap_or(1)),
        _ if numbers.is_empty() => numbers.push(0),
        Mischief::Drop => drop(numbers.remove(at)),
        Mischief::Wild => numbers[at] = u32::MAX,
        _ if more => numbers[at] = numbers[at].wrapping_add(1),
        _ => numbers[at] = numbers[at].wrapping_sub(1),
    }
}

fn number(value: i32, wild: bool, more: bool, random: &mut Random) -> i32 {
    if wild {
        pick(random, &[i32::MAX, i32::MIN, 1 << 30])
    } else if more {
        value.wrapping_add(1)
    } else {
        value.wrapping_sub(1)
    }
}

fn damage_list(list: &mut Vec<i32>, mischief: Mischief, more: bool, random: &mut Random) {
    if list.is_empty() {
        list.push(0);
        return;
    }
    let at = random.below(list.len());
    match mischief {
        Mischief::Drop => drop(list.remove(at)),
        Mischief::Duplicate => list.insert(at, list[at]),
        _ => list[at] = number(list[at], mischief == Mischief::Wild, more, random),
    }
}

fn step(rows: &mut RowRange, more: bool) {
    if more {
        rows.end = rows.end.wrapping_add(1);
    } else {
        rows.start = rows.start.wrapping_add(1);
    }
}

fn damage_tensor(tensor: &mut Tensor, mischief: Mischief, more: bool, random: &mut Random) {
    if mischief == Mischief::Wild {
        *tensor = Tensor::Values(vec![i32::MAX, i32::MIN, 1 << 30]);
        return;
    }
    match tensor {
        Tensor::Values(list) => damage_list(list, mischief, more, random),
        // Another row's state, one too many, one too few.
        Tensor::StateIndices(states) => damage_numbers(&mut states.rows, mischief, more, random),
        Tensor::ExtraRows(extra) => damage_numbers(&mut extra.rows, mischief, more, random),
        Tensor::RowMask(rows) | Tensor::RowTokens(rows) => {
            damage_numbers(rows, mischief, more, random);
        }
        Tensor::RebasedQueryStartLoc(rows)
        | Tensor::GatherPages(rows)
        | Tensor::ContextLens(rows)
        | Tensor::HasContext(rows)
        | Tensor::CuPageCounts(rows) => step(rows, more),
        Tensor::Slice(slice) => slice.end = slice.end.wrapping_add(1),
        Tensor::Input(source) => {
            *tensor = Tensor::Slice(TensorSlice {
                source: *source,
                start: u32::from(!more),
                end: if more { 1 << 20 } else { 2 },
            });
        }
        other => *other = Tensor::TokenToRow,
    }
}

fn pick<T: Copy>(random: &mut Random, values: &[T]) -> T {
    values[random.below(values.len())]
}

fn another<T: Copy + PartialEq>(value: T, all: &[T]) -> T {
    all.iter()
        .copied()
        .find(|other| *other != value)
        .unwrap_or(value)
}

impl Damage for flash_attn::Metadata {
    const FIELDS: &'static [&'static str] = &[
        "num_actual_tokens",
        "max_query_len",
        "query_start_loc",
        "max_seq_len",
        "seq_lens",
        "block_table",
        "slot_mapping",
        "causal",
        "max_dcp_context_kv_len",
        "dcp_context_kv_lens",
        "num_decode_reqs",
        "num_prefill_reqs",
        "num_decode_tokens",
        "num_prefill_tokens",
        "max_num_splits",
        "mm_prefix_query_range",
        "rswa_prefix_lens",
        "rswa_window",
        "schedule.max_num_splits",
        "schedule.num_splits",
        "schedule.tile_order",
    ];

    fn places(&mut self) -> Vec<(&'static str, Place<'_>)> {
        let flash_attn::Metadata {
            num_actual_tokens,
            max_query_len,
            query_start_loc,
            max_seq_len,
            seq_lens,
            block_table,
            slot_mapping,
            causal,
            max_dcp_context_kv_len,
            dcp_context_kv_lens,
            num_decode_reqs,
            num_prefill_reqs,
            num_decode_tokens,
            num_prefill_tokens,
            max_num_splits,
            // A record for conformance that no impl executes.
            scheduler_metadata: _,
            mm_prefix_query_range,
            rswa_prefix_lens,
            rswa_window,
            schedule,
        } = self;
        let mut places = vec![
            ("num_actual_tokens", Place::U32(num_actual_tokens)),
            ("max_query_len", Place::U32(max_query_len)),
            ("query_start_loc", Place::Tensor(query_start_loc)),
            ("max_seq_len", Place::U32(max_seq_len)),
            ("seq_lens", Place::Tensor(seq_lens)),
            ("block_table", Place::Tensor(block_table)),
            ("slot_mapping", Place::Tensor(slot_mapping)),
            ("causal", Place::Causal(causal)),
            ("max_dcp_context_kv_len", Place::U32(max_dcp_context_kv_len)),
            (
                "dcp_context_kv_lens",
                Place::MaybeTensor(dcp_context_kv_lens),
            ),
            ("num_decode_reqs", Place::U32(num_decode_reqs)),
            ("num_prefill_reqs", Place::U32(num_prefill_reqs)),
            ("num_decode_tokens", Place::U32(num_decode_tokens)),
            ("num_prefill_tokens", Place::U32(num_prefill_tokens)),
            ("max_num_splits", Place::U32(max_num_splits)),
            (
                "mm_prefix_query_range",
                Place::MaybeTensor(mm_prefix_query_range),
            ),
            ("rswa_prefix_lens", Place::MaybeTensor(rswa_prefix_lens)),
            ("rswa_window", Place::U32(rswa_window)),
            (
                "schedule.max_num_splits",
                Place::U32(&mut schedule.max_num_splits),
            ),
            ("schedule.num_splits", Place::List(&mut schedule.num_splits)),
        ];
        if let TileOrder::Rows(order) = &mut schedule.tile_order {
            places.push(("schedule.tile_order", Place::List(order)));
        }
        places
    }

    fn vary(&mut self, turn: u64) {
        // Any order of the rows is a good one.
        if let TileOrder::Rows(order) = &mut self.schedule.tile_order
            && !order.is_empty()
        {
            let by = turn as usize % order.len();
            order.rotate_left(by);
        }
    }
}

macro_rules! plan_fields {
    ($part:literal) => {
        [
            concat!($part, ".function"),
            concat!($part, ".qo_indptr"),
            concat!($part, ".paged_kv_indptr"),
            concat!($part, ".paged_kv_indices"),
            concat!($part, ".paged_kv_last_page_len"),
            concat!($part, ".seq_lens"),
            concat!($part, ".num_qo_heads"),
            concat!($part, ".num_kv_heads"),
            concat!($part, ".head_dim"),
            concat!($part, ".page_size"),
            concat!($part, ".causal"),
            concat!($part, ".sm_scale"),
            concat!($part, ".window_left"),
            concat!($part, ".logits_soft_cap"),
            concat!($part, ".q_data_type"),
            concat!($part, ".kv_data_type"),
            concat!($part, ".o_data_type"),
            concat!($part, ".fixed_split_size"),
            concat!($part, ".disable_split_kv"),
            concat!($part, ".q_len_per_req"),
            concat!($part, ".dcp_world_size"),
            concat!($part, ".cudagraph_batch_size"),
            concat!($part, ".work.kv_chunk_size"),
            concat!($part, ".work.cta_tile_q"),
            concat!($part, ".work.request_indices"),
            concat!($part, ".work.qo_tile_indices"),
            concat!($part, ".work.kv_tile_indices"),
            concat!($part, ".work.worker_indptr"),
            concat!($part, ".work.merge_indptr"),
            concat!($part, ".work.split_kv"),
        ]
    };
}

const DECODE: [&str; 30] = plan_fields!("decode");
const PREFILL: [&str; 30] = plan_fields!("prefill");
const OUTER: [&str; 10] = [
    "kv_cache_layout",
    "num_actual_tokens",
    "slot_mapping",
    "q_data_type_prefill",
    "q_data_type_decode",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "causal",
];
const FLASHINFER: [&str; 70] = {
    let mut all = [""; 70];
    let mut at = 0;
    while at < 70 {
        all[at] = if at < 10 {
            OUTER[at]
        } else if at < 40 {
            DECODE[at - 10]
        } else {
            PREFILL[at - 40]
        };
        at += 1;
    }
    all
};

impl Damage for flashinfer::Metadata {
    const FIELDS: &'static [&'static str] = &FLASHINFER;

    fn places(&mut self) -> Vec<(&'static str, Place<'_>)> {
        let flashinfer::Metadata {
            kv_cache_layout,
            num_actual_tokens,
            slot_mapping,
            q_data_type_prefill,
            q_data_type_decode,
            num_decodes,
            num_decode_tokens,
            num_prefills,
            num_prefill_tokens,
            causal,
            prefill,
            decode,
        } = self;
        let outer = [
            Place::Layout(kv_cache_layout),
            Place::U32(num_actual_tokens),
            Place::Tensor(slot_mapping),
            Place::Dtype(q_data_type_prefill),
            Place::Dtype(q_data_type_decode),
            Place::U32(num_decodes),
            Place::U32(num_decode_tokens),
            Place::U32(num_prefills),
            Place::U32(num_prefill_tokens),
            Place::Flag(causal),
        ];
        let mut places: Vec<_> = OUTER.into_iter().zip(outer).collect();
        if let Some(Decode::Wrapper(plan)) = decode {
            places.extend(DECODE.into_iter().zip(plan_places(plan)));
        }
        if let Some(Prefill::Wrapper(plan)) = prefill {
            places.extend(PREFILL.into_iter().zip(plan_places(plan)));
        }
        places
    }

    fn vary(&mut self, turn: u64) {
        let decode = self.decode.as_mut().and_then(|decode| match decode {
            Decode::Wrapper(plan) => Some(plan),
            Decode::Trtllm(_) => None,
        });
        let prefill = self.prefill.as_mut().and_then(|prefill| match prefill {
            Prefill::Wrapper(plan) => Some(plan),
            Prefill::Trtllm(_) => None,
        });
        // One worker may do it all, whichever.
        for plan in decode.into_iter().chain(prefill) {
            let starts = &mut plan.work.worker_indptr;
            let (workers, items) = (starts.len() - 1, starts.last().copied().unwrap_or(0));
            let chosen = turn as usize % workers.max(1);
            for (worker, start) in starts.iter_mut().enumerate() {
                *start = if worker <= chosen { 0 } else { items };
            }
        }
    }
}

fn plan_places(plan: &mut Plan) -> [Place<'_>; 30] {
    let Plan {
        function,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        seq_lens,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        o_data_type,
        fixed_split_size,
        disable_split_kv,
        q_len_per_req,
        dcp_world_size,
        cudagraph_batch_size,
        work,
    } = plan;
    [
        Place::Function(function),
        Place::Tensor(qo_indptr),
        Place::List(paged_kv_indptr),
        Place::Tensor(paged_kv_indices),
        Place::List(paged_kv_last_page_len),
        Place::List(seq_lens),
        Place::U32(num_qo_heads),
        Place::U32(num_kv_heads),
        Place::U32(head_dim),
        Place::U32(page_size),
        Place::Flag(causal),
        Place::F64(sm_scale),
        Place::I32(window_left),
        Place::MaybeF64(logits_soft_cap),
        Place::Dtype(q_data_type),
        Place::Dtype(kv_data_type),
        Place::Dtype(o_data_type),
        Place::I32(fixed_split_size),
        Place::Flag(disable_split_kv),
        Place::U32(q_len_per_req),
        Place::U32(dcp_world_size),
        Place::U32(cudagraph_batch_size),
        Place::U32(&mut work.kv_chunk_size),
        Place::U32(&mut work.cta_tile_q),
        Place::List(&mut work.request_indices),
        Place::List(&mut work.qo_tile_indices),
        Place::List(&mut work.kv_tile_indices),
        Place::List(&mut work.worker_indptr),
        Place::List(&mut work.merge_indptr),
        Place::Flag(&mut work.split_kv),
    ]
}

//! Small guests, written instruction by instruction, that behave well or badly on purpose; and fixtures.
//!
//! A guest is a core module in the canonical ABI's shape, made a component by wit-component with the contract in `wit/`. Its
//! results are records laid out in its data segment, so that a forged result is a matter of some bytes.
#![allow(dead_code, reason = "each test file uses a part")]

use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_sandbox::{Limits, Sandbox};
use timetable_types::*;
use wasm_encoder::{
    BlockType, CodeSection, ConstExpr, DataSection, EntityType, ExportKind, ExportSection,
    Function, FunctionSection, GlobalSection, GlobalType, ImportSection, Instruction as I, MemArg,
    MemorySection, MemoryType, Module, TypeSection, ValType,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};

/// What a function of the guest does before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing: it behaves.
    Nothing,
    Unreachable,
    DivideByZero,
    OutOfBounds,
    StackOverflow,
    Loop,
    /// Grows its memory by that many pages of 64 KiB.
    Grow(i32),
    /// Returns an error: the batch is declined.
    Decline,
    /// memory.fill of nearly its whole memory, for ever.
    FillForEver,
}

/// What `build` returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Metadata that fits the batch, with that many splits of every row promised and an empty schedule.
    Metadata { splits: u32 },
    /// A split list of that pointer and length.
    SplitList { pointer: u32, len: u32 },
    /// Two lists of that many elements each, over the same memory.
    TwoLists { len: u32 },
    /// A tensor with a case that does not exist.
    BadCase,
    /// The batch is declined.
    Declined(&'static str),
    /// A declining message that is not UTF-8.
    BadText,
    /// The lengths of three input lists, in num_decode_reqs, num_prefill_reqs, num_decode_tokens.
    InputLengths,
}

#[derive(Clone, Debug)]
pub struct Guest {
    pub package: &'static str,
    pub interface: &'static str,
    pub name: &'static str,
    pub needs: &'static [HostInput],
    pub create: Act,
    /// A constructor that returns an error.
    pub refuse_config: bool,
    pub build: Act,
    /// The first call of `build` that does `build`'s act, counted from 1 over all instances' own calls.
    pub from_call: i32,
    pub answer: Answer,
    /// Says that every row decodes, which the verifier takes under decode context parallelism only.
    pub counts_decodes: bool,
    /// Initial pages of memory.
    pub pages: u64,
    pub wasi: bool,
    /// Replacements in the text of the contract, for guests of another contract.
    pub edit: &'static [(&'static str, &'static str)],
    /// The version in the export names.
    pub version: &'static str,
    /// Functions that the module does not export (they are gone from the contract by `edit`).
    pub without: &'static [&'static str],
}

impl Default for Guest {
    fn default() -> Self {
        Guest {
            package: "timetable:attention",
            interface: "flash-attn",
            name: "test guest",
            needs: &[HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            create: Act::Nothing,
            refuse_config: false,
            build: Act::Nothing,
            from_call: 1,
            answer: Answer::Metadata { splits: 1 },
            counts_decodes: true,
            pages: 2,
            wasi: false,
            edit: &[],
            version: "0.1.0",
            without: &[],
        }
    }
}

const CREATED: u32 = 64;
const INFO: u32 = 128;
const TEXTS: u32 = 256;
const PROMISE: u32 = 512;
const BUILT: u32 = 1024;
const HEAP: i32 = 8192;
const REFUSAL: &str = "no such head size (7)";

/// The canonical ABI's memory layout, written field by field.
struct Record {
    bytes: Vec<u8>,
}

impl Record {
    fn new() -> Record {
        Record { bytes: Vec::new() }
    }
    fn align(&mut self, to: usize) {
        while !self.bytes.len().is_multiple_of(to) {
            self.bytes.push(0);
        }
    }
    fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }
    fn u32(&mut self, value: u32) -> u32 {
        self.align(4);
        let at = self.bytes.len() as u32;
        self.bytes.extend(value.to_le_bytes());
        at
    }
    /// A variant case of `size` bytes without payload, aligned to 4.
    fn empty_case(&mut self, case: u8, size: usize) {
        self.align(4);
        self.bytes.push(case);
        self.bytes.resize(self.bytes.len() + size - 1, 0);
    }
    /// `tensor.input(input)`.
    fn input(&mut self, input: Input) {
        self.empty_case(0, 20);
        let at = self.bytes.len() - 16;
        self.bytes[at] = input as u8;
    }
}

/// Offsets within `result<metadata, _>` that the guest's code fills.
struct Built {
    bytes: Vec<u8>,
    num_actual_tokens: u32,
    max_query_len: u32,
    max_seq_len: u32,
    num_decode_reqs: u32,
    num_prefill_reqs: u32,
    num_decode_tokens: u32,
}

fn built(answer: &Answer) -> Built {
    let mut r = Record::new();
    if let Answer::Declined(_) | Answer::BadText = answer {
        r.empty_case(1, 4);
        r.empty_case(0, 4); // invalid-value
        r.u32(TEXTS + 128);
        r.u32(match answer {
            Answer::Declined(message) => message.len() as u32,
            _ => 4,
        });
        r.bytes.resize(512, 0);
        // The code writes its fields beyond the error, where nobody reads.
        let at = 256;
        return Built {
            bytes: r.bytes,
            num_actual_tokens: at,
            max_query_len: at,
            max_seq_len: at,
            num_decode_reqs: at,
            num_prefill_reqs: at,
            num_decode_tokens: at,
        };
    }
    r.empty_case(0, 4); // ok
    let num_actual_tokens = r.u32(0);
    let max_query_len = r.u32(0);
    if *answer == Answer::BadCase {
        r.empty_case(200, 20);
    } else {
        r.input(Input::QueryStartLoc);
    }
    let max_seq_len = r.u32(0);
    r.input(Input::SeqLens);
    r.input(Input::BlockTable);
    r.input(Input::SlotMapping);
    r.u8(0); // causal.all(true)
    r.u8(1);
    r.u32(0); // max-dcp-context-kv-len
    r.empty_case(0, 24); // dcp-context-kv-lens
    let num_decode_reqs = r.u32(0);
    let num_prefill_reqs = r.u32(0);
    let num_decode_tokens = r.u32(0);
    r.u32(0); // num-prefill-tokens
    r.u32(0); // max-num-splits
    r.empty_case(0, 96); // scheduler-metadata
    r.empty_case(0, 24); // mm-prefix-query-range
    r.empty_case(0, 24); // rswa-prefix-lens
    r.u32(0); // rswa-window
    let (splits, pointer, len) = match answer {
        Answer::Metadata { splits } => (*splits, 0, 0),
        Answer::SplitList { pointer, len } => (1, *pointer, *len),
        Answer::TwoLists { len } => (1, 0, *len),
        _ => (1, 0, 0),
    };
    r.u32(splits);
    r.u32(pointer);
    r.u32(len);
    if let Answer::TwoLists { len } = answer {
        r.empty_case(1, 4); // tile-order.rows
        r.u32(0);
        r.u32(*len);
    } else {
        r.empty_case(0, 12);
    }
    Built {
        bytes: r.bytes,
        num_actual_tokens,
        max_query_len,
        max_seq_len,
        num_decode_reqs,
        num_prefill_reqs,
        num_decode_tokens,
    }
}

fn info(guest: &Guest) -> Vec<u8> {
    let mut r = Record::new();
    r.u32(TEXTS);
    r.u32(guest.name.len() as u32);
    r.u8(3); // always
    r.empty_case(1, 4); // reorder-batch-threshold: some(1)
    r.u32(1);
    r.empty_case(0, 8);
    r.u8(0); // supports-update-block-table
    r.u8(0);
    r.u32(TEXTS + 64);
    r.u32(guest.needs.len() as u32);
    r.align(8);
    r.bytes.extend(4096_u64.to_le_bytes());
    r.bytes
}

fn created(guest: &Guest) -> Vec<u8> {
    let mut r = Record::new();
    r.empty_case(u8::from(guest.refuse_config), 4);
    r.empty_case(0, 4);
    r.u32(TEXTS + 128);
    r.u32(REFUSAL.len() as u32);
    r.bytes
}

fn word(offset: u32) -> MemArg {
    MemArg {
        offset: u64::from(offset),
        align: 2,
        memory_index: 0,
    }
}

impl Guest {
    pub fn component(&self) -> Vec<u8> {
        let mut module = self.core_module();
        let mut resolve = wit_parser::Resolve::default();
        let package = resolve
            .push_str("contract.wit", &self.contract())
            .expect("the contract parses");
        let world = format!("{}-builder", self.interface);
        let world = resolve
            .select_world(&[package], Some(&world))
            .expect("the world exists");
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
            .expect("embed");
        ComponentEncoder::default()
            .module(&module)
            .expect("module")
            .validate(true)
            .encode()
            .expect("encode")
    }

    fn contract(&self) -> String {
        let files = [
            include_str!("../../../../wit/types.wit"),
            include_str!("../../../../wit/flash-attn.wit"),
            include_str!("../../../../wit/flashinfer.wit"),
            include_str!("../../../../wit/triton-attn.wit"),
            include_str!("../../../../wit/flash-mla.wit"),
            include_str!("../../../../wit/mamba.wit"),
        ];
        let mut text = files.join("\n");
        for (from, to) in self.edit {
            assert!(text.contains(from), "the contract has no {from:?}");
            text = text.replace(from, to);
        }
        if self.wasi {
            text = text.replace(
                "world flash-attn-builder {",
                "world flash-attn-builder { import wasi:clocks/wall-clock@0.2.0;",
            );
            text.push_str(
                "\npackage wasi:clocks@0.2.0 { interface wall-clock { now: func() -> u64; } }",
            );
        }
        text
    }

    /// The module alone: what a forgetful build hands over.
    pub fn core_module(&self) -> Vec<u8> {
        let interface = format!("{}/{}@{}", self.package, self.interface, self.version);
        let built = built(&self.answer);

        let mut types = TypeSection::new();
        let i32s = |n: usize| std::iter::repeat_n(ValType::I32, n);
        types.ty().function(i32s(1), i32s(1)); // 0
        types.ty().function([], []); // 1
        types.ty().function(i32s(4), i32s(1)); // 2
        types.ty().function(i32s(6), i32s(1)); // 3
        types.ty().function([], [ValType::I64]); // 4

        let mut imports = ImportSection::new();
        imports.import(
            &format!("[export]{interface}"),
            "[resource-new]builder",
            EntityType::Function(0),
        );
        let mut imported = 1;
        if self.wasi {
            imports.import(
                "wasi:clocks/wall-clock@0.2.0",
                "now",
                EntityType::Function(4),
            );
            imported += 1;
        }

        let names = [
            ("cabi_realloc".to_owned(), 2),
            (format!("{interface}#[static]builder.create"), 0),
            (format!("{interface}#[method]builder.info"), 0),
            (format!("{interface}#[method]builder.launch-promise"), 3),
            (format!("{interface}#[method]builder.build"), 0),
            (
                format!("{interface}#[method]builder.build-for-cudagraph-capture"),
                0,
            ),
            (format!("{interface}#[method]builder.build-for-drafting"), 0),
            (format!("{interface}#[method]builder.update-block-table"), 0),
            ("recurse".to_owned(), 1),
        ];
        let recurse = imported + names.len() as u32 - 1;
        let mut functions = FunctionSection::new();
        let mut exports = ExportSection::new();
        exports.export("memory", ExportKind::Memory, 0);
        for (index, (name, ty)) in names.iter().enumerate() {
            functions.function(*ty);
            let exported =
                *name != "recurse" && !self.without.iter().any(|gone| name.ends_with(gone));
            if exported {
                exports.export(name, ExportKind::Func, imported + index as u32);
            }
        }

        let mut memories = MemorySection::new();
        memories.memory(MemoryType {
            minimum: self.pages,
            maximum: None,
            memory64: false,
            shared: false,
            page_size_log2: None,
        });
        let mut globals = GlobalSection::new();
        let global = GlobalType {
            val_type: ValType::I32,
            mutable: true,
            shared: false,
        };
        globals.global(global, &ConstExpr::i32_const(HEAP)); // 0: the bump pointer
        globals.global(global, &ConstExpr::i32_const(0)); // 1: calls of build

        let mut code = CodeSection::new();
        let function = |instructions: &[I<'_>]| {
            let mut function = Function::new([(1, ValType::I32)]);
            instructions.iter().for_each(|i| {
                function.instruction(i);
            });
            function.instruction(&I::End);
            function
        };

        // cabi_realloc(old, old size, align, size): bump, 16-aligned.
        code.function(&function(&[
            I::GlobalGet(0),
            I::LocalSet(4),
            I::GlobalGet(0),
            I::LocalGet(3),
            I::I32Add,
            I::I32Const(15),
            I::I32Add,
            I::I32Const(-16),
            I::I32And,
            I::GlobalSet(0),
            I::LocalGet(4),
        ]));

        let mut create = act(self.create, recurse);
        create.extend([
            I::I32Const(HEAP),
            I::GlobalSet(0),
            I::I32Const(CREATED as i32),
            I::I32Const(7), // the representation: any number
            I::Call(0),
            I::I32Store(word(4)),
            I::I32Const(CREATED as i32),
        ]);
        if self.refuse_config {
            create = vec![I::I32Const(CREATED as i32)];
        }
        code.function(&function(&create));
        code.function(&function(&[I::I32Const(INFO as i32)]));
        code.function(&function(&[I::I32Const(PROMISE as i32)]));

        // Builds find (self, common, …) at their only parameter; common begins 4 bytes in.
        let mut build = vec![
            I::GlobalGet(1),
            I::I32Const(1),
            I::I32Add,
            I::GlobalSet(1),
            I::GlobalGet(1),
            I::I32Const(self.from_call),
            I::I32GeS,
            I::If(BlockType::Empty),
        ];
        build.extend(act(self.build, recurse));
        build.push(I::End);
        if self.wasi {
            build.extend([I::Call(1), I::Drop]);
        }
        let copy = |to: u32, from: u32| {
            [
                I::I32Const(BUILT as i32),
                I::LocalGet(0),
                I::I32Load(word(from)),
                I::I32Store(word(to)),
            ]
        };
        let mut fields = vec![
            (built.num_actual_tokens, 8),
            (built.max_query_len, 12),
            (built.max_seq_len, 16),
        ];
        if self.counts_decodes {
            fields.push((built.num_decode_reqs, 4));
        }
        if self.answer == Answer::InputLengths {
            fields.extend([
                (built.num_decode_reqs, 36),
                (built.num_prefill_reqs, 44),
                (built.num_decode_tokens, 52),
            ]);
        }
        if self.interface == "flash-attn" {
            fields
                .iter()
                .for_each(|(to, from)| build.extend(copy(*to, *from)));
        }
        let reset = [
            I::I32Const(HEAP),
            I::GlobalSet(0),
            I::I32Const(BUILT as i32),
        ];
        build.extend(reset.clone());
        for _ in 0..3 {
            code.function(&function(&build));
        }
        code.function(&function(&reset)); // update-block-table
        code.function(&function(&[I::Call(recurse), I::Call(recurse)]));

        let mut data = DataSection::new();
        let mut put = |at: u32, bytes: Vec<u8>| {
            data.active(0, &ConstExpr::i32_const(at as i32), bytes);
        };
        put(CREATED, created(self));
        put(INFO, info(self));
        put(TEXTS, self.name.as_bytes().to_vec());
        put(
            TEXTS + 64,
            self.needs.iter().map(|need| *need as u8).collect(),
        );
        put(
            TEXTS + 128,
            match &self.answer {
                Answer::Declined(message) => message.as_bytes().to_vec(),
                Answer::BadText => vec![0xff, 0xfe, 0xff, 0xfe],
                _ => REFUSAL.as_bytes().to_vec(),
            },
        );
        let mut promise = Record::new();
        promise.u32(match self.answer {
            Answer::Metadata { splits } => splits,
            _ => 1,
        }); // max-num-splits
        promise.u32(256); // max-work-items
        promise.align(8);
        promise.bytes.extend(4096_u64.to_le_bytes());
        promise.u32(1); // max-query-len
        promise.empty_case(0, 8);
        put(PROMISE, promise.bytes);
        put(BUILT, built.bytes);

        let mut module = Module::new();
        module
            .section(&types)
            .section(&imports)
            .section(&functions)
            .section(&memories)
            .section(&globals)
            .section(&exports)
            .section(&code)
            .section(&data);
        module.finish()
    }
}

fn act(act: Act, recurse: u32) -> Vec<I<'static>> {
    match act {
        Act::Nothing => vec![],
        Act::Unreachable => vec![I::Unreachable],
        Act::DivideByZero => vec![I::I32Const(1), I::I32Const(0), I::I32DivU, I::Drop],
        Act::OutOfBounds => vec![I::I32Const(i32::MAX), I::I32Load(word(0)), I::Drop],
        Act::StackOverflow => vec![I::Call(recurse)],
        Act::Loop => vec![I::Loop(BlockType::Empty), I::Br(0), I::End],
        Act::Grow(pages) => vec![I::I32Const(pages), I::MemoryGrow(0), I::Drop],
        Act::Decline => {
            let put = |at: u32, value: u32| {
                [
                    I::I32Const(BUILT as i32),
                    I::I32Const(value as i32),
                    I::I32Store(word(at)),
                ]
            };
            let mut code = vec![];
            code.extend(put(0, 1));
            code.extend(put(4, 0));
            code.extend(put(8, TEXTS + 128));
            code.extend(put(12, REFUSAL.len() as u32));
            code.extend([
                I::I32Const(HEAP),
                I::GlobalSet(0),
                I::I32Const(BUILT as i32),
                I::Return,
            ]);
            code
        }
        Act::FillForEver => vec![
            I::Loop(BlockType::Empty),
            I::I32Const(HEAP),
            I::I32Const(0),
            I::I32Const(100_000),
            I::MemoryFill(0),
            I::Br(0),
            I::End,
        ],
    }
}

pub fn sandbox() -> Sandbox {
    Sandbox::new(Limits::default()).expect("a sandbox")
}

/// A configuration of a small Llama on a CPU.
pub fn config() -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: 16,
            num_kv_heads: 3,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["model.layers.0.self_attn.attn".into()],
        attention: AttentionConfig {
            num_heads: 9,
            scale: 0.125,
            logits_soft_cap: None,
            sliding_windows: vec![-1],
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: "auto".into(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: 2048,
            max_num_blocks_per_req: 128,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::None,
            capture_sizes: vec![],
            max_capture_size: 0,
        },
        parallel: ParallelConfig {
            dcp_world_size: 1,
            dcp_rank: 0,
            cp_kv_cache_interleave_size: 1,
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability: (0, 0),
            num_workers: 4,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 8,
        model_runner_v2: true,
        options: vec![],
    }
}

/// `rows` decodes of rising lengths.
pub fn decodes(rows: u32) -> CommonAttentionMetadata {
    CommonAttentionMetadata {
        num_reqs: rows,
        num_actual_tokens: rows,
        max_query_len: 1,
        max_seq_len: rows,
        causal: Causal::All(true),
        block_table_width: 128,
        slot_mapping_len: rows,
        query_start_loc_cpu: (0..=rows as i32).collect(),
        seq_lens_cpu_upper_bound: (1..=rows as i32).collect(),
        is_prefilling: vec![0; rows as usize],
        dcp: None,
        encoder: None,
        fast_prefill: None,
        req_idx: vec![],
        mm_req_doc_ranges: vec![],
        replayssm_decode_base_cpu: vec![],
        extras: vec![],
    }
}

/// A plain FLASH_ATTN builder, written natively: one split for every row.
pub struct Plain {
    info: BuilderInfo,
}

impl Plain {
    pub fn boxed() -> Box<dyn MetadataBuilder> {
        Box::new(Plain {
            info: BuilderInfo {
                name: "plain".into(),
                cudagraph_support: CudagraphSupport::Always,
                reorder_batch_threshold: Some(1),
                varlen_cudagraph_max_query_len: None,
                supports_update_block_table: false,
                supports_draft_decode_metadata_update: false,
                needs: vec![],
                max_scratch_bytes: 0,
            },
        })
    }
}

impl MetadataBuilder for Plain {
    fn family(&self) -> Family {
        Family::FlashAttn
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        Ok(LaunchPromise {
            max_num_splits: 1,
            max_work_items: shape.num_reqs,
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: None,
        })
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        Ok(Metadata::FlashAttn(flash_attn::Metadata {
            num_actual_tokens: common.num_actual_tokens,
            max_query_len: common.max_query_len,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: common.max_seq_len,
            seq_lens: Tensor::Input(Input::SeqLens),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: common.causal.clone(),
            max_dcp_context_kv_len: 0,
            dcp_context_kv_lens: None,
            num_decode_reqs: common.num_reqs,
            num_prefill_reqs: 0,
            num_decode_tokens: 0,
            num_prefill_tokens: 0,
            max_num_splits: 0,
            scheduler_metadata: None,
            mm_prefix_query_range: None,
            rswa_prefix_lens: None,
            rswa_window: 0,
            schedule: flash_attn::Schedule {
                max_num_splits: 1,
                num_splits: vec![],
                tile_order: flash_attn::TileOrder::Natural,
            },
        }))
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        Ok(metadata.clone())
    }
}

/// Resident memory of this process, in KiB.
pub fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("VmRSS");
    line.split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse().ok())
        .expect("a number")
}

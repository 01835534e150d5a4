//! In the steady state neither the verifier nor the resolver allocates.
//!
//! Alone in its binary: the counter is the whole process's allocator.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use timetable_attention::{
    BlockTable, Grant, Resolver, Siblings, Verifier, VerifyContext,
    batch::{VirtualRows, max_virtual_rows},
    describe::StepDescription,
    plain_builder,
    types::{
        Family, Metadata,
        flash_attn::TileOrder,
        flashinfer::{Decode, Prefill},
    },
    verify_step,
};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches no memory that it returns.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(call: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    call();
    COUNT.with(Cell::get) - before
}

#[test]
fn verifying_and_resolving_allocate_once_and_then_never() {
    let slots: Vec<i64> = [116, 48].into_iter().chain(92..112).collect();
    let text = serde_json::json!({
        "query_start_loc": [0, 1, 2, 22],
        "seq_lens": [5, 17, 32],
        "num_reqs": 3,
        "num_actual_tokens": 22,
        "max_query_len": 20,
        "max_seq_len": 32,
        "block_table": [[7, 0], [2, 3], [5, 6]],
        "slot_mapping": slots,
        "kv_cache_spec": {"block_size": 16, "num_kv_heads": 2, "head_size": 64},
    })
    .to_string();
    let step = StepDescription::from_json(&text)
        .and_then(|step| step.validate())
        .expect("a good step");
    let inputs = step.inputs(&[]);
    let ctx: VerifyContext<'_> = VerifyContext {
        grant: Grant::Exact,
        ..step.context(&inputs)
    };
    let made: Vec<Metadata> = [
        Family::FlashAttn,
        Family::FlashMla,
        Family::Flashinfer,
        Family::TritonAttn,
    ]
    .into_iter()
    .map(|family| {
        let mut builder = plain_builder(family, &step.config).expect("plain");
        let mut metadata = builder.build(&step.step.cam, false).expect("built");
        if let Metadata::FlashAttn(record) = &mut metadata {
            record.schedule.tile_order = TileOrder::Rows(vec![2, 1, 0]);
        }
        metadata
    })
    .collect();
    let resolver = Resolver::new(&step.config, &step.step.cam, inputs);
    let mut verifier = Verifier::new();
    let mut out = Vec::new();
    let mut run = || {
        verify_step(&ctx).expect("a good step");
        for metadata in &made {
            verifier.verify(metadata, &ctx).expect("good metadata");
            let Metadata::Flashinfer(record) = metadata else {
                continue;
            };
            let plans = [
                record.decode.as_ref().map(|part| match part {
                    Decode::Wrapper(plan) => plan,
                    Decode::Trtllm(_) => panic!("plain builders plan"),
                }),
                record.prefill.as_ref().map(|part| match part {
                    Prefill::Wrapper(plan) => plan,
                    Prefill::Trtllm(_) => panic!("plain builders plan"),
                }),
            ];
            for plan in plans.into_iter().flatten() {
                let siblings = Siblings::pages(&plan.paged_kv_indptr);
                for tensor in [&plan.qo_indptr, &plan.paged_kv_indices] {
                    resolver
                        .resolve_into(tensor, siblings, &mut out)
                        .expect("in range");
                }
            }
        }
    };
    assert!(allocations(&mut run) > 0, "the counter counts");
    assert_eq!(allocations(&mut run), 0);
}

#[test]
fn a_step_is_cut_into_chunks_without_allocating() {
    const CHUNK: u32 = 8;
    let (rows, tokens, block_size) = (3, 40, 4);
    let capacity = max_virtual_rows(rows, tokens, CHUNK);
    let mut cut = VirtualRows::new(CHUNK, block_size, capacity).expect("blocks divide the chunk");
    let mut table = Vec::with_capacity(capacity * cut.columns.blocks_per_chunk);
    let data: Vec<i32> = (0..rows as i32 * 16).collect();
    let whole = BlockTable {
        data: &data,
        width: 16,
    };
    let mut most = 0;
    // The largest step first, as far as it may go.
    for (starts, lens) in [
        ([0, 1, 2, 40], [9, 17, 64]),
        ([0, 13, 26, 40], [29, 30, 29]),
        ([0, 1, 2, 3], [1, 8, 64]),
    ] {
        let allocated = allocations(|| {
            cut.cut(&starts, &lens, whole.width);
            cut.columns.gather_into(whole, &mut table);
        });
        assert_eq!(allocated, 0);
        most = most.max(cut.seq_lens.len());
    }
    assert!(most > rows, "a row was meant to have several chunks");
}

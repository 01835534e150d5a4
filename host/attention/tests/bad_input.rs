//! What bad input gets: one line each, with the value and the remedy, before anything runs. Texts of the field are held where
//! the rule is; these are ours.

use timetable_attention::{
    BlockTable,
    batch::{
        BlockTables, GroupStep, GroupTableConfig, PaddingValues, StepTensors, capture_batch,
        check_extras, make_local_attention_virtual_batches, mamba_get_block_table_tensor, pad_step,
    },
    graphs::CudagraphDispatcher,
    spec::{
        CacheSpec, ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec,
        TokensPerState,
    },
    types::{CaptureShape, CudagraphMode, Dtype, Extra, ExtraValue, MambaCacheMode, MambaType},
};

/// The error's text, which is one line.
fn text<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    let Err(error) = result else {
        panic!("it was accepted")
    };
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

fn full() -> FullAttentionSpec {
    FullAttentionSpec::new(16, 2, 64, Dtype::Bfloat16)
}

#[test]
fn inconsistent_specs_say_what_to_correct() {
    let validate = |spec: CacheSpec| text(spec.validate());
    let zero = |field: &str| {
        format!("{field} must be at least 1, got 0: correct the layer's KV cache spec")
    };
    let mut spec = full();
    spec.attention.block_size = 0;
    assert_eq!(validate(spec.into()), zero("block_size"));
    let mut spec = full();
    spec.attention.num_kv_heads = 0;
    assert_eq!(validate(spec.into()), zero("num_kv_heads"));
    let window = SlidingWindowSpec::new(16, 2, 64, Dtype::Bfloat16, 0);
    assert_eq!(validate(window.into()), zero("sliding_window"));
    let chunk = ChunkedLocalAttentionSpec::new(16, 2, 64, Dtype::Bfloat16, 0);
    assert_eq!(validate(chunk.into()), zero("attention_chunk_size"));
    let mut both = full();
    (both.sliding_window, both.attention_chunk_size) = (Some(16), Some(32));
    assert_eq!(
        validate(both.into()),
        "Model with both sliding window layers and chunked local attention layers is not supported."
    );
    let mut partial = full();
    partial.attention.tokens_per_state = TokensPerState {
        tokens: 3,
        states: 1,
    };
    assert_eq!(
        validate(partial.into()),
        "block_size 16 does not hold a whole number of states of 3/1 tokens: choose a block_size that is a multiple of 3"
    );
    let mamba = MambaSpec::new(
        16,
        MambaType::Mamba1,
        vec![vec![4], vec![8]],
        vec![Dtype::Float32],
    );
    assert_eq!(
        validate(mamba.into()),
        "a Mamba spec has 2 state shapes and 1 dtypes: give one dtype per shape"
    );
    assert_eq!(
        text(CacheSpec::merge(&[])),
        "a KV cache group needs at least one layer; it got none"
    );
}

#[test]
fn block_tables_refuse_what_does_not_fit() {
    let group = GroupTableConfig {
        block_size: 4,
        max_num_blocks_per_req: 2,
        slot_mapping_enabled: true,
        dcp_sharded: false,
    };
    let mut tables = BlockTables::new(3, &[group, group], None);
    tables.append_block_ids(1, &[&[5], &[6]], false).unwrap();
    assert_eq!(
        text(tables.append_block_ids(1, &[&[7], &[8, 9]], false)),
        "Block table write for request 1, group 1 exceeds row capacity (3 > 2)"
    );
    assert_eq!(
        (tables.row(0, 1), tables.row(1, 1)),
        ([5].as_slice(), [6].as_slice()),
        "nothing was written"
    );
    assert_eq!(
        text(tables.append_block_ids(3, &[&[7], &[8]], false)),
        "request slot 3 is not below max_num_reqs 3"
    );
    assert_eq!(
        text(tables.append_block_ids(0, &[&[7]], false)),
        "1 lists of block ids for 2 KV cache groups: give one list per group"
    );
}

/// One decode of length 9.
fn step() -> GroupStep {
    let tensors = StepTensors {
        query_start_loc: vec![0, 1],
        seq_lens: vec![9],
        block_table: vec![1, 2, 3],
        block_table_width: 3,
        slot_mapping: vec![12],
        positions: vec![8],
        ..StepTensors::default()
    };
    GroupStep::new(tensors, vec![9], 1, 1, 9)
}

#[test]
fn batches_that_fit_no_graph_are_refused() {
    let mut two = step();
    (two.cam.num_reqs, two.cam.num_actual_tokens) = (2, 2);
    assert_eq!(
        text(pad_step(&two, 1, 1, PaddingValues::default())),
        "a batch of 2 requests and 2 tokens does not fit a graph of 1 requests and 1 tokens: dispatch it to a larger one"
    );
    let shape = |num_tokens, num_reqs, uniform_query_len| CaptureShape {
        num_tokens,
        num_reqs,
        max_query_len: 3,
        uniform_query_len,
    };
    assert_eq!(
        text(capture_batch(&shape(8, 0, None), 4, 1024)),
        "a graph of 8 tokens needs at least one request"
    );
    assert_eq!(
        text(capture_batch(&shape(8, 2, None), 4, 1024)),
        "a graph of 8 tokens over 2 requests has a query of 4 tokens, above the promised 3"
    );
    assert_eq!(
        text(capture_batch(&shape(8, 3, Some(3)), 4, 1024)),
        "a graph of 8 tokens and 3 requests cannot have uniform queries of 3 tokens: capture 9 tokens in 3 requests"
    );
    assert_eq!(
        text(CudagraphDispatcher::new(
            CudagraphMode::FullDecodeOnly,
            3,
            8,
            &[3, 8],
            &[0]
        )),
        "capture size 8 is not a multiple of the uniform decode query length 3: round the capture sizes"
    );
}

#[test]
fn tables_and_chunks_that_contradict_are_refused() {
    assert_eq!(
        text(make_local_attention_virtual_batches(6, &step(), 4)),
        "attn_chunk_size 6 is not divisible by block_size 4: choose a block size that divides the chunk"
    );
    assert_eq!(
        text(make_local_attention_virtual_batches(0, &step(), 4)),
        "local attention needs a chunk, a block and a table of at least 1, got chunk 0, block 4, 3 columns"
    );
    let table = BlockTable {
        data: &[1, 2, 3],
        width: 3,
    };
    assert_eq!(
        text(mamba_get_block_table_tensor(
            table,
            &[9],
            4,
            1,
            MambaCacheMode::Align
        )),
        "row 0: state columns [2, 4) exceed the table's 3 columns (length 9): widen the table"
    );
}

#[test]
fn extras_that_contradict_the_batch_are_refused() {
    let extra = |name: &str, value| Extra {
        name: name.to_owned(),
        value,
    };
    assert_eq!(
        text(check_extras(&[extra("", ExtraValue::Integer(1))], 2)),
        "extra 0 has no name"
    );
    let twice = [
        extra("a", ExtraValue::Integer(1)),
        extra("a", ExtraValue::Device(2)),
    ];
    assert_eq!(text(check_extras(&twice, 2)), "extra \"a\" is given twice");
    assert_eq!(
        text(check_extras(&[extra("a", ExtraValue::Host(vec![0; 3]))], 2)),
        "extra \"a\" has 3 rows, the batch 2: cut it to the batch"
    );
}

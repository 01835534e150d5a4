//! The scatter into the KV cache: 8,192 tokens of 256 requests, pages in a random order. It must never know the peer.

use timetable_device_cuda::{
    driver::DevicePtr,
    kernels::{CacheElement, Element},
    params::ScatterParams,
};
use timetable_types::Dtype;

use super::{
    BenchError, Row,
    cases::{HEAD_SIZE, HEADS, PAGE, SCATTER_TOKENS, scatter_bytes},
    timing::{graph_us, sets_for},
};
use crate::{batch::Shape, gpu::Gpu, paged::Strides, random::Random};

/// Blocks of the cache that is written.
const NUM_BLOCKS: usize = 8_192;
/// Requests that the tokens belong to.
const REQUESTS: usize = 256;

pub(super) fn run(
    gpu: &Gpu,
    random: &mut Random,
    shown: &mut dyn FnMut(Row),
) -> Result<(), BenchError> {
    let tokens = SCATTER_TOKENS;
    let shape = Shape {
        head_size: HEAD_SIZE,
        kv_heads: HEADS.1,
        page: PAGE,
        ..Shape::new()
    };
    let row = HEADS.1 * HEAD_SIZE;
    let mut blocks: Vec<i64> = (0..NUM_BLOCKS as i64).collect();
    random.shuffle(&mut blocks);
    let each = tokens / REQUESTS;
    let slots: Vec<i64> = (0..tokens)
        .map(|token| {
            let (request, position) = (token / each, token % each);
            let block = blocks[request * each.div_ceil(PAGE) + position / PAGE];
            block * PAGE as i64 + (position % PAGE) as i64
        })
        .collect();
    let d_slots = gpu.upload(&slots)?;
    let bytes = scatter_bytes(tokens);
    let sets = sets_for(bytes as usize);
    let mut inputs = Vec::new();
    for _ in 0..sets {
        let mut input = || gpu.upload_as(Dtype::Bfloat16, &random.normal(tokens * row, 1.0));
        let cache = gpu.poisoned(Dtype::Bfloat16, NUM_BLOCKS * shape.block_elements())?;
        inputs.push((input()?, input()?, cache));
    }
    let strides = Strides::of(&shape);
    let us = graph_us(&gpu.stream, sets, 60, |stream, set| {
        let (key, value, cache) = &inputs[set];
        let params = ScatterParams {
            key: key.ptr(),
            value: value.ptr(),
            kv_cache: cache.buffer.ptr(),
            slot_mapping: d_slots.ptr(),
            k_scale: DevicePtr::NULL,
            v_scale: DevicePtr::NULL,
            key_stride: row as i64,
            value_stride: row as i64,
            kv_block_stride: strides.block,
            kv_head_stride: strides.head,
            kv_token_stride: strides.token,
            num_slots: tokens as i64,
            num_kv_heads: HEADS.1 as i32,
            head_size: HEAD_SIZE as i32,
            block_size: PAGE as i32,
            kv_scale_stride: 0,
        };
        // SAFETY: the buffers have what the parameters say, every slot is the cache's, and all live until the replays have
        // ended.
        unsafe {
            gpu.kernels
                .reshape_and_cache(stream, Element::Bf16, CacheElement::Same, &params)
        }
    })?;
    shown(
        Row::new("append", 1, tokens, us)
            .bandwidth(bytes)
            .at_most(24.0),
    );
    Ok(())
}

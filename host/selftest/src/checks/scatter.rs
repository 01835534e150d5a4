//! The scatter into the KV cache: every byte of the cache, for all pairs of types, both layouts, and rows of a fused projection.

use timetable_device_cuda::{
    CudaError,
    driver::DevicePtr,
    kernels::{CacheElement, Element},
    params::ScatterParams,
};
use timetable_types::Dtype;

use super::{CheckError, Context};
use crate::{batch::Shape, element, paged::Strides, report::Group};

const PAIRS: [(Element, Dtype, Dtype); 5] = [
    (Element::Bf16, Dtype::Bfloat16, Dtype::Bfloat16),
    (Element::F16, Dtype::Float16, Dtype::Float16),
    (Element::F32, Dtype::Float32, Dtype::Float32),
    (Element::Bf16, Dtype::Bfloat16, Dtype::Float8E4m3),
    (Element::F16, Dtype::Float16, Dtype::Float8E4m3),
];

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut groups = Vec::new();
    for (element, dtype, cache_dtype) in PAIRS {
        let name = format!(
            "scatter {} to {}",
            element::name(dtype),
            element::name(cache_dtype)
        );
        let mut group = Group::new(name);
        for head_size in [64, 96, 128, 256] {
            for nhd in [false, true] {
                let shape = Shape {
                    dtype,
                    cache_dtype,
                    head_size,
                    kv_heads: context.random.count(1, if context.quick { 2 } else { 8 }),
                    page: *context.random.pick(&[16, 48, 64, 256]),
                    nhd,
                    ..Shape::new()
                };
                let most = if context.quick { 20 } else { 400 };
                let tokens = context.random.count(2, most);
                one(context, &mut group, element, &shape, tokens)?;
            }
        }
        groups.push(group);
    }
    Ok(groups)
}

fn one(
    context: &mut Context<'_>,
    group: &mut Group,
    element: Element,
    shape: &Shape,
    tokens: usize,
) -> Result<(), CudaError> {
    let (heads, size) = (shape.kv_heads, shape.head_size);
    let num_blocks = 2 * tokens.div_ceil(shape.page) + 3;
    // Keys of a fused projection: their rows go on behind them.
    let (key_stride, value_stride) = (heads * size + 64, heads * size);
    let fp8 = shape.cache_dtype == Dtype::Float8E4m3;
    // Large enough that some saturate.
    let deviation = if fp8 { 200.0 } else { 1.0 };
    let key = element::rounded(
        shape.dtype,
        &context.random.normal(tokens * key_stride, deviation),
    );
    let value = element::rounded(
        shape.dtype,
        &context.random.normal(tokens * value_stride, 1.0),
    );
    let mut slots: Vec<i64> = (0..(num_blocks * shape.page) as i64).collect();
    context.random.shuffle(&mut slots);
    // Fewer slots than rows; some tokens have none.
    slots.truncate(tokens - 1);
    for slot in &mut slots {
        if context.random.one_in(10) {
            *slot = -1;
        }
    }
    let mut scales = || -> Vec<f32> {
        (0..heads)
            .map(|_| 0.25 * context.random.int(1, 8) as f32 + 0.1)
            .collect()
    };
    let (k_scale, v_scale) = (scales(), scales());
    let per_head = context.random.one_in(2);

    let gpu = context.gpu;
    let (d_key, d_value) = (
        gpu.upload_as(shape.dtype, &key)?,
        gpu.upload_as(shape.dtype, &value)?,
    );
    let (d_slots, d_k_scale, d_v_scale) = (
        gpu.upload(&slots)?,
        gpu.upload(&k_scale)?,
        gpu.upload(&v_scale)?,
    );
    let cache = gpu.poisoned(shape.cache_dtype, num_blocks * shape.block_elements())?;
    let (cache_element, k_ptr, v_ptr) = if fp8 {
        (CacheElement::Fp8, d_k_scale.ptr(), d_v_scale.ptr())
    } else {
        (CacheElement::Same, DevicePtr::NULL, DevicePtr::NULL)
    };
    let strides = Strides::of(shape);
    let params = ScatterParams {
        key: d_key.ptr(),
        value: d_value.ptr(),
        kv_cache: cache.buffer.ptr(),
        slot_mapping: d_slots.ptr(),
        k_scale: k_ptr,
        v_scale: v_ptr,
        key_stride: key_stride as i64,
        value_stride: value_stride as i64,
        kv_block_stride: strides.block,
        kv_head_stride: strides.head,
        kv_token_stride: strides.token,
        num_slots: slots.len() as i64,
        num_kv_heads: heads as i32,
        head_size: size as i32,
        block_size: shape.page as i32,
        kv_scale_stride: i32::from(per_head),
    };
    // SAFETY: the buffers have what the parameters say, every slot is negative or the cache's, and all live until the stream
    // has been waited for.
    unsafe {
        gpu.kernels
            .reshape_and_cache(&gpu.stream, element, cache_element, &params)
    }?;
    gpu.stream.synchronize()?;

    let element_bytes = element::bytes(shape.cache_dtype);
    let (got, guarded) = cache.bytes()?;
    let mut want = vec![crate::gpu::POISON; got.len()];
    for (token, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        for head in 0..heads {
            let scale = |scales: &[f32]| {
                if fp8 {
                    scales[if per_head { head } else { 0 }]
                } else {
                    1.0
                }
            };
            let to = shape.state_at(slot / shape.page, slot % shape.page, head);
            for (source, stride, scale, behind) in [
                (&key, key_stride, scale(&k_scale), 0),
                (&value, value_stride, scale(&v_scale), size),
            ] {
                let values: Vec<f32> = source[token * stride + head * size..][..size]
                    .iter()
                    .map(|x| x / scale)
                    .collect();
                let bytes = element::encode(shape.cache_dtype, &values);
                want[(to + behind) * element_bytes..][..bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
    let what = || {
        format!(
            "{} tokens of {heads} x {size}, pages of {}, {}, scale of each head {per_head}",
            slots.len(),
            shape.page,
            if shape.nhd { "NHD" } else { "HND" }
        )
    };
    group.equal(&got, &want, what);
    group.check(guarded, || format!("{}: wrote beyond the cache", what()));
    Ok(())
}

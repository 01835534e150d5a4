//! What a layer refuses, what it leaves alone, and that it does what the metadata says, right or wrong.

use timetable_device::cpu::{
    ImplError, PrepareError,
    mla::{LatentCache, LatentDtype, MlaConfig, MlaImpl, MlaStepMetadata},
};
use timetable_types::{
    Metadata, Tensor,
    flash_mla::{DecodeSchedule, Metadata as Record},
};

use crate::{
    batch::{Batch, layout, sizes},
    metadata::{plain, random, reference},
    random::{bits, errors, rng},
};

#[test]
fn what_latent_attention_has_not_is_refused_in_the_field_s_words() {
    let good = MlaConfig::new(sizes(2, 512, 128, 64, 128), 64);
    assert!(MlaImpl::new(good).is_ok());
    let features = "FlashMLAImpl does not support one of the following: alibi_slopes, sliding_window, logits_soft_cap";
    for (config, text) in [
        (
            MlaConfig {
                alibi_slopes: true,
                ..good
            },
            features,
        ),
        (
            MlaConfig {
                sliding_window: Some(128),
                ..good
            },
            features,
        ),
        (
            MlaConfig {
                logits_soft_cap: Some(30.0),
                ..good
            },
            features,
        ),
        (
            MlaConfig {
                impl_name: "TritonMLAImpl",
                sliding_window: Some(1),
                ..good
            },
            "TritonMLAImpl does not support one of the following",
        ),
        (
            MlaConfig {
                kv_cache_dtype: LatentDtype::Fp8DsMla,
                sizes: sizes(2, 256, 128, 64, 128),
                ..good
            },
            "fp8_ds_mla with kv_lora_rank 256",
        ),
        (
            MlaConfig {
                sizes: sizes(0, 512, 128, 64, 128),
                ..good
            },
            "num_heads is 0: it must be at least 1",
        ),
        (
            MlaConfig {
                block_size: 0,
                ..good
            },
            "block_size is 0",
        ),
        (
            MlaConfig {
                sizes: timetable_device::cpu::mla::LatentSizes {
                    scale: f32::NAN,
                    ..good.sizes
                },
                ..good
            },
            "scale is NaN: it must be finite",
        ),
    ] {
        let error = MlaImpl::new(config).expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    }
    // The field counts a cap of 0 as none.
    assert!(
        MlaImpl::new(MlaConfig {
            logits_soft_cap: Some(0.0),
            ..good
        })
        .is_ok()
    );
}

fn small() -> Batch {
    let layout = layout(sizes(2, 24, 12, 8, 20), 4);
    Batch::new(
        &mut rng(20_000),
        layout,
        &[(1, 30), (1, 9), (7, 40)],
        (1, 3),
    )
}

#[test]
fn metadata_and_tensors_of_another_shape_are_refused() {
    let batch = small();
    let attention = batch.layout.attention();
    let step = batch.prepare(0, &plain(&batch)[0]);
    let cache = &batch.ranks[0].cache;
    let mut output = vec![0.0; batch.num_tokens * 2 * 20];
    let unprepared = attention.forward(
        &batch.inputs(),
        cache,
        Some(&MlaStepMetadata::new()),
        &mut output,
    );
    assert!(
        matches!(unprepared, Err(ImplError::WrongMetadata { .. })),
        "{unprepared:?}"
    );
    let other = |blocks, size, latent, dtype| {
        LatentCache::new(blocks, size, latent, 8, dtype).expect("a cache")
    };
    for (cache, what) in [
        (
            other(100, 4, 32, LatentDtype::F32),
            "the cache's kv_lora_rank: 32, expected 24",
        ),
        (
            other(100, 8, 24, LatentDtype::F32),
            "the cache's block_size: 8, expected 4",
        ),
        (
            other(100, 4, 24, LatentDtype::Bf16),
            "bytes of a token of the cache: 64, expected 128",
        ),
        (
            other(1, 4, 24, LatentDtype::F32),
            "blocks of the cache: 1, expected",
        ),
    ] {
        let error = attention
            .forward(&batch.inputs(), &cache, Some(&step), &mut output)
            .expect_err(what)
            .to_string();
        assert!(error.contains(what), "{error}");
    }
    let short = &mut [0.0; 5];
    assert!(
        attention
            .forward(&batch.inputs(), cache, Some(&step), short)
            .is_err()
    );
    let mut inputs = batch.inputs();
    inputs.kv_b_proj = &inputs.kv_b_proj[1..];
    let error = attention.forward(&inputs, cache, Some(&step), &mut output);
    assert!(matches!(
        error,
        Err(ImplError::Shape {
            what: "elements of kv_b_proj",
            ..
        })
    ));
}

#[test]
fn padding_becomes_zeros_and_what_is_no_token_s_stays() {
    let batch = small();
    let attention = batch.layout.attention();
    let cache = &batch.ranks[0].cache;
    let width = 2 * 20;
    let tokens = batch.first_token(3);
    let mut output = vec![7.0; (batch.num_tokens + 2) * width];
    for decodes in [0, 2, 3] {
        let step = batch.prepare(0, &random(&mut rng(1), &batch, decodes)[0]);
        output.fill(7.0);
        attention
            .forward(&batch.inputs(), cache, Some(&step), &mut output)
            .expect("forward");
        assert!(
            output[..tokens * width]
                .iter()
                .all(|x| x.is_finite() && *x != 7.0)
        );
        assert!(
            output[tokens * width..batch.num_tokens * width]
                .iter()
                .all(|&x| x == 0.0)
        );
        assert!(output[batch.num_tokens * width..].iter().all(|&x| x == 7.0));
    }
    // A profile run.
    attention
        .forward(&batch.inputs(), cache, None, &mut output)
        .expect("forward");
    assert!(output.iter().all(|&x| x == 0.0));
}

#[test]
fn buffers_are_reused_from_step_to_step() {
    let batch = small();
    let cache = &batch.ranks[0].cache;
    let run = |step: &MlaStepMetadata| {
        let mut output = vec![f32::NAN; batch.num_tokens * 2 * 20];
        batch
            .layout
            .attention()
            .forward(&batch.inputs(), cache, Some(step), &mut output)
            .expect("forward");
        bits(&output)
    };
    let mut step = MlaStepMetadata::new();
    for seed in 0..20 {
        let metadata = &random(&mut rng(seed), &batch, seed as usize % 4)[0];
        let inputs = batch.ranks[0].step.tensors.inputs();
        step.prepare(metadata, &inputs, 4).expect("metadata");
        assert_eq!(run(&step), run(&batch.prepare(0, metadata)), "seed {seed}");
    }
}

/// The error of the output under `metadata` that `edit` changed.
fn error_after(batch: &Batch, metadata: &Metadata, edit: impl FnOnce(&mut Record)) -> f64 {
    let mut metadata = metadata.clone();
    let Metadata::FlashMla(record) = &mut metadata else {
        panic!("another family");
    };
    edit(record);
    let decodes = record.num_decodes as usize;
    let ran = batch.run(std::slice::from_ref(&metadata));
    errors(&ran, &batch.expected(decodes), &batch.layout.sizes).0
}

#[test]
fn wrong_metadata_gives_wrong_numbers() {
    let mut layout = layout(sizes(2, 512, 16, 64, 24), 64);
    layout.dtype = LatentDtype::Fp8DsMla;
    let rows = [(1, 1_000), (1, 700), (5, 405), (9, 300)];
    let batch = Batch::new(&mut rng(21_000), layout, &rows, (0, 0));
    let metadata = &reference(&batch, "flash-mla", 256)[0];
    assert!(error_after(&batch, metadata, |_| {}) < 2e-6);
    let parts = |record: &mut Record, edit: fn(&mut Vec<i32>)| {
        let decode = record.decode.as_mut().expect("decodes");
        let DecodeSchedule::Tiles(tiles) = &mut decode.schedule else {
            panic!("no tiles");
        };
        let Tensor::Matrix(parts) = &mut tiles.tile_scheduler_metadata else {
            panic!("not by value");
        };
        edit(&mut parts.values);
    };
    // A page left out, and a page taken twice.
    assert!(
        error_after(&batch, metadata, |record| parts(record, |parts| parts
            [3] -=
            1))
            > 1e-3
    );
    assert!(
        error_after(&batch, metadata, |record| parts(record, |parts| parts
            [9] -=
            1))
            > 1e-3
    );
    let chunk = |record: &mut Record, edit: fn(&mut timetable_types::flash_mla::ContextChunk)| {
        let prefill = record.prefill.as_mut().expect("prefills");
        let context = prefill.chunked_context.as_mut().expect("context");
        let chunk = context
            .chunks
            .iter_mut()
            .find(|chunk| chunk.is_continuation);
        edit(chunk.expect("a continuation"));
    };
    assert!(
        error_after(&batch, metadata, |record| chunk(record, |chunk| chunk
            .starts[0] -=
            1))
            > 1e-3
    );
    // What does not go on begins anew.
    let forgets =
        |chunk: &mut timetable_types::flash_mla::ContextChunk| chunk.is_continuation = false;
    assert!(error_after(&batch, metadata, |record| chunk(record, forgets)) > 1e-3);
}

#[test]
fn metadata_that_contradicts_itself_is_refused_with_the_value() {
    let batch = small();
    let metadata = &random(&mut rng(3), &batch, 2)[0];
    let inputs = batch.ranks[0].step.tensors.inputs();
    let refused = |edit: &dyn Fn(&mut Record), text: &str| {
        let mut metadata = metadata.clone();
        let Metadata::FlashMla(record) = &mut metadata else {
            panic!("another family");
        };
        edit(record);
        let mut step = MlaStepMetadata::new();
        let error = step.prepare(&metadata, &inputs, 4).expect_err(text);
        assert!(matches!(
            error,
            PrepareError::Inconsistent { .. } | PrepareError::Unsupported { .. }
        ));
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(
        &|record| record.num_decodes = 1_000,
        "num_decodes: 1000, but",
    );
    refused(
        &|record| record.num_decode_tokens = 1_000,
        "num_decode_tokens: 1000 of",
    );
    refused(
        &|record| record.causal = false,
        "latent attention has causal groups only",
    );
    let first_chunk =
        |record: &mut Record, edit: fn(&mut timetable_types::flash_mla::ContextChunk)| {
            let prefill = record.prefill.as_mut().expect("prefills");
            edit(&mut prefill.chunked_context.as_mut().expect("context").chunks[0]);
        };
    refused(
        &|record| first_chunk(record, |chunk| chunk.request_slice.end = 77),
        "request_slice: prefills [0, 77) of 2",
    );
    refused(
        &|record| first_chunk(record, |chunk| chunk.seq_lens[0] += 1),
        "not the running sum of seq_lens",
    );
    refused(
        &|record| first_chunk(record, |chunk| chunk.token_slice.start += 1),
        "token_slice: prefill 0 has tokens [0, 7)",
    );
    refused(
        &|record| first_chunk(record, |chunk| chunk.starts[0] = 1 << 20),
        "block_table: row 2 has",
    );
    let other = Metadata::FlashAttn(timetable_types::flash_attn::Metadata {
        num_actual_tokens: 0,
        max_query_len: 0,
        query_start_loc: Tensor::Values(vec![0]),
        max_seq_len: 0,
        seq_lens: Tensor::Values(vec![]),
        block_table: Tensor::Values(vec![]),
        slot_mapping: Tensor::Values(vec![]),
        causal: timetable_types::Causal::All(true),
        max_dcp_context_kv_len: 0,
        dcp_context_kv_lens: None,
        num_decode_reqs: 0,
        num_prefill_reqs: 0,
        num_decode_tokens: 0,
        num_prefill_tokens: 0,
        max_num_splits: 0,
        scheduler_metadata: None,
        mm_prefix_query_range: None,
        rswa_prefix_lens: None,
        rswa_window: 0,
        schedule: timetable_types::flash_attn::Schedule {
            max_num_splits: 1,
            num_splits: vec![],
            tile_order: timetable_types::flash_attn::TileOrder::Natural,
        },
    });
    let error = MlaStepMetadata::new()
        .prepare(&other, &inputs, 4)
        .expect_err("another family");
    assert!(error.to_string().contains("choose FLASHMLA"), "{error}");
}

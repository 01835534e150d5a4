//! Cases from the field, as far as latent attention goes; numbers are those of the list of cases.

use timetable_attention::batch::{ContextParallel, SlotRule};
use timetable_device::{
    cpu::mla::{LatentCache, LatentDtype, MlaAttentionImpl},
    reference::max_relative_error,
};
use timetable_reference::native_twin;
use timetable_types::{
    BuilderConfig, CaptureShape, CudagraphMode, Metadata, Tensor, batch::dcp_local_seq_lens_into,
    flash_mla::DecodeSchedule,
};

use crate::{
    batch::{Batch, Layout, layout, sizes},
    metadata::{plain, record},
    random::{BOUND, Worst, bits, rng},
};

/// The batch's, with a cache for which FLASHMLA makes a tile schedule.
fn tiled(batch: &Batch) -> BuilderConfig {
    let mut config = batch.ranks[0].config.clone();
    config.attention.kv_cache_dtype = "fp8".to_owned();
    config
}

/// As `tiled`, with graphs of `size` tokens.
fn captured(batch: &Batch, size: u32) -> BuilderConfig {
    let mut config = tiled(batch);
    config.cudagraph.mode = CudagraphMode::Full;
    config.cudagraph.capture_sizes = vec![size];
    config.cudagraph.max_capture_size = size;
    config
}

/// The running sum of a tile schedule's splits.
fn split_sums(metadata: &Metadata) -> &[i32] {
    let decode = record(metadata).decode.as_ref().expect("decodes");
    match &decode.schedule {
        DecodeSchedule::Tiles(tiles) => match &tiles.num_splits {
            Tensor::Values(sums) => sums,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// 10: lengths on each rank; what they hold, merged, is the whole; a rank with nothing gives zeros and −∞.
#[test]
fn case_10_each_rank_attends_to_its_share() {
    for (keys, world, interleave, shares) in [
        (7, 2, 1, &[4, 3][..]),
        (17, 4, 1, &[5, 4, 4, 4]),
        (1, 4, 1, &[1, 0, 0, 0]),
        (130, 4, 64, &[64, 64, 2, 0]),
        (33, 2, 16, &[17, 16]),
        (0, 2, 1, &[0, 0]),
    ] {
        let layout = Layout {
            world,
            interleave,
            ..layout(sizes(2, 24, 12, 8, 20), 64)
        };
        // A row without keys is one of padding.
        let (rows, padding): (&[(usize, usize)], _) = match keys {
            0 => (&[(1, 5)], (1, 1)),
            keys => (&[(1, keys)], (0, 0)),
        };
        let row = rows.len() - 1 + padding.0;
        let batch = Batch::new(&mut rng(30_000), layout, rows, padding);
        let metadata = plain(&batch);
        for (rank, &share) in shares.iter().enumerate() {
            let step = &batch.ranks[rank].step.tensors;
            let mut local = Vec::new();
            dcp_local_seq_lens_into(
                &step.seq_lens,
                world as u32,
                rank as u32,
                interleave as u32,
                &mut local,
            );
            assert_eq!(local[row], share);
            assert_eq!(step.dcp_local_seq_lens.as_ref(), Some(&local));
            // The global length stands beside it.
            assert_eq!(step.seq_lens[row] as usize, keys);
            let step = batch.prepare(rank, &metadata[rank]);
            let tokens = batch.num_tokens;
            let query = vec![1.0; tokens * 2 * layout.sizes.head_size()];
            let mut output = vec![f32::NAN; tokens * 2 * 24];
            let mut lse = vec![f32::NAN; tokens * 2];
            layout
                .attention()
                .forward_mqa(
                    &query,
                    &batch.ranks[rank].cache,
                    &step,
                    &mut output,
                    Some(&mut lse),
                )
                .expect("forward_mqa");
            let nothing = share == 0;
            assert_eq!(lse[row * 2] == f32::NEG_INFINITY, nothing);
            assert_eq!(
                output[row * 2 * 24..][..24].iter().all(|&x| x == 0.0),
                nothing
            );
        }
        Worst::default().check(&batch, &metadata, &format!("{keys} keys on {world} ranks"));
    }
}

/// 11: a rank writes the latents of its own positions, and of no other.
#[test]
fn case_11_latents_go_to_the_rank_s_own_slots() {
    const P: i64 = -1;
    for (interleave, rank, wanted) in [
        (1, 0, [28, P, 29, P, 30, P, 31, P, 12, P]),
        (2, 1, [P, P, 28, 29, P, P, 30, 31, P, P]),
    ] {
        let rule = SlotRule {
            block_size: 4,
            context_parallel: Some(ContextParallel {
                size: 2,
                rank,
                interleave,
            }),
        };
        let positions: Vec<i64> = (0..10).collect();
        let mut slots = vec![0; 10];
        assert_eq!(rule.slots_of_request(&[7, 3], &positions, &mut slots), 0);
        assert_eq!(slots, wanted);
        let layout = layout(sizes(2, 24, 12, 8, 20), 4);
        let mut cache = LatentCache::new(8, 4, 24, 8, LatentDtype::F32).expect("a cache");
        let latents: Vec<f32> = (0..10 * 24).map(|at| 1.0 + at as f32).collect();
        let rotated: Vec<f32> = (0..10 * 8).map(|at| -1.0 - at as f32).collect();
        layout
            .attention()
            .do_kv_cache_update(&latents, &rotated, &mut cache, &slots);
        for slot in 0..32 {
            let entry = cache.entry(slot);
            match wanted.iter().position(|&of| of == slot as i64) {
                Some(token) => {
                    assert_eq!(entry[..24], latents[token * 24..(token + 1) * 24]);
                    assert_eq!(entry[24..], rotated[token * 8..(token + 1) * 8]);
                }
                None => assert!(entry.iter().all(|&x| x == 0.0), "slot {slot}"),
            }
        }
    }
}

/// 17: padded rows add nothing to the running sum of splits; they are zeros.
#[test]
fn case_17_padded_rows_have_no_splits() {
    let layout = layout(sizes(2, 256, 16, 64, 24), 64);
    let rows = [(1, 64), (1, 700), (1, 64)];
    let batch = Batch::new(&mut rng(33_000), layout, &rows, (3, 3));
    let mut config = tiled(&batch);
    config.device.num_workers = 3;
    let mut builder = native_twin("flash-mla", &config).expect("a builder");
    let cam = &batch.ranks[0].step.cam;
    let metadata = builder.build(cam, false).expect("metadata");
    assert_eq!(split_sums(&metadata), [0, 1, 3, 4, 4, 4, 4]);
    assert_eq!(batch.prepare(0, &metadata).num_work_items(), 4);
    let ran = Worst::default().check(&batch, std::slice::from_ref(&metadata), "padded");
    assert!(ran.output[3 * 2 * 24..].iter().all(|&x| x == 0.0));
    assert!(ran.lse[3 * 2..].iter().all(|&x| x == f32::NEG_INFINITY));
}

/// 18: a builder that promised at capture keeps to it at 1 key and at 100,000, and what comes of its splits is what comes of none.
#[test]
fn case_18_one_promise_at_1_key_and_at_100_000() {
    let layout = layout(sizes(1, 256, 8, 64, 8), 64);
    let [one, many] = [1, 100_000].map(|keys| {
        let mut batch = Batch::new(&mut rng(34_000), layout, &[(1, keys)], (0, 0));
        batch.ranks[0].config.scheduler.max_model_len = 131_072;
        batch
    });
    let shape = CaptureShape {
        num_tokens: 1,
        num_reqs: 1,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    let eager = many.run(&plain(&many)).output;
    let eager: Vec<f64> = eager.iter().map(|&x| f64::from(x)).collect();
    for name in ["flash-mla", "flash-attn-mla"] {
        let mut builder = native_twin(name, &captured(&one, 1)).expect("a builder");
        let promise = builder.launch_promise(&shape).expect("a promise");
        let cam = &one.ranks[0].step.cam;
        let capture = builder.build_for_cudagraph_capture(cam).expect("metadata");
        one.verify_within(0, &capture, Some(&promise));
        Worst::default().check(&one, std::slice::from_ref(&capture), name);
        let cam = &many.ranks[0].step.cam;
        let replay = builder.build(cam, false).expect("metadata");
        many.verify_within(0, &replay, Some(&promise));
        let splits = many.prepare(0, &replay).max_splits();
        assert!(
            splits > 1 && splits <= promise.max_num_splits as usize,
            "{name}: {splits} of {}",
            promise.max_num_splits
        );
        let ran = Worst::default().check(&many, std::slice::from_ref(&replay), name);
        let error = max_relative_error(&ran.output, &eager, layout.sizes.v_head_dim);
        assert!(error <= BOUND, "{name}: {error:e} beside eager");
    }
}

/// 23: pages are split by the host's bounds; where drafts were rejected the device's lengths are below them, and a split behind
/// them adds nothing.
#[test]
fn case_23_lengths_below_their_bounds() {
    let mut layout = layout(sizes(2, 256, 16, 64, 24), 64);
    layout.drafts = 3;
    for (rows, bounds) in [
        (&[(4, 64)][..], &[65][..]),
        (&[(4, 64), (4, 640), (4, 126)], &[67, 643, 129]),
    ] {
        let mut batch = Batch::new(&mut rng(35_000), layout, rows, (1, 2));
        let cam = &mut batch.ranks[0].step.cam;
        cam.seq_lens_cpu_upper_bound[..rows.len()].copy_from_slice(bounds);
        cam.max_seq_len = bounds.iter().copied().max().expect("rows") as u32;
        for workers in [1, 3, 7] {
            let mut config = tiled(&batch);
            config.device.num_workers = workers;
            for name in ["flash-mla", "flash-attn-mla", "triton-mla"] {
                let mut builder = native_twin(name, &config).expect("a builder");
                let cam = &batch.ranks[0].step.cam;
                let metadata = builder.build(cam, false).expect("metadata");
                let what = format!("{name}, {workers} parts, {rows:?} below {bounds:?}");
                Worst::default().check(&batch, std::slice::from_ref(&metadata), &what);
                if (name, workers, rows.len()) == ("flash-mla", 7, 1) {
                    assert_eq!(split_sums(&metadata), [0, 2, 2]);
                    assert_eq!(batch.prepare(0, &metadata).max_splits(), 1);
                }
            }
        }
    }
}

/// 22: rows of length 0 give zeros and −∞, no work is scheduled for them, and the live rows do not change in a bit.
#[test]
fn case_22_rows_of_length_0() {
    let layout = layout(sizes(2, 256, 16, 64, 24), 64);
    let rows = [(1, 700), (1, 64), (1, 65)];
    for name in ["flash-mla", "flash-attn-mla", "triton-mla"] {
        let build = |batch: &Batch| {
            let mut builder = native_twin(name, &tiled(batch)).expect("a builder");
            builder
                .build(&batch.ranks[0].step.cam, false)
                .expect("metadata")
        };
        let batch = Batch::new(&mut rng(31_000), layout, &rows, (2, 2));
        let metadata = build(&batch);
        let step = batch.prepare(0, &metadata);
        let ran = batch.run(std::slice::from_ref(&metadata));
        let width = 2 * 24;
        assert!(ran.output[3 * width..].iter().all(|&x| x == 0.0), "{name}");
        assert!(
            ran.lse[3 * 2..].iter().all(|&lse| lse == f32::NEG_INFINITY),
            "{name}"
        );
        // The same schedule without the two rows.
        let alone = Batch::new(&mut rng(31_000), layout, &rows, (0, 0));
        let mut shorter = build(&alone);
        if let (Metadata::FlashMla(shorter), Metadata::FlashMla(longer)) = (&mut shorter, &metadata)
            && let (Some(shorter), Some(longer)) = (&mut shorter.decode, &longer.decode)
            && let (DecodeSchedule::Tiles(shorter), DecodeSchedule::Tiles(longer)) =
                (&mut shorter.schedule, &longer.schedule)
            && let Tensor::Values(splits) = &longer.num_splits
        {
            shorter.tile_scheduler_metadata = longer.tile_scheduler_metadata.clone();
            shorter.num_splits = Tensor::Values(splits[..4].to_vec());
        }
        let live = alone.run(std::slice::from_ref(&shorter));
        assert_eq!(bits(&live.output), bits(&ran.output[..3 * width]), "{name}");
        let items = alone.prepare(0, &shorter).num_work_items();
        assert_eq!(
            step.num_work_items(),
            items,
            "{name}: work for a row without keys"
        );
    }
}

/// 24: the split count at capture, in the schedule and in the kernel is one number.
#[test]
fn case_24_one_split_count() {
    let layout = layout(sizes(2, 256, 16, 64, 24), 64);
    let batch = Batch::new(&mut rng(32_000), layout, &[(1, 2_000), (1, 1_300)], (0, 0));
    let shape = CaptureShape {
        num_tokens: 2,
        num_reqs: 2,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    for name in ["flash-attn-mla", "flash-mla"] {
        let mut builder = native_twin(name, &captured(&batch, 2)).expect("a builder");
        let promised = builder
            .launch_promise(&shape)
            .expect("a promise")
            .max_num_splits;
        let cam = &batch.ranks[0].step.cam;
        let captured = builder.build_for_cudagraph_capture(cam).expect("metadata");
        let metadata = builder.build(cam, false).expect("metadata");
        assert_eq!(captured, metadata, "{name}");
        let decode = record(&metadata).decode.as_ref().expect("decodes");
        let scheduled = match &decode.schedule {
            DecodeSchedule::FlashAttn(call) => call.num_splits,
            DecodeSchedule::Tiles(_) => {
                let sums = split_sums(&metadata).windows(2);
                let counts = sums.map(|pair| pair[1] - pair[0]);
                counts.max().expect("decodes") as u32
            }
            DecodeSchedule::Lazy => panic!("no schedule"),
        };
        assert_eq!(scheduled, decode.max_num_splits, "{name}");
        assert!(
            scheduled > 1 && scheduled <= promised,
            "{name}: {scheduled} of {promised}"
        );
        let step = batch.prepare(0, &metadata);
        assert_eq!(
            step.max_splits(),
            scheduled as usize,
            "{name}: in the kernel"
        );
        Worst::default().check(&batch, std::slice::from_ref(&metadata), name);
    }
}

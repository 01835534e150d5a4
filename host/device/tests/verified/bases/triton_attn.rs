//! Good records of TRITON_ATTN.

use timetable_types::{
    Causal, EncoderInputs, Family, KvCacheSpecKind, Metadata, MmDocRange,
    triton_attn::Metadata as Record,
};

use super::{Base, MIXED, PADDED, base, no_edit, promise, windowed};
use crate::case::{Case, Random, config};

pub fn bases() -> Vec<Base> {
    const FAMILY: Family = Family::TritonAttn;
    let edited = |edit: fn(&mut Record)| {
        move |_: &Case, metadata: &mut Metadata| match metadata {
            Metadata::TritonAttn(record) => edit(record),
            _ => panic!("another family"),
        }
    };
    let all = Causal::All(true);
    let decodes = [(1, 40), (1, 70), (1, 3), (1, 33)];
    let mut bases = vec![
        base(
            "mixed, the 2D form",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, no_edit),
            edited(|record| divide(record, 64, 16, 16)),
        ),
        base(
            "decodes, the 3D form",
            FAMILY,
            Case::new(config(), all.clone(), &decodes, (0, 0), no_edit),
            edited(|record| divide(record, 5, 8, 4)),
        ),
        base(
            "windowed decodes, the 3D form",
            FAMILY,
            Case::new(windowed(24), all.clone(), &decodes, (1, 1), no_edit),
            edited(|record| divide(record, 64, 2, 64)),
        ),
        base(
            "windowed, not causal",
            FAMILY,
            Case::new(windowed(24), Causal::All(false), &MIXED, (0, 0), no_edit),
            edited(|_| {}),
        ),
        base(
            "flags per request",
            FAMILY,
            Case::new(config(), Causal::PerRequest, &MIXED, PADDED, no_edit),
            edited(|record| divide(record, 2, 64, 7)),
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
            edited(|_| {}),
        ),
        base(
            "spans",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, |_, step| {
                let range = |row, start, end| MmDocRange { row, start, end };
                step.cam.mm_req_doc_ranges =
                    vec![range(2, 5, 20), range(3, 2, 25), range(2, 35, 44)];
            }),
            edited(|record| divide(record, 3, 4, 0)),
        ),
        base(
            "prefix windows",
            FAMILY,
            Case::new(config(), all.clone(), &MIXED, PADDED, |config, step| {
                config.attention.use_rswa = true;
                config.attention.rswa_window = 24;
                step.tensors.rswa_prefix_lens = Some(vec![8, 3, 16, 5, 0]);
            }),
            edited(|_| {}),
        ),
    ];
    let mut captured = base(
        "captured",
        FAMILY,
        Case::new(config(), all, &decodes, (2, 2), no_edit),
        edited(|record| divide(record, 6, 4, 6)),
    );
    captured.case.promise = Some(promise(4, 0, 1, Some(1)));
    if let Some(promise) = &mut captured.case.promise {
        // 6 tokens, 4 heads, 4 segments: 32 elements, a maximum and a sum.
        promise.scratch_bytes = 6 * 4 * 4 * (32 + 2) * 4;
    }
    bases.push(captured);
    bases
}

/// Any threshold, segments and scratch that has room for the step.
pub fn random(case: &Case, record: &mut Record, random: &mut Random) {
    let tokens = case.step.cam.num_actual_tokens;
    divide(
        record,
        random.pick(&[0, 1, 3, 64]),
        random.pick(&[1, 2, 4, 16, 64]),
        tokens + random.pick(&[0, 5]),
    );
}

fn divide(record: &mut Record, threshold: u32, segments: u32, rows: u32) {
    record.seq_threshold_3d = threshold;
    record.num_par_softmax_segments = segments;
    for scratch in [
        &mut record.softmax_segm_output,
        &mut record.softmax_segm_max,
        &mut record.softmax_segm_expsum,
    ] {
        scratch.shape[0] = rows;
        scratch.shape[2] = segments;
    }
}

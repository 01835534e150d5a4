//! Decode context parallelism, simulated: each rank with its own shard of the cache, filled by its own slots, and its own
//! metadata; results merged by their log-sum-exps.

use rand::Rng;
use timetable_attention::StepInputs;
use timetable_device::cpu::{
    ImplError,
    mla::{MlaAttentionImpl, MlaStepMetadata},
};
use timetable_types::Tensor;

use crate::{
    batch::{Batch, Layout, layout, sizes},
    metadata::{plain, random, record, reference},
    random::{Worst, pick, random_rows, rng},
};

fn shared(layout: Layout, world: usize, interleave: usize) -> Layout {
    Layout {
        world,
        interleave,
        ..layout
    }
}

#[test]
fn ranks_merged_are_the_whole() {
    for world in [2, 4, 8] {
        let mut worst = Worst::default();
        for seed in 0..40 {
            let rng = &mut rng(10_000 + 100 * world as u64 + seed);
            let (latent, rope) = pick(rng, &[(24, 8), (40, 4), (64, 16)]);
            let heads = pick(rng, &[1, 2, 5]);
            let block_size = pick(rng, &[4, 16, 48]);
            let mut layout = layout(sizes(heads, latent, 12, rope, 20), block_size);
            layout.drafts = pick(rng, &[0, 0, 3]);
            let interleave = pick(rng, &[1, 1, 2, block_size]);
            let layout = shared(layout, world, interleave);
            let (rows, decodes) = random_rows(rng, 200, layout.drafts as usize);
            let padding = pick(rng, &[(0, 0), (1, 2)]);
            let batch = Batch::new(rng, layout, &rows, padding);
            let what = format!("{world} ranks, seed {seed}");
            worst.check(&batch, &plain(&batch), &what);
            // Any rows may decode: a query of several tokens sees of a rank's keys those before each.
            let any = rng.random_range(0..=rows.len());
            for decodes in [decodes, any] {
                worst.check(&batch, &random(rng, &batch, decodes), &what);
            }
        }
        worst.print(&format!("{world} ranks"));
    }
}

#[test]
fn metadata_of_the_reference_builders_on_ranks() {
    for name in ["flash-mla", "flash-attn-mla", "triton-mla"] {
        let mut worst = Worst::default();
        for seed in 0..8 {
            let rng = &mut rng(12_000 + seed);
            let world = pick(rng, &[2, 4, 8]);
            let mut layout = layout(sizes(2, 256, 16, 64, 24), 64);
            layout.drafts = pick(rng, &[0, 1]);
            let layout = shared(layout, world, pick(rng, &[1, 64]));
            let (rows, _) = random_rows(rng, 600, layout.drafts as usize);
            let batch = Batch::new(rng, layout, &rows, (0, 0));
            let metadata = reference(&batch, name, 64 * world as u32 * pick(rng, &[1, 3, 40]));
            worst.check(&batch, &metadata, &format!("{name}, seed {seed}"));
        }
        worst.print(&format!("{name} on ranks"));
    }
}

#[test]
fn global_lengths_survive_beside_local_ones_and_a_rank_with_nothing_adds_nothing() {
    let rng = &mut rng(13_000);
    let layout = shared(layout(sizes(2, 24, 12, 8, 20), 4), 4, 1);
    let batch = Batch::new(rng, layout, &[(1, 1), (1, 17), (3, 5)], (0, 0));
    let metadata = plain(&batch);
    for (rank, metadata) in metadata.iter().enumerate() {
        let decode = record(metadata).decode.as_ref().expect("decodes");
        assert!(matches!(decode.seq_lens, Tensor::DcpLocal(_)));
        assert!(decode.dcp_tot_seq_lens.is_some());
        let local = batch.ranks[rank].step.tensors.dcp_local_seq_lens.as_ref();
        let wanted = [usize::from(rank == 0), [5, 4, 4, 4][rank]];
        assert_eq!(local.expect("lengths")[..2], wanted.map(|len| len as i32));

        let step = batch.prepare(rank, metadata);
        let sizes = layout.sizes;
        let mut query = vec![f32::NAN; 2 * 2 * sizes.head_size()];
        let attention = layout.attention();
        attention.absorb(&batch.inputs(), &mut query);
        let mut output = vec![f32::NAN; 2 * 2 * sizes.kv_lora_rank];
        let mut lse = vec![f32::NAN; 4];
        let cache = &batch.ranks[rank].cache;
        attention
            .forward_mqa(&query, cache, &step, &mut output, Some(&mut lse))
            .expect("forward_mqa");
        // The first request's only key is rank 0's.
        let nothing = rank > 0;
        assert_eq!(lse[..2] == [f32::NEG_INFINITY; 2], nothing);
        assert_eq!(
            output[..2 * sizes.kv_lora_rank].iter().all(|&x| x == 0.0),
            nothing
        );
        assert!(output.iter().chain(&lse[2..]).all(|x| x.is_finite()));
        // Of the third, rank 1 holds the second context token and none of the new ones are its to add.
        let rest = batch.num_tokens - 2;
        let mut output = vec![f32::NAN; rest * 2 * sizes.v_head_dim];
        let mut lse = vec![f32::NAN; rest * 2];
        let inputs = batch.inputs_from(2);
        attention
            .forward_mha(&inputs, cache, &step, &mut output, Some(&mut lse))
            .expect("forward_mha");
        assert_eq!(lse.iter().all(|&lse| lse == f32::NEG_INFINITY), rank > 1);
        assert_eq!(output.iter().all(|&x| x == 0.0), rank > 1);
    }
    Worst::default().check(&batch, &metadata, "1, 17 and 5 keys");
}

#[test]
fn a_rank_s_result_is_not_taken_for_the_whole() {
    let rng = &mut rng(13_500);
    let layout = shared(layout(sizes(2, 24, 12, 8, 20), 4), 2, 1);
    let batch = Batch::new(rng, layout, &[(1, 17), (6, 30)], (0, 0));
    let metadata = plain(&batch);
    let step = batch.prepare(0, &metadata[0]);
    let mut output = vec![0.0; batch.num_tokens * 2 * 20];
    let error = layout
        .attention()
        .forward(
            &batch.inputs(),
            &batch.ranks[0].cache,
            Some(&step),
            &mut output,
        )
        .expect_err("a rank alone");
    assert!(
        matches!(
            error,
            ImplError::Config {
                name: "dcp_world_size",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("merge"), "{error}");
    // Nor is metadata of ranks run as if there were one, nor the other way round.
    let inputs: StepInputs<'_> = batch.ranks[0].step.tensors.inputs();
    let error = MlaStepMetadata::new()
        .prepare(&metadata[0], &inputs, 4)
        .expect_err("metadata of a rank");
    assert!(
        error
            .to_string()
            .contains("without decode context parallelism"),
        "{error}"
    );
}

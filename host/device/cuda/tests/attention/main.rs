//! Whole steps of attention on a real device: random batches through packing, the ring, the unpack and plan kernels, scatter
//! and attention, eager and as a replayed graph, against attention in f64. Whatever a request does not own is NaN in the
//! cache, and unused columns of the block table name a block that does not exist. Without a device, or without embedded
//! kernels, the test checks that this is what is said.
//!
//! `TIMETABLE_GPU_BATCHES` sets how many batches are run.

mod batch;
mod machine;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use timetable_attention::{plain_builder, verify, verify_step};
use timetable_device_cuda::{
    CudaError, Kernels,
    attention::{Launch, PrepareError, Replay},
    driver::{Device, Stream},
    kernels::Element,
};

use batch::*;
use machine::Machine;

fn load() -> Option<(Kernels, Stream)> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            let missing = matches!(error, CudaError::NoDriver | CudaError::NoDevice { .. });
            assert!(missing, "{error}");
            return None;
        }
    };
    match Kernels::load(&device) {
        Ok(kernels) => {
            let stream = Stream::new(&device).expect("a stream");
            Some((kernels, stream))
        }
        Err(error) => {
            assert!(matches!(error, CudaError::NoKernelImage { .. }), "{error}");
            None
        }
    }
}

fn check(setup: &Setup, batch: &Batch, output: &[u8], lse: &[f32], what: &str) {
    let element = setup.group.element;
    let output = decode(element, output);
    let nan = output
        .iter()
        .position(|x| x.is_nan())
        .or(lse.iter().position(|x| x.is_nan()));
    assert_eq!(nan, None, "{what}: NaN");
    let (expected, expected_lse) = batch.reference(setup);
    let bar = match element {
        Element::Bf16 => 1e-2,
        Element::F16 => 2e-3,
        Element::F32 => 2e-6,
    };
    let size = setup.group.head_size as usize;
    for (row, (found, expected)) in output.chunks(size).zip(expected.chunks(size)).enumerate() {
        let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let error = found
            .iter()
            .zip(expected)
            .map(|(&a, b)| (f64::from(a) - b).powi(2))
            .sum::<f64>()
            .sqrt();
        // A row of cancelling values is held to what its dtype resolves.
        assert!(
            error <= bar * norm.max(0.1),
            "{what}: row {row} is off by {error} of {norm}"
        );
        let (found, expected) = (f64::from(lse[row]), expected_lse[row]);
        let close =
            found == expected || (found - expected).abs() <= 10.0 * bar * expected.abs().max(1.0);
        assert!(close, "{what}: LSE {found} of row {row}, not {expected}");
    }
}

#[test]
fn the_batches_themselves_are_verified_and_have_finite_answers() {
    let mut rng = Pcg64::seed_from_u64(11);
    for _ in 0..24 {
        let setup = Setup::random(&mut rng, 132);
        let (batch, _) = random_batch(&mut rng, &setup);
        let inputs = batch.step.tensors.inputs();
        let context = context(&setup, &batch, &inputs);
        verify_step(&context).expect("a sound step");
        let mut plain = plain_builder(setup.group.family, &setup.config).expect("a builder");
        let mut metadata = plain.build(&batch.step.cam, false).expect("built");
        verify(&metadata, &context).expect("the plain builder's");
        reschedule(&mut rng, &mut metadata, &batch.step, setup.group.head_size);
        verify(&metadata, &context).expect("another schedule");
        let (output, lse) = batch.reference(&setup);
        assert!(output.iter().all(|x| x.is_finite()));
        let covered = *batch.step.tensors.query_start_loc.last().expect("a start") as usize;
        let heads = setup.group.num_heads as usize;
        assert!(lse[..covered * heads].iter().all(|x| x.is_finite()));
        let width = (setup.group.num_kv_heads * setup.group.head_size) as usize;
        let fresh = batch.fresh(&batch.keys, width);
        assert_eq!(fresh.len(), batch.num_tokens() * width);
        assert_eq!(
            batch.cache(&setup).len(),
            setup.cache_shape().bytes().expect("small")
        );
    }
}

#[test]
fn steps_through_upload_plan_scatter_and_attention_are_right() {
    let Some((kernels, stream)) = load() else {
        return;
    };
    let batches: usize =
        std::env::var("TIMETABLE_GPU_BATCHES").map_or(48, |text| text.parse().expect("a number"));
    let seed = rand::random();
    let mut rng = Pcg64::seed_from_u64(seed);
    let (mut split, mut replayed) = (0, 0);
    for index in 0..batches.div_ceil(STEPS) {
        let setup = Setup::random(&mut rng, kernels.device().num_multiprocessors());
        let mut machine = Machine::new(&kernels, &stream, &setup);
        for step in 0..STEPS {
            let what = format!(
                "seed {seed}, setup {index} ({:?}), step {step}",
                setup.group
            );
            let (batch, decodes_only) = random_batch(&mut rng, &setup);
            let inputs = batch.step.tensors.inputs();
            let context = context(&setup, &batch, &inputs);
            verify_step(&context).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
            let mut plain = plain_builder(setup.group.family, &setup.config).expect("a builder");
            let plain = plain.build(&batch.step.cam, false).expect("built");
            let mut metadata = plain.clone();
            if rng.random_bool(0.8) {
                reschedule(&mut rng, &mut metadata, &batch.step, setup.group.head_size);
            }
            verify(&metadata, &context).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
            let captured = machine.captured;
            let captured = decodes_only.then_some(&captured);
            let replay = match machine.state.prepare(&metadata, &context, captured) {
                Err(PrepareError::Room { .. }) => machine.state.prepare(&plain, &context, captured),
                other => other,
            };
            let replay = replay.unwrap_or_else(|error| panic!("{what}: {error}"));
            split += usize::from(
                machine
                    .state
                    .counts()
                    .is_some_and(|counts| counts.max_splits > 1),
            );
            machine.upload(&setup, &batch);
            let eager = machine.state.eager().expect("prepared");
            machine
                .launch(&eager, &setup)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let (output, lse) = machine.results(&setup, &batch);
            check(&setup, &batch, &output, &lse, &what);
            if decodes_only && replay == Replay::Fits {
                let kind = |launch: &Launch| launch.lists[0].map(|list| list.kind);
                let is_same = kind(&machine.captured)
                    == machine.state.eager().and_then(|eager| kind(eager.launch()));
                machine.poison();
                machine.replay(&setup);
                let (again, lse_again) = machine.results(&setup, &batch);
                check(
                    &setup,
                    &batch,
                    &again,
                    &lse_again,
                    &format!("{what}, as a graph"),
                );
                // Another kernel rounds otherwise; the same gives the same bits.
                assert!(
                    !is_same || (again == output && lse_again == lse),
                    "{what}: the graph's result differs"
                );
                replayed += 1;
            }
        }
    }
    assert!(split > batches / 8, "{split} of {batches} steps had splits");
    assert!(
        replayed > batches / 8,
        "{replayed} of {batches} steps were replayed"
    );
}

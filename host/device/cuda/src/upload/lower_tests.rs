//! Lowering, against the resolver, on random steps and random tensors: what the operations leave in memory is what the
//! resolver says, padding included; what the resolver refuses is not lowered.

use rand::{Rng, SeedableRng, seq::IndexedRandom};
use rand_pcg::Pcg64;
use timetable_attention::{BlockTable, Resolver, Siblings, StepInputs, batch::StepTensors};
use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, ConvChunks, DcpLocal, DcpSource, Dtype, ExtraGather,
    Input, Matrix, PageSelection, RowGather, RowRange, Scratch, StateColumn, StateGather, Tensor,
    TensorSlice,
};

use super::interpret::Machine;
use super::lower::{LowerContext, lower_tensor};
use super::pack::{Destination, OpLists, Packer, Phase, Stage, slot_bytes};
use super::{StepLimits, testing};

const BLOCK: u32 = 16;

struct Step {
    config: BuilderConfig,
    common: CommonAttentionMetadata,
    tensors: StepTensors,
    extra: Vec<i32>,
}

impl Step {
    fn random(rng: &mut Pcg64) -> Self {
        let rows = rng.random_range(0..7);
        let mut starts = vec![0];
        let mut lens = Vec::new();
        for row in 0..rows {
            // Some rows are padding.
            let query = if rng.random_bool(0.2) {
                0
            } else {
                rng.random_range(1..40)
            };
            starts.push(starts[row] + query);
            lens.push(if query == 0 {
                0
            } else {
                query + rng.random_range(0..90)
            });
        }
        let tokens = *starts.last().unwrap() + rng.random_range(0..3);
        let width = rng.random_range(9..12);
        let table = (0..rows * width)
            .map(|_| rng.random_range(0..1000))
            .collect();
        let mut some = |len: usize| -> Option<Vec<i32>> {
            rng.random_bool(0.7)
                .then(|| (0..len).map(|_| rng.random_range(0..99)).collect())
        };
        let tensors = StepTensors {
            causal: some(rows),
            dcp_local_seq_lens: some(rows),
            encoder_seq_lens: some(rows),
            logits_indices_padded: some(5),
            rswa_prefix_lens: some(rows),
            slot_mapping: (0..i64::from(tokens)).map(|i| i * 7 - 1).collect(),
            positions: (0..i64::from(tokens)).map(|i| i + (1 << 33)).collect(),
            query_start_loc: starts,
            seq_lens: lens,
            block_table: table,
            block_table_width: width,
        };
        let mut config = testing::config(BLOCK, 8, 2, 64);
        if rng.random_bool(0.5) {
            config.parallel.dcp_world_size = rng.random_range(2..5);
            config.parallel.dcp_rank = rng.random_range(0..config.parallel.dcp_world_size);
            config.parallel.cp_kv_cache_interleave_size = rng.random_range(1..5);
        }
        let common = testing::common(&tensors, tokens as u32);
        Self {
            config,
            common,
            tensors,
            extra: (0..6).map(|i| i * i).collect(),
        }
    }

    fn rows(&self) -> u32 {
        self.tensors.seq_lens.len() as u32
    }

    fn range(&self, rng: &mut Pcg64) -> RowRange {
        // Now and then outside the step.
        let most = self.rows() + u32::from(rng.random_bool(0.1));
        let end = rng.random_range(0..=most);
        RowRange {
            start: rng.random_range(0..=end),
            end,
        }
    }

    fn chosen(&self, rng: &mut Pcg64, most: u32) -> Vec<u32> {
        let most = (most + u32::from(rng.random_bool(0.1))).max(1);
        (0..rng.random_range(0..6))
            .map(|_| rng.random_range(0..most))
            .collect()
    }

    /// A tensor and its siblings: `paged_kv_indptr` and `cu_seq_lens`.
    fn tensor(&self, rng: &mut Pcg64) -> (Tensor, Vec<i32>, Vec<i32>) {
        let inputs = [
            Input::QueryStartLoc,
            Input::SeqLens,
            Input::BlockTable,
            Input::SlotMapping,
            Input::Positions,
            Input::Causal,
            Input::DcpLocalSeqLens,
            Input::EncoderSeqLens,
            Input::LogitsIndicesPadded,
            Input::RswaPrefixLens,
        ];
        let input = *inputs.choose(rng).unwrap();
        let range = self.range(rng);
        let mut indptr = vec![if rng.random_bool(0.3) {
            rng.random_range(0..9)
        } else {
            0
        }];
        for row in range.start..range.end {
            let len = self
                .tensors
                .seq_lens
                .get(row as usize)
                .copied()
                .unwrap_or(0) as u32;
            indptr.push(indptr.last().unwrap() + len.div_ceil(BLOCK) as i32);
        }
        let columns = self.tensors.block_table_width as u32 + u32::from(rng.random_bool(0.1));
        let total = (indptr.last().unwrap() - indptr[0]) as usize;
        let name = if rng.random_bool(0.9) { "own" } else { "other" }.to_owned();
        let chunks = ConvChunks {
            rows: range.clone(),
            block_m: rng.random_range(0..20),
            length: rng.random_range(0..60),
        };
        let tensor = match rng.random_range(0..22) {
            0 => Tensor::Input(input),
            1 => Tensor::Slice(TensorSlice {
                source: input,
                start: range.start,
                end: range.end,
            }),
            2 => Tensor::Extra(name),
            3 => Tensor::Values((0..rng.random_range(0..9)).collect()),
            4 => Tensor::Matrix(Matrix {
                rows: 3,
                columns: 2,
                values: (0..if rng.random_bool(0.9) { 6 } else { 5 }).collect(),
            }),
            5 => Tensor::Scratch(Scratch {
                shape: vec![3],
                dtype: Dtype::Int32,
            }),
            6 => Tensor::RebasedQueryStartLoc(range),
            7 => Tensor::ContextLens(range),
            8 => Tensor::HasContext(range),
            9 => Tensor::DcpLocal(DcpLocal {
                source: *[DcpSource::SeqLens, DcpSource::ContextLens]
                    .choose(rng)
                    .unwrap(),
                rows: range,
            }),
            10 => Tensor::CuPageCounts(range),
            11 => Tensor::GatherPages(range),
            12 => Tensor::SelectPages(PageSelection {
                rows: range,
                columns: (0..total).map(|_| rng.random_range(0..columns)).collect(),
            }),
            13 => Tensor::StateIndices(StateGather {
                rows: self.chosen(rng, self.rows()),
                column: *[StateColumn::First, StateColumn::LastToken]
                    .choose(rng)
                    .unwrap(),
                width: rng.random_range(0..4),
            }),
            14 => Tensor::Rows(RowGather {
                source: input,
                rows: self.chosen(rng, self.rows()),
            }),
            15 => Tensor::ExtraRows(ExtraGather {
                name,
                rows: self.chosen(rng, 6),
            }),
            16 => Tensor::RowMask(self.chosen(rng, self.rows())),
            17 => Tensor::RowTokens(self.chosen(rng, self.rows())),
            18 => Tensor::TokenToRow,
            19 => Tensor::SegmentIds,
            20 => Tensor::ConvChunkRows(chunks),
            _ => Tensor::ConvChunkOffsets(chunks),
        };
        let mut segments = vec![rng.random_range(0..3)];
        for _ in 0..rng.random_range(0..5) {
            segments.push(segments.last().unwrap() + rng.random_range(0..6));
        }
        (tensor, indptr, segments)
    }
}

/// A machine that holds the step's tensors.
fn machine(step: &Step) -> Machine {
    let tensors = &step.tensors;
    let limits = StepLimits {
        max_num_reqs: 8,
        max_num_tokens: 512,
        table_width: tensors.block_table_width,
        max_num_logits: 8,
    };
    let mut machine = Machine::new(limits, BLOCK);
    let parallel = &step.config.parallel;
    machine.dcp = [
        parallel.dcp_world_size as i32,
        parallel.dcp_rank as i32,
        parallel.cp_kv_cache_interleave_size as i32,
    ];
    let ptrs = machine.ptrs;
    machine.write(ptrs.query_start_loc, &tensors.query_start_loc);
    machine.write(ptrs.seq_lens, &tensors.seq_lens);
    machine.write(ptrs.block_table, &tensors.block_table);
    machine.write(ptrs.slot_mapping, &tensors.slot_mapping);
    machine.write(ptrs.positions, &tensors.positions);
    if let Some(causal) = &tensors.causal {
        machine.write(ptrs.causal, causal);
    }
    machine
}

/// Lowers, runs, and compares; whether the resolver had a value.
fn check(step: &Step, tensor: &Tensor, indptr: &[i32], segments: &[i32], rng: &mut Pcg64) -> bool {
    let extras: [(&str, &[i32]); 1] = [("own", &step.extra)];
    let inputs = StepInputs {
        extras: &extras,
        ..step.tensors.inputs()
    };
    let resolver = Resolver::new(&step.config, &step.common, inputs);
    let siblings = Siblings {
        paged_kv_indptr: Some(indptr),
        cu_seq_lens: Some(segments),
    };
    let wide = Resolver::is_i64(tensor);
    let expected: Result<Vec<i64>, _> = if wide {
        resolver
            .resolve_i64(tensor)
            .map(|values| values.into_owned())
    } else {
        let values = resolver.resolve_i32(tensor, siblings);
        values.map(|values| values.iter().map(|&value| value.into()).collect())
    };
    let mut machine = machine(step);
    let len = expected.as_ref().map_or(64, Vec::len);
    let room = len + rng.random_range(0..5);
    let to = Destination {
        ptr: machine.free,
        room,
        fill: -9,
    };
    let ptrs = machine.ptrs;
    let context = LowerContext {
        ptrs: &ptrs,
        inputs: &inputs,
        num_tokens: step.common.num_actual_tokens as usize,
        block_size: BLOCK,
    };
    let mut stage = Stage::new(1 << 16, 4);
    let lowered = lower_tensor(tensor, siblings, to, "a tensor", &context, &mut stage);
    let mut expected = match (expected, lowered) {
        (Ok(expected), Ok(())) => expected,
        (Err(_), Err(_)) => return false,
        (expected, lowered) => panic!("{tensor:?}: resolver {expected:?}, lowering {lowered:?}"),
    };
    if len > 0 {
        let short = Destination {
            room: len - 1,
            ..to
        };
        let mut stage = Stage::new(1 << 16, 4);
        let refused = lower_tensor(tensor, siblings, short, "a tensor", &context, &mut stage);
        assert!(
            refused.is_err(),
            "{tensor:?} fits {} of {len} elements",
            len - 1
        );
    }
    let mut slot = vec![0; slot_bytes(1 << 16, 8)];
    let mut ops = OpLists::new(8);
    let mut packer = Packer::new(&mut slot, &mut ops);
    packer.phase(Phase::First);
    // Something before it, so that its lists move.
    packer
        .values_i32(
            "before",
            Destination {
                ptr: machine.free.offset(1 << 18),
                room: 3,
                fill: 0,
            },
            &[5],
        )
        .unwrap();
    packer.stage("a tensor", &stage).unwrap();
    let packed = packer.finish();
    machine.run(
        &slot,
        packed,
        step.rows() as usize,
        step.common.num_actual_tokens as usize,
    );
    expected.resize(room, -9);
    let found: Vec<i64> = if wide {
        machine.read_i64(machine.free, room)
    } else {
        machine
            .read_i32(machine.free, room)
            .into_iter()
            .map(i64::from)
            .collect()
    };
    assert_eq!(
        found, expected,
        "{tensor:?} with {siblings:?} of {:?}",
        step.tensors
    );
    // Nothing behind the room is touched.
    let behind = machine.free.offset(room * if wide { 8 } else { 4 });
    assert_eq!(machine.read_i32(behind, 2), [0xEEEE_EEEE_u32 as i32; 2]);
    true
}

#[test]
fn operations_leave_what_the_resolver_says() {
    let mut rng = Pcg64::seed_from_u64(7);
    let mut had_value = 0;
    const CASES: usize = 20_000;
    for _ in 0..CASES / 20 {
        let step = Step::random(&mut rng);
        for _ in 0..20 {
            let (tensor, indptr, segments) = step.tensor(&mut rng);
            had_value += usize::from(check(&step, &tensor, &indptr, &segments, &mut rng));
        }
    }
    // Most are well formed; some are refused.
    assert!(
        had_value > CASES / 2 && had_value < CASES,
        "{had_value} of {CASES}"
    );
}

#[test]
fn a_table_of_another_width_than_the_devices_is_refused() {
    let mut rng = Pcg64::seed_from_u64(1);
    let step = loop {
        let step = Step::random(&mut rng);
        if step.rows() > 1 {
            break step;
        }
    };
    let machine = machine(&step);
    let narrow = vec![0; step.tensors.seq_lens.len() * 3];
    let inputs = StepInputs {
        block_table: BlockTable {
            data: &narrow,
            width: 3,
        },
        ..step.tensors.inputs()
    };
    let context = LowerContext {
        ptrs: &machine.ptrs,
        inputs: &inputs,
        num_tokens: 1,
        block_size: BLOCK,
    };
    let to = Destination {
        ptr: machine.free,
        room: 1 << 16,
        fill: 0,
    };
    let tensor = Tensor::Input(Input::BlockTable);
    let lowered = lower_tensor(
        &tensor,
        Siblings::NONE,
        to,
        "table",
        &context,
        &mut Stage::new(64, 4),
    );
    let message = lowered.unwrap_err().to_string();
    assert!(message.contains("3 columns"), "{message}");
}

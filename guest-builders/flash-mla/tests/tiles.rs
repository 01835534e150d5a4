//! The tile schedule of an fp8 cache: every block of every request once, parts even, splits counted.

use flash_mla_builder::EvenParts;
use proptest::prelude::*;
use timetable_guest::{
    Builder,
    testing::{batch, config},
    types::{
        BuilderConfig, Tensor,
        flash_mla::{DecodeSchedule, MlaDecode},
    },
};

fn fp8(workers: u32, heads: u32) -> BuilderConfig {
    let mut config = config();
    config.kv_cache_spec.block_size = 64;
    config.kv_cache_spec.num_kv_heads = 1;
    config.kv_cache_spec.head_size = 576;
    config.attention.kv_cache_dtype = "fp8".to_owned();
    config.attention.num_heads = heads;
    config.device.num_workers = workers;
    config
}

fn decode(config: BuilderConfig, keys: &[u32], query: u32) -> MlaDecode {
    let rows: Vec<(u32, u32)> = keys.iter().map(|&keys| (query, keys.max(query))).collect();
    let mut builder = EvenParts::create(config).expect("a good configuration");
    let metadata = builder.build(&batch(&rows), false).expect("metadata");
    assert_eq!(metadata.prefill, None);
    metadata.decode.expect("decodes")
}

/// (parts, num_splits) of a schedule by value.
fn tiles(decode: &MlaDecode) -> (Vec<[i32; 8]>, Vec<i32>) {
    let DecodeSchedule::Tiles(tiles) = &decode.schedule else {
        panic!("{:?}", decode.schedule);
    };
    let (Tensor::Matrix(parts), Tensor::Values(splits)) =
        (&tiles.tile_scheduler_metadata, &tiles.num_splits)
    else {
        panic!("not by value");
    };
    assert_eq!(parts.columns, 8);
    let rows = parts.values.chunks_exact(8);
    (
        rows.map(|row| row.try_into().unwrap()).collect(),
        splits.clone(),
    )
}

proptest! {
    #[test]
    fn every_block_is_in_one_part_and_parts_are_even(
        keys in proptest::collection::vec(1_u32..60_000, 1..70),
        workers in 1_u32..300,
        heads in prop_oneof![Just(16_u32), Just(64), Just(128)],
        query in 1_u32..5,
    ) {
        let decode = decode(fp8(workers, heads), &keys, query);
        let (parts, splits) = tiles(&decode);
        prop_assert_eq!(parts.len() as u32, (workers / (heads * query).div_ceil(64)).max(1));
        let blocks: Vec<i32> = keys.iter().map(|keys| keys.max(&query).div_ceil(64) as i32).collect();
        // Where the next part must begin, and which split of its request that is.
        let (mut request, mut block, mut split) = (0, 0, 0);
        let mut counted = vec![0];
        let total: i32 = blocks.iter().map(|blocks| blocks + 5).sum();
        let share = (total as u32).div_ceil(parts.len() as u32) as i32 + 5;
        for [first, first_block, last, end, first_split, ..] in parts {
            prop_assert_eq!((first, first_block, first_split), (request, block, split));
            let mut cost = 0;
            while request < last || (request == last && block < end) {
                let of_request = blocks[request as usize];
                let to = if request < last { of_request } else { end };
                cost += to - block + 5;
                if to == of_request {
                    counted.push(counted[request as usize] + split + 1);
                    (request, block, split) = (request + 1, 0, 0);
                } else {
                    (block, split) = (to, split + 1);
                }
            }
            prop_assert!(cost <= share, "{cost} of {share}");
        }
        prop_assert_eq!(request as usize, keys.len());
        let most = counted.windows(2).map(|pair| pair[1] - pair[0]).max();
        prop_assert_eq!(most, Some(decode.max_num_splits as i32));
        prop_assert_eq!(splits, counted);
    }
}

#[test]
fn field_case_17_padded_rows_add_no_splits() {
    let build = |rows: &[(u32, u32)]| {
        let mut builder = EvenParts::create(fp8(3, 16)).expect("a builder");
        let metadata = builder.build(&batch(rows), false).expect("metadata");
        tiles(&metadata.decode.expect("decodes"))
    };
    let live = [(1, 64), (1, 700), (1, 64)];
    let wanted = [
        [0, 0, 1, 4, 0, 0, 0, 0],
        [1, 4, 1, 11, 1, 0, 0, 0],
        [2, 0, 2, 1, 0, 0, 0, 0],
    ];
    assert_eq!(build(&live), (wanted.to_vec(), vec![0, 1, 3, 4]));
    // Whatever length the padding has, since no query is there to see a key.
    for len in [0, 1] {
        let padded = [&live[..], &[(0, len); 3]].concat();
        let (parts, splits) = build(&padded);
        assert_eq!(splits, [0, 1, 3, 4, 4, 4, 4]);
        assert_eq!(parts, wanted);
    }
    // Parts without work stand behind the last row, padding included.
    let (parts, splits) = build(&[(1, 64), (0, 0)]);
    assert_eq!(splits, [0, 1, 1]);
    assert_eq!(parts[1..], [[2, 0, 2, 0, 0, 0, 0, 0]; 2]);
}

#[test]
fn a_schedule_is_made_where_the_host_knows_the_lengths() {
    let lazy = |config: BuilderConfig| {
        let decode = decode(config, &[100, 200], 1);
        assert_eq!(decode.max_num_splits, 0);
        decode.schedule == DecodeSchedule::Lazy
    };
    let mut bf16 = fp8(132, 16);
    bf16.attention.kv_cache_dtype = "auto".to_owned();
    assert!(lazy(bf16.clone()));
    let mut ranks = fp8(132, 16);
    ranks.parallel.dcp_world_size = 2;
    assert!(lazy(ranks));
    let mut builder = EvenParts::create(fp8(132, 16)).expect("a builder");
    let mut common = batch(&[(1, 100)]);
    common.seq_lens_cpu_upper_bound.clear();
    let decode = builder.build(&common, false).expect("metadata").decode;
    assert_eq!(decode.expect("a decode").schedule, DecodeSchedule::Lazy);
    // One part whatever the batch: nothing is split.
    bf16.batch_invariant = true;
    let (parts, splits) = tiles(&self::decode(bf16, &[6_400, 65], 1));
    assert_eq!(parts, [[0, 0, 1, 2, 0, 0, 0, 0]]);
    assert_eq!(splits, [0, 1, 2]);
}

#[test]
fn what_the_backend_does_not_have_is_declined() {
    let mut wide = fp8(132, 16);
    wide.kv_cache_spec.head_size = 128;
    let error = EvenParts::create(wide).err().expect("declined");
    assert!(
        error
            .message
            .starts_with("Head dimension 128 is not supported by MLA."),
        "{}",
        error.message
    );
    let mut builder = EvenParts::create(fp8(132, 16)).expect("a builder");
    let mut common = batch(&[(1, 100)]);
    common.causal = timetable_guest::types::Causal::All(false);
    let error = builder.build(&common, false).expect_err("not causal");
    assert!(
        error
            .message
            .starts_with("Non-causal multi-token MLA requires"),
        "{}",
        error.message
    );
    // A context that not one block of fits a workspace of.
    let mut small = fp8(132, 16);
    small.options = vec![("chunked_prefill_workspace_size".to_owned(), "0".to_owned())];
    let error = EvenParts::create(small).err().expect("declined");
    assert!(
        error.message.contains("is not a whole number from 1 to"),
        "{}",
        error.message
    );
}

//! Pages of keys, a kernel's blocks, dealt out to parts that run at once, in order. The table's form is FlashMLA's, whose own kernel
//! makes it for an fp8 cache (`get_mla_metadata`); how much a part gets is ours. It must never know a device.

/// What a request costs a part beyond its blocks, in blocks.
const OVERHEAD: i64 = 5;

/// The schedule.
pub struct Tiles {
    /// Row-major [parts, 8]: first request, its first block, last request, the block after its last one, the first split of the
    /// first request, zeros. A part without work begins and ends behind the last request.
    ///
    /// A padded row, one without queries or keys, is in no part.
    pub parts: Vec<i32>,
    /// s32 [requests + 1]: running sum of splits, to which a padded row adds nothing.
    pub num_splits: Vec<i32>,
    /// Of one request.
    pub max_num_splits: u32,
}

/// Parts of like cost: each takes blocks until it has its share, which is such that the last has no more than the others.
///
/// A part whose share ends within a request leaves its overhead unused at most, so with that added to the mean all is dealt.
/// `query_start_loc`: s32 [requests + 1].
pub fn even(seq_lens: &[i32], query_start_loc: &[i32], block_size: u32, parts: u32) -> Tiles {
    let requests = seq_lens.len();
    let blocks = |request: usize| match query_start_loc[request + 1] > query_start_loc[request] {
        true => i64::from((seq_lens[request].max(0) as u32).div_ceil(block_size)),
        false => 0,
    };
    let total: i64 = (0..requests)
        .map(blocks)
        .filter(|&blocks| blocks > 0)
        .map(|blocks| blocks + OVERHEAD)
        .sum();
    let share = (total + i64::from(parts) - 1) / i64::from(parts) + OVERHEAD;
    let mut table = Vec::with_capacity(8 * parts as usize);
    let mut num_splits = Vec::with_capacity(requests + 1);
    num_splits.push(0);
    // From `request` on, the first that is no padding; what is passed over repeats the sum.
    let pass_padding = |mut request: usize, num_splits: &mut Vec<i32>| {
        while request < requests && blocks(request) == 0 {
            num_splits.push(num_splits[request]);
            request += 1;
        }
        request
    };
    let mut request = pass_padding(0, &mut num_splits);
    let (mut block, mut split, mut most) = (0_i64, 0_i32, 1_i32);
    for _ in 0..parts {
        let (first, first_block, first_split) = (request, block, split);
        let mut left = share;
        let mut end = (request, block);
        while request < requests {
            let rest = blocks(request) - block;
            if left >= rest + OVERHEAD {
                end = (request, block + rest);
                left -= rest + OVERHEAD;
                num_splits.push(num_splits[request] + split + 1);
                most = most.max(split + 1);
                (block, split) = (0, 0);
                request = pass_padding(request + 1, &mut num_splits);
                continue;
            }
            if left > OVERHEAD {
                block += left - OVERHEAD;
                split += 1;
                end = (request, block);
            }
            break;
        }
        let row = [
            first as i64,
            first_block,
            end.0 as i64,
            end.1,
            i64::from(first_split),
        ];
        table.extend(row.map(|value| value as i32));
        table.extend([0; 3]);
    }
    Tiles {
        parts: table,
        num_splits,
        max_num_splits: most as u32,
    }
}

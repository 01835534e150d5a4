//! Decodes first. The first-generation runner reorders its persistent batch with as few swaps as that takes; the second sorts
//! the step's requests. It must never know what the rows carry.

/// One row of the persistent batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReorderRequest {
    /// Tokens scheduled in this step.
    pub num_scheduled_tokens: u32,
    /// Tokens computed before it.
    pub num_computed_tokens: u32,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
}

/// The swaps of rows, in the order in which they are made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reorder {
    /// Pairs of rows to exchange.
    pub swaps: Vec<(u32, u32)>,
}

impl Reorder {
    /// Did anything move?
    #[must_use]
    pub fn modified(&self) -> bool {
        !self.swaps.is_empty()
    }

    /// Makes the swaps on a vector with one element per row.
    ///
    /// # Panics
    /// If the vector is shorter than the batch was.
    pub fn apply<T>(&self, rows: &mut [T]) {
        for &(a, b) in &self.swaps {
            rows.swap(a as usize, b as usize);
        }
    }
}

/// Region of a row: decode, short extend, long extend, prefill.
fn region(request: &ReorderRequest, decode_threshold: u32) -> usize {
    let short = request.num_scheduled_tokens <= decode_threshold;
    if request.num_computed_tokens == 0 {
        3
    } else if !short {
        2
    } else if request.num_computed_tokens < request.num_prompt_tokens {
        1
    } else {
        0
    }
}

/// Plans the order decodes, short extends, long extends, prefills.
///
/// A decode has computed its prompt and schedules at most `decode_threshold` tokens; a short extend schedules as few but is
/// still in its prompt; a long extend has context and schedules more; a prefill has no context. Rows that already stand in
/// their region stay where they are; the others fill the free places region by region, in their order, and the permutation
/// is made by swaps along its cycles. (vLLM 0.33 `reorder_batch_to_split_decodes_and_prefills`.)
#[must_use]
pub fn reorder_batch_to_split_decodes_and_prefills(
    requests: &[ReorderRequest],
    decode_threshold: u32,
) -> Reorder {
    let regions: Vec<usize> = requests
        .iter()
        .map(|request| region(request, decode_threshold))
        .collect();
    let mut ends = [0usize; 4];
    for &region in &regions {
        ends[region] += 1;
    }
    for region in 1..4 {
        ends[region] += ends[region - 1];
    }
    let wanted = |row: usize| ends.iter().position(|&end| row < end).unwrap_or(3);
    // Places whose row is of another region, and the rows that go there, by region and then by place.
    let places: Vec<usize> = (0..regions.len())
        .filter(|&row| wanted(row) != regions[row])
        .collect();
    let mut movers = places.clone();
    movers.sort_by_key(|&row| regions[row]);
    let mut goes_to: Vec<usize> = (0..regions.len()).collect();
    for (&row, &place) in movers.iter().zip(&places) {
        goes_to[row] = place;
    }
    let mut reorder = Reorder::default();
    for &row in &movers {
        // Follow the cycle: the row at `row` goes to its place, the one that stood there comes to `row` and goes on.
        let mut place = goes_to[row];
        while place != row {
            reorder.swaps.push((row as u32, place as u32));
            place = core::mem::replace(&mut goes_to[place], place);
        }
        goes_to[row] = row;
    }
    reorder
}

/// The second-generation runner's order of a step's rows: those that verify drafts first, then those of exactly
/// `decode_query_len` tokens, then the others by rising token count; equal rows keep their order. Each request is
/// (has draft tokens, scheduled tokens). Returns the requests in row order.
#[must_use]
pub fn order_decodes_first(requests: &[(bool, u32)], decode_query_len: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&request| {
        let (has_drafts, tokens) = requests[request];
        (!has_drafts, tokens != decode_query_len, tokens)
    });
    order
}

//! The tile schedule: every page of every decode in one part, parts in order, splits counted; padded rows have none.

use timetable_types::{Tensor, flash_mla::TileSchedule};

use super::VerifyContext;
use crate::verify::refusal::{Refusal, Rule, absent, between, equal, length};

/// Columns of a part.
const COLUMNS: usize = 8;
/// Parts of the largest device.
const MAX_PARTS: i64 = 1 << 12;

pub(super) fn verify(
    schedule: &TileSchedule,
    max_num_splits: u32,
    rows: u32,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let TileSchedule {
        tile_scheduler_metadata,
        num_splits,
    } = schedule;
    const PARTS: &str = "tile_scheduler_metadata";
    const SPLITS: &str = "num_splits";
    // A rank's pages are counted by its own lengths, which the host does not have.
    absent(PARTS, ctx.dcp().world > 1)?;
    let Tensor::Matrix(parts) = tile_scheduler_metadata else {
        return Err(Refusal::reference(PARTS, "parts, as a matrix by value"));
    };
    let Tensor::Values(splits) = num_splits else {
        return Err(Refusal::reference(SPLITS, "splits, by value"));
    };
    equal(PARTS, parts.columns, COLUMNS as i64)?;
    between(PARTS, parts.rows, 1, MAX_PARTS)?;
    length(PARTS, parts.values.len(), COLUMNS * parts.rows as usize)?;
    let rows = rows as usize;
    length(SPLITS, splits.len(), rows + 1)?;
    equal(SPLITS, splits[0], 0)?;
    let page = ctx.config.kv_cache_spec.block_size.max(1);
    let (lens, starts) = (ctx.lens(), ctx.inputs.query_start_loc);
    // A padded row, one without queries or keys, has none.
    let pages = |row: usize| match starts[row + 1] > starts[row] {
        true => i64::from((lens[row].max(0) as u32).div_ceil(page)),
        false => 0,
    };
    let counted = |row: usize, count: i64| {
        let (found, wanted) = (splits[row + 1], i64::from(splits[row]) + count);
        match i64::from(found) == wanted {
            true => Ok(()),
            false => Err(Refusal::at(
                SPLITS,
                row + 1,
                found.into(),
                Rule::Equal,
                wanted,
            )),
        }
    };
    // From `row` on, the first that is no padding: what is passed over adds nothing to the sum.
    let pass_padding = |mut row: usize| {
        while row < rows && pages(row) == 0 {
            counted(row, 0)?;
            row += 1;
        }
        Ok(row)
    };
    // Where the next part begins: request, page, and which split of the request that is.
    let (mut row, mut from, mut split) = (pass_padding(0)?, 0_i64, 0_i64);
    let mut most = 0;
    for (index, part) in parts.values.chunks_exact(COLUMNS).enumerate() {
        let wrong = |value: i32, wanted: i64| {
            Err(Refusal::at(PARTS, index, value.into(), Rule::Equal, wanted))
        };
        for (&value, wanted) in part.iter().zip([row as i64, from]) {
            if i64::from(value) != wanted {
                return wrong(value, wanted);
            }
        }
        if i64::from(part[4]) != split {
            return wrong(part[4], split);
        }
        if let Some(&value) = part[5..].iter().find(|value| **value != 0) {
            return wrong(value, 0);
        }
        let (last, end) = (i64::from(part[2]), i64::from(part[3]));
        // A part goes forward: to a page behind its first, of this request or of a later one that there is.
        let stays = last == row as i64 && end == from;
        let bound = match row < rows {
            true => rows as i64 - 1,
            false => rows as i64,
        };
        if last < row as i64 || last > bound {
            let (rule, bound) = match last < row as i64 {
                true => (Rule::AtLeast, row as i64),
                false => (Rule::AtMost, bound),
            };
            return Err(Refusal::at(PARTS, index, last, rule, bound));
        }
        if stays {
            continue;
        }
        // Behind the last request there is nothing.
        if row == rows {
            return Err(Refusal::at(PARTS, index, end, Rule::Equal, from));
        }
        let last = last as usize;
        let low = if last == row { from + 1 } else { 1 };
        if end < low || end > pages(last) {
            let (rule, bound) = match end < low {
                true => (Rule::AtLeast, low),
                false => (Rule::AtMost, pages(last)),
            };
            return Err(Refusal::at(PARTS, index, end, rule, bound));
        }
        // Requests that end in this part have all their splits now.
        let done = if end == pages(last) { last + 1 } else { last };
        for ended in row..done {
            let count = match pages(ended) {
                0 => 0,
                _ if ended == row => split + 1,
                _ => 1,
            };
            counted(ended, count)?;
            most = most.max(count);
        }
        (row, from, split) = match done > last {
            true => (pass_padding(done)?, 0, 0),
            false if last == row => (last, end, split + 1),
            false => (last, end, 1),
        };
    }
    if row < rows {
        return Err(Refusal::new(PARTS, row as i64, Rule::AtLeast, rows as i64));
    }
    // Sizes the partial results.
    between("max_num_splits", max_num_splits, most, MAX_PARTS)
}

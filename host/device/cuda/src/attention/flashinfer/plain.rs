//! FLASHINFER's metadata for plain attention (f32), which has no lists: query starts, key lengths and a table of the plan's
//! pages, one row a request. It must never know a work list.

use timetable_attention::Siblings;
use timetable_types::{Input, PageSelection, RowRange, Tensor, TensorSlice};

use super::part::Part;
use crate::attention::state::{PrepareError, Step, inconsistent, of_field};
use crate::driver::DevicePtr;
use crate::upload::{Destination, LowerContext, Sink, lower_tensor};

impl Part<'_> {
    /// The part's rows for plain attention.
    pub(super) fn stage_plain(
        &self,
        step: &mut Step<'_>,
        num_tokens: usize,
    ) -> Result<(), PrepareError> {
        let width = step.config.limits.table_width;
        let (first, n) = (self.rows.start as usize, self.num_rows());
        let to = *step.workspace.ptrs();
        let at = |ptr: DevicePtr, row: usize, columns: usize| ptr.offset(4 * row * columns);
        let context = LowerContext {
            ptrs: step.ptrs,
            inputs: step.context.inputs,
            num_tokens,
            block_size: step.config.block_size,
        };
        // Plain attention reads the step's query starts: the part's are the same, rebased.
        let own = step
            .context
            .inputs
            .query_start_loc
            .get(first..=first + n)
            .unwrap_or(&[]);
        let rebased = step
            .scratch
            .starts
            .iter()
            .map(|&start| i64::from(start) + self.first_token as i64);
        if !rebased.eq(own.iter().map(|&start| i64::from(start))) {
            return Err(inconsistent(
                "qo_indptr",
                "in f32 it must be the step's own, rebased".into(),
            ));
        }
        let lens = Destination {
            ptr: at(to.seq_lens, first, 1),
            room: n,
            fill: 0,
        };
        self.stage_key_lens(step, lens, &context)?;
        let causal = Destination {
            ptr: at(to.causal, first, 1),
            room: n,
            fill: i32::from(self.plan.causal),
        };
        step.stage.fill("causal", causal)?;
        const FIELD: &str = "paged_kv_indices";
        for row in 0..n {
            if self.pages_of(row) > width {
                return Err(inconsistent(
                    FIELD,
                    format!(
                        "{} pages in row {row} of a table of {width} columns",
                        self.pages_of(row)
                    ),
                ));
            }
        }
        let Tensor::SelectPages(selection) = &self.plan.paged_kv_indices else {
            // The first pages of each row: the rows themselves.
            let rows = Tensor::Slice(TensorSlice {
                source: Input::BlockTable,
                start: self.rows.start,
                end: self.rows.end,
            });
            let table = Destination {
                ptr: at(to.plain_table, first, width),
                room: n * width,
                fill: 0,
            };
            return lower_tensor(&rows, Siblings::NONE, table, FIELD, &context, step.stage)
                .map_err(of_field(FIELD));
        };
        let mut columns = selection.columns.as_slice();
        for row in 0..n {
            let count = self.pages_of(row);
            let Some((own, rest)) = columns.split_at_checked(count) else {
                return Err(inconsistent(
                    FIELD,
                    format!("{} columns, row {row} needs more", columns.len()),
                ));
            };
            columns = rest;
            let one = Tensor::SelectPages(PageSelection {
                rows: RowRange {
                    start: self.rows.start + row as u32,
                    end: self.rows.start + row as u32 + 1,
                },
                columns: own.to_vec(),
            });
            let to = Destination {
                ptr: at(to.plain_table, first + row, width),
                room: count,
                fill: 0,
            };
            let sums = [0, count as i32];
            lower_tensor(
                &one,
                Siblings::pages(&sums),
                to,
                FIELD,
                &context,
                step.stage,
            )
            .map_err(of_field(FIELD))?;
        }
        Ok(())
    }
}

/// The step's query starts, of the parts' rows; rows after them have no tokens.
pub(super) fn stage_query_starts(
    step: &mut Step<'_>,
    covered: usize,
    num_tokens: usize,
) -> Result<(), PrepareError> {
    const FIELD: &str = "query_start_loc";
    let starts = step.context.inputs.query_start_loc;
    let rows = starts.len().saturating_sub(1);
    if covered != rows {
        return Err(inconsistent(
            "num_prefills",
            format!("the parts have {covered} of the step's {rows} rows"),
        ));
    }
    let context = LowerContext {
        ptrs: step.ptrs,
        inputs: step.context.inputs,
        num_tokens,
        block_size: step.config.block_size,
    };
    let to = Destination {
        ptr: step.workspace.ptrs().query_start_loc,
        room: starts.len(),
        fill: 0,
    };
    lower_tensor(
        &Tensor::Input(Input::QueryStartLoc),
        Siblings::NONE,
        to,
        FIELD,
        &context,
        step.stage,
    )
    .map_err(of_field(FIELD))
}

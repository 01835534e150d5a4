//! FLASHINFER over a part of the context. Of each request it keeps the pages with the first keys (the "sink", which models put
//! much weight on) and those within a window before the step's first query; what lies between is not read.
//!
//! It may do so only where the operator granted `subset`: `examples/examples/04_window_sink.rs` shows both. Options: `sink`, keys
//! at the beginning (4), and `window`, keys before a query with the query's own (1,024). It must never know a block id.

use timetable_guest::{
    Builder, export_flashinfer,
    flashinfer::{Choice, Part, Record, Selection},
    option,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flashinfer::Metadata,
    },
};

/// Keeps sink and window.
pub struct WindowSink {
    record: Record,
    /// Keys at the beginning of a request that are always read.
    sink: u32,
    /// Keys before a query that are always read, the query's own included.
    window: u32,
}

impl WindowSink {
    /// Pages [0, .0) and from .1 on.
    fn kept(&self, part: &Part<'_>, row: usize) -> (u32, u32) {
        let first_query = (part.seq_lens[row] as u32).saturating_sub(part.query_lens[row]);
        let first_key = (first_query + 1).saturating_sub(self.window);
        let window = (first_key / part.page_size).min(part.first_own_page(row));
        (self.sink.div_ceil(part.page_size).min(window), window)
    }
}

impl Builder for WindowSink {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            sink: option(&config, "sink", 4, 0..=1 << 20)?,
            window: option(&config, "window", 1024, 1..=1 << 20)?,
            record: Record::new(config, 1)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flashinfer, window and sink")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |part| Choice {
            selection: Some(Selection::of_runs(part, |row| {
                let (sink, window) = self.kept(part, row);
                [0..sink, window..part.pages(row)]
            })),
            ..Choice::one_chunk()
        })
    }
}

export_flashinfer!(WindowSink);

#[cfg(test)]
mod tests {
    use super::*;
    use timetable_guest::testing::{batch, config};
    use timetable_guest::types::{Tensor, flashinfer::Decode};

    #[test]
    fn the_middle_of_a_long_request_is_left_out() {
        let mut config = config();
        config.options = vec![
            ("sink".to_owned(), "4".to_owned()),
            ("window".to_owned(), "32".to_owned()),
        ];
        let mut builder = WindowSink::create(config).unwrap();
        let built = builder.build(&batch(&[(1, 100), (1, 20)]), false).unwrap();
        let Some(Decode::Wrapper(plan)) = built.decode else {
            panic!("two decodes");
        };
        // Query 99 sees keys 68 to 99 of its window: pages 4 to 6; the second request is all window.
        assert_eq!(plan.paged_kv_indptr, [0, 4, 6]);
        let Tensor::SelectPages(selection) = plan.paged_kv_indices else {
            panic!("a selection");
        };
        assert_eq!(selection.columns, [0, 4, 5, 6, 0, 1]);
        assert_eq!(plan.seq_lens, [3 * 16 + 4, 20]);
    }
}

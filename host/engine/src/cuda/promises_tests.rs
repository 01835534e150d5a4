use timetable_attention::{FaultKind, graphs::RuntimeMode};
use timetable_types::{
    BuildError, BuilderInfo, CommonAttentionMetadata, CudagraphSupport, ErrorKind, Family, Metadata,
};

use super::*;

fn promise(splits: u32, items: u32) -> LaunchPromise {
    LaunchPromise {
        max_num_splits: splits,
        max_work_items: items,
        scratch_bytes: 0,
        max_query_len: 1,
        uniform_query_len: Some(1),
    }
}

fn graph(tokens: u32) -> BatchExecutionDescriptor {
    BatchExecutionDescriptor {
        cg_mode: RuntimeMode::Full,
        num_tokens: tokens,
        num_reqs: Some(tokens),
        uniform_token_count: Some(1),
        max_query_len: None,
        num_active_loras: 0,
        num_ubatches: 1,
    }
}

/// Two groups, graphs of 8 and 4 tokens, everything captured for 2 splits.
fn served() -> Promises {
    Promises {
        full: [8, 4]
            .map(|tokens| FullGraph {
                descriptor: graph(tokens),
                promises: vec![promise(2, 2 * tokens); 2],
            })
            .into(),
        eager: vec![promise(2, 100); 2],
    }
}

const EAGER: CaptureShape = CaptureShape {
    num_tokens: 50,
    num_reqs: 8,
    max_query_len: 50,
    uniform_query_len: None,
};

/// Promises so many splits, or fails.
struct Promising(Result<u32, BuildFault>);

impl MetadataBuilder for Promising {
    fn family(&self) -> Family {
        Family::FlashAttn
    }

    fn info(&self) -> &BuilderInfo {
        const {
            &BuilderInfo {
                name: String::new(),
                cudagraph_support: CudagraphSupport::Always,
                reorder_batch_threshold: None,
                varlen_cudagraph_max_query_len: None,
                supports_update_block_table: false,
                supports_draft_decode_metadata_update: false,
                needs: Vec::new(),
                max_scratch_bytes: 0,
            }
        }
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let splits = self.0.clone()?;
        Ok(promise(splits, splits * shape.num_tokens))
    }

    fn build(
        &mut self,
        _common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        unreachable!("only promises are asked for")
    }

    fn update_block_table(
        &mut self,
        _metadata: &Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        unreachable!("only promises are asked for")
    }
}

#[test]
fn a_promise_that_fits_keeps_the_graphs() {
    for splits in [1, 2] {
        let grown = served().grown_for(1, &mut Promising(Ok(splits)), &EAGER);
        assert_eq!(grown, Ok(None), "{splits} splits");
    }
}

#[test]
fn a_larger_promise_grows_its_own_group_only() {
    let (grown, reason) = served()
        .grown_for(1, &mut Promising(Ok(5)), &EAGER)
        .expect("answers")
        .expect("does not fit");
    assert!(
        reason.contains("max_num_splits 5 exceeds the captured 2"),
        "{reason}"
    );
    for (tokens, full) in [8, 4].into_iter().zip(&grown.full) {
        assert_eq!(full.promises[0], promise(2, 2 * tokens));
        assert_eq!(full.promises[1], promise(5, 5 * tokens));
        assert_eq!(grown.of_graph(1, &graph(tokens)), Some(&full.promises[1]));
    }
    assert_eq!(grown.eager[0], promise(2, 100));
    assert_eq!(grown.eager[1], promise(5, 250));
    // What was grown fits both versions.
    for splits in [1, 2, 5] {
        let again = grown.grown_for(1, &mut Promising(Ok(splits)), &EAGER);
        assert_eq!(again, Ok(None), "{splits} splits");
    }
}

#[test]
fn only_the_numbers_that_do_not_fit_grow() {
    let mut before = served();
    before.eager[0].max_work_items = 1_000;
    let (grown, _) = before
        .grown_for(0, &mut Promising(Ok(3)), &EAGER)
        .expect("answers")
        .expect("does not fit");
    assert_eq!(grown.eager[0].max_work_items, 1_000);
    assert_eq!(grown.eager[0].max_num_splits, 3);
}

#[test]
fn a_builder_that_declines_is_served_by_the_plain_one_and_one_that_fails_is_refused() {
    let declined = BuildFault::Declined(BuildError {
        kind: ErrorKind::InvalidValue,
        message: "not this shape".into(),
    });
    let grown = served().grown_for(0, &mut Promising(Err(declined)), &EAGER);
    assert_eq!(grown, Ok(None));
    let trap = BuildFault::Fault {
        kind: FaultKind::Trap,
        message: "unreachable".into(),
    };
    let grown = served().grown_for(0, &mut Promising(Err(trap.clone())), &EAGER);
    assert_eq!(grown, Err(trap));
}

#[test]
fn a_graph_that_was_not_captured_has_no_promise() {
    assert_eq!(served().of_graph(0, &graph(16)), None);
    assert_eq!(served().of_graph(2, &graph(8)), None);
}

//! What kernels take, byte for byte: the mirror of `kernels/src/params.h`.
//!
//! Knows layouts and units only. Must never know how work was chosen, who owns the memory that an address names, nor how a
//! kernel is launched. `kernels/src/params.h` is the one description; a test holds names, order, types and sizes to it.
//!
//! Addresses are the device's; null is [`DevicePtr::NULL`], where a field allows it. Strides are in elements, offsets 64-bit.
//! T tokens, R requests (rows), W block-table columns, Hq query heads, Hkv KV heads, D head size, G = Hq / Hkv.

use bytemuck::{Pod, Zeroable};

use crate::driver::DevicePtr;

/// Defines each struct once: the fields, the size that the header asserts, and the list that the test compares.
macro_rules! mirror {
    ($($(#[$meta:meta])* $name:ident = $c:literal, $size:literal {
        $($(#[$field_meta:meta])* $field:ident: $type:ident,)*
    })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $type,)*
            }
            const _: () = assert!(size_of::<$name>() == $size);
        )*

        /// Every mirrored struct: its name in the header, its size in bytes, its fields and their types.
        #[cfg(test)]
        const MIRRORED: &[(&str, usize, &[(&str, &str)])] =
            &[$(($c, $size, &[$((stringify!($field), stringify!($type))),*])),*];
    };
}

mirror! {
    /// One tile of packed query rows of one request against one range of its keys. A packed row `p` of a request is token
    /// `p / G`, head `kv_head * G + p % G`. Written and read on the device.
    WorkItem = "TtWorkItem", 48 {
        /// The request's pages begin at `block_table + row * block_table_stride`.
        row: i32,
        /// The request's first query token.
        first_token: i32,
        /// Query tokens of the request.
        query_len: i32,
        /// Keys of the request, this step's included.
        kv_len: i32,
        /// First packed row.
        row_begin: i32,
        /// After the last packed row; at most the kernel's tile more than `row_begin`.
        row_end: i32,
        /// First key; a multiple of the block size.
        key_begin: i32,
        /// After the last key.
        key_end: i32,
        /// 0 or 1.
        causal: i32,
        /// Where a partial result goes; `num_slots` > 1 only.
        slot: i32,
        /// First of the tile's partial results.
        first_slot: i32,
        /// Partial results of the tile; 1: the item writes the output itself.
        num_slots: i32,
    }

    /// Written by a plan kernel, read by every attention launch of the step.
    WorkHeader = "TtWorkHeader", 16 {
        /// Items of the list, at most `max_work_items`.
        num_items: i32,
        /// Tokens `[tail_begin, tail_end)` belong to no request: output 0, LSE −∞.
        tail_begin: i32,
        /// See `tail_begin`.
        tail_end: i32,
        /// 0.
        reserved: i32,
    }

    /// Arguments of `tt_plan_flash_attn`.
    PlanParams = "TtPlanParams", 104 {
        /// [`WorkHeader`], written.
        header: DevicePtr,
        /// [`WorkItem`] `[max_work_items]`, written.
        items: DevicePtr,
        /// s32 `[R + 1]`.
        query_start_loc: DevicePtr,
        /// s32 `[R]`.
        seq_lens: DevicePtr,
        /// s32 `[R]`, each at least 1; null: all 1.
        num_splits: DevicePtr,
        /// s32 `[R]`, a permutation: the order in which rows' tiles start; null: natural.
        row_order: DevicePtr,
        /// s32 `[R]`; null: `causal_all`.
        causal: DevicePtr,
        /// R.
        num_reqs: i32,
        /// Tokens of the padded batch.
        num_tokens: i32,
        /// Tokens of a block.
        block_size: i32,
        /// G.
        heads_per_kv_head: i32,
        /// Packed rows of one tile: what the attention kernel of the list says.
        tile_rows: i32,
        /// Only requests with at least this many packed rows.
        min_packed_rows: i32,
        /// Only requests with at most this many packed rows.
        max_packed_rows: i32,
        /// The launch promise: larger entries of `num_splits` are cut to it.
        max_num_splits: i32,
        /// The launch promise: items beyond it are dropped, never written.
        max_work_items: i32,
        /// 0 or 1, for all rows.
        causal_all: i32,
        /// 1: the kernel of this list also clears the tokens that no request covers.
        with_tail: i32,
        /// 0.
        reserved: i32,
    }

    /// What changes from step to step in a FLASHINFER work list of one part (decodes or prefills), in device memory.
    WorkListSizes = "TtWorkListSizes", 40 {
        /// Entries of the list.
        num_items: i32,
        /// Requests of the part.
        num_reqs: i32,
        /// Query tiles of all its requests.
        num_tiles: i32,
        /// The part's first token.
        first_token: i32,
        /// Packed rows of one tile.
        cta_tile_q: i32,
        /// Keys of one chunk.
        kv_chunk_size: i32,
        /// 0 or 1.
        causal: i32,
        /// As in the header; equal to `tail_end`: none.
        tail_begin: i32,
        /// As in the header.
        tail_end: i32,
        /// 0.
        reserved: i32,
    }

    /// Arguments of `tt_plan_flashinfer`.
    WorkListParams = "TtWorkListParams", 104 {
        /// [`WorkHeader`], written.
        header: DevicePtr,
        /// [`WorkItem`] `[max_work_items]`, written.
        items: DevicePtr,
        /// One [`WorkListSizes`].
        sizes: DevicePtr,
        /// s32 `[n + 1]`, rebased to the part.
        qo_indptr: DevicePtr,
        /// s32 `[n + 1]`.
        paged_kv_indptr: DevicePtr,
        /// s32 `[n]`: keys of each request.
        seq_lens: DevicePtr,
        /// s32 `[w]`.
        request_indices: DevicePtr,
        /// s32 `[w]`.
        qo_tile_indices: DevicePtr,
        /// s32 `[w]`.
        kv_tile_indices: DevicePtr,
        /// s32 `[num_tiles + 1]`.
        merge_indptr: DevicePtr,
        /// G.
        heads_per_kv_head: i32,
        /// What the attention kernel of the list says: 16, 64 or 128; a list with a larger `cta_tile_q` gives no items.
        tile_rows: i32,
        /// The launch promise: items and partial results beyond it are dropped, never written.
        max_work_items: i32,
        /// Requests beyond it are ignored.
        max_reqs: i32,
        /// Tiles beyond it are ignored; the launch's shared memory is `4 (max_reqs + 1 + max_tiles)` bytes.
        max_tiles: i32,
        /// Tokens of the padded batch: no item and no tail reaches beyond.
        max_tokens: i32,
    }

    /// Arguments of the decode and prefill kernels: one layer.
    AttentionParams = "TtAttentionParams", 184 {
        /// `[T, Hq, D]`, heads D apart.
        query: DevicePtr,
        /// `[num_blocks, Hkv, block_size, 2 D]` by strides; a key, then its value, adjacent.
        kv_cache: DevicePtr,
        /// `[T, Hq, D]`, the query's dtype, written.
        output: DevicePtr,
        /// f32 `[T, Hq]`, natural logarithm, written; null: not wanted.
        lse: DevicePtr,
        /// f32 `[max_work_items, Hkv, partial_rows, D]`, scratch.
        partial_output: DevicePtr,
        /// f32 `[max_work_items, Hkv, partial_rows]`, scratch.
        partial_lse: DevicePtr,
        /// s32 `[max_work_items, Hkv]`: zeros before the first launch; every launch leaves zeros.
        merge_counters: DevicePtr,
        /// s32 `[R, W]`.
        block_table: DevicePtr,
        /// [`WorkHeader`].
        header: DevicePtr,
        /// [`WorkItem`] `[max_work_items]`.
        items: DevicePtr,
        /// fp8 caches: f32 `[1]`, or `[Hkv]` with `kv_scale_stride` 1; null: 1.
        k_scale: DevicePtr,
        /// As `k_scale`.
        v_scale: DevicePtr,
        /// Of a token.
        query_stride: i64,
        /// Of a token.
        output_stride: i64,
        /// Of a block.
        kv_block_stride: i64,
        /// Of a KV head.
        kv_head_stride: i64,
        /// Of a token within a block; 16-byte multiples, as all of the cache's strides.
        kv_token_stride: i64,
        /// Of a row.
        block_table_stride: i64,
        /// Hq.
        num_heads: i32,
        /// Hkv.
        num_kv_heads: i32,
        /// A multiple of 16.
        block_size: i32,
        /// Keys that a token sees, itself included; 0: all.
        sliding_window: i32,
        /// At least the packed rows of any item with `num_slots` > 1.
        partial_rows: i32,
        /// The launch promise; the grid is `num_kv_heads * max_work_items`.
        max_work_items: i32,
        /// 0: one scale for all heads; 1: one a head.
        kv_scale_stride: i32,
        /// Of the scores.
        scale: f32,
        /// 0: none.
        soft_cap: f32,
        /// 0.
        reserved: i32,
    }

    /// Arguments of `tt_attention_plain_f32`.
    PlainAttentionParams = "TtPlainAttentionParams", 152 {
        /// f32 `[T, Hq, D]`.
        query: DevicePtr,
        /// f32, as in [`AttentionParams`].
        kv_cache: DevicePtr,
        /// f32 `[T, Hq, D]`, written.
        output: DevicePtr,
        /// f32 `[T, Hq]`, written, or null.
        lse: DevicePtr,
        /// s32 `[R, W]`.
        block_table: DevicePtr,
        /// s32 `[R + 1]`.
        query_start_loc: DevicePtr,
        /// s32 `[R]`.
        seq_lens: DevicePtr,
        /// s32 `[R]`; null: `causal_all`.
        causal: DevicePtr,
        /// Of a token.
        query_stride: i64,
        /// Of a token.
        output_stride: i64,
        /// Of a block.
        kv_block_stride: i64,
        /// Of a KV head.
        kv_head_stride: i64,
        /// Of a token within a block.
        kv_token_stride: i64,
        /// Of a row.
        block_table_stride: i64,
        /// R.
        num_reqs: i32,
        /// T, padded.
        num_tokens: i32,
        /// Hq.
        num_heads: i32,
        /// Hkv.
        num_kv_heads: i32,
        /// At most 256.
        head_size: i32,
        /// Tokens of a block.
        block_size: i32,
        /// Keys that a token sees, itself included; 0: all.
        sliding_window: i32,
        /// 0 or 1, for all rows.
        causal_all: i32,
        /// Of the scores.
        scale: f32,
        /// 0: none.
        soft_cap: f32,
    }

    /// Arguments of `tt_reshape_and_cache_*`.
    ScatterParams = "TtScatterParams", 112 {
        /// `[num_slots, Hkv, D]`, heads D apart.
        key: DevicePtr,
        /// `[num_slots, Hkv, D]`, heads D apart.
        value: DevicePtr,
        /// As in [`AttentionParams`], written.
        kv_cache: DevicePtr,
        /// s64 `[num_slots]`; negative: skipped.
        slot_mapping: DevicePtr,
        /// fp8: stored = x / scale, saturating; null: 1.
        k_scale: DevicePtr,
        /// As `k_scale`.
        v_scale: DevicePtr,
        /// Of a token.
        key_stride: i64,
        /// Of a token.
        value_stride: i64,
        /// Of a block.
        kv_block_stride: i64,
        /// Of a KV head.
        kv_head_stride: i64,
        /// Of a token within a block.
        kv_token_stride: i64,
        /// Tokens.
        num_slots: i64,
        /// Hkv.
        num_kv_heads: i32,
        /// A multiple of 16.
        head_size: i32,
        /// Tokens of a block.
        block_size: i32,
        /// 0: one scale for all heads; 1: one a head.
        kv_scale_stride: i32,
    }

    /// One unpack operation: writes `destination[0, room)`, the tensor's own elements first and `fill` after them.
    UnpackOp = "TtUnpackOp", 64 {
        /// An [`UnpackKind`].
        kind: i32,
        /// What `kind` says.
        rows: i32,
        /// What `kind` says.
        first_row: i32,
        /// What `kind` says.
        width: i32,
        /// Elements of the destination; none beyond is written.
        room: i32,
        /// Written after the tensor's own elements.
        fill: i32,
        /// What `kind` says.
        option: i32,
        /// 0.
        reserved: i32,
        /// A persistent buffer, written.
        destination: DevicePtr,
        /// A device tensor, or null.
        source: DevicePtr,
        /// Byte offset in the slot; a multiple of 8 for s64.
        list: i64,
        /// Byte offset in the slot.
        list2: i64,
    }

    /// Arguments of `tt_unpack`.
    UnpackParams = "TtUnpackParams", 88 {
        /// The step's packed bytes on the device.
        slot: DevicePtr,
        /// [`UnpackOp`] `[num_ops]`, within the slot as a rule.
        ops: DevicePtr,
        /// s32 `[R + 1]`.
        query_start_loc: DevicePtr,
        /// s32 `[R]`.
        seq_lens: DevicePtr,
        /// s32 `[R, W]`.
        block_table: DevicePtr,
        /// Of a row.
        block_table_stride: i64,
        /// Operations of the first round: the rest may read what these wrote.
        num_first_ops: i32,
        /// Operations of both rounds.
        num_ops: i32,
        /// R.
        num_reqs: i32,
        /// T, padded.
        num_tokens: i32,
        /// W.
        table_width: i32,
        /// Tokens of a block.
        block_size: i32,
        /// Ranks of decode context parallelism.
        dcp_world_size: i32,
        /// This rank.
        dcp_rank: i32,
        /// Tokens of a rank's run.
        dcp_interleave: i32,
        /// 0.
        reserved: i32,
    }

    /// How one row is sampled; an element of the rows of `tt_sample_f32`.
    SampleRow = "TtSampleRow", 24 {
        /// 0 (or not a positive number): the largest logit, the lowest id of equals.
        temperature: f32,
        /// Nucleus, in (0, 1]; 1: off.
        top_p: f32,
        /// Candidates kept; 0: all.
        top_k: i32,
        /// 0.
        reserved: i32,
        /// In [0, 1): picks by inverse CDF in id order; unused at temperature 0.
        uniform: f64,
    }
}

/// What one [`UnpackOp`] computes. Elements are s32 unless the name ends in 64.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnpackKind {
    /// `list`: `rows` values.
    Values = 0,
    /// `list`: `rows` values, s64.
    Values64 = 1,
    /// `list`: `rows` triples (row, column, block), written to the block table.
    TableUpdates = 2,
    /// `source`: `rows` elements.
    Copy = 3,
    /// `source`: `rows` elements, s64.
    Copy64 = 4,
    /// `query_start_loc[first_row ..= first_row + rows] - query_start_loc[first_row]`.
    Rebase = 5,
    /// Sequence length − query length of rows `[first_row, + rows)`.
    ContextLens = 6,
    /// 1 where that is above 0.
    HasContext = 7,
    /// This rank's share of the lengths; `option` 0: sequence lengths, 1: context lengths.
    DcpLocal = 8,
    /// 0, then the running sum of pages of rows `[first_row, + rows)`.
    CuPageCounts = 9,
    /// `list`: `paged_kv_indptr` `[rows + 1]`; the first pages of rows `[first_row, + rows)`.
    GatherPages = 10,
    /// As [`GatherPages`](Self::GatherPages); `list2`: the columns.
    SelectPages = 11,
    /// `list`: `rows` row indexes; `width` columns from 0 (`option` 0) or from the last token's (1).
    StateIndices = 12,
    /// `list`: `rows` row indexes; rows of `source`, `width` elements each.
    Rows = 13,
    /// As [`Rows`](Self::Rows), s64.
    Rows64 = 14,
    /// `list`: `rows` row indexes; 1 there, 0 in the step's other rows.
    RowMask = 15,
    /// `list`: `rows` row indexes; their tokens, one row after the other.
    RowTokens = 16,
    /// The row of each of the step's tokens; 0 beyond the last request's.
    TokenToRow = 17,
    /// `list`: `cu_seq_lens` `[rows + 1]`; the segment of each element.
    SegmentIds = 18,
    /// Per `width` tokens of rows `[first_row, + rows)`: the row, counted from `first_row`.
    ConvRows = 19,
    /// The same chunks: the chunk's index within its row.
    ConvOffsets = 20,
    /// `list`: `rows` values; one of at least 0 is a token id, one below 0 means `source[-1 - value]`, a token that the step
    /// before sampled, of `width` elements.
    FeedTokens = 21,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../../../kernels/src/params.h");

    /// The header without comments and preprocessor lines.
    fn code() -> String {
        let mut text = String::new();
        let mut rest = HEADER;
        while let Some((before, comment)) = rest.split_once("/*") {
            text.push_str(before);
            rest = comment.split_once("*/").expect("comments end").1;
        }
        text.push_str(rest);
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// Name, and fields with the types that the mirror should have, of every struct of the header, in its order.
    fn structs(code: &str) -> Vec<(String, Vec<(String, String)>)> {
        let mut found = Vec::new();
        for part in code.split("typedef struct ").skip(1) {
            let (name, rest) = part.split_once('{').expect("a struct has a body");
            let (body, _) = rest.split_once('}').expect("a body ends");
            let fields = body
                .split(';')
                .map(str::trim)
                .filter(|declaration| !declaration.is_empty())
                .map(|declaration| {
                    let field = declaration
                        .rsplit(|c: char| !c.is_alphanumeric() && c != '_')
                        .next()
                        .expect("a declaration ends in a name");
                    let c_type = declaration.strip_suffix(field).expect("its end").trim();
                    let mirrored = match c_type {
                        pointer if pointer.ends_with('*') => "DevicePtr",
                        "int32_t" => "i32",
                        "int64_t" => "i64",
                        "float" => "f32",
                        "double" => "f64",
                        other => panic!("no mirror for the type `{other}` of {name}.{field}"),
                    };
                    (field.to_owned(), mirrored.to_owned())
                })
                .collect();
            found.push((name.trim().to_owned(), fields));
        }
        found
    }

    #[test]
    fn every_struct_of_the_header_is_mirrored_field_by_field() {
        let code = code();
        let header = structs(&code);
        assert!(header.len() >= 11, "the header was read only in part");
        let names: Vec<_> = header.iter().map(|(name, _)| name.as_str()).collect();
        for &(name, size, fields) in MIRRORED {
            let at = names
                .iter()
                .position(|n| *n == name)
                .unwrap_or_else(|| panic!("params.h has no {name}"));
            let fields: Vec<(String, String)> = fields
                .iter()
                .map(|&(field, mirrored)| (field.to_owned(), mirrored.to_owned()))
                .collect();
            assert_eq!(header[at].1, fields, "{name}");
            let assertion = format!("static_assert(sizeof({name}) == {size}, \"{name}\");");
            assert!(
                code.contains(&assertion),
                "params.h does not say `{assertion}`"
            );
        }
        assert_eq!(names.len(), MIRRORED.len(), "params.h has {names:?}");
    }

    #[test]
    fn unpack_kinds_have_the_headers_names_and_numbers() {
        const KINDS: [UnpackKind; 22] = [
            UnpackKind::Values,
            UnpackKind::Values64,
            UnpackKind::TableUpdates,
            UnpackKind::Copy,
            UnpackKind::Copy64,
            UnpackKind::Rebase,
            UnpackKind::ContextLens,
            UnpackKind::HasContext,
            UnpackKind::DcpLocal,
            UnpackKind::CuPageCounts,
            UnpackKind::GatherPages,
            UnpackKind::SelectPages,
            UnpackKind::StateIndices,
            UnpackKind::Rows,
            UnpackKind::Rows64,
            UnpackKind::RowMask,
            UnpackKind::RowTokens,
            UnpackKind::TokenToRow,
            UnpackKind::SegmentIds,
            UnpackKind::ConvRows,
            UnpackKind::ConvOffsets,
            UnpackKind::FeedTokens,
        ];
        let code = code();
        let (_, body) = code
            .split_once("enum TtUnpackKind {")
            .expect("the header has the kinds");
        let (body, _) = body.split_once('}').expect("the enum ends");
        let header: Vec<(String, i32)> = body
            .split(',')
            .map(|entry| {
                let (name, number) = entry.split_once('=').expect("each kind has its number");
                let name = name
                    .trim()
                    .trim_start_matches("TT_UNPACK_")
                    .replace('_', "");
                (
                    name.to_lowercase(),
                    number.trim().parse().expect("a number"),
                )
            })
            .collect();
        let ours: Vec<(String, i32)> = KINDS
            .iter()
            .map(|&kind| (format!("{kind:?}").to_lowercase(), kind as i32))
            .collect();
        assert_eq!(header, ours);
    }
}

//! Builds a tokenizer from `tokenizer.ggml.*`: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).
//!
//! GGUF stores the vocabulary and merges, and only the *name* of the rule that cuts text into words; the rules are
//! here, as the models' own `tokenizer.json` files state them.

use super::Tokenizer;
use crate::model::ModelError;
use crate::model::gguf::GgufFile;
use std::collections::HashMap;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::decoders::{DecoderWrapper, sequence::Sequence as DecoderSequence};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{
    NFC, NormalizerWrapper, Prepend, Replace, Sequence as NormalizerSequence,
};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// Token types of GGUF's `token_type` array.
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// SentencePiece's visible space.
const METASPACE: &str = "\u{2581}";

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn build(file: &GgufFile) -> Result<Tokenizer, ModelError> {
    let kind = file
        .text("tokenizer.ggml.model")
        .ok_or_else(|| missing(file, "tokenizer.ggml.model"))?;
    let tokens = file
        .texts("tokenizer.ggml.tokens")
        .ok_or_else(|| missing(file, "tokenizer.ggml.tokens"))?;
    let mut inner = match kind.as_str() {
        "gpt2" => byte_level(file, &tokens)?,
        "llama" => sentence_piece(file, &tokens)?,
        other => {
            return Err(ModelError::Unsupported {
                path: file.path().to_owned(),
                what: format!("tokenizer '{other}'"),
                remedy: "use a model with a gpt2 or llama tokenizer, or its Hugging Face directory",
            });
        }
    };
    add_special_tokens(file, &tokens, &mut inner)?;

    let token = |name: &str| -> Result<Option<u32>, ModelError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match file.uint(&key) {
            Some(id) if (id as usize) < tokens.len() => Ok(Some(id as u32)),
            Some(id) => Err(ModelError::corrupt(
                file.path(),
                format!("{key} is {id}, but there are {} tokens", tokens.len()),
            )),
            None => Ok(None),
        }
    };
    let (bos, eos) = (token("bos")?, token("eos")?);
    // What converters leave out when it is the kind's habit.
    let habit = kind == "llama" || matches!(pre(file).as_str(), "llama-bpe" | "llama3");
    let add_bos = file.bool("tokenizer.ggml.add_bos_token").unwrap_or(habit);
    let add_eos = file.bool("tokenizer.ggml.add_eos_token").unwrap_or(false);
    let text = |id: Option<u32>| id.map(|id| tokens[id as usize].clone());
    Ok(Tokenizer {
        inner,
        prefix: bos.filter(|_| add_bos),
        suffix: eos.filter(|_| add_eos),
        bos: text(bos),
        eos: text(eos),
    })
}

fn missing(file: &GgufFile, key: &str) -> ModelError {
    ModelError::corrupt(
        file.path(),
        format!("metadata '{key}' is missing or of another type"),
    )
}

fn refused(file: &GgufFile, error: &tokenizers::Error) -> ModelError {
    ModelError::corrupt(file.path(), format!("tokenizer.ggml vocabulary: {error}"))
}

fn pre(file: &GgufFile) -> String {
    file.text("tokenizer.ggml.pre")
        .unwrap_or_else(|| "default".to_owned())
}

fn vocabulary(tokens: &[String]) -> Vocab {
    tokens
        .iter()
        .enumerate()
        .map(|(id, text)| (text.clone(), id as u32))
        .collect()
}

fn built(
    file: &GgufFile,
    bpe: tokenizers::Result<BPE>,
) -> Result<tokenizers::Tokenizer, ModelError> {
    let bpe = bpe
        .map_err(|e| ModelError::corrupt(file.path(), format!("tokenizer.ggml vocabulary: {e}")))?;
    Ok(tokenizers::Tokenizer::new(bpe))
}

/// GPT-2's byte-level BPE.
fn byte_level(file: &GgufFile, tokens: &[String]) -> Result<tokenizers::Tokenizer, ModelError> {
    let key = "tokenizer.ggml.merges";
    let merges = file.texts(key).ok_or_else(|| missing(file, key))?;
    let merges = merges
        .iter()
        .map(|merge| {
            // The first character may itself be a space of the old spelling, so the separator is looked for after it.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let at = merge[first..].find(' ').map(|at| at + first);
            at.map(|at| (merge[..at].to_owned(), merge[at + 1..].to_owned()))
                .ok_or_else(|| {
                    ModelError::corrupt(
                        file.path(),
                        format!("{key} has '{merge}', which is not two tokens"),
                    )
                })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let pre = pre(file);
    let (pre_tokenizer, normalizer) = word_rule(file, &pre)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges)
        .ignore_merges(matches!(pre.as_str(), "llama-bpe" | "llama3"))
        .build();
    let mut tokenizer = built(file, bpe)?;
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer
        .with_normalizer(normalizer)
        .map_err(|e| refused(file, &e))?;
    tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
    Ok(tokenizer)
}

/// The rule named by `tokenizer.ggml.pre`: how text is cut into words, and its normal form.
fn word_rule(
    file: &GgufFile,
    pre: &str,
) -> Result<(PreTokenizerWrapper, Option<NormalizerWrapper>), ModelError> {
    let gpt2 = || ByteLevel::new(false, true, true);
    let bytes_only = || ByteLevel::new(false, true, false);
    let split = |pattern: &str| -> Result<PreTokenizerWrapper, ModelError> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| ModelError::corrupt(file.path(), format!("word rule '{pre}': {e}")))?;
        Ok(split.into())
    };
    let sequence =
        |rules: Vec<PreTokenizerWrapper>| PreTokenizerWrapper::from(Sequence::new(rules));
    Ok(match pre {
        "smollm" | "starcoder" | "refact" | "command-r" => (
            sequence(vec![Digits::new(true).into(), gpt2().into()]),
            None,
        ),
        "default" | "gpt-2" | "gpt2" => (gpt2().into(), None),
        "qwen2" => (
            sequence(vec![split(QWEN2)?, bytes_only().into()]),
            Some(NFC.into()),
        ),
        "llama-bpe" | "llama3" => (sequence(vec![split(LLAMA3)?, bytes_only().into()]), None),
        other => {
            return Err(ModelError::Unsupported {
                path: file.path().to_owned(),
                what: format!("tokenizer word rule '{other}' (tokenizer.ggml.pre)"),
                remedy: "use a model with one of smollm, gpt-2, qwen2, llama-bpe, or its Hugging Face directory",
            });
        }
    })
}

/// SentencePiece BPE with byte fallback, as Llama 2 and the first Mistral have it.
fn sentence_piece(file: &GgufFile, tokens: &[String]) -> Result<tokenizers::Tokenizer, ModelError> {
    let key = "tokenizer.ggml.scores";
    let scores = file.numbers(key).ok_or_else(|| missing(file, key))?;
    if scores.len() != tokens.len() {
        let what = format!(
            "{key} has {} entries for {} tokens",
            scores.len(),
            tokens.len()
        );
        return Err(ModelError::corrupt(file.path(), what));
    }
    let mut bpe = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges_of_scores(tokens, &scores))
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = file
        .uint("tokenizer.ggml.unknown_token_id")
        .and_then(|id| tokens.get(id as usize))
    {
        bpe = bpe.unk_token(unknown.clone());
    }
    let mut tokenizer = built(file, bpe.build())?;
    let replace = |from: &str, to: &str| {
        Replace::new(from, to)
            .map_err(|e| ModelError::corrupt(file.path(), format!("tokenizer: {e}")))
    };
    let add_space = file.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let mut decoders: Vec<DecoderWrapper> = vec![
        replace(METASPACE, " ")?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if add_space {
        normalizers.push(Prepend::new(METASPACE.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    normalizers.push(replace(" ", METASPACE)?.into());
    tokenizer
        .with_normalizer(Some(NormalizerSequence::new(normalizers)))
        .map_err(|e| refused(file, &e))?;
    tokenizer.with_decoder(Some(DecoderSequence::new(decoders)));
    Ok(tokenizer)
}

/// SentencePiece merges the neighbouring pair whose union has the best score: the same as a merge list with, for every
/// token, each way to split it into two tokens, best score first.
fn merges_of_scores(tokens: &[String], scores: &[f64]) -> Vec<(String, String)> {
    let ids: HashMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .map(|(id, t)| (t.as_str(), id))
        .collect();
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let mut splits: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((*ids.get(&token[..at])?, *ids.get(&token[at..])?)))
            .collect();
        splits.sort_unstable();
        merges.extend(splits.into_iter().map(|pair| (*score, pair)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    merges
        .into_iter()
        .map(|(_, (left, right))| (tokens[left].clone(), tokens[right].clone()))
        .collect()
}

/// Control tokens are special; user-defined ones are whole tokens, but text.
fn add_special_tokens(
    file: &GgufFile,
    tokens: &[String],
    tokenizer: &mut tokenizers::Tokenizer,
) -> Result<(), ModelError> {
    let key = "tokenizer.ggml.token_type";
    let Some(types) = file.numbers(key) else {
        return Ok(());
    };
    if types.len() != tokens.len() {
        let what = format!(
            "{key} has {} entries for {} tokens",
            types.len(),
            tokens.len()
        );
        return Err(ModelError::corrupt(file.path(), what));
    }
    let (mut special, mut plain) = (Vec::new(), Vec::new());
    for (text, kind) in tokens.iter().zip(types) {
        if text.is_empty() {
            continue;
        }
        match kind as u32 {
            CONTROL | UNKNOWN => {
                special.push(AddedToken::from(text.clone(), true).normalized(false));
            }
            USER_DEFINED => plain.push(AddedToken::from(text.clone(), false).normalized(false)),
            _ => {}
        }
    }
    tokenizer
        .add_special_tokens(special)
        .and_then(|_| tokenizer.add_tokens(plain))
        .map_err(|e| refused(file, &e))?;
    Ok(())
}

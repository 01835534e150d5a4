//! What requests are, going in, and what comes out of each step.

use timetable_sandbox::TenantName;

use crate::{
    attention::StepError,
    executor::StepFailure,
    sampling::{SamplingError, SamplingParams, TokenLogprobs},
    scheduler::AddRequestError,
};

/// Names a request for its whole life. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A prompt and what to do with it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen and when to stop.
    pub params: SamplingParams,
    /// For tests and evaluation only: these tokens are taken instead of sampled ones, as far as they go (teacher forcing).
    pub forced: Vec<u32>,
    /// Whose it is; none: of nobody in particular.
    pub tenant: Option<TenantName>,
}

impl GenerationRequest {
    /// Does the model have every token that is named?
    pub(crate) fn check_tokens(&self, vocab_size: usize) -> Result<(), RequestError> {
        let is_unknown = |&token: &u32| token as usize >= vocab_size;
        for tokens in [&self.prompt, &self.forced] {
            if let Some(index) = tokens.iter().position(is_unknown) {
                return Err(RequestError::Vocabulary {
                    token: tokens[index],
                    index,
                    vocab_size,
                });
            }
        }
        let mut biased = self.params.logit_bias.iter().map(|bias| bias.0);
        match biased.find(is_unknown) {
            Some(token) => Err(SamplingError::LogitBiasToken { token, vocab_size }.into()),
            None => Ok(()),
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-text token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// Somebody ended it.
    Abort,
    /// It failed; see the error.
    Error,
}

impl FinishReason {
    /// All of them, in the order of their values.
    pub const ALL: [FinishReason; 4] = [
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Abort,
        FinishReason::Error,
    ];

    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
        }
    }
}

/// Why one request was refused or failed. Other requests go on.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It can never run.
    #[error(transparent)]
    Refused(#[from] AddRequestError),
    /// A sampling parameter out of range, or logits without a number.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A token that the model does not have.
    #[error(
        "prompt token {token} at {index} is not in the model's vocabulary of {vocab_size}: tokenise with this model's tokenizer"
    )]
    Vocabulary {
        /// The token.
        token: u32,
        /// Its place in the prompt (or in the forced tokens).
        index: usize,
        /// Tokens that the model has.
        vocab_size: usize,
    },
    /// A tenant that is not configured, where others are.
    #[error(
        "tenant `{name}` is not configured here; there are {known}: use one of them, or add it to the configuration"
    )]
    UnknownTenant {
        /// As the request named it.
        name: TenantName,
        /// Those that are.
        known: String,
    },
    /// Stop strings need text, and the engine has no tokenizer.
    #[error("stop strings were given but the engine has no tokenizer: use stop_token_ids")]
    NoTokenizer,
    /// Its step had no metadata.
    #[error("{0}")]
    Step(StepError),
    /// Its step's forward pass failed.
    #[error("the forward pass failed: {0}")]
    Model(String),
    /// The device refused or failed its step, or is gone for good.
    #[error("{0}")]
    Device(String),
    /// The engine was shut down.
    #[error("the engine has stopped; start it again")]
    Stopped,
}

/// What a step did for one request.
#[derive(Debug)]
pub struct RequestUpdate {
    /// Whose.
    pub id: RequestId,
    /// The token, if one was produced.
    pub token: Option<u32>,
    /// Text that became certain; always empty without a tokenizer.
    pub text: String,
    /// With a token of a request that asks for them.
    pub logprobs: Option<Box<TokenLogprobs>>,
    /// The last update of a request says why it ended.
    pub finish: Option<FinishReason>,
    /// With `FinishReason::Error`.
    pub error: Option<RequestError>,
}

/// What a step did.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// One per request that got a token or ended.
    pub updates: Vec<RequestUpdate>,
    /// Requests computed.
    pub num_reqs: usize,
    /// Tokens computed.
    pub num_tokens: usize,
    /// Requests that lost their blocks.
    pub num_preempted: usize,
}

impl StepOutput {
    pub(crate) fn clear(&mut self) {
        self.updates.clear();
        self.num_reqs = 0;
        self.num_tokens = 0;
        self.num_preempted = 0;
    }
}

impl StepFailure {
    /// The error of each of the step's requests.
    pub(crate) fn for_request(&self) -> RequestError {
        match self {
            StepFailure::Metadata(error) => RequestError::Step(error.clone()),
            StepFailure::Model(error) => RequestError::Model(error.to_string()),
            StepFailure::Device { message, .. } => RequestError::Device(message.clone()),
        }
    }
}

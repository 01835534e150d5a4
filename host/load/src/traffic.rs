//! Requests: prompts of token ids, how long their answers are, and when they arrive. Must never know: HTTP.

use std::time::Duration;

use timetable_record::trace::{self, Trace, TraceRequest};

/// How a trace is fitted to a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// How much faster than in the trace requests arrive.
    pub rate: f64,
    /// Share of each length that is left, above 0 and at most 1. Prompts that share a beginning share as large a part of it.
    pub length: f64,
    /// Tokens of a prompt, at most; the rest is cut off.
    pub max_input_len: usize,
    /// Tokens of an answer, at most.
    pub max_output_len: usize,
    /// Tokens of a prompt and its answer together, at most: an answer has at most half of them, a prompt what is left.
    pub max_model_len: usize,
    /// Token ids are below this.
    pub vocab_size: u32,
}

impl Default for Scale {
    /// As in the trace, with ids that are in every vocabulary of some size.
    fn default() -> Self {
        Self {
            rate: 1.0,
            length: 1.0,
            max_input_len: usize::MAX,
            max_output_len: usize::MAX,
            max_model_len: usize::MAX,
            vocab_size: 512,
        }
    }
}

/// A scale that makes no requests.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{what} is {value}; give {remedy}")]
pub struct TrafficError {
    what: &'static str,
    value: String,
    remedy: &'static str,
}

/// Requests, each made when it is asked for.
#[derive(Clone, Debug)]
pub struct Traffic {
    requests: Vec<TraceRequest>,
    scale: Scale,
}

impl Traffic {
    /// Those of a trace.
    ///
    /// # Errors
    /// If the scale makes no requests.
    pub fn of_trace(trace: Trace, scale: Scale) -> Result<Self, TrafficError> {
        Self::new(trace.requests, scale)
    }

    /// Requests of one length, which share nothing and arrive all at once.
    ///
    /// # Errors
    /// If the scale makes no requests, or a length is 0.
    pub fn uniform(
        input_len: usize,
        output_len: usize,
        scale: Scale,
    ) -> Result<Self, TrafficError> {
        for (what, len) in [
            ("the prompts' length", input_len),
            ("the answers' length", output_len),
        ] {
            above_zero(what, len, "1 or more tokens")?;
        }
        let request = TraceRequest {
            arrival: Duration::ZERO,
            input_length: input_len,
            output_length: output_len,
            hash_ids: Vec::new(),
        };
        Self::new(vec![request], scale)
    }

    fn new(requests: Vec<TraceRequest>, scale: Scale) -> Result<Self, TrafficError> {
        let refuse = |what, value: String, remedy| {
            Err(TrafficError {
                what,
                value,
                remedy,
            })
        };
        if !(1e-6..=1e6).contains(&scale.rate) {
            return refuse(
                "the rate's scale",
                scale.rate.to_string(),
                "a number from 0.000001 to 1000000",
            );
        }
        if !(scale.length > 0.0 && scale.length <= 1.0) {
            return refuse(
                "the lengths' scale",
                scale.length.to_string(),
                "a number above 0 and at most 1",
            );
        }
        if scale.max_model_len < 2 {
            return refuse(
                "the model's longest request",
                scale.max_model_len.to_string(),
                "2 or more tokens",
            );
        }
        above_zero(
            "the longest prompt",
            scale.max_input_len,
            "1 or more tokens",
        )?;
        above_zero(
            "the longest answer",
            scale.max_output_len,
            "1 or more tokens",
        )?;
        above_zero(
            "the vocabulary",
            scale.vocab_size as usize,
            "1 or more tokens",
        )?;
        above_zero(
            "the number of requests",
            requests.len(),
            "a trace that has some",
        )?;
        Ok(Self { requests, scale })
    }

    /// How many requests the trace has; 1 where all have one length.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Never: traffic has requests.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests that are longer in the trace, scaled, than what is sent.
    pub fn cut(&self) -> usize {
        let cut = |request: &&TraceRequest| {
            let scaled = |len| self.scaled(len);
            (scaled(request.input_length), scaled(request.output_length)) != self.lengths(request)
        };
        self.requests.iter().filter(cut).count()
    }

    /// When the request arrives, after the first.
    pub fn arrival(&self, index: usize) -> Duration {
        let arrival = self.requests[index % self.len()].arrival;
        Duration::try_from_secs_f64(arrival.as_secs_f64() / self.scale.rate)
            .unwrap_or(Duration::MAX)
    }

    /// The prompt of a request, and the tokens of its answer. After the last request come their lengths again, with other tokens
    /// but for named blocks.
    pub fn request(&self, index: usize) -> (Vec<u32>, usize) {
        let request = &self.requests[index % self.len()];
        let (input, output) = self.lengths(request);
        let whole = trace::prompt(index, request, self.scale.vocab_size);
        // A token of each stretch, so that equal beginnings stay equal and the others stay different.
        let at =
            |position: usize| ((position as f64 / self.scale.length) as usize).min(whole.len() - 1);
        (
            (0..input).map(|position| whole[at(position)]).collect(),
            output,
        )
    }

    fn scaled(&self, len: usize) -> usize {
        ((len as f64 * self.scale.length).round() as usize).max(1)
    }

    /// Of the prompt and the answer, as they are sent.
    fn lengths(&self, request: &TraceRequest) -> (usize, usize) {
        let scale = &self.scale;
        let output = self.scaled(request.output_length).min(scale.max_output_len);
        let output = output.min(scale.max_model_len / 2);
        let input = self.scaled(request.input_length).min(scale.max_input_len);
        (input.min(scale.max_model_len - output), output)
    }
}

fn above_zero(what: &'static str, value: usize, remedy: &'static str) -> Result<(), TrafficError> {
    match value {
        0 => Err(TrafficError {
            what,
            value: "0".to_owned(),
            remedy,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, time::Duration};

    use timetable_record::trace::Trace;

    use super::{Scale, Traffic};

    fn trace(text: &str) -> Trace {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        Trace::read(file.path(), None, None).expect("a trace")
    }

    fn mooncake() -> Trace {
        trace(concat!(
            "{\"timestamp\": 1000, \"input_length\": 1100, \"output_length\": 40, \"hash_ids\": [1, 2, 3]}\n",
            "{\"timestamp\": 5000, \"input_length\": 1500, \"output_length\": 900, \"hash_ids\": [1, 2, 4]}\n",
            "{\"timestamp\": 6000, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [7, 8]}\n",
        ))
    }

    #[test]
    fn a_scaled_trace_keeps_what_prompts_share() {
        for length in [1.0, 0.25, 0.1] {
            let scale = Scale {
                length,
                rate: 2.0,
                vocab_size: 100_000,
                ..Scale::default()
            };
            let traffic = Traffic::of_trace(mooncake(), scale).expect("traffic");
            let prompts: Vec<Vec<u32>> = (0..3).map(|index| traffic.request(index).0).collect();
            let outputs: Vec<usize> = (0..3).map(|index| traffic.request(index).1).collect();
            let lens: Vec<usize> = prompts.iter().map(Vec::len).collect();
            let expected = [1100.0, 1500.0, 600.0].map(|len: f64| (len * length).round() as usize);
            assert_eq!(lens, expected);
            assert_eq!(outputs[1], (900.0 * length) as usize);
            let shared = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            // Two blocks of 512 tokens.
            assert_eq!(
                shared(&prompts[0], &prompts[1]),
                (1024.0 * length).ceil() as usize
            );
            assert_eq!(shared(&prompts[0], &prompts[2]), 0);
            assert!(prompts.iter().flatten().all(|token| *token < 100_000));
            assert_eq!(traffic.arrival(1), Duration::from_secs(2));
            assert_eq!(traffic.cut(), 0);
        }
    }

    #[test]
    fn lengths_stay_within_the_models() {
        let scale = Scale {
            max_input_len: 1200,
            max_model_len: 1024,
            ..Scale::default()
        };
        let traffic = Traffic::of_trace(mooncake(), scale).expect("traffic");
        let lens = |index| {
            let (prompt, output) = traffic.request(index);
            (prompt.len(), output)
        };
        assert_eq!(
            [lens(0), lens(1), lens(2)],
            [(984, 40), (512, 512), (600, 1)]
        );
        assert_eq!(traffic.cut(), 2);
    }

    #[test]
    fn requests_of_one_length_differ_and_go_on() {
        let traffic = Traffic::uniform(64, 8, Scale::default()).expect("traffic");
        let (first, second) = (traffic.request(0), traffic.request(1));
        assert_eq!((first.0.len(), first.1), (64, 8));
        assert_ne!(first.0, second.0);
        assert_eq!(first, traffic.request(0));
    }

    #[test]
    fn scales_that_make_no_requests_are_refused() {
        let refused = |scale: Scale| {
            let error = Traffic::uniform(64, 8, scale).expect_err("refused");
            error.to_string()
        };
        let scale = Scale::default();
        assert!(refused(Scale { rate: 0.0, ..scale }).contains("rate's scale is 0; give"));
        assert!(
            refused(Scale {
                length: f64::NAN,
                ..scale
            })
            .contains("NaN")
        );
        assert!(
            refused(Scale {
                max_model_len: 1,
                ..scale
            })
            .contains("is 1; give 2 or more")
        );
        assert!(
            refused(Scale {
                max_output_len: 0,
                ..scale
            })
            .contains("longest answer is 0")
        );
        assert!(Traffic::uniform(0, 8, scale).is_err());
    }
}

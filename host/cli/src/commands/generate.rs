//! `generate`: a model answers prompts, its metadata builders in the sandbox; the admin socket is open while it does.

mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use timetable_engine::chat::{ChatMessage, ChatTemplate};
use timetable_engine::sampling::SamplingParams;
use timetable_engine::tokenizer::Tokenizer;
use timetable_engine::{EngineHandle, EngineStats, FinishReason, GenerationRequest};
use timetable_record::RecorderHandle;

use self::stream::Answer;
use super::{print_json, setup, signals};
use crate::admin::{self, Control, PageListener, Server};
use crate::cli::Generate;
use crate::config::Flags;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Generate) -> Result<(), Failure> {
    // What can be refused at once is refused before a model is loaded.
    let params = sampling(arguments)?;
    let flags = Flags::of(&arguments.settings);
    let settings = setup::settings(&flags)?;
    let socket = setup::socket(settings.config.admin.socket.as_deref())?;
    let page = PageListener::bind(&settings.config.admin)?;
    let setup::Running {
        engine,
        tokenizer,
        host,
        recording,
        bounds: _,
    } = setup::start(&setup::Start {
        model: &arguments.model,
        name: &arguments.model.to_string_lossy(),
        flags: &flags,
        settings: &settings,
        talks: !arguments.json,
    })?;
    let host = Arc::new(host);
    let server = match &socket {
        Some(path) => Some(Server::start(path, Arc::clone(&host))?),
        None => None,
    };
    let page = page.map(|page| page.serve(Arc::clone(&host))).transpose()?;

    let prompts = encode(arguments, &tokenizer)?;
    let started = Instant::now();
    let answers = answer(arguments, &engine, &params, &prompts)?;
    let elapsed = started.elapsed();
    let stats = engine.stats();
    let builders = host.builders().map_err(Failure::of(Exit::Failure))?;
    let fatal = engine.fatal_error();
    engine.shutdown();
    host.settle();
    // Nothing steps any more: whoever waits for a step hears that the host went away, however slowly the report is read.
    drop((server, page));
    let recorded = recording.map(RecorderHandle::finish);

    if arguments.json {
        let mut report = report(arguments, &prompts, &answers, elapsed, &stats, &builders);
        report["recording"] = json!(recorded);
        print_json(&report)?;
    } else {
        if let Some(recorded) = recorded {
            eprintln!("{}", super::replay::recorded(&recorded));
        }
        eprintln!("{}", summary(&prompts, &answers, elapsed, &stats));
    }
    let interrupted = |answer: &Answer| answer.finish == Some(FinishReason::Abort);
    match (
        answers.iter().find_map(|answer| answer.error.as_ref()),
        fatal,
    ) {
        (Some(error), _) => Err(Failure::new(error.exit, &error.message)),
        (None, Some(message)) => Err(Failure::new(Exit::Device, message)),
        (None, None) if answers.iter().any(interrupted) => Err(Failure::new(
            Exit::Failure,
            "interrupted: the answers end where they were",
        )),
        (None, None) => Ok(()),
    }
}

fn sampling(arguments: &Generate) -> Result<SamplingParams, Failure> {
    let params = SamplingParams {
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        seed: arguments.seed,
        max_tokens: arguments.max_tokens,
        stop: arguments.stop.clone(),
        stop_token_ids: Vec::new(),
        ignore_eos: arguments.ignore_eos,
        ..SamplingParams::default()
    };
    params.validate().map_err(Failure::of(Exit::Usage))?;
    Ok(params)
}

/// The token ids of each prompt.
fn encode(arguments: &Generate, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, Failure> {
    let bad = |error: &dyn std::fmt::Display| Failure::new(Exit::BadInput, error);
    let template = arguments
        .chat
        .then(|| ChatTemplate::load(&arguments.model))
        .transpose()
        .map_err(|error| bad(&error))?;
    arguments
        .prompt
        .iter()
        .map(|prompt| match &template {
            None => tokenizer.encode(prompt, true).map_err(|error| bad(&error)),
            Some(template) => {
                let message = ChatMessage {
                    role: "user".to_owned(),
                    content: prompt.clone(),
                };
                let text = template
                    .render(&[message], true)
                    .map_err(|error| bad(&error))?;
                // The template writes the special tokens.
                tokenizer.encode(&text, false).map_err(|error| bad(&error))
            }
        })
        .collect()
}

fn answer(
    arguments: &Generate,
    engine: &EngineHandle,
    params: &SamplingParams,
    prompts: &[Vec<u32>],
) -> Result<Vec<Answer>, Failure> {
    let streams: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            engine.submit(GenerationRequest {
                prompt: prompt.clone(),
                params: params.clone(),
                tenant: arguments.tenant.clone(),
                ..GenerationRequest::default()
            })
        })
        .collect();
    let (interrupt, interrupted) = crossbeam_channel::bounded(1);
    signals::on_each(move |before| match before {
        0 => drop(interrupt.send(())),
        // Whoever asks twice does not want to wait for a step.
        _ => std::process::exit(Exit::Failure as i32),
    })
    .map_err(Failure::of(Exit::Failure))?;
    stream::collect(&streams, !arguments.json, &interrupted)
}

fn summary(
    prompts: &[Vec<u32>],
    answers: &[Answer],
    elapsed: Duration,
    stats: &EngineStats,
) -> String {
    let generated: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let prompt: usize = prompts.iter().map(Vec::len).sum();
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let mut text = format!(
        "{prompt} prompt tokens, {generated} generated in {seconds:.2} s ({:.1} tokens/s), {} steps, {} served by the plain builder after a fault",
        generated as f64 / seconds,
        stats.steps,
        stats.fallback_steps,
    );
    let total = &stats.total;
    if total.kernel_ns > 0 {
        let us = |ns: u64| ns as f64 / 1e3 / stats.steps.max(1) as f64;
        text.push_str(&format!(
            "\na step on the device: kernels {:.1} µs, copies {:.1} µs, idle {:.1} µs; on the host: build {:.1} µs, verify {:.1} µs, all but waiting {:.1} µs",
            us(total.kernel_ns),
            us(total.copy_ns),
            us(total.idle_ns),
            us(total.build_ns),
            us(total.verify_ns),
            us(total.host_ns()),
        ));
    }
    text
}

fn report(
    arguments: &Generate,
    prompts: &[Vec<u32>],
    answers: &[Answer],
    elapsed: Duration,
    stats: &EngineStats,
    builders: &Value,
) -> Value {
    let outputs: Vec<Value> = arguments
        .prompt
        .iter()
        .zip(prompts)
        .zip(answers)
        .map(|((prompt, ids), answer)| {
            json!({
                "prompt": prompt,
                "prompt_token_ids": ids,
                "text": answer.text,
                "output_token_ids": answer.tokens,
                "finish_reason": answer.finish.unwrap_or(FinishReason::Error),
                "error": answer.error.as_ref().map(|error| error.message.as_str()),
                "time_to_first_token_s": answer.first_token.map(|time| time.as_secs_f64()),
            })
        })
        .collect();
    let generated: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let engine = admin::engine(stats);
    let mean_us = |parts: &Value| -> Value {
        let mean = |ns: &Value| ns.as_f64().unwrap_or(0.0) / 1e3 / stats.steps.max(1) as f64;
        let parts = parts.as_object().into_iter().flatten();
        Value::Object(
            parts
                .map(|(part, ns)| (part.clone(), json!(mean(ns))))
                .collect(),
        )
    };
    json!({
        "model": arguments.model,
        "outputs": outputs,
        "elapsed_s": elapsed.as_secs_f64(),
        "tokens_per_s": generated as f64 / elapsed.as_secs_f64().max(1e-9),
        "steps": stats.steps,
        "fallback_steps": stats.fallback_steps,
        "failed_steps": stats.failed_steps,
        "preemptions": stats.preemptions,
        "speculation": engine["speculation"],
        "prefix_cache": { "queried_tokens": stats.prefix_queries, "hit_tokens": stats.prefix_hits },
        "step_mean_us": mean_us(&engine["total_ns"]),
        "device_step_mean_us": mean_us(&engine["device_total_ns"]),
        "memory": builders["memory"],
        "builders": builders["builders"],
        "cudagraph_mode": builders["cudagraph_mode"],
        "hazards": builders["hazards"],
    })
}

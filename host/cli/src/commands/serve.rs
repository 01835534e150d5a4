//! `serve`: a model behind the HTTP API, its metadata builders in the sandbox; the admin socket is open while it serves.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use timetable_engine::chat::ChatTemplate;
use timetable_engine::tokenizer::Tokenizer;
use timetable_record::RecorderHandle;
use timetable_server::{Ended, Keys, Metrics, ServedModel, Server, Service};

use super::{replay, setup, signals};
use crate::admin::{self, Control, PageListener};
use crate::cli::Serve;
use crate::config::{Config, Flags, ServerSettings};
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Serve) -> Result<(), Failure> {
    // What can be refused at once is refused before a model is loaded.
    let flags = Flags {
        settings: arguments.settings.clone(),
        server: Some(arguments.server.clone()),
    };
    let settings = setup::settings(&flags)?;
    let server = &settings.config.server;
    let mut options = server.options();
    options.keys = keys(&settings.config)?;
    let socket = setup::socket(settings.config.admin.socket.as_deref())?;
    let page = PageListener::bind(&settings.config.admin)?;
    let listener = TcpListener::bind(&server.listen).map_err(|error| {
        let listen = &server.listen;
        Failure::new(
            Exit::Unreachable,
            format!("{listen}: cannot be listened at ({error}); choose another address with --listen HOST:PORT"),
        )
    })?;
    let name = name(server, &arguments.model);
    let open = options.keys.is_open();

    let setup::Running {
        engine,
        tokenizer,
        host,
        recording,
        bounds,
    } = setup::start(&setup::Start {
        model: &arguments.model,
        name: &name,
        flags: &flags,
        settings: &settings,
        talks: true,
    })?;
    let (engine, host) = (Arc::new(engine), Arc::new(host));
    let template = template(
        server.chat_template.as_deref(),
        &arguments.model,
        &tokenizer,
    )?;
    let model = ServedModel {
        name: name.clone(),
        tokenizer,
        template,
        bounds,
    };
    let admin = match &socket {
        Some(path) => Some(admin::Server::start(path, Arc::clone(&host))?),
        None => None,
    };
    let page = page.map(|page| page.serve(Arc::clone(&host))).transpose()?;
    let metrics = Arc::new(Metrics::default());
    host.serving({
        let metrics = Arc::clone(&metrics);
        Box::new(move || metrics.table())
    });
    let metrics_text = {
        let host = Arc::clone(&host);
        Box::new(move || host.builders().map(|table| admin::render(&table)))
    };
    let service = Service::new(Arc::clone(&engine), model, metrics_text);
    let server =
        Server::start(listener, service, options, metrics).map_err(Failure::of(Exit::Failure))?;
    let control = server.control();
    signals::on_each(move |before| match before {
        0 => {
            eprintln!(
                "timetable: running requests end, new ones are refused; another signal ends at once"
            );
            control.drain();
        }
        _ => control.stop(),
    })
    .map_err(Failure::of(Exit::Failure))?;
    let address = server.address();
    if open && !address.ip().is_loopback() {
        eprintln!("timetable: there are no API keys: whoever reaches {address} may ask");
    }
    eprintln!("timetable: serving {name} at http://{address}");

    let ended = server.wait();
    let fatal = engine.fatal_error();
    // The server's thread was the only other that had it.
    drop(engine);
    host.settle();
    drop((admin, page));
    if let Some(recorded) = recording.map(RecorderHandle::finish) {
        eprintln!("{}", replay::recorded(&recorded));
    }
    match (fatal, ended) {
        (Some(message), _) => Err(Failure::new(Exit::Device, message)),
        (None, None) => Err(Failure::new(
            Exit::Failure,
            "the server's thread panicked; start it again",
        )),
        (None, Some(Ended { cut_off: 0 })) => Ok(()),
        (None, Some(Ended { cut_off })) => Err(Failure::new(
            Exit::Failure,
            format!("requests that still ran were cut off: {cut_off}"),
        )),
    }
}

/// What clients call the model.
fn name(server: &ServerSettings, model: &Path) -> String {
    let last = || {
        // A path as `.` has no last part of its own.
        let whole = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
        let last = whole.file_name().unwrap_or(model.as_os_str());
        let last = last.to_string_lossy();
        last.strip_suffix(".gguf").unwrap_or(&last).to_owned()
    };
    server.served_model_name.clone().unwrap_or_else(last)
}

/// The keys of the configured file.
fn keys(config: &Config) -> Result<Keys, Failure> {
    let Some(path) = &config.server.api_keys else {
        return Ok(Keys::default());
    };
    let unusable = |problem: String| {
        let path = path.display();
        Failure::new(Exit::BadInput, format!("API keys {path}: {problem}"))
    };
    let text = std::fs::read_to_string(path)
        .map_err(|error| unusable(format!("cannot be read ({error})")))?;
    let keys = Keys::parse(&text).map_err(|error| unusable(error.to_string()))?;
    let tenants = &config.tenants;
    let known = |name: &str| tenants.is_empty() || tenants.contains_key(name);
    if !keys.tenants().all(|tenant| known(tenant.as_str())) {
        // Not by its name: where the words are the wrong way round, that is a key.
        let known: Vec<&str> = tenants.keys().map(String::as_str).collect();
        return Err(unusable(format!(
            "a key is of a tenant that is not configured; there are {}; write KEY TENANT, in this order",
            known.join(", ")
        )));
    }
    Ok(keys)
}

/// The chat template: the configured one, else the model's own. A model without one serves everything but chat.
fn template(
    configured: Option<&Path>,
    model: &Path,
    tokenizer: &Tokenizer,
) -> Result<Result<ChatTemplate, timetable_engine::chat::ChatError>, Failure> {
    let Some(path) = configured else {
        return Ok(ChatTemplate::load(model));
    };
    let unusable = |problem: String| {
        let path = path.display();
        Failure::new(Exit::BadInput, format!("chat template {path}: {problem}"))
    };
    let text = std::fs::read_to_string(path)
        .map_err(|error| unusable(format!("cannot be read ({error})")))?;
    let own = |token: Option<&str>| token.unwrap_or_default().to_owned();
    let template = ChatTemplate::new(
        &text,
        own(tokenizer.bos_token()),
        own(tokenizer.eos_token()),
    );
    template
        .map(Ok)
        .map_err(|error| unusable(error.to_string()))
}

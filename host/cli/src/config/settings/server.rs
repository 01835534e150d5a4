//! Rows of the table of settings: the HTTP API.

use super::{GIB, HOUR, KIB, MS, Setting, number, setting};
use crate::config::kind::Kind;
use crate::config::names;

/// `[server]`.
pub const SERVER: &[Setting] = &[
    setting(
        "server.listen",
        Kind::Text("HOST:PORT; port 0 takes a free one", names::listen),
        "Where clients connect. HTTP, not HTTPS: put a proxy before it where strangers listen.",
        "A thread that sleeps while nobody asks.",
    )
    .flag("--listen"),
    setting(
        "server.served_model_name",
        Kind::text("a name"),
        "What clients call the model.",
        "Nothing.",
    )
    .flag("--served-model-name")
    .unset(
        "the last part of --model, without .gguf",
        "\"my-model\"",
    ),
    setting(
        "server.chat_template",
        Kind::path("a Jinja file"),
        "The chat template, instead of the model's own.",
        "Nothing.",
    )
    .flag("--chat-template")
    .unset("the model's own", "\"template.jinja\""),
    setting(
        "server.api_keys",
        Kind::path("a file"),
        "Who may ask, and as which tenant: a line for each key, `KEY TENANT` or `sha256:HEX TENANT`, the tenant being optional. `#` begins a comment.",
        "A hash for each request.",
    )
    .flag("--api-keys")
    .unset("everybody may ask", "\"api-keys\""),
    setting(
        "server.max_waiting_requests",
        number("requests"),
        "Requests of one tenant that may wait beyond engine.max_num_seqs; further ones get 429.",
        "Memory for their prompts; waiting for those who wait.",
    ),
    setting(
        "server.request_timeout",
        Kind::Time(100 * MS, 24 * HOUR),
        "From a request's arrival to its last token; what takes longer gets 408.",
        "Nothing.",
    ),
    setting(
        "server.header_timeout",
        Kind::Time(100 * MS, HOUR),
        "Within which a request's head, and then its body, must arrive; also how long an idle connection is kept, and how long a client may take none of its answer.",
        "A connection for as long.",
    ),
    setting(
        "server.drain_timeout",
        Kind::Time(0, 24 * HOUR),
        "How long requests that run may take to end after SIGTERM or SIGINT. A second signal ends at once.",
        "How long a restart takes at most.",
    ),
    setting(
        "server.max_body_bytes",
        Kind::Size(KIB, GIB),
        "Bytes of a request's body; more gets 413.",
        "Some ten times as much memory while a list of token ids is read.",
    ),
    setting(
        "server.max_connections",
        number("connections"),
        "Connections at once; further ones wait to be accepted.",
        "A file descriptor and some KiB each.",
    ),
];

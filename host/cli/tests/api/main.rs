//! `timetable serve` from outside: the official client, what the API's description says, and what nobody should send.

mod described;
mod fuzzed;
mod garbage;
mod http;
mod malformed;
mod openai;
mod schema;
mod server;
mod serving_guide;
#[path = "../support/mod.rs"]
mod support;

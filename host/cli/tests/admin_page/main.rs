//! The admin page of a running host: over HTTP, and as a person sees it in a browser.

#[path = "../support/mod.rs"]
mod support;

mod browser;
mod host;
mod http;
mod webdriver;

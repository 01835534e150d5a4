//! `top`: a live view of a running host, over its admin socket; `--once` prints one picture of it.
//!
//! A thread asks the host, this one draws and listens to keys: a host that hangs or goes away freezes nothing. What is drawn is
//! a function of two samples ([`view`]). Must never know: the engine or the sandbox, but by what the host answers.

mod sample;
mod view;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use self::sample::Sample;
use self::view::Picture;
use super::print;
use crate::admin::{self, Request};
use crate::cli::Top;
use crate::exit::{Exit, Failure};

/// How long a key waits to be seen.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shows the host until `q`.
pub fn run(arguments: &Top) -> Result<(), Failure> {
    let socket = arguments.admin.clone().unwrap_or_else(admin::default_path);
    let interval = Duration::from_secs_f64(arguments.interval);
    if arguments.once {
        return once(&socket, interval);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::new(
            Exit::Usage,
            "top: standard output is not a terminal; `timetable top --once` prints one picture",
        ));
    }
    let mut picture = Picture::new(&socket);
    let samples = sampler(socket, interval).map_err(Failure::of(Exit::Failure))?;
    let mut terminal = ratatui::try_init().map_err(Failure::of(Exit::Failure))?;
    let watched = watch(&mut terminal, &samples, &mut picture);
    ratatui::restore();
    watched.map_err(|error| Failure::new(Exit::Failure, format!("top: the terminal: {error}")))
}

/// One picture, of two samples for the rates.
fn once(socket: &std::path::Path, interval: Duration) -> Result<(), Failure> {
    let mut picture = Picture::new(socket);
    let start = Instant::now();
    picture.take(Ok(ask(socket, start)?));
    std::thread::sleep(interval);
    picture.take(Ok(ask(socket, start)?));
    print(picture.to_text().as_bytes())
}

fn ask(socket: &std::path::Path, start: Instant) -> Result<Sample, Failure> {
    let table = admin::call(socket, &Request::Builders, &[])?;
    Ok(Sample::read(&table, start.elapsed()))
}

/// Asks the host again and again, until nobody listens.
fn sampler(
    socket: PathBuf,
    interval: Duration,
) -> std::io::Result<Receiver<Result<Sample, String>>> {
    let (sender, samples) = bounded(1);
    let start = Instant::now();
    std::thread::Builder::new()
        .name("top".to_owned())
        .spawn(move || {
            while sender
                .send(ask(&socket, start).map_err(|error| error.to_string()))
                .is_ok()
            {
                std::thread::sleep(interval);
            }
        })?;
    Ok(samples)
}

fn watch(
    terminal: &mut DefaultTerminal,
    samples: &Receiver<Result<Sample, String>>,
    picture: &mut Picture,
) -> std::io::Result<()> {
    loop {
        samples.try_iter().for_each(|sample| picture.take(sample));
        terminal.draw(|frame| picture.draw(frame))?;
        if event::poll(PATIENCE)?
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
            && !press(picture, key)
        {
            return Ok(());
        }
    }
}

/// False: leave.
fn press(picture: &mut Picture, key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Down | KeyCode::Tab | KeyCode::Right | KeyCode::Char('j') => picture.select(1),
        KeyCode::Up | KeyCode::BackTab | KeyCode::Left | KeyCode::Char('k') => picture.select(-1),
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_leave_and_select() {
        let mut picture = Picture::new("x".as_ref());
        let key = |code| KeyEvent::new(code, KeyModifiers::NONE);
        for code in [KeyCode::Tab, KeyCode::Up, KeyCode::Char('x')] {
            assert!(press(&mut picture, key(code)));
        }
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert!(!press(&mut picture, key(code)));
        }
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!press(&mut picture, interrupt));
    }
}

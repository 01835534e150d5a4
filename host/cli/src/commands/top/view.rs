//! The picture: a function of the last two samples and of what is selected.
//!
//! Must never know: sockets, threads, keys.

use std::path::Path;

use ratatui::Frame;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Table, TableState, Wrap};

use super::sample::{Builder, Candidate, Sample, Tenant, Version};

/// Columns of a picture that is printed.
const TEXT_WIDTH: u16 = 150;
/// Fault records that are shown.
const FAULTS_SHOWN: usize = 5;

/// What is shown, and what of it is selected.
pub struct Picture {
    socket: String,
    previous: Option<Sample>,
    now: Option<Sample>,
    /// Why the last question was not answered.
    lost: Option<String>,
    selected: usize,
}

impl Picture {
    pub fn new(socket: &Path) -> Picture {
        Picture {
            socket: socket.display().to_string(),
            previous: None,
            now: None,
            lost: None,
            selected: 0,
        }
    }

    /// A host answered, or none did.
    pub fn take(&mut self, sample: Result<Sample, String>) {
        match sample {
            Ok(sample) => {
                // Over a gap, or to another host, a rate would mean nothing.
                let before = self.now.take().filter(|_| self.lost.is_none());
                self.previous = before.filter(|before| before.steps <= sample.steps);
                self.now = Some(sample);
                self.lost = None;
            }
            Err(message) => self.lost = Some(message),
        }
    }

    /// Selects the slot that is `by` further, around the end.
    pub fn select(&mut self, by: isize) {
        let count = self.now.as_ref().map_or(0, |now| now.builders.len());
        if count > 0 {
            self.selected =
                (self.selected.min(count - 1) as isize + by).rem_euclid(count as isize) as usize;
        }
    }

    /// Draws it into all of the frame.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        self.draw_parts(frame, true);
    }

    /// As plain text, as large as it needs to be.
    pub fn to_text(&self) -> String {
        let height = self.now.as_ref().map_or(10, |now| {
            let candidates = now
                .builders
                .iter()
                .filter(|builder| tried(builder).is_some());
            16 + 2 * now.builders.len() + candidates.count() + now.tenants.len()
        });
        let backend = TestBackend::new(TEXT_WIDTH, height.min(500) as u16);
        // Drawing into memory does not fail.
        let Ok(mut terminal) = Terminal::new(backend);
        let Ok(_) = terminal.draw(|frame| self.draw_parts(frame, false));
        text_of(terminal.backend())
    }

    fn draw_parts(&self, frame: &mut Frame<'_>, keys: bool) {
        let empty = Sample::default();
        let now = self.now.as_ref().unwrap_or(&empty);
        let builders = builder_rows(now, self.previous.as_ref());
        let tenants = now.tenants.len() as u16;
        let [head, slots, of_tenants, detail, foot] = Layout::vertical([
            Constraint::Length(2 + u16::from(self.lost.is_some())),
            Constraint::Length(builders.len() as u16 + 2),
            Constraint::Length(if tenants == 0 { 0 } else { tenants + 2 }),
            Constraint::Min(0),
            Constraint::Length(u16::from(keys)),
        ])
        .areas(frame.area());
        self.draw_head(frame, head, now);
        self.draw_builders(frame, slots, now, builders);
        if tenants > 0 {
            draw_tenants(frame, of_tenants, now, self.previous.as_ref());
        }
        if let Some(builder) = now.builders.get(self.selected(now)) {
            let lines = details(builder);
            let block = titled(format!(" {} ", builder.slot));
            let paragraph = Paragraph::new(lines)
                .wrap(Wrap { trim: false })
                .block(block);
            frame.render_widget(paragraph, detail);
        }
        let help = Line::from(" q quit   ↑ ↓ tab select a slot").style(dim());
        frame.render_widget(help, foot);
    }

    fn selected(&self, now: &Sample) -> usize {
        self.selected.min(now.builders.len().saturating_sub(1))
    }

    fn draw_head(&self, frame: &mut Frame<'_>, area: Rect, now: &Sample) {
        let previous = self.previous.as_ref();
        let rate = |of: fn(&Sample) -> u64| rate(previous, now, of);
        let usage = now.kv_cache_usage.map_or_else(String::new, |share| {
            format!("   KV cache {:.0} %", share * 100.0)
        });
        let mut lines = vec![
            Line::from(format!(" timetable top   {}   {}", self.socket, now.model))
                .style(Style::new().add_modifier(Modifier::BOLD)),
            Line::from(format!(
                " {} steps/s   {} tokens/s   {} computed/s   running {}   waiting {}{usage}   steps {}   fallbacks {}   failed {}   preemptions {}",
                rate(|sample| sample.steps),
                rate(|sample| sample.tokens_sampled),
                rate(|sample| sample.tokens_computed),
                now.running,
                now.waiting,
                now.steps,
                now.fallback_steps,
                now.failed_steps,
                now.preemptions,
            )),
        ];
        if let Some(why) = &self.lost {
            let text = format!(" THE HOST DOES NOT ANSWER: {why} — trying again");
            lines.push(Line::from(Span::styled(text, Style::new().fg(Color::Red))));
        }
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn draw_builders(
        &self,
        frame: &mut Frame<'_>,
        area: Rect,
        now: &Sample,
        rows: Vec<(usize, Row<'static>)>,
    ) {
        let selected = self.selected(now);
        let at = rows.iter().position(|(builder, _)| *builder == selected);
        let header = [
            "SLOT",
            "STAGE",
            "STATE",
            "VERSION",
            "NAME",
            "STEPS",
            "/s",
            "BUILD p50",
            "p99",
            "VERIFY p50",
            "FAULTS",
            "PLAIN",
            "FAILED",
        ];
        let widths = [22, 9, 12, 12, 24, 9, 8, 9, 9, 10, 6, 7, 6].map(Constraint::Length);
        let table = Table::new(rows.into_iter().map(|(_, row)| row), widths)
            .header(Row::new(header).style(dim()))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
            .block(titled(" builders ".to_owned()));
        let mut state = TableState::default().with_selected(at);
        frame.render_stateful_widget(table, area, &mut state);
    }
}

/// A row for each slot, with its index, and one for its candidate.
fn builder_rows(now: &Sample, previous: Option<&Sample>) -> Vec<(usize, Row<'static>)> {
    let mut rows = Vec::new();
    for (index, builder) in now.builders.iter().enumerate() {
        let plain = Version {
            version: String::new(),
            name: "plain".to_owned(),
            origin: String::new(),
        };
        let version = builder.active.as_ref().unwrap_or(&plain);
        let steps = |sample: &Sample| {
            let found = sample
                .builders
                .iter()
                .find(|found| found.slot == builder.slot);
            found
                .filter(|found| found.active == builder.active)
                .map(|found| found.steps)
        };
        let row = Row::new([
            builder.slot.clone(),
            "active".to_owned(),
            builder.state.clone(),
            short(&version.version),
            version.name.clone(),
            builder.steps.to_string(),
            rate_of(previous, now, steps),
            time(builder.build_p50_ns),
            time(builder.build_p99_ns),
            time(builder.verify_p50_ns),
            builder.faults.to_string(),
            builder.plain_steps.to_string(),
            builder.failed_steps.to_string(),
        ]);
        let style = match builder.state.as_str() {
            "active" | "plain" => Style::new(),
            "quarantined" | "closed" => Style::new().fg(Color::Red),
            _ => Style::new().fg(Color::Yellow),
        };
        rows.push((index, row.style(style)));
        if let Some(candidate) = tried(builder) {
            let row = Row::new([
                String::new(),
                candidate.stage.clone(),
                String::new(),
                short(&candidate.version.version),
                candidate.version.name.clone(),
                (candidate.observed + candidate.served).to_string(),
                String::new(),
                time(candidate.build_p50_ns),
                String::new(),
                String::new(),
                candidate.faults.to_string(),
                String::new(),
                String::new(),
            ]);
            rows.push((index, row.style(Style::new().fg(Color::Cyan))));
        }
    }
    rows
}

/// The candidate, while it is one.
fn tried(builder: &Builder) -> Option<&Candidate> {
    builder
        .candidate
        .as_ref()
        .filter(|candidate| matches!(candidate.stage.as_str(), "shadow" | "canary"))
}

fn draw_tenants(frame: &mut Frame<'_>, area: Rect, now: &Sample, previous: Option<&Sample>) {
    let rows = now.tenants.iter().map(|tenant| {
        let rate = |of: fn(&Tenant) -> u64| {
            let of_sample = |sample: &Sample| {
                let found = sample
                    .tenants
                    .iter()
                    .find(|found| found.name == tenant.name);
                found.map(of)
            };
            rate_of(previous, now, of_sample)
        };
        let name = match tenant.name.as_str() {
            "" => "(nobody in particular)",
            name => name,
        };
        Row::new([
            name.to_owned(),
            tenant.running.to_string(),
            tenant.waiting.to_string(),
            rate(|tenant| tenant.tokens_sampled),
            rate(|tenant| tenant.steps),
            tenant.tokens_sampled.to_string(),
            tenant.requests.to_string(),
            tenant.failed_requests.to_string(),
        ])
    });
    let header = [
        "TENANT", "RUNNING", "WAITING", "TOKENS/s", "STEPS/s", "TOKENS", "REQUESTS", "FAILED",
    ];
    let widths = [32, 8, 8, 10, 10, 12, 10, 8].map(Constraint::Length);
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(dim()))
        .block(titled(" tenants ".to_owned()));
    frame.render_widget(table, area);
}

/// What else there is to say of a slot.
fn details(builder: &Builder) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(active) = &builder.active {
        lines.push(Line::from(format!(" active    {}", named(active))));
    }
    if let Some(candidate) = &builder.candidate {
        let Candidate {
            version,
            stage,
            observed,
            differences,
            served,
            faults,
            ..
        } = candidate;
        lines.push(Line::from(format!(
            " candidate {}: {stage}; compared {observed}, different {differences}, served {served}, faults {faults}",
            named(version)
        )));
    }
    if let Some(previous) = &builder.previous {
        lines.push(Line::from(format!(" previous  {}", named(previous))));
    }
    lines.push(Line::from(format!(" on fault  {}", builder.on_fault)));
    let skipped = builder.fault_records.len().saturating_sub(FAULTS_SHOWN);
    for (kind, count, version, message) in &builder.fault_records[skipped..] {
        let text = format!(" {count} × {kind} in {}: {message}", short(version));
        lines.push(Line::from(text).style(Style::new().fg(Color::Red)));
    }
    lines
}

fn named(version: &Version) -> String {
    format!(
        "{} {} from {}",
        short(&version.version),
        version.name,
        version.origin
    )
}

fn titled(title: String) -> Block<'static> {
    Block::new().borders(Borders::TOP).title(title)
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// A count's increase for each second; a dash where there is none to say.
fn rate(previous: Option<&Sample>, now: &Sample, of: fn(&Sample) -> u64) -> String {
    rate_of(previous, now, |sample| Some(of(sample)))
}

fn rate_of(previous: Option<&Sample>, now: &Sample, of: impl Fn(&Sample) -> Option<u64>) -> String {
    let increase = || {
        let previous = previous?;
        let seconds = now.at.checked_sub(previous.at)?.as_secs_f64();
        let count = of(now)?.checked_sub(of(previous)?)?;
        (seconds > 0.0).then(|| count as f64 / seconds)
    };
    increase().map_or_else(|| "–".to_owned(), |rate| format!("{rate:.1}"))
}

fn time(ns: Option<u64>) -> String {
    match ns {
        None => String::new(),
        Some(ns) if ns < 1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        Some(ns) => format!("{:.1} ms", ns as f64 / 1e6),
    }
}

/// The first digits of a hash: enough to tell versions apart.
fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}

/// What was drawn, without what is empty at the end of lines and of all.
fn text_of(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let mut text = String::new();
    for row in buffer
        .content()
        .chunks(usize::from(buffer.area.width).max(1))
    {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn table(steps: u64) -> Value {
        json!({
            "model_name": "tiny",
            "engine": {
                "steps": steps, "failed_steps": 1, "fallback_steps": 2, "tokens_sampled": 10 * steps, "tokens_computed": 12 * steps,
                "running": 4, "waiting": 36, "preemptions": 3, "kv_cache_usage": 0.125,
                "tenants": [
                    { "name": null, "running": 1, "waiting": 2, "requests": 3, "tokens_sampled": steps },
                    { "name": "acme", "running": 3, "waiting": 34, "requests": 40, "failed_requests": 5, "tokens_sampled": 9 * steps },
                ],
            },
            "builders": [
                {
                    "group": "FLASH_ATTN/0", "state": "active", "steps": steps, "plain_steps": 6, "failed_steps": 7,
                    "active": { "version": "0123456789abcdef", "name": "flash-attn", "origin": "embedded flash-attn" },
                    "previous": null, "policy": { "on_fault": "fallback" },
                    "build_p50_ns": 1480, "build_p99_ns": 2_100_000, "verify_p50_ns": 900, "all_faults": { "trap": 1, "fuel": 2 },
                    "fault_records": [],
                },
                {
                    "group": "FLASH_ATTN/0@acme", "state": "quarantined", "steps": 0, "plain_steps": steps, "active": null,
                    "candidate": {
                        "version": { "version": "fedcba9876543210", "name": "mine", "origin": "mine.wasm" }, "stage": "canary",
                        "shadow": { "observed": 100, "differences": 0 }, "canary": { "steps": 11, "candidate_p50_ns": 3000 }, "faults": 0,
                    },
                    "previous": { "version": "aa", "name": "old", "origin": "old.wasm" },
                    "policy": { "on_fault": "fail-step" },
                    "fault_records": [{ "kind": "trap", "count": 8, "version": "fedcba9876543210", "message": "unreachable\u{1b}[2J" }],
                },
            ],
        })
    }

    fn sample(steps: u64, second: u64) -> Result<Sample, String> {
        Ok(Sample::read(&table(steps), Duration::from_secs(second)))
    }

    /// The line that begins with `start`, its blanks made one.
    #[track_caller]
    fn line(text: &str, start: &str) -> String {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines()
            .map(words)
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("no line begins with `{start}` in\n{text}"))
    }

    #[test]
    fn two_samples_become_a_picture() {
        let mut picture = Picture::new("/run/admin.sock".as_ref());
        picture.take(sample(100, 1));
        picture.take(sample(150, 3));
        let text = picture.to_text();
        assert_eq!(
            line(&text, "timetable top"),
            "timetable top /run/admin.sock tiny"
        );
        assert_eq!(
            line(&text, "25.0 steps/s"),
            "25.0 steps/s 250.0 tokens/s 300.0 computed/s running 4 waiting 36 KV cache 12 % steps 150 fallbacks 2 failed 1 preemptions 3"
        );
        assert_eq!(
            line(&text, "FLASH_ATTN/0 active"),
            "FLASH_ATTN/0 active active 0123456789ab flash-attn 150 25.0 1.5 µs 2.1 ms 0.9 µs 3 6 7"
        );
        assert_eq!(
            line(&text, "FLASH_ATTN/0@acme"),
            "FLASH_ATTN/0@acme active quarantined plain 0 0.0 0 150 0"
        );
        assert_eq!(
            line(&text, "canary"),
            "canary fedcba987654 mine 111 3.0 µs 0"
        );
        assert_eq!(line(&text, "acme"), "acme 3 34 225.0 0.0 1350 40 5");
        assert_eq!(
            line(&text, "(nobody"),
            "(nobody in particular) 1 2 25.0 0.0 150 3 0"
        );
        assert_eq!(
            line(&text, "active"),
            "active 0123456789ab flash-attn from embedded flash-attn"
        );
    }

    #[test]
    fn a_selected_slot_shows_its_details_and_guests_say_nothing_to_the_terminal() {
        let mut picture = Picture::new("x".as_ref());
        picture.take(sample(1, 1));
        picture.select(1);
        let text = picture.to_text();
        assert_eq!(
            line(&text, "candidate"),
            "candidate fedcba987654 mine from mine.wasm: canary; compared 100, different 0, served 11, faults 0"
        );
        assert_eq!(line(&text, "previous"), "previous aa old from old.wasm");
        assert_eq!(line(&text, "on fault"), "on fault fail-step");
        assert_eq!(
            line(&text, "8 ×"),
            "8 × trap in fedcba987654: unreachable [2J"
        );
        assert!(!text.contains('\u{1b}'));
        // Around the end, both ways.
        picture.select(1);
        assert_eq!(picture.selected, 0);
        picture.select(-1);
        assert_eq!(picture.selected, 1);
    }

    #[test]
    fn a_host_that_goes_away_is_said_and_one_that_comes_back_is_shown() {
        let mut picture = Picture::new("x".as_ref());
        picture.take(Err("no running host".to_owned()));
        assert!(
            picture
                .to_text()
                .contains("THE HOST DOES NOT ANSWER: no running host")
        );
        picture.take(sample(100, 1));
        picture.take(sample(200, 2));
        assert!(picture.to_text().contains("100.0 steps/s"));
        picture.take(Err("the host went away".to_owned()));
        let text = picture.to_text();
        assert!(text.contains("the host went away — trying again"), "{text}");
        assert!(text.contains("steps 200"), "what was known stays: {text}");
        // Another host: its counts say nothing beside the first one's.
        picture.take(sample(5, 3));
        let text = picture.to_text();
        assert!(
            text.contains("– steps/s") && text.contains("steps 5"),
            "{text}"
        );
        assert!(!text.contains("DOES NOT ANSWER"), "{text}");
        picture.take(sample(9, 4));
        assert!(picture.to_text().contains("4.0 steps/s"));
    }

    #[test]
    fn any_terminal_and_any_answer_are_drawn() {
        for value in [
            Value::Null,
            json!([]),
            json!({ "builders": [null, 3] }),
            table(7),
        ] {
            let mut picture = Picture::new("x".as_ref());
            picture.take(Ok(Sample::read(&value, Duration::ZERO)));
            picture.select(-1);
            for (width, height) in [(1, 1), (5, 3), (80, 24), (300, 4)] {
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                terminal.draw(|frame| picture.draw(frame)).unwrap();
            }
            assert!(picture.to_text().contains("timetable top"));
        }
    }
}

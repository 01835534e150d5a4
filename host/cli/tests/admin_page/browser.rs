//! The page in a browser, from the first look to the host's end.

use std::path::Path;

use crate::host::{Host, chaos, fixed_split, hostile, name_of};
use crate::support::file;
use crate::webdriver::Browser;

const ROW: &str = "#builders tbody tr";
const NAME: &str = "#builders .name";
const VERSION: &str = "#builders .version";

/// Fills the form in, confirms, and waits for an answer.
fn reload(browser: &Browser, component: &str, options: &str, stages: &str) -> String {
    browser.keys("#component", component);
    browser.fill("#options", options);
    browser.click(&format!("#reload input[name=stages][value='{stages}']"));
    if stages == "shadow" {
        browser.fill("#shadow_steps", "100000");
        browser.click("details summary");
        browser.fill("#max_build_ratio", "1000000");
        browser.fill("#max_extra_build_us", "1000000000");
        browser.fill("#min_observed_per_mille", "0");
        browser.click("details summary");
    }
    browser.click("#reload button.main");
    browser.wait_for("#confirm-text", |text| text.contains(name_of(component)));
    browser.click("#confirm-yes");
    browser.wait_for("#reload-answer", |text| {
        !(text.is_empty() || text.ends_with('…'))
    })
}

#[test]
fn an_operator_reloads_and_rolls_back_in_a_browser() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let mut host = Host::start(&[]);
    browser.open(&host.url("/"));

    // The first look: what serves, what the engine does, where time goes.
    let row = browser.wait_for(ROW, |text| text.contains("embedded") && text.contains("µs"));
    for part in [
        "FLASH_ATTN/0",
        "everybody's",
        "active",
        "embedded flash-attn",
    ] {
        assert!(row.contains(part), "{part} is missing in {row}");
    }
    assert_eq!(browser.text("#status"), "live");
    browser.wait_for("#figures", |text| {
        text.contains("Running\n4") && !text.contains('–')
    });
    browser.wait_for("#steps-summary", |text| text.contains("median"));
    let painted = "const c = document.querySelector('#steps'); \
        const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
        return pixels.filter((value, index) => index % 4 === 3 && value > 0).length / (c.width * c.height)";
    let painted = browser.run(painted).as_f64().unwrap();
    assert!(painted > 0.05, "{painted} of the timeline is painted");
    // With the keyboard a step is read; what is left out goes from the bars.
    browser.keys("#steps", "\u{e012}");
    let readout = browser.wait_for("#steps-readout", |text| text.contains("4 requests, "));
    assert!(
        readout.contains("model") && readout.contains("build"),
        "{readout}"
    );
    browser.click("#legend button:nth-of-type(8)");
    let pressed = "return document.querySelector('#legend button:nth-of-type(8)').ariaPressed";
    assert_eq!(browser.run(pressed), "false");
    browser.click("#legend button:nth-of-type(8)");
    assert_eq!(browser.complaints(), [] as [&str; 0]);

    // A reload by the form, at once.
    let before = browser.text(VERSION);
    let fixed = file(&host.scratch, "fixed.wasm", &fixed_split());
    let answer = reload(&browser, &fixed, "splits=2", "none");
    assert!(answer.contains("flash-attn, fixed splits"), "{answer}");
    let after = browser.wait_for(VERSION, |version| version != before);
    browser.wait_for("#reload-answer", |text| text.contains("serves."));
    assert_eq!(browser.text(NAME), "flash-attn, fixed splits");

    // A builder that faults in a shadow: withdrawn, said why, and another still serves.
    let chaos = chaos(&host.scratch);
    let trap = "chaos=trap\nchaos-from-call=7";
    let answer = reload(&browser, &chaos, trap, "shadow");
    assert!(
        answer.contains("shadow") || answer.contains("withdrawn"),
        "{answer}"
    );
    browser.wait_for("#candidates", |text| {
        text.contains("withdrawn") && text.contains("trap")
    });
    browser.wait_for("#reload-answer", |text| {
        text.contains("withdrawn") && text.contains("What served goes on")
    });
    browser.wait_for("#faults", |text| text.contains("trap"));
    assert_eq!(browser.text(VERSION), after);
    let folder = std::env::var_os("TIMETABLE_PICTURES")
        .unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    for (name, width, scheme) in [
        ("light", 1280, "light"),
        ("dark", 1280, "dark"),
        ("narrow", 400, "light"),
    ] {
        let picture = browser.picture(width, scheme);
        let size = |at: usize| u32::from_be_bytes(picture[at..at + 4].try_into().unwrap());
        assert!(picture.starts_with(b"\x89PNG") && size(16) == width && size(20) > 700);
        let path = Path::new(&folder).join(format!("admin-page-{name}.png"));
        std::fs::write(&path, &picture).unwrap();
        println!("{}", path.display());
    }
    // Nothing sticks out of a narrow window.
    let wide = browser
        .run("return document.documentElement.scrollWidth - innerWidth")
        .as_i64();
    assert!(wide <= Some(0), "{wide:?}");
    assert_eq!(browser.complaints(), [] as [&str; 0]);

    // What is refused is said in plain words, and a name that is markup stays text.
    let bad = file(&host.scratch, "bad.wasm", b"\0asm\x01\0\0\0");
    let answer = reload(&browser, &bad, "", "none");
    assert!(
        answer.contains("Not taken: bad.wasm") && answer.contains("stays"),
        "{answer}"
    );
    // The browser itself reports the answer's status; nothing else.
    let complaints = browser.complaints();
    assert!(
        complaints.iter().all(|text| text.contains("422")),
        "{complaints:?}"
    );
    let (hostile, name) = hostile(&host.scratch);
    reload(&browser, &hostile, "", "none");
    browser.wait_for(NAME, |text| text.trim() == name.trim());
    let images = "return document.querySelectorAll('img:not([src=\"icon.svg\"])').length";
    assert_eq!(browser.run(images), 0);
    assert_eq!(browser.complaints(), [] as [&str; 0]);

    // Back, by its button.
    browser.click("#builders tbody button");
    browser.click("#confirm-yes");
    browser.wait_for("#rollback-answer", |text| {
        text.contains("takes over at the next step")
    });
    browser.wait_for(VERSION, |version| version == after);

    // The host ends: the page says so, and what it shows is not taken for news.
    host.kill();
    browser.wait_for("#gone", |text| {
        text.contains("does not answer") && text.contains("last")
    });
    assert_eq!(browser.text("#status"), "no answer");
}

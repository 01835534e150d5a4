//! The browser of the admin page's test: the machine's Chromium and ChromeDriver, or Debian's packages where we may install.

use std::env;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::{heading, run_with};

/// About 100 MB to fetch, 350 MB installed.
const PACKAGES: [&str; 2] = ["chromium", "chromium-driver"];
/// How long the index may take, and the packages, each as `timeout` takes it.
const PATIENCE: &str = "8m";

/// Sees to it that there is one. Elsewhere than in CI the test is left out without it, and says so.
pub fn for_tests() -> Result<()> {
    if is_there() {
        return Ok(());
    }
    let ci = env::var_os("CI").is_some_and(|ci| ci == "true");
    if !may_install() {
        let message = "no Chromium with ChromeDriver: install them (Debian: apt-get install chromium chromium-driver), or name them with CHROMIUM and CHROMEDRIVER";
        if ci {
            bail!("{message}");
        }
        heading(&format!(
            "{message}; the admin page's test in a browser is left out"
        ));
        return Ok(());
    }
    heading("no Chromium with ChromeDriver: installing Debian's");
    let installed = install();
    match installed {
        Err(error) if !ci => {
            heading(&format!(
                "{error:#}; the admin page's test in a browser is left out"
            ));
            Ok(())
        }
        result => result,
    }
}

/// As the test looks for them.
fn is_there() -> bool {
    let on_path = |names: &[&str]| {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).any(|folder| names.iter().any(|name| folder.join(name).is_file()))
    };
    let named = |variable: &str| env::var_os(variable).is_some();
    (named("CHROMIUM") || on_path(&["chromium", "chromium-browser", "google-chrome"]))
        && (named("CHROMEDRIVER") || on_path(&["chromedriver"]))
}

/// Debian, and root.
fn may_install() -> bool {
    let root = crate::process::output("id", &["-u"]).is_ok_and(|id| id.trim() == "0");
    root && Path::new("/etc/debian_version").exists()
}

fn install() -> Result<()> {
    let apt = |arguments: &[&str]| {
        let quiet = ["--kill-after=10s", PATIENCE, "apt-get", "-qq"];
        let all: Vec<&str> = quiet.iter().chain(arguments).copied().collect();
        run_with("timeout", &all, &[("DEBIAN_FRONTEND", "noninteractive")])
    };
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(PACKAGES);
    apt(&["update"])
        .and_then(|()| apt(&arguments))
        .with_context(|| {
            format!(
                "cannot install {}; check the network",
                PACKAGES.join(" and ")
            )
        })
}

//! The soak of `cargo xtask bench serve`, short: every claim of it must hold.

use std::{path::PathBuf, time::Duration};

use timetable_tests::bench::serve::Soak;

#[test]
fn streams_under_reloads_faults_and_hang_ups_are_right_and_leave_nothing() {
    let soak = Soak {
        program: PathBuf::from(env!("CARGO_BIN_EXE_timetable")),
        clients: 24,
        duration: Duration::from_secs(8),
    };
    let soaked = soak.run().expect("a server");
    // Memory is flat in the long run: after seconds it says little.
    let broken: Vec<_> = soaked
        .claims()
        .into_iter()
        .filter(|(holds, what)| !holds && !what.starts_with("resident memory"))
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(soaked.resident_kib[0] > 0, "{soaked:?}");
}

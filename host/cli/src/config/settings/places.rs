//! Rows of the table of settings: what a host keeps, and where.

use super::{GIB, KIB, MIB, Setting, setting};
use crate::config::kind::Kind;
use crate::config::names;

/// `[faults]`.
pub const FAULTS: &[Setting] = &[
    setting(
        "faults.dir",
        Kind::path("a directory, mode 0700"),
        "Keep faults as bundles in this directory.",
        "Disk, as bounded below; files are written off the step thread.",
    )
    .flag("--fault-dir")
    .unset("faults are not kept", "\"faults\"")
    .live(),
    setting(
        "faults.max_files",
        Kind::Count {
            unit: "files",
            min: 1,
            max: 1_000_000,
        },
        "Files in the directory; the oldest go.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_bytes",
        Kind::Size(KIB, 1 << 50),
        "Bytes of all files; the oldest go.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_bundle_bytes",
        Kind::Size(KIB, timetable_sandbox::MAX_BUNDLE_BYTES),
        "Bytes of one file; the step's tensors are left out first, then the file is not written. At most max_bytes.",
        "Disk, and as much memory while it is written.",
    )
    .live(),
    setting(
        "faults.max_alike",
        Kind::count("files", 32),
        "Bundles of one version and kind of fault; more tell nothing new. Counted anew when a setting of this table changes.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_step_bytes",
        Kind::Size(0, GIB),
        "Bytes of a step's tensors that are kept where the verifier had no part in the fault.",
        "A copy on the step thread, about 20 µs for 256KiB.",
    )
    .live(),
    setting(
        "faults.max_refused_step_bytes",
        Kind::Size(0, GIB),
        "The same where the verifier refused the result, and they are needed to see why.",
        "A copy on the step thread, about 2 ms for 16MiB.",
    )
    .live(),
];

/// `[recording]`.
pub const RECORDING: &[Setting] = &[
    setting(
        "recording.dir",
        Kind::path("a directory, mode 0700"),
        "Keep every step's inputs and outputs in this directory, for `timetable replay`.",
        "A copy of each step on the step thread, tens of microseconds; disk, as bounded below.",
    )
    .flag("--record")
    .unset("nothing is recorded", "\"recording\""),
    setting(
        "recording.max_bytes",
        Kind::Size(MIB, 1 << 50),
        "Bytes of the recording; the oldest steps go. The flag is in MiB.",
        "Disk.",
    )
    .flag("--record-max-mib"),
    setting(
        "recording.segment_bytes",
        Kind::Size(KIB, 1 << 40),
        "Bytes of a file after which the next one begins; at most an eighth of max_bytes.",
        "What is lost at once when the oldest goes.",
    ),
    setting(
        "recording.queue",
        Kind::Count {
            unit: "steps",
            min: 1,
            max: 4096,
        },
        "Steps that wait to be written; when they are more, steps are left out and counted.",
        "Memory for a copy of a step's tensors each.",
    ),
    setting(
        "recording.max_step_bytes",
        Kind::Size(KIB, GIB),
        "Bytes of a step's tensors; a larger step is left out and counted.",
        "A copy on the step thread, about 1 ms for 8MiB.",
    ),
];

/// `[admin]`.
pub const ADMIN: &[Setting] = &[
    setting(
        "admin.socket",
        Kind::path("a path, or none"),
        "The admin socket, mode 0600; \"none\" opens none.",
        "A thread that sleeps.",
    )
    .flag("--admin")
    .unset(
        "admin.sock under the runtime directory",
        "\"/run/timetable/admin.sock\"",
    ),
    setting(
        "admin.listen",
        Kind::Text("an IP address and a port, as 127.0.0.1:9090; port 0: any", names::address),
        "The admin page: builders, steps, faults, reload and rollback over HTTP. An address that others can reach needs a token_file.",
        "A thread that sleeps; less than 100 ns of a step for the timeline.",
    )
    .flag("--admin-listen")
    .unset("there is no admin page", "\"127.0.0.1:9090\""),
    setting(
        "admin.token_file",
        Kind::path("a file that holds the token, at least 16 characters"),
        "Who asks the admin page for anything must show this token: Authorization: Bearer TOKEN.",
        "None.",
    )
    .flag("--admin-token-file")
    .unset(
        "whoever can open a connection to the address is admitted",
        "\"admin.token\"",
    ),
    setting(
        "admin.state_dir",
        Kind::path("a directory, mode 0700"),
        "Keep components by content, and which are active; what is active survives a restart.",
        "Disk: every component that was reloaded.",
    )
    .flag("--state-dir")
    .unset(
        "a restart begins with the configured components",
        "\"state\"",
    ),
    setting(
        "admin.cache_dir",
        Kind::path("a directory, mode 0700"),
        "Keep compiled components, so that a known one is not compiled again.",
        "Disk, for each component and version of this program.",
    )
    .flag("--cache-dir")
    .unset("components are compiled when they are loaded", "\"cache\""),
];

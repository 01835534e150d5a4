//! Where the admin socket lies, and making that place safe.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::exit::{Exit, Failure};

/// The default: `admin.sock` under `$XDG_RUNTIME_DIR/timetable`, else under a directory of the user's own beside the
/// system's temporary files.
pub fn default_path() -> PathBuf {
    let directory = std::env::var_os("XDG_RUNTIME_DIR")
        .filter(|value| !value.is_empty())
        .map_or_else(
            || {
                std::env::temp_dir()
                    .join(format!("timetable-{}", rustix::process::geteuid().as_raw()))
            },
            |runtime| PathBuf::from(runtime).join("timetable"),
        );
    directory.join("admin.sock")
}

/// Makes `path` ready to be bound: its directory exists and is the user's own, and nothing answers there. A socket that
/// nobody answers at is left over from a host that ended, and is removed.
///
/// # Errors
/// Another host answers; the directory belongs to someone else or others may write to it; the path is not a socket.
pub fn prepare(path: &Path) -> Result<(), Failure> {
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    match fs::metadata(directory) {
        Ok(metadata) => check_directory(directory, &metadata)?,
        Err(error) if error.kind() == ErrorKind::NotFound => fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| unusable(directory, &format!("cannot be made ({error})")))?,
        Err(error) => return Err(unusable(directory, &format!("cannot be read ({error})"))),
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(unusable(path, &format!("cannot be read ({error})"))),
        Ok(metadata) if !metadata.file_type().is_socket() => Err(unusable(path, "is not a socket")),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Err(Failure::new(
                Exit::Unreachable,
                format!(
                    "admin socket {}: another host answers there; stop it, or choose another path with --admin PATH \
                     (--admin none opens none)",
                    path.display()
                ),
            )),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path)
                .map_err(|error| {
                    unusable(
                        path,
                        &format!(
                            "is left over from a host that ended and cannot be removed ({error})"
                        ),
                    )
                }),
            Err(error) => Err(unusable(path, &format!("cannot be asked ({error})"))),
        },
    }
}

fn check_directory(directory: &Path, metadata: &fs::Metadata) -> Result<(), Failure> {
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_dir() {
        return Err(unusable(directory, "is not a directory"));
    }
    if metadata.uid() != own {
        return Err(unusable(
            directory,
            &format!("belongs to user {} and this is user {own}", metadata.uid()),
        ));
    }
    // Whoever may write to the directory may replace the socket; the sticky bit limits that to owners.
    if metadata.mode() & 0o022 != 0 && metadata.mode() & 0o1000 == 0 {
        return Err(unusable(
            directory,
            &format!(
                "may be written to by others (mode {:o})",
                metadata.mode() & 0o7777
            ),
        ));
    }
    Ok(())
}

fn unusable(path: &Path, what: &str) -> Failure {
    Failure::new(
        Exit::BadInput,
        format!(
            "admin socket: {} {what}; choose another path with --admin PATH (--admin none opens none)",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    fn scratch() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()
            .unwrap()
    }

    #[test]
    fn a_missing_directory_is_made_private() {
        let scratch = scratch();
        let path = scratch.path().join("a/b/admin.sock");
        prepare(&path).unwrap();
        let mode = fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777;
        assert_eq!(mode, 0o700);
    }

    #[test]
    fn a_stale_socket_is_removed() {
        let scratch = scratch();
        let path = scratch.path().join("admin.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        prepare(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_busy_socket_is_refused_and_kept() {
        let scratch = scratch();
        let path = scratch.path().join("admin.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = prepare(&path).unwrap_err().to_string();
        assert!(
            error.contains("another host answers there") && error.contains("--admin PATH"),
            "{error}"
        );
        assert!(path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_refused_and_kept() {
        let scratch = scratch();
        let path = scratch.path().join("admin.sock");
        fs::write(&path, "precious").unwrap();
        let error = prepare(&path).unwrap_err().to_string();
        assert!(error.contains("is not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let scratch = scratch();
        let directory = scratch.path().join("open");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        let error = prepare(&directory.join("admin.sock"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("may be written to by others (mode 777)"),
            "{error}"
        );
    }
}

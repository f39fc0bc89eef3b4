//! A program under the preload library, `preloaded.c`: what it is told where a daemon refuses memory, and what else
//! that leaves as it was.

use super::{Act, Scripted, is_discard};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use tiermgr_wire::reply::ErrorCode;
use tiermgr_wire::request::ToDaemon;

const REQUIRE: (&str, &str) = ("TIERMGR_REQUIRE", "1");
const SMALL: (&str, &str) = ("TIERMGR_SMALL", "1");
const MMAP: (&str, &str) = ("TIERMGR_MMAP", "1");

/// The built library; `None` where there is none, and says so.
fn library() -> Option<PathBuf> {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/lib/libtiermgr_preload.so");
    if library.exists() {
        return Some(library);
    }
    let why = "dist/lib/libtiermgr_preload.so is not built; run scripts/build";
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped: {why}");
    eprintln!("skipped: {why}");
    None
}

fn program() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripted_daemon/preloaded.c");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("preloaded.{}", std::process::id()));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &source])
        .output()
        .expect("cc is needed for this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs the program, which must end well, and gives what is on standard error: the lines of the library, without
/// its name and number.
fn lines(socket: &Path, what: &str, settings: &[(&str, &str)]) -> Vec<String> {
    let Some(library) = library() else { return Vec::new() };
    let program = program();
    let mut command = Command::new("timeout");
    command.args(["60", "env"]).arg(format!("LD_PRELOAD={}", library.display())).arg(&program);
    command.env("WHAT", what).env("TIERMGR_SOCKET", socket).envs(settings.iter().copied());
    let Output { status, stdout, stderr } = command.output().expect("runs");
    std::fs::remove_file(&program).expect("made above");
    let said = String::from_utf8_lossy(&stdout);
    let told = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.trim_end() == "ok", "{what}: {status:?} {said}{told}");
    told.lines()
        .map(|line| line.split_once("]: ").map_or(line, |(_, text)| text).to_owned())
        .collect()
}

/// All that is not about memory is answered as usual.
fn refuse(daemon: &Scripted, act: Act) {
    daemon.book.act(move |message| match message {
        ToDaemon::AddRegion { .. } => act,
        _ => Act::Usual,
    });
}

macro_rules! check {
    ($lines:expr, $($part:literal),*) => {
        let lines = $lines;
        if library().is_some() {
            let wanted: &[&str] = &[$($part),*];
            assert_eq!(lines.len(), wanted.len(), "{lines:#?}");
            for (line, part) in lines.iter().zip(wanted) {
                assert!(line.contains(part), "wanted {part}: {line}");
            }
        }
    };
}

#[test]
fn what_the_daemon_cannot_answer_is_no_memory_from_libc_where_that_is_required() {
    let Some(daemon) = Scripted::new("required") else { return };
    for code in [ErrorCode::Internal, ErrorCode::InvalidArgument, ErrorCode::ShuttingDown] {
        refuse(&daemon, Act::Refuse(code));
        check!(lines(&daemon.socket, "refused", &[REQUIRE]), "as TIERMGR_REQUIRE is set");
        check!(lines(&daemon.socket, "served", &[]), "new memory comes from libc");
    }
}

#[test]
fn a_refusal_is_told_of_though_libc_has_served_something_else() {
    let Some(daemon) = Scripted::new("mapping-first") else { return };
    let is_first = AtomicBool::new(true);
    daemon.book.act(move |message| match message {
        ToDaemon::AddRegion { .. } if is_first.swap(false, Ordering::SeqCst) => {
            Act::Refuse(ErrorCode::NotPermitted)
        }
        ToDaemon::AddRegion { .. } => Act::Refuse(ErrorCode::NoRoom),
        _ => Act::Usual,
    });
    check!(
        lines(&daemon.socket, "mapping", &[MMAP]),
        "a mapping of 4194304 bytes is not managed",
        "1048576 bytes were refused: the script says no",
        "a mapping of 4194304 bytes is not managed"
    );
}

#[test]
fn a_forked_child_is_told_itself() {
    let Some(daemon) = Scripted::new("told-child") else { return };
    refuse(&daemon, Act::Refuse(ErrorCode::NoRoom));
    check!(
        lines(&daemon.socket, "children", &[]),
        "1048576 bytes were refused",
        "1048576 bytes were refused"
    );
    let nobody = daemon.socket.with_extension("nobody");
    check!(
        lines(&nobody, "children", &[REQUIRE]),
        "managed blocks are refused",
        "managed blocks are refused"
    );
}

#[test]
fn a_program_without_addresses_is_told_once() {
    let Some(daemon) = Scripted::new("addresses") else { return };
    check!(lines(&daemon.socket, "addresses", &[]), "see `ulimit -v`");
}

#[test]
fn the_first_small_block_leaves_errno_alone() {
    let Some(daemon) = Scripted::new("errno") else { return };
    check!(lines(&daemon.socket, "errno", &[SMALL]),);
    let nobody = daemon.socket.with_extension("nobody");
    check!(lines(&nobody, "errno", &[SMALL]), "all memory comes from libc");
}

#[test]
fn a_thread_that_is_cancelled_in_malloc_ends_behind_it() {
    let Some(daemon) = Scripted::new("cancelled") else { return };
    refuse(&daemon, Act::Refuse(ErrorCode::NoRoom));
    check!(lines(&daemon.socket, "cancelled-line", &[]), "1048576 bytes were refused");
    // A discard that is never confirmed is waited for.
    let is_first = AtomicBool::new(true);
    daemon.book.act(move |message| match message {
        ToDaemon::AddRegion { .. } if is_first.swap(false, Ordering::SeqCst) => Act::Usual,
        ToDaemon::AddRegion { .. } => Act::Refuse(ErrorCode::NoRoom),
        _ if is_discard(message) => Act::Refuse(ErrorCode::Internal),
        _ => Act::Usual,
    });
    check!(lines(&daemon.socket, "cancelled", &[]), "3221225472 bytes were refused");
}

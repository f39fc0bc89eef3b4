//! A private daemon with little memory, programs compiled from C, and what the daemon counted.
//!
//! `TIERMGR_TEST_SIZE` (bytes, or with `M`, `G`) makes the working set larger than the 128 MiB that a
//! test run takes; the daemon always gets half of it. `TIERMGR_TEST_ASSUME_MISSING` names a kernel feature
//! that all daemons do without. Without root, userfaultfd or the built `dist/`
//! a test says why it is skipped, which under `TIERMGR_CI_STRICT=1` is a failure.

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_sys::sock::Stream;
use tiermgr_wire::control::{ControlReply, ControlRequest, Status};
use tiermgr_wire::hello::{Hello, Role};
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::ToDaemon;

/// How long a program may take for a working set of up to 256 MiB; larger ones get more, and so do more forks.
const PROGRAM_WAIT: Duration = Duration::from_secs(120);
const DAEMON_WAIT: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

/// Two gigabyte tests at once would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The repository.
pub(crate) fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests lie in the repository").to_path_buf()
}

/// What `scripts/build` made.
pub(crate) fn dist(path: &str) -> PathBuf {
    root().join("dist").join(path)
}

/// Says why a test does not run, or fails where nothing may be skipped.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped in a strict run: {why}");
    eprintln!("skipped: {why}");
}

/// Whether this is root.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// A working set in bytes.
pub(crate) fn working_set() -> u64 {
    let Ok(text) = std::env::var("TIERMGR_TEST_SIZE") else { return 128 * MIB };
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "M" => MIB,
        "G" => 1024 * MIB,
        other => panic!("TIERMGR_TEST_SIZE: unknown unit {other}"),
    };
    digits.parse::<u64>().expect("TIERMGR_TEST_SIZE is a size") * unit
}

/// What makes a daemon do without the kernel feature that the environment names.
fn assumed_missing() -> Vec<String> {
    let feature = std::env::var("TIERMGR_TEST_ASSUME_MISSING");
    feature.map_or_else(|_| Vec::new(), |name| vec!["--assume-missing".to_owned(), name])
}

/// A folder of this test's own on the file system of the target folder, for stores: those on a tmpfs
/// are refused.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// Compiles a program or a library and gives its path.
pub(crate) fn compile(
    compiler: &str,
    sources: &[PathBuf],
    name: &str,
    flags: &[&OsStr],
) -> PathBuf {
    let made = scratch("programs").join(name);
    // Another test may be running, or compiling, the same program.
    let new = made.with_extension(format!("{}.{:?}", std::process::id(), thread::current().id()));
    let output = Command::new(compiler)
        .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&new)
        .args(sources)
        .args(flags)
        .output()
        .unwrap_or_else(|error| panic!("{compiler} is needed for these tests: {error}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&new, &made).expect("the target folder is writable");
    made
}

/// Forks in the tests that say so. `TIERMGR_TEST_FORKS` makes them more.
pub(crate) fn forks() -> u64 {
    std::env::var("TIERMGR_TEST_FORKS").map_or(50, |number| number.parse().expect("a number"))
}

/// Runs a command that must end within `limit`, and gives what it said. One that does not is killed
/// with all that it forked.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Result<Output, String> {
    let mut child = command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("starting {command:?}: {error}"))?;
    let mut stdout = child.stdout.take().expect("piped");
    let mut stderr = child.stderr.take().expect("piped");
    let readers = [
        thread::spawn(move || read_all(&mut stdout)),
        thread::spawn(move || read_all(&mut stderr)),
    ];
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            break Some(status);
        }
        if Instant::now() > deadline {
            killpg(pid_of(&child), Signal::SIGKILL).map_err(|error| error.to_string())?;
            child.wait().map_err(|error| error.to_string())?;
            break None;
        }
        thread::sleep(Duration::from_millis(10));
    };
    let Some(status) = status else {
        // What has left the group may hold the pipes open: the readers are left to themselves.
        return Err(format!("{command:?} did not end within {limit:?}"));
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().expect("reads until the end"));
    Ok(Output { status, stdout, stderr })
}

fn has_ended_well(said: &str) -> bool {
    said.lines().any(|line| line.starts_with("ok "))
}

/// What a program did not test, in its own words.
pub(crate) fn skips(said: &str) -> Vec<&str> {
    said.lines().filter_map(|line| line.strip_prefix("skipped: ")).collect()
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).expect("a pid"))
}

fn read_all(from: &mut impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).expect("a pipe can be read");
    all
}

/// A daemon of this test's own.
#[derive(Debug)]
pub(crate) struct Stage {
    daemon: Child,
    folder: PathBuf,
    state: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Stage {
    /// Starts a daemon that may use `dram` bytes. `None`: not possible here, and said why.
    pub(crate) fn new(name: &str, dram: u64, flags: &[&str]) -> Option<Self> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let program = dist("bin/tiermgrd");
        if !program.exists() {
            skip("dist/bin/tiermgrd is not built; run scripts/build");
            return None;
        }
        if !is_root() {
            skip("a daemon needs root");
            return None;
        }
        if !Path::new("/dev/userfaultfd").exists() {
            skip("this kernel has no /dev/userfaultfd");
            return None;
        }
        let folder = scratch(&format!("{name}.{}", std::process::id()));
        let state = PathBuf::from(format!("/dev/shm/tiermgr-test-{name}.{}", std::process::id()));
        let store_bytes = (4 * working_set()).max(1280 * MIB);
        let store = format!("{}:{store_bytes}", folder.join("store").display());
        let mut daemon = Command::new(program)
            .arg("--embedded")
            .args(["--ready-fd", "1", "--dram", &dram.to_string(), "--store", &store])
            .arg("--socket")
            .arg(folder.join("socket"))
            .arg("--state-dir")
            .arg(&state)
            .args(flags)
            .args(assumed_missing())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("dist/bin/tiermgrd can be started");
        let mut line = String::new();
        let mut output = BufReader::new(daemon.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a pipe can be read");
        assert_eq!(line.trim_end(), "ready", "tiermgrd did not start");
        Some(Self { daemon, folder, state, _turn: turn })
    }

    /// Where the daemon listens.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// A command that finds the daemon, with all large blocks managed or refused.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TIERMGR_") {
                command.env_remove(name);
            }
        }
        command
            .env("TIERMGR_SOCKET", self.socket())
            .env("TIERMGR_REQUIRE", "1")
            .env("EXPECT_MANAGED", "1")
            .env("FOLDER", &self.folder)
            .env("LD_PRELOAD", dist("lib/libtiermgr_preload.so"))
            .env("SIZE", working_set().to_string());
        command
    }

    /// Runs a program to its end and checks that it said "ok", or what it skipped. False: it skipped all.
    pub(crate) fn expect_ok(&self, command: &mut Command) -> bool {
        let scale = (working_set() / (256 * MIB)).max(forks() / 250).max(1);
        let scale = u32::try_from(scale).expect("fits");
        let output = match run_within(command, PROGRAM_WAIT * scale) {
            Ok(output) => output,
            Err(error) => panic!("{error}\n{:#?}", self.status()),
        };
        let said = String::from_utf8_lossy(&output.stdout);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && (has_ended_well(&said) || !skips(&said).is_empty()),
            "{:?}\n{said}{complained}{:#?}",
            output.status,
            self.status(),
        );
        eprint!("{said}{complained}");
        for why in skips(&said) {
            skip(why);
        }
        has_ended_well(&said)
    }

    /// What the daemon has counted.
    pub(crate) fn status(&self) -> Status {
        let stream = Stream::connect_within(&self.socket(), DAEMON_WAIT).expect("the daemon lives");
        stream.set_recv_timeout(Some(DAEMON_WAIT)).expect("a socket has time limits");
        let ask = |message: &ToDaemon| {
            let mut packet = vec![0; tiermgr_wire::PACKET_BYTES_MAX];
            let bytes = tiermgr_wire::encode(message, &mut packet).expect("fits");
            stream.send_with_fds(bytes, &[]).expect("the daemon takes a request");
            let (length, _) = stream.recv_with_fds(&mut packet).expect("the daemon answers");
            tiermgr_wire::decode::<FromDaemon>(&packet[..length]).expect("an answer")
        };
        let hello = Hello { version: tiermgr_wire::VERSION, role: Role::Control };
        assert_eq!(ask(&ToDaemon::Hello(hello)), FromDaemon::Ready);
        match ask(&ToDaemon::Control(ControlRequest::Status)) {
            FromDaemon::Control(ControlReply::Status(status)) => *status,
            other => panic!("asked for the status, got {other:?}"),
        }
    }

    /// Waits until `holds`, and fails after `DAEMON_WAIT`.
    pub(crate) fn wait_until(&self, what: &str, holds: impl Fn(&Status) -> bool) {
        let deadline = Instant::now() + DAEMON_WAIT;
        loop {
            let status = self.status();
            if holds(&status) {
                return;
            }
            assert!(Instant::now() < deadline, "not in time: {what}\n{status:#?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Pages were brought back and nothing was lost; afterwards nothing is held for programs that
    /// have gone.
    pub(crate) fn expect_work(&self, recalled_pages_min: u64) {
        let totals = self.status().totals;
        let recalled = totals.recalled_pages + totals.prefetched_pages + totals.rescued_pages;
        assert!(
            recalled >= recalled_pages_min,
            "{recalled} pages came back, fewer than {recalled_pages_min}: no pressure?\n{totals:#?}"
        );
        assert_eq!(totals.poisoned_pages, 0, "pages were lost\n{totals:#?}");
        assert_eq!(totals.store_errors, 0, "the store failed\n{totals:#?}");
        self.wait_until("room given back", |status| {
            status.families == 0
                && status.store_used_bytes == 0
                && status.totals.dram_now_bytes == 0
        });
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let keeper = pid_of(&self.daemon);
        // A daemon that has ended already is no error here; the test has said so itself.
        let _asked = kill(keeper, Signal::SIGTERM).is_ok();
        let deadline = Instant::now() + DAEMON_WAIT;
        while matches!(self.daemon.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                eprintln!("tiermgrd did not end; it is killed");
                // The keeper would start another one: it goes first, the serving process after it.
                let children = format!("/proc/{keeper}/task/{keeper}/children");
                let children = fs::read_to_string(children).unwrap_or_default();
                let _killed = self.daemon.kill().is_ok();
                let _reaped = self.daemon.wait().is_ok();
                for child in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
                    let _killed = kill(Pid::from_raw(child), Signal::SIGKILL).is_ok();
                }
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        for folder in [&self.folder, &self.state] {
            let _removed = fs::remove_dir_all(folder).is_ok();
        }
    }
}

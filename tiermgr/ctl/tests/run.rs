//! `tiermgrctl run` from outside: statuses, signals, reports, and that nothing stays behind.
//!
//! Needs root, /dev/userfaultfd, `tiermgrd` in the folder of `tiermgrctl` (`cargo build --workspace`),
//! and the preload library there or where `TIERMGR_PRELOAD` says.

#![expect(clippy::unwrap_used, reason = "a test that cannot do its preparations has failed")]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Says why a test cannot run here. Under `TIERMGR_CI_STRICT` that is a failure.
fn can_run() -> bool {
    let folder = Path::new(env!("CARGO_BIN_EXE_tiermgrctl")).parent().unwrap();
    let preload_is_named =
        std::env::var_os("TIERMGR_PRELOAD").is_some_and(|path| Path::new(&path).exists());
    let reason = if !nix::unistd::geteuid().is_root() {
        "needs root"
    } else if !Path::new("/dev/userfaultfd").exists() {
        "needs /dev/userfaultfd"
    } else if !folder.join("tiermgrd").exists() {
        "needs tiermgrd beside tiermgrctl: cargo build --workspace"
    } else if !folder.join("libtiermgr_preload.so").exists() && !preload_is_named {
        "needs libtiermgr_preload.so beside tiermgrctl, or TIERMGR_PRELOAD: scripts/build"
    } else {
        return true;
    };
    eprintln!("skipped: {reason}");
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped: {reason}");
    false
}

struct Scene {
    dir: PathBuf,
}

impl Scene {
    fn new(name: &str) -> Self {
        let parent = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let dir = parent.join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self { dir }
    }

    /// With a store in this scene's folder.
    fn run(&self, options: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_tiermgrctl"));
        run.args(["run", "--dram", "64MiB", "--nvme"])
            .arg(format!("{}:256MiB", self.dir.join("store").display()))
            .args(options)
            .arg("--")
            .args(command)
            .env_remove("TIERMGR_SOCKET")
            .env("TMPDIR", &self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        run
    }

    fn is_empty(&self) -> bool {
        fs::read_dir(&self.dir).unwrap().next().is_none()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

/// The whole output, or a failure when it takes too long.
fn finish(mut child: Child) -> Output {
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn output(mut command: Command) -> Output {
    finish(command.spawn().unwrap())
}

#[test]
fn statuses_are_those_of_the_program() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("status");
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)] {
        let output = output(scene.run(&[], &["sh", "-c", script]));
        assert_eq!(output.status.code(), Some(code), "{script}: {output:?}");
        assert!(scene.is_empty(), "{script}");
    }
    let missing = output(scene.run(&[], &["no-such-program-anywhere"]));
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    let not_executable = output(scene.run(&[], &["/etc/passwd"]));
    assert_eq!(not_executable.status.code(), Some(126), "{not_executable:?}");
    assert!(scene.is_empty());
}

#[test]
fn the_program_finds_its_environment_and_its_own_options() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("environment");
    let script = "echo \"$1 $TIERMGR_CLASS $TIERMGR_MIN_SIZE\"; test -S \"$TIERMGR_SOCKET\" && \
                  case $LD_PRELOAD in */libtiermgr_preload.so:/x.so) echo both;; esac";
    let mut run = scene
        .run(&["--class", "bulk", "--min-size", "1MiB"], &["sh", "-c", script, "sh", "--dram"]);
    // The linker complains about it and goes on.
    run.env("LD_PRELOAD", "/x.so");
    let output = output(run);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "--dram bulk 1048576\nboth\n",
        "{output:?}"
    );
}

#[test]
fn a_report_says_what_happened_and_the_summary_is_short() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("report");
    let file = scene.dir.join("report.json");
    let output = output(scene.run(&["--report", file.to_str().unwrap()], &["sh", "-c", "exit 3"]));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["exit_status"], 3);
    assert_eq!(report["command"][2], "exit 3");
    assert_eq!(report["private_daemon"], true);
    assert_eq!(report["dram_limit_bytes"], 64 << 20);
    assert!(report["daemon_peak_rss_bytes"].as_u64().unwrap() > 0);
    assert!(report["totals"]["faults"].is_u64());
    assert!(String::from_utf8_lossy(&output.stderr).lines().count() <= 12, "{output:?}");
}

#[test]
fn a_signal_reaches_the_program_and_nothing_stays() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("signal");
    let ready = scene.dir.join("ready");
    let script =
        format!("trap 'exit 9' TERM; touch {}; while :; do sleep 0.01; done", ready.display());
    let child = scene.run(&[], &["sh", "-c", &script]).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !ready.exists() {
        assert!(Instant::now() < deadline, "the program does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    fs::remove_file(ready).unwrap();
    assert!(scene.is_empty());
}

#[test]
fn what_cannot_work_is_said_before_the_program_starts() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("refused");
    let started = scene.dir.join("started");
    let command = ["touch", started.to_str().unwrap()];
    let mut no_library = scene.run(&[], &command);
    no_library.env("TIERMGR_PRELOAD", "/nonexistent.so");
    let mut no_daemon = scene.run(&[], &command);
    no_daemon.env("TIERMGR_DAEMON", "/nonexistent");
    let mut contradiction = scene.run(&[], &command);
    contradiction.env("TIERMGR_SOCKET", "/nonexistent.sock");
    let missing_feature = scene.run(&["--assume-missing", "io_uring"], &command);
    for (run, word) in [
        (no_library, "TIERMGR_PRELOAD"),
        (no_daemon, "TIERMGR_DAEMON"),
        (contradiction, "--socket"),
        (missing_feature, "io_uring"),
    ] {
        let output = output(run);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(word) && said.lines().count() == 1, "{word}: {said}");
        assert!(scene.is_empty(), "{word}");
    }
}

/// Twice the limit, written and read back by a program that knows nothing of tiermgr.
#[test]
fn memory_beyond_the_limit_keeps_its_content() {
    if !can_run() {
        return;
    }
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: needs python3");
        assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "needs python3");
        return;
    }
    let scene = Scene::new("content");
    let file = scene.dir.join("report.json");
    let script = "\
b = bytearray(128 << 20)
for i in range(0, len(b), 4096): b[i] = (i >> 12) % 251
assert all(b[i] == (i >> 12) % 251 for i in range(0, len(b), 4096))
print('whole')";
    let output =
        output(scene.run(&["--report", file.to_str().unwrap()], &["python3", "-c", script]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "whole\n", "{output:?}");
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let pages = |name: &str| report["totals"][name].as_u64().unwrap();
    // At least what does not fit must have left, and come back.
    let least = (64 << 20) / tiermgr_sys::process::page_size();
    assert!(pages("parked_pages") >= least, "{report}");
    assert!(pages("recalled_pages") + pages("prefetched_pages") >= least, "{report}");
    assert_eq!(pages("poisoned_pages"), 0);
    assert_eq!(pages("store_errors"), 0);
}

/// Waits until a script has written a line into `path`.
fn line_of(path: &Path) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
            _ => assert!(Instant::now() < deadline, "nobody writes {}", path.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Once `tail` gives the first byte it has all, in small blocks, and waits until it is read.
#[test]
fn what_only_leaves_out_is_named_as_the_cause() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("left-out");
    let (rules, file) = (scene.dir.join("rules"), scene.dir.join("report.json"));
    let options = ["--only", rules.to_str().unwrap(), "--report", file.to_str().unwrap()];
    let attaching = "dd if=/dev/zero of=/dev/null bs=1M count=1 2>&1;";
    let large = "head -c 200M /dev/zero | tail -c 200M | { head -c 1; sleep 2; cat; } > /dev/null";
    for (text, first, words) in [
        ("tail off\ndd\n", attaching, ["more than --dram", "tail (pid", "says `off`"]),
        ("dd\n", attaching, ["more than --dram", "tail (pid", "no rule of --only is about it"]),
        ("tail off\ndd\n", "", ["no program attached", "tail (pid", "says `off`"]),
        // Large blocks of it would be managed: it may be that, too.
        ("dd\ntail no-small\n", attaching, ["more than --dram", "small blocks", "--only"]),
    ] {
        fs::write(&rules, text).unwrap();
        let output = output(scene.run(&options, &["sh", "-c", &format!("{first} {large}")]));
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let warning = report["warnings"][0].as_str().unwrap_or_default();
        assert!(words.iter().all(|word| warning.contains(word)), "{text}: {report}");
    }
}

/// The shell ends; `dd`, which is managed, waits for a reader that sleeps.
#[test]
fn what_lives_on_is_told_and_its_peak_counts() {
    if !can_run() {
        return;
    }
    let scene = Scene::new("living-on");
    let (pid, said) = (scene.dir.join("pid"), scene.dir.join("said"));
    let file = scene.dir.join("report.json");
    let script = format!(
        "dd if=/dev/zero bs=40M count=1 2> /dev/null | {{ head -c 1 > /dev/null; \
         exec sh -c 'echo $$ > {0}; exec sleep 600 > /dev/null 2>&1'; }} &
         until test -s {0}; do sleep 0.01; done; kill -TERM $$",
        pid.display()
    );
    let options = ["--report", file.to_str().unwrap()];
    let mut run = scene.run(&options, &["sh", "-c", &script]);
    // What lives on has what it inherits open.
    run.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
    let output = output(run);
    let sleeper: i32 = line_of(&pid).parse().unwrap();
    kill(Pid::from_raw(sleeper), Signal::SIGKILL).unwrap();
    assert_eq!(output.status.code(), Some(128 + 15), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let living = report["surviving_processes"].as_array().unwrap();
    assert!(living.len() == 1 && living[0]["name"] == "dd", "{report}");
    assert!(report["largest_process_peak_rss_bytes"].as_u64().unwrap() > 40 << 20, "{report}");
    let warning = report["warnings"][0].as_str().unwrap();
    assert!(warning.contains("dd (pid") && warning.contains("on"), "{warning}");
    assert!(fs::read_to_string(&said).unwrap().contains(warning));
}

#[test]
fn who_asks_where_no_daemon_is_hears_of_private_ones() {
    if !can_run() || Path::new(tiermgr_wire::DEFAULT_SOCKET).exists() {
        return;
    }
    let scene = Scene::new("private");
    let (socket, stop) = (scene.dir.join("socket"), scene.dir.join("stop"));
    let script = format!(
        "echo $TIERMGR_SOCKET > {}; until test -e {}; do sleep 0.01; done",
        socket.display(),
        stop.display()
    );
    let status = || {
        let mut ctl = Command::new(env!("CARGO_BIN_EXE_tiermgrctl"));
        let output = ctl.arg("status").env_remove("TIERMGR_SOCKET").output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let child = scene.run(&[], &["sh", "-c", &script]).spawn().unwrap();
    let socket = line_of(&socket);
    let while_it_runs = status();
    fs::write(stop, "").unwrap();
    assert!(finish(child).status.success());
    // Private daemons of others may stand before it.
    assert!(
        while_it_runs.contains("--socket ") && while_it_runs.contains(&socket),
        "{while_it_runs}"
    );
    assert!(!status().contains(&socket));
}

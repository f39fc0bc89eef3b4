//! `tiermgrd` as a process: command line, start and end, hostile packets, and its keeper.
//!
//! Every wait has a limit, and every daemon is killed with the test that started it.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot do its preparations has failed"
)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tiermgr_sys::sock::Stream;
use tiermgr_wire::control::{ControlReply, ControlRequest, Status};
use tiermgr_wire::hello::{Class, Hello, Role};
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::request::ToDaemon;

const PATIENCE: Duration = Duration::from_secs(20);

fn tiermgrd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tiermgrd"));
    command.stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
    command
}

fn output(args: &[&str]) -> Output {
    tiermgrd().args(args).output().expect("tiermgrd starts")
}

/// Says why a test cannot run here. Under `TIERMGR_CI_STRICT` that is a failure.
fn can_serve() -> bool {
    let reason = if !nix::unistd::geteuid().is_root() {
        "needs root"
    } else if !Path::new("/dev/userfaultfd").exists() {
        "needs /dev/userfaultfd"
    } else {
        return true;
    };
    eprintln!("skipped: {reason}");
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped: {reason}");
    false
}

struct Daemon {
    keeper: Child,
    dir: PathBuf,
}

impl Daemon {
    fn start(name: &str) -> Self {
        Self::start_with(name, "error", Stdio::inherit())
    }

    fn start_with(name: &str, log_level: &str, log: Stdio) -> Self {
        let parent = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let dir = parent.join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut keeper = tiermgrd()
            .args(["--embedded", "--dram", "64MiB", "--ready-fd", "1", "--log-level", log_level])
            .arg("--socket")
            .arg(dir.join("run/sock"))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .arg("--store")
            .arg(format!("{}:64MiB", dir.join("store").display()))
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { keeper, dir }
    }

    fn keeper_pid(&self) -> Pid {
        Pid::from_raw(self.keeper.id().cast_signed())
    }

    fn connect(&self) -> Stream {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Stream::connect_within(&self.dir.join("run/sock"), PATIENCE) {
                Ok(stream) => {
                    stream.set_recv_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                // While it is being restarted.
                Err(error) => assert!(Instant::now() < deadline, "connecting: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn control(&self) -> Stream {
        let stream = self.connect();
        send(
            &stream,
            &ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role: Role::Control }),
        );
        assert_eq!(receive(&stream), Some(FromDaemon::Ready));
        stream
    }

    fn status(&self) -> Status {
        match ask(&self.control(), ControlRequest::Status) {
            FromDaemon::Control(ControlReply::Status(status)) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Kills the serving process, and gives the status of the one that the keeper makes.
    fn kill_and_wait_for_the_next(&self, before: &Status) -> Status {
        let killed = Instant::now();
        kill(Pid::from_raw(before.daemon_pid), Signal::SIGKILL).unwrap();
        loop {
            // The old listener may take a last connection that nobody answers.
            let stream = self.connect();
            let hello = Hello { version: tiermgr_wire::VERSION, role: Role::Control };
            let mut buffer = [0; 64];
            let packet = tiermgr_wire::encode(&ToDaemon::Hello(hello), &mut buffer).unwrap();
            if stream.send_with_fds(packet, &[]).is_ok()
                && stream.recv_with_fds(&mut [0; 64]).is_ok_and(|(len, _)| len > 0)
            {
                return self.status();
            }
            assert!(killed.elapsed() < PATIENCE);
        }
    }

    fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.keeper.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the daemon does not end");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A test that failed leaves a keeper that would start its daemon again: the keeper first.
        if let Ok(None) = self.keeper.try_wait() {
            let children = tiermgr_sys::pidfd::children_of(self.keeper_pid().as_raw());
            self.keeper.kill().unwrap();
            self.keeper.wait().unwrap();
            for child in children.unwrap_or_default() {
                drop(tiermgr_sys::pidfd::open(child).and_then(|fd| {
                    use std::os::fd::AsFd;
                    tiermgr_sys::pidfd::send_signal(fd.as_fd(), Signal::SIGKILL as i32)
                }));
            }
        }
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

fn send(stream: &Stream, message: &ToDaemon) {
    let mut buffer = vec![0; tiermgr_wire::PACKET_BYTES_MAX];
    let packet = tiermgr_wire::encode(message, &mut buffer).unwrap();
    stream.send_with_fds(packet, &[]).unwrap();
}

/// `None`: the daemon closed the connection.
fn receive(stream: &Stream) -> Option<FromDaemon> {
    let mut buffer = vec![0; tiermgr_wire::PACKET_BYTES_MAX];
    let (len, _) = stream.recv_with_fds(&mut buffer).unwrap();
    (len > 0).then(|| tiermgr_wire::decode(&buffer[..len]).unwrap())
}

fn ask(stream: &Stream, request: ControlRequest) -> FromDaemon {
    send(stream, &ToDaemon::Control(request));
    receive(stream).expect("an answer")
}

#[test]
fn print_config_is_the_shipped_example() {
    let printed = output(&["--print-config"]);
    assert!(printed.status.success());
    let shipped = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/dist/tiermgrd.toml")).unwrap();
    assert_eq!(String::from_utf8_lossy(&printed.stdout), String::from_utf8_lossy(&shipped));
}

#[test]
fn check_config_tells_what_is_wrong_and_ends_with_2() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("check-config");
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("x.toml");
    let name = file.to_str().unwrap();
    fs::write(&file, "dram = \"2GiB\"\n").unwrap();
    let checked = output(&["--check-config", name]);
    assert!(checked.status.success());
    assert!(String::from_utf8_lossy(&checked.stdout).contains("dram = \"2GiB\""));
    fs::write(&file, "drum = \"2GiB\"\n").unwrap();
    let checked = output(&["--check-config", name]);
    assert_eq!(checked.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&checked.stderr).contains("drum"), "{checked:?}");
    let checked = output(&["--check-config", "/nonexistent/x.toml"]);
    assert_eq!(checked.status.code(), Some(2));
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_store_in_memory_is_refused_and_the_maker_is_told() {
    if !can_serve() {
        return;
    }
    let is_tmpfs = nix::sys::statfs::statfs("/dev/shm")
        .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC);
    if !is_tmpfs {
        eprintln!("skipped: /dev/shm is not a tmpfs");
        return;
    }
    let dir = PathBuf::from(format!("/dev/shm/tiermgrd-test-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    let refused = tiermgrd()
        .args(["--embedded", "--dram", "64MiB", "--ready-fd", "1"])
        .args(["--socket", dir.join("run/sock").to_str().unwrap()])
        .args(["--state-dir", dir.join("state").to_str().unwrap()])
        .args(["--store", &format!("{}:64MiB", dir.join("store").display())])
        .output()
        .unwrap();
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let told = String::from_utf8_lossy(&refused.stdout);
    assert!(told.contains("tmpfs") && told.ends_with('\n') && told.lines().count() == 1, "{told}");
}

/// What comes of a wait for a message is then that it was interrupted, also without a handler.
#[test]
fn a_handshake_goes_on_where_the_daemon_was_stopped() {
    if !can_serve() {
        return;
    }
    let mut daemon = Daemon::start("stopped");
    let begun = daemon.connect();
    let pid = daemon.status().daemon_pid;
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ") {
        assert!(Instant::now() < deadline, "it is not stopped");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    // Others are served, so that it goes on.
    assert_eq!(daemon.status().daemon_pid, pid);
    let hello = Hello { version: tiermgr_wire::VERSION, role: Role::Control };
    send(&begun, &ToDaemon::Hello(hello));
    assert_eq!(receive(&begun), Some(FromDaemon::Ready));
    drop(begun);
    kill(daemon.keeper_pid(), Signal::SIGTERM).unwrap();
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_second_daemon_leaves_the_first_alone() {
    if !can_serve() {
        return;
    }
    let daemon = Daemon::start("second");
    let before = daemon.status();
    let same = |name: &str| daemon.dir.join(name).to_str().unwrap().to_owned();
    let store = format!("{}:64MiB", same("other-store"));
    for (state, socket) in [("state", "run/other-sock"), ("other-state", "run/sock")] {
        let second = tiermgrd()
            .args(["--embedded", "--dram", "64MiB", "--store", &store])
            .args(["--socket", &same(socket), "--state-dir", &same(state)])
            .output()
            .unwrap();
        assert_eq!(second.status.code(), Some(3), "{second:?}");
        assert!(String::from_utf8_lossy(&second.stderr).contains("another tiermgrd"), "{second:?}");
    }
    assert_eq!(daemon.status().daemon_pid, before.daemon_pid);
    assert!(daemon.dir.join("state/store").exists());
    assert!(!daemon.dir.join("other-store").exists() && !daemon.dir.join("other-state").exists());
}

#[test]
fn sigterm_ends_an_idle_daemon_and_nothing_is_left() {
    if !can_serve() {
        return;
    }
    let mut daemon = Daemon::start("sigterm");
    assert_eq!(daemon.status().families, 0);
    kill(daemon.keeper_pid(), Signal::SIGTERM).unwrap();
    assert_eq!(daemon.wait(), Some(0));
    let left: Vec<_> = fs::read_dir(&daemon.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_shutdown_request_is_answered_before_the_end() {
    if !can_serve() {
        return;
    }
    let mut daemon = Daemon::start("shutdown");
    let answer = ask(&daemon.control(), ControlRequest::Shutdown);
    assert_eq!(answer, FromDaemon::Control(ControlReply::Done));
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_killed_daemon_is_back_within_a_second() {
    if !can_serve() {
        return;
    }
    let daemon = Daemon::start("restart");
    for round in 1..=3 {
        let before = daemon.status();
        assert_eq!(before.keeper_pid, daemon.keeper_pid().as_raw());
        let killed = Instant::now();
        let after = daemon.kill_and_wait_for_the_next(&before);
        assert_ne!(after.daemon_pid, before.daemon_pid);
        assert_eq!(after.restarts, round);
        // The first new attempt comes at once; later ones pause, since the deaths come in a row.
        if round == 1 {
            assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
        }
    }
}

#[test]
fn a_private_daemon_ends_with_its_maker() {
    if !can_serve() {
        return;
    }
    let dir =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("maker-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let script = format!(
        "'{}' --embedded --dram 64MiB --socket '{d}/run/sock' --state-dir '{d}/state' \
         --store '{d}/store:64MiB' --ready-fd 1 2>/dev/null | head -n 1 & wait; :",
        env!("CARGO_BIN_EXE_tiermgrd"),
        d = dir.display()
    );
    // The shell waits for `head` only in so far as the daemon, which goes on, is in its background.
    let mut shell = Command::new("sh").arg("-c").arg(script).spawn().unwrap();
    let socket = dir.join("run/sock");
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        assert!(Instant::now() < deadline, "the daemon does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    shell.kill().unwrap();
    shell.wait().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while socket.exists() || dir.join("store").exists() || dir.join("state").exists() {
        assert!(Instant::now() < deadline, "the daemon outlives its maker");
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn hostile_packets_harm_nobody_else() {
    if !can_serve() {
        return;
    }
    let daemon = Daemon::start("hostile");
    let witness = daemon.control();
    // xorshift: the same packets in every run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let hello = |role| ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role });
    for round in 0..200_u32 {
        let stream = daemon.connect();
        if round % 3 == 0 {
            send(&stream, &hello(Role::Client { name: "x".repeat(3000), class: Class::Bulk }));
            assert!(matches!(receive(&stream), Some(FromDaemon::Welcome(_))), "round {round}");
        }
        let len = usize::try_from(next() % 64).unwrap() + 1;
        let packet: Vec<u8> = (0..len).map(|_| next().to_le_bytes()[3]).collect();
        // Whatever comes back, or nothing because the connection was closed already.
        drop(stream.send_with_fds(&packet, &[]));
        drop(stream.recv_with_fds(&mut [0; 8192]));
    }
    // Too long for a request, and descriptors that belong nowhere.
    let stream = daemon.connect();
    stream.send_with_fds(&[0; 5000], &[]).unwrap();
    assert!(matches!(receive(&stream), Some(FromDaemon::Error { code: ErrorCode::Protocol, .. })));
    assert_eq!(receive(&stream), None);
    let stream = daemon.connect();
    use std::os::fd::AsFd;
    stream.send_with_fds(&[1], &[stream.as_fd(); 8]).unwrap();
    assert!(matches!(receive(&stream), Some(FromDaemon::Error { .. })));
    // A family that does not exist.
    let stream = daemon.connect();
    send(&stream, &hello(Role::ForkedChild { family: 1, lacks_arena: true }));
    let code = match receive(&stream) {
        Some(FromDaemon::Error { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code, ErrorCode::NotPermitted);
    // The witness was not disturbed, and no serving process died of it.
    match ask(&witness, ControlRequest::Status) {
        FromDaemon::Control(ControlReply::Status(status)) => {
            assert_eq!((status.families, status.restarts), (0, 0));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() {
    if !can_serve() {
        return;
    }
    let (_unread, log) = std::io::pipe().unwrap();
    let daemon = Daemon::start_with("unread-log", "debug", log.into());
    // Each refusal is a line; a pipe holds 64 KiB.
    for _ in 0..2000 {
        let stream = daemon.connect();
        stream.send_with_fds(&[0xff; 8], &[]).unwrap();
        assert!(matches!(receive(&stream), Some(FromDaemon::Error { .. })));
    }
    // The keeper has something to say, too.
    let before = daemon.status();
    assert_eq!(daemon.kill_and_wait_for_the_next(&before).restarts, 1);
}

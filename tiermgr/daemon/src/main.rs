//! `tiermgrd`: reads its settings, becomes keeper and serving process, and serves.

#![forbid(unsafe_code)]

use clap::Parser;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use tiermgr_daemon::cli::Cli;
use tiermgr_daemon::config::Config;
use tiermgr_daemon::daemon::{self, Identity, Watched};
use tiermgr_daemon::keeper::{self, Call, Outcome};
use tiermgr_daemon::notify::Maker;
use tiermgr_daemon::start::StartError;
use tiermgr_daemon::{exit, log, manual, notify, start};
use tiermgr_engine::store::{self, Fit};
use tiermgr_sys::{disk, pidfd, process};
use tiermgr_wire::chain;
use tiermgr_wire::size::{PathAndSize, Size};

/// How long the end waits for a reader of the log.
const LAST_WORDS: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = Cli::parse();
    ExitCode::from(run(&cli))
}

fn run(cli: &Cli) -> u8 {
    if cli.print_config {
        return print(&Config::default().render());
    }
    if let Some(page) = cli.print_man {
        return match manual::page(page) {
            Ok(text) => print(&text),
            Err(error) => complain(&format!("making the manual page: {error}"), exit::START),
        };
    }
    if let Some(path) = &cli.check_config {
        return check_config(path);
    }
    if let Some(store) = &cli.check_store {
        return check_store(store);
    }
    let config = match cli.settings() {
        Ok(config) => config,
        Err(error) => {
            let text = chain(&error);
            // Who was told shows it to whoever is there to read.
            return if tell(maker(cli).unwrap_or(None), &text) {
                exit::USAGE
            } else {
                complain(&text, exit::USAGE)
            };
        }
    };
    if let Some(error) = shed_preloads() {
        return complain(&format!("starting again without LD_PRELOAD: {error}"), exit::START);
    }
    log::begin(config.log_level);
    let leavings = Leavings::expected(cli, &config);
    if let Err(error) = process::set_name("tiermgrd-keeper") {
        tracing::debug!(%error, "naming the keeper");
    }
    let serve = |call| {
        let code = serve(cli, &config, call);
        log::flush(LAST_WORDS);
        code
    };
    match keeper::run(serve) {
        Ok(Outcome::Served(code)) => code,
        Ok(Outcome::Kept(code)) => {
            leavings.remove(code);
            code
        }
        Err(error) => complain(&format!("making the serving process: {error}"), exit::START),
    }
}

/// The life of one serving process.
fn serve(cli: &Cli, config: &Config, call: Call) -> u8 {
    if let Err(error) = process::set_name("tiermgrd") {
        tracing::debug!(%error, "naming the serving process");
    }
    if let Err(error) = log::begin_thread() {
        tracing::warn!(%error, "starting the thread of the log");
    }
    // Only the first serving process is waited for.
    let maker = match if call.restarts == 0 { maker(cli) } else { Ok(None) } {
        Ok(maker) => maker,
        Err(error) => {
            let text =
                start::explain(&StartError::Kernel("opening the descriptor of --ready-fd", error));
            return complain(&text, exit::START);
        }
    };
    let identity = Identity {
        keeper_pid: call.keeper_pid,
        restarts: call.restarts,
        uid: nix::unistd::geteuid().as_raw(),
        embedded: cli.embedded,
    };
    let signals = match signal_fd() {
        Ok(signals) => signals,
        Err(error) => return complain(&format!("making a signalfd: {error}"), exit::START),
    };
    let watched = Watched {
        keeper: watch(call.keeper_pid),
        maker: if cli.embedded { call.maker_pid.and_then(watch) } else { None },
    };
    let (daemon, listener) = match start::start(config, identity) {
        Ok(started) => started,
        Err(error) => {
            let text = start::explain(&error);
            if !tell(maker, &text) {
                tracing::error!("cannot start: {text}");
            }
            return match error {
                StartError::Config(_) => exit::USAGE,
                _ => exit::START,
            };
        }
    };
    tell(maker, "ready");
    tell_service_manager("READY=1");
    let result = daemon::serve(&daemon, &listener, &signals, watched);
    tell_service_manager("STOPPING=1");
    match result {
        Ok(()) => exit::OK,
        Err(error) => {
            tracing::error!(%error, "waiting for connections");
            exit::DIED
        }
    }
}

fn signal_fd() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

fn watch(pid: i32) -> Option<std::os::fd::OwnedFd> {
    pidfd::open(pid).map_err(|error| tracing::warn!(pid, %error, "watching a process")).ok()
}

/// A preloaded allocator would have the daemon wait for itself. The linker has read the variable by
/// now, so the only way out is to start over.
fn shed_preloads() -> Option<io::Error> {
    let is_set = std::env::var_os("LD_PRELOAD").is_some_and(|value| value != OsStr::new(""));
    is_set.then(|| {
        Command::new("/proc/self/exe")
            .args(std::env::args_os().skip(1))
            .env_remove("LD_PRELOAD")
            .exec()
    })
}

fn maker(cli: &Cli) -> io::Result<Option<Maker>> {
    cli.ready_fd.map(Maker::open).transpose()
}

/// Whether there is somebody, who knows now.
fn tell(maker: Option<Maker>, line: &str) -> bool {
    let Some(maker) = maker else { return false };
    let told = maker.tell(line);
    if let Err(error) = &told {
        tracing::warn!(%error, "writing to the descriptor of --ready-fd");
    }
    told.is_ok()
}

fn check_config(path: &Path) -> u8 {
    let checked = Config::load(Some(path)).and_then(|config| Ok((config.check_machine()?, config)));
    match checked {
        Ok((warnings, config)) => {
            for warning in warnings {
                complain(&format!("warning: {warning}"), exit::OK);
            }
            print(&config.render())
        }
        Err(error) => complain(&chain(&error), exit::USAGE),
    }
}

fn check_store(store: &PathAndSize) -> u8 {
    let path = store.path.display();
    match store::check(&store.path, store.size.map(|size| size.0), true) {
        Ok(Fit::Absent) => print(&format!("{path} can be made\n")),
        Ok(Fit::Blank { bytes }) => {
            print(&format!("{path} is blank and has {}\n", Size(bytes).rounded()))
        }
        Ok(Fit::Store { bytes }) => {
            print(&format!("{path} is a store of {}\n", Size(bytes).rounded()))
        }
        Err(error) => complain(&chain(&error), exit::START),
    }
}

fn tell_service_manager(state: &str) {
    if let Err(error) = notify::service_manager(state) {
        tracing::warn!(%error, "telling the service manager");
    }
}

/// What is to be removed at the end. A daemon that did not come as far as to serve removes only what was
/// not there before it: another daemon may be using the rest.
struct Leavings<'a> {
    config: &'a Config,
    embedded: bool,
    folders: &'a [PathBuf],
    state_is_new: bool,
    store_is_new: bool,
}

impl<'a> Leavings<'a> {
    fn expected(cli: &'a Cli, config: &'a Config) -> Self {
        Self {
            config,
            embedded: cli.embedded,
            folders: &cli.remove_dir,
            state_is_new: !config.state_dir.exists(),
            store_is_new: !config.store.path.exists(),
        }
    }

    fn remove(&self, code: u8) {
        let served = code == exit::OK;
        if served {
            remove(&self.config.socket, |path| std::fs::remove_file(path));
        }
        if !self.embedded {
            return;
        }
        if served || self.state_is_new {
            remove(&self.config.state_dir, |path| std::fs::remove_dir_all(path));
        }
        if self.store_is_new {
            remove(&self.config.store.path, disk::remove_with_blocks);
        }
        if served {
            let folders = self.folders.iter().map(PathBuf::as_path);
            for folder in folders.chain(self.config.socket.parent()) {
                // They are the maker's, and go with us unless there is something else in them.
                drop(std::fs::remove_dir(folder));
            }
        }
    }
}

fn remove(path: &Path, how: impl FnOnce(&Path) -> io::Result<()>) {
    // A read-only file system refuses also what is not there.
    if path.symlink_metadata().is_ok()
        && let Err(error) = how(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "removing");
    }
}

fn print(text: &str) -> u8 {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => exit::OK,
        Err(error) => complain(&format!("writing to stdout: {error}"), exit::START),
    }
}

fn complain(text: &str, code: u8) -> u8 {
    // With stderr closed there is nobody left to tell.
    drop(writeln!(io::stderr(), "tiermgrd: {text}"));
    code
}

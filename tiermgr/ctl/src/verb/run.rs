//! `tiermgrctl run`: the main job on one line.
//!
//! The signals that end programs are blocked here and read from a descriptor, so that nothing can end
//! this process between starting a private daemon and removing what it leaves. CMD gets the mask that
//! we were given.

mod child;
pub(crate) mod find;
pub(crate) mod place;
mod private;
mod program;
mod progress;
mod report;
mod rules;
mod strays;
mod survivors;

use crate::cli::RunArgs;
use crate::complain;
use crate::connect::{ConnectError, Link, how_to_start};
use child::{Nothing, Signals};
use nix::errno::Errno;
use nix::unistd::Pid;
use private::Private;
pub(crate) use private::{named_store, text_of};
use report::{Report, ReportFile, Seen};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
#[cfg(test)]
pub(crate) use strays::MATTERS_BYTES;
use strays::Strays;
use tiermgr_wire::control::Status;
use tiermgr_wire::rules::RuleError;
use tiermgr_wire::size::Size;
use tiermgr_wire::{BLOCK_BYTES_MIN, DEFAULT_SOCKET, chain};

/// `tiermgrctl` itself failed, as `env` and `timeout` have it.
pub(crate) const EXIT_OURS: u8 = 125;

/// How long a daemon that was killed takes to be back, with room to spare.
const RESTART_WAIT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Why CMD was not run, or could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The daemon or the library is missing.
    #[error("{}: {}", .0.what(), .0.fix())]
    NotFound(#[from] find::NotFound),
    /// There is nowhere to park.
    #[error(transparent)]
    NoPlace(#[from] place::NoPlace),
    /// The library's path cannot be told to the dynamic linker.
    #[error(
        "the path {} has a blank or a colon, which LD_PRELOAD cannot hold; install tiermgr elsewhere, \
         or set TIERMGR_PRELOAD",
        .0.display()
    )]
    PreloadPath(PathBuf),
    /// The private daemon cannot be started.
    #[error("starting the private daemon {}", path.display())]
    Daemon {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The private daemon says why it does not start.
    #[error("the private daemon does not start: {0}{hint}", hint = hint(.0))]
    DaemonRefuses(String),
    /// A private daemon needs root.
    #[error(
        "a private daemon needs root (userfaultfd and fork events): use sudo; or leave out --dram and \
         --nvme and use the system's daemon (where there is none, {})",
        how_to_start()
    )]
    NotRoot,
    /// The limit is too small to work with.
    #[error(
        "DRAM of {given} is too little: the private daemon itself takes some 20 MiB; give at least \
         {least} with --dram"
    )]
    TooLittleDram {
        /// What it is.
        given: Size,
        /// What would do.
        least: Size,
    },
    /// The disk has no room for a store whose size nobody has said.
    #[error(
        "only {} are free on the disk of {}, and a store takes half of that: free {least}, or name another \
         place with --nvme PATH:SIZE",
        given.rounded(),
        path.display()
    )]
    TooLittleDisk {
        /// Where.
        path: PathBuf,
        /// What is free.
        given: Size,
        /// What would do.
        least: Size,
    },
    /// The store that was named is too small to work with.
    #[error("--nvme {}:{given}: a store needs at least {least}", path.display())]
    TooLittleStore {
        /// Where.
        path: PathBuf,
        /// What was named.
        given: Size,
        /// What would do.
        least: Size,
    },
    /// Smaller allocations would be left to libc without a word.
    #[error(
        "--min-size {given} is too little: {least} is the least that can be managed; for less see --small"
    )]
    TooLittleBlocks {
        /// What was asked for.
        given: Size,
        /// What would do.
        least: Size,
    },
    /// All programs would run without tiermgr.
    #[error(
        "TIERMGR_DISABLE is set, and so no program is managed: unset it; without --require it runs without a \
         limit"
    )]
    Disabled,
    /// The program would run without tiermgr.
    #[error("{0}; without --require it runs without a limit")]
    Unmanageable(program::Obstacle),
    /// The file of --only cannot be read.
    #[error("reading the rules {}", path.display())]
    Rules {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file of --only is wrong.
    #[error("{}", path.display())]
    Rule {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: RuleError,
    },
    /// The file of --report.
    #[error("opening the report {}", path.display())]
    Report {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Folder for socket and state.
    #[error("making a folder in {}", path.display())]
    Folder {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A daemon was named and cannot be used.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// --dram or --nvme with somebody else's daemon.
    #[error(
        "--dram and --nvme are for a private daemon, and --socket (or TIERMGR_SOCKET) names another; \
         leave one out"
    )]
    Contradiction,
    /// Signals or processes.
    #[error("{0}")]
    System(&'static str, #[source] io::Error),
    /// Somebody ended us before CMD was started.
    #[error("ended by signal {0} before the program was started")]
    Interrupted(i32),
}

/// What a daemon says by itself need not be said twice.
fn hint(reason: &str) -> &'static str {
    if reason.contains("doctor") { "" } else { " (see `tiermgrctl doctor`)" }
}

/// Which daemon serves the run.
enum Host {
    Private(Private),
    /// Its counters before the run.
    System {
        socket: PathBuf,
        before: Box<Status>,
    },
}

impl Host {
    fn socket(&self) -> &Path {
        match self {
            Self::Private(private) => private.socket(),
            Self::System { socket, .. } => socket,
        }
    }

    fn may_come_back(&self) -> bool {
        match self {
            Self::Private(private) => private.is_watched(),
            Self::System { socket, .. } => socket.exists(),
        }
    }

    fn wait_for(&mut self, pid: Pid, signals: &Signals, strays: &mut Strays) -> io::Result<u8> {
        match self {
            Self::Private(private) => signals.wait_for(pid, private, strays),
            // Its service manager, or its keeper, sees to it.
            Self::System { .. } => signals.wait_for(pid, &mut Nothing, strays),
        }
    }
}

/// Runs CMD. The exit status is for `tiermgrctl`.
pub(crate) fn run(socket: Option<&Path>, args: &RunArgs) -> u8 {
    match try_run(socket, args) {
        Ok(code) => code,
        Err(RunError::Interrupted(signal)) => child::code_of_signal(signal),
        Err(error) => {
            complain(&chain(&error));
            EXIT_OURS
        }
    }
}

fn try_run(socket: Option<&Path>, args: &RunArgs) -> Result<u8, RunError> {
    let preload = find::preload()?;
    if preload.as_os_str().as_encoded_bytes().iter().any(|b| b" :\t\n".contains(b)) {
        return Err(RunError::PreloadPath(preload));
    }
    let signals = Signals::block().map_err(|error| RunError::System("blocking signals", error))?;
    let least = Size(BLOCK_BYTES_MIN);
    if let Some(given) = args.min_size.filter(|given| given.0 < least.0) {
        return Err(RunError::TooLittleBlocks { given, least });
    }
    let rules = args.only.as_deref().map(rules::checked).transpose()?;
    let obstacle = args.command.first().and_then(|name| program::obstacle(name));
    if let Some(obstacle) = &obstacle {
        if args.require {
            return Err(RunError::Unmanageable(obstacle.clone()));
        }
        complain(&format!("warning: {obstacle}; it runs without a limit"));
    }
    if std::env::var_os("TIERMGR_DISABLE").is_some_and(|value| !value.is_empty() && value != "0") {
        if args.require {
            return Err(RunError::Disabled);
        }
        complain("warning: TIERMGR_DISABLE is set, and so no program is managed");
    }
    let preloads = obstacle.is_none_or(|obstacle| !obstacle.forbids_preload());
    let file = args.report.as_deref().map(ReportFile::open).transpose()?;
    let mut host = choose_host(socket, args, &signals)?;
    let in_force = rules::InForce::of(args, rules.as_deref());
    let mut environment = environment(args, host.socket(), rules);
    if preloads {
        environment.extend(preloading(&preload));
    }
    let mut strays = Strays::new(&preload, in_force);
    let began = Instant::now();
    let outcome = match child::spawn(&args.command, &environment, &signals) {
        Ok(pid) => host
            .wait_for(pid, &signals, &mut strays)
            .map(|code| (code, finish(args, code, began.elapsed(), &host, strays)))
            .map_err(|error| RunError::System("waiting for the program", error)),
        Err(error) => {
            let name = args.command.first().map(|name| name.to_string_lossy()).unwrap_or_default();
            complain(&why_not_run(&name, error));
            Ok((child::code_of_failure(error), None))
        }
    };
    // The private daemon is ended whatever has happened, and before anybody is told.
    let socket = host.socket().to_owned();
    if let Host::Private(private) = host {
        private.end(&signals);
    }
    let (code, report) = outcome?;
    if let Some(mut report) = report {
        report.tell_of_survivors(socket.exists());
        report.publish(file);
    }
    Ok(code)
}

/// What happened in the run, from a daemon that is still there.
fn finish(args: &RunArgs, code: u8, wall: Duration, host: &Host, strays: Strays) -> Option<Report> {
    let before = match host {
        Host::Private(_) => None,
        Host::System { before, .. } => Some(before.as_ref()),
    };
    // It may be starting anew at this moment.
    let deadline = Instant::now() + RESTART_WAIT;
    let status = loop {
        match Link::open(Some(host.socket())).and_then(|link| link.status()) {
            Err(ConnectError::Absent { .. } | ConnectError::Broken(_))
                if host.may_come_back() && Instant::now() < deadline =>
            {
                std::thread::sleep(LOOK_EVERY);
            }
            asked => break asked,
        }
    };
    match status {
        Ok(status) => Some(Report::new(args, code, wall, &status, before, seen(host, strays))),
        Err(_) if matches!(host, Host::Private(_)) => {
            complain("no summary: the private daemon is no longer there");
            None
        }
        Err(error) => {
            complain(&format!("no summary: {}", chain(&error)));
            None
        }
    }
}

/// What was seen of the programs, and who of them lives on.
fn seen(host: &Host, strays: Strays) -> Seen {
    let served = match host {
        Host::Private(private) => survivors::served_by(private.socket()),
        // It serves others too, and does not know who belongs to this run.
        Host::System { .. } => Vec::new(),
    };
    Seen {
        survivors: survivors::among(&served, strays.processes()),
        left_out: strays.left_out().cloned(),
        unreached: strays.into_list(),
    }
}

fn choose_host(socket: Option<&Path>, args: &RunArgs, signals: &Signals) -> Result<Host, RunError> {
    let wants_private = args.dram.is_some() || args.nvme.is_some();
    let system = |path: &Path| -> Result<Host, ConnectError> {
        let before = Link::open(Some(path))?.status()?;
        Ok(Host::System { socket: path.to_owned(), before: Box::new(before) })
    };
    match socket {
        Some(_) if wants_private => Err(RunError::Contradiction),
        Some(path) => Ok(system(path)?),
        None => {
            if !wants_private {
                match system(Path::new(DEFAULT_SOCKET)) {
                    Ok(host) => return Ok(host),
                    // Without root there is no private daemon either: say how to get at this one.
                    Err(error @ ConnectError::Forbidden { .. }) => return Err(error.into()),
                    Err(_) => {}
                }
            }
            Private::start(args, signals).map(Host::Private)
        }
    }
}

/// What CMD finds in its environment beside what we found in ours.
fn environment(
    args: &RunArgs,
    socket: &Path,
    rules: Option<OsString>,
) -> Vec<(OsString, OsString)> {
    let mut environment: Vec<(OsString, OsString)> = vec![
        ("TIERMGR_SOCKET".into(), socket.into()),
        ("TIERMGR_CLASS".into(), args.class.name().into()),
    ];
    if let Some(rules) = rules {
        environment.push(("TIERMGR_RULES".into(), rules));
    }
    if let Some(size) = args.min_size {
        environment.push(("TIERMGR_MIN_SIZE".into(), size.0.to_string().into()));
    }
    if args.small {
        environment.push(("TIERMGR_SMALL".into(), "1".into()));
    }
    if args.mmap {
        environment.push(("TIERMGR_MMAP".into(), "1".into()));
    }
    if args.require {
        environment.push(("TIERMGR_REQUIRE".into(), "1".into()));
    }
    environment
}

/// What brings the library into CMD. It stands first: behind another allocator it would get no request.
fn preloading(preload: &Path) -> [(OsString, OsString); 2] {
    let joined = |first: &OsStr, name: &str| {
        let mut value = first.to_owned();
        if let Some(others) = std::env::var_os(name).filter(|others| !others.is_empty()) {
            value.push(":");
            value.push(others);
        }
        (OsString::from(name), value)
    };
    [
        joined(preload.as_os_str(), "LD_PRELOAD"),
        // AddressSanitizer ends programs in which it is not first; the library leaves them alone.
        joined(OsStr::new("verify_asan_link_order=0"), "ASAN_OPTIONS"),
    ]
}

fn why_not_run(name: &str, error: Errno) -> String {
    let text = format!("running {name}: {}", error.desc());
    if error == Errno::ENOENT && !name.contains('/') {
        return format!("{text} in PATH; a program of this folder is ./{name}");
    }
    text
}

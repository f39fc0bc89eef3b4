//! Programs of a run that tiermgr does not reach, seen while they run.
//!
//! They never connect, so nobody tells of them. CMD and what descends from it are looked at about once a second: a
//! process with as much memory as matters, into which the library was not loaded, is named in the summary. What
//! lives for less than that, or has left its parents (daemons), is not seen.

use super::rules::{InForce, LeftOut};
use nix::unistd::Pid;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tiermgr_sys::{pidfd, proc};

/// Less than the libraries and the interpreter of a large program take.
pub(crate) const MATTERS_BYTES: u64 = 16 << 20;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// More processes are not looked at.
const PROCESSES_MAX: usize = 4096;

/// Why a program was not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    /// It was started without `LD_PRELOAD`.
    PreloadCleared,
    /// It has `LD_PRELOAD`, and did not load the library.
    NotLoaded,
}

/// One program that was not reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Stray {
    /// Its process.
    pub(super) pid: i32,
    /// As `ps` shows it.
    pub(super) name: String,
    /// Most memory that it was seen with.
    pub(super) resident_bytes: u64,
    /// Why.
    pub(super) reason: Reason,
}

/// A process and the program that it runs: an exec makes another one of it.
type Key = (i32, u64, PathBuf);

/// What was seen so far.
#[derive(Debug)]
pub(super) struct Strays {
    preload: PathBuf,
    rules: Option<InForce>,
    reached: BTreeSet<Key>,
    /// Of those that were reached, whom the rules leave out.
    left_out: BTreeMap<Key, LeftOut>,
    found: BTreeMap<Key, Stray>,
    next_look: Instant,
    pause: Duration,
}

impl Strays {
    pub(super) fn new(preload: &Path, rules: Option<InForce>) -> Self {
        Self {
            preload: preload.to_owned(),
            rules,
            reached: BTreeSet::new(),
            left_out: BTreeMap::new(),
            found: BTreeMap::new(),
            next_look: Instant::now() + FIRST_PAUSE,
            pause: FIRST_PAUSE,
        }
    }

    /// Until the next look.
    pub(super) fn until_next(&self) -> Duration {
        self.next_look.saturating_duration_since(Instant::now())
    }

    /// Looks at `program` and what descends from it, if it is time to.
    pub(super) fn look(&mut self, program: Pid) {
        if Instant::now() < self.next_look {
            return;
        }
        let mut waiting = vec![program.as_raw()];
        let mut looked_at = 0;
        while let Some(pid) = waiting.pop() {
            self.look_at(pid);
            looked_at += 1;
            if looked_at + waiting.len() < PROCESSES_MAX {
                // One that has ended meanwhile has no children here.
                waiting.extend(pidfd::children_of(pid).unwrap_or_default());
            }
        }
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        self.next_look = Instant::now() + self.pause;
    }

    /// All that cannot be read is of a process that has ended.
    fn look_at(&mut self, pid: i32) -> Option<()> {
        let resident_bytes = proc::status_bytes(pid, "VmRSS").filter(|&n| n >= MATTERS_BYTES)?;
        let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        let key = (pid, pidfd::start_time(pid).ok()?, program);
        if let Some(known) = self.found.get_mut(&key) {
            known.resident_bytes = known.resident_bytes.max(resident_bytes);
            return None;
        }
        if self.reached.contains(&key) {
            let known = self.left_out.get_mut(&key)?;
            known.resident_bytes = known.resident_bytes.max(resident_bytes);
            return None;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned();
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let file = self.preload.to_string_lossy();
        if maps.lines().any(|line| line.ends_with(&*file)) {
            let rules = self.rules.as_ref();
            if let Some(left_out) = rules.and_then(|r| r.left_out(pid, &name, resident_bytes)) {
                self.left_out.insert(key.clone(), left_out);
            }
            self.reached.insert(key);
            return None;
        }
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let reason = reason_of(&environment, &file);
        self.found.insert(key, Stray { pid, name, resident_bytes, reason });
        Some(())
    }

    /// The largest program that the rules leave out.
    pub(super) fn left_out(&self) -> Option<&LeftOut> {
        self.left_out.values().max_by_key(|left_out| left_out.resident_bytes)
    }

    /// All processes with much memory that were seen, each with its start time.
    pub(super) fn processes(&self) -> impl Iterator<Item = (i32, u64)> + '_ {
        self.reached.iter().chain(self.found.keys()).map(|&(pid, start, _)| (pid, start))
    }

    pub(super) fn into_list(self) -> Vec<Stray> {
        self.found.into_values().collect()
    }
}

fn reason_of(environment: &[u8], preload: &str) -> Reason {
    let preloads = environment
        .split(|&byte| byte == 0)
        .filter_map(|entry| entry.strip_prefix(b"LD_PRELOAD="))
        .any(|value| String::from_utf8_lossy(value).contains(preload));
    if preloads { Reason::NotLoaded } else { Reason::PreloadCleared }
}

/// The line of a summary.
pub(super) fn warning(strays: &[Stray]) -> Option<String> {
    let largest = strays.iter().max_by_key(|stray| stray.resident_bytes)?;
    let why = match largest.reason {
        Reason::PreloadCleared => {
            "was started without LD_PRELOAD, which env -i, sudo, su and their like take away: have them \
             start `tiermgrctl run`, or keep that variable"
        }
        Reason::NotLoaded => {
            "did not load the library: it is statically linked, has rights of its own (set-user-ID, file \
             capabilities), or is for another C library or machine"
        }
    };
    let others = match strays.len() {
        1 => String::new(),
        more => format!(" ({} such programs were seen)", more),
    };
    Some(format!(
        "{} (pid {}, {} and more) was not reached, so that nothing of it was limited or parked: it {why}{others}",
        largest.name,
        largest.pid,
        crate::render::bytes(largest.resident_bytes)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_environment_is_told_from_one_that_had_no_effect() {
        for (environment, reason) in [
            (&b"A=1\0LD_PRELOAD=/x/lib.so:/y\0"[..], Reason::NotLoaded),
            (b"LD_PRELOAD=\0", Reason::PreloadCleared),
            (b"LD_PRELOAD=/other.so\0", Reason::PreloadCleared),
            (b"", Reason::PreloadCleared),
        ] {
            assert_eq!(reason_of(environment, "/x/lib.so"), reason);
        }
    }

    #[test]
    fn the_largest_is_named_and_the_others_are_counted() {
        assert_eq!(warning(&[]), None);
        let stray = |name: &str, resident_bytes, reason| Stray {
            pid: 7,
            name: name.to_owned(),
            resident_bytes,
            reason,
        };
        let small = stray("small", 20 << 20, Reason::PreloadCleared);
        let large = stray("large", 1 << 30, Reason::NotLoaded);
        let one = warning(std::slice::from_ref(&small)).unwrap();
        assert!(one.contains("small (pid 7, 20.0 MiB") && one.contains("env -i"), "{one}");
        let both = warning(&[small, large]).unwrap();
        assert!(both.contains("large") && both.contains("2 such programs"), "{both}");
    }

    #[test]
    fn this_program_is_looked_at_once_it_is_time() {
        let mut strays = Strays::new(Path::new("/no/such/library.so"), None);
        let me = Pid::this();
        strays.look(me);
        assert!(strays.found.is_empty(), "it was not time yet");
        let block = vec![1_u8; usize::try_from(2 * MATTERS_BYTES).unwrap()];
        std::thread::sleep(strays.until_next());
        strays.look(me);
        let found = strays.into_list();
        assert!(found.iter().any(|stray| stray.pid == me.as_raw()), "{found:?}");
        assert_eq!(block[block.len() / 2], 1);
    }
}

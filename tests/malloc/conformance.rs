//! What malloc and its kin promise, in two tables, `conformance.c` and `lifetimes.c`, run in each way in which a
//! program can have them.

use crate::stage::{Stage, compile, dist, run_within, skip, working_set};
use crate::{program, recalls_min, source};
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

type Settings<'a> = &'a [(&'a str, &'a str)];

const SMALL: (&str, &str) = ("TIERMGR_SMALL", "1");
const UNLIMITED: Option<u64> = Some(4 << 30);
/// With so little that all blocks have to leave.
const AT_THE_LIMIT: Option<u64> = None;

/// The program of a table; one wants a library, and another one of the same source to open.
fn table(name: &str, preload: impl FnOnce(&Path) -> Command) -> Command {
    if name == "conformance" {
        return preload(&program(name));
    }
    let sources = [source("lifetimes_library.c")];
    let flags = ["-std=gnu11", "-shared", "-fPIC"].map(OsStr::new);
    let linked = compile("cc", &sources, "liblifetimes-linked.so", &flags);
    let opened = compile("cc", &sources, "liblifetimes-opened.so", &flags);
    let flags = [OsStr::new("-std=gnu11"), linked.as_os_str(), OsStr::new("-ldl")];
    let lifetimes = compile("cc", &[source("lifetimes.c")], "malloc-lifetimes", &flags);
    let mut command = preload(&lifetimes);
    command.env("LIBRARY", opened);
    command
}

fn run(name: &str, dram: Option<u64>, settings: Settings<'_>) {
    let Some(stage) = Stage::new(name, dram.unwrap_or(working_set() / 2), &[]) else { return };
    let mut command = table(name, |program| stage.command(program));
    command.envs(settings.iter().copied());
    if dram.is_none() {
        command.env("PRESSURE", "1");
    }
    stage.expect_ok(&mut command);
    stage.expect_work(if dram.is_none() { recalls_min() } else { 0 });
}

fn alone(mut command: Command) {
    let output = run_within(&mut command, Duration::from_secs(110)).expect("ends in time");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.starts_with("ok "), "{said}{complained}");
}

macro_rules! tables {
    ($($name:ident),*) => {$(
        mod $name {
            use super::{AT_THE_LIMIT, SMALL, UNLIMITED, alone, run, table};
            use std::process::Command;

            const NAME: &str = stringify!($name);

            /// The tables hold what programs expect, not what we happen to do.
            #[test]
            fn glibc_itself() {
                alone(table(NAME, |program| Command::new(program)));
            }

            #[test]
            fn large_blocks() {
                run(NAME, UNLIMITED, &[]);
            }

            #[test]
            fn large_blocks_at_the_limit() {
                run(NAME, AT_THE_LIMIT, &[]);
            }

            #[test]
            fn blocks_of_16_kib_at_the_limit() {
                run(NAME, AT_THE_LIMIT, &[("TIERMGR_MIN_SIZE", "16K")]);
            }

            #[test]
            fn small_blocks() {
                run(NAME, UNLIMITED, &[SMALL]);
            }

            #[test]
            fn small_blocks_at_the_limit() {
                run(NAME, AT_THE_LIMIT, &[SMALL]);
            }

            #[test]
            fn little_left_to_jemalloc() {
                run(NAME, UNLIMITED, &[SMALL, ("TIERMGR_MIN_SIZE", "16K")]);
            }

            #[test]
            fn all_left_to_jemalloc_at_the_limit() {
                run(NAME, AT_THE_LIMIT, &[SMALL, ("TIERMGR_MIN_SIZE", "1G")]);
            }

            #[test]
            fn without_a_daemon() {
                super::without_a_daemon(NAME, &[]);
            }

            #[test]
            fn small_blocks_without_a_daemon() {
                super::without_a_daemon(NAME, &[SMALL]);
            }
        }
    )*};
}

tables!(conformance, lifetimes);

fn without_a_daemon(name: &str, settings: Settings<'_>) {
    let preload = dist("lib/libtiermgr_preload.so");
    if !preload.exists() {
        return skip("dist/lib/libtiermgr_preload.so is not built; run scripts/build");
    }
    alone(table(name, |program| {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", preload).env("TIERMGR_SOCKET", "/nonexistent/socket");
        command.envs(settings.iter().copied());
        command
    }));
}

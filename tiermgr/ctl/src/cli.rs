//! The command line. Help texts are also the man pages; of a verb's documentation the first paragraph
//! is its line in lists.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use tiermgr_wire::dram::DramLimit;
use tiermgr_wire::size::{PathAndSize, Size};

/// Runs programs with more memory than DRAM holds, and shows what the daemon does
#[derive(Debug, Parser)]
#[command(
    name = "tiermgrctl",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  tiermgrctl run --dram 8G -- python3 train.py    a program in 8 GiB of DRAM, the rest on disk
  tiermgrctl status                               what the daemon has done
  tiermgrctl clients --json | jq '.[].pid'        for scripts
  tiermgrctl doctor --nvme /dev/nvme1n1           what this machine lacks, and how to get it

Exit status:
  0    it worked; of doctor: tiermgr can work here
  1    it did not: no daemon answers, it refuses, or something cannot be written; of doctor:
       something that tiermgr needs is missing
  2    the command line makes no sense
  run  that of CMD; 128+N if signal N ended it, 127 if it was not found, 126 if it could not be
       run, and 125 if tiermgrctl itself failed or its command line makes no sense"
)]
pub(crate) struct Cli {
    /// Socket of the daemon [default: /run/tiermgr/tiermgrd.sock]
    #[arg(long, global = true, env = "TIERMGR_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run a program whose memory may be larger than DRAM
    ///
    /// CMD runs with the tiermgr allocator preloaded. Large allocations of CMD and of the programs that
    /// it starts are managed: together they take no more than --dram of DRAM, and what does not fit is
    /// parked on disk until it is touched.
    ///
    /// Where a daemon runs (at --socket, or at its default place and neither --dram nor --nvme is given), it
    /// is used. Else a private one is started for this run, which needs root, and with it a store in a fresh
    /// folder under TMPDIR, /var/tmp or the current directory, whichever has direct I/O first. Both are
    /// gone when tiermgrctl ends, or, where programs outlive CMD, with the last of them. Only root can reach a private daemon: a program that gives up root before
    /// its first large allocation is not managed.
    ///
    /// A program that cannot attach says so on stderr and goes on with ordinary memory, without a limit; with
    /// --require its large allocations fail instead. The summary says how many processes attached. It warns if
    /// a program had much memory (16 MiB and more) and none attached, if one with as much was seen that started
    /// without the library, if a process had far more than --dram, and if programs live on when CMD has ended. If
    /// CMD is small it does not warn that none attached: there was nothing to manage. The exit status is CMD's all
    /// the same.
    ///
    /// SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to CMD. The exit status is CMD's; 128+N if signal N
    /// ended it, 127 if it was not found, 126 if it could not be run, and 125 if tiermgrctl itself failed or its
    /// command line makes no sense.
    /// A summary goes to stderr.
    Run(RunArgs),
    /// Show what the daemon has done and how it is
    #[command(after_help = "\
Examples:
  tiermgrctl status
  tiermgrctl status --json | jq .totals.recalled_pages")]
    Status(ReadArgs),
    /// Show the tiers: how much of each is used, promised and free
    #[command(after_help = "\
Examples:
  tiermgrctl tiers
  tiermgrctl tiers --json | jq '.[] | select(.name == \"nvme\").free_bytes'")]
    Tiers(ReadArgs),
    /// Show the managed regions of your programs (as root: of all)
    #[command(after_help = "\
Examples:
  tiermgrctl regions
  tiermgrctl regions --json | jq 'map(.parked_bytes) | add'")]
    Regions(ReadArgs),
    /// Show your attached programs (as root: all)
    #[command(after_help = "\
Examples:
  tiermgrctl clients
  tiermgrctl clients --json | jq '.[] | {pid, name, faults: .stats.faults}'")]
    Clients(ReadArgs),
    /// Check this machine, and say how to mend what is missing
    ///
    /// Kernel features are tried, not concluded from versions; nothing is changed. Most of it needs root.
    Doctor(DoctorArgs),
    /// Print a shell's completions
    #[command(after_help = "\
Examples:
  tiermgrctl completions bash > /etc/bash_completion.d/tiermgrctl
  tiermgrctl completions fish > ~/.config/fish/completions/tiermgrctl.fish")]
    Completions(CompletionsArgs),
    /// Print the manual page, or write one for each verb
    #[command(after_help = "\
Examples:
  tiermgrctl man | man -l -
  tiermgrctl man --dir /usr/local/share/man/man1")]
    Man(ManArgs),
}

/// Options of `run`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tiermgrctl run --dram 8G -- python3 train.py
  tiermgrctl run --dram 2G --nvme /mnt/fast/store:64G --small -- redis-server
  tiermgrctl run --dram 4G --mmap -- python3 many-objects.py
  tiermgrctl run --dram 512MiB --report run.json -- ./my-program --its-option

Environment:
  TIERMGR_DAEMON    tiermgrd, where it is neither beside tiermgrctl nor in PATH
  TIERMGR_PRELOAD   libtiermgr_preload.so, where it is neither beside tiermgrctl nor in ../lib
  TMPDIR            where a private store is looked for a place first
  TIERMGR_LOG       what programs say on stderr: off, warn [default] or info
  TIERMGR_DISABLE   1: programs are not managed
  TIERMGR_MMAP_MIN  least size of a mapping with --mmap [default: 1M, at least 64K]

A program that is started with LD_PRELOAD and without run takes its options from TIERMGR_SOCKET,
TIERMGR_CLASS, TIERMGR_MIN_SIZE, TIERMGR_SMALL, TIERMGR_MMAP, TIERMGR_REQUIRE and TIERMGR_RULES.")]
pub(crate) struct RunArgs {
    /// DRAM for CMD's managed allocations and the private daemon together: a size, or a share such as 50%
    ///
    /// At least 32MiB, or 1% to 95%. [default: half of the available memory; in a memory cgroup three quarters
    /// of what is left of its limit, if that is less]
    #[arg(long, value_name = "SIZE")]
    pub(crate) dram: Option<DramLimit>,

    /// Where to park what does not fit: a file or a block device
    ///
    /// What is in it is lost if it is a store of an earlier run. Anything else that is not blank is refused,
    /// and stays as it is: a file must be empty or hold zeros alone, a device in its first and last MiB. A file
    /// that is not there yet is made and given all of its size at once. Without SIZE that is twice the machine's
    /// memory, but at most 64 GiB and half of what is free on the disk; a device, and a file that is there, are
    /// used whole.
    #[arg(long, value_name = "PATH[:SIZE]")]
    pub(crate) nvme: Option<PathAndSize>,

    /// Who gives way when several programs share a daemon: bulk first, latency last
    #[arg(long, value_enum, default_value_t = Class::Standard)]
    pub(crate) class: Class,

    /// Write what happened to FILE as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Let managed allocations fail where a program cannot attach (sets TIERMGR_REQUIRE=1)
    ///
    /// CMD is not started at all if the allocator cannot be preloaded into it (it is statically linked, has rights
    /// of its own, or is for another machine or C library), or if it is known not to pass LD_PRELOAD on, as sudo.
    /// Without this option tiermgrctl only warns of them. A program that has a malloc of its own in front of
    /// tiermgr's, or that runs under a sanitizer or valgrind, ends at its start with status 125.
    #[arg(long)]
    pub(crate) require: bool,

    /// Manage small allocations too, through jemalloc (sets TIERMGR_SMALL=1)
    ///
    /// For programs whose memory is many small objects: dictionaries, lists, trees. A program then attaches
    /// with its first allocation, whatever its size. Python has an allocator of its own for small objects, which
    /// must be off: `-- env PYTHONMALLOC=malloc python3 ...`.
    #[arg(long)]
    pub(crate) small: bool,

    /// Manage large mappings too that programs make by mmap (sets TIERMGR_MMAP=1)
    ///
    /// Anonymous private mappings of 1 MiB and more that are read and written from the start; no stacks, no
    /// files, nothing shared, locked or executed, and no reservations without access. For programs with an
    /// allocator of their own, such as Python's for small objects. TIERMGR_MMAP_MIN changes the least size.
    #[arg(long)]
    pub(crate) mmap: bool,

    /// Least size of an allocation that is managed [default: 128KiB, at least 16KiB]
    ///
    /// With --small, of one that jemalloc is not asked for.
    #[arg(long, value_name = "SIZE")]
    pub(crate) min_size: Option<Size>,

    /// Manage only the programs that FILE names (sets TIERMGR_RULES)
    ///
    /// For a CMD that starts many others, such as make or a shell. A line is a pattern and what is to be done:
    /// nothing more, or `off`, `small`, `no-small`, `mmap`, `no-mmap`, `min-size=SIZE`. `cc1* small` is about programs by their name,
    /// `/opt/*/solve` by their path; `*` stands for any characters, `?` for one, and `#` begins a comment. The first
    /// line that fits a program decides: by the file that runs (of a script that is its interpreter), or by the name
    /// that it was started by. What no line fits runs as if tiermgr were not there, and passes all on to what it
    /// starts. A line that is wrong or contradicts itself is said before CMD starts, and so is a file that leaves
    /// everything out.
    #[arg(long, value_name = "FILE")]
    pub(crate) only: Option<PathBuf>,

    /// Have the private daemon do without a kernel feature (for tests)
    #[arg(long, value_name = "FEATURE", hide = true)]
    pub(crate) assume_missing: Vec<String>,

    /// Program and its arguments
    // No option of ours may be taken for the program: what begins with a hyphen belongs to it only behind
    // its name, or behind `--`.
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// Who gives way to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Class {
    /// Keeps its room longest.
    Latency,
    /// The default.
    Standard,
    /// Gives way first.
    Bulk,
}

impl Class {
    /// As `TIERMGR_CLASS` has it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Standard => "standard",
            Self::Bulk => "bulk",
        }
    }
}

/// Options of verbs that read.
#[derive(Args, Debug)]
pub(crate) struct ReadArgs {
    /// Print JSON; the names of its fields do not change within a major version
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit status: 0 if tiermgr can work here, 1 if something that it needs is missing.

Examples:
  sudo tiermgrctl doctor
  sudo tiermgrctl doctor --nvme /dev/nvme1n1
  tiermgrctl doctor --json | jq '.findings[] | select(.state != \"ok\")'")]
pub(crate) struct DoctorArgs {
    /// Also check whether `run --nvme` would take this; nothing in it is changed
    #[arg(long, value_name = "PATH[:SIZE]")]
    pub(crate) nvme: Option<PathAndSize>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Which shell
    pub(crate) shell: clap_complete::Shell,
}

/// Options of `man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Write tiermgrctl.1 and a page for each verb into DIR, instead of printing the first
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn run_args(args: &[&str]) -> Result<RunArgs, String> {
        let args = ["tiermgrctl", "run"].into_iter().chain(args.iter().copied());
        match Cli::try_parse_from(args).map_err(|error| error.to_string())?.verb {
            Verb::Run(args) => Ok(args),
            verb => Err(format!("{verb:?}")),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_command_is_its_own() {
        for separator in [&["--"][..], &[]] {
            let args =
                [&["--dram", "1G"], separator, &["prog", "--dram", "2G", "--", "-x"]].concat();
            let args = run_args(&args).unwrap();
            assert_eq!(args.dram, Some(DramLimit::Bytes(Size(1 << 30))));
            assert_eq!(args.command, ["prog", "--dram", "2G", "--", "-x"]);
        }
    }

    #[test]
    fn a_command_is_needed_and_sizes_are_checked() {
        assert!(run_args(&["--dram", "1G"]).unwrap_err().contains("CMD"));
        assert!(run_args(&["--dram", "1Q", "--", "x"]).unwrap_err().contains("not a unit"));
        assert!(run_args(&["--class", "fast", "--", "x"]).unwrap_err().contains("latency"));
        let args = run_args(&["--nvme", "/dev/nvme0n1:64G", "--class", "bulk", "--", "x"]).unwrap();
        assert_eq!(args.nvme.unwrap().size, Some(Size(64 << 30)));
        assert_eq!(args.class, Class::Bulk);
        let args = run_args(&["--dram", "50%", "--", "x"]).unwrap();
        assert_eq!(args.dram, Some(DramLimit::Percent(50)));
        assert!(run_args(&["--nvme", "", "--", "x"]).unwrap_err().contains("no file or device"));
    }

    #[test]
    fn a_mistyped_option_is_not_the_program() {
        for separator in [&["--"][..], &[]] {
            let args = [&["--drma", "1G"], separator, &["true"]].concat();
            let error = run_args(&args).unwrap_err();
            assert!(error.contains("'--drma'") && error.contains("'--dram'"), "{error}");
        }
        assert!(run_args(&["-x", "true"]).is_err());
        assert_eq!(run_args(&["--", "-x"]).unwrap().command, ["-x"]);
    }

    #[test]
    fn the_help_of_run_says_what_is_warned_of() {
        let mut cli = Cli::command();
        let help = cli.find_subcommand_mut("run").unwrap().render_long_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!help.contains("warns if there was none"), "{help}");
        let least = crate::verb::run::MATTERS_BYTES >> 20;
        assert!(help.contains(&format!("much memory ({least} MiB and more)")), "{help}");
    }

    #[test]
    fn every_verb_has_a_description_and_examples() {
        for verb in Cli::command().get_subcommands() {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Examples:"), "{} has no examples", verb.get_name());
        }
    }
}

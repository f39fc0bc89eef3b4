//! Why the engine could not do what a session or the daemon asked.

use std::io;
use std::path::PathBuf;
use tiermgr_core::effect::Refusal;
use tiermgr_core::units::ProcId;
use tiermgr_wire::size::Size;

/// Errors of executors and their state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file of the state directory.
    #[error("{what} {path}")]
    State {
        /// What was being done, to be followed by the path.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file of the state directory does not hold what we write.
    #[error("{path} is not a state file of this version: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
    /// The kernel refused what an executor needs.
    #[error("{what} (see `tiermgrctl doctor`)")]
    Kernel {
        /// What was being done.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The page size is none that the core can work with.
    #[error("pages of {bytes} bytes are not supported")]
    PageSize {
        /// `sysconf(_SC_PAGESIZE)`.
        bytes: u64,
    },
    /// A process of the family offered something that does not hold.
    #[error("the process {pid} cannot be attached: {reason}")]
    Attach {
        /// The process.
        pid: i32,
        /// What is wrong.
        reason: &'static str,
    },
    /// As many processes as there may be.
    #[error("the family has the most processes that it may have")]
    TooManyProcesses,
    /// The process is not, or no longer, of the family.
    #[error("process {} is not attached", .0.0)]
    NoProcess(ProcId),
    /// The manager refused.
    #[error("the family cannot be drained")]
    Refused(#[source] Refusal),
    /// No answer in time. The request may still be carried out.
    #[error("no answer in time")]
    TimedOut,
    /// A drain met new forks each time.
    #[error("its processes fork faster than their memory can be brought back")]
    StillForking,
    /// The executor has ended.
    #[error("the family has ended")]
    Ended,
    /// One program's regions would be larger than everything that could hold them.
    #[error(
        "{} in one program are more than DRAM and store hold together ({}): give the daemon a larger store \
         (`--nvme PATH:SIZE`, `store` in the configuration), or ask for less",
        Size(*.wanted_bytes).rounded(),
        Size(*.capacity_bytes).rounded()
    )]
    BeyondCapacity {
        /// All regions of the process, the new one included.
        wanted_bytes: u64,
        /// DRAM and store together.
        capacity_bytes: u64,
    },
    /// An earlier daemon moved pages out of their place, and this one may not.
    #[error(
        "pages of the family in {path} left by UFFDIO_MOVE, which this daemon takes for missing: start it \
         without `uffd_move` among `assume_missing`, or end the programs of the family"
    )]
    NeedsMove {
        /// The family's folder.
        path: PathBuf,
    },
    /// What its helper was told by an earlier daemon may be carried out at any time once it goes on.
    #[error("the helper of program {pid} is stopped in the middle of a move: let it go on")]
    Stopped {
        /// The program.
        pid: i32,
    },
    /// The state directory's file system is full.
    #[error(
        "the file system of {path} has no room for {needed_bytes} bytes: make it larger (a tmpfs with \
         `mount -o remount,size=SIZE`), choose another state directory, or end programs"
    )]
    StateFull {
        /// The family's folder.
        path: PathBuf,
        /// What is to fit.
        needed_bytes: u64,
    },
}

impl EngineError {
    /// For `map_err`: what was being done to which file.
    pub(crate) fn state(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::State { what, path, source }
    }

    /// For `map_err`: what the kernel was asked for.
    pub(crate) fn kernel(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Kernel { what, source }
    }
}

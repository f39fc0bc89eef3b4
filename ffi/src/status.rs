//! Why a call failed, for the program and for a person.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::io;
use tiermgr_wire::WireError;
use tiermgr_wire::reply::ErrorCode;

/// Numbers of `tiermgr_status` in the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// An argument is wrong.
    InvalidArgument = -1,
    /// The range is not managed.
    NotManaged = -2,
    /// A limit is reached, or no tier has room.
    NoRoom = -3,
    /// The caller may not do this.
    NotPermitted = -4,
    /// This daemon or this kernel cannot do it.
    Unsupported = -5,
    /// Library and daemon are of different versions.
    Version = -6,
    /// Library and daemon misunderstood each other.
    Protocol = -7,
    /// A device failed and bytes were lost.
    DataLost = -8,
    /// The daemon is ending.
    ShuttingDown = -9,
    /// No answer in time, or a defect.
    Internal = -10,
    /// Nobody listens on the socket.
    NoDaemon = -32,
    /// The daemon is away.
    ConnectionLost = -33,
    /// No address space or memory left.
    NoMemory = -34,
    /// The kernel refused something.
    System = -35,
    /// The process has too many clients.
    TooManyClients = -36,
    /// This thread is inside the library already: a signal handler has interrupted it there.
    Inside = -37,
}

impl Status {
    /// All of them, with the names that `tiermgr_status_name` gives.
    pub const NAMES: [(Self, &'static std::ffi::CStr); 16] = [
        (Self::InvalidArgument, c"INVALID_ARGUMENT"),
        (Self::NotManaged, c"NOT_MANAGED"),
        (Self::NoRoom, c"NO_ROOM"),
        (Self::NotPermitted, c"NOT_PERMITTED"),
        (Self::Unsupported, c"UNSUPPORTED"),
        (Self::Version, c"VERSION"),
        (Self::Protocol, c"PROTOCOL"),
        (Self::DataLost, c"DATA_LOST"),
        (Self::ShuttingDown, c"SHUTTING_DOWN"),
        (Self::Internal, c"INTERNAL"),
        (Self::NoDaemon, c"NO_DAEMON"),
        (Self::ConnectionLost, c"CONNECTION_LOST"),
        (Self::NoMemory, c"NO_MEMORY"),
        (Self::System, c"SYSTEM"),
        (Self::TooManyClients, c"TOO_MANY_CLIENTS"),
        (Self::Inside, c"INSIDE"),
    ];

    /// The number in C.
    #[must_use]
    pub const fn code(self) -> i32 {
        self as i32
    }
}

impl From<ErrorCode> for Status {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::InvalidArgument => Self::InvalidArgument,
            ErrorCode::NotManaged => Self::NotManaged,
            ErrorCode::NoRoom => Self::NoRoom,
            ErrorCode::NotPermitted => Self::NotPermitted,
            ErrorCode::Unsupported => Self::Unsupported,
            ErrorCode::VersionMismatch => Self::Version,
            ErrorCode::Protocol => Self::Protocol,
            ErrorCode::DataLost => Self::DataLost,
            ErrorCode::ShuttingDown => Self::ShuttingDown,
            ErrorCode::Internal => Self::Internal,
        }
    }
}

/// Why a call failed.
#[derive(Clone, Debug)]
pub struct Error {
    /// For programs.
    pub status: Status,
    /// For people: what was being done, the cause, the next step. One line.
    pub message: Cow<'static, str>,
}

/// What calls give.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failure that needs no details.
    #[must_use]
    pub const fn new(status: Status, message: &'static str) -> Self {
        Self { status, message: Cow::Borrowed(message) }
    }

    /// A failure with details.
    #[must_use]
    pub fn because(status: Status, message: String) -> Self {
        Self { status, message: Cow::Owned(message) }
    }

    /// The kernel refused `what`.
    #[must_use]
    pub fn system(what: &str, error: &io::Error) -> Self {
        let status = match error.raw_os_error() {
            Some(libc::ENOMEM) => Status::NoMemory,
            _ => Status::System,
        };
        Self::because(status, format!("{what}: {error}{}", remedy(error)))
    }
}

/// What to do where the kernel's word for it does not tell.
#[must_use]
pub(crate) fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise RLIMIT_NOFILE (`ulimit -n`)",
        _ => "",
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<WireError> for Error {
    fn from(error: WireError) -> Self {
        Self::because(Status::Protocol, format!("talking with the daemon: {error}"))
    }
}

/// How many bytes of `text` are whole characters and no more than `bytes_max`.
pub(crate) fn cut(text: &str, bytes_max: usize) -> usize {
    let mut length = text.len().min(bytes_max);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    length
}

const LAST_BYTES_MAX: usize = 512;

thread_local! {
    // Plain bytes: no destructor, so that it may be used while a thread ends.
    static LAST: RefCell<[u8; LAST_BYTES_MAX]> = const { RefCell::new([0; LAST_BYTES_MAX]) };
}

/// Keeps the message for [`last_error`] and gives the number for C.
pub fn record(error: &Error) -> i32 {
    LAST.with_borrow_mut(|last| {
        let length = cut(&error.message, LAST_BYTES_MAX - 1);
        last.fill(0);
        for (to, from) in last.iter_mut().zip(error.message.as_bytes().iter().take(length)) {
            // A message is one C string.
            *to = if *from == 0 { b' ' } else { *from };
        }
    });
    error.status.code()
}

/// The message kept last on this thread, ended by a zero byte.
#[must_use]
pub fn last_error() -> *const std::ffi::c_char {
    LAST.with(|last| last.as_ptr().cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn long_messages_end_at_a_character() {
        let error = Error::because(Status::Internal, "ü".repeat(400));
        assert_eq!(record(&error), -10);
        // SAFETY: `last_error` points to a string of this thread that ends with a zero byte.
        let kept = unsafe { CStr::from_ptr(last_error()) };
        let kept = kept.to_str().expect("whole characters");
        assert_eq!(kept.chars().count(), (LAST_BYTES_MAX - 1) / 2);
    }
}

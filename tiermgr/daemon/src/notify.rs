//! Tells whoever started the daemon that it is ready, or why it is not.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Whoever waits for one line: `ready`, or the reason against it.
#[derive(Debug)]
pub struct Maker(File);

impl Maker {
    /// Opens descriptor `fd` (`--ready-fd`). To be done early: a start may fail for want of descriptors, and
    /// that has to be said too.
    ///
    /// # Errors
    /// Where there is no such descriptor, or none left for this.
    pub fn open(fd: i32) -> io::Result<Self> {
        // Opening it anew needs no claim to own the number.
        OpenOptions::new().append(true).open(format!("/proc/self/fd/{fd}")).map(Self)
    }

    /// Says it.
    ///
    /// # Errors
    /// Where nobody reads.
    pub fn tell(mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{}\n", line.replace('\n', " ")).as_bytes())
    }
}

/// Sends `state` to the service manager, where there is one (`NOTIFY_SOCKET`).
///
/// # Errors
/// Where there is one and it cannot be reached.
pub fn service_manager(state: &str) -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let name = name.into_encoded_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::path::Path::new(
            std::str::from_utf8(&name).map_err(io::Error::other)?,
        ))?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

//! Messages between clients, the daemon and `tiermgrctl`, over one Unix socket of type
//! `SOCK_SEQPACKET`: one message, one packet.
//!
//! A connection begins with [`hello::Hello`] and is then a sequence of requests, each answered by one
//! [`reply::FromDaemon`] in order. Descriptors travel beside the message that names them
//! (`SCM_RIGHTS`). Byte order and layout are those of postcard; unknown or malformed packets end the
//! connection with [`reply::FromDaemon::Error`] and harm nobody else.

#![forbid(unsafe_code)]

pub mod control;
pub mod dram;
pub mod hello;
pub mod reply;
pub mod request;
pub mod rules;
pub mod size;

use serde::{Serialize, de::DeserializeOwned};

/// Version of the messages. Client and daemon must agree exactly.
pub const VERSION: u16 = 1;

/// Where a daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/tiermgr/tiermgrd.sock";

/// Least DRAM that a daemon can be given: below, the staging buffers of the first family would leave
/// nothing to work with.
pub const DRAM_BYTES_MIN: u64 = 32 << 20;

/// Least size that a store can be asked to have: below, its first families would leave nothing to others.
pub const STORE_BYTES_MIN: u64 = 16 << 20;

/// Least size of an allocation that can be managed.
pub const BLOCK_BYTES_MIN: u64 = 16 << 10;

/// Largest packet, in bytes. Longer lists are asked for page by page.
pub const PACKET_BYTES_MAX: usize = 64 << 10;

/// A packet that is not a message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// It does not decode, or something follows the message.
    #[error("the packet is not a message of version {VERSION}")]
    Malformed(#[source] postcard::Error),
    /// The message does not fit the buffer.
    #[error("the message is longer than {PACKET_BYTES_MAX} bytes")]
    TooLong(#[source] postcard::Error),
}

/// An error with its causes, on one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Writes `message` into `buffer` without allocating, and gives the part that was used.
///
/// # Errors
/// [`WireError::TooLong`] where it does not fit.
pub fn encode<'a, T: Serialize>(message: &T, buffer: &'a mut [u8]) -> Result<&'a [u8], WireError> {
    postcard::to_slice(message, buffer).map(|used| &*used).map_err(WireError::TooLong)
}

/// Reads a message from a whole packet.
///
/// # Errors
/// [`WireError::Malformed`] where the bytes are not exactly one message.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, WireError> {
    let (message, rest) = postcard::take_from_bytes(packet).map_err(WireError::Malformed)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(WireError::Malformed(postcard::Error::DeserializeUnexpectedEnd))
    }
}

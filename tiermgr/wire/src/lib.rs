//! Messages between clients, the daemon and `tiermgrctl`, over one Unix socket of type
//! `SOCK_SEQPACKET`: one message, one packet.
//!
//! A connection begins with [`hello::Hello`] and is then a sequence of requests, each answered by one
//! [`reply::FromDaemon`] in order. Descriptors travel beside the message that names them
//! (`SCM_RIGHTS`). Byte order and layout are those of postcard; unknown or malformed packets end the
//! connection with [`reply::FromDaemon::Error`] and harm nobody else.

#![forbid(unsafe_code)]

pub mod control;
pub mod hello;
pub mod reply;
pub mod request;

use serde::{Serialize, de::DeserializeOwned};

/// Version of the messages. Client and daemon must agree exactly.
pub const VERSION: u16 = 1;

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

//! mmap of new memory, where `TIERMGR_MMAP` asks for it: cut from the heap, as a large block of malloc is.
//!
//! What is read and written as ordinary private memory is, and nothing else: no stacks, which the kernel must
//! reach while a thread ends; nothing that is executed, locked, shared or of huge pages; and no memory without
//! access, which is a reservation of addresses and stays the kernel's, also when it is made accessible later.

use super::Outcome;
use super::layout::{EXTENT, Mapping, set_up};
use crate::route;
use std::ffi::c_int;
use tiermgr::client::Client;
use tiermgr::heap::{ALIGN_MAX, ARENA_BYTES_FIRST};
use tiermgr::space::page_bytes;
use tiermgr::status::{Error, Status};

const ACCESS: c_int = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const UNDERSTOOD: c_int = PRIVATE | libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK;
/// Where mappings begin, so that none shares what the daemon moves as one with a neighbour that may be unmapped:
/// the kernel does not move what is accessible in part.
const ALIGN: usize = EXTENT;
/// The daemon promises room for all of an arena. A program that maps more than this without asking for room
/// means to use little of it.
const NORESERVE_BYTES_MAX: usize = ARENA_BYTES_FIRST;

/// Whether a mapping at no certain address is to be managed.
pub(super) fn is_wanted(mapping: &Mapping) -> bool {
    let Mapping { bytes, access, flags, offset, .. } = *mapping;
    route::is_large_mapping(bytes)
        && bytes <= route::BYTES_MAX
        && access == ACCESS
        && flags & PRIVATE == PRIVATE
        && flags & !UNDERSTOOD == 0
        && offset.is_multiple_of(page_bytes())
        && (flags & libc::MAP_NORESERVE == 0 || bytes <= NORESERVE_BYTES_MAX)
}

/// Maps new memory. `None`: the kernel is to do it.
pub(super) fn mmap(hint: usize, mapping: Mapping) -> Option<Outcome> {
    let bytes = mapping.bytes.checked_next_multiple_of(page_bytes())?;
    let client = match route::connected() {
        Ok(client) => client,
        Err(outcome) => return refused(&outcome),
    };
    match place(client, hint, bytes) {
        Ok(start) => {
            if mapping.flags & libc::MAP_POPULATE != 0 {
                // As the kernel does, this tells nothing where it fails.
                let _populated = set_up(client, &(start..start + bytes), mapping).is_ok();
            }
            Some(Ok(start))
        }
        // It may be a reservation that is never used.
        Err(error)
            if error.status == Status::NoRoom && mapping.flags & libc::MAP_NORESERVE != 0 =>
        {
            None
        }
        Err(error) => refused(&route::without_mapping(bytes, &error)),
    }
}

fn refused(outcome: &route::Outcome) -> Option<Outcome> {
    matches!(outcome, route::Outcome::Refused).then_some(Err(libc::ENOMEM))
}

/// A hint is followed inside of arenas: a program gets what it has unmapped back, or what lies behind what it
/// has. Elsewhere only its alignment is.
fn place(client: &Client, hint: usize, bytes: usize) -> Result<usize, Error> {
    let hint = hint.checked_next_multiple_of(page_bytes()).unwrap_or(0);
    if hint == 0 {
        return Ok(client.map(bytes, ALIGN)?.start);
    }
    if let Some(end) = hint.checked_add(bytes)
        && client.heap().owns(hint)
        && client.map_at(&(hint..end))?
    {
        return Ok(hint);
    }
    let at_most = bytes.checked_next_power_of_two().map_or(ALIGN_MAX, |whole| whole.min(ALIGN_MAX));
    let align = (1 << hint.trailing_zeros()).min(at_most).max(ALIGN);
    Ok(client.map(bytes, align)?.start)
}

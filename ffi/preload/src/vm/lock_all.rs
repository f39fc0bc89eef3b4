//! A lock of all memory that is there (`mlockall`).
//!
//! The kernel would bring in every page of every arena: those that are parked, and all those that no block
//! has. And it would lock limbo, after which locked pages can be moved there. So arenas are locked page by
//! page as they are touched, as those are that are made under `MCL_FUTURE`; everything else is brought in.

use super::native;
use super::{Outcome, Whose, parts};
use crate::log;
use std::ffi::c_int;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use tiermgr::client::Client;
use tiermgr::sandbox::{Deed, may};

/// mlockall with `MCL_CURRENT`.
pub(super) fn lock_all(client: &Client, flags: c_int) -> Outcome {
    // SAFETY: a lock changes no byte.
    unsafe { native::mlockall(flags | libc::MCL_ONFAULT) }?;
    // In a signal handler that has interrupted the library limbo stays locked: that is no success.
    let limbo = client.unlock_limbo().map_err(|_inside| libc::EAGAIN)?;
    if flags & libc::MCL_ONFAULT != 0 {
        return Ok(0);
    }
    if flags & libc::MCL_FUTURE != 0 {
        // What is mapped from now on is brought in at once, as the program said.
        // SAFETY: as above.
        unsafe { native::mlockall(libc::MCL_FUTURE) }?;
    }
    if !may(Deed::List) || !may(Deed::Lock) {
        log::warn(format_args!(
            "mlockall has locked memory as with MCL_ONFAULT: a seccomp filter forbids what it takes to bring it in"
        ));
        return Ok(0);
    }
    let brought_in = each_mapping(|mapping| {
        if limbo.as_ref().is_some_and(|limbo| limbo.contains(&mapping.start)) {
            return;
        }
        for (part, of) in parts(client, mapping) {
            if of == Whose::Foreign {
                // As little as the kernel, this says where something could not be brought in.
                // SAFETY: as above.
                let _locked = unsafe { native::mlock(part.start, part.len()) }.is_ok();
            }
        }
    });
    if let Err(error) = brought_in {
        log::warn(format_args!(
            "mlockall has locked memory as with MCL_ONFAULT: the list of mappings cannot be read: {error}"
        ));
    }
    Ok(0)
}

/// Calls `act` for each mapping of this process. Allocates nothing.
fn each_mapping(mut act: impl FnMut(Range<usize>)) -> io::Result<()> {
    // Of this thread: the first one may have ended.
    let mut file = File::open("/proc/thread-self/maps")?;
    let mut bounds = Bounds::default();
    let mut text = [0; 4096];
    loop {
        match file.read(&mut text) {
            Ok(0) => return Ok(()),
            Ok(length) => {
                text.iter().take(length).filter_map(|&c| bounds.next(c)).for_each(&mut act)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads `START-END ` at the beginning of each line.
#[derive(Debug, Default)]
struct Bounds {
    start: usize,
    number: usize,
    is_past: bool,
}

impl Bounds {
    fn next(&mut self, character: u8) -> Option<Range<usize>> {
        match character {
            b'\n' => *self = Self::default(),
            _ if self.is_past => {}
            b'-' => (self.start, self.number) = (self.number, 0),
            b' ' => {
                self.is_past = true;
                return Some(self.start..self.number);
            }
            _ => {
                let digit = char::from(character).to_digit(16).unwrap_or(0);
                self.number = self.number << 4 | digit as usize;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_read_by_their_bounds() {
        let text =
            b"5567000-5568000 r-xp 0 08:01 12  /a-b c-d\n7ffff000-7fffffffe000 rw-p 0 0 [stack]\n";
        let mut bounds = Bounds::default();
        let found: Vec<_> = text.iter().filter_map(|&c| bounds.next(c)).collect();
        assert_eq!(found, [0x556_7000..0x556_8000, 0x7fff_f000..0x7fff_ffff_e000]);
    }

    #[test]
    fn own_mappings_are_found() {
        let here = [0_u8; 1];
        let address = here.as_ptr().addr();
        let mut is_found = false;
        each_mapping(|mapping| is_found |= mapping.contains(&address)).expect("/proc");
        assert!(is_found);
    }
}

//! Answers to libtiermgr, where the program has that too and asks it about memory that is ours.

use crate::{route, small};
use tiermgr::client::{Client, Residency};
use tiermgr::preloaded::{Table, Why};
use tiermgr::status::{Error, Result, Status};

/// What libtiermgr looks for.
#[unsafe(no_mangle)]
#[used]
pub(crate) static tiermgr_preload_table: Table =
    Table { size: SIZE, owns, advise, prefetch, pin, unpin, residency };

#[expect(clippy::cast_possible_truncation, reason = "a struct of some dozen bytes")]
const SIZE: u32 = size_of::<Table>() as u32;

fn client() -> Result<&'static Client> {
    route::client().ok_or(Error::new(Status::NotManaged, "malloc has no managed memory yet"))
}

extern "C" fn owns(address: usize) -> bool {
    route::owner(address).is_some() || small::owns(address)
}

extern "C" fn advise(start: usize, bytes: usize, advice: i32, why: &mut Why) -> i32 {
    why.answer(client().and_then(|client| client.advise(start, bytes, advice)), &mut ())
}

extern "C" fn prefetch(start: usize, bytes: usize, why: &mut Why) -> i32 {
    why.answer(client().and_then(|client| client.prefetch(start, bytes)), &mut ())
}

extern "C" fn pin(start: usize, bytes: usize, lease: &mut u64, why: &mut Why) -> i32 {
    why.answer(client().and_then(|client| client.pin(start, bytes)), lease)
}

extern "C" fn unpin(lease: u64, why: &mut Why) -> i32 {
    why.answer(client().and_then(|client| client.unpin(lease)), &mut ())
}

extern "C" fn residency(start: usize, bytes: usize, found: &mut Residency, why: &mut Why) -> i32 {
    why.answer(client().and_then(|client| client.residency(start, bytes)), found)
}

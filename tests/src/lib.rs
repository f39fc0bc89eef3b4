//! Repository rules, kernel facts and whole-system tests.
//!
//! This library is what the tests have in common. Nothing imports it but tests.

pub mod harness;
#[expect(clippy::expect_used, reason = "a test ends where it fails")]
pub mod memory;

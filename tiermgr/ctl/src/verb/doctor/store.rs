//! Whether `run --nvme` would take a path. The daemon itself judges it, so that the two cannot differ.
//! Nothing that is there is changed.

use super::Finding;
use crate::verb::run::{find, named_store, text_of};
use std::process::{Command, Stdio};
use tiermgr_wire::chain;
use tiermgr_wire::size::PathAndSize;

const NAME: &str = "store";
const ELSEWHERE: &str = "name a file on a local disk (ext4, xfs, btrfs), or a block device";

/// Looks at a block device, an existing file, or a file that is to be made.
pub(super) fn check(named: &PathAndSize) -> Finding {
    let daemon = match find::daemon() {
        Ok(daemon) => daemon,
        Err(error) => return Finding::fail(NAME, error.what(), error.fix()),
    };
    let store = match named_store(named) {
        Ok(store) => store,
        Err(error) => return unfit(&chain(&error)),
    };
    let checked = Command::new(&daemon)
        .arg("--check-store")
        .arg(text_of(&store))
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .output();
    match checked {
        Ok(done) if done.status.success() => {
            Finding::ok(NAME, String::from_utf8_lossy(&done.stdout).trim_end())
        }
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            let said = said.trim_end();
            unfit(said.strip_prefix("tiermgrd: ").unwrap_or(said))
        }
        Err(error) => Finding::fail(
            NAME,
            format!("{} cannot be run: {error}", daemon.display()),
            "install tiermgr anew",
        ),
    }
}

/// What is wrong stands before the first semicolon of a message, what to do behind it.
fn unfit(message: &str) -> Finding {
    match message.split_once("; ") {
        Some((what, fix)) => Finding::fail(NAME, what, fix),
        None => Finding::fail(NAME, message, ELSEWHERE),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_message_is_split_into_what_is_and_what_to_do() {
        let finding = unfit("/x is in use by process 7; stop it, or choose another store");
        assert_eq!(finding.state, State::Fail);
        assert_eq!(finding.detail, "/x is in use by process 7");
        assert_eq!(finding.fix.as_deref(), Some("stop it, or choose another store"));
        assert_eq!(unfit("locking /x: I/O error").fix.as_deref(), Some(ELSEWHERE));
    }
}

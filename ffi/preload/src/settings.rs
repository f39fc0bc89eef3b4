//! What the environment says.

use crate::log::{self, Level};
use std::env;
use tiermgr::link::{Class, Config, program_name, usual_socket};

/// Smallest managed size where nothing is said.
const MIN_SIZE: usize = 128 << 10;
/// This library's own allocations are all smaller than this.
const MIN_SIZE_LEAST: usize = 16 << 10;

/// The settings.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Smallest managed size.
    pub(crate) min_size: usize,
    /// Smaller blocks are managed too, by jemalloc.
    pub(crate) small: bool,
    /// No memory from libc in place of managed memory.
    pub(crate) require: bool,
    /// Whom to connect to.
    pub(crate) config: Config,
}

/// Reads the environment. `None`: this library is to do nothing.
pub(crate) fn read() -> Option<Settings> {
    if is_on("TIERMGR_DISABLE") {
        return None;
    }
    match text("TIERMGR_LOG").as_deref() {
        None | Some("warn") => {}
        Some("off") => log::set_level(Level::Off),
        Some("info") => log::set_level(Level::Info),
        Some(other) => {
            log::warn(format_args!("TIERMGR_LOG={other} is not off, warn or info; warn is used"))
        }
    }
    let class = match text("TIERMGR_CLASS").as_deref() {
        None | Some("standard") => Class::Standard,
        Some("latency") => Class::Latency,
        Some("bulk") => Class::Bulk,
        Some(other) => {
            log::warn(format_args!(
                "TIERMGR_CLASS={other} is not latency, standard or bulk; standard is used"
            ));
            Class::Standard
        }
    };
    let min_size = text("TIERMGR_MIN_SIZE").map_or(MIN_SIZE, |given| {
        parse_size(&given).unwrap_or_else(|| {
            log::warn(format_args!(
                "TIERMGR_MIN_SIZE={given} is not a size such as 131072 or 128K; 128K is used"
            ));
            MIN_SIZE
        })
    });
    let small = is_on("TIERMGR_SMALL");
    Some(Settings {
        min_size: min_size.max(MIN_SIZE_LEAST),
        small,
        require: is_on("TIERMGR_REQUIRE"),
        config: Config { socket: usual_socket(), name: program_name(), class, extents: small },
    })
}

fn text(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn is_on(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

fn parse_size(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let table = [
            ("0", Some(0)),
            ("131072", Some(131_072)),
            ("128K", Some(128 << 10)),
            ("2MiB", Some(2 << 20)),
            ("1G", Some(1 << 30)),
            ("", None),
            ("K", None),
            ("1.5M", None),
            ("12X", None),
            ("-1", None),
            ("99999999999999999999", None),
            ("18446744073709551615G", None),
        ];
        for (text, size) in table {
            assert_eq!(parse_size(text), size, "{text}");
        }
    }
}

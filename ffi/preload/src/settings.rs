//! What the environment says.

use crate::log::{self, Level};
use std::env;
use std::ffi::{CStr, OsStr};
use std::fs;
use tiermgr::link::{Class, Config, program_name, usual_socket};
use tiermgr::rules::{Rule, Rules, is_text};
use tiermgr::size::Size;

/// Smallest managed size where nothing is said.
const MIN_SIZE: usize = 128 << 10;
/// Smallest managed mapping where nothing is said: what small programs map stays native, and what CPython's
/// own allocator maps does not.
const MMAP_MIN: usize = 1 << 20;
/// What the daemon counts in.
const MMAP_MIN_LEAST: usize = 64 << 10;
/// This library's own allocations are all smaller than this. `tiermgrctl run` refuses less
/// (`BLOCK_BYTES_MIN` of `tiermgr-wire`).
const MIN_SIZE_LEAST: usize = 16 << 10;

/// The settings.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Smallest managed size.
    pub(crate) min_size: usize,
    /// Smaller blocks are managed too, by jemalloc.
    pub(crate) small: bool,
    /// Smallest managed mapping of the program's, if any are.
    pub(crate) mmap_min: Option<usize>,
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
    let min_size = size("TIERMGR_MIN_SIZE", "128K", MIN_SIZE);
    let mmap_min = size("TIERMGR_MMAP_MIN", "1M", MMAP_MIN).max(MMAP_MIN_LEAST);
    let require = is_on("TIERMGR_REQUIRE");
    let rule = match env::var_os("TIERMGR_RULES").filter(|path| !path.is_empty()) {
        None => None,
        Some(path) => match rule_of_this_program(&path) {
            Ok(Some(rule)) if rule.is_managed => Some(rule),
            Ok(_) => return None,
            Err(why) => {
                if is_text(&path) {
                    log::refuse(require, format_args!("TIERMGR_RULES: {why}"));
                } else {
                    log::refuse(require, format_args!("TIERMGR_RULES={}: {why}", path.display()));
                }
                return None;
            }
        },
    };
    let small = rule.as_ref().and_then(|rule| rule.small);
    let small = small.unwrap_or_else(|| is_on("TIERMGR_SMALL"));
    let mmap = rule.as_ref().and_then(|rule| rule.mmap);
    let mmap = mmap.unwrap_or_else(|| is_on("TIERMGR_MMAP"));
    let least = rule.and_then(|rule| rule.min_size);
    let min_size =
        least.map_or(min_size, |Size(bytes)| usize::try_from(bytes).unwrap_or(usize::MAX));
    Some(Settings {
        min_size: min_size.max(MIN_SIZE_LEAST),
        small,
        mmap_min: mmap.then_some(mmap_min),
        require,
        config: Config { socket: usual_socket(), name: program_name(), class, extents: small },
    })
}

/// The rule for this program; `None` where no rule is about it.
fn rule_of_this_program(given: &OsStr) -> Result<Option<Rule>, String> {
    let text = match given.to_str() {
        Some(text) if is_text(given) => text.to_owned(),
        _ => fs::read_to_string(given).map_err(|error| error.to_string())?,
    };
    let rules = Rules::parse(&text).map_err(|error| error.to_string())?;
    let file = fs::read_link("/proc/self/exe").ok();
    let file = file.as_ref().map(|path| path.to_string_lossy());
    let name = name_at_start();
    Ok(rules.of(file.as_deref().into_iter().chain(name.as_deref())).cloned())
}

/// The name that was given to execve: that of a script, or of a link, where the file is another one.
fn name_at_start() -> Option<String> {
    // SAFETY: getauxval has no preconditions.
    let address = unsafe { libc::getauxval(libc::AT_EXECFN) };
    let name =
        std::ptr::with_exposed_provenance::<std::ffi::c_char>(usize::try_from(address).ok()?);
    if name.is_null() {
        return None;
    }
    // SAFETY: the kernel has put a string there, which stays as long as the process.
    Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

fn text(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn is_on(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

fn size(name: &str, usual_text: &str, usual: usize) -> usize {
    text(name).map_or(usual, |given| {
        parse_size(&given).unwrap_or_else(|| {
            log::warn(format_args!(
                "{name}={given} is not a size such as 131072 or 128K; {usual_text} is used"
            ));
            usual
        })
    })
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

//! The rules of a run: checked before it begins, and asked afterwards why a large program was not managed.

use super::RunError;
use crate::cli::RunArgs;
use crate::render::bytes;
use nix::libc;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use tiermgr_wire::rules::{Rules, is_text};

/// More than this is not passed on in an environment, whose strings have a limit of 128 KiB.
const RULES_BYTES_MAX: usize = 32 << 10;
/// Longer names of programs are not read.
const NAME_BYTES_MAX: usize = 4096;

/// What decides which programs are managed.
#[derive(Clone, Debug)]
pub(super) struct InForce {
    rules: Rules,
    /// Where they were named.
    source: &'static str,
}

/// Why a program is not managed at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Off,
    NotNamed,
}

/// A program that has the library in it, which does nothing there.
#[derive(Clone, Debug)]
pub(super) struct LeftOut {
    pid: i32,
    /// As `ps` shows it.
    name: String,
    /// Most memory that it was seen with.
    pub(super) resident_bytes: u64,
    cause: Cause,
    source: &'static str,
}

/// The file of --only as programs are told of it, if it can be read and is right: as its text, since one that gives
/// rights up may not be able to read it.
pub(super) fn checked(path: &Path) -> Result<OsString, RunError> {
    let wrong = |source| RunError::Rules { path: path.to_owned(), source };
    let text = fs::read_to_string(path).map_err(wrong)?;
    Rules::parse(&text).map_err(|source| RunError::Rule { path: path.to_owned(), source })?;
    if text.len() <= RULES_BYTES_MAX && !text.contains('\0') {
        return Ok(format!("{text}\n").into());
    }
    Ok(path.canonicalize().map_err(wrong)?.into())
}

/// Where the rules of a run come from, if it has any.
pub(super) fn source(args: &RunArgs) -> Option<&'static str> {
    let is_inherited = || std::env::var_os("TIERMGR_RULES").is_some_and(|value| !value.is_empty());
    if args.only.is_some() { Some("--only") } else { is_inherited().then_some("TIERMGR_RULES") }
}

impl InForce {
    /// What the programs of a run are told; `checked` is what `--only` came to. Of rules that are wrong they speak
    /// themselves.
    pub(super) fn of(args: &RunArgs, checked: Option<&OsStr>) -> Option<Self> {
        let source = source(args)?;
        let given = checked.map(OsStr::to_owned).or_else(|| std::env::var_os("TIERMGR_RULES"))?;
        let text = match given.to_str() {
            Some(text) if is_text(&given) => text.to_owned(),
            _ => fs::read_to_string(&given).ok()?,
        };
        Some(Self { rules: Rules::parse(&text).ok()?, source })
    }

    /// Whether process `pid`, which has the library in it, is left out. `None` too where that cannot be known.
    pub(super) fn left_out(&self, pid: i32, name: &str, resident_bytes: u64) -> Option<LeftOut> {
        let file = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        let names = [file.to_string_lossy().into_owned(), name_at_start(pid)?];
        let cause = match self.rules.of(names.iter().map(String::as_str)) {
            None => Cause::NotNamed,
            Some(rule) if !rule.is_managed => Cause::Off,
            Some(_) => return None,
        };
        Some(LeftOut { pid, name: name.to_owned(), resident_bytes, cause, source: self.source })
    }
}

impl LeftOut {
    /// For a warning: which program, and why it is not managed.
    pub(super) fn text(&self) -> String {
        let Self { pid, name, source, .. } = self;
        let why = match self.cause {
            Cause::Off => format!("a rule of {source} says `off`"),
            Cause::NotNamed => format!("no rule of {source} is about it"),
        };
        format!("{name} (pid {pid}, {} and more) is not managed: {why}", bytes(self.resident_bytes))
    }
}

/// The name that was given to execve, as the library in that process reads it too.
fn name_at_start(pid: i32) -> Option<String> {
    let vector = fs::read(format!("/proc/{pid}/auxv")).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_ne_bytes);
    let address = vector.chunks_exact(16).find_map(|entry| {
        (word(&entry[..8])? == libc::AT_EXECFN).then(|| word(&entry[8..])).flatten()
    })?;
    let mut name = vec![0; NAME_BYTES_MAX];
    let len = File::open(format!("/proc/{pid}/mem")).ok()?.read_at(&mut name, address).ok()?;
    let end = name.get(..len)?.iter().position(|&byte| byte == 0)?;
    name.truncate(end);
    Some(String::from_utf8_lossy(&name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_left_out_by_either_name_as_the_library_has_it() {
        let me = std::process::id().cast_signed();
        let started_as = name_at_start(me).unwrap();
        let name = Path::new(&started_as).file_name().unwrap().to_str().unwrap().to_owned();
        for (text, words) in [
            (format!("x\n{name} off\n"), Some("a rule of --only says `off`")),
            ("x\n".to_owned(), Some("no rule of --only is about it")),
            (format!("{name} no-small\n"), None),
        ] {
            let in_force = InForce { rules: Rules::parse(&text).unwrap(), source: "--only" };
            let left_out = in_force.left_out(me, "prog", 32 << 20).map(|left_out| left_out.text());
            assert_eq!(left_out.is_some(), words.is_some(), "{text}: {left_out:?}");
            let said = left_out.unwrap_or_default();
            assert!(said.contains(words.unwrap_or_default()), "{said}");
        }
    }
}

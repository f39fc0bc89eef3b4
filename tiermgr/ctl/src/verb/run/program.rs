//! Programs that the allocator cannot be preloaded into, recognised before they start.
//!
//! Only CMD itself is looked at (of a script its interpreter): what it starts in turn is not known.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why a program's memory cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Obstacle {
    program: PathBuf,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Static,
    OtherWordSize,
    SetUser,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.kind {
            Kind::Static => "is statically linked",
            Kind::OtherWordSize => "is not for this word size",
            Kind::SetUser => "changes its user or group when it starts",
        };
        write!(f, "{} {why}: no allocator can be preloaded into it", self.program.display())
    }
}

/// Looks at the program that `name` would start.
pub(super) fn obstacle(name: &OsStr) -> Option<Obstacle> {
    let mut program = find(name)?;
    if let Some(interpreter) = interpreter_of(&program) {
        program = interpreter;
    }
    let kind = if changes_user(&program) { Some(Kind::SetUser) } else { kind_of(&program) };
    kind.map(|kind| Obstacle { program, kind })
}

/// As execvp finds it.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|path| {
        fs::metadata(path).is_ok_and(|facts| facts.is_file() && facts.mode() & 0o111 != 0)
    })
}

/// What a script names behind `#!`.
fn interpreter_of(program: &Path) -> Option<PathBuf> {
    let mut start = [0; 256];
    let len = File::open(program).ok()?.read(&mut start).ok()?;
    let line = start.get(..len)?.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let word = line.split(|byte| b" \t".contains(byte)).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

/// The dynamic linker takes no preloads then, or only from trusted folders.
fn changes_user(program: &Path) -> bool {
    let Ok(facts) = fs::metadata(program) else { return false };
    let mode = facts.permissions().mode();
    let is_honoured = !nix::sys::statvfs::statvfs(program)
        .is_ok_and(|fs| fs.flags().contains(nix::sys::statvfs::FsFlags::ST_NOSUID));
    let user = mode & 0o4000 != 0 && facts.uid() != nix::unistd::geteuid().as_raw();
    let group = mode & 0o2010 == 0o2010 && facts.gid() != nix::unistd::getegid().as_raw();
    is_honoured && (user || group)
}

const PT_INTERP: u32 = 3;
const CLASS_64: u8 = 2;
/// Program headers that are looked at: real programs have a dozen.
const HEADERS_MAX: u16 = 64;

/// `None` also where it is no program at all: whoever starts it hears of that.
fn kind_of(program: &Path) -> Option<Kind> {
    let file = File::open(program).ok()?;
    let mut head = [0; 64];
    file.read_exact_at(&mut head, 0).ok()?;
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    // tiermgr knows 64-bit machines only.
    if head[4] != CLASS_64 {
        return Some(Kind::OtherWordSize);
    }
    // The dynamic linker itself, which may be given a program to start, has no interpreter.
    if program.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-")) {
        return None;
    }
    let half = |at: usize| Some(u16::from_ne_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let table = u64::from_ne_bytes(head.get(32..40)?.try_into().ok()?);
    let (size, count) = (half(54)?, half(56)?.min(HEADERS_MAX));
    for index in 0..count {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, table + u64::from(index) * u64::from(size)).ok()?;
        if u32::from_ne_bytes(kind) == PT_INTERP {
            return None;
        }
    }
    Some(Kind::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, mode: u32, content: &[u8]) -> PathBuf {
        let path = env::temp_dir().join(format!("tiermgr-{name}-{}", std::process::id()));
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// A program with one header of the kind `header`.
    fn elf(class: u8, header: u32) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[4] = class;
        bytes[32..40].copy_from_slice(&64_u64.to_ne_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_ne_bytes());
        bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
        bytes[64..68].copy_from_slice(&header.to_ne_bytes());
        bytes
    }

    fn kind(path: &Path) -> Option<Kind> {
        let found = obstacle(path.as_os_str()).map(|obstacle| obstacle.kind);
        fs::remove_file(path).unwrap();
        found
    }

    #[test]
    fn what_takes_no_preload_is_recognised() {
        assert_eq!(kind(&file("dynamic", 0o755, &elf(CLASS_64, PT_INTERP))), None);
        assert_eq!(kind(&file("static", 0o755, &elf(CLASS_64, 1))), Some(Kind::Static));
        assert_eq!(kind(&file("narrow", 0o755, &elf(1, PT_INTERP))), Some(Kind::OtherWordSize));
        assert_eq!(kind(&file("text", 0o755, b"echo\n")), None);
        assert_eq!(kind(&file("empty", 0o755, b"")), None);
        let inner = file("inner", 0o755, &elf(CLASS_64, 1));
        let script = file("script", 0o755, format!("#! {} -x\n", inner.display()).as_bytes());
        assert_eq!(kind(&script), Some(Kind::Static));
        fs::remove_file(inner).unwrap();
    }

    #[test]
    fn what_changes_its_user_is_recognised() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            assert!(env::var_os("TIERMGR_CI_STRICT").is_none(), "needs root");
            return;
        }
        let path = file("user", 0o755, &elf(CLASS_64, PT_INTERP));
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        let is_honoured = !nix::sys::statvfs::statvfs(&path)
            .is_ok_and(|fs| fs.flags().contains(nix::sys::statvfs::FsFlags::ST_NOSUID));
        assert_eq!(kind(&path), is_honoured.then_some(Kind::SetUser));
    }

    #[test]
    fn programs_of_the_system_are_no_obstacle() {
        for name in ["sh", "cat", "no-such-program-anywhere", ""] {
            assert_eq!(obstacle(OsStr::new(name)), None, "{name}");
        }
    }
}

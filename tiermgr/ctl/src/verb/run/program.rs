//! Programs that the allocator cannot be preloaded into, recognised before they start.
//!
//! Only CMD itself is looked at (of a script its interpreter): what it starts in turn is not known. `strays` looks at
//! that while it runs.

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

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Static,
    OtherWordSize,
    /// ELF's number of it.
    OtherMachine(u16),
    /// Its dynamic linker, which is not the C library's that we are built for.
    OtherLoader(PathBuf),
    SetUser,
    Capabilities,
    /// It starts programs without our `LD_PRELOAD`.
    Clears,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = self.program.display();
        match &self.kind {
            Kind::Static => write!(f, "{program} is statically linked"),
            Kind::OtherWordSize => write!(f, "{program} is not for this word size"),
            Kind::OtherMachine(number) => {
                write!(f, "{program} is for another machine ({})", machine_name(*number))
            }
            Kind::OtherLoader(loader) => {
                write!(f, "{program} is for another C library (its loader is {})", loader.display())
            }
            Kind::SetUser => write!(f, "{program} changes its user or group when it starts"),
            Kind::Capabilities => write!(f, "{program} gets capabilities when it starts"),
            Kind::Clears => {
                return write!(
                    f,
                    "{program} does not pass LD_PRELOAD on: what it starts is not managed; have it start \
                     `tiermgrctl run`"
                );
            }
        }?;
        f.write_str(": no allocator can be preloaded into it")
    }
}

impl Obstacle {
    /// Whether the program would not even start with the library: another loader than glibc's gives up where a
    /// library wants functions that its own C library lacks.
    pub(super) const fn forbids_preload(&self) -> bool {
        matches!(self.kind, Kind::OtherLoader(_))
    }
}

fn machine_name(number: u16) -> String {
    match number {
        3 => "i386".to_owned(),
        21 => "ppc64".to_owned(),
        22 => "s390x".to_owned(),
        40 => "arm".to_owned(),
        62 => "x86-64".to_owned(),
        183 => "aarch64".to_owned(),
        243 => "riscv64".to_owned(),
        258 => "loongarch64".to_owned(),
        other => format!("ELF machine {other}"),
    }
}

/// Programs that start others with a cleaned environment, or somewhere else.
const CLEARING: [&str; 9] =
    ["sudo", "doas", "su", "pkexec", "ssh", "docker", "podman", "systemd-run", "machinectl"];

/// Looks at the program that `name` would start.
pub(super) fn obstacle(name: &OsStr) -> Option<Obstacle> {
    let mut program = find(name)?;
    // As often as the kernel follows it.
    for _ in 0..SCRIPTS_MAX {
        match interpreter_of(&program) {
            Some(interpreter) => program = interpreter,
            None => break,
        }
    }
    let kind = if changes_user(&program) {
        Some(Kind::SetUser)
    } else if gets_capabilities(&program) {
        Some(Kind::Capabilities)
    } else {
        kind_of(&program)
    };
    let clears = || is_clearing(&program).then_some(Kind::Clears);
    kind.or_else(clears).map(|kind| Obstacle { program, kind })
}

/// Scripts whose interpreter is a script.
const SCRIPTS_MAX: usize = 5;

fn is_clearing(program: &Path) -> bool {
    let name = program.file_name().map(OsStr::to_string_lossy);
    name.is_some_and(|name| CLEARING.contains(&&*name))
}

/// Root has them all, and so gets none by a file.
fn gets_capabilities(program: &Path) -> bool {
    !nix::unistd::geteuid().is_root() && tiermgr_sys::process::has_file_capabilities(program)
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
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
/// Longer names of loaders are cut.
const LOADER_BYTES_MAX: usize = 256;
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
    let half = |at: usize| Some(u16::from_ne_bytes(head.get(at..at + 2)?.try_into().ok()?));
    if half(18)? != MACHINE {
        return Some(Kind::OtherMachine(half(18)?));
    }
    // The dynamic linker itself, which may be given a program to start, has no interpreter.
    if is_glibcs(program) {
        return None;
    }
    let table = u64::from_ne_bytes(head.get(32..40)?.try_into().ok()?);
    let (size, count) = (half(54)?, half(56)?.min(HEADERS_MAX));
    for index in 0..count {
        let mut header = [0; 40];
        file.read_exact_at(&mut header, table + u64::from(index) * u64::from(size)).ok()?;
        let word = |at: usize| Some(u64::from_ne_bytes(header.get(at..at + 8)?.try_into().ok()?));
        if header.starts_with(&PT_INTERP.to_ne_bytes()) {
            let mut name = vec![0; usize::try_from(word(32)?).ok()?.min(LOADER_BYTES_MAX)];
            file.read_exact_at(&mut name, word(8)?).ok()?;
            let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
            let loader = PathBuf::from(OsStr::from_bytes(name));
            return (!is_glibcs(&loader)).then_some(Kind::OtherLoader(loader));
        }
    }
    Some(Kind::Static)
}

/// `ld-linux-x86-64.so.2`, `ld-linux-aarch64.so.1`, `ld-2.31.so`.
fn is_glibcs(loader: &Path) -> bool {
    let name = loader.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
    name.starts_with("ld-linux") || name.starts_with("ld-2.")
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

    /// A program with one header of the kind `header`, which names `loader`.
    fn elf(class: u8, machine: u16, header: u32, loader: &str) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[4] = class;
        bytes[18..20].copy_from_slice(&machine.to_ne_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_ne_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_ne_bytes());
        bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
        bytes[64..68].copy_from_slice(&header.to_ne_bytes());
        bytes[72..80].copy_from_slice(&128_u64.to_ne_bytes());
        bytes[96..104].copy_from_slice(&(loader.len() as u64 + 1).to_ne_bytes());
        bytes.extend_from_slice(loader.as_bytes());
        bytes.push(0);
        bytes
    }

    const GLIBC: &str = "/lib64/ld-linux-x86-64.so.2";

    fn dynamic() -> Vec<u8> {
        elf(CLASS_64, MACHINE, PT_INTERP, GLIBC)
    }

    fn kind(path: &Path) -> Option<Kind> {
        let found = obstacle(path.as_os_str()).map(|obstacle| obstacle.kind);
        fs::remove_file(path).unwrap();
        found
    }

    #[test]
    fn what_takes_no_preload_is_recognised() {
        let of = |name: &str, content: &[u8]| kind(&file(name, 0o755, content));
        assert_eq!(of("dynamic", &dynamic()), None);
        assert_eq!(of("static", &elf(CLASS_64, MACHINE, 1, "")), Some(Kind::Static));
        assert_eq!(of("narrow", &elf(1, MACHINE, PT_INTERP, GLIBC)), Some(Kind::OtherWordSize));
        let foreign = of("foreign", &elf(CLASS_64, 243, PT_INTERP, GLIBC));
        assert_eq!(foreign, Some(Kind::OtherMachine(243)));
        let musl = "/lib/ld-musl-x86_64.so.1";
        let of_musl = of("musl", &elf(CLASS_64, MACHINE, PT_INTERP, musl));
        assert_eq!(of_musl, Some(Kind::OtherLoader(musl.into())));
        assert_eq!(of("cut", &dynamic()[..100]), None);
        assert_eq!(of("text", b"echo\n"), None);
        assert_eq!(of("empty", b""), None);
        let inner = file("inner", 0o755, &elf(CLASS_64, MACHINE, 1, ""));
        let script = file("script", 0o755, format!("#! {} -x\n", inner.display()).as_bytes());
        let outer = file("outer", 0o755, format!("#!{}\n", script.display()).as_bytes());
        assert_eq!(kind(&outer), Some(Kind::Static), "a script of a script");
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
        let path = file("user", 0o755, &dynamic());
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        let is_honoured = !nix::sys::statvfs::statvfs(&path)
            .is_ok_and(|fs| fs.flags().contains(nix::sys::statvfs::FsFlags::ST_NOSUID));
        assert_eq!(kind(&path), is_honoured.then_some(Kind::SetUser));
    }

    #[test]
    fn what_starts_others_without_their_environment_is_recognised() {
        assert!(
            is_clearing(Path::new("/usr/bin/sudo")) && !is_clearing(Path::new("/usr/bin/sudoku"))
        );
        let said = Obstacle { program: "/usr/bin/sudo".into(), kind: Kind::Clears }.to_string();
        assert!(said.contains("LD_PRELOAD") && said.contains("tiermgrctl run"), "{said}");
    }

    #[test]
    fn programs_of_the_system_are_no_obstacle() {
        for name in ["sh", "cat", "no-such-program-anywhere", ""] {
            assert_eq!(obstacle(OsStr::new(name)), None, "{name}");
        }
    }
}

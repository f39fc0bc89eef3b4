//! The configuration of `tiermgrd`: one TOML file.
//!
//! A key that is not known is an error, and so is a file that was named and does not exist. Every
//! default is visible: `tiermgrd --print-config` writes the file that would have the same effect as no
//! file at all, and `tiermgrd --check-config FILE` writes what FILE comes to.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tiermgr_sys::probe::KernelFeatures;
pub use tiermgr_wire::dram::DramLimit;
use tiermgr_wire::size::Size;
use tiermgr_wire::{DEFAULT_SOCKET, DRAM_BYTES_MIN, STORE_BYTES_MIN};

/// Where the configuration is looked for when no file is named.
pub const DEFAULT_PATH: &str = "/etc/tiermgr/tiermgrd.toml";

/// Limbo is reserved in chunks of 2 MiB, at least four of them.
pub const LIMBO_BYTES_MIN: u64 = 8 << 20;
/// Most limbo of one process.
pub const LIMBO_BYTES_MAX: u64 = 1 << 30;
const CHUNK_BYTES: u64 = tiermgr_core::units::CHUNK_BYTES;

/// All settings, with their defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Unix socket where programs and `tiermgrctl` connect.
    pub socket: PathBuf,
    /// Group that owns the socket; empty: the daemon's own.
    pub socket_group: String,
    /// Permissions of the socket.
    pub socket_mode: SocketMode,
    /// Folder for what must outlive the daemon but not the boot. On a tmpfs.
    pub state_dir: PathBuf,
    /// DRAM that all programs together may have, the daemon's own included.
    pub dram: DramLimit,
    /// Where pages wait between leaving their place and being written out: per process, a part of
    /// what it may have in DRAM.
    pub limbo: Size,
    /// Connections that one user may hold.
    pub connections_per_uid: u32,
    /// Programs with their forked descendants that one user may have attached.
    pub families_per_uid: u32,
    /// Least severe message that is written to the log.
    pub log_level: LogLevel,
    /// Kernel features to do without, even where the kernel has them. For tests.
    pub assume_missing: Vec<String>,
    /// Where parked pages are kept.
    pub store: StoreSettings,
}

/// Where parked pages are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// A file or a block device.
    pub path: PathBuf,
    /// Bytes of it that may be used.
    pub size: StoreSize,
    /// Make the file if it does not exist.
    pub create: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            socket_group: String::new(),
            socket_mode: SocketMode(0o660),
            state_dir: "/run/tiermgr/state".into(),
            dram: DramLimit::Percent(50),
            limbo: Size(256 << 20),
            connections_per_uid: 1024,
            families_per_uid: 64,
            log_level: LogLevel::Info,
            assume_missing: Vec::new(),
            store: StoreSettings::default(),
        }
    }
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            path: "/var/lib/tiermgr/store".into(),
            size: StoreSize::Bytes(Size(16 << 30)),
            create: true,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("reading the configuration {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not TOML of the right shape.
    #[error("in the configuration {}", path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A value is of the right shape and still makes no sense.
    #[error("`{key}` in the configuration: {reason}")]
    Value {
        /// Dotted name of the key.
        key: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The same of a value that stood on the command line.
    #[error("`{option}`: {reason}")]
    Option {
        /// The option.
        option: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
}

impl ConfigError {
    /// The same for a value that came from the command line.
    #[must_use]
    pub fn of_command_line(self) -> Self {
        let Self::Value { key, reason } = self else { return self };
        let option = match key {
            "socket" => "--socket",
            "state_dir" => "--state-dir",
            "dram" => "--dram",
            "store.path" | "store.size" => "--store",
            "assume_missing" => "--assume-missing",
            _ => return Self::Value { key, reason },
        };
        Self::Option { option, reason }
    }
}

impl Config {
    /// Reads `path`, or where it is `None` the default file if there is one, else the defaults.
    ///
    /// # Errors
    /// A named file that cannot be read, anything that is not understood, and values that make no
    /// sense on any machine.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let (path, named) = path.map_or((Path::new(DEFAULT_PATH), false), |path| (path, true));
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !named => Ok(Self::default()),
            Err(source) => Err(ConfigError::Read { path: path.to_owned(), source }),
        }
    }

    /// Reads a configuration from its text; `path` is for messages only.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what needs no machine to be checked.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for the first value that makes no sense.
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong = |key, reason: String| Err(ConfigError::Value { key, reason });
        for (key, path) in [
            ("socket", &self.socket),
            ("state_dir", &self.state_dir),
            ("store.path", &self.store.path),
        ] {
            if !path.is_absolute() {
                return wrong(key, format!("`{}` must be an absolute path", path.display()));
            }
        }
        if let DramLimit::Bytes(size) = self.dram
            && size.0 < DRAM_BYTES_MIN
        {
            return wrong("dram", format!("{size} is less than {}", Size(DRAM_BYTES_MIN)));
        }
        if !(LIMBO_BYTES_MIN..=LIMBO_BYTES_MAX).contains(&self.limbo.0) {
            return wrong(
                "limbo",
                format!(
                    "{} is not from {} to {}",
                    self.limbo,
                    Size(LIMBO_BYTES_MIN),
                    Size(LIMBO_BYTES_MAX)
                ),
            );
        }
        if !self.limbo.0.is_multiple_of(CHUNK_BYTES) {
            return wrong("limbo", format!("{} is not a multiple of 2MiB", self.limbo));
        }
        if let StoreSize::Bytes(size) = self.store.size
            && size.0 < STORE_BYTES_MIN
        {
            return wrong("store.size", format!("{size} is less than {}", Size(STORE_BYTES_MIN)));
        }
        if let Some(name) =
            self.assume_missing.iter().find(|name| !KernelFeatures::NAMES.contains(&name.as_str()))
        {
            let known = KernelFeatures::NAMES.join(", ");
            return wrong(
                "assume_missing",
                format!("no kernel feature is named `{name}`; the names are {known}"),
            );
        }
        if self.connections_per_uid == 0 {
            return wrong("connections_per_uid", "0 would let nobody connect".into());
        }
        if self.families_per_uid == 0 {
            return wrong("families_per_uid", "0 would let nobody attach".into());
        }
        Ok(())
    }

    /// The configuration as a commented file that reads back as the same values.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::with_capacity(4096);
        let mut entry = |comment, key, value| push_entry(&mut text, comment, key, value);
        entry(
            "Where programs and tiermgrctl connect.",
            "socket",
            quoted(&self.socket.to_string_lossy()),
        );
        entry(
            "Group that owns the socket; \"\" is the daemon's own group. Whoever may open the socket may\n\
             have memory managed, and so use what `dram` and `store` allow.",
            "socket_group",
            quoted(&self.socket_group),
        );
        entry(
            "Permissions of the socket, in octal.",
            "socket_mode",
            quoted(&self.socket_mode.text()),
        );
        entry(
            "What must outlive the daemon but not the boot: a folder of mode 0700 on a tmpfs.",
            "state_dir",
            quoted(&self.state_dir.to_string_lossy()),
        );
        entry(
            "DRAM that all programs together may have, the daemon's own memory included: a size of at least\n\
             32MiB, or a share of the machine's memory from \"1%\" to \"95%\".",
            "dram",
            quoted(&self.dram.to_string()),
        );
        entry(
            "Limbo of each process: pages wait there between leaving their place and being written out,\n\
             and come back at once if they are touched. Counts as DRAM; at most a quarter of `dram` is used.\n\
             8MiB to 1GiB, a multiple of 2MiB.",
            "limbo",
            quoted(&self.limbo.to_string()),
        );
        entry(
            "Connections that one user (other than root) may hold.",
            "connections_per_uid",
            self.connections_per_uid.to_string(),
        );
        entry(
            "Programs, each with what it forks, that one user (other than root) may have attached. Each costs\n\
             the daemon a thread and 0.6 MiB or more; there is room for 512 in all.",
            "families_per_uid",
            self.families_per_uid.to_string(),
        );
        entry(
            "error: something asked for did not happen. warn: odd, nothing lost. info: rare, an operator\n\
             wants it. debug and trace: for developers.",
            "log_level",
            quoted(self.log_level.text()),
        );
        let names: Vec<String> = self.assume_missing.iter().map(|name| quoted(name)).collect();
        entry(
            "Kernel features to do without although the kernel has them, for tests; `tiermgrctl doctor`\n\
             lists their names.",
            "assume_missing",
            format!("[{}]", names.join(", ")),
        );
        text.push_str("[store]\n\n");
        let mut entry = |comment, key, value| push_entry(&mut text, comment, key, value);
        entry(
            "A file on a file system with direct I/O (not tmpfs), or a block device. What is in it is lost if\n\
             it is a store; anything else that is not blank is refused, and stays as it is. Its folder must\n\
             exist. The service that scripts/install makes does not see /home, /root and /run/user.",
            "path",
            quoted(&self.store.path.to_string_lossy()),
        );
        entry(
            "Bytes of it that may be used, at least 16MiB; a file is given that size at once. \"all\": the whole\n\
             device, or the file as it is.",
            "size",
            quoted(&self.store.size.text()),
        );
        entry("Make the file if it does not exist.", "create", self.store.create.to_string());
        text.truncate(text.trim_end().len() + 1);
        text
    }
}

/// Appends `key = value` with a comment above and an empty line below.
#[expect(clippy::needless_pass_by_value, reason = "every value is made for this one call")]
fn push_entry(text: &mut String, comment: &str, key: &str, value: String) {
    for line in comment.lines() {
        text.push_str("# ");
        text.push_str(line);
        text.push('\n');
    }
    text.push_str(key);
    text.push_str(" = ");
    text.push_str(&value);
    text.push_str("\n\n");
}

/// `text` as a TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => {
                // Writing to a string cannot fail.
                let _infallible = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Serializes and parses a setting through its text form.
macro_rules! as_text {
    ($name:ident, $expected:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.text())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(|reason: String| {
                    serde::de::Error::custom(format!(
                        "`{text}` is not {}{}{reason}",
                        $expected,
                        if reason.is_empty() { "" } else { ": " }
                    ))
                })
            }
        }
    };
}

/// Permission bits of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl SocketMode {
    fn text(self) -> String {
        format!("{:04o}", self.0)
    }
}

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(bits) if bits <= 0o777 && !text.starts_with('+') => Ok(Self(bits)),
            _ => Err(String::new()),
        }
    }
}

as_text!(SocketMode, "a permission in octal such as \"0660\"");

/// How much of the store may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreSize {
    /// The whole device, or an existing file as it is.
    All,
    /// So many bytes.
    Bytes(Size),
}

impl StoreSize {
    fn text(self) -> String {
        match self {
            Self::All => "all".into(),
            Self::Bytes(size) => size.to_string(),
        }
    }
}

impl FromStr for StoreSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        text.parse().map(Self::Bytes).map_err(|error| error.to_string())
    }
}

as_text!(StoreSize, "a size or \"all\"");

/// Least severe message that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something asked for did not happen.
    Error,
    /// Odd, nothing lost.
    Warn,
    /// Rare, an operator wants it.
    Info,
    /// For developers.
    Debug,
    /// For developers, much of it.
    Trace,
}

impl LogLevel {
    const fn text(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// The same for the logging library.
    #[must_use]
    pub const fn filter(self) -> tracing::Level {
        match self {
            Self::Error => tracing::Level::ERROR,
            Self::Warn => tracing::Level::WARN,
            Self::Info => tracing::Level::INFO,
            Self::Debug => tracing::Level::DEBUG,
            Self::Trace => tracing::Level::TRACE,
        }
    }
}

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace]
            .into_iter()
            .find(|level| level.text() == text)
            .ok_or_else(String::new)
    }
}

as_text!(LogLevel, "one of error, warn, info, debug, trace");

pub mod machine;
#[cfg(test)]
mod tests;

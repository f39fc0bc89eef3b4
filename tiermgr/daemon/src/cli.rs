//! The command line of `tiermgrd`.

use crate::config::{
    Config, ConfigError, DramLimit, LogLevel, SocketMode, StoreSettings, StoreSize,
};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use tiermgr_wire::size::PathAndSize;

/// Serves programs that use more memory than fits into DRAM
///
/// SIGTERM and SIGINT bring everything back and end the daemon. Where that does not fit into memory it
/// says so and goes on serving; send the signal again to try again. Killed with SIGKILL, it is started
/// again by its keeper (its first process), and programs wait meanwhile.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "tiermgrd",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  systemctl enable --now tiermgrd          with systemd: now, and at every boot
  setsid tiermgrd >/var/log/tiermgrd.log 2>&1 &
                                           without it, as root
  tiermgrd --check-config /etc/tiermgr/tiermgrd.toml
  tiermgrd --check-store /dev/nvme1n1      what a store would say, without starting anything

Files:
  /etc/tiermgr/tiermgrd.toml               configuration; see tiermgrd.toml(5)
  /run/tiermgr/tiermgrd.sock               where programs and tiermgrctl connect

Exit status:
  0    everything was brought back, or nobody was left
  2    the command line or the configuration is wrong
  3    the daemon could not start; of --check-store: the store would be refused
  4    it died again and again"
)]
pub struct Cli {
    /// Configuration [default: /etc/tiermgr/tiermgrd.toml where it exists]
    #[arg(long, value_name = "FILE", conflicts_with = "embedded")]
    pub config: Option<PathBuf>,

    /// Print the default configuration as a commented file, and end
    #[arg(long)]
    pub print_config: bool,

    /// Check a configuration and print what it comes to, and end
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub check_config: Option<PathBuf>,

    /// Print a manual page, and end
    #[arg(long, value_name = "PAGE", value_enum)]
    pub print_man: Option<ManPage>,

    /// Check whether a daemon would take PATH as its store, and end; nothing of it is changed
    #[arg(long, value_name = "PATH[:SIZE]", conflicts_with_all = ["config", "check_config"])]
    pub check_store: Option<PathAndSize>,

    /// Be a private daemon, as `tiermgrctl run` starts it: no configuration is read; it also ends when
    /// its maker and all programs have gone, and removes socket, state and the store that it made
    #[arg(long, requires_all = ["socket", "state_dir", "dram", "store"])]
    pub embedded: bool,

    /// Socket, instead of the configured one
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// State directory, instead of the configured one
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// DRAM for all programs and the daemon, instead of the configured one: a size or a share
    #[arg(long, value_name = "SIZE")]
    pub dram: Option<DramLimit>,

    /// Store, instead of the configured one; a file is made if it does not exist, and one that exists is
    /// taken if it is a store or blank
    #[arg(long, value_name = "PATH[:SIZE]")]
    pub store: Option<PathAndSize>,

    /// Do without a kernel feature, as if the kernel lacked it (may be repeated; for tests)
    #[arg(long, value_name = "FEATURE")]
    pub assume_missing: Vec<String>,

    /// Least severe message that is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", value_parser = log_level)]
    pub log_level: Option<LogLevel>,

    /// Folder that a private daemon removes at its end if it is empty (may be repeated)
    #[arg(long, value_name = "DIR", requires = "embedded", hide = true)]
    pub remove_dir: Vec<PathBuf>,

    /// Descriptor to write one line to: "ready", or why the daemon cannot start
    #[arg(long, value_name = "N")]
    pub ready_fd: Option<i32>,
}

impl Cli {
    /// The settings: configuration first, then what the command line says.
    ///
    /// # Errors
    /// Whatever is wrong with either.
    pub fn settings(&self) -> Result<Config, ConfigError> {
        let mut config = if self.embedded {
            Config {
                socket_mode: SocketMode(0o600),
                log_level: LogLevel::Warn,
                // It serves one command, whatever users that has programs run as.
                families_per_uid: u32::MAX,
                store: StoreSettings { size: StoreSize::All, ..StoreSettings::default() },
                ..Config::default()
            }
        } else {
            Config::load(self.config.as_deref())?
        };
        if let Some(socket) = &self.socket {
            config.socket.clone_from(socket);
        }
        if let Some(state_dir) = &self.state_dir {
            config.state_dir.clone_from(state_dir);
        }
        if let Some(dram) = self.dram {
            config.dram = dram;
        }
        if let Some(store) = &self.store {
            config.store.path.clone_from(&store.path);
            config.store.create = true;
            if let Some(size) = store.size {
                config.store.size = StoreSize::Bytes(size);
            }
        }
        if let Some(level) = self.log_level {
            config.log_level = level;
        }
        config.assume_missing.extend_from_slice(&self.assume_missing);
        // The file's own values were checked when it was read.
        config.check().map_err(ConfigError::of_command_line)?;
        Ok(config)
    }
}

/// Pages of the manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ManPage {
    /// The daemon.
    #[value(name = "tiermgrd.8")]
    Daemon,
    /// Its configuration.
    #[value(name = "tiermgrd.toml.5")]
    Config,
}

fn log_level(text: &str) -> Result<LogLevel, &'static str> {
    text.parse().map_err(|_no_words: String| "it is one of error, warn, info, debug and trace")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use tiermgr_wire::size::Size;

    fn settings(args: &[&str]) -> Result<Config, String> {
        let args = std::iter::once("tiermgrd").chain(args.iter().copied());
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
        cli.settings().map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn embedded_needs_all_that_no_file_says() {
        let full = ["--embedded", "--socket", "/s", "--state-dir", "/d", "--dram", "256MiB"];
        assert!(settings(&full).unwrap_err().contains("--store"));
        let mut args = full.to_vec();
        args.extend([
            "--store",
            "/x:1G",
            "--assume-missing",
            "uffd_move",
            "--assume-missing",
            "uffd_poison",
        ]);
        let config = settings(&args).unwrap();
        assert_eq!(config.socket, PathBuf::from("/s"));
        assert_eq!(config.dram, DramLimit::Bytes(Size(256 << 20)));
        assert_eq!(config.store.size, StoreSize::Bytes(Size(1 << 30)));
        assert_eq!(config.assume_missing, ["uffd_move", "uffd_poison"]);
        assert_eq!(config.socket_mode, SocketMode(0o600));
        args.extend(["--config", "/etc/x"]);
        assert!(settings(&args).unwrap_err().contains("cannot be used with"));
    }

    #[test]
    fn what_the_command_line_says_is_checked_like_the_file() {
        let args = ["--config", "/dev/null", "--dram", "1MiB"];
        assert!(settings(&args).unwrap_err().contains("`--dram`"));
        assert!(
            settings(&["--config", "/dev/null", "--socket", "s"]).unwrap_err().contains("absolute")
        );
        assert!(settings(&["--config", "/dev/null", "--store", "/x:1Q"]).is_err());
        let small = settings(&["--config", "/dev/null", "--store", "/x:1M"]).unwrap_err();
        assert_eq!(small, "`--store`: 1MiB is less than 16MiB");
        let unknown = settings(&["--config", "/dev/null", "--assume-missing", "swap"]).unwrap_err();
        assert!(unknown.contains("`--assume-missing`") && unknown.contains("uffd_move"));
    }
}

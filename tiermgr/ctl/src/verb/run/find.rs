//! Where the other parts of tiermgr are.

use std::env;
use std::path::{Path, PathBuf};

/// A part that is nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotFound {
    file: &'static str,
    variable: &'static str,
    looked_in: Vec<PathBuf>,
    named: Option<PathBuf>,
}

impl NotFound {
    /// What is missing.
    pub(crate) fn what(&self) -> String {
        match &self.named {
            Some(path) => format!("{} names {}, which is no file", self.variable, path.display()),
            None => format!("{} was not found", self.file),
        }
    }

    /// What to do about it.
    pub(crate) fn fix(&self) -> String {
        if self.named.is_some() {
            return format!("correct or unset {}", self.variable);
        }
        let places: Vec<String> =
            self.looked_in.iter().map(|place| place.display().to_string()).collect();
        format!("install it in one of {}, or set {} to its path", places.join(", "), self.variable)
    }
}

impl std::fmt::Display for NotFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what())
    }
}

impl std::error::Error for NotFound {}

/// `tiermgrd`: beside this program, else in PATH.
pub(crate) fn daemon() -> Result<PathBuf, NotFound> {
    let mut places = beside(&["."]);
    places
        .extend(env::var_os("PATH").iter().flat_map(env::split_paths).filter(|p| p.is_absolute()));
    look("tiermgrd", "TIERMGR_DAEMON", places)
}

/// `libtiermgr_preload.so`: beside this program, else in `../lib` of it.
pub(crate) fn preload() -> Result<PathBuf, NotFound> {
    look("libtiermgr_preload.so", "TIERMGR_PRELOAD", beside(&[".", "../lib", "../lib/tiermgr"]))
}

fn beside(relative: &[&str]) -> Vec<PathBuf> {
    let own = env::current_exe().ok();
    let folder = own.as_deref().and_then(Path::parent);
    relative.iter().filter_map(|part| Some(tidy(&folder?.join(part)))).collect()
}

/// Without `.`, and without `..` where the folder exists: such paths are shown to people.
fn tidy(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.components().collect())
}

fn look(
    file: &'static str,
    variable: &'static str,
    places: Vec<PathBuf>,
) -> Result<PathBuf, NotFound> {
    if let Some(named) = env::var_os(variable).filter(|value| !value.is_empty()) {
        let named = PathBuf::from(named);
        return match named.canonicalize() {
            Ok(path) if path.is_file() => Ok(path),
            _ => Err(NotFound { file, variable, looked_in: Vec::new(), named: Some(named) }),
        };
    }
    match places.iter().map(|place| place.join(file)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => {
            let mut looked_in = places;
            looked_in.truncate(4);
            Err(NotFound { file, variable, looked_in, named: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_place_with_the_file_wins() {
        let here = std::env::temp_dir();
        let error = look("no-such-file-anywhere", "TIERMGR_NO_SUCH_VARIABLE", vec![here.clone()])
            .unwrap_err();
        assert!(error.fix().contains(&here.display().to_string()), "{}", error.fix());
        assert!(error.fix().contains("TIERMGR_NO_SUCH_VARIABLE"));
        let found = look("null", "TIERMGR_NO_SUCH_VARIABLE", vec![here, "/dev".into()]);
        // Not a regular file, so not found either.
        assert!(found.is_err());
        assert_eq!(
            look("self/stat", "TIERMGR_NO_SUCH_VARIABLE", vec!["/proc".into()]),
            Ok("/proc/self/stat".into())
        );
    }
}

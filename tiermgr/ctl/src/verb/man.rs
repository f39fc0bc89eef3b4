//! `tiermgrctl man`.

use super::VerbError;
use crate::cli::{Cli, ManArgs};
use crate::render;
use clap::CommandFactory;
use std::fs;
use std::io;

/// Prints the manual page, or writes all pages.
pub(crate) fn run(args: &ManArgs) -> Result<(), VerbError> {
    let pages = pages()?;
    let Some(dir) = &args.dir else {
        let first = pages.first().map(|(_, page)| page.as_slice()).unwrap_or_default();
        return Ok(render::print(&String::from_utf8_lossy(first))?);
    };
    for (name, page) in pages {
        let path = dir.join(name);
        fs::write(&path, page).map_err(|source| VerbError::File { path, source })?;
    }
    Ok(())
}

/// File names and contents, the page of `tiermgrctl` itself first.
fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut root = Cli::command();
    root.build();
    let mut pages = Vec::new();
    let verbs: Vec<_> =
        root.get_subcommands().filter(|verb| verb.get_name() != "help").cloned().collect();
    for command in std::iter::once(root).chain(verbs) {
        // "tiermgrctl run" is the page tiermgrctl-run(1).
        let name = command.get_bin_name().unwrap_or(command.get_name()).replace(' ', "-");
        let page =
            tiermgr_manual::page(command.display_name(name.clone()).name(name.clone()), "1")?;
        pages.push((format!("{name}.1"), page));
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_a_page() {
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.first(), Some(&"tiermgrctl.1"));
        for verb in Cli::command().get_subcommands() {
            let name = format!("tiermgrctl-{}.1", verb.get_name());
            assert!(names.contains(&name.as_str()), "{name} not in {names:?}");
        }
        for (name, page) in &pages {
            let page = String::from_utf8_lossy(page);
            assert!(page.contains(".SH EXAMPLES") && !page.contains("EXTRA"), "{name}: {page}");
            if name == "tiermgrctl-run.1" {
                assert!(page.contains("[\\-\\-dram SIZE]"), "{page}");
            }
        }
    }
}

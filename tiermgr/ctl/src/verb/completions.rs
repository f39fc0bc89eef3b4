//! `tiermgrctl completions`.

use super::VerbError;
use crate::cli::{Cli, CompletionsArgs};
use crate::render;
use clap::CommandFactory;

/// Prints the completions of a shell.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), VerbError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tiermgrctl", &mut script);
    Ok(render::print(&String::from_utf8_lossy(&script))?)
}

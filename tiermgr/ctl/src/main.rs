//! `tiermgrctl`: runs programs with more memory than DRAM holds, and shows what the daemon does.
//!
//! One file for each verb. A verb fills one structure, which is its `--json` output and from which the
//! text is drawn, so that the two cannot say different things.

#![forbid(unsafe_code)]

mod cli;
mod connect;
mod render;
mod verb;

use clap::{CommandFactory, Parser};
use cli::{Cli, Verb};
use std::io::{self, Write};
use std::process::ExitCode;
use tiermgr_wire::chain;

/// Something did not work.
const EXIT_FAILED: u8 = 1;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // As env(1) and timeout(1) do: 2 may be what the program ended with.
        Err(error) if error.use_stderr() && is_run() => {
            drop(error.print());
            return ExitCode::from(verb::run::EXIT_OURS);
        }
        Err(error) => error.exit(),
    };
    let socket = cli.socket.as_deref();
    let result = match &cli.verb {
        Verb::Run(args) => return ExitCode::from(verb::run::run(socket, args)),
        Verb::Status(args) => verb::status::run(socket, args.json),
        Verb::Tiers(args) => verb::tiers::run(socket, args.json),
        Verb::Regions(args) => verb::regions::run(socket, args.json),
        Verb::Clients(args) => verb::clients::run(socket, args.json),
        Verb::Doctor(args) => match verb::doctor::run(socket, args) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::from(EXIT_FAILED),
            Err(error) => Err(error),
        },
        Verb::Completions(args) => verb::completions::run(args),
        Verb::Man(args) => verb::man::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe has seen enough.
        Err(verb::VerbError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain(&chain(&error));
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// Whether the command line, be it wrong, is one of `run`.
fn is_run() -> bool {
    let parsed = Cli::command().ignore_errors(true).try_get_matches();
    parsed.is_ok_and(|matches| matches.subcommand_name() == Some("run"))
}

/// A line on stderr.
fn complain(text: &str) {
    // With stderr closed there is nobody left to tell.
    drop(writeln!(io::stderr(), "tiermgrctl: {text}"));
}

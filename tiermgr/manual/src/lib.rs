//! Manual pages of `tiermgrctl` and `tiermgrd`, made of the command lines that they describe.
//!
//! `clap_mangen` does the most of it. Here is what it does not: a synopsis with the values of options, and
//! sections of their own for examples and exit statuses, of which it makes one called EXTRA.

#![forbid(unsafe_code)]

use clap::{Arg, ArgAction, Command};
use clap_mangen::Man;
use std::io;

/// The page of `command`, whose name is set, in a section of the manual.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn page(command: Command, section: &str) -> io::Result<Vec<u8>> {
    let synopsis = synopsis(&command);
    let extra = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let has_verbs = command.get_subcommands().any(|verb| !verb.is_hide_set());
    let has_options = command.get_arguments().any(|arg| !arg.is_hide_set());
    let has_version = command.get_version().is_some();
    let man = Man::new(command.override_usage(synopsis)).section(section);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if has_options {
        man.render_options_section(&mut page)?;
    }
    if has_verbs {
        man.render_subcommands_section(&mut page)?;
    }
    page.extend_from_slice(sections(&extra).as_bytes());
    if has_version {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

/// A line of text that no macro is taken from.
#[must_use]
pub fn escape(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    // Only at the beginning of a line these two are not text.
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut line = name.to_owned();
    let shown = || command.get_arguments().filter(|arg| !arg.is_hide_set());
    let options = shown().filter(|arg| !arg.is_positional()).map(option);
    let operands = shown().filter(|arg| arg.is_positional()).map(operand);
    for word in options.chain(operands) {
        line.push(' ');
        line.push_str(&word);
    }
    if command.has_subcommands() {
        line.push_str(" VERB");
    }
    line
}

fn names(arg: &Arg) -> String {
    match arg.get_value_names() {
        Some(names) => names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" "),
        None => arg.get_id().as_str().to_uppercase(),
    }
}

fn option(arg: &Arg) -> String {
    let long = arg.get_long().map(|long| format!("--{long}"));
    let short = arg.get_short().map(|short| format!("-{short}"));
    let mut text = long.or(short).unwrap_or_default();
    if arg.get_action().takes_values() {
        text.push(' ');
        text.push_str(&names(arg));
    }
    let dots = if matches!(arg.get_action(), ArgAction::Append) { "..." } else { "" };
    if arg.is_required_set() { format!("{text}{dots}") } else { format!("[{text}]{dots}") }
}

fn operand(arg: &Arg) -> String {
    let name = names(arg);
    let dots = if matches!(arg.get_action(), ArgAction::Append) { "..." } else { "" };
    if arg.is_required_set() { format!("{name}{dots}") } else { format!("[{name}]{dots}") }
}

/// A line at the margin with a colon begins a section of that name; what is indented is shown as it stands.
fn sections(extra: &str) -> String {
    let mut text = String::new();
    let mut as_it_stands = false;
    let mut stand = |text: &mut String, wanted: bool| {
        if as_it_stands != wanted {
            text.push_str(if wanted { ".nf\n" } else { ".fi\n" });
            as_it_stands = wanted;
        }
    };
    for line in extra.lines() {
        let content = line.trim_start();
        let heading = content.split_once(':').filter(|_| content.len() == line.len());
        if let Some((heading, rest)) = heading {
            stand(&mut text, false);
            text.push_str(&format!(".SH {}\n", heading.to_uppercase()));
            if !rest.trim().is_empty() {
                text.push_str(&format!("{}\n", escape(rest.trim())));
            }
        } else if !content.is_empty() {
            stand(&mut text, content.len() < line.len());
            text.push_str(&format!("{}\n", escape(line.strip_prefix("  ").unwrap_or(line))));
        }
    }
    stand(&mut text, false);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::new("tool")
            .about("Does things")
            .version("7")
            .arg(Arg::new("size").long("size").value_name("SIZE"))
            .arg(Arg::new("hidden").long("hidden").hide(true))
            .arg(Arg::new("json").long("json").action(ArgAction::SetTrue))
            .arg(Arg::new("cmd").value_name("CMD").required(true).action(ArgAction::Append))
            .after_help("Examples:\n  tool -x \\ .y\n  .z\n\nExit status: 0 if it worked.")
    }

    #[test]
    fn a_synopsis_shows_the_values_of_options() {
        assert_eq!(synopsis(&command()), "tool [--size SIZE] [--json] CMD...");
    }

    #[test]
    fn what_follows_the_options_has_sections_of_its_own() {
        let page = String::from_utf8(page(command(), "8").unwrap()).unwrap();
        assert!(page.contains(".TH tool 8"), "{page}");
        assert!(page.contains("\n.SH EXAMPLES\n.nf\ntool \\-x \\e .y\n\\&.z\n.fi\n"), "{page}");
        assert!(page.contains("\n.SH EXIT STATUS\n0 if it worked.\n"), "{page}");
        assert!(!page.contains("EXTRA"), "{page}");
    }
}

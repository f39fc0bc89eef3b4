//! The manual pages of the daemon and of its configuration, each made of what it describes.

use crate::cli::{Cli, ManPage};
use crate::config::Config;
use clap::CommandFactory;
use std::io;
use tiermgr_manual::escape;

/// The text of a page.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn page(page: ManPage) -> io::Result<String> {
    match page {
        ManPage::Daemon => {
            let page = tiermgr_manual::page(Cli::command(), "8")?;
            Ok(String::from_utf8_lossy(&page).into_owned())
        }
        ManPage::Config => Ok(config_page()),
    }
}

/// Of the configuration with all defaults, in which each key has a comment above it.
fn config_page() -> String {
    let mut text = ".TH tiermgrd.toml 5\n.SH NAME\ntiermgrd.toml \\- configuration of tiermgrd\n\
                    .SH DESCRIPTION\nTOML. tiermgrd(8) reads /etc/tiermgr/tiermgrd.toml where it exists, or the \
                    file that \\-\\-config names. Each key may be left out, and is shown here with what then holds. \
                    A key that is not known is an error.\n.SH KEYS\n"
        .to_owned();
    let mut comment = String::new();
    for line in Config::default().render().lines() {
        if let Some(words) = line.strip_prefix("# ") {
            comment.push_str(&escape(words));
            comment.push('\n');
        } else if let Some(table) = line.strip_prefix('[') {
            let name = table.trim_end_matches(']');
            text.push_str(&format!(".SH KEYS OF THE TABLE [{name}]\n"));
        } else if let Some((key, value)) = line.split_once(" = ") {
            text.push_str(&format!(".TP\n\\fB{}\\fR = {}\n{comment}", escape(key), escape(value)));
            comment.clear();
        }
    }
    text.push_str(
        ".SH EXAMPLES\n.nf\ndram = \"64GiB\"\nsocket_group = \"tiermgr\"\n\n[store]\n\
         path = \"/dev/nvme1n1\"\nsize = \"all\"\n.fi\n.SH SEE ALSO\ntiermgrd(8), tiermgrctl(1)\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use std::path::Path;

    #[test]
    fn every_key_is_described() {
        let text = page(ManPage::Config).unwrap();
        for key in ["socket", "socket_group", "dram", "families_per_uid", "path", "create"] {
            assert!(text.contains(&format!("\n\\fB{key}\\fR = ")), "{key}: {text}");
        }
        let example = text.split(".nf\n").nth(1).unwrap().split(".fi").next().unwrap();
        Config::parse(example, Path::new("example")).unwrap();
    }

    #[test]
    fn every_page_can_be_asked_for_and_has_examples() {
        for name in ManPage::value_variants() {
            assert!(page(*name).unwrap().contains(".SH EXAMPLES\n"), "{name:?}");
        }
    }
}

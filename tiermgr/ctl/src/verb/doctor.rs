//! `tiermgrctl doctor`: what this machine offers, what it lacks, and how to get that.
//!
//! Looks by trying wherever trying changes nothing: a feature counts as present if it works, whatever
//! the version says.

mod checks;
mod store;

use super::VerbError;
use crate::cli::DoctorArgs;
use crate::render;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// How a finding bears on whether tiermgr can work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// As it should be.
    Ok,
    /// Works, but something is slower or riskier than it need be.
    Warn,
    /// Does not work.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What was looked at.
    pub(crate) name: &'static str,
    /// How it is.
    pub(crate) state: State,
    /// What was found.
    pub(crate) detail: String,
    /// What to do, where something is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(crate) fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, state: State::Ok, detail: detail.into(), fix: None }
    }

    pub(crate) fn warn(
        name: &'static str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self { name, state: State::Warn, detail: detail.into(), fix: Some(fix.into()) }
    }

    pub(crate) fn fail(
        name: &'static str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self { name, state: State::Fail, detail: detail.into(), fix: Some(fix.into()) }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    /// Nothing fails.
    ok: bool,
    findings: Vec<Finding>,
}

/// Looks and prints. `true` if tiermgr can work here.
pub(crate) fn run(socket: Option<&Path>, args: &DoctorArgs) -> Result<bool, VerbError> {
    let mut findings = checks::machine();
    if let Some(named) = &args.nvme {
        findings.push(store::check(named));
    }
    findings.extend(checks::installation(socket));
    if !nix::unistd::geteuid().is_root() {
        spare_users(&mut findings);
    }
    let ok = findings.iter().all(|finding| finding.state != State::Fail);
    let report = Report { ok, findings };
    if args.json {
        render::json(&report)?;
    } else {
        render::print(&text(&report))?;
    }
    Ok(ok)
}

/// Programs of a system's daemon need no rights. What a user cannot do alone is a failure only where there is
/// no such daemon, and then it is that which fails.
fn spare_users(findings: &mut [Finding]) {
    let needs_root = findings.iter().any(|f| f.name == "userfaultfd" && f.state == State::Fail);
    for finding in findings {
        match finding.name {
            "userfaultfd" if needs_root => {
                *finding = Finding::ok(
                    "userfaultfd",
                    "not for this user, and programs of a system's daemon do not need it \
                     (`sudo tiermgrctl doctor` checks the kernel)",
                );
            }
            "daemon" if needs_root && finding.state != State::Ok => finding.state = State::Fail,
            _ => {}
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let width = report.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    for Finding { name, state, detail, fix } in &report.findings {
        let mark = match state {
            State::Ok => "ok  ",
            State::Warn => "warn",
            State::Fail => "FAIL",
        };
        // Writing to a string cannot fail.
        let _infallible = writeln!(text, "{mark}  {name:<width$}  {detail}");
        if let Some(fix) = fix {
            let _infallible = writeln!(text, "      {:<width$}  -> {fix}", "");
        }
    }
    text.push_str(if report.ok {
        "tiermgr can work here.\n"
    } else {
        "tiermgr cannot work here until what is marked FAIL is mended.\n"
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_in_order_comes_with_a_fix() {
        for finding in checks::machine().into_iter().chain(checks::installation(None)) {
            assert!(!finding.detail.is_empty(), "{finding:?}");
            assert_eq!(finding.fix.is_none(), finding.state == State::Ok, "{finding:?}");
        }
    }

    #[test]
    fn a_user_needs_a_daemon_and_not_the_kernel() {
        let forbidden = Finding::fail("userfaultfd", "permission denied", "sudo");
        for (daemon, state) in [
            (Finding::ok("daemon", "serves"), State::Ok),
            (Finding::warn("daemon", "not open to you", "join"), State::Fail),
        ] {
            let mut findings = [forbidden.clone(), daemon];
            spare_users(&mut findings);
            assert_eq!(findings.map(|finding| finding.state), [State::Ok, state]);
        }
        // Who may do without a daemon is not failed for want of one.
        let mut findings = [Finding::ok("userfaultfd", ""), Finding::warn("daemon", "", "")];
        spare_users(&mut findings);
        assert_eq!(findings[1].state, State::Warn);
    }

    #[test]
    fn the_text_shows_each_fix_below_its_finding() {
        let report = Report {
            ok: false,
            findings: vec![
                Finding::ok("kernel", "6.18"),
                Finding::fail("userfaultfd", "no device", "modprobe"),
            ],
        };
        let text = text(&report);
        assert!(text.contains("FAIL  userfaultfd  no device\n"), "{text}");
        assert!(text.contains("-> modprobe\n"), "{text}");
        assert!(text.contains("cannot work"), "{text}");
    }
}

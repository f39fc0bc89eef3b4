//! Which programs of a process tree are managed, and how: the file of `tiermgrctl run --only`, and what
//! `TIERMGR_RULES` names or holds.
//!
//! A line is a rule: a pattern, and behind it what is to be done. The first rule whose pattern fits a
//! program decides; a program that no pattern fits is not managed.
//!
//! ```text
//! # A build: the compilers proper, and nothing else of the tree.
//! cc1*              small
//! rustc             small min-size=64K
//! /opt/*/bin/solve
//! as                off
//! ```
//!
//! A pattern without a slash is about names, one with a slash about whole paths; `*` stands for any
//! characters, slashes too, and `?` for one; brackets are refused, since whoever writes them means a choice. It fits a program if it fits the file that runs, or the name
//! by which that was started: of a script, and where a link leads to the program, these are two.

use crate::BLOCK_BYTES_MIN;
use crate::size::{Size, SizeError};
use std::ffi::OsStr;

/// What to do with the programs that a pattern fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pattern: String,
    /// False: such a program runs as if this library were not there.
    pub is_managed: bool,
    /// Whether small allocations are managed; `None`: as it is for all programs.
    pub small: Option<bool>,
    /// Whether mappings are managed; `None`: as it is for all programs.
    pub mmap: Option<bool>,
    /// Least managed size; `None`: as it is for all programs.
    pub min_size: Option<Size>,
}

/// The rules of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// A line that is no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct RuleError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub kind: RuleErrorKind,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleErrorKind {
    /// An option that is not known.
    #[error(
        "`{0}` is not known; behind a pattern stand off, small, no-small, mmap, no-mmap and min-size=SIZE"
    )]
    Unknown(String),
    /// `off` beside others.
    #[error("`off` stands alone: what is not managed has no options")]
    OffWithOptions,
    /// A size that is none.
    #[error("min-size: {0}")]
    Size(SizeError),
    /// A size that is too small.
    #[error("min-size={0} is too little: the least is {least}", least = Size(BLOCK_BYTES_MIN))]
    TooLittle(Size),
    /// A pattern that fits no path.
    #[error("`{0}` has a slash, and so is about whole paths: it begins with `/` or `*`")]
    Relative(String),
    /// Taken as itself it would fit nothing, and nobody would be told.
    #[error(
        "`{0}` has brackets, which patterns do not know: `*` stands for any characters, `?` for one"
    )]
    Bracket(String),
    /// Two options of which only one can hold.
    #[error("`{0}` contradicts what stands before it")]
    Contradiction(String),
    /// A rule that decides nothing.
    #[error("no program comes to this rule: `*` above it fits all")]
    Unreachable,
    /// A file without a rule.
    #[error("there is no rule here, so that nothing would be managed")]
    Empty,
    /// A file whose rules leave everything out.
    #[error("every rule here says `off`, so that nothing would be managed")]
    AllOff,
}

/// Whether `TIERMGR_RULES` holds rules in place of a file's name: every line of theirs ends. A program that has
/// given its rights up may not be able to read a file.
#[must_use]
pub fn is_text(given: &OsStr) -> bool {
    given.as_encoded_bytes().contains(&b'\n')
}

impl Rules {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`RuleError`], for the first line that is wrong.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let mut rules: Vec<Rule> = Vec::new();
        let mut last = 1;
        for (line, text) in (1..).zip(text.lines()) {
            last = line;
            let wrong = |kind| RuleError { line, kind };
            let mut words = text.split_whitespace().take_while(|word| !word.starts_with('#'));
            let Some(pattern) = words.next() else { continue };
            if rules.iter().any(|rule| rule.pattern == "*") {
                return Err(wrong(RuleErrorKind::Unreachable));
            }
            rules.push(Rule::parse(pattern, words).map_err(wrong)?);
        }
        if rules.is_empty() {
            return Err(RuleError { line: last, kind: RuleErrorKind::Empty });
        }
        if !rules.iter().any(|rule| rule.is_managed) {
            return Err(RuleError { line: last, kind: RuleErrorKind::AllOff });
        }
        Ok(Self(rules))
    }

    /// The rule for a program of which `names` are known: the path of its file, and the name by which it
    /// was started.
    #[must_use]
    pub fn of<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<&Rule> {
        self.0.iter().find(|rule| names.clone().any(|name| rule.fits(name)))
    }
}

impl Rule {
    fn parse<'a>(
        pattern: &str,
        words: impl Iterator<Item = &'a str>,
    ) -> Result<Self, RuleErrorKind> {
        if pattern.contains('/') && !pattern.starts_with(['/', '*']) {
            return Err(RuleErrorKind::Relative(pattern.to_owned()));
        }
        if pattern.contains(['[', ']']) {
            return Err(RuleErrorKind::Bracket(pattern.to_owned()));
        }
        let mut rule = Self {
            pattern: pattern.to_owned(),
            is_managed: true,
            small: None,
            mmap: None,
            min_size: None,
        };
        for word in words {
            let is_consistent = match word.split_once('=') {
                None if word == "off" => {
                    rule.is_managed = false;
                    true
                }
                None if word == "small" => decide(&mut rule.small, true),
                None if word == "no-small" => decide(&mut rule.small, false),
                None if word == "mmap" => decide(&mut rule.mmap, true),
                None if word == "no-mmap" => decide(&mut rule.mmap, false),
                Some(("min-size", size)) => {
                    let size: Size = size.parse().map_err(RuleErrorKind::Size)?;
                    if size.0 < BLOCK_BYTES_MIN {
                        return Err(RuleErrorKind::TooLittle(size));
                    }
                    decide(&mut rule.min_size, size)
                }
                _ => return Err(RuleErrorKind::Unknown(word.to_owned())),
            };
            if !is_consistent {
                return Err(RuleErrorKind::Contradiction(word.to_owned()));
            }
        }
        let has_options = rule.small.is_some() || rule.mmap.is_some() || rule.min_size.is_some();
        if !rule.is_managed && has_options {
            return Err(RuleErrorKind::OffWithOptions);
        }
        Ok(rule)
    }

    fn fits(&self, name: &str) -> bool {
        let name = match name.rsplit_once('/') {
            Some((_, last)) if !self.pattern.contains('/') => last,
            _ => name,
        };
        fits(self.pattern.as_bytes(), name.as_bytes())
    }
}

/// Sets an option. False: it was set to something else.
fn decide<T: Copy + PartialEq>(option: &mut Option<T>, value: T) -> bool {
    *option.get_or_insert(value) == value
}

/// Whether a pattern with `*` and `?` fits all of `text`.
fn fits(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Behind the last star: where the pattern goes on, and how far the star reaches.
    let mut star = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                star = Some((p, t));
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((after, reach)) => {
                    *reach += 1;
                    (p, t) = (*after, *reach);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, wanted) in [
            ("cc1", "cc1", true),
            ("cc1", "cc1plus", false),
            ("cc1*", "cc1plus", true),
            ("*1*s", "cc1plus", true),
            ("*", "", true),
            ("?", "", false),
            ("c?1", "cc1", true),
            ("*ab", "aab", true),
            ("*a*b*c", "xxaxxbxxbxc", true),
            ("*a*b*c", "xxaxxbxxbx", false),
            ("/usr/*/cc1", "/usr/lib/gcc/cc1", true),
        ] {
            assert_eq!(fits(pattern.as_bytes(), text.as_bytes()), wanted, "{pattern} {text}");
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let text = "# comment\n\ncc1plus off # not this one\ncc1* small no-mmap min-size=64K\n/opt/* mmap\n";
        let rules = Rules::parse(text).unwrap();
        let of = |names: &[&'static str]| rules.of(names.iter().copied()).cloned();
        assert!(!of(&["/usr/lib/cc1plus"]).unwrap().is_managed);
        let cc1 = of(&["/usr/lib/cc1"]).unwrap();
        assert_eq!(
            (cc1.is_managed, cc1.small, cc1.mmap, cc1.min_size),
            (true, Some(true), Some(false), Some(Size(65536)))
        );
        let opt = of(&["/opt/x/y"]).unwrap();
        assert_eq!((opt.small, opt.mmap), (None, Some(true)));
        assert_eq!(of(&["/bin/sh"]), None);
        // Of a script the interpreter runs, but it was started by its own name.
        assert!(of(&["/usr/bin/python3", "./cc1.py"]).unwrap().is_managed);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line, words) in [
            ("a\nb smal\n", 2, "`smal`"),
            ("a off small\n", 1, "alone"),
            ("a off no-mmap\n", 1, "alone"),
            ("a min-size=1Q\n", 1, "`Q`"),
            ("b\na min-size=1K\n", 2, "too little"),
            ("a small=1\n", 1, "`small=1`"),
            ("bin/a\n", 1, "whole paths"),
            ("* off\na\n", 2, "no program"),
            ("# nothing\n\n", 2, "no rule"),
            ("", 1, "no rule"),
            ("b\n[ab small\n", 2, "`[ab`"),
            ("[ab]c\n", 1, "brackets"),
            ("b\nc1 small no-small\n", 2, "`no-small`"),
            ("c1 no-mmap min-size=1M mmap\n", 1, "`mmap`"),
            ("c1 min-size=1M min-size=2M\n", 1, "`min-size=2M`"),
            ("# none\na off\nb off\n\n", 4, "every rule here says `off`"),
            ("* off\n", 1, "nothing would be managed"),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

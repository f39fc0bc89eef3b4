//! How things are printed: tables, sizes and JSON.

use serde::Serialize;
use std::io::{self, Write};
use tiermgr_wire::size::Size;

/// `value` as JSON, for scripts.
pub(crate) fn json(value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// `text` to stdout.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// A size for people.
pub(crate) fn bytes(bytes: u64) -> String {
    Size(bytes).rounded()
}

/// So many pages, as a size for people.
pub(crate) fn pages(pages: u64) -> String {
    bytes(pages.saturating_mul(tiermgr_sys::process::page_size()))
}

/// A count with thousands apart.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Whole seconds as `3 d 04:05:06`, the days only where there are some.
pub(crate) fn duration(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    if days > 0 { format!("{days} d {clock}") } else { clock }
}

/// A table with a line of headings. Columns whose heading begins with `>` are set to the right.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table without rows.
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self {
            right: headings.iter().map(|heading| heading.starts_with('>')).collect(),
            rows: vec![headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect()],
        }
    }

    /// Appends a row, with a cell for each heading.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// As text, without blanks at the ends of lines.
    pub(crate) fn text(&self) -> String {
        let width_of = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width_of).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                if *right {
                    line.push_str(&format!("{cell:>width$}"));
                } else {
                    line.push_str(&format!("{cell:<width$}"));
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(&["name", ">bytes", "state"]);
        table.row(vec!["dram".into(), "1".into(), "ok".into()]);
        table.row(vec!["ä".into(), "12345678".into(), String::new()]);
        assert_eq!(table.text(), "name     bytes  state\ndram         1  ok\nä     12345678\n");
    }

    #[test]
    fn numbers_are_for_people() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(duration(59), "00:00:59");
        assert_eq!(duration(86_400 * 3 + 3661), "3 d 01:01:01");
    }
}

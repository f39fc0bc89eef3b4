//! Rules about the repository itself. Each test is one rule; its message says what to do.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot read has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use toml::Table;

/// Who may import what of ours. Whatever is not listed imports nothing of ours.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("tiermgr-core", &[]),
    ("tiermgr-sys", &[]),
    ("tiermgr-wire", &["tiermgr-core"]),
    ("tiermgr-manual", &[]),
    ("tiermgr-engine", &["tiermgr-core", "tiermgr-sys", "tiermgr-wire"]),
    // `sys` for sockets, the keeper and the probes; never for a client's memory.
    (
        "tiermgr-daemon",
        &["tiermgr-core", "tiermgr-sys", "tiermgr-wire", "tiermgr-manual", "tiermgr-engine"],
    ),
    // `sys` for its socket and for what `doctor` probes.
    ("tiermgr-ctl", &["tiermgr-core", "tiermgr-sys", "tiermgr-wire", "tiermgr-manual"]),
    ("tiermgr-ffi", &["tiermgr-core", "tiermgr-sys", "tiermgr-wire"]),
    ("tiermgr-preload", &["tiermgr-ffi"]),
];

/// Packages of tests, which may import anything, and which nothing imports but they themselves.
const TESTS: &[&str] = &["tiermgr-tests", "tiermgr-model", "tiermgr-sim"];

/// Where `unsafe` may stand, tests apart. Everything else is safe Rust.
const UNSAFE_IN: &[&str] = &[
    "tiermgr/sys/",
    "tiermgr/engine/src/linux/",
    "tiermgr/engine/src/staging.rs",
    "ffi/src/",
    "ffi/preload/",
    "tests/",
];

/// Packages whose root must say `#![forbid(unsafe_code)]`.
const FORBID_UNSAFE: &[&str] =
    &["tiermgr/core", "tiermgr/wire", "tiermgr/manual", "tiermgr/ctl", "tiermgr/daemon"];

const LINES_MAX: usize = 1000;
const LINES_WITHOUT_REASON_MAX: usize = 700;
/// A file between the two limits says these words in its header, and then why.
const REASON: &str = "longer than 700 lines because";

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests lie in the repository").to_path_buf()
}

/// All files of the repository, build products left out, as paths relative to the root.
fn files() -> Vec<PathBuf> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let built = ["target", "dist", "build", ".git", "__pycache__", ".hypothesis"];
            let built = built.contains(&name.as_str())
                || name.starts_with(".pytest")
                || name.ends_with(".egg-info")
                || name.ends_with(".snap.new");
            if built {
                continue;
            }
            // A link is somebody's way in; what it points at is not ours to judge.
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                walk(root, &entry.path(), found);
            } else if kind.is_file() {
                found.push(entry.path().strip_prefix(root).unwrap().to_path_buf());
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), &root(), &mut found);
    found.sort();
    found
}

/// Text files with one of these endings, and what is in them.
fn texts(endings: &[&str]) -> Vec<(PathBuf, String)> {
    files()
        .into_iter()
        .filter(|path| {
            path.extension().is_some_and(|e| endings.contains(&e.to_str().unwrap_or_default()))
        })
        .map(|path| {
            let text = read(&path);
            (path, text)
        })
        .collect()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
}

fn manifest(folder: &str) -> Table {
    read(Path::new(folder).join("Cargo.toml")).parse().unwrap()
}

fn members() -> Vec<String> {
    let workspace = manifest(".");
    let members = workspace["workspace"]["members"].as_array().unwrap();
    members.iter().map(|member| member.as_str().unwrap().to_owned()).collect()
}

fn package_name(manifest: &Table) -> String {
    manifest["package"]["name"].as_str().unwrap().to_owned()
}

/// Names of direct dependencies; those for tests only if `with_dev`.
fn dependencies(manifest: &Table, with_dev: bool) -> BTreeSet<String> {
    let mut tables = vec![manifest.get("dependencies"), manifest.get("build-dependencies")];
    if with_dev {
        tables.push(manifest.get("dev-dependencies"));
    }
    let targets = manifest.get("target").and_then(|t| t.as_table());
    for target in targets.into_iter().flat_map(Table::values) {
        tables.push(target.get("dependencies"));
    }
    let tables = tables.into_iter().flatten().filter_map(|table| table.as_table());
    tables.flat_map(|table| table.keys().cloned()).collect()
}

fn fail_if_any(found: &[String], rule: &str) {
    assert!(found.is_empty(), "{rule}\n  {}", found.join("\n  "));
}

#[test]
fn imports_point_one_way() {
    let allowed: BTreeMap<_, _> = MAY_IMPORT.iter().copied().collect();
    let mut found = Vec::new();
    for member in members() {
        let manifest = manifest(&member);
        let name = package_name(&manifest);
        if TESTS.contains(&name.as_str()) {
            continue;
        }
        let allowed = allowed.get(name.as_str()).copied().unwrap_or_default();
        for dependency in dependencies(&manifest, false) {
            if dependency.starts_with("tiermgr-") && !allowed.contains(&dependency.as_str()) {
                found.push(format!("{name} imports {dependency}"));
            }
        }
    }
    fail_if_any(&found, "imports that MAY_IMPORT does not allow:");
}

#[test]
fn every_member_takes_the_lints_of_the_workspace() {
    let mut found = members();
    found.retain(|member| {
        let manifest = manifest(member);
        let taken = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        taken.and_then(toml::Value::as_bool) != Some(true)
    });
    fail_if_any(&found, "members without `[lints] workspace = true`:");
}

#[test]
fn the_oldest_compiler_is_the_same_everywhere() {
    let workspace: Table = read("Cargo.toml").parse().unwrap();
    let oldest = workspace["workspace"]["package"]["rust-version"].as_str().unwrap().to_owned();
    let minor = oldest.strip_prefix("1.").unwrap();
    let mut wrong = Vec::new();
    if !read("README.md").contains(&format!("Rust {oldest} or later")) {
        wrong.push(format!("README.md does not ask for Rust {oldest}"));
    }
    if !read("scripts/_lib.sh").contains(&format!("\nRUSTC_MINOR_MIN={minor}\n")) {
        wrong.push(format!("scripts/_lib.sh does not check for 1.{minor}"));
    }
    for member in members() {
        let version = manifest(&member)["package"].as_table().unwrap().get("rust-version").cloned();
        if version.is_none_or(|version| version.get("workspace").is_none()) {
            wrong.push(format!("{member}/Cargo.toml lacks `rust-version.workspace = true`"));
        }
    }
    fail_if_any(
        &wrong,
        "`rust-version` of the workspace is what the code needs, and what users are told",
    );
}

#[test]
fn no_file_is_too_long() {
    let mut found = Vec::new();
    for (path, text) in texts(&["rs", "py", "c", "h", "cpp"]) {
        let lines = text.lines().count();
        let has_reason = text.lines().take(30).any(|line| line.contains(REASON));
        if lines > LINES_MAX || (lines > LINES_WITHOUT_REASON_MAX && !has_reason) {
            found.push(format!("{}: {lines} lines", path.display()));
        }
    }
    fail_if_any(
        &found,
        &format!(
            "files over {LINES_MAX} lines, or over {LINES_WITHOUT_REASON_MAX} with no \
             \"{REASON} ...\" in the header:"
        ),
    );
}

/// The line without strings' contents and without a trailing comment: enough to look for a keyword.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut in_string = false;
    let mut previous = ' ';
    for (at, c) in line.char_indices() {
        if c == '"' && previous != '\\' && previous != '\'' {
            in_string = !in_string;
        } else if !in_string {
            if line[at..].starts_with("//") {
                break;
            }
            code.push(c);
        }
        previous = if previous == '\\' && c == '\\' { ' ' } else { c };
    }
    code
}

/// What follows the keyword `unsafe` in a line of code, if it is there.
fn after_unsafe(code: &str) -> Option<&str> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut from = 0;
    while let Some(at) = code[from..].find("unsafe") {
        let (start, end) = (from + at, from + at + "unsafe".len());
        let before = code[..start].chars().next_back();
        let after = &code[end..];
        if !before.is_some_and(word) && !after.starts_with(word) {
            return Some(after.trim_start());
        }
        from = end;
    }
    None
}

#[test]
fn unsafe_code_stands_only_where_the_layout_allows_it() {
    let mut found = Vec::new();
    for (path, text) in texts(&["rs"]) {
        let path = path.display().to_string();
        let is_test = path.contains("/tests/");
        if is_test || UNSAFE_IN.iter().any(|prefix| path.starts_with(prefix)) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            if after_unsafe(&code_of(line)).is_some() {
                found.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    fail_if_any(&found, "unsafe code outside UNSAFE_IN:");
}

#[test]
fn safe_packages_forbid_unsafe_code() {
    let mut found = Vec::new();
    for member in FORBID_UNSAFE {
        for name in ["lib.rs", "main.rs"] {
            let path = Path::new(member).join("src").join(name);
            if root().join(&path).exists() && !read(&path).contains("#![forbid(unsafe_code)]") {
                found.push(path.display().to_string());
            }
        }
    }
    fail_if_any(&found, "crate roots without `#![forbid(unsafe_code)]`:");
}

#[test]
fn every_unsafe_block_and_impl_has_a_proof() {
    let mut found = Vec::new();
    for (path, text) in texts(&["rs"]) {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = code_of(line);
            let Some(after) = after_unsafe(&code) else { continue };
            // A declaration (`unsafe fn`, `unsafe extern`, `unsafe trait`) is proven by its callers.
            let needs_proof =
                after.starts_with('{') || after.starts_with("impl") || after.is_empty();
            let near = lines[number.saturating_sub(30)..=number].iter().rev();
            // Up to the blank line or the end of the statement before.
            let has_proof = near
                .take_while(|line| !line.trim().is_empty())
                .any(|line| line.contains("SAFETY:"));
            if needs_proof && !has_proof {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    fail_if_any(&found, "unsafe blocks or impls with no `// SAFETY:` above them:");
}

/// Names of the functions that the header declares.
fn header_functions(header: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in header.split("TIERMGR_API ").skip(1) {
        let Some((head, _)) = part.split_once('(') else { continue };
        let name = head.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next();
        found.extend(name.filter(|name| name.starts_with("tiermgr_")).map(str::to_owned));
    }
    found
}

#[test]
fn header_and_symbol_list_name_the_same_functions() {
    let header = header_functions(&read("include/tiermgr.h"));
    let map = read("ffi/tiermgr.map");
    let symbols: BTreeSet<String> = map
        .split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("tiermgr_"))
        .map(str::to_owned)
        .collect();
    assert!(header.len() > 10, "the header was not understood: {header:?}");
    assert_eq!(header, symbols, "include/tiermgr.h (left) and ffi/tiermgr.map (right) differ");
}

#[test]
fn nothing_names_the_place_where_it_was_written() {
    // Put together here, so that this file does not contain them.
    let words: Vec<String> = [
        ["/wo", "rk/"],
        ["/t", "mp/"],
        ["TO", "DO"],
        ["FIX", "ME"],
        ["XX", "X"],
        ["to", "do!("],
        ["unimple", "mented!("],
        ["db", "g!("],
        ["crates", ".io"],
        ["pypi", ".org"],
        ["deb.deb", "ian.org"],
        ["as reque", "sted"],
        ["assis", "tant"],
        ["chat", "gpt"],
    ]
    .iter()
    .map(|halves| halves.concat())
    .collect();
    let endings = ["rs", "py", "c", "h", "cpp", "md", "toml", "map", "pyi", "json", "service"];
    let mut all = texts(&endings);
    let scripts = files().into_iter().filter(|path| path.extension().is_none());
    all.extend(scripts.filter(|path| path.starts_with("scripts") || path.starts_with(".ci")).map(
        |path| {
            let text = read(&path);
            (path, text)
        },
    ));
    let mut found = Vec::new();
    for (path, text) in all {
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                found.push(format!("{}:{}: \"{word}\"", path.display(), number + 1));
            }
        }
    }
    fail_if_any(&found, "words that have no place in the repository:");
}

#[test]
fn lints_are_lifted_for_one_item_and_with_a_reason() {
    let blanket = ["#![al", "low("].concat();
    let ignored = ["#[ig", "nore]"].concat();
    let mut found = Vec::new();
    for (path, text) in texts(&["rs"]) {
        for (number, line) in text.lines().enumerate() {
            if line.contains(&blanket) || line.contains(&ignored) {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    fail_if_any(&found, "blanket allows, and tests ignored without a reason:");
}

/// First cells of the table rows below the heading `heading` of dependencies.md.
fn documented(heading: &str) -> BTreeSet<String> {
    let text = read("tiermgr/docs/dependencies.md");
    let part = text
        .split("\n## ")
        .find(|part| part.starts_with(heading))
        .unwrap_or_else(|| panic!("tiermgr/docs/dependencies.md has no part \"## {heading}\""));
    part.lines()
        .filter_map(|line| {
            line.strip_prefix("| `")?.split_once('`').map(|(name, _)| name.to_owned())
        })
        .collect()
}

#[test]
fn every_dependency_is_documented_and_used() {
    let mut used = BTreeSet::new();
    for member in members() {
        let names = dependencies(&manifest(&member), true);
        used.extend(names.into_iter().filter(|name| !name.starts_with("tiermgr-")));
    }
    assert_eq!(
        used,
        documented("Used"),
        "direct dependencies (left) and the part \"Used\" of tiermgr/docs/dependencies.md (right)"
    );
    let shared = manifest(".");
    let shared = shared["workspace"]["dependencies"].as_table().unwrap();
    let unused: Vec<String> = shared
        .keys()
        .filter(|name| !name.starts_with("tiermgr-") && !used.contains(*name))
        .cloned()
        .collect();
    fail_if_any(&unused, "dependencies of the workspace that no member uses:");
}

#[test]
fn scripts_run_and_stop_at_the_first_error() {
    let mut found = Vec::new();
    let scripts = files().into_iter().filter(|path| {
        path.starts_with("scripts")
            || path.starts_with(".ci")
            || path.extension().is_some_and(|e| e == "sh")
    });
    for path in scripts {
        let text = read(&path);
        let name = path.display();
        if fs::metadata(root().join(&path)).unwrap().permissions().mode() & 0o111 != 0o111 {
            found.push(format!("{name} is not executable"));
        }
        if text.starts_with("#!/usr/bin/env python3\n") {
            continue;
        }
        if !text.starts_with("#!/usr/bin/env bash\n") {
            found.push(format!("{name} does not start with #!/usr/bin/env bash"));
        }
        let strict = ["set -euo pipefail", "source \"$(dirname \"$0\")/_lib.sh\""];
        if !text.lines().take(20).any(|line| strict.contains(&line.trim())) {
            found.push(format!("{name} neither says {} nor sources _lib.sh", strict[0]));
        }
    }
    fail_if_any(&found, "scripts:");
}

#[test]
fn the_readme_begins_with_the_demo_and_the_tests() {
    let readme = read("README.md");
    let commands: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter_map(|line| line.split_whitespace().next())
        .take(2)
        .collect();
    assert_eq!(commands, ["scripts/demo", "scripts/test"], "first two commands of README.md");
}

#[test]
fn documents_name_files_that_exist() {
    let mut found = Vec::new();
    for (path, text) in texts(&["md"]) {
        for quoted in text.split('`').skip(1).step_by(2) {
            let word = quoted.split([' ', ':']).next().unwrap_or_default();
            let ours = ["tests/", "tiermgr/", "ffi/", "scripts/", "include/", ".ci/"];
            let is_pattern = word.contains(['*', '{', '<']);
            if ours.iter().any(|start| word.starts_with(start))
                && !is_pattern
                && !root().join(word).exists()
            {
                found.push(format!("{}: `{quoted}`", path.display()));
            }
        }
    }
    fail_if_any(&found, "documents that name a file which is not there:");
}

#[test]
fn what_must_stand_at_the_root_does() {
    let wanted = [
        "Cargo.lock",
        "Cargo.toml",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        ".ci/run",
        "scripts/check",
        "scripts/demo",
        "scripts/setup",
        "scripts/test",
    ];
    let found: Vec<String> = wanted
        .iter()
        .filter(|name| fs::metadata(root().join(name)).map_or(true, |file| file.len() == 0))
        .map(|name| (*name).to_owned())
        .collect();
    fail_if_any(&found, "missing or empty:");
}

#[test]
fn the_keyword_finder_finds_keywords_only() {
    assert_eq!(after_unsafe(&code_of("let x = unsafe { f() };")), Some("{ f() };"));
    assert_eq!(after_unsafe(&code_of("// unsafe { f() }")), None);
    assert_eq!(after_unsafe(&code_of("#![forbid(unsafe_code)]")), None);
    assert_eq!(after_unsafe(&code_of("say(\"unsafe { \");")), None);
    assert_eq!(
        after_unsafe(&code_of("unsafe_op(); unsafe impl Send for X {}")),
        Some("impl Send for X {}")
    );
}

//! The table of doors: a file imports from its own or lower floors only.
//!
//! A text scan, not a compiler: comments, strings and `#[cfg(test)]` items are taken out, then
//! every `crate::<room>` and every `super::` chain that reaches the crate's root is looked up in
//! the table. Before anything is judged it is asserted how much was looked at.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every room and its floor. A room that is missing here fails the test: give it a floor.
const FLOORS: [(&str, u8); 18] = [
    ("cache", 0),
    ("error", 0),
    ("ids", 0),
    ("clock", 0),
    ("event", 0),
    ("hash", 1),
    ("codec", 1),
    ("stream", 1),
    ("index", 1),
    ("load", 1),
    ("policy", 1),
    ("fair", 1),
    ("text", 1),
    ("router", 1),
    ("catalog", 1),
    ("select", 1),
    ("http", 2),
    ("py", 3),
];

/// Crates that live on one floor and above: `(crate, lowest floor)`.
const FOREIGN: [(&str, u8); 7] = [
    ("tokio", 2),
    ("axum", 2),
    ("hyper", 2),
    ("hyper_util", 2),
    ("http_body", 2),
    ("http_body_util", 2),
    ("pyo3", 3),
];

/// Rooms that may ask the machine for the time.
const CLOCK_ROOMS: [&str; 3] = ["clock", "http", "py"];

/// Files elsewhere that may, and why.
const CLOCK_EXCEPTIONS: [(&str, &str); 2] = [
    ("catalog/command.rs", "the deadline of a blocking wait; nothing is decided by it"),
    ("text/template.rs", "templates print today's date; tests replace the clock"),
];

/// One source file, comments, strings and test items taken out.
struct Source {
    /// Path within `rust/src`, with `/`.
    path: String,
    room: String,
    /// Modules from the crate's root; `http/frontend/app.rs` has 3.
    depth: usize,
    /// `mod name;` declarations, those of tests included.
    declared: Vec<String>,
    /// Of these, the ones that only tests compile.
    declared_for_tests: Vec<String>,
    code: String,
}

fn root() -> PathBuf {
    PathBuf::from("rust/src")
}

fn sources() -> Vec<Source> {
    let (root, mut paths) = (root(), Vec::new());
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    let name = |path: &Path| {
        let parts = path.strip_prefix(&root).unwrap().components();
        parts.map(|part| part.as_os_str().to_str().unwrap()).collect::<Vec<_>>().join("/")
    };
    paths.iter().map(|path| read(&name(path), &fs::read_to_string(path).unwrap())).collect()
}

fn read(path: &str, text: &str) -> Source {
    let whole = without_comments_and_strings(text);
    let (code, tests) = without_test_items(&whole);
    let module = path.trim_end_matches(".rs").trim_end_matches("/mod");
    Source {
        path: path.to_owned(),
        room: module.split('/').next().unwrap().to_owned(),
        depth: module.split('/').count(),
        declared: declarations(&whole),
        declared_for_tests: declarations(&tests),
        code,
    }
}

/// Replaces comments, strings and character literals by spaces.
fn without_comments_and_strings(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let end = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if rest.starts_with('"') {
            quoted(rest, 1)
        } else if let Some(hashes) = raw_string(text, at) {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = rest.find('"').unwrap() + 1;
            rest[open..].find(&close).map_or(rest.len(), |end| open + end + close.len())
        } else if rest.starts_with('\'') && is_char_literal(rest) {
            character(rest)
        } else {
            let next = rest.chars().next().unwrap();
            out.push(next);
            at += next.len_utf8();
            continue;
        };
        out.push(' ');
        at += end;
    }
    out
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().unwrap().len_utf8();
        }
    }
    at
}

/// Length of a quoted literal whose opening quote is one byte, escapes honoured.
fn quoted(rest: &str, open: usize) -> usize {
    let quote = rest.as_bytes()[0];
    let mut is_escaped = false;
    for (at, &byte) in rest.as_bytes().iter().enumerate().skip(open) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// `'a'` and `'\n'` are characters, `'a` is a lifetime.
fn is_char_literal(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    }
}

fn character(rest: &str) -> usize {
    if rest[1..].starts_with('\\') {
        return quoted(rest, 1);
    }
    2 + rest[1..].chars().next().unwrap().len_utf8()
}

/// Number of `#` of a raw string that starts at `at`.
fn raw_string(text: &str, at: usize) -> Option<usize> {
    let rest = text[at..].strip_prefix("br").or_else(|| text[at..].strip_prefix('r'))?;
    let is_part_of_a_name = text[..at].ends_with(is_name);
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    (!is_part_of_a_name && rest[hashes..].starts_with('"')).then_some(hashes)
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The code without items under `#[cfg(test)]`, and those items.
fn without_test_items(code: &str) -> (String, String) {
    const MARK: &str = "#[cfg(test)]";
    let (mut kept, mut tests, mut rest) = (String::new(), String::new(), code);
    while let Some(at) = rest.find(MARK) {
        kept.push_str(&rest[..at]);
        rest = &rest[at + MARK.len()..];
        let end = item_end(rest);
        tests.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    kept.push_str(rest);
    (kept, tests)
}

/// Where the item at the start of `code` ends: at a semicolon or at the brace that closes it.
fn item_end(code: &str) -> usize {
    let (mut round, mut curly) = (0_i32, 0_i32);
    for (at, character) in code.char_indices() {
        match character {
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            '{' => curly += 1,
            '}' => {
                curly -= 1;
                if curly == 0 {
                    return at + 1;
                }
            }
            ';' if round == 0 && curly == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// Names of the `mod name;` declarations.
fn declarations(code: &str) -> Vec<String> {
    let words = |text: &str| {
        text.split(|c: char| !is_name(c) && c != ';').map(str::to_owned).collect::<Vec<_>>()
    };
    let words: Vec<String> = words(code).into_iter().filter(|word| !word.is_empty()).collect();
    let pairs = words.iter().zip(words.iter().skip(1));
    pairs
        .filter(|(word, _)| *word == "mod")
        .filter_map(|(_, name)| name.strip_suffix(';').map(str::to_owned))
        .collect()
}

/// Rooms that `source` names, by `crate::` or by going up to the root with `super::`.
fn rooms_named(source: &Source) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for start in places(&source.code, "crate::") {
        named.extend(names_behind(&source.code[start..]));
    }
    for start in places(&source.code, "super::") {
        let mut rest = &source.code[start..];
        let mut ups = 1;
        while let Some(next) = rest.strip_prefix("super::") {
            rest = next;
            ups += 1;
        }
        // Inline modules make a chain look longer than it is; what it then names is no room.
        if ups == source.depth {
            let known = |name: &String| FLOORS.iter().any(|(room, _)| room == name);
            named.extend(names_behind(rest).into_iter().filter(known));
        }
    }
    named
}

/// Positions behind every `word` that stands by itself.
fn places<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_free = move |at: usize| !code[..at].ends_with(|c: char| is_name(c) || c == ':');
    code.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| is_free(*at))
        .map(|at| at + word.len())
}

/// The first name of a path, or of each path of a `{group}`.
fn names_behind(path: &str) -> Vec<String> {
    let name = |path: &str| path.trim().chars().take_while(|c| is_name(*c)).collect::<String>();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut names, mut depth, mut from) = (Vec::new(), 0, 0);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(name(&group[from..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(name(&group[from..at]));
                from = at + 1;
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

fn floor(room: &str) -> u8 {
    let found = FLOORS.iter().find(|(name, _)| *name == room);
    found.unwrap_or_else(|| panic!("room {room:?} has no floor: add it to FLOORS")).1
}

/// What is wrong with one file.
fn faults(source: &Source) -> Vec<String> {
    let own = floor(&source.room);
    let mut faults = Vec::new();
    for room in rooms_named(source) {
        if floor(&room) > own {
            faults.push(format!("{} (floor {own}) imports {room}", source.path));
        }
    }
    for (foreign, lowest) in FOREIGN {
        let path = format!("{foreign}::");
        if own < lowest && places(&source.code, &path).next().is_some() {
            faults.push(format!("{} (floor {own}) uses {foreign}", source.path));
        }
    }
    if asks_for_time(source)
        && !CLOCK_ROOMS.contains(&source.room.as_str())
        && !CLOCK_EXCEPTIONS.iter().any(|(path, _)| *path == source.path)
    {
        faults.push(format!("{} reads the machine's clock; take a Clock", source.path));
    }
    faults
}

fn asks_for_time(source: &Source) -> bool {
    ["Instant::now", "SystemTime::now", "UNIX_EPOCH.elapsed"]
        .iter()
        .any(|call| source.code.contains(call))
}

/// Files that only tests compile: `#[cfg(test)] mod tests;` and what lies below it.
fn test_files(sources: &[Source]) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    for source in sources {
        let folder = match source.path.strip_suffix("/mod.rs") {
            Some(folder) => folder.to_owned(),
            None => source.path.trim_end_matches(".rs").to_owned(),
        };
        for name in &source.declared_for_tests {
            let module = format!("{folder}/{name}");
            let is_in = |path: &str| {
                path == format!("{module}.rs") || path.starts_with(&format!("{module}/"))
            };
            files.extend(sources.iter().map(|s| s.path.clone()).filter(|path| is_in(path)));
        }
    }
    files
}

#[test]
fn every_file_is_visited_and_every_room_has_a_floor() {
    let sources = sources();
    assert!(sources.len() > 40, "only {} files were found", sources.len());
    let declared: usize = sources.iter().map(|source| source.declared.len()).sum();
    assert_eq!(sources.len(), declared + 1, "lib.rs, and one file for each `mod name;`");
    let seen: BTreeSet<&str> =
        sources.iter().map(|source| source.room.as_str()).filter(|room| *room != "lib").collect();
    let wanted: BTreeSet<&str> = FLOORS.iter().map(|(room, _)| *room).collect();
    assert_eq!(seen, wanted, "rooms on disk, rooms in FLOORS");
    let lib = sources.iter().find(|source| source.path == "lib.rs").unwrap();
    let in_lib: BTreeSet<&str> = lib.declared.iter().map(String::as_str).collect();
    assert_eq!(in_lib, wanted, "rooms of lib.rs, rooms in FLOORS");
}

#[test]
fn files_import_from_their_own_and_lower_floors_only() {
    let sources = sources();
    let tests = test_files(&sources);
    let judged: Vec<&Source> = sources
        .iter()
        .filter(|source| source.path != "lib.rs" && !tests.contains(&source.path))
        .collect();
    let named: usize = judged.iter().map(|source| rooms_named(source).len()).sum();
    assert!(judged.len() > 40 && named > 80, "{} files, {named} imports", judged.len());
    let faults: Vec<String> = judged.iter().flat_map(|source| faults(source)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_exception_is_still_needed() {
    let sources = sources();
    for (path, why) in CLOCK_EXCEPTIONS {
        let source = sources.iter().find(|source| source.path == path);
        assert!(source.is_some_and(asks_for_time), "{path} needs no exception ({why}): remove it");
    }
}

#[test]
fn the_scan_finds_what_it_is_for() {
    for (path, text, wanted) in [
        ("ids.rs", "use crate::hash;", "ids.rs (floor 0) imports hash"),
        ("hash.rs", "use crate::{error::Error, http::Reject};", "(floor 1) imports http"),
        ("http/mod.rs", "fn f() { crate::py::g() }", "(floor 2) imports py"),
        ("index/radix.rs", "use super::super::http;", "(floor 1) imports http"),
        ("error.rs", "use super::stream;", "(floor 0) imports stream"),
        ("text/cut.rs", "use tokio::sync::Notify;", "(floor 1) uses tokio"),
        ("http/serve.rs", "fn f(_: pyo3::Python<'_>) {}", "(floor 2) uses pyo3"),
        ("load/active.rs", "let at = std::time::Instant::now();", "reads the machine's clock"),
    ] {
        let found = faults(&read(path, text)).join("\n");
        assert!(found.contains(wanted), "{path}: {text}: {found:?}");
    }
}

#[test]
fn the_scan_overlooks_what_is_no_import() {
    for (path, text) in [
        ("ids.rs", "// use crate::http;\n/* crate::py::x /* nested */ tokio::x */ fn f() {}"),
        ("ids.rs", r##"const A: &str = "crate::http"; const B: &str = r#"crate::py " x"#;"##),
        ("ids.rs", "const A: char = '\"'; const B: char = '\\''; // \"\nuse crate::error;"),
        ("ids.rs", "#[cfg(test)]\nmod tests { use crate::http; fn f() { g(&[1; 2]); } }"),
        ("ids.rs", "#[cfg(test)]\nuse crate::http;\nfn f<'a>(x: &'a str) -> &'a str { x }"),
        ("codec/router.rs", "mod hash { pub(in super::super) fn f() {} use super::super::Kind; }"),
        ("http/frontend/app.rs", "use super::super::metrics; use crate::catalog::Catalog;"),
        ("py/mod.rs", "use crate::http::serve; use pyo3::prelude::*; use tokio::net::TcpListener;"),
    ] {
        assert_eq!(faults(&read(path, text)), Vec::<String>::new(), "{path}: {text}");
    }
    let source = read("index/mod.rs", "mod walk;\n#[cfg(test)]\nmod tests;\nmod inline { }");
    assert_eq!(source.declared, ["walk", "tests"]);
    assert_eq!(source.declared_for_tests, ["tests"]);
}

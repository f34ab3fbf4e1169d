//! The order of the rooms: a file names its own room and those before it only.
//!
//! A scan of lines for `crate::<room>`. Comments are passed over, and so are test modules, which end
//! their files.

use std::fs;
use std::path::{Path, PathBuf};

/// Every room, lowest first.
const ORDER: [&str; 20] = [
    "named",
    "cache",
    "error",
    "settings",
    "ids",
    "clock",
    "log_limit",
    "event",
    "hash",
    "codec",
    "stream",
    "repair",
    "index",
    "load",
    "policy",
    "fair",
    "text",
    "catalog",
    "select",
    "fleet",
];

/// Files that may ask the machine for the time.
const CLOCKS: [(&str, &str); 3] = [
    ("clock.rs", "it is the clock"),
    ("catalog/command.rs", "the deadline of a blocking wait; nothing is decided by it"),
    ("text/template.rs", "templates print today's date; tests replace the clock"),
];

/// Path within `src` and text of every file but those of tests, without its test module.
fn sources() -> Vec<(String, String)> {
    let mut sources = Vec::new();
    let mut folders = vec![PathBuf::from("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix("src").expect("below src").display().to_string();
            if !Path::new(&name).with_extension("").iter().any(|part| part == "tests") {
                let text = fs::read_to_string(&path).expect("text");
                let code = text.split("mod tests {").next().unwrap_or_default();
                sources.push((name, code.to_owned()));
            }
        }
    }
    sources
}

fn lines(code: &str) -> impl Iterator<Item = &str> {
    code.lines().map(str::trim).filter(|line| !line.starts_with("//"))
}

#[test]
fn a_file_names_its_own_and_lower_rooms_only() {
    let rank = |room: &str| ORDER.iter().position(|known| *known == room);
    let (mut named, mut rooms) = (0, Vec::new());
    for (path, code) in sources().iter().filter(|(path, _)| path != "lib.rs") {
        let own = path.split(['/', '.']).next().unwrap_or_default();
        let floor = rank(own).unwrap_or_else(|| panic!("{own} has no place in ORDER"));
        rooms.push(own.to_owned());
        for line in lines(code) {
            for rest in line.split("crate::").skip(1) {
                let room = rest
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next()
                    .unwrap_or_default();
                let other =
                    rank(room).unwrap_or_else(|| panic!("{path}: write crate::<room>: {line}"));
                assert!(other <= floor, "{path} is below {room}: {line}");
                named += 1;
            }
        }
    }
    assert!(rooms.len() > 150 && named > 200, "{} files, {named} names", rooms.len());
    assert!(ORDER.iter().all(|room| rooms.iter().any(|seen| seen == room)), "every room is there");
}

#[test]
fn only_clocks_ask_the_machine_for_the_time() {
    let asks = |code: &str| {
        lines(code).any(|line| line.contains("Instant::now") || line.contains("SystemTime::now"))
    };
    let mut found: Vec<String> =
        sources().into_iter().filter(|(_, code)| asks(code)).map(|(path, _)| path).collect();
    found.sort();
    let mut allowed = CLOCKS.map(|(path, _)| path);
    allowed.sort_unstable();
    assert_eq!(found, allowed, "take a Clock instead");
}
